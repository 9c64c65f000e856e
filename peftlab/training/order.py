"""The examples of each optimiser step: a pure function of lengths, settings and seed."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from peftlab.errors import PeftlabError
from peftlab.tasks.batches import epoch_batches, token_batches
from peftlab.tasks.packing import packed_batches
from peftlab.training.config import TrainConfig


@dataclass(frozen=True)
class Order:
    """The global batches of a run.

    Attributes:
        plan: epoch number to that epoch's batches of example indices.
        ends: number of steps at the end of each epoch; the last epoch may end after ``total``.
        total: optimiser steps of the run.
    """

    plan: Callable[[int], list[list[int]]]
    ends: list[int]
    total: int

    def epoch(self, step: int) -> float:
        """Return the number of epochs completed after ``step`` steps."""
        whole = bisect_right(self.ends, step)
        begin = self.ends[whole - 1] if whole else 0
        return float(whole) if step == begin else whole + (step - begin) / (self.ends[whole] - begin)

    def batches(self, start: int) -> Iterator[list[int]]:
        """Yield the batches of steps ``start`` to ``total``."""
        begin = 0
        for epoch, end in enumerate(self.ends):
            if start < end:
                yield from self.plan(epoch)[max(0, start - begin) : self.total - begin]
            begin = end


def make_order(lengths: Sequence[int], settings: TrainConfig, capacity: int = 0) -> Order:
    """Return the order of a run over examples of ``lengths`` tokens.

    Each epoch contains every example once, in batches of ``settings.batch_size`` examples, or of as many examples as
    fit into ``settings.max_tokens`` padded tokens; it depends on the seed and the epoch's number alone. The run ends
    after ``settings.max_steps``, or else after ``settings.epochs`` (a last fraction of an epoch takes that share of
    its steps, rounded up).

    Args:
        capacity: tokens of the rows that examples share (see ``packed_batches``); 0: a row per example.

    Raises:
        PeftlabError: there are no examples.
    """
    if not len(lengths):
        raise PeftlabError("the training split is empty")

    size, budget, seed = settings.batch_size, settings.max_tokens, settings.seed

    def plan(epoch: int) -> list[list[int]]:
        if capacity:
            return packed_batches(lengths, capacity, size, budget, seed=seed, epoch=epoch)
        if budget:
            return token_batches(lengths, budget, seed=seed, epoch=epoch)
        return epoch_batches(lengths, size, seed=seed, epoch=epoch)

    ends = [0]
    for epoch in count():
        steps = len(plan(epoch)) if capacity or budget else math.ceil(len(lengths) / size)
        ends.append(ends[-1] + steps)
        if settings.max_steps and ends[-1] >= settings.max_steps:
            return Order(plan, ends[1:], settings.max_steps)
        if not settings.max_steps and epoch + 1 >= settings.epochs:
            return Order(plan, ends[1:], ends[-2] + math.ceil((settings.epochs - epoch) * steps))
    raise AssertionError("unreachable")
