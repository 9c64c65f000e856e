"""Scores of labelled tasks, in one process or many."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from datasets import Dataset
from torch import Tensor, nn

from peftlab.tasks.batches import eval_batches
from peftlab.tasks.evaluation_turns import over_processes
from peftlab.tasks.labelled.answers.base import Answers, Array
from peftlab.tasks.tokens import Row


@dataclass(frozen=True)
class Evaluation:
    """Labelled splits and how a model is scored on them.

    Attributes:
        answers: the task's kind of answers.
        splits: tokenised examples by split name, the deciding split first.
        collate: rows to one batch of tensors.
        batch_size: examples per batch and process.
    """

    answers: Answers
    splits: Mapping[str, Dataset]
    collate: Callable[[Sequence[Row]], dict[str, Tensor]]
    batch_size: int

    def score(self, model: nn.Module) -> dict[str, dict[str, float]]:
        """Return the task's metrics and the mean loss of each split; the model should be in eval mode.

        Every process must call it, and each gets the same result.
        """
        return {
            split: self.answers.score(self.outputs(model, data), list(data["label"]))
            for split, data in self.splits.items()
        }

    def outputs(self, model: nn.Module, data: Dataset) -> list[Array]:
        """Return what the answer of each row of ``data`` is read from, in its own order."""
        batches = eval_batches(data["length"], self.batch_size)
        found = over_processes(data, batches, self.collate, lambda batch: self.answers.outputs(model, batch))
        rows: dict[int, Array] = {}
        for batch, part in zip(batches, found, strict=True):
            rows |= zip(batch, part, strict=True)
        return [rows[place] for place in range(len(data))]
