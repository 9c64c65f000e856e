"""From the values of a label column to class names, bins or numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.tasks.readers import Table


def numbers(table: Table, column: str) -> list[float]:
    """Return a column as finite numbers; ``PeftlabError`` names the rows where one is missing or none."""
    values = _present(table, column)
    found = [_number(value) for value in values]
    bad = [row for row, value in enumerate(found) if not math.isfinite(value)]
    table.refuse(column, f"is not a finite number ({values[bad[0]]!r})" if bad else "", bad)
    return found


def bin_classes(values: Sequence[float], bins: Mapping[str, tuple[float | None, float | None]]) -> list[int | None]:
    """Return the place in ``bins`` of each value's bin, None where it is in none.

    Args:
        values: finite numbers.
        bins: class name to ``(lowest, highest)``, both inclusive, None for open.

    Raises:
        PeftlabError: a bin whose lowest exceeds its highest, or two bins that share a value.
    """
    edges = [(-math.inf if lo is None else lo, math.inf if hi is None else hi) for lo, hi in bins.values()]
    ordered = sorted(zip(edges, bins, strict=True))
    for (low, high), name in ordered:
        if not low <= high:
            raise PeftlabError(f"data.bins.{name}: {low} is not at most {high}")
    for ((_, high), first), ((low, _), second) in pairwise(ordered):
        if low <= high:
            raise PeftlabError(f"data.bins: {first!r} and {second!r} overlap at {low} (both ends are inclusive)")
    return [next((place for place, (low, high) in enumerate(edges) if low <= value <= high), None) for value in values]


def class_names(tables: Mapping[str, Table], column: str) -> tuple[tuple[str, ...], dict[str, list[str]]]:
    """Return the training table's classes in order, and each table's column as class names.

    A class is a string (blanks around it removed), an integer or a truth value. Classes are sorted, by value
    if all are numbers.

    Args:
        tables: split name to table, ``train`` among them.
        column: the label column.

    Raises:
        PeftlabError: missing labels, fractions, a single class, or a class that training never shows.
    """
    columns = {split: _names(table, column) for split, table in tables.items()}
    known = set(columns["train"])
    if len(known) < 2:
        raise PeftlabError(f"{tables['train'].path}: column {column!r} holds one class alone, {known.pop()!r}")
    numeric = all(math.isfinite(_number(name)) for name in known)
    classes = tuple(sorted(known, key=(lambda name: (_number(name), name)) if numeric else None))
    for split, names in columns.items():
        for row, name in enumerate(names):
            if name not in known:
                hint = did_you_mean(name, known)
                raise PeftlabError(f"{tables[split].where(row)}: class {name!r} is not in the training data{hint}")
    return classes, columns


def _names(table: Table, column: str) -> list[str]:
    values = _present(table, column)
    names = [_name(value) for value in values]
    bad = [row for row, name in enumerate(names) if name is None]
    table.refuse(
        column,
        f"is no class but {values[bad[0]]!r} (make classes with data.bins, or use text/regression)" if bad else "",
        bad,
    )
    return [name for name in names if name is not None]


def _name(value: object) -> str | None:
    """A label's class name, or None if it is a fraction or nothing that names a class."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else None
    if not isinstance(value, int | str):
        return None
    number = _number(value)
    return str(value).strip() if not math.isfinite(number) or number.is_integer() else None


def _present(table: Table, column: str) -> list[object]:
    values = table.column(column, "data.label")
    missing = [row for row, value in enumerate(values) if _is_missing(value)]
    table.refuse(column, "is missing", missing)
    return values


def _is_missing(value: object) -> bool:
    blank = isinstance(value, str) and not value.strip()
    return value is None or blank or (isinstance(value, float) and math.isnan(value))


def _number(value: object) -> float:
    """A label as a number, NaN if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan
