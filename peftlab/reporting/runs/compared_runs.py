"""Several finished runs beside each other: scores, costs, and where their recipes differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from ruamel.yaml import YAML

from peftlab.errors import PeftlabError
from peftlab.files import Json, read_object, read_text
from peftlab.methods.table import METHODS
from peftlab.registry import resolve
from peftlab.reporting import facts
from peftlab.reporting.runs.paired_drafts import paired_lines
from peftlab.reporting.tables.score_scale import lower_is_better
from peftlab.tasks.table import HIGH, LOW

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
class ComparedRun:
    """A run.

    Attributes:
        name: the end of its path that tells it from the others. directory: its path.
    """

    name: str
    directory: str
    task: str
    method: str
    model: str


@dataclass(frozen=True)
class Figure:
    """A number of every run.

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
    """Runs beside each other.

    Attributes:
        scores: at each run's best evaluation, the deciding metric of the first run first.
        costs: parameters, time and memory. differences: of the recipes.
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
    recipes = [read_text(path / "recipe.yaml") for path in directories]
    names, origins = _names(directories), [read_object(path / "provenance.json") for path in directories]
    return Comparison(
        runs=[
            ComparedRun(name, str(path), *(str(found.get(key)) for key in ("task", "method", "model")))
            for name, path, found in zip(names, directories, results, strict=True)
        ],
        scores=_scores(results),
        costs=_costs(results),
        differences=_differences([YAML(typ="safe").load(recipe) for recipe in recipes]),
        notes=[*_notes(results, origins), *paired_lines(names, results)],
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
            values = [facts.real(table.get(metric)) for table in tables]
            figures.append(Figure(f"{facts.label(metric)} (generated answers)", "", values, _best(values, metric)))
    return figures


def _costs(results: Sequence[facts.Results]) -> list[Figure]:
    rows = {key: [facts.real(found.get(key)) for found in results] for key in _COSTS}
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
