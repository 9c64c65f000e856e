"""The order of examples, as pure functions of lengths and seeds.

Batches of similar lengths need little padding; shuffling within windows instead of sorting everything keeps the
order random. The order depends on neither processes nor time: a resumed run computes the epoch's order again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

_WINDOW_BATCHES = 64


def seeded_order(n: int, *key: int) -> list[int]:
    """Return a random permutation of ``range(n)`` that depends on ``n`` and the integers of ``key`` alone.

    It sorts uniform draws of PCG64, whose stream NumPy keeps stable between versions, unlike its shuffles.
    """
    return _order(n, *key).tolist()


def seeded_subset(n: int, size: int | None, seed: int) -> list[int] | None:
    """Return ``size`` of ``range(n)``, drawn with ``seed``, in order; None where all are wanted."""
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
    """
    size, extra = divmod(len(batch), parts)
    starts = [part * size + min(part, extra) for part in range(parts + 1)]
    return [batch[start:end] for start, end in pairwise(starts)]


def eval_batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Return batches of all indices, longest first, so that running out of memory happens at once."""
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist()
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]


def padding_share(batches: Sequence[Sequence[int]], lengths: Sequence[int]) -> float:
    """Return the share of padding among all positions, each batch padded to its longest: ``1 - tokens /
    cells``."""
    tokens = sum(lengths[i] for batch in batches for i in batch)
    cells = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches if batch)
    return 1 - tokens / cells if cells else 0.0
