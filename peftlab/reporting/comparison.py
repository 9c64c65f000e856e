"""Reports of finished runs as one file: the page of one, the comparison of several, all as JSON, or peft's format."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from rich.table import Table
from rich.text import Text

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import Json, read_object, read_text, write_json, write_text
from peftlab.methods.config import METHODS
from peftlab.progress import duration, per_second
from peftlab.references import local_copy
from peftlab.registry import resolve
from peftlab.reporting import facts
from peftlab.reporting.facts import plain_table
from peftlab.reporting.pages import Line, Plot, line_plot, read_history, render, run_page
from peftlab.reporting.table_scores import lower_is_better, paired_gain
from peftlab.tasks.table import HIGH, LOW

FORMS = ("html", "json", "peft")
# key of results.json -> name, unit
_COSTS = {
    "trainable_parameters": ("trainable parameters", ""),
    "steps": ("steps", ""),
    "best_step": ("best step", ""),
    "train_seconds": ("training time", "s"),
    "examples_per_second": ("examples per second", "1/s"),
    "tokens_per_second": ("tokens per second", "1/s"),
    "peak_rss_mb": ("peak memory", "MB"),
    "peak_gpu_mb": ("peak GPU memory", "MB"),
}
_NEITHER = {"chosen_reward", "rejected_reward", "ended"}  # metrics of which neither more nor less is better
_ELSEWHERE = {"kind", "output_dir"}  # keys of a recipe that differ by nature


@dataclass(frozen=True)
class Report:
    """A report that was written.

    Attributes:
        out: the file.
        runs: their directories.
        comparison: of several runs; None of one.
    """

    out: Path
    runs: list[Path]
    comparison: Comparison | None


def report(runs: str | Path | Sequence[str | Path], out: str | Path, form: str = "html") -> Report:
    """Write the report of a run, or the comparison of several, to ``out``.

    Args:
        runs: finished runs, or their URLs.
        out: the file.
        form: ``html`` is a page: the run's own, or the comparison of several; ``json`` a run's recipe, provenance and
            results, or the comparison; ``peft`` the JSON of peft's method_comparison for one run on GSM8K.

    Raises:
        PeftlabError: no such form, no finished run, or a run that the form is not for; nothing is written then.
    """
    places, out = [Path(local_copy(run)) for run in ([runs] if isinstance(runs, str | Path) else runs)], Path(out)
    if form not in FORMS:
        raise PeftlabError(f"--as {form}: one of {', '.join(FORMS)}{did_you_mean(form, FORMS)}")
    for place in places:
        if not (place / "results.json").is_file():
            raise PeftlabError(f"{place}: no finished run here (there is no results.json)")
    if len(places) > 1:
        if form == "peft":
            raise PeftlabError("--as peft: the format of one run; name one, or take html or json")
        found = compare_runs(places)
        if form == "html":
            write_text(out, comparison_page(found))
        else:
            write_json(out, found)
        return Report(out, places, found)
    run = places[0]
    if form == "html":
        write_text(out, run_page(run))
    elif form == "peft":
        from peftlab.reporting.peft_results import peft_results

        write_json(out, peft_results(run))
    else:
        stored = {name: read_object(run / f"{name}.json") for name in ("provenance", "results")}
        write_json(out, {"recipe": read_text(run / "recipe.yaml"), **stored})
    return Report(out, places, None)


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs that are compared.

    Attributes:
        name: the end of its path that tells it from the others.
        directory: its path.
    """

    name: str
    directory: str
    task: str
    method: str
    model: str


@dataclass(frozen=True)
class Figure:
    """A quantity with its value in every run.

    Attributes:
        values: in the order of the runs; None where a run has none.
        best: the runs with the best value; empty where all are equal, no direction is better, or the tasks differ.
    """

    name: str
    unit: str
    values: list[float | None]
    best: list[int]


@dataclass(frozen=True)
class Difference:
    """A key of the recipes whose value is not the same in all; None where a recipe has no such key."""

    key: str
    values: list[str | None]


@dataclass(frozen=True)
class Comparison:
    """Several finished runs compared.

    Attributes:
        scores: at each run's best evaluation, the deciding metric of the first run first.
        costs: parameters, time and memory.
        differences: of the recipes.
        notes: why the scores may not be comparable; of drafts, differences of acceptance in pairs.
    """

    runs: list[ComparedRun]
    scores: list[Figure]
    costs: list[Figure]
    differences: list[Difference]
    notes: list[str]


def compare_runs(directories: Sequence[Path]) -> Comparison:
    """Return the comparison of finished runs.

    Raises:
        PeftlabError: a directory is named twice, or a file of a finished run is missing or damaged.
    """
    same = [str(path) for i, path in enumerate(directories) if path.resolve() in {p.resolve() for p in directories[:i]}]
    if same:
        raise PeftlabError(f"{same[0]}: named twice")
    results = [read_object(path / "results.json") for path in directories]
    for path, found in zip(directories, results, strict=True):
        facts.check_results(found, path)
    names, origins = _names(directories), [read_object(path / "provenance.json") for path in directories]
    return Comparison(
        runs=[
            ComparedRun(name, str(path), *(str(found.get(key)) for key in ("task", "method", "model")))
            for name, path, found in zip(names, directories, results, strict=True)
        ],
        scores=_scores(results),
        costs=_costs(results),
        differences=_differences([facts.stored_recipe(path)[1] for path in directories]),
        notes=[*_notes(results, origins), *_paired_gains(names, results)],
    )


def _names(directories: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that differ from each other."""
    parts = [PurePath(path.resolve()).parts for path in directories]
    for length in range(1, max(map(len, parts))):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in directories]


def _scores(results: Sequence[facts.Results]) -> list[Figure]:
    """Return a figure for each metric of each split; one that only some runs have has gaps."""
    tables = [{score.name: score for score in facts.scores(found)} for found in results]
    deciding = facts.deciding_name(results[0])
    names = sorted(dict.fromkeys(name for table in tables for name in table), key=lambda name: name != deciding)
    figures = []
    for name in names:
        found = [table.get(name) for table in tables]
        metric = next(score.metric for score in found if score)
        values = [score.value if score else None for score in found]
        figures.append(Figure(name, "", values, _best(values, metric)))
    figures += _answers(results)
    return figures if _one_task(results) else [replace(figure, best=[]) for figure in figures]


def _answers(results: Sequence[facts.Results]) -> list[Figure]:
    """Return a figure for each metric of the generated answers."""
    tables = [dict(facts.flatten(found.get("generate") or {})) for found in results]
    figures = []
    for metric in dict.fromkeys(metric for table in tables for metric in table):
        if not metric.endswith((LOW, HIGH)) and metric != "contexts":
            values = [facts.as_float(table.get(metric)) for table in tables]
            figures.append(Figure(f"{facts.label(metric)} (generated answers)", "", values, _best(values, metric)))
    return figures


def _costs(results: Sequence[facts.Results]) -> list[Figure]:
    rows = {key: [facts.as_float(found.get(key)) for found in results] for key in _COSTS}
    return [Figure(*_COSTS[key], values, []) for key, values in rows.items() if any(v is not None for v in values)]


def _best(values: Sequence[float | None], metric: str) -> list[int]:
    """Return the places of the best values; none where all are equal or neither more nor less is better."""
    sign = -1 if lower_is_better(metric) else 1
    there = [sign * value for value in values if value is not None and math.isfinite(value)]
    if metric in _NEITHER or len(set(there)) < 2:
        return []
    return [i for i, value in enumerate(values) if value is not None and sign * value == max(there)]


def _differences(recipes: Sequence[dict[str, Json]]) -> list[Difference]:
    """Return the keys that differ; a method's own key that another method has not counts if it is no default."""
    flat = [dict(facts.flatten(recipe)) for recipe in recipes]
    usual = dict(default for recipe in recipes for default in _method_defaults(recipe))
    keys = dict.fromkeys(key for recipe in flat for key in recipe if key not in _ELSEWHERE)
    found = []
    for key in keys:
        values = [facts.setting(recipe[key]) if key in recipe else None for recipe in flat]
        present = set(values) - {None}
        if len(present) > 1 or (None in values and present != {usual.get(key)}):
            found.append(Difference(key, values))
    return found


def _method_defaults(recipe: Mapping[str, Json]) -> Iterator[tuple[str, str]]:
    """Yield key and default of each field of a recipe's method."""
    section = recipe.get("method")
    row = METHODS.get(str(section.get("name"))) if isinstance(section, Mapping) else None
    if row is not None:
        for name, field in resolve(row.config).model_fields.items():
            yield f"method.{name}", facts.setting(field.get_default(call_default_factory=True))


def _one_task(results: Sequence[facts.Results]) -> bool:
    return len({found.get("task") for found in results}) == 1


def _notes(results: Sequence[facts.Results], provenances: Sequence[dict[str, Json]]) -> list[str]:
    notes = []
    if not _one_task(results):
        notes.append("The runs are of different tasks: their scores do not compare.")
    elif len({str(origin.get("data_fingerprint")) for origin in provenances}) > 1:
        notes.append("The runs were trained or scored on different rows: their scores may not compare.")
    machines = {f"{r.get('cpu')} {o.get('device')}" for r, o in zip(results, provenances, strict=True)}
    if len(machines) > 1:
        notes.append("The runs were not all on one machine: their times do not compare.")
    return notes


def _paired_gains(names: Sequence[str], results: Sequence[facts.Results]) -> Iterator[str]:
    """Yield the gain of each draft run over the first one in a sentence; a run on other text has none."""
    for name, other in zip(names[1:], results[1:], strict=True):
        gain = paired_gain(name, names[0], [(results[0], other)])
        if gain is not None:
            yield gain.line()


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
        return duration(value)
    if unit == "1/s":
        return per_second(value)
    if unit == "MB":
        return f"{value:,.0f} MB"
    return facts.number(value)


def _settings(found: Comparison) -> list[Cells]:
    return [(row.key, ["–" if text is None else text for text in row.values], []) for row in found.differences]


def _plots(found: Comparison) -> list[Plot]:
    """Return a plot for each curve, with all runs in it: losses, the metrics of each split, the learning rate."""
    histories = {run.name: read_history(Path(run.directory) / "metrics.jsonl") for run in found.runs}
    places = dict.fromkeys(place for history in histories.values() for place in history.evaluation)

    def trained(key: str) -> list[Line]:
        return [Line(name, history.train[key]) for name, history in histories.items()]

    def scored(place: tuple[str, str]) -> list[Line]:
        return [Line(n, history.evaluation[place]) for n, history in histories.items() if place in history.evaluation]

    plots = line_plot("Training loss", trained("loss"), salt="loss")
    for i, (split, metric) in enumerate(places):
        title = facts.title(f"{metric} ({split})" if split else metric)
        plots += line_plot(title, scored((split, metric)), salt=f"score-{i}")
    return [*plots, *line_plot("Learning rate", trained("lr"), salt="lr")]
