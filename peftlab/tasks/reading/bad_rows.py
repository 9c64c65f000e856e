"""Errors about bad rows: all kinds in one message, with the first few line or row numbers of each."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from peftlab.errors import PeftlabError

_LISTED = 10  # places or names that a message lists at most
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with some rows of a column.

    Attributes:
        path: the file.
        column: the column's name.
        problem: what is wrong, as the end of a sentence: ``is missing``.
        places: line or row numbers, at least one.
        unit: what ``places`` counts, ``line`` or ``row``.
        total: rows of the file.
    """

    path: Path
    column: str
    problem: str
    places: Sequence[int]
    unit: str
    total: int

    def __str__(self) -> str:
        where = f"{self.unit} {listed(map(str, self.places))}"
        return (
            f"{self.path}: column {quoted(self.column)} {self.problem} in {len(self.places)} of {self.total} rows "
            f"({where})"
        )


def refuse(faults: Sequence[Fault], hint: str = "") -> None:
    """Raise ``PeftlabError`` with a line for each fault and the hint after them, if there is any fault."""
    if faults:
        raise PeftlabError("\n".join(filter(None, (*map(str, faults), hint))))


def refuse_rows(path: Path, unit: str, problems: Sequence[tuple[int, str]]) -> None:
    """Raise ``PeftlabError`` where rows could not be read: the first with its problem, the others' places.

    Args:
        problems: line or row number of each such row and what is wrong with it.
    """
    if not problems:
        return
    (first, problem), *others = problems
    where = f"{path}:{first}" if unit == "line" else f"{path} row {first}"
    more = f"; and {len(others)} more bad rows ({unit} {listed(str(place) for place, _ in others)})" if others else ""
    raise PeftlabError(f"{where}: {problem}{more}")


def listed(items: Iterable[str], most: int = _LISTED) -> str:
    """Return the first items, comma separated and shortened where they are long, and ``...`` where there are more."""
    items = list(items)
    shown = [item if len(item) <= 80 else f"{item[:77]}..." for item in items[:most]]
    return ", ".join(shown + ["..."] * (len(items) > most)) or "none"


def quoted(value: object) -> str:
    """Return ``repr(value)``, shortened where it is long."""
    return _REPR.repr(value)
