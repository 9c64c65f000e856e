"""The target with a gated LoRA as a draft in the target's cache."""

from __future__ import annotations

import torch
from torch import Tensor

from peftlab.decoding.engines.base import Engine, Output, Wrapper
from peftlab.decoding.engines.cache import Block, KVCache
from peftlab.methods.lora.gate import Gate


class MaskedPass(Wrapper):
    """An engine that reads one token of each row as the target, and those behind it, which are masks, with the LoRA.

    Args:
        engine: the target's, with a gated LoRA. gate: of that.
    """

    def __init__(self, engine: Engine, gate: Gate):
        super().__init__(engine, ", masks with a LoRA")
        self._gate = gate

    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """See ``Engine.forward``."""
        masks = torch.ones_like(tokens, dtype=torch.bool)
        masks[:, 0] = False
        with self._gate.over(masks):
            return self._engine.forward(cache, tokens, block, keep)
