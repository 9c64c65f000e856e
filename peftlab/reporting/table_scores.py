"""A table of tasks and rows over seeds: its numbers.

A score is the task's first metric on its first evaluation split: shares and correlations times 100, as papers give
them, losses and other errors as they are. A mean over seeds comes with the sample standard deviation (n - 1). Rows are
ranked by Welch's test, drafts compared in pairs on the same texts, and published rows shown with those of their model.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peftlab.files import read_object, typed_value
from peftlab.reporting import facts

PUBLISHED = Path(__file__).with_name("published_tables.json")
CONFIDENCE = 0.95  # of the comparison of two rows
_DRAWS = 2000  # of examples, for the interval of a paired gain
_ERRORS = ("loss", "perplexity", "bits_per_byte", "mse", "mae")  # how names of errors end: nll_loss, rmse, ...
_UNBOUNDED = (*_ERRORS, "margin", "reward")


def lower_is_better(metric: str) -> bool:
    """Return whether a smaller value of ``metric`` is a better one."""
    return metric.endswith(_ERRORS)


def scale(metric: str) -> float:
    """Return what a value of ``metric`` is multiplied by to be shown: 100 for a share or a correlation, else 1."""
    return 1.0 if metric.endswith(_UNBOUNDED) else 100.0


def decimals(metric: str) -> int:
    """Return the decimals that ``metric`` is shown with."""
    return 3 if metric.endswith(_UNBOUNDED) else 1


def shown(metric: str, value: float) -> str:
    """Return a value of ``metric``, not yet multiplied, as a table shows it: 0.8725 is 87.2, a loss of 0.8725 0.873.

    Args:
        metric: the metric's name.
        value: its value, not yet multiplied.
    """
    return f"{scale(metric) * value:.{decimals(metric)}f}"


# What a table has


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
    """The cost of a row's runs.

    Attributes:
        flops: mean over seeds, forward, backward and scoring of examples.
        kept_bytes, optimizer_bytes: of a run's largest step, the largest over seeds.
    """

    flops: float
    kept_bytes: float
    optimizer_bytes: float


@dataclass(frozen=True)
class Drafting:
    """The speed at which a row's drafts decode at the end of their runs, over seeds.

    Attributes:
        block_efficiency: tokens per target step; None where nothing was drafted.
        speed_up: over plain decoding.
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
        trainable: trainable parameters.
        seconds: mean training time.
        memory: peak MB of a process, the largest; gpu: of its GPU, None without one.
        lr: peak learning rate; None in results that do not say.
        cost: None where a run's steps were not counted.
        drafting: of drafts alone.
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
class PublishedRow:
    """One row of a published table.

    Attributes:
        model: the model's name as a reference contains it, ``roberta-base``.
        title: what the paper calls the row.
        parameters: trainable parameters as printed there, ``0.3M``.
        scores: by task; deviations: over the paper's seeds, where it gives them.
    """

    model: str
    title: str
    parameters: str
    scores: dict[str, float]
    deviations: dict[str, float]

    def text(self, task: str) -> str:
        """Return the score of a task with its deviation; "-" where there is none."""
        if task not in self.scores:
            return "-"
        deviation = self.deviations.get(task)
        return f"{self.scores[task]:.1f}" + ("" if deviation is None else f" ±{deviation:.1f}")


@dataclass(frozen=True)
class Published:
    """The published rows that belong to a table.

    Attributes:
        beside: by the table's own rows, the one with the same method and model.
        others: the remaining rows of the table's models; of RoBERTa-base where no model of the table has any.
        notes: where they come from, and how they were measured.
    """

    beside: dict[str, PublishedRow] = field(default_factory=dict)
    others: tuple[PublishedRow, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PairedGain:
    """The acceptance of one draft minus that of another on the same examples, whose tokens count alike.

    Attributes:
        name, first: of the two, in words. gain: the difference; of several runs each, the mean over them.
        low, high: the 95 % interval, from examples drawn with replacement, the same for both.
        texts: examples.
        runs: of each draft.
    """

    name: str
    first: str
    gain: float
    low: float
    high: float
    texts: int
    runs: int

    def line(self) -> str:
        """Return the gain and its interval in a sentence."""
        means = f", means of {self.runs} seeds" if self.runs > 1 else ""
        return (
            f"Acceptance of {self.name} minus that of {self.first}: {self.gain:+.3f} ({self.low:+.3f} to "
            f"{self.high:+.3f}), in pairs on the same {self.texts} held-out texts{means}."
        )


@dataclass(frozen=True)
class Ranking:
    """The rows of one task, compared with the best of them.

    Attributes:
        best: the row with the best mean over seeds on the validation set; several where their means are equal.
        within: rows whose distance to it is within the seeds' spread; beyond: rows whose distance exceeds it.
        untold: rows that cannot be compared: they, or the best one, have a single seed, or a score is not finite.
    """

    best: tuple[str, ...]
    within: tuple[str, ...]
    beyond: tuple[str, ...]
    untold: tuple[str, ...]

    def sentence(self) -> str:
        """Return what may be claimed, in words."""
        groups = {
            "within the seeds' spread of it": self.within,
            "worse by more than the seeds' spread": self.beyond,
            "too few seeds to say": self.untold,
        }
        parts = [f"{text}: {', '.join(rows)}" for text, rows in groups.items() if rows]
        return "; ".join([f"{', '.join(self.best)} {'is' if len(self.best) == 1 else 'are'} best", *parts]) + "."


@dataclass(frozen=True)
class Table:
    """The contents of a table, whichever form it is shown in.

    Attributes:
        models: row to the reference of its model, in order.
        seeds: how many there are to be in each entry.
        titles: task to its name in a heading, in order.
        entries: by (task, row); one without a finished seed is absent.
        published: rows of others.
        gains: of drafts, over those of the first row.
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
        """Whether a mean over tasks is shown: there are several, and no loss among their metrics."""
        return len(self.titles) > 1 and not any(lower_is_better(entry.metric) for entry in self.entries.values())

    @property
    def heading(self) -> str:
        """The overview's title, which says what its numbers are."""
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


@dataclass(frozen=True)
class Controls:
    """The rows that a table compares the costs of its rows with.

    Attributes:
        reference: the row whose FLOPs are 1.
        of: row to the row of equal cost that it is compared with.
    """

    reference: str
    of: Mapping[str, str] = field(default_factory=dict)


# How it is computed


def summarise(
    models: Mapping[str, str],
    seeds: int,
    titles: dict[str, str],
    results: Iterable[tuple[str, str, facts.Results]],
) -> Table:
    """Return the table of finished runs, with the published rows that share a task with it.

    Args:
        models: row to the reference of its model, in order.
        seeds: how many there are to be in each entry.
        titles: task to its name in a heading, in order.
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
            number = facts.as_float(value)
            if number is not None and name != deciding and not name.endswith("loss"):
                others.setdefault(name, []).append(scale(name) * number)
    last = [facts.required(dict(facts.flatten(run["last_metrics"])), deciding) for run in runs]
    gpus = [number for run in runs if (number := facts.as_float(run.get("peak_gpu_mb"))) is not None]
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
        facts.as_float(runs[0].get("lr")),
        _cost([run["cost"] for run in runs if "cost" in run]),
        _drafting([run["decoding"] for run in runs if "decoding" in run]),
    )


def _drafting(found: list[object]) -> Drafting | None:
    """Return how the drafts of the runs decode; None of runs that train none."""
    after = [each["after"] for each in found if isinstance(each, dict)]
    if not after:
        return None
    rates = [rate for each in after if (rate := facts.as_float(each.get("block_efficiency"))) is not None]
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


def _average(scores: Sequence[float | None]) -> float | None:
    there = [score for score in scores if score is not None]
    return statistics.fmean(there) if len(there) == len(scores) > 1 else None


def rank(scores: Mapping[str, Sequence[float]], *, lower_is_better: bool) -> Ranking | None:
    """Return the ranking of rows by their scores over seeds; None where there is no second row to compare with.

    Args:
        scores: row to its scores, one for each seed.
        lower_is_better: whether the metric is a loss or an error.
    """
    means = {row: math.fsum(values) / len(values) for row, values in scores.items()}
    finite = [row for row, mean in means.items() if math.isfinite(mean)]
    if len(scores) < 2 or not finite:
        return None
    value = (min if lower_is_better else max)(means[row] for row in finite)
    best = tuple(row for row in finite if means[row] == value)
    others: dict[bool | None, list[str]] = {False: [], True: [], None: []}
    for row in scores:
        if row not in best:
            others[exceeds_spread(scores[best[0]], scores[row])].append(row)
    return Ranking(best, tuple(others[False]), tuple(others[True]), tuple(others[None]))


def exceeds_spread(a: Sequence[float], b: Sequence[float]) -> bool | None:
    """Return whether the means of two samples of seeds differ by more than the spread of the seeds explains.

    Welch's test: |mean a - mean b| > t * sqrt(var a / n + var b / m), with sample variances, and t the two-sided 95 %
    quantile of Student's distribution at Welch and Satterthwaite's degrees of freedom. None where a sample has fewer
    than two values, or values that are not finite.

    Args:
        a: scores of one row, one for each seed.
        b: scores of the other.
    """
    if min(len(a), len(b)) < 2 or not all(map(math.isfinite, (*a, *b))):
        return None
    errors = [_variance(values) / len(values) for values in (a, b)]
    distance, error = abs(math.fsum(a) / len(a) - math.fsum(b) / len(b)), sum(errors)
    if error == 0:  # no seed changes anything
        return distance > 0
    from scipy.special import stdtrit

    freedom = error**2 / sum(e**2 / (len(values) - 1) for e, values in zip(errors, (a, b), strict=True))
    return bool(distance > stdtrit(freedom, (1 + CONFIDENCE) / 2) * math.sqrt(error))


def _variance(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def paired_gain(name: str, first: str, pairs: Sequence[tuple[facts.Results, facts.Results]]) -> PairedGain | None:
    """Return the gain of a draft over the first one; None where the texts are not all the same, or a single one.

    Args:
        name: the draft, in words.
        first: the draft that it is compared with, in words.
        pairs: (run of the first, run of the other); of several seeds, those with the same one.
    """
    import numpy

    held_out = [(one.get("held_out"), other.get("held_out")) for one, other in pairs]
    runs = [(one, other) for one, other in held_out if isinstance(one, Mapping) and isinstance(other, Mapping)]
    if not runs or len(runs) < len(pairs) or len({str(each.get("text")) for pair in runs for each in pair}) > 1:
        return None
    tokens = numpy.array(runs[0][0].get("tokens"), dtype=numpy.float64)
    if len(tokens) < 2:
        return None
    rates = numpy.array([[each.get("acceptance") for each in pair] for pair in runs], dtype=numpy.float64)
    gains = tokens * (rates[:, 1] - rates[:, 0]).mean(axis=0)  # (texts,): rates is (runs, 2, texts)
    picked = numpy.random.default_rng(0).integers(len(tokens), size=(_DRAWS, len(tokens)))
    low, high = numpy.quantile(gains[picked].sum(-1) / tokens[picked].sum(-1), [0.025, 0.975])
    return PairedGain(name, first, float(gains.sum() / tokens.sum()), float(low), float(high), len(tokens), len(runs))


def published_rows(models: Mapping[str, str], tasks: Collection[str]) -> Published:
    """Return what was published on ``tasks``.

    Args:
        models: the table's rows, name to the reference of the model. A published row belongs to the row of its own
            name if that has its model.
        tasks: the table's tasks.
    """
    source = read_object(PUBLISHED)
    columns = [str(task) for task in typed_value(source, "tasks", list, PUBLISHED)]
    rows = {
        name: _published_row(values, columns, tasks)
        for name, values in typed_value(source, "rows", dict, PUBLISHED).items()
        if isinstance(values, dict)
    }
    rows = {name: row for name, row in rows.items() if row.scores}
    if not rows:
        return Published()
    used = {row.model for row in rows.values() if any(_names_model(model, row.model) for model in models.values())}
    notes = [f"Published rows: {source['source']}.", *map(str, typed_value(source, "notes", list, PUBLISHED))]
    if not used:
        notes.append("They are of other models than this table's: a scale, not a comparison.")
        used = {"roberta-base"}
    by_row = {name: row for name, row in rows.items() if name in models and _names_model(models[name], row.model)}
    others = tuple(row for name, row in rows.items() if row.model in used and name not in by_row)
    return Published(by_row, others, tuple(notes))


def _published_row(values: dict[str, object], columns: list[str], tasks: Collection[str]) -> PublishedRow:
    def by_task(key: str) -> dict[str, float]:
        numbers = typed_value(values, key, list, PUBLISHED) if key in values else []
        return {task: number for task, number in zip(columns, numbers, strict=False) if task in tasks}

    model, title, parameters = (typed_value(values, key, str, PUBLISHED) for key in ("model", "title", "parameters"))
    return PublishedRow(model, title, parameters, by_task("scores"), by_task("deviations"))


def _names_model(reference: str, model: str) -> bool:
    return re.split(r"[/\\]", reference.lower())[-1] == model
