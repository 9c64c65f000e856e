"""What a table of drafts shows beside the acceptance: tokens per target step, and speed."""

from __future__ import annotations

from peftlab.reporting.tables.score_summary import Table

HEADINGS = ("tokens/step", "speed-up")
CSV = (
    *(f"{name}_{what}" for name in ("block_efficiency", "speed_up") for what in ("mean", "std")),
    *("gain", "gain_low", "gain_high"),
)
_NOTE = "tokens/step: tokens per target step, greedily; speed-up: over plain decoding, measured at the end of each run."


def headings(table: Table) -> list[str]:
    """Return the names of the columns; none of a table of other runs."""
    return [*HEADINGS] if table.drafts else []


def cells(table: Table, row: str) -> list[str]:
    """Return a row's cells in the columns of ``headings``."""
    found = [entry.drafting for (_, name), entry in table.entries.items() if name == row]
    if not table.drafts:
        return []
    if not found or found[0] is None:
        return ["-"] * len(HEADINGS)
    return [str(found[0].block_efficiency or "-"), str(found[0].speed_up)]


def notes(table: Table) -> list[str]:
    """Return what is said below: the columns, and each row's gain in pairs."""
    return [_NOTE, *(gain.line() for gain in table.gains)] if table.drafts else []


def csv_cells(table: Table, task: str, row: str) -> dict[str, float | None]:
    """Return a row's columns of a CSV file; none of a table of other runs."""
    if not table.drafts:
        return {}
    drafting = table.entries[task, row].drafting
    columns: dict[str, float | None] = dict.fromkeys(CSV)
    spreads = {} if drafting is None else {"block_efficiency": drafting.block_efficiency, "speed_up": drafting.speed_up}
    for name, spread in spreads.items():
        if spread is not None:
            columns |= {f"{name}_mean": spread.mean, f"{name}_std": spread.std}
    for gain in table.gains:
        if gain.name == row:
            columns |= {"gain": gain.gain, "gain_low": gain.low, "gain_high": gain.high}
    return columns
