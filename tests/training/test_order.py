from __future__ import annotations

import math
from itertools import chain, islice
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peftlab.errors import PeftlabError
from peftlab.tasks.batches import padding_share, token_batches
from peftlab.training.order import make_order

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=200)


def order(lengths, **options):
    given = {"batch_size": 4, "max_tokens": None, "seed": 0, "epochs": 2.0, "max_steps": None, "sample": None}
    given |= options
    return make_order(lengths, SimpleNamespace(**given))


@settings(deadline=None)
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


@settings(deadline=None)
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
