"""Computes the metrics of labelled tasks, and analyses which examples a model gets right and wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from peftlab.errors import PeftlabError
from peftlab.tasks.table import Task

if TYPE_CHECKING:
    from datasets import Dataset


Array = NDArray[np.float64] | NDArray[np.float32] | NDArray[np.int64]
Numbers = Sequence[float] | Array


def compute_metrics(task: Task, predictions: Numbers, references: Numbers) -> dict[str, float]:
    """Return ``task.metrics`` by name, each in [-1, 1] or [0, 1].

    ``accuracy``: share of equal classes. ``f1``: for GLUE's two-class tasks of class 1 (paraphrase,
    duplicate), as on its leaderboard; for the user's own tasks the unweighted mean over the classes
    that occur, as none of them is special. ``matthews_correlation``: of the confusion matrix. ``pearson``,
    ``spearman``: correlations.

    Constant predictions (or references) have no correlation, 0/0; it is reported as 0.0, the value of answers
    independent of the references, so that such a run compares as worse than any that learnt something, which NaN
    would not.

    Args:
        task: its ``metrics`` and ``regression`` are read.
        predictions: class indices, or numbers for regression; shape (n,).
        references: the labels, same shape.

    Raises:
        PeftlabError: no examples, different numbers of them, or a prediction that is NaN or infinite.
    """
    answers, truth = np.asarray(predictions, np.float64), np.asarray(references, np.float64)
    if answers.ndim != 1 or answers.shape != truth.shape or not answers.size:
        raise PeftlabError(
            f"metrics of {task.name}: predictions of shape {answers.shape} and references of shape "
            f"{truth.shape} must be one-dimensional, of one size and not empty"
        )
    bad = int((~np.isfinite(answers)).sum())
    if bad:
        raise PeftlabError(
            f"metrics of {task.name}: {bad} of {answers.size} predictions are not finite; training has "
            "diverged (try a lower train.lr, or train.precision fp32)"
        )
    if not task.regression:
        answers, truth = answers.astype(np.int64), truth.astype(np.int64)
    return {name: METRICS[name](task, answers, truth) for name in task.metrics}


def majority_baseline(task: Task, train_labels: Numbers, eval_labels: Numbers) -> dict[str, float]:
    """Return the metrics of always answering the most frequent training class (the lower index where equal).

    For regression the answer is the mean of the training labels.

    Args:
        task: its ``metrics`` and ``regression`` are read.
        train_labels: labels of the training split, shape (m,).
        eval_labels: labels to compare the answer with, shape (n,).
    """
    if task.regression:
        answer = float(np.mean(np.asarray(train_labels, np.float64)))
    else:
        counts = Counter(np.asarray(train_labels).tolist())
        answer = min(counts, key=lambda label: (-counts[label], label))
    return compute_metrics(task, np.full(len(eval_labels), answer), eval_labels)


def _accuracy(task: Task, answers: Array, truth: Array) -> float:
    return float((answers == truth).mean())


def _f1(task: Task, answers: Array, truth: Array) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(truth, answers, average="binary" if task.glue else "macro", zero_division=0))


def _matthews(task: Task, answers: Array, truth: Array) -> float:
    from sklearn.metrics import matthews_corrcoef

    return 0.0 if _constant(answers, truth) else float(matthews_corrcoef(truth, answers))


def _pearson(task: Task, answers: Array, truth: Array) -> float:
    from scipy.stats import pearsonr

    return 0.0 if _constant(answers, truth) else float(pearsonr(answers, truth).statistic)


def _spearman(task: Task, answers: Array, truth: Array) -> float:
    from scipy.stats import spearmanr

    return 0.0 if _constant(answers, truth) else float(spearmanr(answers, truth).statistic)


def _constant(answers: Array, truth: Array) -> bool:
    return bool(np.ptp(answers) == 0 or np.ptp(truth) == 0)


METRICS: dict[str, Callable[[Task, Array, Array], float]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "matthews_correlation": _matthews,
    "pearson": _pearson,
    "spearman": _spearman,
}


# --- Analysis.
HARDEST = 10
Integers = NDArray[np.int64]
_POINTS = 500


@dataclass(frozen=True)
class ClassScores:
    """One class against all others. ``support``: its number of examples; a score without a single case is 0."""

    precision: float
    recall: float
    f1: float
    support: int


@dataclass(frozen=True)
class HardExample:
    """An example with a large loss.

    Attributes:
        row: its number in the split, from 0. text, text_pair: as in the data.
        label, predicted: class names, words' tags or the texts of choices; numbers for regression.
        probability: of ``label``; None for regression and where a label is several answers.
        loss: cross-entropy, or the squared error.
    """

    row: int
    text: str
    text_pair: str | None
    label: str | float
    predicted: str | float
    probability: float | None
    loss: float


@dataclass(frozen=True)
class Analysis:
    """The analysis of a model's answers on a split.

    Attributes:
        by_class: class name, in label order, to its scores; type of entity, or place of a choice; empty for regression.
        confusion: examples by [class of the label][class predicted], in the order of ``by_class``; empty for regression
            and where examples have several answers.
        points: [label, prediction] of at most 500 examples, evenly spaced; empty for classification.
        hardest: the ten examples of largest loss, the largest first.
    """

    by_class: dict[str, ClassScores] = field(default_factory=dict)
    confusion: list[list[int]] = field(default_factory=list)
    points: list[list[float]] = field(default_factory=list)
    hardest: list[HardExample] = field(default_factory=list)


def analyse(labels: Sequence[str], predictions: NDArray[np.float32], examples: Dataset) -> Analysis:
    """Return what a model gets right and wrong.

    Args:
        labels: class names in label order; empty for regression.
        predictions: logits, [n, classes]; numbers, [n], for regression.
        examples: n rows with the columns ``text``, ``label`` and for pairs ``text_pair``.
    """
    truth = np.asarray(examples["label"])
    if not labels:
        losses = (predictions.astype(np.float64) - truth) ** 2
        step = -(-len(truth) // _POINTS)
        points = [[float(a), float(b)] for a, b in zip(truth[::step], predictions[::step], strict=True)]
        numbers = hardest_examples(examples, losses, lambda row: (float(truth[row]), float(predictions[row]), None))
        return Analysis(points=points, hardest=numbers)
    answers = predictions.argmax(-1)
    of_label = softmax(predictions)[np.arange(len(truth)), truth]
    losses = -np.log(np.maximum(of_label, np.finfo(np.float64).tiny))
    confusion = confusion_of(len(labels), truth, answers)
    return Analysis(
        by_class=scores_by_class(labels, confusion),
        confusion=confusion.tolist(),
        hardest=hardest_examples(
            examples, losses, lambda row: (labels[truth[row]], labels[answers[row]], float(of_label[row]))
        ),
    )


def confusion_of(n: int, truth: Sequence[int] | Integers, answers: Sequence[int] | Integers) -> Integers:
    """Return the number of examples by [class of the label][class predicted], of ``n`` classes.

    Args:
        n: number of classes.
        truth: class of each example's label, shape (examples,).
        answers: class predicted for each example, shape (examples,).
    """
    found = np.zeros((n, n), np.int64)
    np.add.at(found, (np.asarray(truth, np.int64), np.asarray(answers, np.int64)), 1)
    return found


def scores_by_class(labels: Sequence[str], confusion: Integers) -> dict[str, ClassScores]:
    """Return each class's scores, computed from a confusion matrix, by the class's name.

    Args:
        labels: class names in label order.
        confusion: number of examples, shape (classes, classes).
    """
    right, predicted, true = confusion.diagonal(), confusion.sum(0), confusion.sum(1)
    return {name: class_scores(int(right[i]), int(predicted[i]), int(true[i])) for i, name in enumerate(labels)}


def class_scores(hits: int, predicted: int, true: int) -> ClassScores:
    """Return a class's precision, recall and F1 computed from its counts.

    Args:
        hits: examples of the class that were predicted as it.
        predicted: examples that were predicted as the class.
        true: examples of the class.
    """
    return ClassScores(
        precision=hits / predicted if predicted else 0.0,
        recall=hits / true if true else 0.0,
        f1=2 * hits / (predicted + true) if predicted + true else 0.0,
        support=true,
    )


def hardest_examples(
    examples: Dataset,
    losses: NDArray[np.float64],
    describe: Callable[[int], tuple[str | float, str | float, float | None]],
) -> list[HardExample]:
    """Return the ten examples of largest loss; of two with equal losses the earlier comes first.

    Args:
        examples: rows with ``text`` and perhaps ``text_pair``; words are joined by blanks, choices by bars.
        losses: of each row, shape (n,).
        describe: a row's number to its label, the prediction, and the label's probability or None.
    """
    found = []
    for row in map(int, np.argsort(-losses, kind="stable")[:HARDEST]):
        example = examples[row]
        text, pair = example["text"], example.get("text_pair")
        text = " ".join(text) if isinstance(text, list) else text
        pair = " | ".join(pair) if isinstance(pair, list) else pair
        found.append(HardExample(row, text, pair, *describe(row), float(losses[row])))
    return found


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the probabilities of logits [n, classes], in float64."""
    wide = logits.astype(np.float64)
    powers = np.exp(wide - wide.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)
