"""The linear probe: the baseline in which the task head alone trains."""

from __future__ import annotations

from torch import nn

from peftlab.errors import PeftlabError
from peftlab.methods.config import HeadConfig
from peftlab.methods.targets import Plan, fully_trained, parameters_under
from peftlab.models.architectures import model_type


def plan(model: nn.Module, config: HeadConfig) -> Plan:
    """Train the task head and what ``modules_to_save`` names.

    Raises:
        PeftlabError: the model has no task head and no module is named.
    """
    whole = fully_trained(model, config.modules_to_save)
    if not whole:
        raise PeftlabError(f"method head: {model_type(model)} has no task head; name modules_to_save")
    return Plan(train=parameters_under(model, whole))
