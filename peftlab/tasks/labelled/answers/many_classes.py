"""Any number of a task's classes for each text: ``text/multilabel``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import cast

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from peftlab.tasks.labelled.analysis import Analysis, class_scores, hard_example, largest
from peftlab.tasks.labelled.answers.base import Answers, Array, Predictions
from peftlab.tasks.tokens import Collate, Row

Sets = Sequence[Sequence[int]]


class ManyClasses(Answers):
    """Each class whose probability, the sigmoid of its logit, is 0.5 or more.

    The loss of an example is the mean over the classes of the binary cross-entropy. A class weight multiplies the loss
    of the examples that have the class (``pos_weight``); ``balanced`` is the others divided by them.
    """

    problem = "multi_label_classification"

    def collate(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[Row]], dict[str, Tensor]]:
        """Return ``Collate`` with a row of 0 and 1 for each example."""
        pad = Collate(tokenizer, regression=False)

        def collate(rows: Sequence[Row]) -> dict[str, Tensor]:
            batch = pad.padded(rows)
            if "label" in rows[0]:
                batch["labels"] = torch.from_numpy(self._matrix([row["label"] for row in rows])).float()
            return batch

        return collate

    def loss(self, model: nn.Module, batch: dict[str, Tensor], weights: Tensor | None = None) -> Tensor:
        """Return the sum of the examples' mean binary cross-entropies."""
        logits = self.logits(model, batch)
        weights = None if weights is None else weights.to(logits.device)
        losses = F.binary_cross_entropy_with_logits(logits, batch["labels"], pos_weight=weights, reduction="none")
        return losses.mean(-1).sum()

    def score(self, outputs: Sequence[Array], labels: Sequence[object]) -> dict[str, float]:
        """Return F1 over all decisions (micro) and averaged over all classes (macro), exact matches, and the loss."""
        logits, truth = np.stack(outputs), self._matrix(labels)
        return _metrics(logits >= 0, truth) | {"loss": float(_losses(logits, truth).mean())}

    def baseline(self, train: Sequence[object], labels: Sequence[object]) -> dict[str, float]:
        """Return the metrics of the most frequent set of classes (the first in order where equal)."""
        counts = Counter(tuple(each) for each in _sets(train))
        answer = min(counts, key=lambda each: (-counts[each], each))
        return _metrics(self._matrix([answer] * len(labels)), self._matrix(labels))

    def analyse(self, outputs: Sequence[Array], examples: Dataset) -> Analysis:
        """Return the scores of each class and the hardest examples."""
        logits, truth = np.stack(outputs), self._matrix(examples["label"])
        said, losses = logits >= 0, _losses(logits, truth)
        scores = {
            name: class_scores(int((said[:, i] & truth[:, i]).sum()), int(said[:, i].sum()), int(truth[:, i].sum()))
            for i, name in enumerate(self.task.labels)
        }
        hardest = [
            hard_example(examples, row, self._names(truth[row]), self._names(said[row]), None, float(losses[row]))
            for row in largest(losses)
        ]
        return Analysis(by_class=scores, hardest=hardest)

    def confidence(self, outputs: Sequence[Array]) -> list[float]:
        """Return the mean over the classes of the probability of what is said of them: that they are there, or not."""
        return np.exp(-np.logaddexp(0, -np.abs(np.stack(outputs).astype(np.float64)))).mean(-1).tolist()

    def predictions(self, outputs: Sequence[Array]) -> Predictions:
        """Return lists of class names, and each class's own probability."""
        logits = np.stack(outputs).astype(np.float64)
        answers = [[name for name, yes in zip(self.task.labels, row, strict=True) if yes] for row in logits >= 0]
        return Predictions(answers, self.task.labels, np.exp(-np.logaddexp(0, -logits)))

    def count(self, labels: Sequence[object]) -> Counter[int]:
        """Return the number of examples that have each class."""
        return Counter(chain.from_iterable(_sets(labels)))

    def balance(self, count: int, counts: Counter[int], examples: int) -> float:
        """Return the number of examples without the class, divided by those with it."""
        return (examples - count) / count

    def name(self, label: object) -> str:
        """Return the names of a set of classes."""
        return ", ".join(self.task.labels[i] for i in _sets([label])[0]) or "none"

    def _matrix(self, labels: Sequence[object]) -> NDArray[np.bool_]:
        """Return which of the classes each example has: [examples, classes]."""
        found = np.zeros((len(labels), len(self.task.labels)), np.bool_)
        for row, places in enumerate(_sets(labels)):
            found[row, list(places)] = True
        return found

    def _names(self, said: NDArray[np.bool_]) -> str:
        return self.name(np.flatnonzero(said).tolist())


def _sets(labels: Sequence[object]) -> Sets:
    return cast(Sets, labels)


def _losses(logits: Array, truth: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return each example's mean binary cross-entropy."""
    wide = logits.astype(np.float64)
    return np.logaddexp(0, np.where(truth, -wide, wide)).mean(-1)


def _metrics(said: NDArray[np.bool_], truth: NDArray[np.bool_]) -> dict[str, float]:
    """Return ``micro_f1``, ``macro_f1`` and ``subset_accuracy``; a class that is neither said nor true scores 0."""
    hits, either = (said & truth).sum(0), said.sum(0) + truth.sum(0)
    return {
        "micro_f1": float(2 * hits.sum() / max(1, either.sum())),
        "macro_f1": float((2 * hits / np.maximum(1, either)).mean()),
        "subset_accuracy": float((said == truth).all(-1).mean()),
    }
