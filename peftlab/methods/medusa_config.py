"""The configuration of Medusa heads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from peftlab.methods.config import MethodConfig
from peftlab.methods.lora.config import LoraConfig


class MedusaConfig(MethodConfig):
    """K heads on the last hidden state, each guessing one token further ahead."""

    name: Literal["medusa"] = "medusa"
    heads: int = Field(default=4, ge=1, description="K: head i (from 0) predicts the token i + 2 places on.")
    bias: bool = Field(default=False, description="Whether each head's inner map W1 has a bias.")
    shared_head: bool = Field(
        default=False,
        description="Every head answers through the target's own LM head, which stays frozen and is not saved with "
        "the adapter (multi-token prediction); false: each trains a copy W2.",
    )
    decay: float = Field(default=0.8, gt=0, le=1, description="Head i's loss is weighted decay^i.")
    trunk: LoraConfig | None = Field(
        default=None,
        description="Medusa-2: LoRA on the model itself, trained along (a method lora section); null: frozen.",
    )
    preserve: float = Field(
        default=5.0,
        ge=0,
        description="Medusa-2: weight of KL(base | trained model), which keeps the model what it was (5 is the "
        "paper's 1 : 0.2).",
    )

    def mismatch(self, shapes: Mapping[str, Sequence[int]]) -> str:
        found = {match[1] for name in shapes if (match := re.search(r"medusa_heads\.blocks\.(\d+)\.", name))}
        if len(found) != self.heads:
            return f"{self.heads} heads, and there are {len(found)}"
        return self.trunk.mismatch(shapes) if self.trunk is not None else ""
