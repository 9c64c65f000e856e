"""Where a model is right and where it is wrong: by class, by pair of classes, and on the hardest examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from datasets import Dataset

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
    """The predictions for a split, taken apart.

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
    """Return what ``predictions`` are like.

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
        hardest = [
            hard_example(examples, row, float(truth[row]), float(predictions[row]), None, float(losses[row]))
            for row in largest(losses)
        ]
        return Analysis(points=points, hardest=hardest)
    probabilities = softmax(predictions)
    answers = predictions.argmax(-1)
    of_label = probabilities[np.arange(len(truth)), truth]
    hardest = [
        hard_example(
            examples,
            row,
            labels[truth[row]],
            labels[answers[row]],
            float(of_label[row]),
            float(-np.log(max(of_label[row], np.finfo(np.float64).tiny))),
        )
        for row in largest(-of_label)
    ]
    confusion = confusion_of(len(labels), truth, answers)
    return Analysis(by_class=scores_by_class(labels, confusion), confusion=confusion.tolist(), hardest=hardest)


def confusion_of(n: int, truth: Sequence[int] | Integers, answers: Sequence[int] | Integers) -> Integers:
    """Return the number of examples by [class of the label][class predicted], of ``n`` classes."""
    found = np.zeros((n, n), np.int64)
    np.add.at(found, (np.asarray(truth, np.int64), np.asarray(answers, np.int64)), 1)
    return found


def scores_by_class(labels: Sequence[str], confusion: Integers) -> dict[str, ClassScores]:
    """Return the scores of each class, by name, of a confusion matrix."""
    right, said, true = confusion.diagonal(), confusion.sum(0), confusion.sum(1)
    return {name: class_scores(int(right[i]), int(said[i]), int(true[i])) for i, name in enumerate(labels)}


def class_scores(hits: int, said: int, true: int) -> ClassScores:
    """Return a class's scores: of ``said`` answers and ``true`` labels, ``hits`` are both."""
    return ClassScores(
        precision=hits / said if said else 0.0,
        recall=hits / true if true else 0.0,
        f1=2 * hits / (said + true) if said + true else 0.0,
        support=true,
    )


def largest(losses: NDArray[np.float64]) -> list[int]:
    """Return the places of the ten largest numbers, the earlier of equals first."""
    return [int(row) for row in np.argsort(-losses, kind="stable")[:HARDEST]]


def hard_example(
    examples: Dataset, row: int, label: str | float, predicted: str | float, probability: float | None, loss: float
) -> HardExample:
    """Return a row of ``examples`` with its answer; words are joined by blanks, choices by bars."""
    example = examples[row]
    text, pair = example["text"], example.get("text_pair")
    text = " ".join(text) if isinstance(text, list) else text
    pair = " | ".join(pair) if isinstance(pair, list) else pair
    return HardExample(row, text, pair, label, predicted, probability, loss)


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the probabilities of logits [n, classes], in float64."""
    wide = logits.astype(np.float64)
    powers = np.exp(wide - wide.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)
