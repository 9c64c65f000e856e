"""Several examples in one row: which ones share it, as pure functions of lengths and seeds.

A row of ``capacity`` tokens holds whole examples; 0 stands for a row per example, as in padded batches.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import chain

import numpy as np

from peftlab.tasks.batches import seeded_order, split_batch

_WINDOW_BATCHES = 64


def best_fit(members: Sequence[int], lengths: Sequence[int], capacity: int, most: int) -> list[list[int]]:
    """Return ``members`` in bins of at most ``capacity`` tokens and ``most`` examples: best fit decreasing.

    The longest example comes first, and each goes where the least room remains; equal lengths keep their order. An
    example longer than ``capacity`` is a bin of its own.
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


def packed_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return positions 0 to n-1 in rows of neighbours, as few as hold at most ``capacity`` tokens each."""
    rows: list[list[int]] = []
    filled = 0
    for i, length in enumerate(lengths):
        if not rows or filled + length > capacity:
            rows.append([])
            filled = 0
        rows[-1].append(i)
        filled += length
    return rows


def split_rows(batch: list[int], parts: int, lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Split a batch as ``split_batch`` does, between rows; where there are fewer rows than parts, between examples."""
    rows = packed_rows([lengths[i] for i in batch], capacity)
    if len(rows) < parts:
        return split_batch(batch, parts)
    return [[batch[i] for row in share for i in rows[row]] for share in split_batch(list(range(len(rows))), parts)]


def padded_tokens(lengths: Sequence[int], capacity: int) -> int:
    """Return the positions of examples in rows, each row padded to the longest."""
    rows = packed_rows(lengths, capacity)
    return len(rows) * max(sum(lengths[i] for i in row) for row in rows) if rows else 0
