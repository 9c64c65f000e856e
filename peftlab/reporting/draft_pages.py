"""Results of ``plan`` and ``bench`` for people: console tables, and one offline HTML page each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from peftlab.decoding.advice import GAIN_ALPHAS, Choice, KindAdvice
from peftlab.decoding.engine import CacheMemory
from peftlab.decoding.planning import (
    AcceptanceGain,
    BatchPlan,
    DraftPlan,
    MeasuredAdvice,
    MeasuredPlan,
    best_gamma_at,
    finite,
)
from peftlab.decoding.statistics import BenchmarkResult, DrafterResult, Interval
from peftlab.files import to_json
from peftlab.reporting.draft_views import acceptance_plots, example_view, plot_of
from peftlab.reporting.html import render, require
from peftlab.reporting.plots import INK, SERIES, figure
from peftlab.reporting.tables.published_drafts import published_speeds

if TYPE_CHECKING:
    from peftlab.decoding.benchmark import DraftedText

Rows = Sequence[Sequence[str]]
_POSITIONS = "acceptance by position"


def plan_tables(plan: DraftPlan | MeasuredAdvice) -> list[tuple[str, list[str], Rows]]:
    """Return the tables of a plan: title, header, rows."""
    steps = zip(plan.target_seconds, plan.target_range, strict=True)
    verification = [
        (str(k), f"{1e3 * seconds:.1f} ms", _milliseconds(ends), f"{seconds / plan.target_seconds[0]:.2f}")
        for k, (seconds, ends) in enumerate(steps, start=1)
    ]
    tables: list[tuple[str, list[str], Rows]] = [
        ("one target step", ["tokens", "median", "shortest to longest", "C(n)"], verification)
    ]
    if isinstance(plan, MeasuredAdvice):
        return [*tables, _kinds_table(plan.kinds), *_batch_tables(plan.batches)]
    gammas = [(str(row.gamma), finite(row.break_even), finite(row.cap)) for row in plan.gammas]
    alphas = [
        (f"{row.alpha:.2f}", str(row.gamma) if row.gamma else "do not draft", f"{row.gain:.2f}x", _length(pearl))
        for row, pearl in zip(plan.alphas, plan.pearl, strict=True)
        if row.alpha >= 0.3
    ]
    return [
        *tables,
        ("drafted tokens", ["gamma", "break-even alpha", "perfect draft"], gammas),
        ("best draft length", ["alpha", "gamma", "gain", "PEARL"], alphas),
        *(_batch_tables(plan.batches) if isinstance(plan, MeasuredPlan) else ()),
    ]


def memory_table(memory: Sequence[CacheMemory]) -> tuple[str, list[str], Rows]:
    """Return what the caches take in memory."""
    rows = [
        (str(of.batch), f"{of.tokens:,}", _mebibytes(of.target), "-" if of.draft is None else _mebibytes(of.draft))
        for of in memory
    ]
    return "memory of the caches", ["sequences", "tokens", "target", "draft"], rows


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _length(best: AcceptanceGain) -> str:
    return f"{best.gain:.2f}x ({best.gamma})" if best.gamma else "-"


def _batch_tables(batches: Sequence[BatchPlan]) -> list[tuple[str, list[str], Rows]]:
    """Return the cost curve and the best draft length of each batch size; nothing for a single one."""
    if len(batches) < 2:
        return []
    shown = [n for n in range(2, len(batches[0].verification) + 1) if n < 5 or n % 2]
    header = ["sequences", "C(1)", *(f"C({n})" for n in shown)]
    curves = [
        (str(of.batch), f"{1e3 * of.target_seconds[0]:.1f} ms", *(f"{of.verification[n - 1]:.2f}" for n in shown))
        for of in batches
    ]
    tables: list[tuple[str, list[str], Rows]] = [("one target step of a batch", header, curves)]
    drafted = [(of, of.c) for of in batches if of.c is not None]
    if drafted:
        lengths = [(str(of.batch), f"{c:.3f}", *map(_length, of.alphas)) for of, c in drafted]
        best = ["sequences", "c", *(f"alpha {each.alpha:.1f}" for each in drafted[0][0].alphas)]
        tables.append(("gain of the best draft length of a batch (gamma)", best, lengths))
    return tables


def _kinds_table(kinds: Sequence[KindAdvice]) -> tuple[str, list[str], Rows]:
    def cell(choice: Choice) -> str:
        return f"{choice.gain:.2f} {'t' if choice.tree else 'c'}{choice.nodes}" if choice.nodes else "-"

    rows = [
        (of.cost.kind, of.cost.size, f"{of.drafting:.2f}", finite(of.break_even), *map(cell, of.choices))
        for of in kinds
    ]
    header = ["kind", "size", "D", "pays from", *(f"S at {alpha:.1f}".replace("0.", ".") for alpha in GAIN_ALPHAS)]
    return ("kinds of drafts: S, with a chain (c) or a tree (t) of n tokens", header, rows)


def plan_facts(plan: DraftPlan | MeasuredAdvice, warnings: Sequence[str], alpha: float) -> list[str]:
    """Return a plan in sentences, the verdict last.

    Args:
        alpha: the acceptance asked about.
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
    seconds, ends = 1e3 * plan.draft_seconds, _milliseconds(plan.draft_range)
    c = f"c = {plan.c:.3f}{_between(plan.c_interval, 3)} of a target step"
    best = best_gamma_at(plan, alpha)
    length = f"gamma {best.gamma}, {best.gain:.2f}x" if best.gamma else "do not draft"
    return [
        f"a draft step takes {seconds:.1f} ms ({ends}), {c}",
        f"at an acceptance of {alpha:.2f}: {length}",
        "PEARL: draft and target at work at the same time, on a device each",
        *warned,
        plan.verdict,
    ]


def bench_tables(result: BenchmarkResult) -> list[tuple[str, list[str], Rows]]:
    """Return the tables of a benchmark: title, header, rows."""

    def row(name: str, of: DrafterResult) -> list[str]:
        found = of.statistics
        lossless = "yes" if of.lossless else f"{len(of.divergences)} differ"
        lossless = lossless if of.lossy is None else f"lossy: {of.lossy.rule}"
        speed = f"{of.speedup:.2f}x{_between(of.speedup_interval, 2)}"
        return [name, f"{of.tokens_per_second:.1f}", speed, finite(found.tau), finite(found.acceptance), lossless]

    first = result.drafters[result.drafter]
    baseline = ["plain", f"{first.baseline_tokens_per_second:.1f}", "1.00x", "1.00", "-", "-"]
    drafters = [baseline, *(row(name, of) for name, of in result.drafters.items())]
    header = ["drafter", "tokens/s", "speed", "tau", "alpha", "lossless"]
    positions = [(str(i), finite(alpha)) for i, alpha in enumerate(first.statistics.acceptance_by_position, start=1)]
    tables: list[tuple[str, list[str], Rows]] = [
        ("decoding", header, drafters),
        (_POSITIONS, ["position", "alpha"], positions),
    ]
    if len(result.categories) > 1:
        rows = [
            (name, str(of.prompts), finite(of.tau), finite(of.acceptance), finite(of.speedup))
            for name, of in result.categories.items()
        ]
        tables.append(("categories", ["category", "prompts", "tau", "alpha", "speed"], rows))
    return tables


def _between(interval: Interval, digits: int) -> str:
    return f" ({interval[0]:.{digits}f} to {interval[1]:.{digits}f})" if interval else " (no interval)"


def _milliseconds(ends: tuple[float, float]) -> str:
    return f"{1e3 * ends[0]:.1f} to {1e3 * ends[1]:.1f} ms"


def bench_facts(result: BenchmarkResult, warnings: Sequence[str]) -> list[str]:
    """Return a benchmark in sentences, the verdict last."""
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
    facts += [f"{result.drafter}: {part.line()}" for part in (found.time, result.gain) if part is not None]
    facts += [] if result.pool is None else [result.pool.line()]
    if result.overhead is not None:
        facts.append(f"time outside the models: {100 * result.overhead:.1f} %")
    spread = result.conditions.spread
    if spread is not None:
        facts.append(f"repeats of plain decoding on the same prompts differ by {100 * spread:.0f} %")
    facts += [f"{name}: {of.lossy.line()}" for name, of in result.drafters.items() if of.lossy is not None]
    near = sum(divergence.near_tie for divergence in found.divergences)
    if found.divergences:
        facts.append(f"{len(found.divergences)} outputs differ from plain decoding, {near} of them at a near tie")
    if result.skipped:
        facts.append(f"{len(result.skipped)} prompts left out: longer than the model's context")
    return [*facts, f"{result.drafter}: {found.verdict}"]


def show(tables: list[tuple[str, list[str], Rows]], facts: list[str]) -> None:
    """Print tables and sentences to the terminal."""
    console = Console()
    for title, header, rows in tables:
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for i, name in enumerate(header):
            table.add_column(name, justify="left" if i == 0 else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for fact in facts:
        console.print(fact, highlight=False, soft_wrap=True)


def page(
    title: str,
    tables: list[tuple[str, list[str], Rows]],
    facts: list[str],
    plots: Sequence[Mapping[str, object]],
) -> str:
    """Return one HTML page that needs nothing from outside; the last of ``facts`` is the verdict."""
    return _page(title, facts[-1:], facts[:-1], tables, plots)


def _page(
    title: str,
    about: Sequence[str],
    notes: Sequence[str],
    tables: list[tuple[str, list[str], Rows]],
    plots: Sequence[Mapping[str, object]],
    **parts: object,
) -> str:
    """Return a page with the ``parts`` that only the benchmark's has."""
    whole = {"title": title, "about": about, "notes": notes, "tables": tables, "plots": plots}
    return render("draft.html.j2", whole | {"speed": None, "categories": [], "example": None, "last": []} | parts)


def bench_page(
    result: BenchmarkResult, warnings: Sequence[str], about: Sequence[str], example: DraftedText | None
) -> str:
    """Return the page of a benchmark.

    Args:
        about: what was measured, in lines below the title. example: an output with its drafted tokens.
    """
    require("matplotlib")
    facts = bench_facts(result, warnings)
    found = result.drafters[result.drafter].statistics
    runs = {int(length): steps for length, steps in found.accepted_runs.items()}
    return _page(
        "Draft benchmark",
        about,
        facts[:-1],
        [table for table in bench_tables(result) if table[0] != _POSITIONS],
        acceptance_plots(found.acceptance_by_position, runs),
        speed=_speed(result),
        categories=_categories(result),
        example=None if example is None else example_view(to_json(example)),
        last=[_published(result)],
    )


def _speed(result: BenchmarkResult) -> dict[str, object]:
    """The headline: how much faster than plain decoding, above bars of tokens per second."""
    first = result.drafters[result.drafter]
    rates = {"plain": first.baseline_tokens_per_second}
    rates |= {name: of.tokens_per_second for name, of in result.drafters.items()}
    bars = [
        {
            "name": name,
            "value": f"{rate:.1f} tokens/s",
            "width": f"{100 * rate / max(rates.values()):.2f}",
            "kind": "score" if name == result.drafter else "baseline",
        }
        for name, rate in rates.items()
    ]
    return {"value": f"{first.speedup:.2f}\N{MULTIPLICATION SIGN}", "verdict": first.verdict, "bars": bars}


def _published(result: BenchmarkResult) -> tuple[str, list[str], Rows]:
    """The published figures, and tau of the drafter of the same kind."""
    mine = {name: of.statistics.tau for name, of in result.drafters.items()}
    rows = [
        (
            of.system,
            of.benchmark,
            f"{of.tau:.2f}",
            of.like,
            finite(mine.get(of.like)),
            of.source,
        )
        for of in published_speeds()
    ]
    header = ["system", "prompts", "tau there", "drafter", "tau here", "source"]
    return ("published, of other targets on other people's machines", header, rows)


def _categories(result: BenchmarkResult) -> list[dict[str, str]]:
    """The acceptance of each category as a bar; none where all prompts are of one."""
    if len(result.categories) < 2:
        return []
    return [
        {"name": name, "value": f"{of.acceptance:.2f}", "width": f"{100 * of.acceptance:.2f}"}
        for name, of in result.categories.items()
        if of.acceptance is not None
    ]


def plan_plots(plan: DraftPlan | MeasuredAdvice) -> list[dict[str, object]]:
    """Return the cost of verification over tokens, and the best gain over acceptance."""
    require("matplotlib")
    from matplotlib.ticker import MaxNLocator

    with figure("verification", "Cost of verification over tokens") as (axes, verification):
        axes.plot(range(1, len(plan.verification) + 1), plan.verification, color=SERIES[0], marker="o", markersize=3)
        axes.set(xlabel="tokens in a target step", ylabel="cost, one token = 1", ylim=(0, None))
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    plots = [plot_of("Cost of verification", verification.svg)]
    if isinstance(plan, MeasuredAdvice):
        return plots
    with figure("gains", "Gain of the best draft length over acceptance") as (axes, gains):
        axes.plot([row.alpha for row in plan.alphas], [row.gain for row in plan.alphas], color=SERIES[0])
        axes.axhline(1, linestyle="--", linewidth=1, color=INK)
        axes.set(xlabel="acceptance", ylabel="gain at the best gamma")
    return [*plots, plot_of("Best gain", gains.svg)]
