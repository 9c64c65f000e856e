"""Reading prompts of different lengths into a cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peftlab.decoding.engines.base import Engine
from peftlab.decoding.engines.cache import KVCache


def prefill(
    engine: Engine, cache: KVCache, sequences: Sequence[Sequence[int]], slots: Sequence[int]
) -> list[Tensor | None]:
    """Read all tokens but the last of each sequence into its slot of the cache.

    Returns:
        The hidden state [H] of the last token read of each sequence; None for a sequence of one token.
    """
    lengths = [len(sequence) - 1 for sequence in sequences]
    if not any(lengths):
        return [None] * len(sequences)
    block = cache.block(slots, [0] * len(sequences), max(lengths))
    tokens = right_padded([sequence[:-1] for sequence in sequences], block.n).to(engine.device)
    keep = sorted({length - 1 for length in lengths if length})
    hidden = engine.forward(cache, tokens, block, keep).hidden
    return [hidden[i, keep.index(n - 1)] if n else None for i, n in enumerate(lengths)]


def right_padded(sequences: Sequence[Sequence[int]], n: int, filler: int = 0) -> Tensor:
    """Return sequences of at most n tokens as [b, n]."""
    return torch.tensor([[*s, *[filler] * (n - len(s))] for s in sequences], dtype=torch.long)
