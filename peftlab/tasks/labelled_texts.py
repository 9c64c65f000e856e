"""Examples in memory: texts and labels, and their fingerprint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

from peftlab.tasks.table import Task

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Examples:
    """One split.

    Attributes:
        text: the sentence, or the first of a pair.
        text_pair: the second of a pair; None where the task has single sentences.
        label: class index or number of each example; None where the split is unlabelled.
    """

    text: list[str]
    text_pair: list[str] | None
    label: Sequence[float] | None

    def __len__(self) -> int:
        return len(self.text)

    def take(self, rows: Iterable[int]) -> Examples:
        """Return the examples at ``rows``, in that order."""
        rows = list(rows)
        return Examples(
            [self.text[row] for row in rows],
            None if self.text_pair is None else [self.text_pair[row] for row in rows],
            None if self.label is None else [self.label[row] for row in rows],
        )

    def dataset(self, regression: bool) -> Dataset:
        """Return them as an in-memory dataset: ``text``, ``text_pair`` and ``label`` where they exist."""
        from datasets import Dataset, Features, Value

        columns: dict[str, Sequence[object]] = {"text": self.text}
        types = {"text": Value("string")}
        if self.text_pair is not None:
            columns["text_pair"] = self.text_pair
            types["text_pair"] = Value("string")
        if self.label is not None:
            columns["label"] = self.label
            types["label"] = Value("float64" if regression else "int64")
        return Dataset.from_dict(columns, features=Features(types))


def fingerprint(task: Task, splits: Mapping[str, Examples]) -> str:
    """Return the SHA-256 (hexadecimal) of a task's name, its classes and every row in order.

    It depends on the content alone, so the same rows give the same value on every machine and from every file
    format.
    """
    digest = hashlib.sha256(json.dumps([task.name, task.labels]).encode())
    for name in sorted(splits):
        split = splits[name]
        pairs = repeat(None) if split.text_pair is None else split.text_pair
        labels = repeat(None) if split.label is None else split.label
        digest.update(json.dumps([name, len(split)]).encode())
        for row in zip(split.text, pairs, labels, strict=False):
            digest.update(json.dumps(row).encode())
    return digest.hexdigest()
