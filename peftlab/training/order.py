"""The examples of each optimiser step: a pure function of lengths, settings and seed."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from peftlab.errors import PeftlabError
from peftlab.tasks.batches import epoch_batches, packed_batches, seeded_order, token_batches
from peftlab.training.config import TrainConfig

DRAWN = 4  # sets draws of examples apart from those of their order


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


Plan = Callable[[int], list[list[int]]]
"""An epoch's number to its batches of example indices."""


def make_order(lengths: Sequence[int], settings: TrainConfig, capacity: int = 0) -> Order:
    """Return the order of a run over examples of ``lengths`` tokens.

    Each epoch contains every example once, in batches of ``settings.batch_size`` examples, or of as many examples as
    fit into ``settings.max_tokens`` padded tokens; with ``settings.sample`` it contains a share of the examples or of
    the batches. It depends on the seed and the epoch's number alone. The run ends after ``settings.max_steps``, or else
    after ``settings.epochs`` (a last fraction of an epoch takes that share of its steps, rounded up). Where examples
    are chosen by a score, this is the order of as many examples drawn at random: ``Selection`` takes as many steps.

    Args:
        lengths: tokens of each example.
        settings: the recipe's ``train`` section.
        capacity: tokens of the rows that examples share (see ``packed_batches``); 0: a row per example.

    Raises:
        PeftlabError: there are no examples.
    """
    if not len(lengths):
        raise PeftlabError("the training split is empty")
    plan = _sampled(list(lengths), settings, capacity)
    alike = not capacity and not settings.max_tokens  # then all epochs have as many batches as the first
    ends = [0]
    steps = 0
    for epoch in count():
        steps = steps if alike and epoch else len(plan(epoch))
        ends.append(ends[-1] + steps)
        if settings.max_steps and ends[-1] >= settings.max_steps:
            return Order(plan, ends[1:], settings.max_steps)
        if not settings.max_steps and epoch + 1 >= settings.epochs:
            return Order(plan, ends[1:], ends[-2] + math.ceil((settings.epochs - epoch) * steps))
    raise AssertionError("unreachable")


def make_plan(lengths: Sequence[int], members: Sequence[int], settings: TrainConfig, capacity: int) -> Plan:
    """Return the plan whose every epoch contains each of the examples ``members`` once.

    Args:
        lengths: tokens of every example, by index.
        members: indices of the examples that take part.
        settings: the recipe's ``train`` section.
        capacity: tokens of the rows that examples share; 0: a row per example.
    """
    sizes = [lengths[i] for i in members]
    size, budget, seed = settings.batch_size, settings.max_tokens, settings.seed

    def plan(epoch: int) -> list[list[int]]:
        if capacity:
            batches = packed_batches(sizes, capacity, size, budget, seed=seed, epoch=epoch)
        elif budget:
            batches = token_batches(sizes, budget, seed=seed, epoch=epoch)
        else:
            batches = epoch_batches(sizes, size, seed=seed, epoch=epoch)
        return [[members[i] for i in batch] for batch in batches]

    return plan


def scaled_count(n: int, keep: float) -> int:
    """Return the share ``keep`` of ``n``, rounded, and at least 1.

    Args:
        n: the whole number.
        keep: the share, above 0 and at most 1.
    """
    return max(1, round(keep * n))


def _sampled(lengths: Sequence[int], settings: TrainConfig, capacity: int) -> Plan:
    """Return the plan of epochs with ``settings.sample``."""
    n, seed, sample = len(lengths), settings.seed, settings.sample
    whole = make_plan(lengths, range(n), settings, capacity)
    if sample is None:
        return whole
    keep = sample.keep

    def share_of_batches(epoch: int) -> list[list[int]]:
        batches = whole(epoch)  # in random order
        return batches[: scaled_count(len(batches), keep)]

    def share_of_examples(epoch: int) -> list[list[int]]:
        drawn = sorted(seeded_order(n, seed, epoch, DRAWN)[: scaled_count(n, keep)])
        return make_plan(lengths, drawn, settings, capacity)(epoch)

    return share_of_batches if sample.by == "batches" else share_of_examples
