"""The examples of each optimiser step: pure functions of lengths, settings and seed.

Batches of similar lengths need little padding; shuffling within windows instead of sorting everything keeps the
order random. The order depends on neither processes nor time: a resumed run computes the epoch's order again.

With packing a row of ``capacity`` tokens holds whole examples; 0 stands for a row per example, as in padded batches.

``train.sample`` by a score is selection via proxy (arXiv 1906.11829): a round trains on all examples chosen up to it.
Of K rounds the r-th (from 1) has r·b/K of the b examples that are chosen in all, and steps in proportion: every round
passes as often over its examples. A run takes as many steps as one on b examples drawn at random, its control; what
scoring costs comes on top.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, pairwise

import numpy as np

from peftlab.errors import PeftlabError
from peftlab.tasks.batches import packed_rows, seeded_order
from peftlab.training.config import TrainConfig

_DRAWN = 4  # sets draws of examples apart from those of their order
_WINDOW_BATCHES = 64


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
            return Order(plan, ends[1:], ends[-2] + math.ceil(round((settings.epochs - epoch) * steps, 6)))
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
        drawn = sorted(seeded_order(n, seed, epoch, _DRAWN)[: scaled_count(n, keep)])
        return make_plan(lengths, drawn, settings, capacity)(epoch)

    return share_of_batches if sample.by == "batches" else share_of_examples


# --- Examples that a score chooses.
Chosen = list[list[int]]
"""The examples that each round added, in the order of their numbers."""


class Selection:
    """Plans the rounds of a run, as a pure function of its settings; the chosen examples are the run's progress.

    Attributes:
        ends: number of steps at the end of each round.
        sizes: examples chosen up to each.
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
        kept, rounds = scaled_count(len(lengths), sample.keep), sample.total_rounds
        # Round r of K passes over (r+1)/K of the examples, so its steps are in proportion to r + 1: of the
        # 1 + ... + K = K(K+1)/2 parts of the run, (r+1)(r+2)/2 have passed at its end.
        self.sizes = [kept * (r + 1) // rounds for r in range(rounds)]
        self.ends = [math.ceil(total * (r + 1) * (r + 2) / (rounds * (rounds + 1))) for r in range(rounds)]
        for what, counts in (("examples", self.sizes), ("steps", self.ends)):
            if any(one == other for one, other in zip([0, *counts], counts, strict=False)):
                raise PeftlabError(
                    f"train.sample.rounds: {rounds} rounds need more than {counts[-1]} {what}; set fewer rounds"
                )

    def is_round_start(self, step: int, chosen: Chosen) -> bool:
        """Return whether the examples of the round of ``step`` (from 0) are still to be chosen.

        Args:
            step: the step, from 0.
            chosen: the examples chosen by each round so far.
        """
        return bisect_right(self.ends, step) == len(chosen)

    def choose(self, chosen: Chosen, score: Callable[[list[int]], Sequence[float]]) -> list[int]:
        """Return the examples that the next round adds: those of the lowest score, the lower index first among equals.

        Args:
            chosen: the examples chosen by each round so far.
            score: examples to a number each; the first round draws at random instead, unless a scorer was
                trained before.
        """
        size = self.sizes[len(chosen)] - sum(map(len, chosen))
        if self._drawn_first and not chosen:
            return sorted(seeded_order(len(self._lengths), self._settings.seed, 0, _DRAWN)[:size])
        before = {i for those in chosen for i in those}
        left = [i for i in range(len(self._lengths)) if i not in before]
        scores = dict(zip(left, score(left), strict=True))
        return sorted(sorted(left, key=lambda i: (scores[i], i))[:size])

    def batches(self, step: int, chosen: Chosen) -> Iterator[list[int]]:
        """Yield the batches from ``step`` to the end of its round.

        Args:
            step: the step to begin with, from 0.
            chosen: the examples chosen by each round so far.
        """
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


# --- One epoch's batches.
def epoch_batches(lengths: Sequence[int], batch_size: int, *, seed: int, epoch: int) -> list[list[int]]:
    """Return one epoch's batches of example indices, similar lengths together.

    All examples are permuted, cut into windows of 64 batches, sorted by length within a window (equal lengths
    stay in their random order), cut into batches, and the batches are shuffled over the whole epoch. Every
    example occurs exactly once; a last partial batch is kept, at a random position. Within a batch lengths
    ascend.

    Args:
        lengths: tokens of each example.
        batch_size: examples per batch (the global batch).
        seed: the run's seed.
        epoch: number of the epoch; another epoch is another order.
    """
    sizes = np.asarray(lengths)
    order = np.asarray(seeded_order(len(sizes), seed, epoch), np.int64)
    window = _WINDOW_BATCHES * batch_size
    batches: list[list[int]] = []
    for start in range(0, len(order), window):
        members = order[start : start + window]
        members = members[np.argsort(sizes[members], kind="stable")].tolist()
        batches += [members[i : i + batch_size] for i in range(0, len(members), batch_size)]
    return [batches[i] for i in seeded_order(len(batches), seed, epoch, 1)]


def token_batches(lengths: Sequence[int], max_tokens: int, *, seed: int, epoch: int) -> list[list[int]]:
    """Return one epoch's batches, each of as many examples as fit into ``max_tokens`` padded tokens.

    Permuted, cut into windows of about 64 batches, sorted and shuffled like ``epoch_batches``; within a window
    each batch is filled while ``examples * longest <= max_tokens``. Every example occurs exactly once; one
    longer than ``max_tokens`` is a batch of its own. Within a batch lengths ascend.

    Args:
        lengths: tokens of each example.
        max_tokens: padded tokens per batch at most, over all processes and accumulation steps.
        seed: the run's seed.
        epoch: number of the epoch; another epoch is another order, and may have another number of batches.
    """
    sizes = np.asarray(lengths)
    order = np.asarray(seeded_order(len(sizes), seed, epoch), np.int64)
    mean = max(1.0, float(sizes.mean())) if len(sizes) else 1.0
    window = max(1, int(_WINDOW_BATCHES * max_tokens / mean))
    batches: list[list[int]] = []
    for start in range(0, len(order), window):
        members = order[start : start + window]
        batch: list[int] = []
        for i in members[np.argsort(sizes[members], kind="stable")].tolist():
            if batch and (len(batch) + 1) * sizes[i] > max_tokens:
                batches.append(batch)
                batch = []
            batch.append(i)
        batches.append(batch)
    return [batches[i] for i in seeded_order(len(batches), seed, epoch, 1)]


def packed_batches(
    lengths: Sequence[int], capacity: int, batch_size: int, max_tokens: int | None, *, seed: int, epoch: int
) -> list[list[int]]:
    """Return one epoch's batches of example indices, those of one bin next to each other.

    All examples are permuted, cut into windows of about 64 batches and put into bins by ``best_fit`` within each; the
    bins are shuffled over the whole epoch. Every example occurs exactly once.

    Args:
        lengths: tokens of each example.
        capacity: tokens of a bin.
        batch_size: examples per batch on average: whole bins, each of at most that many examples.
        max_tokens: instead, as many bins per batch as fit into so many tokens.
        seed: the run's seed.
        epoch: number of the epoch; another epoch is another order, and may have another number of batches.
    """
    sizes = np.asarray(lengths).tolist()
    order = seeded_order(len(sizes), seed, epoch)
    most = len(sizes) if max_tokens else batch_size
    mean = max(1.0, sum(sizes) / max(1, len(sizes)))
    window = max(1, int(_WINDOW_BATCHES * (max_tokens / mean if max_tokens else batch_size)))
    windows = (order[start : start + window] for start in range(0, len(order), window))
    bins = [found for members in windows for found in best_fit(members, sizes, capacity, most)]
    bins = [bins[i] for i in seeded_order(len(bins), seed, epoch, 1)]
    if max_tokens:
        size = max(1, max_tokens // capacity)
        return [list(chain(*bins[i : i + size])) for i in range(0, len(bins), size)]
    batches: list[list[int]] = []
    begun = 0
    for members in bins:
        if begun // batch_size == len(batches):  # the examples before this bin are all that so many batches take
            batches.append([])
        batches[-1] += members
        begun += len(members)
    return batches


def best_fit(members: Sequence[int], lengths: Sequence[int], capacity: int, most: int) -> list[list[int]]:
    """Return ``members`` in bins of at most ``capacity`` tokens and ``most`` examples: best fit decreasing.

    The longest example comes first, and each goes where the least room remains; equal lengths keep their order. An
    example longer than ``capacity`` is a bin of its own.

    Args:
        members: indices of the examples to place.
        lengths: tokens of every example, by index.
        capacity: tokens of a bin.
        most: examples of a bin at most.
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (tokens that still fit, bin), ascending
    for i in sorted(members, key=lambda i: -lengths[i]):
        place = bisect_left(rooms, (lengths[i], 0))
        if place == len(rooms):
            room, chosen = capacity, len(bins)
            bins.append([])
        else:
            room, chosen = rooms.pop(place)
        bins[chosen].append(i)
        if len(bins[chosen]) < most:
            insort(rooms, (room - lengths[i], chosen))
    return bins


# --- The parts of a batch.
def split_batch(batch: list[int], parts: int) -> list[list[int]]:
    """Split a batch into ``parts`` contiguous shares whose sizes differ by at most one.

    The batch's order is kept, so shares of an ``epoch_batches`` batch contain similar lengths and neighbouring
    shares nearly equal ones: give shares ``k * processes`` to ``(k + 1) * processes - 1`` to the processes at
    accumulation step ``k`` and they wait little for each other. Larger shares come first; with more parts
    than examples the last ones are empty.

    Args:
        batch: indices of examples.
        parts: number of shares, at least 1.
    """
    size, extra = divmod(len(batch), parts)
    starts = [part * size + min(part, extra) for part in range(parts + 1)]
    return [batch[start:end] for start, end in pairwise(starts)]


def split_rows(batch: list[int], parts: int, lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Split a batch as ``split_batch`` does, between rows; where there are fewer rows than parts, between examples.

    Args:
        batch: indices of the batch's examples.
        parts: number of shares.
        lengths: tokens of every example, by index.
        capacity: tokens of a row; 0: a row per example.
    """
    rows = packed_rows([lengths[i] for i in batch], capacity)
    if len(rows) < parts:
        return split_batch(batch, parts)
    return [[batch[i] for row in share for i in rows[row]] for share in split_batch(list(range(len(rows))), parts)]


def padded_tokens(lengths: Sequence[int], capacity: int) -> int:
    """Return the positions of examples in rows, each row padded to the longest.

    Args:
        lengths: tokens of each example of a batch.
        capacity: tokens of a row; 0: a row per example.
    """
    rows = packed_rows(lengths, capacity)
    return len(rows) * max(sum(lengths[i] for i in row) for row in rows) if rows else 0
