"""Drafting with the target itself, some of its sublayers left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from peftlab.decoding.drafters.base import PossibleDraft, Row, Verified
from peftlab.decoding.drafters.model_drafter import ModelDrafter
from peftlab.decoding.drafters.own_layers.parts import Skipping
from peftlab.decoding.drafters.own_layers.skip_search import SkipSearch
from peftlab.decoding.sampling import largest

_WINDOW = 32  # tokens on which a set is tried


@dataclass(kw_only=True)
class Swift(ModelDrafter):
    """The target without the sublayers that its own output shows to matter least; nothing is trained.

    SWIFT (Xia et al. 2024, arXiv 2410.06916). After each step one more set of sublayers is tried on the newest tokens
    of the first sequence, in one pass: its score is the share of them that it predicts. All sequences use one set.

    Attributes:
        layers: the target without some sublayers; ``engine``, which may be one around it, runs it.
        search: what was tried, and the best; may be shared by drafters one after the other.
    """

    layers: Skipping
    search: SkipSearch
    name: str = "swift"
    shares_cache: bool = field(default=True, init=False)
    least: float = 0.8

    def __post_init__(self) -> None:
        self.layers.skipped = self.search.best

    def possible(self, acceptance: Sequence[float], verification: Sequence[float]) -> list[PossibleDraft]:
        """Return none: how often a token is accepted changes with the sets."""
        return []

    def accept(self, rows: list[Row], verified: Verified) -> None:
        super().accept(rows, verified)
        row = rows[0]
        if not self.search.over and len(row.tokens) - row.prompt_length >= _WINDOW:
            self.layers.skipped = self.search.candidate()
            self.search.record(self._predicted(row))
            self.layers.skipped = self.search.best

    def _predicted(self, row: Row) -> float:
        """The share of the newest tokens of a row that are predicted; the cache is as before afterwards."""
        read, written = row.tokens[-_WINDOW - 1 : -1], row.tokens[-_WINDOW:]
        start = len(row.tokens) - _WINDOW - 1
        device = self.engine.device
        with self._cache.restored(row.slot, start, _WINDOW):
            block = self._cache.block([row.slot], [start], _WINDOW)
            logits = self.engine.forward(self._cache, torch.tensor([read], device=device), block).logits[0]
        return float((largest(logits) == torch.tensor(written, device=device)).float().mean())
