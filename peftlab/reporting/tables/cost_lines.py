"""A table's rows by what they cost: FLOPs of a reference row, bytes, time, and the score beside a control's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from peftlab.reporting.tables.score_summary import Entry, Table

HEADINGS = ("FLOPs", "kept", "optim.", "sec", "score", "control", "its score", "FLOPs")


@dataclass(frozen=True)
class Controls:
    """What a table compares the costs of its rows with.

    Attributes:
        reference: the row whose FLOPs are 1. of: row to the row of equal cost that it is compared with.
    """

    reference: str
    of: Mapping[str, str] = field(default_factory=dict)


def cost_lines(table: Table, task: str, controls: Controls) -> list[tuple[str, list[str]]]:
    """Return each row's name and cells, in the order of ``HEADINGS``; ``-`` where a run has not finished."""
    return [(row, _cells(table, task, row, controls)) for row in table.rows]


def _cells(table: Table, task: str, row: str, controls: Controls) -> list[str]:
    entry, reference = table.entries.get((task, row)), table.entries.get((task, controls.reference))
    name = controls.of.get(row)
    control = table.entries.get((task, name)) if name is not None else None
    beside = [name or "", "" if name is None else _score(control), "" if name is None else share(control, reference)]
    if entry is None:
        return [*["-"] * 5, *beside]
    cost = entry.cost
    sizes = ["-", "-"] if cost is None else [f"{cost.kept_bytes / 1e6:,.1f}", f"{cost.optimizer_bytes / 1e6:,.1f}"]
    return [share(entry, reference), *sizes, f"{entry.seconds:,.0f}", _score(entry), *beside]


def share(entry: Entry | None, reference: Entry | None) -> str:
    """Return the FLOPs of a row's runs as a share of the reference's; ``-`` where one is not counted."""
    if entry is None or reference is None or entry.cost is None or reference.cost is None:
        return "-"
    return f"{entry.cost.flops / reference.cost.flops:.2f}"


def _score(entry: Entry | None) -> str:
    return "-" if entry is None else str(entry.best)
