"""``text/choice``: rows with choices of their own, one of which is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from peftlab.tasks.config import DataConfig
from peftlab.tasks.labelled_texts import Examples
from peftlab.tasks.labels import is_missing, items
from peftlab.tasks.reading.bad_rows import Fault, quoted
from peftlab.tasks.reading.readers import Table
from peftlab.tasks.table import Task
from peftlab.tasks.text import load_own, refuse_all, texts

CHOICES = "choices"
LEAST = 2


def load_choices(
    task: Task, data: DataConfig, classes: Sequence[str] | None = None
) -> tuple[Task, dict[str, Examples], dict[str, int]]:
    """Read ``text/choice`` from the user's files, as ``load_own`` does.

    The choices of a row are a list in one column (in csv its JSON text, or lines), or one in each of several columns.
    The label is the right one's place, from 0, or its text. Texts before the choices are joined by a blank.

    Args:
        classes: not used; a row has choices of its own.
    """
    label = data.label or "label"

    def read(tables: Mapping[str, Table], faults: list[Fault]) -> tuple[dict[str, Examples], Sequence[str]]:
        splits = {}
        for split, table in tables.items():
            choices = row_choices(table, data.choices, faults)
            before = [name for name in table.columns if name not in (label, *(data.choices or [CHOICES]))]
            places = _places(table, label, choices, faults) if label in table.columns else None
            splits[split] = Examples(before_choices(table, before, faults), choices, places)
        refuse_all(faults)
        return splits, ()

    return load_own(task, data, read)


def before_choices(table: Table, names: Sequence[str], faults: list[Fault]) -> list[str]:
    """Return each row's text before its choices: the columns' texts joined by a blank; empty without a column."""
    columns = [texts(table, name, faults) for name in names]
    return [" ".join(row) for row in zip(*columns, strict=True)] if columns else [""] * len(table)


def row_choices(table: Table, names: Sequence[str] | None, faults: list[Fault]) -> list[list[str]]:
    """Return each row's choices, at least two; rows without are added to ``faults``.

    Args:
        names: one column of lists, or the columns of a choice each; None: ``choices``.
    """
    names = names or [CHOICES]
    columns = [table.column(name, "data.choices") for name in names]
    if len(columns) == 1:
        found = [[] if is_missing(value) else items(value, "\n") for value in columns[0]]
    else:
        found = [items(row) for row in zip(*columns, strict=True)]
    first = columns[0]
    missing = {row for values in columns for row, value in enumerate(values) if is_missing(value)}
    bad = [row for row, choices in enumerate(found) if choices is None and row not in missing]
    faults += table.fault(names[0], f"is no list of texts ({quoted(first[bad[0]])})" if bad else "", bad)
    few = [row for row, each in enumerate(found) if each is not None and len(each) < LEAST and row not in missing]
    faults += table.fault(names[0], "has fewer than two choices", few)
    return [choices or [] for choices in found]


def _places(table: Table, column: str, choices: list[list[str]], faults: list[Fault]) -> list[int]:
    """Return the place of each row's right choice: labels are places if all are whole numbers, else texts."""
    values = table.column(column, "data.label")
    numbers = [_whole(value) for value in values]
    if all(n is not None or is_missing(value) for n, value in zip(numbers, values, strict=True)):
        found = [n if n is not None and 0 <= n < len(row) else None for n, row in zip(numbers, choices, strict=True)]
    else:
        found = [
            row.index(str(value)) if str(value) in row else None for value, row in zip(values, choices, strict=True)
        ]
    bad = [r for r, place in enumerate(found) if place is None and choices[r] and not is_missing(values[r])]
    if bad:
        n, value = len(choices[bad[0]]), quoted(values[bad[0]])
        problem = f"is {value}, neither the place (0 to {n - 1}) nor the text of one of the row's {n} choices,"
        faults += table.fault(column, problem, bad)
    return [place or 0 for place in found]


def _whole(value: object) -> int | None:
    try:
        return None if isinstance(value, bool) else int(str(value).strip().removesuffix(".0"))
    except ValueError:
        return None
