"""``text/tokens``: sentences in words, each with a tag."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from peftlab.tasks.config import DataConfig
from peftlab.tasks.labelled_texts import Examples
from peftlab.tasks.labels import is_missing, items, placed_sets
from peftlab.tasks.own.schemes import entity_tag, of_entities
from peftlab.tasks.reading.bad_rows import Fault, quoted
from peftlab.tasks.reading.readers import Table
from peftlab.tasks.table import Task
from peftlab.tasks.text import load_own, refuse_all


def load_tagged_words(
    task: Task, data: DataConfig, classes: Sequence[str] | None = None
) -> tuple[Task, dict[str, Examples], dict[str, int]]:
    """Read ``text/tokens`` from the user's files, as ``load_own`` does.

    Words and tags are lists, of equal length in each row; a text is split at blanks. Tags like ``B-PER`` and ``O`` are
    those of entities (see ``peftlab.tasks.own.schemes``); others, such as parts of speech, are scored by accuracy.

    Args:
        classes: a trained model's tags in label order; the files may lack some of them but contain no others.
    """
    words_in, tags_in = (data.text or ["tokens"])[0], data.label or "tags"

    def read(tables: Mapping[str, Table], faults: list[Fault]) -> tuple[dict[str, Examples], Sequence[str]]:
        words = {split: _lists(table, words_in, "words", faults) for split, table in tables.items()}
        labelled = {split: table for split, table in tables.items() if tags_in in table.columns}
        spelled = {split: _lists(table, tags_in, "tags", faults) for split, table in labelled.items()}
        for split, table in labelled.items():
            faults += _uneven(table, tags_in, words[split], spelled[split])
        if of_entities(set(chain.from_iterable(chain.from_iterable(spelled.values())))):
            for split, table in labelled.items():
                faults += _odd_tags(table, tags_in, spelled[split])
        refuse_all(faults)
        found, tags = placed_sets(labelled, tags_in, spelled, classes)
        return {split: Examples(words[split], None, found.get(split)) for split in tables}, tags

    task, splits, left_out = load_own(task, data, read)
    return scored(task), splits, left_out


def scored(task: Task) -> Task:
    """Return the task with the metrics that its tags have: those of entities, or accuracy alone."""
    return task if of_entities(task.labels) else replace(task, metrics=("accuracy",))


def _lists(table: Table, column: str, what: str, faults: list[Fault]) -> list[list[str]]:
    """Return a column's lists; what is no list, or an empty one, is added to ``faults``."""
    values = table.column(column, "data.text")
    found = [[""] if is_missing(value) else items(value) for value in values]
    bad = [row for row, texts in enumerate(found) if not texts]
    faults += table.fault(column, f"is no list of {what} ({quoted(values[bad[0]])})" if bad else "", bad)
    return [texts or [] for texts in found]


def _uneven(table: Table, column: str, words: list[list[str]], tags: list[list[str]]) -> list[Fault]:
    """Return the rows with more or fewer tags than words, but for those that are at fault already."""
    known: tuple[list[str], ...] = ([], [""])
    pairs = enumerate(zip(words, tags, strict=True))
    bad = [row for row, (one, other) in pairs if len(one) != len(other) and one not in known and other not in known]
    if not bad:
        return []
    first = f"{len(tags[bad[0]])} tags for {len(words[bad[0]])} words"
    return table.fault(column, f"has not one tag for each word ({first})", bad)


def _odd_tags(table: Table, column: str, tags: list[list[str]]) -> list[Fault]:
    bad = [row for row, found in enumerate(tags) if not all(tag == "" or entity_tag(tag) for tag in found)]
    if not bad:
        return []
    first = next(tag for tag in tags[bad[0]] if not entity_tag(tag))
    return table.fault(column, f"has the tag {quoted(first)}, which is neither O nor like B-PER,", bad)
