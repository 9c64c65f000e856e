"""A table for the terminal, as CSV and as LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from rich import box
from rich.console import Console, ConsoleRenderable, Group
from rich.table import Table as Grid
from rich.text import Text

from peftlab.reporting import facts
from peftlab.reporting.tables import draft_columns
from peftlab.reporting.tables.cost_lines import HEADINGS, Controls, cost_lines, share
from peftlab.reporting.tables.published import PublishedRow
from peftlab.reporting.tables.score_summary import Entry, Table, row_parameters, short_count

_SEVERAL = 4  # tasks whose deviations still fit into 80 columns
_BEST = "*"
_PUBLISHED_BELOW = "  published"
SPREAD = "± is the standard deviation over seeds; * is the best mean on the validation set."


# Console


def print_table(table: Table, console: Console | None = None, controls: Controls | None = None) -> None:
    """Print the overview and each task's details, in 80 columns; with ``controls``, the rows by their costs, too."""
    parts: list[ConsoleRenderable] = [_overview(table), *(_details(table, task) for task in table.titles)]
    parts += [] if controls is None else [_costs(table, task, controls) for task in table.titles]
    parts += [Text(note, style="dim") for note in [SPREAD, *draft_columns.notes(table), *table.published.notes]]
    (console or Console()).print(Group(*parts))


def _costs(table: Table, task: str, controls: Controls) -> Grid:
    """Return a task's rows by their costs, each beside its control."""
    grid = _grid(f"{table.titles[task]}: costs, FLOPs of {controls.reference}, MB")
    grid.add_column("")
    for heading in HEADINGS:
        named = heading == "control"  # names may wrap, numbers not
        grid.add_column(heading, justify="left" if named else "right", no_wrap=not named)
    for row, cells in cost_lines(table, task, controls):
        grid.add_row(_name(row), *(Text(cell, overflow="fold") for cell in cells))
    return grid


def _overview(table: Table) -> Grid:
    grid = _grid(f"{table.model}: {table.heading}")
    grid.add_column("", min_width=len(_PUBLISHED_BELOW))
    grid.add_column("params", justify="right", no_wrap=True)
    several = len(table.titles) > 1
    many = len(table.titles) > _SEVERAL
    if many:
        grid.padding = (0, 0, 0, 0)
    for title in [*table.titles.values(), *(["avg"] if several else []), *draft_columns.headings(table)]:
        grid.add_column(Text(title), justify="right", no_wrap=True)
    best = {task: table.best(task) for task in table.titles}

    def add(name: Text, params: str, scores: list[str], average: float | None, style: str) -> None:
        last = ["-" if average is None else f"{average:.1f}"] if several else []
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
        add(_name(row), row_parameters(table, row), [*scores, *draft_columns.cells(table, row)], table.average(row), "")
        if row in table.published.beside:
            add_published(table.published.beside[row], _PUBLISHED_BELOW)
    if table.published.others:
        grid.add_section()
        grid.add_row(Text("published", style="dim italic"))
        for theirs in table.published.others:
            add_published(theirs, theirs.title)
    return grid


def _details(table: Table, task: str) -> Grid:
    found = [table.entries[task, row] for row in table.rows if (task, row) in table.entries]
    gpu = any(entry.gpu is not None for entry in found)
    metric = f", {facts.label(found[0].metric)}" if found and found[0].metric != table.titles[task] else ""
    ranking, beside = table.ranking(task), table.published.beside
    grid = _grid(f"{table.titles[task]}{metric}")
    grid.add_column("", min_width=len(_PUBLISHED_BELOW))
    titles = ["n", "best epoch", "median", "last epoch", "params", "sec", "GPU MB" if gpu else "MB"]
    for title in [*titles, *(["published"] if beside else [])]:
        grid.add_column(title, justify="right", no_wrap=True)
    for row in table.rows:
        entry = table.entries.get((task, row))
        theirs = [beside[row].text(task) if row in beside else "-"] if beside else []
        if entry is None:
            grid.add_row(_name(row), f"0/{table.seeds}", *["-"] * 6, *theirs)
            continue
        grid.add_row(
            _name(row),
            f"{len(entry.seeds)}/{table.seeds}",
            str(entry.best) + (_BEST if row in table.best(task) else ""),
            entry.best.text(entry.best.median),
            str(entry.last),
            short_count(entry.trainable),
            f"{entry.seconds:,.0f}",
            f"{entry.gpu if entry.gpu is not None else entry.memory:,.0f}",
            *theirs,
        )
    if ranking is not None:
        grid.caption, grid.caption_justify = Text(f"{ranking.sentence()}\n", style="none"), "left"
    return grid


def _name(row: str) -> Text:
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


def table_csv(table: Table, controls: Controls | None = None) -> str:
    """Return CSV with one line for each task and row, and what was published of it beside; other published rows last.

    ``against_best`` is ``best``, or whether the distance to the best row is ``within`` the seeds' spread or
    ``beyond`` it; empty where that cannot be told. With ``controls``, ``flops_share`` is the FLOPs as a share of the
    reference row's, and ``control`` names a row of equal cost.
    """
    others = list(dict.fromkeys(name for entry in table.entries.values() for name in entry.others))
    head = ["source", "task", "row", *_OURS, "against_best", *_PUBLISHED, *others, *_COSTS, *_COUNTED]
    head += ["flops_share", "control"] if controls is not None else []
    head += draft_columns.CSV if table.drafts else []
    out = io.StringIO()
    writer = csv.DictWriter(out, head, restval="", lineterminator="\n")
    writer.writeheader()
    for (task, row), entry in _in_order(table):
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
                **_theirs(table.published.beside.get(row), task),
                **{name: _rounded(value) for name, value in entry.others.items()},
                "lr": entry.lr,
                "trainable_parameters": entry.trainable,
                "train_seconds": round(entry.seconds, 1),
                "peak_rss_mb": entry.memory,
                "peak_gpu_mb": entry.gpu,
                **(vars(entry.cost) if entry.cost is not None else {}),
                **_beside(table, task, row, controls),
                **{name: _rounded(value) for name, value in draft_columns.csv_cells(table, task, row).items()},
            }
        )
    for theirs in table.published.others:
        for task in [task for task in table.titles if task in theirs.scores]:
            writer.writerow({"source": "published", "task": task, "row": theirs.title, **_theirs(theirs, task)})
    return out.getvalue()


def _beside(table: Table, task: str, row: str, controls: Controls | None) -> dict[str, str]:
    if controls is None:
        return {}
    part = share(table.entries[task, row], table.entries.get((task, controls.reference)))
    return {"flops_share": part.replace("-", ""), "control": controls.of.get(row, "")}


def _against_best(table: Table, task: str, row: str) -> str:
    ranking = table.ranking(task)
    if ranking is None:
        return ""
    groups = {"best": ranking.best, "within": ranking.within, "beyond": ranking.beyond}
    return next((name for name, rows in groups.items() if row in rows), "")


def _theirs(row: PublishedRow | None, task: str) -> dict[str, float | str | None]:
    if row is None:
        return {}
    return dict(zip(_PUBLISHED, (row.scores.get(task), row.deviations.get(task), row.parameters), strict=True))


def _in_order(table: Table) -> Iterator[tuple[tuple[str, str], Entry]]:
    for task in table.titles:
        for row in table.rows:
            if (task, row) in table.entries:
                yield (task, row), table.entries[task, row]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def table_latex(table: Table) -> str:
    """Return a LaTeX tabular for the booktabs package: means with deviations, the best one bold, averages, parameters.

    Published rows follow the row they belong to, the others the table.
    """
    tasks, several = list(table.titles), len(table.titles) > 1
    titles = [*table.titles.values(), *(["Avg."] if several else []), *draft_columns.headings(table)]
    head = ["Method", "Params", *map(_escaped, titles)]
    lines = [
        f"% Needs \\usepackage{{booktabs}}. {table.heading.capitalize()}: mean over seeds with standard deviation.",
        f"\\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
        "\\toprule",
        f"{' & '.join(head)} \\\\",
        "\\midrule",
    ]

    def line(name: str, params: str, scores: list[str], average: float | None) -> str:
        last = ["--" if average is None else f"{average:.1f}"] if several else []
        return f"{' & '.join([_escaped(name), params, *scores, *last])} \\\\"

    def published(row: PublishedRow, name: str) -> str:
        scores = [_latex(row.text(task)) for task in tasks]
        return line(name, row.parameters, scores, table.published_average(row))

    for row in table.rows:
        entries = [table.entries.get((task, row)) for task in tasks]
        bold = [row in table.best(task) for task in tasks]
        scores = [_latex("-" if e is None else str(e.best), best) for e, best in zip(entries, bold, strict=True)]
        scores += [_latex(cell) for cell in draft_columns.cells(table, row)]
        lines.append(line(row, row_parameters(table, row).replace("-", "--"), scores, table.average(row)))
        if row in table.published.beside:
            lines.append(published(table.published.beside[row], "published"))
    if table.published.others:
        lines += ["\\midrule", f"\\multicolumn{{{len(head)}}}{{l}}{{\\emph{{published}}}} \\\\"]
        lines += [published(row, row.title) for row in table.published.others]
    lines += [
        "\\bottomrule",
        "\\end{tabular}",
        *(f"% {note}" for note in [*draft_columns.notes(table), *table.published.notes]),
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
