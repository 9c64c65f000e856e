"""Training on the examples that a score chooses, in rounds (selection via proxy, arXiv 1906.11829).

A round trains on all examples chosen up to it. Of K rounds the r-th (from 1) has r·b/K of the b examples that are
chosen in all, and steps in proportion: every round passes as often over its examples. A run takes as many steps as one
on b examples drawn at random, its control; what scoring costs comes on top.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import count

from peftlab.errors import PeftlabError
from peftlab.tasks.batches import seeded_order
from peftlab.training.config import TrainConfig
from peftlab.training.order import DRAWN, make_plan, share_of

Chosen = list[list[int]]
"""The examples that each round added, in the order of their numbers."""


class Selection:
    """The rounds of a run, as a pure function of its settings; what was chosen is its progress.

    Attributes:
        ends: number of steps at the end of each round. sizes: examples chosen up to each.
    """

    def __init__(self, lengths: Sequence[int], settings: TrainConfig, capacity: int, total: int) -> None:
        """Plan the rounds of a run of ``total`` steps.

        Raises:
            PeftlabError: a round would have no example or no step.
        """
        sample = settings.sample
        assert sample is not None
        self._lengths, self._settings, self._capacity = list(lengths), settings, capacity
        self._drawn_first = sample.scorer is None
        kept, rounds = share_of(len(lengths), sample.keep), sample.times
        self.sizes = [kept * (r + 1) // rounds for r in range(rounds)]
        self.ends = [math.ceil(total * (r + 1) * (r + 2) / (rounds * (rounds + 1))) for r in range(rounds)]
        for what, counts in (("examples", self.sizes), ("steps", self.ends)):
            if any(one == other for one, other in zip([0, *counts], counts, strict=False)):
                raise PeftlabError(
                    f"train.sample.rounds: {rounds} rounds need more than {counts[-1]} {what}; set fewer rounds"
                )

    def begins(self, step: int, chosen: Chosen) -> bool:
        """Return whether the examples of the round of ``step`` (from 0) are still to be chosen."""
        return bisect_right(self.ends, step) == len(chosen)

    def choose(self, chosen: Chosen, score: Callable[[list[int]], Sequence[float]]) -> list[int]:
        """Return the examples that the next round adds: those of the lowest score, the lower number first if equal.

        Args:
            chosen: by the rounds before. score: of examples, a number each; the first round draws without, unless a
                scorer has trained before.
        """
        size = self.sizes[len(chosen)] - sum(map(len, chosen))
        if self._drawn_first and not chosen:
            return sorted(seeded_order(len(self._lengths), self._settings.seed, 0, DRAWN)[:size])
        before = {i for those in chosen for i in those}
        left = [i for i in range(len(self._lengths)) if i not in before]
        scores = dict(zip(left, score(left), strict=True))
        return sorted(sorted(left, key=lambda i: (scores[i], i))[:size])

    def batches(self, step: int, chosen: Chosen) -> Iterator[list[int]]:
        """Yield the batches from ``step`` to the end of its round."""
        number = bisect_right(self.ends, step)
        begin, end = ([0, *self.ends])[number], self.ends[number]
        members = sorted(i for those in chosen[: number + 1] for i in those)
        plan = make_plan(self._lengths, members, self._settings, self._capacity)
        place = begin
        for epoch in count():
            for batch in plan((number << 32) + epoch):  # no two rounds take the same order
                if place >= step:
                    yield batch
                place += 1
                if place == end:
                    return


def make_selection(lengths: Sequence[int], settings: TrainConfig, capacity: int, total: int) -> Selection | None:
    """Return the rounds that ``settings`` ask for; None where no score chooses examples.

    Args:
        capacity: as for ``make_order``. total: steps of the run.
    """
    if settings.sample is None or not settings.sample.chosen:
        return None
    return Selection(lengths, settings, capacity, total)
