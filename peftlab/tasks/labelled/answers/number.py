"""A number for each text, or pair of texts: ``text/regression`` and GLUE's STS-B."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from peftlab.tasks.labelled.analysis import Analysis, analyse
from peftlab.tasks.labelled.answers.base import Answers, Array, Predictions
from peftlab.tasks.labelled.evaluation import load_metric
from peftlab.tasks.labelled.metrics import majority_baseline
from peftlab.tasks.tokens import Collate, Row


class Number(Answers):
    """The model's one logit; the loss is the squared error."""

    problem = "regression"

    def collate(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[Row]], dict[str, Tensor]]:
        """Return ``Collate`` with numbers."""
        return Collate(tokenizer, regression=True)

    def logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the numbers, [rows]."""
        return super().logits(model, batch).squeeze(-1)

    def loss(self, model: nn.Module, batch: dict[str, Tensor], weights: Tensor | None = None) -> Tensor:
        """Return the sum of the squared errors."""
        return F.mse_loss(self.logits(model, batch), batch["labels"], reduction="none").sum()

    def score(self, outputs: Sequence[Array], labels: Sequence[object]) -> dict[str, float]:
        """Return the task's metrics and the mean squared error."""
        numbers, truth = np.stack(outputs), np.asarray(labels, np.float64)
        values = load_metric(self.task).compute(predictions=numbers, references=truth) or {}
        loss = float(np.mean((numbers - truth) ** 2))
        return {name: float(value) for name, value in values.items()} | {"loss": loss}

    def baseline(self, train: Sequence[object], labels: Sequence[object]) -> dict[str, float]:
        """Return the metrics of always answering the training labels' mean."""
        return majority_baseline(self.task, np.asarray(train, np.float64), np.asarray(labels, np.float64))

    def analyse(self, outputs: Sequence[Array], examples: Dataset) -> Analysis:
        """Return points for a scatter plot and the hardest examples."""
        return analyse((), np.stack(outputs), examples)

    def predictions(self, outputs: Sequence[Array]) -> Predictions:
        """Return the numbers."""
        return Predictions([float(value) for value in outputs])

    def count(self, labels: Sequence[object]) -> Counter[int]:
        """Return nothing: there are no classes."""
        return Counter()
