"""Full finetuning: the baseline in which every parameter trains."""

from __future__ import annotations

from torch import nn

from peftlab.methods.config import FullConfig
from peftlab.methods.targets import Plan, fully_trained


def plan(model: nn.Module, config: FullConfig) -> Plan:
    """Train every parameter.

    Raises:
        PeftlabError: ``modules_to_save`` names a module that does not exist.
    """
    fully_trained(model, config.modules_to_save)
    return Plan(train=[name for name, _ in model.named_parameters()])
