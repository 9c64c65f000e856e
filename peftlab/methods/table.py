"""The table of methods: adding one is a file beside this one and a row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from peftlab.methods import full, medusa
from peftlab.methods.bitfit import plan as bitfit
from peftlab.methods.config import MethodConfig
from peftlab.methods.houlsby import plan as houlsby
from peftlab.methods.lora import plan as lora
from peftlab.methods.plan import Plan


@dataclass(frozen=True)
class Method:
    """One method.

    Attributes:
        config: its pydantic configuration; ``name`` tells it apart in a recipe.
        plan: decides what it changes in a model, touching nothing.
        folds: whether what it trains can be folded into plain weights.
        lr_ratio: multiples of the learning rate by a parameter's last name, for a configuration.
    """

    config: type[MethodConfig]
    plan: Callable[[nn.Module, Any], Plan]
    folds: bool = True
    lr_ratio: Callable[[Any], dict[str, float]] = lambda config: {}


METHODS: dict[str, Method] = {
    "lora": Method(lora.LoraConfig, lora.plan, lr_ratio=lora.lr_ratio),
    "houlsby": Method(houlsby.HoulsbyConfig, houlsby.plan, folds=False),
    "bitfit": Method(bitfit.BitFitConfig, bitfit.plan),
    "medusa": Method(medusa.MedusaConfig, medusa.plan, folds=False, lr_ratio=medusa.lr_ratio),
    "full": Method(full.FullConfig, full.plan_full),
    "head": Method(full.HeadConfig, full.plan_head),
}
