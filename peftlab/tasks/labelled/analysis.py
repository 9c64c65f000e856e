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
        label, predicted: class names, or numbers for regression.
        probability: of ``label``; None for regression.
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
        by_class: class name, in label order, to its scores; empty for regression.
        confusion: examples by [class of the label][class predicted], in label order; empty for regression.
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
            _hard(examples, row, float(truth[row]), float(predictions[row]), None, float(losses[row]))
            for row in _largest(losses)
        ]
        return Analysis(points=points, hardest=hardest)
    probabilities = softmax(predictions)
    answers = predictions.argmax(-1)
    of_label = probabilities[np.arange(len(truth)), truth]
    hardest = [
        _hard(
            examples,
            row,
            labels[truth[row]],
            labels[answers[row]],
            float(of_label[row]),
            float(-np.log(max(of_label[row], np.finfo(np.float64).tiny))),
        )
        for row in _largest(-of_label)
    ]
    confusion = np.zeros((len(labels), len(labels)), np.int64)
    np.add.at(confusion, (truth, answers), 1)
    return Analysis(by_class=_by_class(labels, confusion), confusion=confusion.tolist(), hardest=hardest)


def _by_class(labels: Sequence[str], confusion: NDArray[np.int64]) -> dict[str, ClassScores]:
    right, predicted, support = confusion.diagonal(), confusion.sum(0), confusion.sum(1)
    scores = {}
    for i, name in enumerate(labels):
        hits, said, true = int(right[i]), int(predicted[i]), int(support[i])
        scores[name] = ClassScores(
            precision=hits / said if said else 0.0,
            recall=hits / true if true else 0.0,
            f1=2 * hits / (said + true) if said + true else 0.0,
            support=true,
        )
    return scores


def _largest(losses: NDArray[np.float64]) -> list[int]:
    """The places of the largest numbers, the earlier of equals first."""
    return [int(row) for row in np.argsort(-losses, kind="stable")[:HARDEST]]


def _hard(
    examples: Dataset, row: int, label: str | float, predicted: str | float, probability: float | None, loss: float
) -> HardExample:
    example = examples[row]
    return HardExample(row, example["text"], example.get("text_pair"), label, predicted, probability, loss)


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the probabilities of logits [n, classes], in float64."""
    wide = logits.astype(np.float64)
    powers = np.exp(wide - wide.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)
