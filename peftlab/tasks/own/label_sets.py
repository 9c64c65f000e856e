"""``text/multilabel``: texts with any number of classes each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from peftlab.errors import PeftlabError
from peftlab.tasks.config import DataConfig
from peftlab.tasks.labelled_texts import Examples
from peftlab.tasks.labels import as_written, is_missing, items, placed_sets
from peftlab.tasks.reading.bad_rows import Fault, listed, quoted
from peftlab.tasks.reading.readers import Table
from peftlab.tasks.table import Task
from peftlab.tasks.text import load_own, refuse_all, texts

_SAYS = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}


def load_label_sets(
    task: Task, data: DataConfig, classes: Sequence[str] | None = None
) -> tuple[Task, dict[str, Examples], dict[str, int]]:
    """Read ``text/multilabel`` from the user's files, as ``load_own`` does.

    The labels of a row are a list, or a text with ``data.separator`` between them, in the column ``data.label``; or
    those of the columns ``data.labels`` that say 1, where 0 in all of them is a row without a label.

    Args:
        classes: a trained model's class names in label order; the files may lack some of them but contain no others.
    """
    text = tuple(data.text or ())

    def read(tables: Mapping[str, Table], faults: list[Fault]) -> tuple[dict[str, Examples], Sequence[str]]:
        columns = {split: [texts(table, name, faults) for name in text] for split, table in tables.items()}
        if data.labels is not None:
            labels, names = _of_columns(tables, data.labels, classes, faults)
        else:
            labels, names = _of_sets(tables, str(data.label), data.separator, classes, faults)
        splits = {
            split: Examples(found[0], found[1] if len(found) == 2 else None, labels.get(split))
            for split, found in columns.items()
        }
        return splits, names

    return load_own(task, data, read)


def _of_sets(
    tables: Mapping[str, Table], column: str, separator: str | None, known: Sequence[str] | None, faults: list[Fault]
) -> tuple[dict[str, list[list[int]]], Sequence[str]]:
    """Return the indices of each row's classes, and the class names, from one column."""
    labelled = {split: table for split, table in tables.items() if column in table.columns}
    spelled = {split: _sets(table, column, separator, faults) for split, table in labelled.items()}
    refuse_all(faults)
    found, classes = placed_sets(labelled, column, spelled, known)
    return {split: [sorted(set(places)) for places in rows] for split, rows in found.items()}, classes


def _sets(table: Table, column: str, separator: str | None, faults: list[Fault]) -> list[list[str]]:
    """Return a column's lists of labels; what is no such list, or an empty one, is added to ``faults``."""
    values = table.column(column, "data.label")
    texts = [row for row, value in enumerate(values) if isinstance(value, str) and not value.lstrip().startswith("[")]
    if separator is None and texts:
        problem = f"contains texts, {quoted(values[texts[0]])}; data.separator says what separates the labels; they are"
        faults += table.fault(column, problem, [row for row in texts if not is_missing(values[row])])
        return []
    found = [None if is_missing(value) else items(value, separator) for value in values]
    bad = [row for row, labels in enumerate(found) if labels is None and not is_missing(values[row])]
    faults += table.fault(column, f"is no list of labels ({quoted(values[bad[0]])})" if bad else "", bad)
    none = [row for row, labels in enumerate(found) if labels == []]
    faults += table.fault(column, "is an empty list of labels (say so by columns of 0 and 1, data.labels)", none)
    return [labels or [] for labels in found]


def _of_columns(
    tables: Mapping[str, Table], columns: Sequence[str], known: Sequence[str] | None, faults: list[Fault]
) -> tuple[dict[str, list[list[int]]], Sequence[str]]:
    """Return the indices of each row's classes, and the class names, from a column of 0 and 1 for each class."""
    classes = tuple(columns if known is None else as_written(known, columns))
    if set(classes) != set(columns):
        raise PeftlabError(f"data.labels are {listed(columns, 50)}; the model's classes are {listed(classes, 50)}")
    labelled = {split: table for split, table in tables.items() if columns[0] in table.columns}
    said = {split: [_says(table, name, faults) for name in columns] for split, table in labelled.items()}
    refuse_all(faults)
    places = [classes.index(name) for name in columns]
    found = {}
    for split, by_column in said.items():
        rows = zip(*by_column, strict=True)
        found[split] = [sorted(place for place, yes in zip(places, row, strict=True) if yes) for row in rows]
    return found, classes


def _says(table: Table, column: str, faults: list[Fault]) -> list[bool]:
    """Return which rows of a column say 1; what is neither 1 nor 0 is added to ``faults``."""
    values = table.column(column, "data.labels")
    found = [_SAYS.get(str(value).strip().lower()) for value in values]
    bad = [row for row, yes in enumerate(found) if yes is None and not is_missing(values[row])]
    faults += table.fault(column, f"is neither 0 nor 1 but {quoted(values[bad[0]])}" if bad else "", bad)
    return [bool(yes) for yes in found]
