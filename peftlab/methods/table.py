"""The table of methods: adding one is a file beside this one and a row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from peftlab.methods import full, lora
from peftlab.methods.config import MethodConfig
from peftlab.methods.plan import Plan


@dataclass(frozen=True)
class Method:
    """One method.

    Attributes:
        config: its pydantic configuration; ``name`` tells it apart in a recipe.
        plan: decides what it changes in a model, touching nothing.
        folds: whether what it trains can be folded into plain weights.
    """

    config: type[MethodConfig]
    plan: Callable[[nn.Module, Any], Plan]
    folds: bool = True


METHODS: dict[str, Method] = {
    "lora": Method(lora.LoraConfig, lora.plan),
    "full": Method(full.FullConfig, full.plan_full),
    "head": Method(full.HeadConfig, full.plan_head),
}
