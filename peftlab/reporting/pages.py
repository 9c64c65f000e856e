"""Renders a run's report, and other offline HTML pages, from templates: no page makes a request or needs a script."""

from __future__ import annotations

import importlib
import json
import math
import shlex
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from peftlab.errors import PeftlabError
from peftlab.files import read_object, read_text, write_text
from peftlab.reporting import facts
from peftlab.reporting.plots import History, Line, Plot, acceptance_plots, line_plot, read_history, scatter_plot
from peftlab.tasks.table import TASKS

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).parent / "templates"
_CLASSES = 500  # rows of the tables of classes
_CONFUSED = 20  # classes of the largest confusion matrix
_PIECES = {"accepted": "drafted and accepted", "rejected": "drafted and rejected", "target": "added by the target"}
_PROMPT = "Once upon a time"


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
    from ruamel.yaml import YAML

    results: facts.Results = read_object(run_dir / "results.json")
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
    metric, counts, points = str(results["metric"]), facts.class_counts(results), results.get("points")
    decoding = facts.decoding_after(results)
    context = {
        "task": results["task"],
        "method": results["method"],
        "model": results.get("model") or values.get("model", "unknown model"),
        "metric": facts.label(metric),
        "score": facts.number(results["score"]),
        "gain": facts.gain(results),
        "baseline_name": facts.baseline_name(metric),
        "bars": _score_bars(results),
        "plots": [
            *_curves(history, metric, facts.real(results.get("baseline_score"))),
            *([scatter_plot(points)] if isinstance(points, list) and points else []),
            *_acceptance(decoding),
        ],
        "notes": [
            *filter(None, [facts.baseline_remark(results)]),
            *(f"{text[:1].upper()}{text[1:]}." for text in facts.class_warnings(counts)),
            *_history_notes(history),
        ],
        "classes": facts.class_rows(counts, _CLASSES) if counts else [],
        "facts": facts.facts(results),
        "scores": [
            (score.name, *("" if v is None else facts.number(v) for v in (score.value, score.last, score.baseline)))
            for score in facts.scores(results)
        ],
        "by_class": facts.class_score_rows(results, _CLASSES),
        "confusion": facts.confusion(results, _CONFUSED),
        "example": drafted_example(decoding.get("example")),
        "hardest": _hardest_examples(results.get("hardest")),
        "answers": facts.answer_scores(results),
        "merge": {facts.label(key): facts.number(value) for key, value in facts.flatten(results.get("merge") or {})},
        "recipe": recipe,
        "usage": usage(values),
        "provenance": {key: str(value) for key, value in facts.flatten(provenance)},
    }
    return render("report.html.j2", context)


def render(template: str, context: Mapping[str, object]) -> str:
    """Return the page that a template of ``templates/`` makes of ``context``; the same input gives the same bytes.

    Args:
        template: the file's name.
        context: the variables that it reads.

    Raises:
        PeftlabError: jinja2 is not installed.
    """
    require("jinja2")
    return _templates().get_template(template).render(context)


@cache
def _templates() -> jinja2.Environment:
    """Return the templates, each of which is compiled once in a process."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def require(module: str) -> None:
    """Raise ``PeftlabError`` where a module of the ``report`` extra is not installed."""
    try:
        importlib.import_module(module)
    except ImportError:
        raise PeftlabError(f"the HTML report needs {module}: pip install peftlab[report]") from None


def _score_bars(results: facts.Results) -> list[dict[str, str | None]]:
    """Return score and baseline as bars from zero on one scale, which is 0 to 1 or as far as the numbers go."""
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


def _curves(history: History, metric: str, baseline: float | None) -> list[Plot]:
    """Return the plots of loss, metrics and learning rate; a plot without a point is left out.

    Metrics between -1 and 1 share a plot; any other would flatten them, and has its own.
    """
    losses, shares = [Line("training loss", history.train["loss"])], list[Line]()
    alone: dict[str, list[Line]] = {}
    for (split, name), curve in history.evaluation.items():
        line = Line(facts.label(f"{name} ({split})" if split else name), curve)
        wide = any(abs(value) > 1 for value in curve.y)
        (losses if name == "loss" else alone.setdefault(name, []) if wide else shares).append(line)
    baseline_name = facts.baseline_name(metric)

    def scored(salt: str, title: str, lines: list[Line], height: float | None) -> list[Plot]:
        return line_plot(title, lines, salt=salt, baseline=height, baseline_name=baseline_name)

    plots = line_plot("Loss", losses, salt="loss")
    plots += scored("metric", "Evaluation", shares, None if metric in alone else baseline)
    for name, lines in alone.items():
        plots += scored(name, facts.title(name), lines, baseline if name == metric else None)
    return [*plots, *line_plot("Learning rate", [Line("learning rate", history.train["lr"])], salt="lr")]


def _acceptance(decoding: Mapping[str, object]) -> list[Plot]:
    """Return the plots of acceptance of a draft run; none of any other run."""
    rates, runs = decoding.get("acceptance_by_position"), decoding.get("accepted_runs")
    if not isinstance(rates, list) or not isinstance(runs, Mapping):
        return []
    return acceptance_plots([facts.real(rate) for rate in rates], {int(n): int(count) for n, count in runs.items()})


def _history_notes(history: History) -> list[str]:
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


def _hardest_examples(found: object) -> list[dict[str, str]]:
    """Return the examples of largest loss, ``hardest`` of ``results.json``, as text."""
    return [
        {
            "text": " | ".join(filter(None, (row["text"], row["text_pair"]))),
            "label": facts.number(row["label"]),
            "predicted": facts.number(row["predicted"]),
            "probability": "" if row["probability"] is None else facts.percent(row["probability"]),
        }
        for row in (found if isinstance(found, list) else [])
    ]


def drafted_example(example: object) -> dict[str, object] | None:
    """Return one output with its drafted tokens as ``drafted.html.j2`` takes it; None where there is none.

    Args:
        example: ``decoding.benchmark.DraftedText`` as JSON has it.
    """
    if not isinstance(example, Mapping):
        return None
    pieces = [(str(piece["kind"]), str(piece["text"])) for piece in example["pieces"]]
    counts = Counter(kind for kind, _ in pieces)
    return {
        "prompt": example["prompt"],
        "pieces": [(kind, text.replace("\n", "↵\n")) for kind, text in pieces],
        "legend": [(kind, f"{counts[kind]:,} {name}") for kind, name in _PIECES.items()],
    }


def usage(recipe: Mapping[str, object]) -> dict[str, str]:
    """Return lines for a shell and lines of Python that use the run of a resolved recipe, by language."""
    place = str(recipe.get("output_dir", "RUN"))
    if recipe.get("kind") == "draft":
        return _generating(str(recipe.get("target")), draft=place)
    name = str(recipe.get("task"))
    task, data = TASKS.get(name), recipe.get("data")
    if task is not None and not task.labelled:
        return _generating(place, chat=name == "text/chat")
    named = data.get("text") if isinstance(data, Mapping) else None
    columns = named if isinstance(named, list) else task.text if task is not None else ()
    row = '("a text", "its pair")' if len(columns) == 2 else '"a text"'
    if task is not None and task.choices:
        row = '("a question", ["an answer", "another"])'
    lines = ["import peftlab", "", f"found = peftlab.predict({json.dumps(place)}, [{row}])"]
    return {
        "sh": f"peftlab predict {shlex.quote(place)} new.csv -o labelled.csv",
        "python": "\n".join([*lines, "print(found.answers, found.probabilities)"]),
    }


def _generating(target: str, draft: str | None = None, *, chat: bool = False) -> dict[str, str]:
    """Return ``usage`` of a model that generates.

    Args:
        target: the model.
        draft: of a draft run, its directory.
        chat: whether it was trained on conversations.
    """
    command = ["peftlab", "generate", "--target", target, *(["--draft", draft] if draft else [])]
    arguments = [target, _PROMPT, *([draft] if draft else [])]
    call = ", ".join([*map(json.dumps, arguments), *(["chat=True"] if chat else [])])
    return {
        "sh": shlex.join([*command, *(["--chat"] if chat else ["--prompt", _PROMPT])]),
        "python": f"import peftlab\n\nprint(peftlab.generate({call}).text)",
    }
