"""Converting the values of a label column to class names, bins or numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import parse_json
from peftlab.tasks.reading.bad_rows import Fault, listed, quoted
from peftlab.tasks.reading.content import is_unicode
from peftlab.tasks.reading.readers import Table


def numbers(table: Table, column: str, faults: list[Fault]) -> list[float]:
    """Return a column as numbers, NaN where a label is missing; other values are added to ``faults``."""
    values = table.column(column, "data.label")
    found = [_number(value) for value in values]
    bad = [row for row, (value, n) in enumerate(zip(values, found, strict=True)) if not _ok(value, math.isfinite(n))]
    faults += table.fault(column, _no_number(values[bad[0]]) if bad else "", bad)
    return found


def _no_number(value: object) -> str:
    comma = isinstance(value, str) and "," in value and math.isfinite(_number(value.replace(",", ".", 1)))
    return f"is not a finite number ({quoted(value)}{'; write a decimal point, no comma' if comma else ''})"


def names(table: Table, column: str, faults: list[Fault]) -> list[str]:
    """Return a column as class names, empty where a label is missing; other values are added to ``faults``.

    A class is a string (blanks around it removed), an integer or a truth value.
    """
    values = table.column(column, "data.label")
    found = [_name(value) for value in values]
    bad = [row for row, (value, n) in enumerate(zip(values, found, strict=True)) if not _ok(value, n is not None)]
    problem = "" if not bad else f"is no class but {quoted(values[bad[0]])}"
    faults += table.fault(column, f"{problem} (make classes with data.bins, or use text/regression)", bad)
    return [name or "" for name in found]


def _ok(value: object, readable: bool) -> bool:
    return readable or is_missing(value)


def bin_classes(values: Sequence[float], bins: Mapping[str, tuple[float | None, float | None]]) -> list[int | None]:
    """Return the position in ``bins`` of each value's bin, None where no bin contains it.

    Args:
        values: finite numbers.
        bins: class name to ``(lowest, highest)``, both inclusive, None for open; no two share a value.
    """
    edges = [(-math.inf if lo is None else lo, math.inf if hi is None else hi) for lo, hi in bins.values()]
    return [next((place for place, (low, high) in enumerate(edges) if low <= value <= high), None) for value in values]


def _sorted_classes(table: Table, column: str, labels: Iterable[str]) -> tuple[str, ...]:
    """Return the classes among the training table's labels, sorted, by value if all are numbers.

    Raises:
        PeftlabError: there is a single class.
    """
    known = set(labels)
    if len(known) < 2:
        raise PeftlabError(f"{table.path}: column {column!r} contains a single class, {quoted(known.pop())}")
    numeric = all(math.isfinite(_number(name)) for name in known)
    return tuple(sorted(known, key=(lambda name: (_number(name), name)) if numeric else None))


def as_written(classes: Sequence[str], labels: Iterable[str]) -> tuple[str, ...]:
    """Return a model's classes as the data names them: LABEL_0, LABEL_1, ... are 0, 1, ... unless it has those."""
    unnamed = [f"LABEL_{place}" for place in range(len(classes))] == list(classes)
    if unnamed and not set(classes) & set(labels):
        return tuple(str(place) for place in range(len(classes)))
    return tuple(classes)


def placed_sets(
    tables: Mapping[str, Table],
    column: str,
    labels: Mapping[str, Sequence[Sequence[str]]],
    known: Sequence[str] | None,
) -> tuple[dict[str, list[list[int]]], Sequence[str]]:
    """Return the labels of each table's rows as positions among the classes, and the classes.

    Args:
        tables, column, labels: labels by split, of each row; the label column.
        known: a trained model's classes; None: they are those of the training table.

    Raises:
        PeftlabError: there is a single class, or labels are not in ``known``; both sets are listed.
    """
    every = {split: list(chain.from_iterable(found)) for split, found in labels.items()}
    if known is None:
        classes, owner = _sorted_classes(tables["train"], column, every["train"]), "the training data"
    else:
        classes, owner = as_written(known, chain.from_iterable(every.values())), "the model"
    return _places(tables, column, labels, classes, owner), classes


def _places(
    tables: Mapping[str, Table],
    column: str,
    labels: Mapping[str, Sequence[Sequence[str]]],
    classes: Sequence[str],
    owner: str,
) -> dict[str, list[list[int]]]:
    """Return the labels of each table's rows as positions in ``classes``.

    Args:
        tables, labels: by split.
        column: the label column.
        owner: whose classes they are, for the message: ``the model``.

    Raises:
        PeftlabError: labels that are not in ``classes``; both sets are listed.
    """
    index = {name: place for place, name in enumerate(classes)}
    problems = []
    for split, found in labels.items():
        counts = Counter(chain.from_iterable(found))
        unknown = sorted(counts.keys() - index.keys())
        if unknown:
            rows = [row for row, names in enumerate(found) if not index.keys() >= set(names)]
            hint = did_you_mean(unknown[0], classes)
            problem = f"has labels that are not classes of {owner}, {quoted(unknown[0])}{hint},"
            problems += [*map(str, tables[split].fault(column, problem, rows)), f"  this file's: {_listing(counts)}"]
    if problems:
        raise PeftlabError("\n".join([*problems, f"  those of {owner}: {_listing(classes)}"]))
    return {split: [[index[name] for name in names] for names in found] for split, found in labels.items()}


def items(value: object, separator: str | None = None) -> list[str] | None:
    """Return the texts of a list: a list, its JSON text, or a text whose parts ``separator`` separates.

    Args:
        separator: between the parts of a text, blanks around them removed; None: parts are separated by blanks.

    Returns:
        None where the value is nothing of that kind, or an item is empty or not valid text.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError):
            value = parse_json(value)
    if isinstance(value, str):
        value = value.split() if separator is None else [part.strip() for part in value.split(separator)]
    if not isinstance(value, list | tuple):
        return None
    texts = [item if isinstance(item, str) else _name(item) for item in value]
    good = [text for text in texts if text is not None and text.strip() and is_unicode(text)]
    return good if len(good) == len(texts) else None


def _listing(classes: Iterable[str]) -> str:
    ordered = sorted(classes)
    return f"{listed(map(quoted, ordered), 50)} ({len(ordered)})"


def _name(value: object) -> str | None:
    """Return a label's class name, or None for a fraction or a value that cannot name a class."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else None
    if not isinstance(value, int | str) or not is_unicode(str(value)):
        return None
    number = _number(value)
    return str(value).strip() if not math.isfinite(number) or number.is_integer() else None


def is_missing(value: object) -> bool:
    """Return whether a text or label is absent: null, NaN or blank."""
    blank = isinstance(value, str) and not value.strip()
    return value is None or blank or (isinstance(value, float) and math.isnan(value))


def _number(value: object) -> float:
    """Return a label as a number, NaN if it is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan
