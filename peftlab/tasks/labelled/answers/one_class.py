"""One of a task's classes for each text: ``text/classification`` and GLUE."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from peftlab.tasks.labelled.analysis import Analysis, analyse, softmax
from peftlab.tasks.labelled.answers.base import Answers, Array, Predictions
from peftlab.tasks.labelled.evaluation import load_metric
from peftlab.tasks.labelled.metrics import majority_baseline
from peftlab.tasks.tokens import Collate, Row


class OneClass(Answers):
    """A class by the largest of its logits; the loss is cross-entropy."""

    problem = "single_label_classification"

    def collate(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[Row]], dict[str, Tensor]]:
        """Return ``Collate`` with class indices."""
        return Collate(tokenizer, regression=False)

    def loss(self, model: nn.Module, batch: dict[str, Tensor], weights: Tensor | None = None) -> Tensor:
        """Return the sum of the cross-entropies."""
        logits = self.logits(model, batch)
        weights = None if weights is None else weights.to(logits.device)
        return F.cross_entropy(logits, batch["labels"], weights, reduction="none").sum()

    def score(self, outputs: Sequence[Array], labels: Sequence[object]) -> dict[str, float]:
        """Return the task's metrics and the mean cross-entropy."""
        logits, truth = np.stack(outputs), np.asarray(labels)
        values = load_metric(self.task).compute(predictions=logits.argmax(-1), references=truth) or {}
        loss = F.cross_entropy(torch.from_numpy(logits), torch.from_numpy(truth)).item()
        return {name: float(value) for name, value in values.items()} | {"loss": loss}

    def baseline(self, train: Sequence[object], labels: Sequence[object]) -> dict[str, float]:
        """Return the metrics of the majority class."""
        return majority_baseline(self.task, np.asarray(train), np.asarray(labels))

    def analyse(self, outputs: Sequence[Array], examples: Dataset) -> Analysis:
        """Return scores by class, the confusion matrix and the hardest examples."""
        return analyse(self.task.labels, np.stack(outputs), examples)

    def confidence(self, outputs: Sequence[Array]) -> list[float]:
        """Return the probability of the most probable class."""
        return softmax(np.stack(outputs)).max(-1).tolist()

    def predictions(self, outputs: Sequence[Array]) -> Predictions:
        """Return class names, and the probability of every class."""
        logits = np.stack(outputs)
        return Predictions([self.task.labels[i] for i in logits.argmax(-1)], self.task.labels, softmax(logits))
