"""A table for the terminal, as CSV, as LaTeX, and as one offline HTML page."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence

from rich import box
from rich.console import Console, ConsoleRenderable, Group
from rich.table import Table as Grid
from rich.text import Text

from peftlab.progress import duration
from peftlab.reporting import facts
from peftlab.reporting.pages import render
from peftlab.reporting.table_scores import Controls, Entry, PublishedRow, Table, decimals

SPREAD = "± is the standard deviation over seeds; * is the best mean on the validation set."
_SEVERAL = 4  # tasks whose deviations still fit into 80 columns
_BEST = "*"
_PUBLISHED_BELOW = "  published"
_COST_HEADINGS = ("FLOPs", "kept", "optim.", "sec", "score", "control", "its score", "FLOPs")
_DRAFT_HEADINGS = ("tokens/step", "speed-up")
_DRAFT_NOTE = (
    "tokens/step: tokens per target step, greedily; speed-up: over plain decoding, measured at the end of each run."
)


# Columns of several forms


def short_count(n: int) -> str:
    """Return a number of parameters in few characters: ``1,538``, ``295k``, ``125.0M``."""
    if n < 10_000:
        return f"{n:,}"
    return f"{n / 1e3:.0f}k" if n < 999_500 else f"{n / 1e6:.1f}M"


def _row_parameters(table: Table, row: str) -> str:
    """Return a row's trainable parameters; of several tasks, whose heads differ in size, the largest."""
    counts = [entry.trainable for (_, name), entry in table.entries.items() if name == row]
    return short_count(max(counts)) if counts else "-"


def _score(entry: Entry | None) -> str:
    return "-" if entry is None else str(entry.best)


def _average(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _draft_headings(table: Table) -> list[str]:
    """Return the names of the columns that only drafts have."""
    return [*_DRAFT_HEADINGS] if table.drafts else []


def _draft_cells(table: Table, row: str) -> list[str]:
    """Return a row's cells in the columns of ``_draft_headings``."""
    if not table.drafts:
        return []
    found = [entry.drafting for (_, name), entry in table.entries.items() if name == row]
    if not found or found[0] is None:
        return ["-"] * len(_DRAFT_HEADINGS)
    return [str(found[0].block_efficiency or "-"), str(found[0].speed_up)]


def _notes(table: Table) -> list[str]:
    """Return the notes below a table: on the columns of drafts, each draft's paired gain, and on published rows."""
    drafts = [_DRAFT_NOTE, *(gain.line() for gain in table.gains)] if table.drafts else []
    return [*drafts, *table.published.notes]


def _cost_rows(table: Table, task: str, controls: Controls) -> list[tuple[str, list[str]]]:
    """Return each row's name and cells, in the order of ``_COST_HEADINGS``; ``-`` where a run has not finished."""
    reference = table.entries.get((task, controls.reference))
    rows = []
    for row in table.rows:
        entry, name = table.entries.get((task, row)), controls.of.get(row)
        own, control = ["-"] * 5, ["", "", ""]
        if entry is not None:
            cost = entry.cost
            sizes = [cost.kept_bytes, cost.optimizer_bytes] if cost is not None else []
            megabytes = [f"{size / 1e6:,.1f}" for size in sizes] or ["-", "-"]
            own = [_flops_share(entry, reference), *megabytes, f"{entry.seconds:,.0f}", _score(entry)]
        if name is not None:
            other = table.entries.get((task, name))
            control = [name, _score(other), _flops_share(other, reference)]
        rows.append((row, [*own, *control]))
    return rows


def _flops_share(entry: Entry | None, reference: Entry | None) -> str:
    """Return the FLOPs of a row's runs as a share of the reference's; ``-`` where one is not counted."""
    if entry is None or reference is None or entry.cost is None or reference.cost is None:
        return "-"
    return f"{entry.cost.flops / reference.cost.flops:.2f}"


# Console


def print_table(table: Table, console: Console | None = None, controls: Controls | None = None) -> None:
    """Print the overview and each task's details, in 80 columns; with ``controls`` also the rows' costs.

    Args:
        table: what is shown.
        console: where to print; None: standard output.
        controls: what the rows' costs are compared with; None: costs are not shown.
    """
    parts: list[ConsoleRenderable] = [_overview(table), *(_details(table, task) for task in table.titles)]
    parts += [] if controls is None else [_costs(table, task, controls) for task in table.titles]
    parts += [Text(note, style="dim") for note in [SPREAD, *_notes(table)]]
    (console or Console()).print(Group(*parts))


def _costs(table: Table, task: str, controls: Controls) -> Grid:
    """Return a task's rows by their costs, each with its control."""
    grid = _grid(f"{table.titles[task]}: costs, FLOPs of {controls.reference}, MB")
    grid.add_column("")
    for heading in _COST_HEADINGS:
        named = heading == "control"  # names may wrap, numbers not
        grid.add_column(heading, justify="left" if named else "right", no_wrap=not named)
    for row, cells in _cost_rows(table, task, controls):
        grid.add_row(_row_name(row), *(Text(cell, overflow="fold") for cell in cells))
    return grid


def _overview(table: Table) -> Grid:
    grid = _grid(f"{table.model}: {table.heading}")
    grid.add_column("", min_width=len(_PUBLISHED_BELOW))
    grid.add_column("params", justify="right", no_wrap=True)
    several = len(table.titles) > 1
    many = len(table.titles) > _SEVERAL
    if many:
        grid.padding = (0, 0, 0, 0)
    for title in [*table.titles.values(), *(["avg"] if several else []), *_draft_headings(table)]:
        grid.add_column(Text(title), justify="right", no_wrap=True)
    best = {task: table.best(task) for task in table.titles}

    def add(name: Text, params: str, scores: list[str], average: float | None, style: str) -> None:
        last = [_average(average)] if several else []
        grid.add_row(name, *(Text(text, style=style) for text in (params, *scores, *last)))

    def add_published(row: PublishedRow, name: str) -> None:
        scores = [row.text(task).split(" ±")[0] if many else row.text(task) for task in table.titles]
        add(Text(name, style="dim", overflow="fold"), row.parameters, scores, table.published_average(row), "dim")

    for row in table.rows:
        scores = []
        for task in table.titles:
            entry = table.entries.get((task, row))
            text = "-" if entry is None else entry.best.text(entry.best.mean) if many else str(entry.best)
            scores.append(text + _BEST if row in best[task] else text)
        add(_row_name(row), _row_parameters(table, row), [*scores, *_draft_cells(table, row)], table.average(row), "")
        if row in table.published.beside:
            add_published(table.published.beside[row], _PUBLISHED_BELOW)
    if table.published.others:
        grid.add_section()
        grid.add_row(Text("published", style="dim italic"))
        for published_row in table.published.others:
            add_published(published_row, published_row.title)
    return grid


def _details(table: Table, task: str) -> Grid:
    found = [table.entries[task, row] for row in table.rows if (task, row) in table.entries]
    gpu = any(entry.gpu is not None for entry in found)
    metric = f", {facts.label(found[0].metric)}" if found and found[0].metric != table.titles[task] else ""
    ranking, by_row = table.ranking(task), table.published.beside
    grid = _grid(f"{table.titles[task]}{metric}")
    grid.add_column("", min_width=len(_PUBLISHED_BELOW))
    titles = ["n", "best epoch", "median", "last epoch", "params", "sec", "GPU MB" if gpu else "MB"]
    for title in [*titles, *(["published"] if by_row else [])]:
        grid.add_column(title, justify="right", no_wrap=True)
    for row in table.rows:
        entry = table.entries.get((task, row))
        published_cells = [by_row[row].text(task) if row in by_row else "-"] if by_row else []
        if entry is None:
            grid.add_row(_row_name(row), f"0/{table.seeds}", *["-"] * 6, *published_cells)
            continue
        grid.add_row(
            _row_name(row),
            f"{len(entry.seeds)}/{table.seeds}",
            str(entry.best) + (_BEST if row in table.best(task) else ""),
            entry.best.text(entry.best.median),
            str(entry.last),
            short_count(entry.trainable),
            f"{entry.seconds:,.0f}",
            f"{entry.gpu if entry.gpu is not None else entry.memory:,.0f}",
            *published_cells,
        )
    if ranking is not None:
        grid.caption, grid.caption_justify = Text(f"{ranking.sentence()}\n", style="none"), "left"
    return grid


def _row_name(row: str) -> Text:
    return Text(row, overflow="fold")


def _grid(title: str) -> Grid:
    return Grid(
        title=Text(title),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )


# Files

_OURS = ["metric", "seeds", "n", "best_mean", "best_std", "best_median", "last_mean", "last_std", "last_median"]
_PUBLISHED = ["published", "published_std", "published_parameters"]
_COSTS = ["lr", "trainable_parameters", "train_seconds", "peak_rss_mb", "peak_gpu_mb"]
_COUNTED = ["flops", "kept_bytes", "optimizer_bytes"]
_DRAFTED = ["block_efficiency_mean", "block_efficiency_std", "speed_up_mean", "speed_up_std"]
_DRAFTED += ["gain", "gain_low", "gain_high"]


def table_csv(table: Table, controls: Controls | None = None) -> str:
    """Return CSV with one line for each task and row, its published score included; other published rows come last.

    ``against_best`` is ``best``, or whether the distance to the best row is ``within`` the seeds' spread or
    ``beyond`` it; empty where that cannot be told. With ``controls``, ``flops_share`` is the FLOPs as a share of the
    reference row's, and ``control`` names a row of equal cost.

    Args:
        table: what is written.
        controls: what the rows' costs are compared with; None: no such columns.
    """
    others = list(dict.fromkeys(name for entry in table.entries.values() for name in entry.others))
    head = ["source", "task", "row", *_OURS, "against_best", *_PUBLISHED, *others, *_COSTS, *_COUNTED]
    head += ["flops_share", "control"] if controls is not None else []
    head += _DRAFTED if table.drafts else []
    out = io.StringIO()
    writer = csv.DictWriter(out, head, restval="", lineterminator="\n")
    writer.writeheader()
    for task, row in [(task, row) for task in table.titles for row in table.rows if (task, row) in table.entries]:
        entry = table.entries[task, row]
        spreads = {
            f"{name}_{what}": _rounded(getattr(spread, what))
            for name, spread in (("best", entry.best), ("last", entry.last))
            for what in ("mean", "std", "median")
        }
        writer.writerow(
            {
                "source": table.models[row],
                "task": task,
                "row": row,
                "metric": entry.metric,
                "seeds": " ".join(map(str, entry.seeds)),
                "n": len(entry.seeds),
                **spreads,
                "against_best": _against_best(table, task, row),
                **_published_values(table.published.beside.get(row), task),
                **{name: _rounded(value) for name, value in entry.others.items()},
                "lr": entry.lr,
                "trainable_parameters": entry.trainable,
                "train_seconds": round(entry.seconds, 1),
                "peak_rss_mb": entry.memory,
                "peak_gpu_mb": entry.gpu,
                **(vars(entry.cost) if entry.cost is not None else {}),
                **_against_control(table, task, row, controls),
                **_drafted(table, task, row),
            }
        )
    for published_row in table.published.others:
        for task in [task for task in table.titles if task in published_row.scores]:
            writer.writerow(
                {
                    "source": "published",
                    "task": task,
                    "row": published_row.title,
                    **_published_values(published_row, task),
                }
            )
    return out.getvalue()


def _against_control(table: Table, task: str, row: str, controls: Controls | None) -> dict[str, str]:
    if controls is None:
        return {}
    part = _flops_share(table.entries[task, row], table.entries.get((task, controls.reference)))
    return {"flops_share": part.replace("-", ""), "control": controls.of.get(row, "")}


def _drafted(table: Table, task: str, row: str) -> dict[str, float | None]:
    drafting = table.entries[task, row].drafting
    columns: dict[str, float | None] = {}
    if drafting is not None:
        for name, spread in {"block_efficiency": drafting.block_efficiency, "speed_up": drafting.speed_up}.items():
            if spread is not None:
                columns |= {f"{name}_mean": _rounded(spread.mean), f"{name}_std": _rounded(spread.std)}
    for gain in table.gains if table.drafts else ():
        if gain.name == row:
            values = (gain.gain, gain.low, gain.high)
            columns |= dict(zip(("gain", "gain_low", "gain_high"), map(_rounded, values), strict=True))
    return columns


def _against_best(table: Table, task: str, row: str) -> str:
    ranking = table.ranking(task)
    if ranking is None:
        return ""
    groups = {"best": ranking.best, "within": ranking.within, "beyond": ranking.beyond}
    return next((name for name, rows in groups.items() if row in rows), "")


def _published_values(row: PublishedRow | None, task: str) -> dict[str, float | str | None]:
    if row is None:
        return {}
    return dict(zip(_PUBLISHED, (row.scores.get(task), row.deviations.get(task), row.parameters), strict=True))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def table_latex(table: Table) -> str:
    """Return a LaTeX tabular for the booktabs package: means with deviations, the best one bold, averages, parameters.

    Published rows follow the row they belong to, the others the table.
    """
    tasks, several = list(table.titles), len(table.titles) > 1
    titles = [*table.titles.values(), *(["Avg."] if several else []), *_draft_headings(table)]
    head = ["Method", "Params", *map(_escaped, titles)]
    lines = [
        f"% Needs \\usepackage{{booktabs}}. {table.heading.capitalize()}: mean over seeds with standard deviation.",
        f"\\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
        "\\toprule",
        f"{' & '.join(head)} \\\\",
        "\\midrule",
    ]

    def line(name: str, params: str, scores: list[str], average: float | None) -> str:
        last = [_average(average).replace("-", "--")] if several else []
        return f"{' & '.join([_escaped(name), params, *scores, *last])} \\\\"

    def published(row: PublishedRow, name: str) -> str:
        scores = [_latex(row.text(task)) for task in tasks]
        return line(name, row.parameters, scores, table.published_average(row))

    for row in table.rows:
        entries = [table.entries.get((task, row)) for task in tasks]
        bold = [row in table.best(task) for task in tasks]
        scores = [_latex(_score(e), best) for e, best in zip(entries, bold, strict=True)]
        scores += [_latex(cell) for cell in _draft_cells(table, row)]
        lines.append(line(row, _row_parameters(table, row).replace("-", "--"), scores, table.average(row)))
        if row in table.published.beside:
            lines.append(published(table.published.beside[row], "published"))
    if table.published.others:
        lines += ["\\midrule", f"\\multicolumn{{{len(head)}}}{{l}}{{\\emph{{published}}}} \\\\"]
        lines += [published(row, row.title) for row in table.published.others]
    lines += [
        "\\bottomrule",
        "\\end{tabular}",
        *(f"% {note}" for note in _notes(table)),
    ]
    return "\n".join(lines) + "\n"


def _latex(score: str, best: bool = False) -> str:
    """Return a score as LaTeX: ``55.0 ±5.0`` as a number with its deviation below the line."""
    if score == "-":
        return "--"
    mean, separator, deviation = score.partition(" ±")
    mean = f"\\mathbf{{{mean}}}" if best else mean
    if separator:
        return f"${mean}_{{\\pm {deviation}}}$"
    return f"${mean}$" if best else mean


_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "†": r"$^\dagger$"} | {
    character: f"\\{character}" for character in "&%$#_{}"
}


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


# HTML


def table_page(table: Table, failed: Sequence[str] = (), controls: Controls | None = None) -> str:
    """Return the page; it needs no script, no image and no request.

    Args:
        table: what is shown.
        failed: a line for each cell that failed.
        controls: what the rows' costs are compared with; None: not shown.

    Raises:
        PeftlabError: jinja2 is not installed (the ``report`` extra).
    """
    several = len(table.titles) > 1
    best = {task: table.best(task) for task in table.titles}
    by_row = table.published.beside
    overview = [
        {
            "name": row,
            "cells": [
                {"text": _score(table.entries.get((task, row))), "best": row in best[task]} for task in table.titles
            ],
            "drafting": _draft_cells(table, row),
            "average": _average(table.average(row)),
            "parameters": _row_parameters(table, row),
            "published": _published(table, by_row[row], "published") if row in by_row else None,
        }
        for row in table.rows
    ]
    context = {
        "model": table.model,
        "heading": table.heading.replace("x 100", "× 100").capitalize(),
        "titles": [*table.titles.values(), *(["Average"] if several else [])],
        "drafting": _draft_headings(table),
        "several": several,
        "overview": overview,
        "published": [_published(table, row, row.title) for row in table.published.others],
        "figures": [figure for task in table.titles if (figure := _figure(table, task, controls))],
        "cost_headings": _COST_HEADINGS,
        "reference": controls.reference if controls is not None else None,
        "notes": _notes(table),
        "failed": list(failed),
    }
    return render("table.html.j2", context)


def _published(table: Table, row: PublishedRow, name: str) -> dict[str, object]:
    return {
        "name": name,
        "cells": [row.text(task) for task in table.titles],
        "average": _average(table.published_average(row)),
        "parameters": row.parameters,
    }


def _figure(table: Table, task: str, controls: Controls | None) -> dict[str, object] | None:
    """Return one task's plot and numbers; None while no run of it has finished."""
    entries = {row: table.entries[task, row] for row in table.rows if (task, row) in table.entries}
    if not entries:
        return None
    named = {
        row: published_row for row, published_row in table.published.beside.items() if task in published_row.scores
    }
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
    numbers = [_row_numbers(row, entry, table.seeds, others) for row, entry in entries.items()]
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
        "costs": _cost_rows(table, task, controls) if controls is not None else [],
    }


def _row_numbers(row: str, entry: Entry, seeds: int, others: list[str]) -> dict[str, object]:
    megabytes = entry.gpu if entry.gpu is not None else entry.memory
    return {
        "name": row,
        "cells": [
            f"{len(entry.seeds)}/{seeds}",
            str(entry.best),
            entry.best.text(entry.best.median),
            str(entry.last),
            *(_other_score(entry, name) for name in others),
            f"{entry.trainable:,}",
            duration(entry.seconds),
            f"{megabytes:,.0f} MB{' GPU' if entry.gpu is not None else ''}",
        ],
    }


def _other_score(entry: Entry, name: str) -> str:
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
    margin = 0.06 * (high - low) if high - low > 1e-8 else 0.5  # ticks are rounded to 10 digits
    low, high = low - margin, high + margin
    rough = (high - low) / 6
    power = 10 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= rough)
    first, last = math.ceil(low / step), math.floor(high / step)
    return low, high, [round(i * step, 10) for i in range(first, last + 1)]
