"""Models with a random LoRA that acts on the rows that a gate shows."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

from peftlab.methods.inject import inject, make_config
from peftlab.methods.lora.layers import Gate, set_gate


def gated_model(model: Any, std: float, *, seed: int = 0, **fields: Any) -> tuple[Any, Gate]:
    """Return a copy of a model with a LoRA on its linear maps, drawn, B with ``std``, and the LoRA's gate."""
    copy, generator = deepcopy(model), torch.Generator().manual_seed(seed)
    inject(copy, make_config("lora", **{"r": 4, "target_modules": "all-linear", **fields}))
    for name, parameter in copy.named_parameters():
        if ".lora_" in name:
            drawn = torch.empty(parameter.shape).normal_(std=std if ".lora_B" in name else 0.3, generator=generator)
            parameter.data.copy_(drawn)
    gate = Gate()
    set_gate(copy, gate)
    return copy, gate
