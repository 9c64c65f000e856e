"""Loss and scores of classification and regression, in one process or many."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from peftlab.tasks.batches import eval_batches
from peftlab.tasks.evaluation_turns import over_processes
from peftlab.tasks.labelled.evaluation import load_metric
from peftlab.tasks.table import Task
from peftlab.tasks.tokens import Row


def summed_loss(model: nn.Module, inputs: dict[str, Tensor], *, regression: bool) -> Tensor:
    """Return the sum over a batch of cross-entropy, or of the squared error for regression, in fp32."""
    labels = inputs["labels"]
    logits = model(**{key: value for key, value in inputs.items() if key != "labels"}).logits.float()
    if regression:
        return F.mse_loss(logits.squeeze(-1), labels, reduction="none").sum()
    return F.cross_entropy(logits, labels, reduction="none").sum()


@dataclass(frozen=True)
class Evaluation:
    """Labelled splits and how a model is scored on them.

    Attributes:
        task: whose metrics are computed.
        splits: tokenised examples by split name, the deciding split first.
        collate: rows to one batch of tensors.
        batch_size: examples per batch and process.
    """

    task: Task
    splits: Mapping[str, Dataset]
    collate: Callable[[Sequence[Row]], dict[str, Tensor]]
    batch_size: int

    def score(self, model: nn.Module) -> dict[str, dict[str, float]]:
        """Return the task's metrics and the mean loss of each split; the model should be in eval mode.

        Every process must call it, and each gets the same result.
        """
        metric = load_metric(self.task)
        scores = {}
        for split, data in self.splits.items():
            predictions, labels = self.predict(model, data), numpy.asarray(data["label"])
            if self.task.regression:
                answers, loss = predictions, float(numpy.mean((predictions - labels) ** 2))
            else:
                answers = predictions.argmax(-1)
                loss = F.cross_entropy(torch.from_numpy(predictions), torch.from_numpy(labels)).item()
            values = metric.compute(predictions=answers, references=labels) or {}
            scores[split] = {name: float(value) for name, value in values.items()} | {"loss": loss}
        return scores

    def predict(self, model: nn.Module, data: Dataset) -> NDArray[numpy.float32]:
        """Return the logits of ``data`` in its own order: (n, classes), or (n,) for regression."""

        def logits(inputs: dict[str, Tensor]) -> NDArray[numpy.float32]:
            found = model(**{key: value for key, value in inputs.items() if key != "labels"}).logits.float()
            return (found.squeeze(-1) if self.task.regression else found).cpu().numpy()

        batches = eval_batches(data["length"], self.batch_size)
        found = over_processes(data, batches, self.collate, logits)
        result = numpy.empty((len(data), *found[0].shape[1:]), dtype=numpy.float32)
        for batch, part in zip(batches, found, strict=True):
            result[batch] = part
        return result
