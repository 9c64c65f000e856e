"""Reading prompts of different lengths into a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    hidden: list[Tensor | None] = [None] * len(sequences)
    features: list[list[Tensor]] = [[] for _ in sequences]
    for rows, first, n in spans(lengths, cache.most):
        counts = [min(n, lengths[row] - first) for row in rows]
        keep = sorted({count - 1 for count in counts})
        parts = [sequences[row][first : first + count] for row, count in zip(rows, counts, strict=True)]
        block = cache.block([slots[row] for row in rows], [first] * len(rows), n)
        output = engine.forward(cache, right_padded(parts, n).to(engine.device), block, keep)
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            hidden[row] = output.hidden[i, keep.index(count - 1)]
            if output.features is not None:
                features[row].append(output.features[i, :count])
    return Prefilled(hidden, [torch.cat(parts) if parts else None for parts in features])


def spans(counts: Sequence[int], most: int | None) -> Iterator[tuple[list[int], int, int]]:
    """Yield how rows of ``counts`` tokens are read: which rows, from which of their tokens, and how many tokens.

    Args:
        most: tokens at once; None for all.
    """
    longest = max(counts)
    for first in range(0, longest, most or max(1, longest)):
        yield [i for i, count in enumerate(counts) if count > first], first, min(longest - first, most or longest)


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
