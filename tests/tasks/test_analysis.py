"""Scores by class, the confusion matrix and the hardest examples, beside scikit-learn's."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import confusion_matrix, log_loss, precision_recall_fscore_support

from peftlab.tasks.metrics import analyse

NAMES = ("no", "maybe", "yes", "never seen")


@st.composite
def answered(draw):
    n = draw(st.integers(1, 40))
    truth = draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    logits = np.random.default_rng(draw(st.integers(0, 99))).normal(size=(n, 4), scale=3).astype(np.float32)
    return truth, logits


def examples(truth):
    return Dataset.from_dict({"text": [f"text {i}" for i in range(len(truth))], "label": truth})


@settings(max_examples=30, deadline=None)
@given(answered())
def test_scores_by_class_are_those_of_scikit_learn(case):
    truth, logits = case
    found = analyse(NAMES, logits, examples(truth))
    answers = logits.argmax(-1)
    assert found.confusion == confusion_matrix(truth, answers, labels=range(4)).tolist()
    want = precision_recall_fscore_support(truth, answers, labels=range(4), zero_division=0)
    assert list(found.by_class) == list(NAMES)
    for row, scores in zip(zip(*want, strict=True), found.by_class.values(), strict=True):
        assert (scores.precision, scores.recall, scores.f1, scores.support) == pytest.approx(row)


def test_the_hardest_examples_come_first_with_their_text():
    truth = [0, 1, 2, 0] * 5
    logits = np.random.default_rng(0).normal(size=(20, 4), scale=4).astype(np.float32)
    found = analyse(NAMES, logits, examples(truth))
    losses = [example.loss for example in found.hardest]
    assert len(losses) == 10 and losses == sorted(losses, reverse=True)
    shares = np.exp(logits.astype(float)) / np.exp(logits.astype(float)).sum(-1, keepdims=True)
    for example in found.hardest:
        assert example.text == f"text {example.row}" and example.label == NAMES[truth[example.row]]
        assert example.predicted == NAMES[logits[example.row].argmax()]
        assert example.probability == pytest.approx(shares[example.row, truth[example.row]])
        assert example.loss == pytest.approx(log_loss([truth[example.row]], shares[[example.row]], labels=range(4)))
    left = set(range(20)) - {example.row for example in found.hardest}
    assert min(losses) >= max(-np.log(shares[row, truth[row]]) for row in left)


def test_a_probability_of_zero_has_a_finite_loss():
    found = analyse(("a", "b"), np.array([[0, 3e4]], np.float32), examples([0]))
    assert found.hardest[0].probability == 0 and 700 < found.hardest[0].loss < 710


def test_regression_has_points_and_squared_errors():
    truth = np.linspace(0, 5, 1201)
    predictions = (truth + np.where(np.arange(1201) == 700, 3, 0.1)).astype(np.float32)
    found = analyse((), predictions, examples(truth.tolist()))
    assert not found.by_class and not found.confusion
    assert len(found.points) == 401 and found.points[1] == pytest.approx([truth[3], truth[3] + 0.1])
    assert found.hardest[0].row == 700 and found.hardest[0].loss == pytest.approx(9)
    assert found.hardest[0].probability is None
