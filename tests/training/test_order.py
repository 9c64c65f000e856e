from __future__ import annotations

import math
from itertools import chain, islice, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peftlab.errors import PeftlabError
from peftlab.tasks.batches import packed_rows, seeded_order
from peftlab.training.order import (
    best_fit,
    epoch_batches,
    make_order,
    packed_batches,
    padded_tokens,
    split_batch,
    split_rows,
    token_batches,
)

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=200)
MAYBE_NONE = st.lists(st.integers(1, 60), max_size=300)
SHORT = st.lists(st.integers(1, 40), min_size=1, max_size=120)
SIZES = st.integers(1, 40)
SEEDS = st.integers(0, 2**64)


def order(lengths, **options):
    given = {"batch_size": 4, "max_tokens": None, "seed": 0, "epochs": 2.0, "max_steps": None, "sample": None}
    given |= options
    return make_order(lengths, SimpleNamespace(**given))


def padding_share(batches, lengths):
    """Return the share of padding in batches, each padded to its longest example."""
    tokens = sum(lengths[i] for batch in batches for i in batch)
    return 1 - tokens / sum(padded_tokens([lengths[i] for i in batch], 0) for batch in batches)


def test_padding_by_hand():
    assert padding_share([[0, 1], [2]], [4, 1, 3]) == pytest.approx(3 / 11)  # cells 2 * 4 + 1 * 3 = 11, tokens 8
    assert padded_tokens([], 0) == 0


@given(LENGTHS, st.integers(1, 300), st.integers(0, 2**32), st.integers(0, 50))
def test_a_budget_holds_and_every_example_comes_once(lengths, budget, seed, epoch):
    batches = token_batches(lengths, budget, seed=seed, epoch=epoch)
    assert sorted(chain(*batches)) == list(range(len(lengths)))
    for batch in batches:
        sizes = [lengths[i] for i in batch]
        assert sizes == sorted(sizes)
        assert len(batch) * sizes[-1] <= budget or len(batch) == 1
    assert batches == token_batches(np.asarray(lengths), budget, seed=seed, epoch=epoch)


def test_a_budget_is_used_well():
    lengths = np.random.default_rng(0).integers(1, 128, 5000).tolist()
    batches = token_batches(lengths, 2048, seed=0, epoch=0)
    cells = [len(batch) * lengths[batch[-1]] for batch in batches]
    assert padding_share(batches, lengths) < 0.05
    assert sum(cells) / len(cells) > 0.9 * 2048
    assert batches != token_batches(lengths, 2048, seed=0, epoch=1)
    assert batches != token_batches(lengths, 2048, seed=1, epoch=0)


@given(LENGTHS, st.floats(0.1, 4), st.none() | st.integers(60, 200), st.integers(0, 9))
def test_any_start_gives_the_rest_of_the_run(lengths, epochs, budget, start):
    run = order(lengths, epochs=epochs, max_tokens=budget)
    batches = list(run.batches(0))
    assert len(batches) == run.total
    assert list(run.batches(start)) == batches[start:]
    whole = batches[: run.ends[0]]
    if epochs >= 1:
        assert sorted(chain(*whole)) == list(range(len(lengths)))


def test_steps_are_counted_over_epochs():
    assert order([5] * 10, epochs=2).total == 6
    assert order([5] * 10, epochs=2.5).total == 8
    assert order([5] * 10, epochs=0.1).total == 1
    assert order([5] * 10, max_steps=7).total == 7
    lengths = np.random.default_rng(0).integers(1, 60, 500).tolist()
    run = order(lengths, epochs=3, max_tokens=120)
    assert run.total == run.ends[-1] == sum(len(run.plan(epoch)) for epoch in range(3))
    half = order(lengths, epochs=2.5, max_tokens=120)
    assert half.total == run.ends[1] + math.ceil(len(run.plan(2)) / 2)


def test_a_tenth_of_an_epoch_is_no_step_more():
    for epochs, steps in ((1.1, 10), (1.3, 10), (2.2, 5)):
        assert order([5] * steps, epochs=epochs, batch_size=1).total == round(epochs * steps)


def test_the_epoch_of_a_step():
    run = order([5] * 10, max_steps=7)
    assert [run.epoch(step) for step in range(8)] == pytest.approx([i / 3 for i in range(8)])
    assert [run.epoch(step) for step in run.ends[:2]] == [1.0, 2.0]


def test_nothing_to_learn_from():
    with pytest.raises(PeftlabError, match="the training split is empty"):
        order([], max_steps=3)


def test_long_runs_start_at_once():
    run = order([5] * 1000, max_steps=10**6)
    assert len(list(islice(run.batches(999_998), 5))) == 2


@given(MAYBE_NONE, SIZES, SEEDS, st.integers(0, 50))
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


def test_the_batches_are_the_same_on_every_machine():
    assert epoch_batches([3, 1, 2, 3, 1], 2, seed=7, epoch=1) == [[0], [2, 3], [1, 4]]


def test_bucketing_saves_most_of_the_padding():
    lengths = np.random.default_rng(0).integers(1, 128, 5000).tolist()
    drawn = seeded_order(len(lengths), 1)
    shuffled = [drawn[i : i + 32] for i in range(0, len(drawn), 32)]
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


@given(st.lists(st.integers(), max_size=70), st.integers(1, 12))
def test_shares_of_a_batch(batch, parts):
    shares = split_batch(batch, parts)
    assert len(shares) == parts
    assert list(chain(*shares)) == batch
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@given(SHORT, st.integers(40, 90), st.integers(1, 9), st.none() | st.integers(40, 300), st.integers(0, 9))
def test_every_example_once_in_batches_of_whole_bins(lengths, capacity, size, budget, epoch):
    def made(values):
        return packed_batches(values, capacity, size, budget, seed=3, epoch=epoch)

    batches = made(lengths)
    assert sorted(chain(*batches)) == list(range(len(lengths))) and all(batches)
    assert batches == made(np.asarray(lengths)), "a pure function of its arguments"
    for batch in batches:
        rows = packed_rows([lengths[i] for i in batch], capacity)
        if budget:
            assert len(rows) <= max(1, budget // capacity)
    if not budget:
        for step, batch in enumerate(batches):  # on average: after each step as many as so many batches contain
            before = sum(map(len, batches[:step]))
            assert step * size <= before < (step + 1) * size
            assert len(batch) < 2 * size


@given(SHORT, st.integers(0, 90), st.integers(1, 6))
def test_rows_and_parts(lengths, capacity, parts):
    rows = packed_rows(lengths, capacity)
    assert list(chain(*rows)) == list(range(len(lengths)))
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        assert sum(lengths[i] for i in row) <= capacity or len(row) == 1
        assert following is None or sum(lengths[i] for i in row) + lengths[following[0]] > capacity
    batch = list(range(len(lengths)))
    split = split_rows(batch, parts, lengths, capacity)
    assert list(chain(*split)) == batch and len(split) == parts
    if len(rows) >= parts:
        assert all(split) and sum(len(packed_rows([lengths[i] for i in p], capacity)) for p in split) == len(rows)
    assert padded_tokens(lengths, 0) == len(lengths) * max(lengths)
    assert split_rows(batch, parts, lengths, 0) == split_batch(batch, parts), "a row per example"


def test_bins_are_full_and_batches_differ_by_epoch_and_seed():
    assert best_fit([0, 1, 2, 3], [5, 4, 3, 6], 9, 9) == [[3, 2], [0, 1]]
    assert best_fit([0, 1, 2], [2, 2, 2], 9, 2) == [[0, 1], [2]]
    assert best_fit([0, 1], [20, 2], 9, 2) == [[0], [1]]
    lengths = np.random.default_rng(0).lognormal(4.5, 0.6, 4000).clip(8, 512).astype(int).tolist()
    batches = packed_batches(lengths, 512, 16, None, seed=0, epoch=0)
    assert 1 - sum(lengths) / sum(padded_tokens([lengths[i] for i in batch], 512) for batch in batches) < 0.04
    assert padding_share([list(range(i, i + 16)) for i in range(0, 4000, 16)], lengths) > 0.4
    assert len(batches) == 250
    for seed, epoch in ((0, 1), (1, 0)):
        assert packed_batches(lengths, 512, 16, None, seed=seed, epoch=epoch) != batches
