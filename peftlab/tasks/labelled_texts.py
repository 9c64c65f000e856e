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
    from datasets import Dataset, List, Value


@dataclass(frozen=True)
class Examples:
    """One split.

    Attributes:
        text: the sentence, or the first of a pair; the words of a sentence whose words have tags; what comes before
            choices.
        text_pair: the second of a pair; a row's choices; None where the task has single sentences.
        label: what the model is to answer: the class index, the number, the indices of a row's classes or of its
            words' tags, or the place of the right choice; None where the split is unlabelled.
    """

    text: Sequence[str] | Sequence[list[str]]
    text_pair: Sequence[str] | Sequence[list[str]] | None
    label: Sequence[float] | Sequence[list[int]] | None

    def __len__(self) -> int:
        return len(self.text)

    def take(self, rows: Iterable[int]) -> Examples:
        """Return the examples at ``rows``, in that order."""
        rows = list(rows)
        return Examples(
            [self.text[row] for row in rows],  # type: ignore[arg-type]
            None if self.text_pair is None else [self.text_pair[row] for row in rows],  # type: ignore[arg-type]
            None if self.label is None else [self.label[row] for row in rows],  # type: ignore[arg-type]
        )

    def dataset(self) -> Dataset:
        """Return them as an in-memory dataset: ``text``, ``text_pair`` and ``label`` where they exist."""
        from datasets import Dataset, Features

        columns = {"text": self.text, "text_pair": self.text_pair, "label": self.label}
        there = {name: values for name, values in columns.items() if values is not None}
        return Dataset.from_dict(there, features=Features({name: _type(values) for name, values in there.items()}))


def _type(values: Sequence[object]) -> Value | List:
    """Return the type of a column by its values: texts, whole numbers (64 bits) or numbers, or lists of one of them."""
    from datasets import List, Value

    lists = [value for value in values if isinstance(value, list)]
    if lists:
        return List(_type([item for value in lists for item in value[:1]]))
    kinds = {str: "string", float: "float64"}
    return Value(next((kinds[type(value)] for value in values if type(value) in kinds), "int64"))


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
