"""Metrics beside scikit-learn's and SciPy's; scores by class, the confusion matrix and the hardest examples."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn import metrics as sk
from sklearn.metrics import confusion_matrix, log_loss, precision_recall_fscore_support

from peftlab.errors import PeftlabError
from peftlab.registry import resolve
from peftlab.tasks.metrics import analyse, compute_metrics, majority_baseline
from peftlab.tasks.table import TASKS, find_task

COLA, MRPC, STSB = (find_task(f"glue/{name}") for name in ("cola", "mrpc", "stsb"))
OWN = replace(find_task("text/classification"), labels=("a", "b", "c"))
PAIRS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=40)


SETS = {"text/multilabel": [[0], [0, 1]], "text/tokens": [[0, 1], [2]]}


def test_every_metric_of_the_table_is_computed():
    for task in (task for task in TASKS.values() if task.labelled):
        known = task if task.labels or not task.classed else replace(task, labels=("B-X", "I-X", "O"))
        labels = SETS.get(task.name, [0, 1, 1])
        assert tuple(resolve(task.answers)(known).baseline(labels, labels)) == task.metrics


def test_hand_worked_cases():
    # True positives 2, false positives 1, false negatives 1, true negatives 1.
    answers, truth = [1, 1, 1, 0, 0], [1, 1, 0, 1, 0]
    assert compute_metrics(MRPC, answers, truth) == {"accuracy": 0.6, "f1": pytest.approx(2 / 3)}
    # (2 * 1 - 1 * 1) / sqrt(3 * 3 * 2 * 2)
    assert compute_metrics(COLA, answers, truth) == {"matthews_correlation": pytest.approx(1 / 6)}
    # F1 of class a 1/2, of b 2/3 (a third class never occurs): their mean.
    assert compute_metrics(OWN, answers, truth)["f1"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    # Ranks 1 2 3 against 1 3 2: 1 - 6 * 2 / (3 * 8).
    found = compute_metrics(STSB, [0.1, 0.2, 0.9], [1.0, 5.0, 2.0])
    assert found["spearman"] == pytest.approx(0.5)
    assert found["pearson"] == pytest.approx(stats.pearsonr([0.1, 0.2, 0.9], [1, 5, 2]).statistic)


@given(PAIRS)
def test_agreement_with_scikit_learn(pairs):
    answers, truth = map(list, zip(*pairs, strict=True))
    own = compute_metrics(OWN, answers, truth)
    assert own["accuracy"] == pytest.approx(sk.accuracy_score(truth, answers))
    assert own["f1"] == pytest.approx(sk.f1_score(truth, answers, average="macro", zero_division=0))
    assert compute_metrics(COLA, answers, truth)["matthews_correlation"] == pytest.approx(
        sk.matthews_corrcoef(truth, answers)
    )


@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 50)), min_size=1, max_size=40))
def test_correlations_are_finite_and_agree_with_scipy(pairs):
    answers, truth = ([value / 10 for value in column] for column in zip(*pairs, strict=True))
    found = compute_metrics(STSB, answers, truth)
    assert all(-1 <= value <= 1 for value in found.values())
    if len(set(answers)) > 1 and len(set(truth)) > 1:
        assert found["pearson"] == pytest.approx(stats.pearsonr(answers, truth).statistic)
        assert found["spearman"] == pytest.approx(stats.spearmanr(answers, truth).statistic)
    else:
        assert found == {"pearson": 0.0, "spearman": 0.0}


@pytest.mark.filterwarnings("error")
def test_constant_answers_score_zero_without_a_warning():
    assert compute_metrics(COLA, [1, 1, 1], [1, 0, 1]) == {"matthews_correlation": 0.0}
    assert compute_metrics(COLA, [1, 1, 1], [1, 1, 1]) == {"matthews_correlation": 0.0}
    assert compute_metrics(STSB, [2.5, 2.5], [1.0, 2.0]) == {"pearson": 0.0, "spearman": 0.0}
    assert compute_metrics(MRPC, [0, 0], [1, 0]) == {"accuracy": 0.5, "f1": 0.0}


def test_predictions_that_are_no_numbers_are_refused():
    with pytest.raises(PeftlabError, match=r"glue/stsb: 2 of 3 predictions are not finite"):
        compute_metrics(STSB, [math.nan, 1.0, math.inf], [1.0, 2.0, 3.0])
    for answers, truth in (([], []), ([1], [1, 0]), (np.zeros((2, 2)), np.zeros((2, 2)))):
        with pytest.raises(PeftlabError, match="of one size and not empty"):
            compute_metrics(MRPC, answers, truth)


def test_majority_baseline():
    assert majority_baseline(MRPC, [1, 1, 0], [1, 0, 0, 0]) == {"accuracy": 0.25, "f1": pytest.approx(0.4)}
    columns = Dataset.from_dict({"label": [1, 1, 0]})
    assert majority_baseline(MRPC, columns["label"], columns["label"])["accuracy"] == pytest.approx(2 / 3)
    assert majority_baseline(COLA, [0, 1], [0, 0])["matthews_correlation"] == 0.0
    assert majority_baseline(OWN, [2, 1, 2, 1], [1, 1, 2])["accuracy"] == pytest.approx(2 / 3)
    assert majority_baseline(STSB, [1.0, 2.0], [1.0, 4.0]) == {"pearson": 0.0, "spearman": 0.0}


def test_the_scores_of_answers_are_the_metrics_and_the_mean_loss():
    rng = np.random.default_rng(0)
    logits, truth = rng.normal(size=(50, 2)).astype(np.float32), rng.integers(0, 2, 50)
    found = resolve(MRPC.answers)(MRPC).score(list(logits), truth.tolist())
    loss = found.pop("loss")
    assert found == compute_metrics(MRPC, logits.argmax(-1), truth)
    assert loss == pytest.approx(sk.log_loss(truth, np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)), rel=1e-5)
    numbers, wanted = rng.normal(size=50).astype(np.float32), rng.normal(size=50)
    found = resolve(STSB.answers)(STSB).score(list(numbers), wanted.tolist())
    assert found == {**compute_metrics(STSB, numbers, wanted), "loss": pytest.approx(np.mean((numbers - wanted) ** 2))}


def test_importing_the_metrics_imports_no_heavy_library():
    modules = "peftlab.tasks.metrics, peftlab.tasks.labelled_rows, peftlab.tasks.batches"
    code = f"import {modules}, sys; print({{'torch', 'datasets', 'sklearn'}} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


# --- Scores by class, the confusion matrix and the hardest examples, beside scikit-learn's.
NAMES = ("no", "maybe", "yes", "never seen")


@st.composite
def answered(draw):
    n = draw(st.integers(1, 40))
    truth = draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    logits = np.random.default_rng(draw(st.integers(0, 99))).normal(size=(n, 4), scale=3).astype(np.float32)
    return truth, logits


def examples(truth):
    return Dataset.from_dict({"text": [f"text {i}" for i in range(len(truth))], "label": truth})


@settings(max_examples=30)
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
