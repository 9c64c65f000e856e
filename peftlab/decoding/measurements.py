"""Measurements of decoding: times and the state of the machine, acceptance, intervals, and the results of benchmarks.

A measurement on a busy machine is called uncertain, with its reasons (``Conditions.doubts``).
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, product, zip_longest
from types import TracebackType
from typing import TypeVar, cast

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from peftlab.decoding.cache import Block, Engine, EngineWrapper, KVCache, Output, empty_cache
from peftlab.decoding.decode import Drafter, Fixed, Generation, Row, StoppingCriteria, Verified, decode
from peftlab.decoding.parallel_drafters import PearlDrafter
from peftlab.decoding.sampling import LossyRule, Sampling, one_hot
from peftlab.decoding.theory import acceptance_rate
from peftlab.environment import Cpu, wait_for
from peftlab.errors import PeftlabError
from peftlab.files import Json, to_json
from peftlab.untyped import Function

Interval = tuple[float, float] | None
"""Ends of a 95 % interval; None where there are too few data."""

# Beyond these a measurement is called uncertain, see ``Conditions``.
_MAX_LOAD = 1.25  # load average over cores: this process's own threads reach 1
_MIN_RUNNING = 0.9
_MAX_SPREAD = 0.15


@dataclass(frozen=True)
class Conditions:
    """The state of the machine during a measurement.

    Attributes:
        load: 1-minute load average, this process included; None where the system has none.
        cores: that this process may use.
        running: share of the time in which the timing thread ran on a core; None where it waits for a device.
        spread: interquartile range of repeats of the same work, relative to their median; None without repeats.
    """

    load: float | None
    cores: int
    running: float | None
    spread: float | None

    def doubts(self) -> list[str]:
        """Return the reasons why figures measured under these conditions may be wrong; none on an idle machine."""
        doubts = []
        if self.load is not None and self.load > _MAX_LOAD * self.cores:
            doubts.append(f"load average {self.load:.1f} on {self.cores} cores")
        if self.running is not None and self.running < _MIN_RUNNING:
            doubts.append(f"waiting for a core {100 * (1 - self.running):.0f} % of the time")
        if self.spread is not None and self.spread > _MAX_SPREAD:
            doubts.append(f"repeats of the same work differ by {100 * self.spread:.0f} %")
        return doubts

    def as_json(self) -> dict[str, Json]:
        """Return the attributes and the doubts."""
        return to_json(vars(self)) | {"doubts": to_json(self.doubts())}


class Watch:
    """A context manager that observes the machine while its block is timed.

    Args:
        device: what is measured computes there. waits: it waits for threads of its own, whose work is no other's.
    """

    def __init__(self, device: torch.device, *, waits: bool = False):
        self._waits = waits or device.type != "cpu"

    def __enter__(self) -> Watch:
        self._load = _load_average()
        self._began, self._ran = time.perf_counter(), time.thread_time()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._wall, self._ran = time.perf_counter() - self._began, time.thread_time() - self._ran
        self._load = max((load for load in (self._load, _load_average()) if load is not None), default=None)

    def conditions(self, repeats: Sequence[Sequence[float]]) -> Conditions:
        """Return the conditions of the measurement, after the with-block.

        Args:
            repeats: for each piece of work the seconds of its repeats.
        """
        running = None if self._waits else min(1.0, self._ran / self._wall)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return Conditions(self._load, cores, running, relative_spread(repeats))


def relative_spread(repeats: Sequence[Sequence[float]]) -> float | None:
    """Return the median over pieces of work of the interquartile range of their repeats over the median repeat."""
    each = []
    for times in repeats:
        if len(times) > 1:
            first, middle, third = statistics.quantiles(times, n=4, method="inclusive")
            each.append((third - first) / middle)
    return statistics.median(each) if each else None


def _load_average() -> float | None:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def uncertain(doubts: Sequence[str], statement: str) -> str:
    """Return ``statement``, preceded by the reasons why it may be wrong if there are any.

    Args:
        doubts: the reasons. statement: about measured times.
    """
    return f"uncertain, the machine was busy ({'; '.join(doubts)}): by these times {statement}" if doubts else statement


ResultT = TypeVar("ResultT")


class Clock:
    """A clock that adds up the time of the calls made through it.

    Attributes:
        seconds: so far. device: waited for before and after each call.
    """

    def __init__(self, device: torch.device):
        self.seconds, self.device = 0.0, device

    def timed(self, work: Function[ResultT], *arguments: object) -> ResultT:
        """Call ``work``, add its time, and return its result.

        Args:
            work: to call. arguments: by position.
        """
        wait_for(self.device)
        began = time.perf_counter()
        output = work(*arguments)
        wait_for(self.device)
        self.seconds += time.perf_counter() - began
        return output


class Stopwatch(EngineWrapper, Clock):
    """An engine that adds up the time of its forward passes; to the decoder it is the engine."""

    def __init__(self, engine: Engine):
        Clock.__init__(self, engine.device)
        EngineWrapper.__init__(self, engine)

    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """Run this engine on new tokens; see ``Engine.forward``."""
        return self.timed(self._engine.forward, cache, tokens, block, keep)


ObjectT = TypeVar("ObjectT")


def timed_calls(inner: ObjectT, clock: Clock, *methods: str) -> ObjectT:
    """Return a proxy of ``inner`` that adds the time of the calls of some methods to a clock.

    Args:
        inner: such as a draft's engine or heads. clock: adds up. methods: names, called with arguments by position.
    """
    return cast(ObjectT, _TimedCalls(inner, clock, methods))


class _TimedCalls:
    def __init__(self, inner: object, clock: Clock, methods: Sequence[str]):
        self._inner = inner
        for method in methods:
            setattr(self, method, partial(clock.timed, getattr(inner, method)))

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


def timed_drafter(make: Callable[[], Drafter], clock: Clock) -> Drafter:
    """Return a new drafter that adds its time, and its model's, to a clock.

    Args:
        make: makes the drafter. clock: adds up.
    """
    drafter = make()
    # The calls of a drafter that works in another thread return before its model has drafted.
    if isinstance(drafter, PearlDrafter):
        return replace(drafter, engine=timed_calls(drafter.engine, clock, "forward"))
    return timed_calls(drafter, clock, "start", "join", "propose", "accept", "select")


def step_seconds(
    engines: Mapping[str, tuple[Engine, int]], *, batch: int = 1, context: int = 128, repeats: int = 9
) -> dict[tuple[str, int], list[float]]:
    """Measure one forward pass over 1..k tokens of each sequence after ``context`` cached ones.

    Args:
        engines: name -> engine and its largest k.
        batch: sequences in a pass. context: tokens of each in the cache, and of the prompts of an
            encoder-decoder model.
        repeats: passes of each kind, in turn. One more of each warms up.

    Returns:
        (name, k) -> seconds of each repeat.

    Raises:
        PeftlabError: ``repeats < 1``, or a context that does not fit.
    """
    check_repeats(repeats)
    generator = torch.Generator().manual_seed(0)
    runs: dict[tuple[str, int], Callable[[], Output]] = {}
    for name, (engine, most) in engines.items():
        if engine.limit is not None and context + most > engine.limit:
            raise PeftlabError(f"context: {context} and {most} more tokens exceed {name}'s {engine.limit}")
        ids = torch.randint(engine.vocab_size, (batch, context + most), generator=generator).to(engine.device)
        cache = empty_cache(engine, context + most, ids[:, :context].tolist())
        engine.forward(cache, ids[:, :context], Block((0,) * batch, context), [context - 1])
        for k in range(1, most + 1):
            runs[name, k] = partial(engine.forward, cache, ids[:, context : context + k], Block((context,) * batch, k))
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
    for _ in range(repeats + 1):
        for key, run in runs.items():
            began = time.perf_counter()
            float(run().logits[0, -1, 0])  # reading a number waits for the device
            seconds[key].append(time.perf_counter() - began)
    return {key: values[1:] for key, values in seconds.items()}


def check_repeats(repeats: int) -> None:
    """Raise ``PeftlabError`` if nothing would be measured."""
    if repeats < 1:
        raise PeftlabError(f"repeats: {repeats} measures nothing; give 1 or more, and 2 or more for an interval")


@dataclass(frozen=True)
class MeasuredStepTimes:
    """Seconds of a step at some batch sizes; between two of them they are taken to lie on a line.

    Attributes:
        targets: batch size -> seconds of a target step over 1, 2, ... tokens of each sequence; the sizes rise.
        drafts: batch size -> tokens drafted for each sequence -> seconds of drafting.
    """

    targets: Mapping[int, Sequence[float]]
    drafts: Mapping[int, Mapping[int, float]]

    def target(self, batch: int, tokens: int) -> float:
        """Return the seconds of a target step.

        Args:
            batch: sequences. tokens: of each.
        """
        return _interpolate({size: times[tokens - 1] for size, times in self.targets.items()}, batch)

    def draft(self, batch: int, tokens: int) -> float:
        """Return the seconds of drafting.

        Args:
            batch: sequences. tokens: drafted for each.
        """
        return _interpolate({size: _interpolate(times, tokens) for size, times in self.drafts.items()}, batch)


def target_times(
    target: Engine, largest: int, longest: int, *, context: int = 128, repeats: int = 3
) -> dict[int, list[float]]:
    """Return the seconds of target steps as ``MeasuredStepTimes.targets``: medians of a few repeats.

    Args:
        target: its engine. largest: batch size; 1, 2, 4, ... up to it are measured.
        longest: drafted tokens at most.
        context: tokens of each sequence in the cache, fewer where the model has less room. repeats: of each step.

    Raises:
        PeftlabError: the model has no room for as many tokens.
    """
    sizes = [*(1 << i for i in range((largest - 1).bit_length())), largest]
    if target.limit is not None:
        context = max(1, min(context, target.limit - longest - 1))
    engines = {"target": (target, longest + 1)}
    found = {size: step_seconds(engines, batch=size, context=context, repeats=repeats) for size in sizes}
    return {size: [statistics.median(of["target", k]) for k in range(1, longest + 2)] for size, of in found.items()}


def drafting_times(
    target: Engine, make: Callable[[], Drafter], sizes: Iterable[int], longest: int, *, repeats: int = 3
) -> dict[int, dict[int, float]]:
    """Return the seconds of drafting as ``MeasuredStepTimes.drafts``: medians of steps in which random text is decoded.

    A step of one token and one of the most are measured; between them the time is taken to lie on a line.

    Args:
        target: its engine. make: makes the drafter. sizes: of batches. longest: drafted tokens at most.
        repeats: steps of each kind, fewer where the target has less room. One more of each reads the prompt.
    """
    generator = torch.Generator().manual_seed(0)
    found: dict[int, dict[int, float]] = {size: {} for size in sizes}
    for size, tokens in product(found, sorted({1, longest})):
        clock, ends = Clock(target.device), [0.0]
        drafter = timed_drafter(make, clock)

        def note(row: int, _: list[int], clock: Clock = clock, ends: list[float] = ends) -> None:
            if row == 0:
                ends.append(clock.seconds)

        prompts = torch.randint(target.vocab_size, (size, 8), generator=generator).tolist()
        # As many steps even where all is accepted; at the end of an output less is drafted.
        stopping = StoppingCriteria((repeats + 2) * (tokens + 1))
        decode(target, prompts, stopping, drafter, policy=partial(Fixed, tokens), on_tokens=note)
        steps = [after - before for before, after in pairwise(ends)]
        found[size][tokens] = statistics.median(steps[1 : repeats + 1] or steps)
    return found


def _interpolate(values: Mapping[int, float], size: int) -> float:
    """Return the value at ``size``, interpolated between its neighbours; past the ends, that of the nearest size."""
    below = max((each for each in values if each <= size), default=min(values))
    above = min((each for each in values if each >= size), default=max(values))
    if above <= below:
        return values[above]
    share = (size - below) / (above - below)
    return (1 - share) * values[below] + share * values[above]


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
        for i, kept in enumerate(verified.kept):
            n = min(kept, int((verified.draft.tokens[i] >= 0).sum()))
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


def emitted_distribution(p: Tensor, allowed: Tensor, drawn_from: Sequence[Tensor]) -> Tensor:
    """Return the distribution of the token that a rule emits after a prefix for which children were drafted, [V].

    Args:
        p, allowed: [V]. drawn_from: of each child in turn, the distribution [V] that it was drawn from
            given its elder siblings.
    """
    law, left = torch.zeros_like(p), p.new_ones(())
    for q in drawn_from:
        accepted = q * allowed
        law, left = law + left * accepted, left * (1 - accepted.sum())
    return law + left * p


@dataclass(frozen=True)
class LossyResult:
    """The effect of a lossy rule on an output.

    Attributes:
        rule: its name.
        distance: mean over the output's tokens of the total variation between the law of the token and the target's p
            after the same text; in the best pairing with an exact token, the probability that the two differ. At
            temperature 0, the share of tokens that are not the target's choice there. None where nothing was output.
        differing: share of tokens that differ from the exact greedy output, place by place; None when sampling.
    """

    rule: str
    distance: float | None
    differing: float | None = None

    def line(self) -> str:
        """Return the result as one line of text."""
        text = f"lossy: {self.rule}"
        if self.distance is not None:
            text += f", total variation from the target's distribution {self.distance:.3f} per token"
        if self.differing is not None:
            text += f", {100 * self.differing:.1f} % of the tokens differ from the exact output"
        return text


@dataclass
class DistanceMeter:
    """An ``observe`` for ``decode.decode`` that measures ``LossyResult.distance``.

    Attributes:
        rule, sampling: as given to ``decode``. tokens: measured so far.
    """

    rule: LossyRule
    sampling: Sampling
    tokens: int = field(default=0, init=False)
    _total: float = field(default=0.0, init=False)

    def __call__(self, rows: list[Row], verified: Verified) -> None:
        draft = verified.draft
        relaxed = None if self.sampling.greedy else self.rule.relaxed
        if relaxed is None:
            laws, allowed = self.rule.distribution_and_mask(verified.output.logits, self.sampling)
        else:
            laws = self.sampling.probabilities(verified.output.logits)
        for i, (path, kept) in enumerate(zip(verified.paths, verified.kept, strict=True)):
            tokens = draft.tokens[i].tolist()
            drawn = one_hot(draft.tokens[i], laws) if draft.probs is None else draft.probs[i]
            for node in (-1, *path)[:kept]:
                below = [
                    child for child, parent in enumerate(draft.parents_of(i)) if parent == node and tokens[child] >= 0
                ]
                p, drawn_from = laws[i, node + 1], [drawn[child] for child in below]
                if relaxed is None:
                    law = emitted_distribution(p, allowed[i, node + 1], drawn_from)
                else:
                    law = relaxed.law(p, drawn_from)
                self._total += float((law - p).abs().sum()) / 2
                self.tokens += 1

    def result(self, differing: float | None = None) -> LossyResult:
        """Return the measured distance, and the share of differing tokens if it is known.

        Args:
            differing: see ``LossyResult``.
        """
        return LossyResult(self.rule.name, self._total / self.tokens if self.tokens else None, differing)


def differing_share(exact: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> float:
    """Return the share of places at which two lists of outputs differ; a missing token differs from any.

    Args:
        exact, other: token ids of each output.
    """
    places = [pair for both in zip(exact, other, strict=True) for pair in zip_longest(*both)]
    return sum(one != two for one, two in places) / max(1, len(places))


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


def share_interval(counts: Sequence[tuple[int, int]], *, draws: int = 1000) -> Interval:
    """Return the 95 % bootstrap interval of a share Σa / Σb over prompts drawn with replacement.

    Args:
        counts: (a, b) of each prompt, such as its accepted and its drafted tokens. draws: resamples; the same every
            time.

    Returns:
        The interval; None for a single prompt, or where some resample has nothing to share.
    """
    if len(counts) < 2:
        return None
    drawn = numpy.random.default_rng(0).integers(len(counts), size=(draws, len(counts)))
    parts, wholes = numpy.asarray(counts).T[:, drawn].sum(-1)
    return percentiles(parts / wholes) if wholes.all() else None


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


def divergence(
    engine: Engine, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int], dtype: torch.dtype | None = None
) -> Divergence | None:
    """Return the first difference of two greedy outputs, and whether it is a near tie; None if they are equal.

    A near tie is a margin of at most 8 units in the last place of the largest logit, in the logits' dtype, or of at
    most 2 in ``dtype``.

    Args:
        engine: the target. prompt: token ids. plain, other: the outputs.
        dtype: to which another program that wrote ``other`` rounds states and logits; None: it is this engine's.
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
    rounding = max(8 * torch.finfo(logits.dtype).eps, 2 * torch.finfo(dtype or logits.dtype).eps)
    return Divergence(position, first - second, first - second <= rounding * max(abs(first), abs(second)))


@dataclass(frozen=True)
class MeasuredGain:
    """The gain of a draft by S = τ / (C(n+1) + D), single sequences.

    Attributes:
        gamma: drafted tokens per step. tau: measured tokens per step.
        verification: C(1) = 1, C(2), ..., none less than the one before; C(gamma + 1) is the one that counts.
        drafting: measured D of ``gamma`` tokens.
        gain: S at ``gamma``.
        best_gamma: the draft length of the largest S by the measured acceptance; 0: do not draft. best_gain: its S.
            Rates known from training are taken to be off by as much as they are for ``tau``.
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
        accepted_share_interval: 95 % bootstrap interval, over prompts, of accepted over drafted tokens.
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
    accepted_share_interval: Interval = None

    def as_json(self) -> dict[str, Json]:
        """Return the attributes, those of ``statistics`` among them."""
        values = to_json(vars(self))
        del values["statistics"]
        return values | to_json(self.statistics)


@dataclass(frozen=True)
class EngineResult:
    """A draft in the engine that serves it, beside plain decoding there.

    Attributes:
        name, version: of the engine. command: that started it with the draft; None: it ran already.
        tokens_per_second, baseline_tokens_per_second: with the draft, and plain; a prompt takes the median of its
            repeats. ``..._interval``: 95 % bootstrap intervals, None for a single prompt. ``baseline...``, ``speedup``
            and ``verdict``: None for a server that ran already, which cannot be asked for plain decoding.
        tau: tokens per target step in which something was drafted: 1 + accepted / steps.
        acceptance: accepted share of the drafted tokens that were tried, as ``AcceptanceStatistics.acceptance``; None
            where the engine does not count by position.
        acceptance_by_position: of those tried at the first, second, ... place; empty where it does not.
        accepted_share: accepted tokens over all drafted ones. ``..._interval``: over prompts.
        drafted, accepted, steps: as counted. divergences: greedy outputs that differ from peftlab's plain ones.
        lossless: no output with the draft differs from the engine's own plain one; None without plain decoding.
    """

    name: str
    version: str
    command: str | None
    tokens_per_second: float
    tokens_per_second_interval: Interval
    baseline_tokens_per_second: float | None
    baseline_tokens_per_second_interval: Interval
    speedup: float | None
    speedup_interval: Interval
    verdict: str | None
    tau: float | None
    acceptance: float | None
    acceptance_by_position: list[float]
    accepted_share: float | None
    accepted_share_interval: Interval
    drafted: int
    accepted: int
    steps: int
    lossless: bool | None
    divergences: list[PromptDivergence]

    @property
    def title(self) -> str:
        """Return what tables call the draft in this engine."""
        return f"draft in {self.name}"


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
