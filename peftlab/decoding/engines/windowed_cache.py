"""A key-value cache of constant size: a sequence's first tokens and its last ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from peftlab.decoding.engines.cache import Block, KVCache
from peftlab.decoding.table import Window
from peftlab.decoding.trees import TreeShape

_AT_ONCE = 128  # tokens of a block; and how many may be taken back


class WindowedCache(KVCache):
    """Slots for the first tokens of each row, and a ring of slots for those that follow them.

    The ring has more slots than the window has tokens: what a block writes must not take the place of what its first
    token sees, nor drafted tokens that are rejected that of tokens seen without them.
    """

    most = _AT_ONCE

    def __init__(self, layers: int, batch: int, capacity: int, window: Window):
        super().__init__(layers, batch, capacity)
        self.window, self.ring = window, window.last + _AT_ONCE
        self.slots = min(capacity, slots_of(window))

    def block(self, slots: Sequence[int], starts: Sequence[int], n: int, tree: TreeShape | None = None) -> Block:
        whole = tuple(slots) == tuple(range(self.batch))
        return _WindowedBlock(
            tuple(starts), n, None if whole else tuple(slots), tree, window=self.window, ring=self.ring
        )


def slots_of(window: Window) -> int:
    """Return how many slots of a row a window takes, in a text that is longer than that."""
    return window.sinks + window.last + _AT_ONCE


@dataclass(frozen=True)
class _WindowedBlock(Block):
    """New tokens whose slots are in a ring, once the text is longer than that.

    Attributes:
        window: what each of them sees. ring: slots after those of the first tokens.
    """

    window: Window = field(kw_only=True)
    ring: int = field(kw_only=True)

    @property
    def end(self) -> int:
        return min(super().end, self.window.sinks + self.ring)

    @property
    def even(self) -> bool:
        return super().even and super().end <= self.window.sinks + self.ring

    def slots(self, device: torch.device) -> Tensor:
        place, sinks = super().slots(device), self.window.sinks
        return torch.where(place < sinks, place, sinks + (place - sinks) % self.ring)

    def visible(self, window: int | None, device: torch.device) -> Tensor | None:
        sinks, last = self.window.sinks, self.window.last
        if super().end <= sinks + last:
            return super().visible(window, device)
        newest = torch.tensor(self.starts, device=device)[:, None] + self.n - 1
        slot = torch.arange(self.end, device=device)
        stored = torch.where(slot < sinks, slot, newest - (newest - slot) % self.ring)[:, None]  # [b, 1, end]
        positions = torch.tensor(self.starts, device=device)[:, None] + torch.arange(self.n, device=device)
        behind = positions[:, :, None] - stored  # [b, n, end]
        seen = (behind >= 0) & ((slot < sinks) | ((behind < last) & (stored >= sinks)))
        return (seen if window is None else seen & (behind < window))[:, None]
