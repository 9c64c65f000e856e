"""Which sublayers of a model a draft can do without, found while it decodes (SWIFT, Xia et al. 2024, arXiv 2410.06916).

Sublayers are numbered: 2i is the attention of layer i, 2i + 1 its MLP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

_SHARE = 0.45  # of the sublayers that may be left out
_EVERY = 25  # tries from one modelled set to the next
_ENOUGH, _MISSES, _TRIES = 0.95, 300, 1000
_CANDIDATES = 256  # random sets of which the model takes the most promising
_BOLDNESS = 2.576  # standard deviations above the mean: how much a set counts for not being known


@dataclass
class SkipSearch:
    """Tries sets of sublayers, and keeps the best.

    All sets have the same size, .45 of the sublayers outside the first and the last layer. The first is spread evenly;
    the others are random, but every 25th is the most promising of many by a Gaussian process on the scores so far. The
    search ends at a score of .95, after 300 tries without a better one, or after 1000.

    Attributes:
        layers: of the model, 3 or more. best: the best set. score: of it; 0 before the first try.
        tries: so far.
    """

    layers: int
    best: frozenset[int] = field(init=False)
    score: float = field(default=0.0, init=False)
    tries: int = field(default=0, init=False)
    _misses: int = field(default=0, init=False)
    _tried: list[Tensor] = field(default_factory=list, init=False, repr=False)
    _scores: list[float] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self._places = 2 * (self.layers - 2)
        self._size = max(1, round(_SHARE * self._places))
        self._random = torch.Generator().manual_seed(0)
        self._first = torch.zeros(self._places)
        self._first[[math.floor((i + 0.5) * self._places / self._size) for i in range(self._size)]] = 1
        self.best = self._numbers(self._first)

    @property
    def over(self) -> bool:
        """Whether nothing is tried any more."""
        return self.score >= _ENOUGH or self._misses >= _MISSES or self.tries >= _TRIES

    def candidate(self) -> frozenset[int]:
        """Return the next set to try; tell ``record`` its score before the next call."""
        if not self._tried:
            chosen = self._first
        elif len(self._tried) % _EVERY:
            chosen = self._drawn()
        else:
            sets = torch.stack([self._drawn() for _ in range(_CANDIDATES)])
            promise = upper_bound(torch.stack(self._tried[: self.tries]), torch.tensor(self._scores), sets)
            chosen = sets[int(promise.argmax())]
        self._tried.append(chosen)
        return self._numbers(chosen)

    def record(self, score: float) -> None:
        """Take the score, from 0 to 1, of the set that ``candidate`` returned last."""
        self._scores.append(score)
        self.tries += 1
        self._misses += 1
        if score > self.score:
            self.score, self.best, self._misses = score, self._numbers(self._tried[-1]), 0

    def _drawn(self) -> Tensor:
        chosen = torch.zeros(self._places)
        chosen[torch.randperm(self._places, generator=self._random)[: self._size]] = 1
        return chosen

    def _numbers(self, chosen: Tensor) -> frozenset[int]:
        """The numbers of the sublayers: those of the first layer are not among the places."""
        return frozenset(2 + place for place in chosen.nonzero()[:, 0].tolist())


def upper_bound(tried: Tensor, scores: Tensor, sets: Tensor) -> Tensor:
    """Return mean + 2.576 standard deviations of the scores of ``sets`` [m, d], by those of ``tried`` [n, d].

    A Gaussian process with a Matérn kernel (5/2) of unit length in units of the mean distance of random sets, on scores
    [n] normalised to mean 0 and deviation 1.
    """
    tried, sets, scores = tried.double(), sets.double(), scores.double()
    spread = scores.std(correction=0).clamp_min(1e-6)
    unit = torch.cdist(sets, sets).mean().clamp_min(1e-6)

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        d = math.sqrt(5) * torch.cdist(a, b) / unit
        return (1 + d + d * d / 3) * (-d).exp()

    known = kernel(tried, tried) + 1e-3 * torch.eye(len(tried), dtype=torch.float64)
    across = kernel(sets, tried)
    solved = torch.linalg.solve(known, across.mT).mT  # [m, n]
    mean = solved @ ((scores - scores.mean()) / spread)
    deviation = (1 - (solved * across).sum(1)).clamp_min(0).sqrt()
    return mean + _BOLDNESS * deviation
