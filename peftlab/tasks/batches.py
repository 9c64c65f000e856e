"""The order of examples and which of them share a row, as pure functions of lengths and seeds.

Batches of similar lengths need little padding; shuffling within windows instead of sorting everything keeps the
order random. The order depends on neither processes nor time: a resumed run computes the epoch's order again.

With packing a row of ``capacity`` tokens holds whole examples; 0 stands for a row per example, as in padded batches.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

_WINDOW_BATCHES = 64


def seeded_order(n: int, *key: int) -> list[int]:
    """Return a random permutation of ``range(n)`` that depends on ``n`` and the integers of ``key`` alone.

    It sorts uniform draws of PCG64, whose stream NumPy keeps stable between versions, unlike its shuffles.
    """
    return _order(n, *key).tolist()


def seeded_subset(n: int, size: int | None, seed: int) -> list[int] | None:
    """Return ``size`` of ``range(n)``, drawn with ``seed``, in order; None where all are wanted.

    Args:
        n: how many there are to draw from.
        size: how many to draw; None for all.
        seed: the draw depends on it, ``n`` and ``size`` alone.
    """
    return None if size is None or size >= n else sorted(seeded_order(n, seed, 2)[:size])


def _order(n: int, *key: int) -> NDArray[np.int64]:
    seed = np.random.SeedSequence([part % 2**64 for part in key])
    draws = np.random.Generator(np.random.PCG64(seed)).random(n)
    return np.argsort(draws, kind="stable")


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
    order = _order(len(sizes), seed, epoch)
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
    order = _order(len(sizes), seed, epoch)
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


def eval_batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Return batches of all indices, longest first, so that running out of memory happens at once.

    Args:
        lengths: tokens of each example.
        batch_size: examples per batch.
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist()
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]


def padding_share(batches: Sequence[Sequence[int]], lengths: Sequence[int]) -> float:
    """Return the share of padding, ``1 - tokens / positions``, each batch padded to its longest example.

    Args:
        batches: indices of the examples of each batch.
        lengths: tokens of each example.
    """
    tokens = sum(lengths[i] for batch in batches for i in batch)
    cells = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches if batch)
    return 1 - tokens / cells if cells else 0.0


# --- Packing: which examples share a row.


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
    """Return the positions 0 to n-1 as rows of neighbours: as few rows as hold at most ``capacity`` tokens each.

    Args:
        lengths: tokens of each example, in the order in which they are placed.
        capacity: tokens of a row; 0: a row per example.
    """
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
