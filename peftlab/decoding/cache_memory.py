"""What the caches of target and draft take in memory, by the length of the text and the number of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from peftlab.decoding.engines.base import Engine
from peftlab.decoding.engines.cache import Block
from peftlab.decoding.engines.prefill import empty_cache
from peftlab.decoding.engines.windowed_cache import slots_of
from peftlab.decoding.table import Window


@dataclass(frozen=True)
class CacheMemory:
    """Bytes of the caches, without what an encoder-decoder model keeps of its prompts.

    Attributes:
        batch: sequences. tokens: of each. target: bytes. draft: bytes; None without a draft model.
    """

    batch: int
    tokens: int
    target: int
    draft: int | None


def cache_memory(
    target: Engine, draft: Engine | None, batches: Sequence[int], lengths: Sequence[int], window: Window | None = None
) -> list[CacheMemory]:
    """Return the bytes for each batch size and length.

    Args:
        window: of the draft; None: it sees all tokens.
    """

    def of(engine: Engine, tokens: int) -> int:
        fixed, each = _bytes(engine)
        return fixed + each * tokens

    stored = {n: n if window is None else min(n, slots_of(window)) for n in lengths}
    return [
        CacheMemory(b, n, b * of(target, n), None if draft is None else b * of(draft, stored[n]))
        for b in batches
        for n in dict.fromkeys(lengths)
    ]


def _bytes(engine: Engine) -> tuple[int, int]:
    """Bytes of a sequence's cache: whatever its length (states), and per token."""
    found = []
    for capacity in (1, 2):
        cache = empty_cache(engine, capacity, [[0]])
        engine.forward(cache, torch.zeros(1, 1, dtype=torch.long, device=engine.device), Block((0,), 1))
        cache.settle(0, 1)
        found.append(cache.bytes)
    one, two = found
    return 2 * one - two, two - one
