"""The two baselines of every comparison: all parameters, and the task head alone."""

from __future__ import annotations

from typing import Literal

from torch import nn

from peftlab.errors import PeftlabError
from peftlab.methods.config import MethodConfig
from peftlab.methods.heads import parameters_under, trained_whole
from peftlab.methods.plan import Plan
from peftlab.methods.targets import model_type


class FullConfig(MethodConfig):
    """Full finetuning: every parameter trains."""

    name: Literal["full"] = "full"


class HeadConfig(MethodConfig):
    """Linear probe: the task head trains, the body is frozen."""

    name: Literal["head"] = "head"


def plan_full(model: nn.Module, config: FullConfig) -> Plan:
    """Train every parameter."""
    trained_whole(model, config.modules_to_save)
    return Plan(train=[name for name, _ in model.named_parameters()])


def plan_head(model: nn.Module, config: HeadConfig) -> Plan:
    """Train the task head and what ``modules_to_save`` names.

    Raises:
        PeftlabError: the model has no task head and no module is named.
    """
    whole = trained_whole(model, config.modules_to_save)
    if not whole:
        raise PeftlabError(f"method head: {model_type(model)} has no task head; name modules_to_save")
    return Plan(train=parameters_under(model, whole))
