"""Drafting with the target's first layers and further ones of the draft's own."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from peftlab.decoding.drafters.base import Proposal, Row, TargetState, Verified
from peftlab.decoding.drafters.model_drafter import ModelDrafter
from peftlab.decoding.drafters.own_layers.parts import AdaptedExit


@dataclass(kw_only=True)
class AdaptedExitDrafter(ModelDrafter):
    """An early exit with layers of its own after it (Kangaroo, Liu et al. 2024, arXiv 2404.18911).

    Target and draft read a token's first layers once between them. The draft's own layers take the states of accepted
    tokens from the verification, and so the target's engine must report the states that enter the layer after the exit.

    Attributes:
        adapted: the layers; ``engine``, which may be one around it, runs them.
    """

    adapted: AdaptedExit
    shares_cache: bool = field(default=True, init=False)
    # Of each row: how many of its tokens the draft's own layers have read, and the states of those after them.
    _held: dict[int, int] = field(init=False, repr=False, default_factory=dict)
    _states: dict[int, Tensor] = field(init=False, repr=False, default_factory=dict)

    def start(self, rows: list[Row], state: TargetState) -> None:
        self._held, self._states = {}, {}
        super().start(rows, state)

    def join(self, rows: list[Row], state: TargetState) -> None:
        super().join(rows, state)
        self._held |= {row.index: 0 for row in rows}
        self._states |= {row.index: new for row, new in zip(rows, state.features, strict=True) if new is not None}

    def propose(self, rows: list[Row], budgets: list[int]) -> Proposal:
        self._read_states(rows)
        return super().propose(rows, budgets)

    def _read_states(self, rows: list[Row]) -> None:
        """Let the draft's own layers read what was accepted since they last drafted for these rows."""
        starts, news = [self._held[row.index] for row in rows], [self._states.pop(row.index, None) for row in rows]
        known = [new for new in news if new is not None]
        if not known:
            return
        states = pad_sequence([known[0][:0] if new is None else new for new in news], batch_first=True)
        block = self._cache.block([row.slot for row in rows], starts, states.shape[1])
        self.adapted.read(self._cache, states, block)
        for row, new in zip(rows, news, strict=True):
            self._held[row.index] += 0 if new is None else len(new)

    def accept(self, rows: list[Row], verified: Verified) -> None:
        super().accept(rows, verified)
        features = verified.output.features
        assert features is not None
        for i, (row, path) in enumerate(zip(rows, verified.paths, strict=True)):
            new, old = features[i, [0, *(node + 1 for node in path)]], self._states.get(row.index)
            self._states[row.index] = new if old is None else torch.cat((old, new))

    def select(self, slots: list[int]) -> None:
        self.adapted.own(self._cache).select(slots)
