"""A comparison of runs as a page and as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from peftlab.reporting import facts
from peftlab.reporting.console import plain_table
from peftlab.reporting.curves import read_history
from peftlab.reporting.html import plot, render
from peftlab.reporting.plots import Line
from peftlab.reporting.runs.compared_runs import Comparison, Figure

Cells = tuple[str, list[str], list[int]]
"""A row: its name, a text of each run, and the places of the best."""


def comparison_page(found: Comparison) -> str:
    """Return the page; the same files of the runs give the same bytes.

    Raises:
        PeftlabError: jinja2 or matplotlib is not installed.
    """
    context = {
        "names": [run.name for run in found.runs],
        "runs": found.runs,
        "notes": found.notes,
        "scores": [_cells(figure) for figure in found.scores],
        "costs": [_cells(figure) for figure in found.costs],
        "differences": _settings(found),
        "plots": _plots(found),
    }
    return render("comparison.html.j2", context)


def comparison_tables(found: Comparison) -> list[Table]:
    """Return scores, costs and differences for the terminal; a star marks the best."""
    names = [run.name for run in found.runs]
    blocks = {
        "scores at the best evaluation": [_cells(figure) for figure in found.scores],
        "cost": [_cells(figure) for figure in found.costs],
        "what differs in the recipes": _settings(found),
    }
    return [_table(title, names, rows) for title, rows in blocks.items() if rows]


def _table(title: str, names: Sequence[str], rows: Sequence[Cells]) -> Table:
    table = plain_table(title=title)
    table.add_column("", overflow="fold")
    for name in names:
        table.add_column(Text(name), justify="right", overflow="fold")
    for name, values, best in rows:
        marked = [Text(f"{text} *", style="bold") if i in best else Text(text) for i, text in enumerate(values)]
        table.add_row(Text(name), *marked)
    return table


def _cells(figure: Figure) -> Cells:
    return figure.name, [_text(value, figure.unit) for value in figure.values], figure.best


def _text(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    if unit == "s":
        return facts.duration(value)
    if unit == "1/s":
        return facts.speed(value)
    if unit == "MB":
        return f"{value:,.0f} MB"
    return facts.number(value)


def _settings(found: Comparison) -> list[Cells]:
    return [(row.key, ["–" if text is None else text for text in row.values], []) for row in found.differences]


def _plots(found: Comparison) -> list[dict[str, object]]:
    """Each curve of all runs in one plot: losses, the metrics of each split, the learning rate."""
    histories = {run.name: read_history(Path(run.directory) / "metrics.jsonl") for run in found.runs}
    places = dict.fromkeys(place for history in histories.values() for place in history.evaluation)

    def trained(key: str) -> list[Line]:
        return [Line(name, history.train[key]) for name, history in histories.items()]

    def scored(place: tuple[str, str]) -> list[Line]:
        return [Line(n, history.evaluation[place]) for n, history in histories.items() if place in history.evaluation]

    plots = plot("loss", "Training loss", trained("loss"))
    for i, (split, metric) in enumerate(places):
        plots += plot(f"score-{i}", facts.title(f"{metric} ({split})" if split else metric), scored((split, metric)))
    return [*plots, *plot("lr", "Learning rate", trained("lr"))]
