"""Statistics of decoding: acceptance, block efficiency, intervals, divergences, and the results of benchmarks."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy
import torch
from numpy.typing import NDArray

from peftlab.decoding.cache import Block, Engine, empty_cache
from peftlab.decoding.decode import Generation
from peftlab.decoding.drafter import Row, Verified
from peftlab.decoding.lossy import LossyResult
from peftlab.decoding.sampling import Sampling
from peftlab.decoding.theory import acceptance_rate
from peftlab.decoding.timing import Conditions, uncertain
from peftlab.files import Json, to_json
from peftlab.hardware import Cpu

Interval = tuple[float, float] | None
"""Ends of a 95 % interval; None where there are too few data."""


@dataclass(frozen=True)
class AcceptanceStatistics:
    """The target's steps, pooled over all of them.

    Attributes:
        tau: tokens per target step; None without a step.
        tau_without_bonus: the drafted ones among them, without the one that the target itself adds.
        acceptance: accepted share of the drafted tokens that were tried, which are those after which all earlier ones
            were accepted; None where none was tried.
        acceptance_by_position: the same for the first, second, ... of a step.
        drafted, accepted: tokens.
        steps: target steps, one per sequence and forward pass.
        histogram: tokens per step -> steps.
        accepted_runs: drafted tokens accepted one after the other -> steps.
    """

    tau: float | None
    tau_without_bonus: float | None
    acceptance: float | None
    acceptance_by_position: list[float | None]
    drafted: int
    accepted: int
    steps: int
    histogram: dict[str, int]
    accepted_runs: dict[str, int]


def acceptance_statistics(generations: Iterable[Generation]) -> AcceptanceStatistics:
    """Return the statistics of all target steps of these outputs."""
    steps = [step for generation in generations for step in generation.steps]
    emitted, accepted = sum(s.emitted for s in steps), sum(s.accepted for s in steps)
    longest = max((s.drafted for s in steps), default=0)
    tried = [sum(s.drafted > i and s.accepted >= i for s in steps) for i in range(longest)]
    passed = [sum(s.accepted > i for s in steps) for i in range(longest)]
    return AcceptanceStatistics(
        tau=emitted / len(steps) if steps else None,
        tau_without_bonus=accepted / len(steps) if steps else None,
        acceptance=accepted / sum(tried) if sum(tried) else None,
        acceptance_by_position=[a / t if t else None for a, t in zip(passed, tried, strict=True)],
        drafted=sum(s.drafted for s in steps),
        accepted=accepted,
        steps=len(steps),
        histogram=_histogram(s.emitted for s in steps),
        accepted_runs=_histogram(s.accepted for s in steps),
    )


def _histogram(lengths: Iterable[int]) -> dict[str, int]:
    return {str(n): count for n, count in sorted(Counter(lengths).items())}


@dataclass(frozen=True)
class OverlapRates:
    """Three readings of α at the same positions, averaged.

    Attributes:
        overlap: Σ min(p, q), the acceptance of a sampled draft.
        argmax: share of equal argmax, the acceptance of greedy decoding.
        p_of_argmax: p(argmax q), the acceptance of a greedy draft by a sampled target.
    """

    overlap: float
    argmax: float
    p_of_argmax: float


@dataclass
class OverlapMeter:
    """A meter of the agreement of draft model and target, at each position whose drafted prefix was accepted.

    An ``observe`` for ``decode.decode``. At temperature 0 it compares at temperature 1.
    """

    sampling: Sampling
    positions: int = field(default=0, init=False)
    _overlap: float = field(default=0.0, init=False)
    _argmax: float = field(default=0.0, init=False)
    _p_of_argmax: float = field(default=0.0, init=False)

    def __call__(self, rows: list[Row], verified: Verified) -> None:
        logits = verified.draft.logits
        if logits is None or verified.draft.parents is not None:
            return
        settings = Sampling(temperature=1.0) if self.sampling.greedy else self.sampling
        for i, path in enumerate(verified.paths):
            drafted = int((verified.draft.tokens[i] >= 0).sum())
            n = min(len(path) + 1, drafted)
            p = settings.probabilities(verified.output.logits[i, :n])
            q = settings.probabilities(logits[i, :n])
            guess = q.argmax(-1)
            self._overlap += float(acceptance_rate(p, q).sum())
            self._argmax += float((guess == p.argmax(-1)).sum())
            self._p_of_argmax += float(p.gather(-1, guess[:, None]).sum())
            self.positions += n

    def result(self) -> OverlapRates | None:
        """Return the rates; None without a draft model."""
        if not self.positions:
            return None
        n = self.positions
        return OverlapRates(self._overlap / n, self._argmax / n, self._p_of_argmax / n)


@dataclass(frozen=True)
class Timings:
    """The tokens and times of one way of decoding.

    Attributes:
        tokens: of each batch. seconds: of each batch in each repeat.
    """

    tokens: list[int]
    seconds: list[list[float]]

    def rate(self) -> float:
        """Return tokens per second; a batch takes the median of its repeats."""
        return sum(self.tokens) / sum(map(statistics.median, self.seconds))


@dataclass(frozen=True)
class RateIntervals:
    """95 % bootstrap intervals of two rates in tokens per second, and of their ratio; None for a single batch."""

    rate: Interval
    baseline: Interval
    speedup: Interval


def rate_intervals(one: Timings, baseline: Timings, *, draws: int = 1000) -> RateIntervals:
    """Return 95 % bootstrap intervals of both rates and of their ratio.

    Batches are drawn with replacement, and so are the repeats of each batch drawn, which ``scipy.stats.bootstrap``
    cannot do: it has one level of resampling. Both ways of decoding are drawn alike: they took turns, so that a slow
    moment of the machine delayed both.

    Args:
        one, baseline: times of the same batches in the same repeats.
        draws: resamples; the same every time.

    Returns:
        None for each of the three where there is but one batch: it says nothing about how batches differ.
    """
    count, repeats = len(one.tokens), len(one.seconds[0])
    if count < 2:
        return RateIntervals(None, None, None)
    rng = numpy.random.default_rng(0)
    batch = rng.integers(count, size=(draws, count))
    repeat = rng.integers(repeats, size=(draws, count, repeats))

    def drawn(of: Timings) -> NDArray[numpy.float64]:
        seconds = numpy.median(numpy.asarray(of.seconds)[batch[..., None], repeat], -1)  # [draws, count]
        return numpy.asarray(of.tokens)[batch].sum(-1) / seconds.sum(-1)

    rate, plain = drawn(one), drawn(baseline)
    return RateIntervals(percentiles(rate), percentiles(plain), percentiles(rate / plain))


def percentiles(values: NDArray[numpy.float64]) -> tuple[float, float]:
    """Return the ends of the middle 95 % of resampled values."""
    low, high = numpy.quantile(values, [0.025, 0.975])
    return float(low), float(high)


@dataclass(frozen=True)
class Divergence:
    """The first difference of two greedy outputs of one model.

    Attributes:
        position: index of the first different output token.
        margin: top-1 minus top-2 logit of the target there.
        near_tie: whether that is within rounding, so that the order of a sum may decide.
    """

    position: int
    margin: float
    near_tie: bool


def divergence(engine: Engine, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]) -> Divergence | None:
    """Return the first difference of two greedy outputs, and whether it is a near tie; None if they are equal.

    A near tie is a margin of at most 8 units in the last place of the largest logit, in the logits' dtype.

    Args:
        engine: the target. prompt: token ids. plain, other: the outputs.
    """
    if list(plain) == list(other):
        return None
    pairs = zip(plain, other, strict=False)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(other)))
    ids = [*(prompt if engine.encoder is None else engine.encoder.start), *plain[:position]]
    cache = empty_cache(engine, len(ids), [prompt])
    tokens = torch.tensor([ids], device=engine.device)
    logits = engine.forward(cache, tokens, Block((0,), len(ids)), [len(ids) - 1]).logits[0, 0]
    first, second = logits.float().topk(2).values.tolist()
    ulp = torch.finfo(logits.dtype).eps * max(abs(first), abs(second))
    return Divergence(position, first - second, first - second <= 8 * ulp)


@dataclass(frozen=True)
class MeasuredGain:
    """The gain of a draft by S = τ / (C(n+1) + D), single sequences.

    Attributes:
        gamma: drafted tokens per step. tau: measured tokens per step.
        verification: C(1), C(2), ...; C(gamma + 1) is the one that counts. drafting: measured D of ``gamma`` tokens.
        gain: S at ``gamma``.
        best_gamma: the draft length of the largest S by the measured acceptance; 0: do not draft. best_gain: its S.
        best_width: the ``--width`` that this draft needs; None: none.
    """

    gamma: int
    tau: float
    verification: list[float]
    drafting: float
    gain: float
    best_gamma: int
    best_gain: float
    best_width: int | None = None

    def line(self) -> str:
        """Return the gain as one line of text."""
        options = f"--gamma {self.best_gamma}" + ("" if self.best_width is None else f" --width {self.best_width}")
        best = f"best by these rates: {options}, {self.best_gain:.2f}x"
        return (
            f"S = tau / (C({self.gamma + 1}) + D) = {self.tau:.2f} / ({self.verification[self.gamma]:.2f} + "
            f"{self.drafting:.2f}) = {self.gain:.2f}; " + (best if self.best_gamma else "by these rates no draft pays")
        )


@dataclass(frozen=True)
class PromptDivergence(Divergence):
    """The first difference of a prompt's output from plain decoding's.

    Attributes:
        id: of the prompt.
    """

    id: str


@dataclass(frozen=True)
class TimeShares:
    """The shares of the time of decoding, which add up to 1 unless target and drafter overlap.

    Attributes:
        target: in the target's forward passes. draft: in the drafter and its model (of ``pearl``, at the same time).
        outside: in neither.
    """

    target: float
    draft: float
    outside: float

    def line(self) -> str:
        """Return the shares as one line of text."""
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
        speedup: ratio of rates. interval: of ``speedup``; None for a single batch, from which nothing is concluded.
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
        """Return the rates as one line of text."""
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
