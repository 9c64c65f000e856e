"""What the pages show of drafting: acceptance by position, accepted runs, and one output with its drafted tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from peftlab.reporting import facts
from peftlab.reporting.plots import bar_svg

KINDS = {"accepted": "drafted and accepted", "rejected": "drafted and rejected", "target": "added by the target"}


def acceptance_plots(by_position: Sequence[float | None], runs: Mapping[int, int]) -> list[dict[str, object]]:
    """Return the plots of a drafter's acceptance, as the templates take them; none where nothing was drafted.

    Args:
        by_position: accepted share of the first, second, ... drafted token of a step. runs: accepted tokens -> steps.
    """
    rates = {position: rate for position, rate in enumerate(by_position, start=1) if rate is not None}
    if not rates or not runs:
        return []
    spoken = ", ".join(f"{position}: {rate:.2f}" for position, rate in rates.items())
    counted = ", ".join(f"{length}: {count}" for length, count in runs.items())
    shares = bar_svg(
        rates,
        salt="positions",
        summary=f"Acceptance by position, {spoken}",
        labels=("position in the draft", "accepted share"),
        text="{:.2f}",
        top=1.05,  # room for the number over a bar of 1
    )
    lengths = bar_svg(
        runs,
        salt="runs",
        summary=f"Target steps by accepted tokens, {counted}",
        labels=("drafted tokens accepted in a step", "target steps"),
        text="{:,.0f}",
    )
    return [plot_of("Acceptance by position", shares), plot_of("Accepted runs", lengths)]


def plot_of(title: str, svg: str) -> dict[str, object]:
    """Return a drawing under its title, as the templates take it."""
    return {"title": title, "names": [], "baseline": None, "svg": svg}


def example_view(example: object) -> dict[str, object] | None:
    """Return one output with its drafted tokens as the templates take it; None where there is none.

    Args:
        example: ``decoding.trace.DraftedText`` as JSON has it.
    """
    if not isinstance(example, Mapping):
        return None
    pieces = [(str(piece["kind"]), str(piece["text"])) for piece in example["pieces"]]
    counts = Counter(kind for kind, _ in pieces)
    return {
        "prompt": example["prompt"],
        "pieces": [(kind, text.replace("\n", "↵\n")) for kind, text in pieces],
        "legend": [(kind, f"{counts[kind]:,} {name}") for kind, name in KINDS.items()],
    }


def run_plots(results: facts.Results) -> list[dict[str, object]]:
    """Return the plots of acceptance of a draft run; none of any other run."""
    after = _after(results)
    rates, runs = after.get("acceptance_by_position"), after.get("accepted_runs")
    if not isinstance(rates, list) or not isinstance(runs, Mapping):
        return []
    return acceptance_plots([facts.real(rate) for rate in rates], {int(n): int(count) for n, count in runs.items()})


def run_example(results: facts.Results) -> dict[str, object] | None:
    """Return a held-out output of a draft run with its drafted tokens; None of any other run."""
    return example_view(_after(results).get("example"))


def _after(results: facts.Results) -> Mapping[str, object]:
    decoding = results.get("decoding")
    after = decoding.get("after") if isinstance(decoding, Mapping) else None
    return after if isinstance(after, Mapping) else {}
