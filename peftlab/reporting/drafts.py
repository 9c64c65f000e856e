"""Plans, benchmarks and streams of drafts for people: tables and sentences for the console, and offline HTML pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from peftlab.decoding.measurements import uncertain
from peftlab.decoding.planning import EnginePlan, MeasuredAdvice, MeasuredPlan, best_gamma_at
from peftlab.decoding.theory import GAIN_ALPHAS
from peftlab.files import Json, read_object, to_json, typed_value
from peftlab.progress import plural
from peftlab.reporting.pages import INK, SERIES, Plot, acceptance_plots, drafted_example, figure, render, require

if TYPE_CHECKING:
    from peftlab.decoding.benchmark import DraftedText
    from peftlab.decoding.cache import CacheMemory
    from peftlab.decoding.measurements import BenchmarkResult, DrafterResult, EngineResult, Interval
    from peftlab.decoding.planning import AcceptanceGain, BatchPlan, DraftPlan
    from peftlab.decoding.theory import Choice, KindAdvice, Theory
    from peftlab.drafting.live import StreamResults, WindowResult

PUBLISHED = Path(__file__).with_name("published_drafts.json")
_POSITIONS = "acceptance by position"


class TextTable(NamedTuple):
    """A table of texts: the first column has names, the others numbers."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


# Plans


def plan_tables(plan: DraftPlan | MeasuredAdvice | EnginePlan) -> list[TextTable]:
    """Return the tables of a plan."""
    steps = zip(plan.target_seconds, plan.target_range, plan.verification, strict=True)
    verification = [
        (str(k), f"{1e3 * seconds:.1f} ms", _milliseconds(ends), f"{cost:.2f}")
        for k, (seconds, ends, cost) in enumerate(steps, start=_first_count(plan))
    ]
    names, title = ["tokens", "median", "shortest to longest", "C(n)"], "one target step"
    if isinstance(plan, EnginePlan):
        names[0], names[-1], title = "drafted", "plain steps", f"one step in {plan.engine}, drafting included"
    tables = [TextTable(title, names, verification)]
    if isinstance(plan, MeasuredAdvice):
        return [*tables, _kinds_table(plan.kinds), *_batch_tables(plan.batches)]
    gammas = [(str(row.gamma), finite(row.break_even), finite(row.cap)) for row in plan.gammas]
    tables.append(TextTable("drafted tokens", ["gamma", "break-even alpha", "perfect draft"], gammas))
    lengths = [
        (f"{row.alpha:.2f}", str(row.gamma) if row.gamma else "do not draft", f"{row.gain:.2f}x")
        for row in plan.alphas
        if row.alpha >= 0.3
    ]
    header = ["alpha", "gamma", "gain"]
    if isinstance(plan, EnginePlan):
        return [*tables, TextTable("best draft length", header, lengths)]
    pearl = [_length(best) for best in plan.pearl if best.alpha >= 0.3]
    both = [(*row, best) for row, best in zip(lengths, pearl, strict=True)]
    return [
        *tables,
        TextTable("best draft length", [*header, "PEARL"], both),
        *(_batch_tables(plan.batches) if isinstance(plan, MeasuredPlan) else ()),
    ]


def memory_table(memory: Sequence[CacheMemory]) -> TextTable:
    """Return a table of the memory that the caches take."""
    rows = [
        (str(of.batch), f"{of.tokens:,}", _mebibytes(of.target), "-" if of.draft is None else _mebibytes(of.draft))
        for of in memory
    ]
    return TextTable("memory of the caches", ["sequences", "tokens", "target", "draft"], rows)


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _length(best: AcceptanceGain) -> str:
    return f"{best.gain:.2f}x ({best.gamma})" if best.gamma else "-"


def _batch_tables(batches: Sequence[BatchPlan]) -> list[TextTable]:
    """Return the cost curve and the best draft length of each batch size; nothing for a single one."""
    if len(batches) < 2:
        return []
    shown = [n for n in range(2, len(batches[0].verification) + 1) if n < 5 or n % 2]
    header = ["sequences", "C(1)", *(f"C({n})" for n in shown)]
    curves = [
        (str(of.batch), f"{1e3 * of.target_seconds[0]:.1f} ms", *(f"{of.verification[n - 1]:.2f}" for n in shown))
        for of in batches
    ]
    tables = [TextTable("one target step of a batch", header, curves)]
    drafted = [(of, of.c) for of in batches if of.c is not None]
    if drafted:
        lengths = [(str(of.batch), f"{c:.3f}", *map(_length, of.alphas)) for of, c in drafted]
        best = ["sequences", "c", *(f"alpha {each.alpha:.1f}" for each in drafted[0][0].alphas)]
        tables.append(TextTable("gain of the best draft length of a batch (gamma)", best, lengths))
    return tables


def _kinds_table(kinds: Sequence[KindAdvice]) -> TextTable:
    def cell(choice: Choice) -> str:
        return f"{choice.gain:.2f} {'t' if choice.tree else 'c'}{choice.nodes}" if choice.nodes else "-"

    rows = [
        (of.cost.kind, of.cost.size, f"{of.drafting:.2f}", finite(of.break_even), *map(cell, of.choices))
        for of in kinds
    ]
    header = ["kind", "size", "D", "pays from", *(f"S at {alpha:.1f}".replace("0.", ".") for alpha in GAIN_ALPHAS)]
    return TextTable("kinds of drafts: S, with a chain (c) or a tree (t) of n tokens", header, rows)


def plan_facts(plan: DraftPlan | MeasuredAdvice | EnginePlan, warnings: Sequence[str], alpha: float) -> list[str]:
    """Return a plan in sentences, the verdict last.

    Args:
        plan: the plan.
        warnings: what its conditions make doubtful.
        alpha: the acceptance that the user asked about.
    """
    warned = [f"warning: {w}" for w in warnings]
    if isinstance(plan, MeasuredAdvice):
        return [
            "D (of one token) and S are estimates: drafting is taken to cost what reading its weights does, and each "
            "first choice to be accepted with the same alpha; larger drafts have a higher one, later heads a lower one",
            *warned,
            *(f"{of.batch} sequences: {of.verdict}" for of in plan.batches[1:]),
            plan.verdict,
        ]
    best = best_gamma_at(plan, alpha)
    length = f"gamma {best.gamma}, {best.gain:.2f}x" if best.gamma else "do not draft"
    if isinstance(plan, EnginePlan):
        return [f"at an acceptance of {alpha:.2f}: {length}", plan.verdict]
    seconds, ends = 1e3 * plan.draft_seconds, _milliseconds(plan.draft_range)
    c = f"c = {plan.c:.3f}{_between(plan.c_interval, 3)} of a target step"
    return [
        f"a draft step takes {seconds:.1f} ms ({ends}), {c}",
        f"at an acceptance of {alpha:.2f}: {length}",
        "PEARL: draft and target at work at the same time, on a device each",
        *warned,
        plan.verdict,
    ]


def _first_count(plan: DraftPlan | MeasuredAdvice | EnginePlan) -> int:
    """Return how many tokens a plan's first step has: read by the target, or in an engine drafted."""
    return 0 if isinstance(plan, EnginePlan) else 1


def plan_plots(plan: DraftPlan | MeasuredAdvice | EnginePlan) -> list[Plot]:
    """Return the cost of verification over tokens, and the best gain over acceptance."""
    require("matplotlib")
    from matplotlib.ticker import MaxNLocator

    summary = "Cost of verification over tokens"
    tokens = [k for k, _ in enumerate(plan.verification, start=_first_count(plan))]
    label = "drafted tokens of a step" if isinstance(plan, EnginePlan) else "tokens in a target step"
    with figure("Cost of verification", salt="verification", summary=summary) as (axes, verification):
        axes.plot(tokens, plan.verification, color=SERIES[0], marker="o", markersize=3)
        axes.set(xlabel=label, ylabel="cost, one token = 1", ylim=(0, None))
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    if isinstance(plan, MeasuredAdvice):
        return [verification]
    summary = "Gain of the best draft length over acceptance"
    with figure("Best gain", salt="gains", summary=summary) as (axes, gains):
        axes.plot([row.alpha for row in plan.alphas], [row.gain for row in plan.alphas], color=SERIES[0])
        axes.axhline(1, linestyle="--", linewidth=1, color=INK)
        axes.set(xlabel="acceptance", ylabel="gain at the best gamma")
    return [verification, gains]


# Benchmarks


def bench_tables(result: BenchmarkResult, engine: EngineResult | None = None) -> list[TextTable]:
    """Return the tables of a benchmark.

    Args:
        result: in peftlab. engine: the same draft inside the engine that serves it, if it was measured there.
    """

    def row(name: str, of: DrafterResult) -> list[str]:
        found = of.statistics
        lossless = "yes" if of.lossless else f"{len(of.divergences)} differ"
        lossless = lossless if of.lossy is None else f"lossy: {of.lossy.rule}"
        speed = f"{of.speedup:.2f}x{_between(of.speedup_interval, 2)}"
        return [name, f"{of.tokens_per_second:.1f}", speed, finite(found.tau), finite(found.acceptance), lossless]

    first = result.drafters[result.drafter]
    baseline = ["plain", f"{first.baseline_tokens_per_second:.1f}", "1.00x", "1.00", "-", "-"]
    drafters = [baseline, *(row(name, of) for name, of in result.drafters.items())]
    header = ["drafter", "tokens/s", "speed", "tau", "accepted", "lossless"]
    here = first.statistics.acceptance_by_position
    places: list[Sequence[str]] = [(str(i), finite(alpha)) for i, alpha in enumerate(here, start=1)]
    positions = TextTable(_POSITIONS, ["position", "accepted"], places)
    if engine is not None:
        drafters += _engine_rows(engine)
        if engine.acceptance_by_position:
            both = zip_longest(here, engine.acceptance_by_position)
            places = [(str(i), finite(mine), finite(there)) for i, (mine, there) in enumerate(both, start=1)]
            positions = TextTable(_POSITIONS, ["position", "accepted", f"in {engine.name}"], places)
    tables = [TextTable("decoding", header, drafters), *([positions] if places else [])]
    if len(result.categories) > 1:
        rows = [
            (name, str(of.prompts), finite(of.tau), finite(of.acceptance), finite(of.speedup))
            for name, of in result.categories.items()
        ]
        tables.append(TextTable("categories", ["category", "prompts", "tau", "accepted", "speed"], rows))
    return tables


def _engine_rows(engine: EngineResult) -> list[list[str]]:
    """Return the rows of plain decoding and of the draft inside an engine."""
    rows = []
    if engine.baseline_tokens_per_second is not None:
        rows.append([f"plain in {engine.name}", f"{engine.baseline_tokens_per_second:.1f}", "1.00x", "1.00", "-", "-"])
    speed = "-" if engine.speedup is None else f"{engine.speedup:.2f}x{_between(engine.speedup_interval, 2)}"
    lossless = {True: "yes", False: "no", None: "-"}[engine.lossless]
    rates = [finite(engine.tau), finite(engine.acceptance)]
    return [*rows, [engine.title, f"{engine.tokens_per_second:.1f}", speed, *rates, lossless]]


def engine_facts(engine: EngineResult, own: DrafterResult) -> list[str]:
    """Return a draft's figures inside an engine in sentences.

    Args:
        engine: there. own: in peftlab.
    """
    name = f"{engine.name} ({engine.version})"
    here = own.statistics.accepted / own.statistics.drafted if own.statistics.drafted else None
    facts = [
        f"{name}: {engine.accepted} of {engine.drafted} drafted tokens accepted, {finite(engine.accepted_share)}"
        f"{_between(engine.accepted_share_interval, 3)}; in peftlab {finite(here)}"
        f"{_between(own.accepted_share_interval, 3)}"
    ]
    near = sum(divergence.near_tie for divergence in engine.divergences)
    if engine.divergences:
        margins = ", ".join(f"{of.id} at token {of.position} (margin {of.margin:.3g})" for of in engine.divergences[:8])
        more = len(engine.divergences) - 8
        facts.append(
            f"{name}: {len(engine.divergences)} outputs differ from peftlab's plain ones, {near} of them at a near "
            f"tie: {margins}{f' and {more} more' if more > 0 else ''}"
        )
    else:
        facts.append(f"{name}: all outputs are equal to peftlab's plain ones")
    return facts if engine.verdict is None else [*facts, f"{engine.title}: {engine.verdict}"]


def bench_facts(result: BenchmarkResult, warnings: Sequence[str], engine: EngineResult | None = None) -> list[str]:
    """Return a benchmark in sentences, the verdict last.

    Args:
        result: the benchmark.
        warnings: what its conditions make doubtful.
        engine: the same draft inside the engine that serves it, if it was measured there.
    """
    facts = [f"warning: {w}" for w in warnings]
    found = result.drafters[result.drafter]
    facts += [
        f"{name}: alpha as overlap {of.alpha.overlap:.3f}, as equal argmax {of.alpha.argmax:.3f}, "
        f"as p(argmax q) {of.alpha.p_of_argmax:.3f}"
        for name, of in result.drafters.items()
        if of.alpha is not None
    ]
    if found.statistics.tau is not None:
        facts.append(
            f"{result.drafter}: {found.statistics.tau:.2f} tokens per target step, "
            f"{found.statistics.tau_without_bonus:.2f} without the one that the target adds"
        )
    facts += [] if found.time is None else [f"{result.drafter}: {found.time.line()}"]
    if result.gain is not None:
        facts.append(f"{result.drafter}: {uncertain(result.conditions.doubts(), result.gain.line())}")
    facts += [] if result.pool is None else [result.pool.line()]
    if result.overhead is not None:
        facts.append(f"time outside the models: {100 * result.overhead:.1f} %")
    spread = result.conditions.spread
    if spread is not None:
        facts.append(f"repeats of plain decoding on the same prompts differ by {100 * spread:.0f} %")
    facts += [f"{name}: {of.lossy.line()}" for name, of in result.drafters.items() if of.lossy is not None]
    near = sum(divergence.near_tie for divergence in found.divergences)
    if found.divergences:
        differ = "1 output differs" if len(found.divergences) == 1 else f"{len(found.divergences)} outputs differ"
        facts.append(f"{differ} from plain decoding, {near} of them at a near tie")
    if result.skipped:
        left_out = plural(len(result.skipped), "prompt")
        facts.append(f"{left_out} left out: no room for an output in the model's context")
    facts += [] if engine is None else engine_facts(engine, found)
    return [*facts, f"{result.drafter}: {found.verdict}"]


def bench_page(
    result: BenchmarkResult,
    warnings: Sequence[str],
    about: Sequence[str],
    example: DraftedText | None,
    engine: EngineResult | None = None,
) -> str:
    """Return the page of a benchmark.

    Args:
        result: the benchmark.
        warnings: for the list of sentences.
        about: what was measured, in lines below the title.
        example: an output with its drafted tokens.
        engine: the same draft inside the engine that serves it, if it was measured there.
    """
    require("matplotlib")
    first = result.drafters[result.drafter]
    rates = {"plain": first.baseline_tokens_per_second}
    rates |= {name: of.tokens_per_second for name, of in result.drafters.items()}
    if engine is not None and engine.baseline_tokens_per_second is not None:
        rates[f"plain in {engine.name}"] = engine.baseline_tokens_per_second
    rates |= {} if engine is None else {engine.title: engine.tokens_per_second}
    speed_bars = [
        {
            "name": name,
            "value": f"{rate:.1f} tokens/s",
            "width": f"{100 * rate / max(rates.values()):.2f}",
            "kind": "score" if name == result.drafter else "baseline",
        }
        for name, rate in rates.items()
    ]
    category_bars = [
        {"name": name, "value": f"{of.acceptance:.2f}", "width": f"{100 * of.acceptance:.2f}"}
        for name, of in result.categories.items()
        if of.acceptance is not None and len(result.categories) > 1
    ]
    context = {
        "title": "Draft benchmark",
        "about": about,
        "notes": bench_facts(result, warnings, engine)[:-1],
        "tables": [
            table for table in bench_tables(result, engine) if table.title != _POSITIONS or len(table.header) > 2
        ],
        "plots": acceptance_plots(
            first.statistics.acceptance_by_position,
            {int(length): steps for length, steps in first.statistics.accepted_runs.items()},
        ),
        "speed": {
            "value": f"{first.speedup:.2f}\N{MULTIPLICATION SIGN}",
            "verdict": first.verdict,
            "bars": speed_bars,
        },
        "categories": category_bars,
        "example": None if example is None else drafted_example(to_json(example)),
        "last": [_published_table(result)],
    }
    return render("draft.html.j2", context)


def _published_table(result: BenchmarkResult) -> TextTable:
    """Return the published figures with, of each, the tau that the same kind of drafter has here."""
    mine = {name: of.statistics.tau for name, of in result.drafters.items()}
    rows = [
        (of.system, of.benchmark, f"{of.tau:.2f}", of.like, finite(mine.get(of.like)), of.source)
        for of in published_speeds()
    ]
    header = ["system", "prompts", "tau there", "drafter", "tau here", "source"]
    return TextTable("published, of other targets on other people's machines", header, rows)


# Streams of requests


def window_line(number: int, first: int, window: WindowResult) -> str:
    """Return the acceptance of one window of requests as a line.

    Args:
        number: the window's number, from 1.
        first: number of its first request.
        window: its results.
    """
    learnt = f"learnt from {window.learnt_tokens} tokens" if window.learnt_tokens else "no update"
    return (
        f"window {number}, requests {first} to {first + window.requests - 1}: acceptance "
        f"{finite(window.live.acceptance)}, {finite(window.frozen.acceptance)} with the frozen draft; "
        f"{window.rejected} tokens rejected, {learnt}"
    )


def stream_tables(results: StreamResults) -> list[TextTable]:
    """Return the tables of a stream of requests."""
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
        for last, window in zip(_last_requests(results), results.windows, strict=True)
    ]
    header = ["requests", "alpha", "frozen", "tau", "frozen", "rejected", "decoding", "update"]
    return [TextTable("acceptance over the stream, with that of the frozen draft", header, rows)]


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
    """Return the page of a stream, with the acceptance over the requests."""
    require("matplotlib")
    ends = _last_requests(results)
    plots = []
    for title, name, label in (
        ("Acceptance over the stream", "acceptance", "acceptance of a window"),
        ("Tokens per target step", "tau", "tokens per target step"),
    ):
        summary = f"{title}, of the learning and of the frozen draft"
        curves = ([window.live for window in results.windows], [window.frozen for window in results.windows])
        with figure(title, salt=label.partition(" ")[0], summary=summary) as (axes, plot):
            for rates, colour, dashes in zip(curves, SERIES, ("solid", "dashed"), strict=False):
                values = [float("nan") if (value := getattr(each, name)) is None else float(value) for each in rates]
                axes.plot(ends, values, color=colour, linestyle=dashes, linewidth=1.8, marker="o", markersize=3)
            axes.set(xlabel="requests", ylabel=label)
        plot.names = ("learning", "frozen")
        plots.append(plot)
    return page("Updates over a stream", stream_tables(results), stream_facts(results), plots)


def _last_requests(results: StreamResults) -> list[int]:
    """Return the number of each window's last request, from 1."""
    return [*accumulate(window.requests for window in results.windows)]


# Theory


def theory_tables(theory: Theory) -> list[TextTable]:
    """Return the tables of ``draft plan --theory``."""
    gammas = list(dict.fromkeys(row.gamma for row in theory.rows))
    alphas = list(dict.fromkeys(row.alpha for row in theory.rows))
    tokens = {(row.alpha, row.gamma): f"{row.tokens:.2f}" for row in theory.rows}
    expected = [(f"{alpha:.1f}", *(tokens[alpha, gamma] for gamma in gammas)) for alpha in alphas]
    published = published_theory()
    speeds = [
        (f"{row.alpha:.1f}", str(row.gamma), f"{row.operations:.2f}x", *(f"{gain:.2f}x" for gain in row.speedup))
        for row in theory.rows
        if (row.alpha, row.gamma) in published.cells
    ]
    printed = [
        (f"{alpha:.1f}", str(gamma), f"{operations:.2f}x", f"{speed:.2f}x")
        for (alpha, gamma), (operations, speed) in published.cells.items()
    ]
    bounds = [
        (f"{bound.nats:g}", f"{bound.floor:.3f}", f"{bound.low:.3f} to {bound.high:.3f}") for bound in theory.bounds
    ]
    return [
        TextTable("expected tokens per target step", ["alpha", *(f"gamma {gamma}" for gamma in gammas)], expected),
        TextTable(
            "arithmetic and speed", ["alpha", "gamma", "operations", *(f"c = {c:g}" for c in theory.costs)], speeds
        ),
        TextTable(f"as published: {published.source}", ["alpha", "gamma", "operations", "c = 0"], printed),
        TextTable("acceptance by divergence per token", ["nats", "KL: at least", "JSD: between"], bounds),
    ]


def theory_facts() -> list[str]:
    """Return sentences that explain the tables."""
    return [
        "c is the time of a draft step by that of a target step. Verifying several tokens is taken to cost what one "
        "does, and each token to be accepted with the same alpha; draft plan --target measures c and verification",
        "KL is the divergence of draft and target in either direction, JSD the Jensen-Shannon divergence, of one token "
        "or on average; the acceptance is that of sampling from the two",
    ]


# Published figures


@dataclass(frozen=True)
class PublishedSpeed:
    """A speed that a paper measured, with targets and machines of its own.

    Attributes:
        system: that drafts.
        benchmark: its prompts.
        tau: tokens per target step.
        source: the paper.
        like: the drafter of ``draft bench`` that is of the same kind.
    """

    system: str
    benchmark: str
    tau: float
    source: str
    like: str


@dataclass(frozen=True)
class PublishedTheory:
    """The table of formulas of a paper, as printed there.

    Attributes:
        source: the paper.
        cells: (alpha, gamma) -> (operations, speed-up at c = 0).
    """

    source: str
    cells: dict[tuple[float, int], tuple[float, float]]


def published_speeds() -> list[PublishedSpeed]:
    """Return the measured figures."""
    rows: list[dict[str, Json]] = typed_value(read_object(PUBLISHED), "measured", list, PUBLISHED)
    texts = ("system", "benchmark", "source", "like")
    return [
        PublishedSpeed(
            tau=typed_value(row, "tau", float, PUBLISHED),
            **{name: typed_value(row, name, str, PUBLISHED) for name in texts},
        )
        for row in rows
    ]


def published_theory() -> PublishedTheory:
    """Return the table of formulas."""
    table = typed_value(read_object(PUBLISHED), "theory", dict, PUBLISHED)
    rows: list[tuple[float, int, float, float]] = typed_value(table, "rows", list, PUBLISHED)
    cells = {(alpha, gamma): (operations, speed) for alpha, gamma, operations, speed in rows}
    return PublishedTheory(typed_value(table, "source", str, PUBLISHED), cells)


# On the console and as a page


def show(tables: Sequence[TextTable], facts: Sequence[str]) -> None:
    """Print tables and sentences to the terminal.

    Args:
        tables: in the order shown.
        facts: sentences, shown below the tables.
    """
    console = Console()
    for title, header, rows in tables:
        table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for i, name in enumerate(header):
            table.add_column(Text(name), justify="left" if i == 0 else "right")
        for row in rows:
            table.add_row(*map(Text, row))  # names of files and prompts are no markup
        console.print(table)
    for fact in facts:
        console.print(fact, markup=False, highlight=False, soft_wrap=True)


def page(title: str, tables: Sequence[TextTable], facts: Sequence[str], plots: Sequence[Plot]) -> str:
    """Return one offline HTML page.

    Args:
        title: the heading.
        tables: in the order shown.
        facts: sentences; the last, the verdict, comes below the heading.
        plots: in the order shown.
    """
    context = {"title": title, "about": facts[-1:], "notes": facts[:-1], "tables": tables, "plots": plots}
    return render("draft.html.j2", context | {"speed": None, "categories": [], "example": None, "last": []})


def finite(value: float | None) -> str:
    """Return a gain or an acceptance for a table; a dash where there is none."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.2f}"


def _between(interval: Interval, digits: int) -> str:
    return f" ({interval[0]:.{digits}f} to {interval[1]:.{digits}f})" if interval else " (no interval)"


def _milliseconds(ends: tuple[float, float]) -> str:
    return f"{1e3 * ends[0]:.1f} to {1e3 * ends[1]:.1f} ms"
