"""A table of tasks and rows over seeds: its numbers.

A score is the task's first metric on its first evaluation split, scaled as ``score_scale`` says. A mean over seeds
comes with the sample standard deviation (n - 1).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from peftlab.reporting import facts
from peftlab.reporting.runs.paired_drafts import PairedGain, paired_gain
from peftlab.reporting.tables.published import Published, PublishedRow, published_rows
from peftlab.reporting.tables.score_scale import decimals, lower_is_better, scale
from peftlab.reporting.tables.seed_spread import Ranking, rank


@dataclass(frozen=True)
class Spread:
    """A score over seeds, shown with ``decimals`` decimals; ``values`` is never empty."""

    values: tuple[float, ...]
    decimals: int = 1

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

    def text(self, value: float) -> str:
        """Return a number on this scale as text."""
        return f"{value:.{self.decimals}f}"

    def __str__(self) -> str:
        return self.text(self.mean) if self.std is None else f"{self.text(self.mean)} ±{self.text(self.std)}"


@dataclass(frozen=True)
class RunCost:
    """What the runs of a row cost.

    Attributes:
        flops: mean over seeds, forward, backward and scoring of examples.
        kept_bytes, optimizer_bytes: of a run's largest step, the largest over seeds.
    """

    flops: float
    kept_bytes: float
    optimizer_bytes: float


@dataclass(frozen=True)
class Drafting:
    """How a row's drafts decode at the end of their runs, over seeds.

    Attributes:
        block_efficiency: tokens per target step; None where nothing was drafted. speed_up: over plain decoding.
    """

    block_efficiency: Spread | None
    speed_up: Spread


@dataclass(frozen=True)
class Entry:
    """One task in one row, over its finished seeds.

    Attributes:
        metric: the deciding metric's name.
        seeds: the finished ones; ``best`` and ``last`` are in their order.
        best, last: the score at the best and at the last evaluation.
        others: mean of every other metric at the best evaluation, by ``split.name``, as shown; losses left out.
        trainable: trainable parameters. seconds: mean training time.
        memory: peak MB of a process, the largest; gpu: of its GPU, None without one.
        lr: peak learning rate; None in results that do not say.
        cost: None where a run's steps were not counted. drafting: of drafts alone.
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
    lr: float | None
    cost: RunCost | None = None
    drafting: Drafting | None = None


@dataclass(frozen=True)
class Table:
    """Everything that is shown.

    Attributes:
        models: row to the reference of its model, in order. seeds: how many there are to be in each entry.
        titles: task to its name in a heading, in order.
        entries: by (task, row); one without a finished seed is absent.
        published: rows of others. gains: of drafts, over those of the first row.
    """

    models: dict[str, str]
    seeds: int
    titles: dict[str, str]
    entries: dict[tuple[str, str], Entry]
    published: Published = field(default_factory=Published)
    gains: tuple[PairedGain, ...] = ()

    def as_json(self) -> dict[str, object]:
        """Return the attributes, with the entries by row and then by task, and each task's ranking."""
        rows = {r: {t: self.entries[t, r] for t in self.titles if (t, r) in self.entries} for r in self.rows}
        return {**vars(self), "entries": rows, "rankings": {task: self.ranking(task) for task in self.titles}}

    @property
    def rows(self) -> list[str]:
        """The rows' names in order."""
        return list(self.models)

    @property
    def model(self) -> str:
        """The model of all rows, or how many there are."""
        different = list(dict.fromkeys(self.models.values()))
        return different[0] if len(different) == 1 else f"{len(different)} models"

    @property
    def drafts(self) -> bool:
        """Whether the rows are drafts, which decode."""
        return any(entry.drafting is not None for entry in self.entries.values())

    @property
    def averaged(self) -> bool:
        """Whether a mean over tasks means anything: there are several, and no loss among their metrics."""
        return len(self.titles) > 1 and not any(lower_is_better(entry.metric) for entry in self.entries.values())

    @property
    def heading(self) -> str:
        """What the overview's numbers are."""
        scales = {scale(entry.metric) for entry in self.entries.values()}
        if len(scales) > 1:
            return "score at the best epoch, all but errors x 100"
        return "score at the best epoch" if scales == {1.0} else "score x 100 at the best epoch"

    def average(self, row: str) -> float | None:
        """Return the mean over tasks of a row's mean scores; None where a task is missing or there is but one."""
        entries = [self.entries.get((task, row)) for task in self.titles]
        return _average([entry.best.mean if entry else None for entry in entries]) if self.averaged else None

    def published_average(self, row: PublishedRow) -> float | None:
        """Return the mean over this table's tasks of a published row; None where one is missing or is alone."""
        return _average([row.scores.get(task) for task in self.titles])

    def ranking(self, task: str) -> Ranking | None:
        """Return which row is best on a task and which the seeds' spread does not tell from it; None of one row."""
        found = {row: self.entries[task, row] for row in self.rows if (task, row) in self.entries}
        metric = next((entry.metric for entry in found.values()), "")
        scores = {row: entry.best.values for row, entry in found.items()}
        return rank(scores, lower_is_better=lower_is_better(metric))

    def best(self, task: str) -> tuple[str, ...]:
        """Return the row with the best mean on a task, or several; none where there is nothing to compare it with."""
        ranking = self.ranking(task)
        return () if ranking is None else ranking.best


def _average(scores: Sequence[float | None]) -> float | None:
    there = [score for score in scores if score is not None]
    return statistics.fmean(there) if len(there) == len(scores) > 1 else None


def summarise(
    models: Mapping[str, str],
    seeds: int,
    titles: dict[str, str],
    results: Iterable[tuple[str, str, facts.Results]],
) -> Table:
    """Return the table of finished runs, with the published rows that share a task with it.

    Args:
        models, seeds, titles: as the attributes of ``Table``.
        results: (task, row, contents of ``results.json``) of each finished run.
    """
    runs: dict[tuple[str, str], list[facts.Results]] = {}
    for task, row, found in results:
        runs.setdefault((task, row), []).append(found)
    entries = {key: _entry(found) for key, found in runs.items()}
    gains = tuple(gain for task in titles for gain in _gains(task, list(models), runs))
    return Table(dict(models), seeds, titles, entries, published_rows(models, titles), gains)


def _gains(
    task: str, rows: Sequence[str], runs: Mapping[tuple[str, str], Sequence[facts.Results]]
) -> Iterator[PairedGain]:
    """Yield each row's gain over the first one on the seeds that both have, where they are drafts on the same text."""
    of_seed = {row: {facts.required(run, "seed"): run for run in runs.get((task, row), ())} for row in rows}
    first = of_seed[rows[0]]
    for row in rows[1:]:
        gain = paired_gain(row, rows[0], [(first[seed], run) for seed, run in of_seed[row].items() if seed in first])
        if gain is not None:
            yield gain


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
                others.setdefault(name, []).append(scale(name) * number)
    last = [facts.required(dict(facts.flatten(run["last_metrics"])), deciding) for run in runs]
    gpus = [number for run in runs if (number := facts.real(run.get("peak_gpu_mb"))) is not None]
    return Entry(
        metric,
        tuple(map(int, numbers("seed"))),
        Spread(tuple(scale(metric) * score for score in numbers("score")), decimals(metric)),
        Spread(tuple(scale(metric) * score for score in last), decimals(metric)),
        {name: statistics.fmean(values) for name, values in others.items()},
        int(numbers("trainable_parameters")[0]),
        statistics.fmean(numbers("train_seconds")),
        max(numbers("peak_rss_mb")),
        max(gpus, default=None),
        facts.real(runs[0].get("lr")),
        _cost([run["cost"] for run in runs if "cost" in run]),
        _drafting([run["decoding"] for run in runs if "decoding" in run]),
    )


def _drafting(found: list[object]) -> Drafting | None:
    """Return how the drafts of the runs decode; None of runs that train none."""
    after = [each["after"] for each in found if isinstance(each, dict)]
    if not after:
        return None
    rates = [rate for each in after if (rate := facts.real(each.get("block_efficiency"))) is not None]
    speeds = tuple(facts.required(each, "speed_up") for each in after)
    return Drafting(Spread(tuple(rates), 2) if rates else None, Spread(speeds, 2))


def _cost(found: list[object]) -> RunCost | None:
    """Return the cost of the runs that were counted; None if none was."""
    costs = [each for each in found if isinstance(each, dict)]
    if not costs:
        return None

    def numbers(key: str) -> list[float]:
        return [facts.required(cost, key) for cost in costs]

    flops = map(sum, zip(numbers("forward_flops"), numbers("backward_flops"), strict=True))
    return RunCost(statistics.fmean(flops), max(numbers("kept_bytes")), max(numbers("optimizer_bytes")))


def short_count(n: int) -> str:
    """Return a number of parameters in few characters: ``1,538``, ``295k``, ``125.0M``."""
    if n < 10_000:
        return f"{n:,}"
    return f"{n / 1e3:.0f}k" if n < 999_500 else f"{n / 1e6:.1f}M"


def row_parameters(table: Table, row: str) -> str:
    """Return a row's trainable parameters; of several tasks, whose heads differ in size, the largest."""
    counts = [entry.trainable for (_, name), entry in table.entries.items() if name == row]
    return short_count(max(counts)) if counts else "-"
