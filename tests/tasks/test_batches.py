from __future__ import annotations

from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peftlab.tasks.batches import epoch_batches, eval_batches, padding_share, seeded_order, split_batch

LENGTHS = st.lists(st.integers(1, 60), max_size=300)
SIZES = st.integers(1, 40)
SEEDS = st.integers(0, 2**64)


@settings(deadline=None)
@given(LENGTHS, SIZES, SEEDS, st.integers(0, 50))
def test_an_epoch_holds_every_example_once(lengths, batch_size, seed, epoch):
    batches = epoch_batches(lengths, batch_size, seed=seed, epoch=epoch)
    assert sorted(chain(*batches)) == list(range(len(lengths)))
    full, rest = divmod(len(lengths), batch_size)
    assert sorted(map(len, batches)) == sorted([batch_size] * full + [rest] * (rest > 0))
    assert batches == epoch_batches(np.asarray(lengths), batch_size, seed=seed, epoch=epoch)
    assert all(type(i) is int for i in chain(*batches))
    for batch in batches:
        sizes = [lengths[i] for i in batch]
        assert sizes == sorted(sizes)


def test_epochs_and_seeds_give_different_orders():
    lengths = [5] * 500
    orders = {
        tuple(chain(*epoch_batches(lengths, 8, seed=seed, epoch=epoch))) for seed in (0, 1, 2) for epoch in (0, 1, 2)
    }
    assert len(orders) == 9


def test_the_order_is_the_same_on_every_machine():
    assert seeded_order(8, 0, 0) == [3, 2, 1, 6, 0, 7, 4, 5]
    assert epoch_batches([3, 1, 2, 3, 1], 2, seed=7, epoch=1) == [[0], [2, 3], [1, 4]]


def test_bucketing_saves_most_of_the_padding():
    lengths = np.random.default_rng(0).integers(1, 128, 5000).tolist()
    order = seeded_order(len(lengths), 1)
    shuffled = [order[i : i + 32] for i in range(0, len(order), 32)]
    bucketed = padding_share(epoch_batches(lengths, 32, seed=0, epoch=0), lengths)
    assert padding_share(shuffled, lengths) > 0.4
    assert bucketed < 0.05


def test_batches_do_not_come_in_the_order_of_their_lengths():
    lengths = list(range(1, 2049))
    means = [np.mean([lengths[i] for i in batch]) for batch in epoch_batches(lengths, 32, seed=0, epoch=0)]
    assert abs(np.corrcoef(means, range(len(means)))[0, 1]) < 0.4


def test_equal_lengths_do_not_keep_their_neighbours():
    lengths = [7] * 640
    batches = epoch_batches(lengths, 10, seed=0, epoch=0)
    gaps = [abs(a - b) for batch in batches for a, b in pairwise(batch)]
    assert np.mean(gaps) == pytest.approx(640 / 3, rel=0.15)  # of independent uniform draws


@settings(deadline=None)
@given(st.lists(st.integers(), max_size=70), st.integers(1, 12))
def test_shares_of_a_batch(batch, parts):
    shares = split_batch(batch, parts)
    assert len(shares) == parts
    assert list(chain(*shares)) == batch
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@settings(deadline=None)
@given(LENGTHS, SIZES)
def test_evaluation_takes_the_longest_first(lengths, batch_size):
    batches = eval_batches(lengths, batch_size)
    order = list(chain(*batches))
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[i] for i in order] == sorted(lengths, reverse=True)
    assert all(len(batch) == batch_size for batch in batches[:-1])


def test_padding_share_by_hand():
    # Cells 2 * 4 + 1 * 3 = 11, tokens 4 + 1 + 3 = 8.
    assert padding_share([[0, 1], [2]], [4, 1, 3]) == pytest.approx(3 / 11)
    assert padding_share([[], [0]], [4]) == 0.0
    assert padding_share([], []) == 0.0
