"""One offline HTML page about a run: no request leaves it and it needs no script."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from pathlib import Path

from peftlab.errors import PeftlabError
from peftlab.files import read_object, read_text, write_text
from peftlab.reporting import facts
from peftlab.reporting.classes import (
    baseline_remark,
    class_counts,
    class_rows,
    class_warnings,
    confusion,
    score_rows,
)
from peftlab.reporting.curves import History, read_history
from peftlab.reporting.draft_views import run_example, run_plots
from peftlab.reporting.plots import Line, curve_svg, scatter_svg
from peftlab.reporting.runs.usage import usage

TEMPLATES = Path(__file__).parent / "templates"
_CLASSES = 500  # rows of the tables of classes
_CONFUSED = 20  # classes of the largest confusion matrix


def write_report(run_dir: str | Path) -> Path:
    """Write ``report.html`` into a run directory and return its path.

    The page is a function of ``recipe.yaml``, ``provenance.json``, ``metrics.jsonl`` and ``results.json``:
    the same files give the same bytes. ``metrics.jsonl`` is streamed, so its length does not matter.

    Raises:
        PeftlabError: matplotlib or jinja2 is not installed (the ``report`` extra), or a file is missing.
    """
    path = Path(run_dir) / "report.html"
    write_text(path, run_page(path.parent))
    return path


def run_page(run_dir: Path) -> str:
    """Return the page that ``write_report`` writes; errors as there."""
    require("matplotlib")
    return render("report.html.j2", page_context(run_dir))


def render(template: str, context: Mapping[str, object]) -> str:
    """Return the page that a template of ``templates/`` makes of ``context``; the same input gives the same bytes.

    Raises:
        PeftlabError: jinja2 is not installed.
    """
    require("jinja2")
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(context)


def require(module: str) -> None:
    """Raise ``PeftlabError`` where a module of the ``report`` extra is not installed."""
    try:
        importlib.import_module(module)
    except ImportError:
        raise PeftlabError(f"the HTML report needs {module}: pip install peftlab[report]") from None


def page_context(run_dir: Path) -> dict[str, object]:
    """Return what the template shows, read from the files of ``run_dir``."""
    from ruamel.yaml import YAML

    results = read_object(run_dir / "results.json")
    missing = [key for key in ("task", "method", "metric", "score") if key not in results]
    if missing:
        raise PeftlabError(f"{run_dir / 'results.json'}: no {', '.join(missing)}")
    provenance = read_object(run_dir / "provenance.json")
    recipe_file = run_dir / "recipe.yaml"
    if not recipe_file.is_file():
        raise PeftlabError(f"{recipe_file}: no such file")
    recipe = read_text(recipe_file)
    values = YAML(typ="safe").load(recipe) or {}
    history = read_history(run_dir / "metrics.jsonl")
    metric = str(results["metric"])
    return {
        "task": results["task"],
        "method": results["method"],
        "model": results.get("model") or values.get("model", "unknown model"),
        "metric": facts.label(metric),
        "score": facts.number(results["score"]),
        "gain": facts.gain(results),
        "baseline_name": facts.baseline_name(metric),
        "bars": _bars(results),
        "plots": [
            *_plots(history, metric, facts.real(results.get("baseline_score"))),
            *_scatter(results),
            *run_plots(results),
        ],
        "notes": [*_remarks(results), *_notes(history)],
        "classes": class_rows(counts, _CLASSES) if (counts := class_counts(results)) else [],
        "facts": facts.facts(results),
        "scores": [
            (score.name, *("" if v is None else facts.number(v) for v in (score.value, score.last, score.baseline)))
            for score in facts.scores(results)
        ],
        "by_class": score_rows(results, _CLASSES),
        "confusion": confusion(results, _CONFUSED),
        "example": run_example(results),
        "hardest": _hardest(results),
        "answers": facts.answer_scores(results),
        "merge": _rows(results.get("merge")),
        "recipe": recipe,
        "usage": usage(values),
        "provenance": {key: str(value) for key, value in facts.flatten(provenance)},
    }


def _remarks(results: facts.Results) -> list[str]:
    """Return remarks on the score and warnings about the classes."""
    warnings = [f"{text[:1].upper()}{text[1:]}." for text in class_warnings(class_counts(results))]
    return [*filter(None, [baseline_remark(results)]), *warnings]


def _rows(values: object) -> dict[str, str]:
    return {facts.label(key): facts.number(value) for key, value in facts.flatten(values or {})}


def _bars(results: facts.Results) -> list[dict[str, str | None]]:
    """Score and baseline as bars from zero on one scale, which is 0 to 1 or as far as the numbers go."""
    metric = str(results["metric"])
    named = [
        ("score", facts.label(metric), facts.real(results["score"])),
        ("baseline", facts.baseline_name(metric), facts.real(results.get("baseline_score"))),
    ]
    bars = [(kind, name, value) for kind, name, value in named if value is not None and math.isfinite(value)]
    low = min([0.0, *(value for _, _, value in bars)])
    high = max([1.0, *(value for _, _, value in bars)])
    return [
        {
            "kind": kind,
            "name": name,
            "value": facts.number(value),
            "left": f"{100 * (min(value, 0) - low) / (high - low):.2f}",
            "zero": f"{-100 * low / (high - low):.2f}" if low < 0 else None,
            "width": f"{100 * abs(value) / (high - low):.2f}",
        }
        for kind, name, value in bars
    ]


def _plots(history: History, metric: str, baseline: float | None) -> list[dict[str, object]]:
    """Loss, metrics and learning rate; a plot without a point is left out.

    Metrics between -1 and 1 share a plot; any other would flatten them, and has its own.
    """
    losses, shares = [Line("training loss", history.train["loss"])], list[Line]()
    alone: dict[str, list[Line]] = {}
    for (split, name), curve in history.evaluation.items():
        line = Line(facts.label(f"{name} ({split})" if split else name), curve)
        wide = any(abs(value) > 1 for value in curve.y)
        (losses if name == "loss" else alone.setdefault(name, []) if wide else shares).append(line)
    bounds = {name: (baseline if name == metric else None) for name in alone}
    return [
        *plot("loss", "Loss", losses),
        *plot("metric", "Evaluation", shares, None if metric in alone else baseline, facts.baseline_name(metric)),
        *(
            each
            for name, lines in alone.items()
            for each in plot(name, facts.title(name), lines, bounds[name], facts.baseline_name(metric))
        ),
        *plot("lr", "Learning rate", [Line("learning rate", history.train["lr"])]),
    ]


def plot(
    salt: str, title: str, lines: list[Line], baseline: float | None = None, baseline_name: str = ""
) -> list[dict[str, object]]:
    """Return a plot as the templates take it, in a list; none where no line has a point.

    Args:
        salt: unique in the page. baseline: height of a dashed line, called ``baseline_name``.
    """
    lines = [line for line in lines if line.curve.buckets]
    if not lines:
        return []
    spoken = [f"{line.name} from {facts.number(line.curve.y[0])} to {facts.number(line.curve.y[-1])}" for line in lines]
    if baseline is not None:
        spoken.append(f"{baseline_name} {facts.number(baseline)}")
    return [
        {
            "title": title,
            "names": [line.name for line in lines if line.name != title.lower()],
            "baseline": baseline_name if baseline is not None else None,
            "svg": curve_svg(lines, salt=salt, summary=f"{title}: {'; '.join(spoken)}", baseline=baseline),
        }
    ]


def _hardest(results: facts.Results) -> list[dict[str, str]]:
    """The examples of largest loss, as text."""
    found = results.get("hardest")
    return [
        {
            "text": " | ".join(filter(None, (row["text"], row["text_pair"]))),
            "label": facts.number(row["label"]),
            "predicted": facts.number(row["predicted"]),
            "probability": "" if row["probability"] is None else facts.percent(row["probability"]),
        }
        for row in (found if isinstance(found, list) else [])
    ]


def _scatter(results: facts.Results) -> list[dict[str, object]]:
    """Predictions over labels, for regression."""
    points = results.get("points")
    if not isinstance(points, list) or not points:
        return []
    summary = f"Predictions over labels of {len(points):,} examples"
    return [
        {
            "title": "Predictions over labels",
            "names": [],
            "baseline": "prediction = label",
            "svg": scatter_svg(points, salt="scatter", summary=summary),
        }
    ]


def _notes(history: History) -> list[str]:
    """Return remarks on the curves: damaged lines, values left out, averaging."""
    notes = []
    if history.damaged:
        notes.append(
            f"Lines of metrics.jsonl that could not be read: {history.damaged:,} of {history.lines:,} "
            "(a run that is killed leaves one)."
        )
    if history.non_finite:
        notes.append(f"Values that are NaN or infinite and so in no curve: {history.non_finite:,}.")
    thinned = max((c.per_bucket for c in (*history.train.values(), *history.evaluation.values())), default=1)
    if thinned > 1:
        notes.append(f"Lines are means of up to {thinned:,} points; the band is their range.")
    return notes
