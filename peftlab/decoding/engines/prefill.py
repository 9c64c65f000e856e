"""Reading prompts of different lengths into a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peftlab.decoding.engines.base import Engine
from peftlab.decoding.engines.cache import KVCache


@dataclass(frozen=True)
class Prefilled:
    """What was read of each sequence: all tokens but the last.

    Attributes:
        hidden: state [H] of the last token read; None for a sequence of one token.
        features: [length - 1, F] of all tokens read; None for a sequence of one token, or an engine without features.
    """

    hidden: list[Tensor | None]
    features: list[Tensor | None]


def prefill(engine: Engine, cache: KVCache, sequences: Sequence[Sequence[int]], slots: Sequence[int]) -> Prefilled:
    """Read all tokens but the last of each sequence into its slot of the cache."""
    lengths = [len(sequence) - 1 for sequence in sequences]
    if not any(lengths):
        return Prefilled([None] * len(sequences), [None] * len(sequences))
    block = cache.block(slots, [0] * len(sequences), max(lengths))
    tokens = right_padded([sequence[:-1] for sequence in sequences], block.n).to(engine.device)
    keep = sorted({length - 1 for length in lengths if length})
    output = engine.forward(cache, tokens, block, keep)
    features = output.features
    return Prefilled(
        [output.hidden[i, keep.index(n - 1)] if n else None for i, n in enumerate(lengths)],
        [features[i, :n] if n and features is not None else None for i, n in enumerate(lengths)],
    )


def empty_cache(engine: Engine, capacity: int, sources: Sequence[Sequence[int]]) -> KVCache:
    """Return a cache with a row for each of the ``sources``, the prompts that an encoder-decoder engine reads.

    Args:
        capacity: slots per row. sources: empty or not, they count as rows alone for any other engine.
    """
    context = None if engine.encoder is None else engine.encoder.encode(sources)
    return engine.new_cache(len(sources), capacity, context)


def right_padded(sequences: Sequence[Sequence[int]], n: int, filler: int = 0) -> Tensor:
    """Return sequences of at most n tokens as [b, n]."""
    return torch.tensor([[*s, *[filler] * (n - len(s))] for s in sequences], dtype=torch.long)
