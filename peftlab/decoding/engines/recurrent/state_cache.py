"""The states of sequences in a state-space model: after their accepted tokens, and after the drafted ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from peftlab.decoding.engines.cache import KVCache
from peftlab.decoding.engines.recurrent.mixers import State

Layers = Sequence[State]
"""A state of each layer."""


class StateCache(KVCache):
    """Of each row the state before slot s, for every s from which it may continue.

    A state contains all tokens before it, so that none can be taken back from it: the states after drafted tokens are
    kept until it is known which of them were accepted (``settle``).

    Args:
        batch: rows. blank: the state of each layer before the first token.
    """

    def __init__(self, batch: int, capacity: int, blank: Layers):
        super().__init__(0, batch, capacity)
        self._blank = blank
        self._saved: list[dict[int, Layers]] = [{} for _ in range(batch)]

    @property
    def bytes(self) -> int:
        return sum(z.nbytes for row in self._saved for layers in row.values() for state in layers for z in state)

    def load(self, rows: Sequence[int], starts: Sequence[int]) -> list[State]:
        """Return the states before these slots, a layer's [b, ...]; a row that starts at 0 begins anew."""
        for row, start in zip(rows, starts, strict=True):
            if start == 0:
                self._saved[row] = {0: self._blank}
        each = [self._saved[row][start] for row, start in zip(rows, starts, strict=True)]
        return [State(*map(torch.stack, zip(*layer, strict=True))) for layer in zip(*each, strict=True)]

    def save(self, row: int, slot: int, state: Layers) -> None:
        """Store the state before a slot."""
        self._saved[row][slot] = state

    def copy(self, rows: Sequence[int], capacity: int) -> StateCache:
        copies = StateCache(len(rows), capacity, self._blank)
        copies._saved = [dict(self._saved[row]) for row in rows]
        return copies

    def settle(self, row: int, start: int, nodes: Sequence[int] = ()) -> None:
        saved = self._saved[row]
        state = saved[start + nodes[-1] + 1] if nodes else saved.get(start, self._blank)
        # What was computed for several rows and tokens at once stays in memory as long as a part of it does.
        self._saved[row] = {start + len(nodes): [State(*(z.clone() for z in layer)) for layer in state]}

    def select(self, rows: Sequence[int]) -> None:
        self.batch = len(rows)
        self._saved = [self._saved[row] for row in rows]
