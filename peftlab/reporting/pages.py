"""Renders a run's report, and other offline HTML pages, from templates: no page makes a request or needs a script.

Plots are inline SVG; their colours are CSS variables of the page, so that one drawing serves light and dark pages. The
same input gives the same bytes.
"""

from __future__ import annotations

import html
import importlib
import io
import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from peftlab.errors import PeftlabError
from peftlab.files import Json, parse_json, read_object, write_text
from peftlab.progress import per_second
from peftlab.reporting import facts
from peftlab.tasks.table import TASKS

if TYPE_CHECKING:
    import jinja2
    from matplotlib.axes import Axes
    from matplotlib.typing import RcKeyType

TEMPLATES = Path(__file__).parent / "templates"
_CLASSES = 500  # rows of the tables of classes
_CONFUSED = 20  # classes of the largest confusion matrix
_PIECES = {"accepted": "drafted and accepted", "rejected": "drafted and rejected", "target": "added by the target"}
_PROMPT = "Once upon a time"
_TIMES = "\N{MULTIPLICATION SIGN}"


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
    results: facts.Results = read_object(run_dir / "results.json")
    facts.check_results(results, run_dir)
    provenance = read_object(run_dir / "provenance.json")
    recipe, values = facts.stored_recipe(run_dir)
    history = read_history(run_dir / "metrics.jsonl")
    metric, counts, points = str(results["metric"]), facts.class_counts(results), results.get("points")
    decoding = facts.decoding_after_training(results)
    context = {
        "title": facts.results_title(results),
        "model": results.get("model") or values.get("model", "unknown model"),
        "headline": facts.headline(results, _TIMES),
        "bars": _decoding_bars(decoding) or _score_bars(results),
        "plots": [
            *_curves(history, metric, facts.as_float(results.get("baseline_score"))),
            *([scatter_plot(points)] if isinstance(points, list) and points else []),
            *_acceptance(decoding),
            *_reliability(results.get("confidence")),
        ],
        "notes": [
            *filter(None, [facts.baseline_remark(results)]),
            *(f"{text[:1].upper()}{text[1:]}." for text in facts.class_warnings(counts)),
            *_history_notes(history),
        ],
        "classes": facts.class_rows(counts, _CLASSES) if counts else [],
        "facts": facts.summary(results, _TIMES),
        "scores": [
            (score.name, *("" if v is None else facts.number(v) for v in (score.value, score.last, score.baseline)))
            for score in facts.scores(results)
        ],
        "by_class": facts.class_score_rows(results, _CLASSES),
        "confusion": facts.confusion(results, _CONFUSED),
        "example": drafted_example(decoding.get("example")),
        "hardest": _hardest_examples(results.get("hardest")),
        "answers": facts.answer_scores(results),
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
        ("score", facts.label(metric), facts.as_float(results["score"])),
        ("baseline", facts.baseline_name(metric), facts.as_float(results.get("baseline_score"))),
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


def _decoding_bars(decoding: Mapping[str, object]) -> list[dict[str, str | None]]:
    """Return the speeds of decoding with a draft and without it as bars; none where they were not measured."""
    keys = {"with the draft": "tokens_per_second", "plain": "plain_tokens_per_second"}
    rates = {name: rate for name, key in keys.items() if (rate := facts.as_float(decoding.get(key))) is not None}
    return [
        {
            "kind": "baseline" if name == "plain" else "score",
            "name": name,
            "value": f"{per_second(rate)} tokens/s",
            "left": "0",
            "zero": None,
            "width": f"{100 * rate / max(rates.values()):.2f}",
        }
        for name, rate in rates.items()
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


def _reliability(found: object) -> list[Plot]:
    """Return the reliability curve of a draft's confidence head; none where it has none."""
    bins = found.get("bins") if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping) or not isinstance(bins, list) or not bins:
        return []
    points = [(each["confidence"], each["acceptance"]) for each in bins]
    title = "Reliability of the confidence head"
    summary = f"{title}: calibration error {facts.number(found['error'])}; " + ", ".join(
        f"{x:.2f} accepted {y:.2f}" for x, y in points
    )
    with figure(title, salt="reliability", summary=summary) as (axes, plot):
        axes.plot([0, 1], [0, 1], color=INK, linewidth=1.2, linestyle=_BASELINE)
        axes.plot(*zip(*points, strict=True), color=SERIES[0], linewidth=1.8, marker="o", markersize=4)
        axes.set(xlabel="confidence", ylabel="accepted share", xlim=(0, 1), ylim=(0, 1))
    plot.baseline = "accepted as often as estimated"
    return [plot]


def _acceptance(decoding: Mapping[str, object]) -> list[Plot]:
    """Return the plots of acceptance of a draft run; none of any other run."""
    rates, runs = decoding.get("acceptance_by_position"), decoding.get("accepted_runs")
    if not isinstance(rates, list) or not isinstance(runs, Mapping):
        return []
    return acceptance_plots([facts.as_float(rate) for rate in rates], {int(n): int(count) for n, count in runs.items()})


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
    image = task is not None and task.image
    if image:
        row = '"an image.png"'
    lines = ["import peftlab", "", f"found = peftlab.predict({json.dumps(place)}, [{row}])"]
    return {
        "sh": f"peftlab predict {shlex.quote(place)} {'images/' if image else 'new.csv'} -o labelled.csv",
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


# --- Plots as inline SVG.
MAX_POINTS = 500

INK, GRID = "#010101", "#020202"
SERIES = ("#030301", "#030302", "#030303", "#030304", "#030305")
# matplotlib knows only fixed colours: each is replaced in the SVG by a variable of the page.
_VARIABLES = {INK: "var(--muted)", GRID: "var(--line)"} | {
    colour: f"var(--series-{i})" for i, colour in enumerate(SERIES, start=1)
}
_STYLE: dict[RcKeyType, str | float | bool] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
}
# In turn, so that a curve under another one stays visible; the legends of the templates repeat them.
_DASHES: tuple[str | tuple[int, tuple[float, float]], ...] = ("solid", (0, (5, 2.5)), (0, (1.2, 1.6)))
_BASELINE = (0, (4.0, 3.0))
_MARKED = 25  # points of a curve up to which each is marked
_FEWEST_BARS, _LABELLED_BARS = 5, 12


@dataclass
class Plot:
    """A drawing as ``figure.html.j2`` shows it.

    Attributes:
        title: the heading above it.
        svg: one ``<svg>`` element; empty until the block of ``figure`` ends.
        names: the legend's series, in the order of the colours.
        baseline: the legend's name of the dashed line; None without one.
    """

    title: str
    svg: str = ""
    names: Sequence[str] = ()
    baseline: str | None = None


@dataclass(frozen=True)
class Line:
    """A named curve in a plot."""

    name: str
    curve: Curve


def line_plot(
    title: str, lines: Sequence[Line], *, salt: str, baseline: float | None = None, baseline_name: str = ""
) -> list[Plot]:
    """Return the plot of ``lines`` over optimiser steps, in a list; the list is empty where no line has a point.

    A thinned curve is its buckets' mean over a band from their minimum to their maximum.

    Args:
        title: the heading; a line of the same name is not in the legend.
        lines: the curves; the n-th is drawn in the page's variable ``--series-n`` (they repeat after five), solid,
            dashed and dotted in turn.
        salt: a word unique in the page; keeps the ids of several drawings apart.
        baseline: height of a dashed line; None for none.
        baseline_name: what the legend calls that line.
    """
    lines = [line for line in lines if line.curve.buckets]
    if not lines:
        return []
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

    ends = [f"{line.name} from {facts.number(line.curve.y[0])} to {facts.number(line.curve.y[-1])}" for line in lines]
    if baseline is not None:
        ends.append(f"{baseline_name} {facts.number(baseline)}")
    steps = {step for line in lines for step in line.curve.x}
    with figure(title, salt=salt, summary=f"{title}: {'; '.join(ends)}") as (axes, plot):
        for i, line in enumerate(lines):
            x, colour = line.curve.x, SERIES[i % len(SERIES)]
            if line.curve.per_bucket > 1:
                low, high = zip(*((bucket.low, bucket.high) for bucket in line.curve.buckets), strict=True)
                axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
            marker, dashes = "o" if len(x) <= _MARKED else "", _DASHES[i % len(_DASHES)]
            axes.plot(x, line.curve.y, color=colour, linewidth=1.8, linestyle=dashes, marker=marker, markersize=3)
        if baseline is not None:
            axes.axhline(baseline, color=INK, linewidth=1.2, linestyle=_BASELINE)
            plot.baseline = baseline_name
        axes.set_xlabel("step")
        # Around a single step the axis has no second whole number.
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True) if len(steps) > 1 else FixedLocator([*steps]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    plot.names = [line.name for line in lines if line.name != title.lower()]
    return [plot]


def scatter_plot(points: Sequence[Sequence[float]]) -> Plot:
    """Return the plot of (label, prediction) points and the diagonal."""
    summary = f"Predictions over labels of {len(points):,} examples"
    with figure("Predictions over labels", salt="scatter", summary=summary) as (axes, plot):
        labels, predictions = zip(*points, strict=True)
        ends = [min(labels), max(labels)]
        axes.plot(ends, ends, color=INK, linewidth=1.2, linestyle=_BASELINE)
        axes.scatter(labels, predictions, s=9, color=SERIES[0], alpha=0.5, linewidths=0)
        axes.set_xlabel("label")
        axes.set_ylabel("prediction")
    plot.baseline = "prediction = label"
    return plot


def bar_plot(
    title: str,
    heights: Mapping[int, float],
    *,
    salt: str,
    summary: str,
    labels: tuple[str, str],
    text: str,
    top: float | None = None,
) -> Plot:
    """Return the plot of a bar over each whole number.

    Args:
        title, salt, summary: as for ``figure``.
        heights: of the bars, by whole number; a number between them has none. The axis of integers has integers.
        labels: of the two axes.
        text: format of the number over each bar, as in ``"{:.2f}"``; left out where there are more than twelve.
        top: of the vertical axis; None: a little above the highest bar.
    """
    from matplotlib.ticker import MaxNLocator

    numbers = range(min(heights), max(heights) + 1)
    labelled = len(numbers) <= _LABELLED_BARS
    counts = all(isinstance(height, int) for height in heights.values())
    with figure(title, salt=salt, summary=summary, counts=counts) as (axes, plot):
        bars = axes.bar(list(heights), list(heights.values()), width=0.7, color=SERIES[0])
        room = max(0, _FEWEST_BARS - len(numbers)) / 2  # a bar of few is no wider than one of many
        axes.set_xlim(numbers[0] - 0.6 - room, numbers[-1] + 0.6 + room)
        axes.set_xticks(numbers if labelled else MaxNLocator(8, integer=True).tick_values(numbers[0], numbers[-1]))
        axes.set(xlabel=labels[0], ylabel=labels[1])
        if labelled:
            axes.bar_label(bars, [text.format(height) for height in heights.values()], padding=2, fontsize=9)
        axes.margins(y=0.12)
        if top is not None:
            axes.set_ylim(0, top)
    return plot


def acceptance_plots(by_position: Sequence[float | None], runs: Mapping[int, int]) -> list[Plot]:
    """Return the plots of a drafter's acceptance; none where nothing was drafted.

    Args:
        by_position: accepted share of the first, second, ... drafted token of a step.
        runs: accepted tokens -> steps.
    """
    rates = {position: rate for position, rate in enumerate(by_position, start=1) if rate is not None}
    if not rates or not runs:
        return []
    shares = bar_plot(
        "Acceptance by position",
        rates,
        salt="positions",
        summary="Acceptance by position, " + ", ".join(f"{position}: {rate:.2f}" for position, rate in rates.items()),
        labels=("position in the draft", "accepted share"),
        text="{:.2f}",
        top=1.05,  # room for the number over a bar of 1
    )
    lengths = bar_plot(
        "Accepted runs",
        runs,
        salt="runs",
        summary="Target steps by accepted tokens, " + ", ".join(f"{length}: {count}" for length, count in runs.items()),
        labels=("drafted tokens accepted in a step", "target steps"),
        text="{:,.0f}",
    )
    return [shares, lengths]


@contextmanager
def figure(title: str, *, salt: str, summary: str, counts: bool = False) -> Iterator[tuple[Axes, Plot]]:
    """Yield the axes of a figure in the page's style, and the plot that has its ``svg`` once the block ends.

    Args:
        title: the plot's heading.
        salt: a word unique in the page; keeps the ids of several drawings apart.
        summary: what a screen reader reads.
        counts: whether the vertical axis has whole numbers only.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    plot = Plot(title)
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": f"peftlab-{salt}"}):
        drawing = Figure(figsize=(4.4, 2.7), layout="constrained")
        axes = drawing.add_subplot()
        yield axes, plot
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=counts))
        buffer = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        drawing.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    plot.svg = _inline(buffer.getvalue(), summary)


def _inline(svg: str, summary: str) -> str:
    """Cut matplotlib's SVG file down to an element of an HTML page."""
    view_box = re.search(r'viewBox="([^"]*)"', svg)
    if view_box is None:
        raise ValueError("the drawing has no viewBox")
    body = svg[svg.index(">", svg.index("<svg")) + 1 :]
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r"font-family: [^;]*; ", "", body)
    for colour, variable in _VARIABLES.items():
        body = body.replace(colour, variable)
    return f'<svg viewBox="{view_box[1]}" role="img" aria-label="{html.escape(summary)}">{body.strip()}'


# --- The curves of ``metrics.jsonl``, read in one pass.
@dataclass(slots=True)
class Bucket:
    """Consecutive points of a curve, drawn as one: their mean, and the range of y."""

    count: int
    x_sum: float
    y_sum: float
    low: float
    high: float
    last: float

    def absorb(self, count: int, x_sum: float, y_sum: float, low: float, high: float, last: float) -> None:
        """Take in the points of the bucket that follows, given by its fields.

        Args:
            count: number of points.
            x_sum: sum of their x.
            y_sum: sum of their y.
            low: least y.
            high: greatest y.
            last: x of the last point.
        """
        self.count += count
        self.x_sum += x_sum
        self.y_sum += y_sum
        if low < self.low:
            self.low = low
        if high > self.high:
            self.high = high
        self.last = last


class Curve:
    """A curve of at most ``MAX_POINTS`` buckets, each the mean of equally many points.

    When the buckets are full, neighbours are merged pairwise and each bucket takes twice as many points from
    then on, so one pass of constant memory does for any length. A point at a step already seen replaces what
    was there from that step on: a resumed run writes the steps since its checkpoint a second time.
    """

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self.per_bucket = 1

    def add(self, x: float, y: float) -> None:
        """Append the point (x, y).

        Args:
            x: the step.
            y: a finite value.
        """
        buckets = self.buckets
        while buckets and buckets[-1].last >= x:
            buckets.pop()
        if buckets and (newest := buckets[-1]).count < self.per_bucket:
            newest.absorb(1, x, y, y, y, x)
            return
        if len(buckets) == MAX_POINTS:
            for first, second in zip(buckets[::2], buckets[1::2], strict=True):
                first.absorb(*astuple(second))
            del buckets[1::2]
            self.per_bucket *= 2
        buckets.append(Bucket(1, x, y, y, y, x))

    @property
    def x(self) -> list[float]:
        """Mean x of each bucket."""
        return [bucket.x_sum / bucket.count for bucket in self.buckets]

    @property
    def y(self) -> list[float]:
        """Mean y of each bucket."""
        return [bucket.y_sum / bucket.count for bucket in self.buckets]


@dataclass
class History:
    """The content of ``metrics.jsonl``.

    Attributes:
        train: curves over steps of the training lines' ``loss`` and ``lr``.
        evaluation: curves over steps, by (split, metric), in the order of appearance.
        lines: lines read, without blank ones.
        damaged: lines that are not the JSON object they should be.
        non_finite: values that are NaN or infinite, and so in no curve.
    """

    train: dict[str, Curve] = field(default_factory=lambda: {"loss": Curve(), "lr": Curve()})
    evaluation: dict[tuple[str, str], Curve] = field(default_factory=dict)
    lines: int = 0
    damaged: int = 0
    non_finite: int = 0

    def add_line(self, line: str) -> None:
        """Take in one line of the file."""
        self.lines += 1
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if not (isinstance(row, dict) and self._add_row(row)):
            self.damaged += 1

    def _add_row(self, row: dict[str, Json]) -> bool:
        """Take in the values of a line; False if one of them is of another type than it should be."""
        step, split, scores = row.get("step"), row.get("split", ""), row.get("eval", {})
        if not (isinstance(step, int | float) and isinstance(split, str) and isinstance(scores, dict)):
            return False
        if "eval" in row:
            return all(
                self._add(self._evaluation_curve(split, metric), step, value) for metric, value in scores.items()
            )
        return all(self._add(curve, step, row.get(name)) for name, curve in self.train.items())

    def _evaluation_curve(self, split: str, metric: str) -> Curve:
        return self.evaluation.setdefault((split, metric), Curve())

    def _add(self, curve: Curve, step: float, value: Json) -> bool:
        if not isinstance(value, int | float):
            return value is None
        if math.isfinite(value):
            curve.add(step, value)
        else:
            self.non_finite += 1
        return True


def read_history(path: Path) -> History:
    """Read ``metrics.jsonl`` in one pass.

    Raises:
        PeftlabError: there is no such file. A damaged line (a killed run leaves one) is counted, not raised.
    """
    history = History()
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if not line.isspace():
                    history.add_line(line)
    except FileNotFoundError:
        raise PeftlabError(f"{path}: no such file") from None
    return history
