"""A table of tasks and rows over seeds: the numbers, and the console's, CSV's and LaTeX's way to show them.

Scores are shown as papers report them: the task's first metric on its first evaluation split, times 100. A mean over
seeds comes with the sample standard deviation (n - 1).
"""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console, ConsoleRenderable, Group
from rich.table import Table as Grid
from rich.text import Text

from peftlab.files import member, read_object
from peftlab.reporting import facts

PUBLISHED = Path(__file__).with_name("published.json")
_SEVERAL = 4  # tasks whose deviations still fit into 80 columns


@dataclass(frozen=True)
class Spread:
    """A score times 100 over seeds; ``values`` is never empty."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The arithmetic mean."""
        return statistics.fmean(self.values)

    @property
    def median(self) -> float:
        """The median; the mean of the middle two of an even number."""
        return statistics.median(self.values)

    @property
    def std(self) -> float | None:
        """The sample standard deviation (n - 1); None of one value."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def __str__(self) -> str:
        return f"{self.mean:.1f}" if self.std is None else f"{self.mean:.1f} ±{self.std:.1f}"


@dataclass(frozen=True)
class Entry:
    """One task in one row, over its finished seeds.

    Attributes:
        metric: the deciding metric's name.
        seeds: the finished ones; ``best`` and ``last`` are in their order.
        best, last: the score at the best and at the last evaluation.
        others: mean of every other metric at the best evaluation, by ``split.name``, times 100.
        trainable: trainable parameters. seconds: mean training time.
        memory: peak MB of a process, the largest; gpu: of its GPU, None without one.
    """

    metric: str
    seeds: tuple[int, ...]
    best: Spread
    last: Spread
    others: dict[str, float]
    trainable: int
    seconds: float
    memory: float
    gpu: float | None


@dataclass(frozen=True)
class Table:
    """Everything that is shown.

    Attributes:
        model: its reference. seeds: how many there are to be in each entry.
        titles: task to its name in a heading, in order. rows: names, in order.
        entries: by (task, row); one without a finished seed is absent.
        published: rows of others, name to scores by task; ``source`` says whose and ``label`` of which model.
    """

    model: str
    seeds: int
    titles: dict[str, str]
    rows: list[str]
    entries: dict[tuple[str, str], Entry]
    published: dict[str, dict[str, float]] = field(default_factory=dict)
    label: str = ""
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        """Return the attributes, with the entries by row and then by task."""
        rows = {r: {t: self.entries[t, r] for t in self.titles if (t, r) in self.entries} for r in self.rows}
        return {**vars(self), "entries": rows}

    def average(self, row: str) -> float | None:
        """Return the mean over tasks of a row's mean scores; None where a task is missing or there is but one."""
        entries = [self.entries.get((task, row)) for task in self.titles]
        return _average([entry.best.mean if entry else None for entry in entries])

    def published_average(self, row: str) -> float | None:
        """Return the mean over this table's tasks of a published row; None where one is missing or is alone."""
        return _average([self.published[row].get(task) for task in self.titles])


def _average(scores: Sequence[float | None]) -> float | None:
    there = [score for score in scores if score is not None]
    return statistics.fmean(there) if len(there) == len(scores) > 1 else None


def summarise(
    model: str,
    seeds: int,
    titles: dict[str, str],
    rows: list[str],
    results: Iterable[tuple[str, str, facts.Results]],
) -> Table:
    """Return the table of finished runs, with the published rows that share a task with it.

    Args:
        model, seeds, titles, rows: as the attributes of ``Table``.
        results: (task, row, contents of ``results.json``) of each finished run.
    """
    runs: dict[tuple[str, str], list[facts.Results]] = {}
    for task, row, found in results:
        runs.setdefault((task, row), []).append(found)
    entries = {key: _entry(found) for key, found in runs.items()}
    source = read_object(PUBLISHED)
    size = "roberta-large" if "roberta-large" in model.lower() else "roberta-base"
    theirs = member(member(source, "models", dict, PUBLISHED), size, dict, PUBLISHED)
    shown: dict[str, dict[str, float]] = {
        row: {task: score for task, score in scores.items() if task in titles}
        for row, scores in theirs["rows"].items()
        if scores.keys() & titles.keys()
    }
    if not shown:
        return Table(model, seeds, titles, rows, entries)
    notes = [f"Published rows: {theirs['label']}, {source['source']}.", *theirs["notes"]]
    if size not in model.lower():
        notes.append(f"They are of another model than {model}: a scale, not a comparison.")
    return Table(model, seeds, titles, rows, entries, shown, f"published, {theirs['label']}", notes)


def _entry(runs: list[facts.Results]) -> Entry:
    def numbers(key: str) -> tuple[float, ...]:
        return tuple(facts.required(run, key) for run in runs)

    runs = sorted(runs, key=lambda run: facts.required(run, "seed"))
    metric = str(runs[0]["metric"])
    best = [dict(facts.flatten(run["metrics"])) for run in runs]
    deciding = f"{next(iter(best[0])).partition('.')[0]}.{metric}"
    others: dict[str, list[float]] = {}
    for metrics in best:
        for name, value in metrics.items():
            number = facts.real(value)
            if number is not None and name != deciding and not name.endswith("loss"):
                others.setdefault(name, []).append(100 * number)
    last = [facts.required(dict(facts.flatten(run["last_metrics"])), deciding) for run in runs]
    gpus = [number for run in runs if (number := facts.real(run.get("peak_gpu_mb"))) is not None]
    return Entry(
        metric,
        tuple(map(int, numbers("seed"))),
        Spread(tuple(100 * score for score in numbers("score"))),
        Spread(tuple(100 * score for score in last)),
        {name: statistics.fmean(values) for name, values in others.items()},
        int(numbers("trainable_parameters")[0]),
        statistics.fmean(numbers("train_seconds")),
        max(numbers("peak_rss_mb")),
        max(gpus, default=None),
    )


def short_count(n: int) -> str:
    """Return a number of parameters in few characters: ``1,538``, ``295k``, ``125.0M``."""
    if n < 10_000:
        return f"{n:,}"
    return f"{n / 1e3:.0f}k" if n < 999_500 else f"{n / 1e6:.1f}M"


def row_parameters(table: Table, row: str) -> str:
    """Return a row's trainable parameters; of several tasks, whose heads differ in size, the largest."""
    counts = [entry.trainable for (_, name), entry in table.entries.items() if name == row]
    return short_count(max(counts)) if counts else "-"


# Console


def print_table(table: Table, console: Console | None = None) -> None:
    """Print the overview and each task's details, in 80 columns."""
    parts: list[ConsoleRenderable] = [_overview(table), *(_details(table, task) for task in table.titles)]
    parts += [Text(note, style="dim") for note in ["± is the standard deviation over seeds.", *table.notes]]
    (console or Console()).print(Group(*parts))


def _overview(table: Table) -> Grid:
    grid = _grid(f"{table.model}: score x 100 at the best epoch")
    grid.add_column("")
    many = len(table.titles) > _SEVERAL
    for title in [*table.titles.values(), *(["avg"] if len(table.titles) > 1 else [])]:
        grid.add_column(Text(title), justify="right", no_wrap=True)
    for row in table.rows:
        scores = [table.entries.get((task, row)) for task in table.titles]
        texts = ["-" if s is None else f"{s.best.mean:.1f}" if many else str(s.best) for s in scores]
        grid.add_row(_name(row), *texts, *_last_column(table, table.average(row)))
    if table.published:
        grid.add_section()
        grid.add_row(Text(table.label, style="dim italic"))
    for row, theirs in table.published.items():
        texts = [f"{theirs[task]:.1f}" if task in theirs else "-" for task in table.titles]
        average = _last_column(table, table.published_average(row))
        grid.add_row(*(Text(text, style="dim") for text in (row, *texts, *average)))
    return grid


def _last_column(table: Table, average: float | None) -> list[str]:
    if len(table.titles) == 1:
        return []
    return ["-" if average is None else f"{average:.1f}"]


def _details(table: Table, task: str) -> Grid:
    found = [table.entries[task, row] for row in table.rows if (task, row) in table.entries]
    gpu = any(entry.gpu is not None for entry in found)
    metric = f", {facts.label(found[0].metric)}" if found else ""
    grid = _grid(f"{table.titles[task]}{metric}")
    grid.add_column("")
    for title in ("n", "best epoch", "median", "last epoch", "params", "sec", "GPU MB" if gpu else "MB"):
        grid.add_column(title, justify="right", no_wrap=True)
    for row in table.rows:
        entry = table.entries.get((task, row))
        if entry is None:
            grid.add_row(_name(row), f"0/{table.seeds}", *["-"] * 6)
            continue
        grid.add_row(
            _name(row),
            f"{len(entry.seeds)}/{table.seeds}",
            str(entry.best),
            f"{entry.best.median:.1f}",
            str(entry.last),
            short_count(entry.trainable),
            f"{entry.seconds:,.0f}",
            f"{entry.gpu if entry.gpu is not None else entry.memory:,.0f}",
        )
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


def table_csv(table: Table) -> str:
    """Return CSV with one line for each task and row, published ones last and marked in ``source``."""
    others = list(dict.fromkeys(name for entry in table.entries.values() for name in entry.others))
    head = ["source", "task", "row", "metric", "seeds", "n", "best_mean", "best_std", "best_median"]
    head += ["last_mean", "last_std", "last_median", "published", *others]
    head += ["trainable_parameters", "train_seconds", "peak_rss_mb", "peak_gpu_mb"]
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
                "source": table.model,
                "task": task,
                "row": row,
                "metric": entry.metric,
                "seeds": " ".join(map(str, entry.seeds)),
                "n": len(entry.seeds),
                **spreads,
                **{name: _rounded(value) for name, value in entry.others.items()},
                "trainable_parameters": entry.trainable,
                "train_seconds": round(entry.seconds, 1),
                "peak_rss_mb": entry.memory,
                "peak_gpu_mb": entry.gpu,
            }
        )
    for row, theirs in table.published.items():
        for task in [task for task in table.titles if task in theirs]:
            writer.writerow({"source": table.label, "task": task, "row": row, "published": theirs[task]})
    return out.getvalue()


def _in_order(table: Table) -> Iterator[tuple[tuple[str, str], Entry]]:
    for task in table.titles:
        for row in table.rows:
            if (task, row) in table.entries:
                yield (task, row), table.entries[task, row]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def table_latex(table: Table) -> str:
    """Return a LaTeX tabular for the booktabs package: means with deviations, averages, parameters."""
    tasks, several = list(table.titles), len(table.titles) > 1
    head = ["Method", "Params", *(_escaped(title) for title in table.titles.values()), *(["Avg."] if several else [])]
    lines = [
        "% Needs \\usepackage{booktabs}. Score x 100 at the best epoch: mean over seeds, with its standard deviation.",
        f"\\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
        "\\toprule",
        f"{' & '.join(head)} \\\\",
        "\\midrule",
    ]

    def line(name: str, params: str, scores: list[str], average: float | None) -> str:
        last = ["--" if average is None else f"{average:.1f}"] if several else []
        return f"{' & '.join([_escaped(name), params, *scores, *last])} \\\\"

    for row in table.rows:
        entries = [table.entries.get((task, row)) for task in tasks]
        scores = ["--" if entry is None else _latex(entry.best) for entry in entries]
        lines.append(line(row, row_parameters(table, row).replace("-", "--"), scores, table.average(row)))
    if table.published:
        lines += ["\\midrule", f"\\multicolumn{{{len(head)}}}{{l}}{{\\emph{{{_escaped(table.label)}}}}} \\\\"]
    for row, theirs in table.published.items():
        scores = [f"{theirs[task]:.1f}" if task in theirs else "--" for task in tasks]
        lines.append(line(row, "", scores, table.published_average(row)))
    lines += ["\\bottomrule", "\\end{tabular}", *(f"% {note}" for note in table.notes)]
    return "\n".join(lines) + "\n"


def _latex(spread: Spread) -> str:
    return f"{spread.mean:.1f}" if spread.std is None else f"${spread.mean:.1f}_{{\\pm {spread.std:.1f}}}$"


_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    character: f"\\{character}" for character in "&%$#_{}"
}


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
