"""What a benchmark found: one drafter's figures, and the whole comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from peftlab.decoding.analysis.conditions import Conditions, uncertain
from peftlab.decoding.analysis.measured_gain import MeasuredGain
from peftlab.decoding.analysis.statistics import AcceptanceStatistics, Divergence, Interval, OverlapRates
from peftlab.decoding.lossy import LossyResult
from peftlab.files import Json, to_json
from peftlab.hardware import Cpu


@dataclass(frozen=True)
class PromptDivergence(Divergence):
    """Where a prompt's output differs from plain decoding's.

    Attributes:
        id: of the prompt.
    """

    id: str


@dataclass(frozen=True)
class TimeShares:
    """Where the time of decoding went, as shares of 1.

    Attributes:
        target: in the target's forward passes. draft: in the drafter and its model (of ``pearl``, at the same time).
        outside: in neither.
    """

    target: float
    draft: float
    outside: float

    def line(self) -> str:
        """Return it in a sentence."""
        shares = (("target", self.target), ("drafting", self.draft), ("outside both", self.outside))
        return "time: " + ", ".join(f"{name} {100 * share:.1f} %" for name, share in shares)


@dataclass(frozen=True)
class DrafterResult:
    """One drafter against plain decoding.

    Attributes:
        tokens_per_second, baseline_tokens_per_second: with the drafter, and plain; a batch takes the median of its
            repeats. ``..._interval``: 95 % bootstrap intervals, None for a single batch.
        speedup: their ratio.
        verdict: in words, see ``verdict``.
        statistics: of the target's steps.
        lossless: no output differs from plain decoding's; never with a lossy rule.
        lossless_by: "comparison" of greedy outputs, or "construction": that the scheme keeps the target's
            distribution is proved elsewhere. "lossy" with a lossy rule.
        divergences: the outputs that differ.
        time: where it went; None for another library's decoding.
        alpha: agreement of draft and target; None without a draft model, or where it was not measured.
        lossy: the rule that accepted drafted tokens in place of exact verification, and what it cost; None: exact.
    """

    tokens_per_second: float
    tokens_per_second_interval: Interval
    baseline_tokens_per_second: float
    baseline_tokens_per_second_interval: Interval
    speedup: float
    speedup_interval: Interval
    verdict: str
    statistics: AcceptanceStatistics
    lossless: bool
    lossless_by: str
    divergences: list[PromptDivergence]
    time: TimeShares | None
    alpha: OverlapRates | None = None
    lossy: LossyResult | None = None

    def as_json(self) -> dict[str, Json]:
        """Return the attributes, those of ``statistics`` among them."""
        values = to_json(vars(self))
        del values["statistics"]
        return values | to_json(self.statistics)


def verdict(speedup: float, interval: Interval, doubts: Sequence[str] = ()) -> str:
    """Return the gain in words: "slower" where it is slower, "no clear difference" where noise hides it.

    Args:
        interval: of ``speedup``; None for a single batch, from which nothing is concluded.
        doubts: why the times may be wrong; with any, the verdict is called uncertain.
    """
    if interval is None:
        return uncertain(doubts, f"{speedup:.2f}x plain decoding on a single batch, too few for an interval")
    low, high = interval
    numbers = f"{speedup:.2f}x, 95 % interval {low:.2f} to {high:.2f}"
    if low > 1:
        return uncertain(doubts, f"faster than plain decoding ({numbers})")
    if high < 1:
        return uncertain(doubts, f"slower than plain decoding ({numbers})")
    return uncertain(doubts, f"no clear difference from plain decoding ({numbers})")


@dataclass(frozen=True)
class CategoryResult:
    """One category of prompts.

    Attributes:
        prompts: how many.
        tau, acceptance: see ``AcceptanceStatistics``.
        tokens_per_second, speedup: None where a batch contains prompts of another category, too.
    """

    prompts: int
    tau: float | None
    acceptance: float | None
    tokens_per_second: float | None
    speedup: float | None


@dataclass(frozen=True)
class PromptResult:
    """One prompt's output.

    Attributes:
        id, category: of the prompt. prompt_tokens: its length.
        ids, baseline_ids: new tokens with the drafter, and plain. reason: why the first ended.
    """

    id: str
    category: str
    prompt_tokens: int
    ids: list[int]
    baseline_ids: list[int]
    reason: str


@dataclass(frozen=True)
class PoolResult:
    """Tokens per second of a pool that refills, against static batches of the same size on the same prompts.

    Attributes:
        static, pooled: drafter -> tokens per second, the median of the repeats; "plain" without one.
        equal: whether all four ways gave the same outputs; None when sampling or with a lossy rule.
    """

    static: dict[str, float]
    pooled: dict[str, float]
    equal: bool | None

    def line(self) -> str:
        """Return it in a sentence."""
        rates = ", ".join(
            f"{name} {rate:.1f} against {self.static[name]:.1f} tokens/s ({rate / self.static[name]:.2f}x)"
            for name, rate in self.pooled.items()
        )
        same = {True: "; the same outputs", False: "; the outputs differ", None: ""}[self.equal]
        return f"a pool that refills against static batches: {rates}{same}"


@dataclass(frozen=True)
class BenchmarkResult:
    """Plain decoding and drafters, timed on the same prompts.

    Attributes:
        drafter: the one that ``categories`` and ``prompts`` are about.
        drafters: name -> figures.
        overhead: share of the time outside the models; None where it was not measured.
        gain: of ``drafter`` by its parts; None for batches of several prompts, or where it was not measured.
        batch_size, temperature, max_new_tokens, repeats: the settings.
        kernel: how the target's step is computed. threads, device, cpu: where.
        conditions: of the machine.
        skipped: ids of the prompts that do not fit the context.
        pool: the first drafter in a pool that refills; None where it was not measured.
    """

    drafter: str
    drafters: dict[str, DrafterResult]
    overhead: float | None
    gain: MeasuredGain | None
    batch_size: int
    temperature: float
    max_new_tokens: int
    repeats: int
    kernel: str
    threads: int
    device: str
    cpu: Cpu
    conditions: Conditions
    categories: dict[str, CategoryResult]
    prompts: list[PromptResult]
    skipped: list[str] = field(default_factory=list)
    pool: PoolResult | None = None

    def as_json(self) -> dict[str, Json]:
        """Return the attributes, and beside them the figures of ``drafter``."""
        return self.drafters[self.drafter].as_json() | to_json(vars(self))
