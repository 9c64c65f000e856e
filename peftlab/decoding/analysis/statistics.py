"""Statistics of generations: pooled block efficiency, acceptance, overlap, intervals, divergences."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy
import torch
from numpy.typing import NDArray

from peftlab.decoding.analysis.theory import acceptance_rate
from peftlab.decoding.decode import Generation
from peftlab.decoding.drafters.base import Row, Verified
from peftlab.decoding.engines.base import Engine
from peftlab.decoding.engines.cache import Block
from peftlab.decoding.engines.prefill import empty_cache
from peftlab.decoding.sampling import Sampling

Interval = tuple[float, float] | None
"""Of 95 %; None where there are too few data."""


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
        histogram=_counts(s.emitted for s in steps),
        accepted_runs=_counts(s.accepted for s in steps),
    )


def _counts(lengths: Iterable[int]) -> dict[str, int]:
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
class Overlap:
    """How well a draft model agrees with its target, at every position whose drafted prefix was accepted.

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
    """How long one way of decoding took.

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
    """Where two greedy outputs of one model first differ.

    Attributes:
        position: index of the first different output token.
        margin: top-1 minus top-2 logit of the target there.
        near_tie: whether that is within rounding, so that the order of a sum may decide.
    """

    position: int
    margin: float
    near_tie: bool


def divergence(engine: Engine, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int]) -> Divergence | None:
    """Return where two greedy outputs first differ, and whether the target was undecided there; None if they are equal.

    A near tie is a margin of at most 8 units in the last place of the largest logit, in the logits' dtype.
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
