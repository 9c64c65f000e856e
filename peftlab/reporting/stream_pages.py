"""A stream of requests for people: console tables, and one offline HTML page with the acceptance over the requests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from peftlab.decoding.planning import finite
from peftlab.drafting.text.stream_windows import StreamResults, WindowResult
from peftlab.reporting.draft_pages import Rows, page
from peftlab.reporting.draft_views import plot_of
from peftlab.reporting.html import require
from peftlab.reporting.plots import SERIES, figure

_NAMES = ("learning", "frozen")


def window_line(number: int, first: int, window: WindowResult) -> str:
    """Return a window in a line. ``first``: number of its first request."""
    learnt = f"learnt from {window.learnt_tokens} tokens" if window.learnt_tokens else "no update"
    return (
        f"window {number}, requests {first} to {first + window.requests - 1}: acceptance "
        f"{finite(window.live.acceptance)}, {finite(window.frozen.acceptance)} with the frozen draft; "
        f"{window.rejected} tokens rejected, {learnt}"
    )


def stream_tables(results: StreamResults) -> list[tuple[str, list[str], Rows]]:
    """Return the tables of a stream: title, header, rows."""
    rows = [
        (
            f"{last - window.requests + 1} to {last}",
            finite(window.live.acceptance),
            finite(window.frozen.acceptance),
            finite(window.live.tau),
            finite(window.frozen.tau),
            str(window.rejected),
            f"{window.decoding_seconds:.1f} s",
            f"{window.update_seconds:.1f} s",
        )
        for last, window in zip(_ends(results), results.windows, strict=True)
    ]
    header = ["requests", "alpha", "frozen", "tau", "frozen", "rejected", "decoding", "update"]
    return [("acceptance over the stream, beside the frozen draft's", header, rows)]


def stream_facts(results: StreamResults) -> list[str]:
    """Return a stream in sentences, the verdict last."""
    live, frozen, ends = results.live, results.frozen, results.gain_interval
    spent = results.decoding_seconds + results.update_seconds
    sentences = [
        f"decoding took {results.decoding_seconds:.1f} s and {results.updates} updates {results.update_seconds:.1f} s, "
        f"{spent:.1f} s together; decoding with the frozen draft took {results.frozen_seconds:.1f} s",
        f"the draft: {results.draft}",
    ]
    if results.unequal is not None:
        equal = results.requests - results.unequal
        sentences.insert(0, f"{equal} of {results.requests} greedy answers are equal with both drafts")
    if results.gain is None:
        return [*sentences, "nothing was drafted"]
    between = f" ({ends[0]:+.3f} to {ends[1]:+.3f})" if ends else " (no interval)"
    verdict = f"acceptance {finite(live.acceptance)}, {finite(frozen.acceptance)} with the frozen draft: "
    return [*sentences, f"{verdict}{results.gain:+.3f}{between} over {results.requests} requests"]


def stream_page(results: StreamResults) -> str:
    """Return the page of a stream."""
    require("matplotlib")
    ends = _ends(results)
    plots = []
    for title, name, label in (
        ("Acceptance over the stream", "acceptance", "acceptance of a window"),
        ("Tokens per target step", "tau", "tokens per target step"),
    ):
        lines = [
            [float(value) if (value := getattr(rates, name)) is not None else float("nan") for rates in each]
            for each in ([w.live for w in results.windows], [w.frozen for w in results.windows])
        ]
        plots.append({**plot_of(title, _curves(ends, lines, title, label)), "names": [*_NAMES]})
    return page("Updates over a stream", stream_tables(results), stream_facts(results), plots)


def _curves(ends: Sequence[int], lines: Sequence[Sequence[float]], title: str, label: str) -> str:
    with figure(label.partition(" ")[0], f"{title}, of the learning and of the frozen draft") as (axes, drawn):
        for line, colour, dashes in zip(lines, SERIES, ("solid", "dashed"), strict=False):
            axes.plot(ends, line, color=colour, linestyle=dashes, linewidth=1.8, marker="o", markersize=3)
        axes.set(xlabel="requests", ylabel=label)
    return drawn.svg


def _ends(results: StreamResults) -> list[int]:
    """Return the number of each window's last request, from 1."""
    return [*accumulate(window.requests for window in results.windows)]
