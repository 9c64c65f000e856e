"""Curves as inline SVG whose colours are CSS variables, so that one drawing serves light and dark pages."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peftlab.reporting.curves import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.typing import RcKeyType

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
# One after the other, so that a curve on top of another one lets it be seen; the templates' legends repeat them.
_DASHES: tuple[str | tuple[int, tuple[float, float]], ...] = ("solid", (0, (5, 2.5)), (0, (1.2, 1.6)))
_FEW = 25  # points that are marked one by one
_FEWEST_BARS, _LABELLED_BARS = 5, 12


@dataclass(frozen=True)
class Line:
    """A named curve in a plot."""

    name: str
    curve: Curve


def curve_svg(lines: list[Line], *, salt: str, summary: str, baseline: float | None = None) -> str:
    """Draw ``lines`` over optimiser steps and return one ``<svg>`` element for use inside an HTML page.

    A thinned curve is its buckets' mean over a band from their minimum to their maximum. The same input gives
    the same bytes.

    Args:
        lines: the curves; the n-th is drawn in the page's variable ``--series-n`` (they repeat after five),
            solid, dashed and dotted in turn.
        salt: a word unique in the page; keeps the ids of several drawings apart.
        summary: what a screen reader says.
        baseline: height of a dashed reference line.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

    steps = {step for line in lines for step in line.curve.x}
    with figure(salt, summary) as (axes, drawn):
        for i, line in enumerate(lines):
            _draw(axes, line.curve, SERIES[i % len(SERIES)], _DASHES[i % len(_DASHES)])
        if baseline is not None:
            axes.axhline(baseline, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.set_xlabel("step")
        # Around a single step the axis has no second whole number.
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True) if len(steps) > 1 else FixedLocator([*steps]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    return drawn.svg


def scatter_svg(points: Sequence[Sequence[float]], *, salt: str, summary: str) -> str:
    """Draw (label, prediction) and the diagonal as one ``<svg>`` element; arguments as for ``curve_svg``."""
    with figure(salt, summary) as (axes, drawn):
        labels, predictions = zip(*points, strict=True)
        ends = [min(labels), max(labels)]
        axes.plot(ends, ends, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.scatter(labels, predictions, s=9, color=SERIES[0], alpha=0.5, linewidths=0)
        axes.set_xlabel("label")
        axes.set_ylabel("prediction")
    return drawn.svg


def bar_svg(
    heights: Mapping[int, float],
    *,
    salt: str,
    summary: str,
    labels: tuple[str, str],
    text: str,
    top: float | None = None,
) -> str:
    """Draw a bar over each whole number and return one ``<svg>`` element.

    Args:
        heights: of the bars, by whole number; a number between them has none. Of integers the axis has integers.
        salt, summary: as for ``curve_svg``.
        labels: of the two axes.
        text: format of the number over each bar, as in ``"{:.2f}"``; left out where there are more than twelve.
        top: of the vertical axis; None: a little above the highest bar.
    """
    from matplotlib.ticker import MaxNLocator

    first, last = min(heights), max(heights)
    with figure(salt, summary, counts=all(isinstance(height, int) for height in heights.values())) as (axes, drawn):
        bars = axes.bar(list(heights), list(heights.values()), width=0.7, color=SERIES[0])
        # A bar of few is no wider than one of many.
        room = max(0, _FEWEST_BARS - (last - first + 1)) / 2
        axes.set_xlim(first - 0.6 - room, last + 0.6 + room)
        whole = range(first, last + 1)
        axes.set_xticks(
            whole if len(whole) <= _LABELLED_BARS else MaxNLocator(8, integer=True).tick_values(first, last)
        )
        axes.set(xlabel=labels[0], ylabel=labels[1])
        if len(whole) <= _LABELLED_BARS:
            axes.bar_label(bars, [text.format(height) for height in heights.values()], padding=2, fontsize=9)
        axes.margins(y=0.12)
        if top is not None:
            axes.set_ylim(0, top)
    return drawn.svg


@dataclass
class Drawing:
    """A drawing that is finished once the block that draws it ends."""

    svg: str = ""


@contextmanager
def figure(salt: str, summary: str, *, counts: bool = False) -> Iterator[tuple[Axes, Drawing]]:
    """Yield the axes of a figure in the page's style; the drawing has its ``svg`` once the block ends.

    Args:
        salt, summary: as for ``curve_svg``. counts: whether the vertical axis has whole numbers only.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    drawn = Drawing()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": f"peftlab-{salt}"}):
        figure = Figure(figsize=(4.4, 2.7), layout="constrained")
        axes = figure.add_subplot()
        yield axes, drawn
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=counts))
        buffer = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    drawn.svg = _inline(buffer.getvalue(), summary)


def _draw(axes: Axes, curve: Curve, colour: str, dashes: str | tuple[int, tuple[float, float]]) -> None:
    x, y = curve.x, curve.y
    if curve.per_bucket > 1:
        low = [bucket.low for bucket in curve.buckets]
        high = [bucket.high for bucket in curve.buckets]
        axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    marker = "o" if len(x) <= _FEW else ""
    axes.plot(x, y, color=colour, linewidth=1.8, linestyle=dashes, marker=marker, markersize=3)


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
