"""Plots as inline SVG: the curves of ``metrics.jsonl``, read in one pass, and how lines, points and bars are drawn.

Colours are CSS variables of the page, so that one drawing serves light and dark pages. The same input gives the same
bytes.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from peftlab.errors import PeftlabError
from peftlab.files import Json, parse_json
from peftlab.reporting import facts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.typing import RcKeyType

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


# Curves of metrics.jsonl


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


# Drawings


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
