"""Which columns of the user's files a task reads, and the recipe's keys that name them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from peftlab.errors import PeftlabError
from peftlab.tasks.config import DataConfig
from peftlab.tasks.reading.readers import Table

_BEFORE_CHOICES = ("context", "prompt")


@dataclass(frozen=True)
class Columns:
    """What a row is read from; a test split may lack the labels.

    Attributes:
        inputs, labels: column name to the recipe's key that names it, in the order in which they are read.
    """

    inputs: Mapping[str, str]
    labels: Mapping[str, str]

    def needed(self, split: str, table: Table) -> dict[str, str]:
        """Return the columns that a split's table must have, each with its key."""
        unlabelled = split == "test" and not any(name in table.columns for name in self.labels)
        return {**self.inputs, **({} if unlabelled else self.labels)}


def text_columns(data: DataConfig, there: Collection[str]) -> Columns:
    """Return the text, or the two texts of a pair, and the label."""
    return _columns(dict.fromkeys(data.text or (), "data.text"), {data.label: "data.label"} if data.label else {})


def multilabel_columns(data: DataConfig, there: Collection[str]) -> Columns:
    """Return the text, or the pair, and the column of label sets, or the columns that say 1 or 0 of each label."""
    sets = {data.label: "data.label"} if data.label else dict.fromkeys(data.labels or (), "data.labels")
    return _columns(dict.fromkeys(data.text or (), "data.text"), sets)


def word_columns(data: DataConfig, there: Collection[str]) -> Columns:
    """Return the column of words, ``tokens`` by default, and that of their tags, ``tags``."""
    return _columns({(data.text or ["tokens"])[0]: "data.text"}, {data.label or "tags": "data.label"})


def choice_columns(data: DataConfig, there: Collection[str]) -> Columns:
    """Return the text before the choices, the choices and the label.

    Args:
        there: the file's columns: without ``data.text`` those of ``context`` and ``prompt`` that it has are the text.
    """
    before = data.text or [name for name in _BEFORE_CHOICES if name in there]
    inputs = dict.fromkeys(before, "data.text") | dict.fromkeys(data.choices or ["choices"], "data.choices")
    return _columns(inputs, {data.label or "label": "data.label"})


def chat_columns(data: DataConfig, there: Collection[str]) -> Columns:
    """Return the columns that the recipe names; others are recognised row by row."""
    named = {"messages": data.messages, "prompt": data.prompt, "completion": data.completion}
    return _columns({name: f"data.{key}" for key, name in named.items() if name is not None}, {})


def completion_columns(data: DataConfig, there: Collection[str]) -> Columns:
    """Return the columns ``prompt`` and ``completion``, or what the recipe calls them."""
    return _columns({data.prompt or "prompt": "data.prompt", data.completion or "completion": "data.completion"}, {})


def plain_columns(data: DataConfig, there: Collection[str]) -> Columns:
    """Return the column of texts, ``text`` by default."""
    return _columns({(data.text or ["text"])[0]: "data.text"}, {})


def preference_columns(data: DataConfig, there: Collection[str]) -> Columns:
    """Return both answers, and the prompt where the recipe names it."""
    answers = dict.fromkeys(("chosen", "rejected"), "task text/preference")
    return _columns(({data.prompt: "data.prompt"} if data.prompt else {}) | answers, {})


def _columns(inputs: dict[str, str], labels: dict[str, str]) -> Columns:
    for name in labels:
        if name in inputs:
            raise PeftlabError(f"{labels[name]} {name!r} is also in {inputs[name]}; a model would read the answer")
    return Columns(inputs, labels)
