"""A table as one offline HTML page: the overview, and for each task a plot of dots and intervals with its numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from peftlab.reporting import facts
from peftlab.reporting.html import render
from peftlab.reporting.tables import draft_columns
from peftlab.reporting.tables.cost_lines import HEADINGS, Controls, cost_lines
from peftlab.reporting.tables.published import PublishedRow
from peftlab.reporting.tables.score_scale import decimals
from peftlab.reporting.tables.score_summary import Entry, Table, row_parameters


def table_page(table: Table, failed: Sequence[str] = (), controls: Controls | None = None) -> str:
    """Return the page; it needs no script, no image and no request.

    Args:
        failed: a line for each cell that failed. controls: what the rows' costs are compared with; None: not shown.

    Raises:
        PeftlabError: jinja2 is not installed (the ``report`` extra).
    """
    several = len(table.titles) > 1
    best = {task: table.best(task) for task in table.titles}
    beside = table.published.beside
    overview = [
        {
            "name": row,
            "cells": [
                {"text": _text(table.entries.get((task, row))), "best": row in best[task]} for task in table.titles
            ],
            "drafting": draft_columns.cells(table, row),
            "average": _one(table.average(row)),
            "parameters": row_parameters(table, row),
            "published": _published(table, beside[row], "published") if row in beside else None,
        }
        for row in table.rows
    ]
    context = {
        "model": table.model,
        "heading": table.heading.replace("x 100", "× 100").capitalize(),
        "titles": [*table.titles.values(), *(["Average"] if several else [])],
        "drafting": draft_columns.headings(table),
        "several": several,
        "overview": overview,
        "published": [_published(table, row, row.title) for row in table.published.others],
        "figures": [figure for task in table.titles if (figure := _figure(table, task, controls))],
        "cost_headings": HEADINGS,
        "reference": controls.reference if controls is not None else None,
        "notes": [*draft_columns.notes(table), *table.published.notes],
        "failed": list(failed),
    }
    return render("table.html.j2", context)


def _published(table: Table, row: PublishedRow, name: str) -> dict[str, object]:
    return {
        "name": name,
        "cells": [row.text(task) for task in table.titles],
        "average": _one(table.published_average(row)),
        "parameters": row.parameters,
    }


def _figure(table: Table, task: str, controls: Controls | None) -> dict[str, object] | None:
    """One task's plot and numbers; None while no run of it has finished."""
    entries = {row: table.entries[task, row] for row in table.rows if (task, row) in table.entries}
    if not entries:
        return None
    named = {row: theirs for row, theirs in table.published.beside.items() if task in theirs.scores}
    named |= {row.title + " " + row.parameters: row for row in table.published.others if task in row.scores}
    ends = [end for entry in entries.values() for end in (*entry.best.values, *_interval(entry))]
    low, high, ticks = axis([*ends, *(row.scores[task] for row in named.values())])
    metric, ranking = next(iter(entries.values())).metric, table.ranking(task)

    def place(value: float) -> str:
        return f"{100 * (value - low) / (high - low):.2f}"

    rows = []
    for row, entry in entries.items():
        left, right = _interval(entry)
        drawn = math.isfinite(left) and math.isfinite(right)
        rows.append(
            {
                "name": row,
                "seeds": [place(value) for value in entry.best.values if math.isfinite(value)],
                "mean": place(entry.best.mean) if drawn else None,
                "left": place(left) if drawn else None,
                "width": f"{100 * (right - left) / (high - low):.2f}" if drawn else None,
                "value": str(entry.best),
            }
        )
    others = list(dict.fromkeys(name for entry in entries.values() for name in entry.others))
    numbers = [_numbers(row, entry, table.seeds, others) for row, entry in entries.items()]
    return {
        "title": table.titles[task],
        "metric": (facts.label(metric) if metric != table.titles[task] else "")
        + (" × 100" if decimals(metric) == 1 else ""),
        "ranking": None if ranking is None else ranking.sentence(),
        "rows": rows,
        "published": [
            {"name": name, "mean": place(row.scores[task]), "value": row.text(task)} for name, row in named.items()
        ],
        "ticks": [{"left": place(tick), "text": f"{tick:g}"} for tick in ticks],
        "others": [facts.label(name.partition(".")[2] if name.count(".") == 1 else name) for name in others],
        "numbers": numbers,
        "costs": cost_lines(table, task, controls) if controls is not None else [],
    }


def _numbers(row: str, entry: Entry, seeds: int, others: list[str]) -> dict[str, object]:
    megabytes = entry.gpu if entry.gpu is not None else entry.memory
    return {
        "name": row,
        "cells": [
            f"{len(entry.seeds)}/{seeds}",
            str(entry.best),
            entry.best.text(entry.best.median),
            str(entry.last),
            *(_other(entry, name) for name in others),
            f"{entry.trainable:,}",
            facts.duration(entry.seconds),
            f"{megabytes:,.0f} MB{' GPU' if entry.gpu is not None else ''}",
        ],
    }


def _other(entry: Entry, name: str) -> str:
    return f"{entry.others[name]:.{decimals(name)}f}" if name in entry.others else "-"


def _interval(entry: Entry) -> tuple[float, float]:
    spread = entry.best.std or 0.0
    return entry.best.mean - spread, entry.best.mean + spread


def axis(values: Sequence[float]) -> tuple[float, float, list[float]]:
    """Return (low, high, ticks) of an axis that shows ``values``: 2 to 7 ticks, a step of 1, 2 or 5 times 10^k apart.

    Values that are not finite are left out; the axis has a length even where all values are equal.
    """
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    margin = 0.06 * (high - low) or 0.5
    low, high = low - margin, high + margin
    rough = (high - low) / 6
    power = 10 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= rough)
    first, last = math.ceil(low / step), math.floor(high / step)
    return low, high, [round(i * step, 10) for i in range(first, last + 1)]


def _text(entry: Entry | None) -> str:
    return "-" if entry is None else str(entry.best)


def _one(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
