"""Plan a draft: measure step times on this device, and compute the gains that they allow."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import torch

from peftlab.decoding.cache import Engine
from peftlab.decoding.measurements import Conditions, Interval, Watch, check_repeats, step_seconds, uncertain
from peftlab.decoding.theory import (
    GAIN_ALPHAS,
    DraftCost,
    KindAdvice,
    advise,
    break_even,
    goodput,
    pearl_speedup,
    recommendation,
)
from peftlab.errors import PeftlabError
from peftlab.untyped import Attributes


@dataclass(frozen=True)
class LengthGain:
    """The gains of a draft length.

    Attributes:
        gamma: drafted tokens per step.
        cap: gain at α = 1.
        break_even: the least α at which the gain is 1; None where no draft gains anything.
    """

    gamma: int
    cap: float
    break_even: float | None


@dataclass(frozen=True)
class AcceptanceGain:
    """The gain at an acceptance.

    Attributes:
        alpha: acceptance.
        gamma: its best draft length; 0: do not draft.
        gain: at that length.
    """

    alpha: float
    gamma: int
    gain: float


@dataclass(frozen=True)
class Gains:
    """The gain over plain decoding by draft length and acceptance.

    Attributes:
        c: d/t(1).
        target_seconds: t(1), t(2), ... draft_seconds: d.
        verification: t(k)/t(1).
        gammas, alphas: by draft length, and by acceptance.
        pearl: by acceptance, with draft and target at work at the same time, each on a device of its own (PEARL).
        pays: whether some draft can gain anything.
        verdict: in words.
    """

    c: float
    target_seconds: list[float]
    draft_seconds: float
    verification: list[float]
    gammas: list[LengthGain]
    alphas: list[AcceptanceGain]
    pearl: list[AcceptanceGain]
    pays: bool
    verdict: str


@dataclass(frozen=True)
class DraftPlan(Gains):
    """The gains by the medians of repeated measurements, and how sure they are.

    Attributes:
        c_interval, cap_interval: 95 % bootstrap intervals over repeats of c and of the largest gain at α = 1; None for
            a single repeat.
        target_range, draft_range: the shortest and the longest repeat.
        conditions: of the machine.
    """

    c_interval: Interval
    cap_interval: Interval
    target_range: list[tuple[float, float]]
    draft_range: tuple[float, float]
    conditions: Conditions


@dataclass(frozen=True)
class BatchPlan:
    """The gains that a draft could reach for a batch of sequences decoded together.

    Attributes:
        batch: how many.
        target_seconds: of a step over 1, 2, ... tokens of each, medians. verification: C(n) of this batch.
        c: a draft step by a target step of this batch; None without a draft.
        alphas: the best draft length at each of ``GAIN_ALPHAS``; empty without a draft.
        verdict: the kind of draft to train, in words; None with a draft.
    """

    batch: int
    target_seconds: list[float]
    verification: list[float]
    c: float | None
    alphas: list[AcceptanceGain]
    verdict: str | None


@dataclass(frozen=True)
class MeasuredPlan(DraftPlan):
    """A plan for two engines.

    Attributes:
        batch: sequences decoded together that the figures are for. batches: the same for each batch size asked about.
        context: tokens in the cache.
        kernels: how target and draft compute a step.
        threads, device: where.
    """

    batch: int
    batches: list[BatchPlan]
    context: int
    kernels: dict[str, str]
    threads: int
    device: str


ALPHAS = tuple(i / 20 for i in range(1, 21))


def plan_from_times(target: list[float], draft: float) -> Gains:
    """Return the gains over plain decoding that step times allow.

    With t(k) the time of a target step over k tokens and d that of a draft step, γ drafted tokens at
    acceptance α gain τ(α, γ)·t(1) / (t(γ+1) + γ·d) over plain decoding; where t is flat this is τ/(γc+1).

    Args:
        target: t(1), t(2), ..., t(γ_max + 1) in seconds.
        draft: d in seconds.
    """
    longest = len(target) - 1
    if longest < 1:
        raise PeftlabError("max_gamma: 0 drafts nothing; plan for 1 or more")
    gain = partial(_gain, target, draft)

    def length_gain(gamma: int) -> LengthGain:
        cap = gain(1.0, gamma)
        return LengthGain(gamma, cap, break_even(lambda alpha: gain(alpha, gamma) >= 1) if cap > 1 else None)

    gammas = [length_gain(gamma) for gamma in range(1, longest + 1)]
    pearl = partial(_pearl_gain, target, draft)
    return Gains(
        c=draft / target[0],
        target_seconds=target,
        draft_seconds=draft,
        verification=[t / target[0] for t in target],
        gammas=gammas,
        alphas=[_best_length(gain, alpha, range(longest + 1)) for alpha in ALPHAS],
        pearl=[_best_length(pearl, alpha, range(1, longest + 1)) for alpha in ALPHAS],
        pays=any(row.break_even is not None for row in gammas),
        verdict=_verdict(gammas),
    )


def plan_from_repeats(target: list[list[float]], draft: list[float], conditions: Conditions) -> DraftPlan:
    """Return the gains that repeated measurements of step times allow, with bootstrap intervals.

    Args:
        target: for 1, 2, ..., γ_max + 1 tokens the seconds of each repeat. draft: those of a draft step.
        conditions: of the measurement.

    Returns:
        The gains by the medians. With doubts, or if the repeats do not agree on whether a draft can pay, the verdict is
        called uncertain.
    """
    gains = plan_from_times([statistics.median(times) for times in target], statistics.median(draft))
    c, cap = _intervals(target, draft)
    doubts = conditions.doubts()
    verdict = uncertain(doubts, gains.verdict)
    if not doubts and cap is not None and cap[0] <= 1 < cap[1]:
        verdict = (
            f"uncertain, as by some repeats a perfect draft reaches {cap[0]:.2f}x and by others {cap[1]:.2f}x: by the "
            f"median {verdict}"
        )
    return DraftPlan(
        **_attributes(replace(gains, verdict=verdict)),
        c_interval=c,
        cap_interval=cap,
        target_range=[(min(times), max(times)) for times in target],
        draft_range=(min(draft), max(draft)),
        conditions=conditions,
    )


def _attributes(of: Gains) -> Attributes:
    """Return the attributes of a plan by name, as arguments of a class that extends it."""
    return {field.name: getattr(of, field.name) for field in fields(of)}


def _intervals(target: list[list[float]], draft: list[float], draws: int = 1000) -> tuple[Interval, Interval]:
    """Return 95 % bootstrap intervals of c and of the largest gain at α = 1; None for each with a single repeat.

    Repeats are drawn together for all steps (paired), because the steps were measured in turn.
    """
    if len(draft) < 2:
        return None, None
    from scipy.stats import bootstrap

    def cost_ratio_and_cap(*times: Sequence[float]) -> tuple[float, float]:
        *steps, drafting = map(statistics.median, times)
        return drafting / steps[0], max(_gain(steps, drafting, 1.0, g) for g in range(1, len(steps)))

    found = bootstrap(
        (*target, draft),
        cost_ratio_and_cap,
        paired=True,
        vectorized=False,
        n_resamples=draws,
        method="percentile",
        rng=0,
    ).confidence_interval
    (c_low, cap_low), (c_high, cap_high) = found
    return (float(c_low), float(c_high)), (float(cap_low), float(cap_high))


@dataclass(frozen=True)
class EnginePlan:
    """The gain over plain decoding in an engine that serves, by draft length and acceptance.

    Attributes:
        engine: name and version.
        target_seconds: of a step with 0, 1, 2, ... drafted tokens, drafting included; medians. target_range: the
            shortest and the longest repeat.
        verification: what a step with 0, 1, 2, ... drafted tokens costs in plain steps that were measured in turn.
        gammas, alphas, verdict: as of ``Gains``.
        context: tokens of the prompt.
    """

    engine: str
    target_seconds: list[float]
    target_range: list[tuple[float, float]]
    verification: list[float]
    gammas: list[LengthGain]
    alphas: list[AcceptanceGain]
    verdict: str
    context: int


def plan_from_engine(engine: str, steps: Sequence[tuple[Sequence[float], Sequence[float]]], context: int) -> EnginePlan:
    """Return the gains that an engine's step times allow: τ(α, γ) by the cost of a step with γ drafted tokens.

    Args:
        engine: name and version.
        steps: for γ = 1, 2, ... the seconds of a plain step and of one with γ drafted tokens, a repeat each.
        context: tokens of the prompt.
    """
    costs = [1.0, *(statistics.median(drafted) / statistics.median(plain) for plain, drafted in steps)]
    repeats = [[each for plain, _ in steps for each in plain], *(drafted for _, drafted in steps)]
    gains = plan_from_times(costs, 0.0)  # drafting is part of a step
    return EnginePlan(
        engine=engine,
        target_seconds=[statistics.median(times) for times in repeats],
        target_range=[(min(times), max(times)) for times in repeats],
        verification=costs,
        gammas=gains.gammas,
        alphas=gains.alphas,
        verdict=gains.verdict,
        context=context,
    )


def best_gamma_at(plan: Gains | EnginePlan, alpha: float) -> AcceptanceGain:
    """Return the draft length of the largest gain at an acceptance.

    Args:
        plan: with step times. alpha: acceptance of a drafted token.
    """
    if isinstance(plan, EnginePlan):
        steps, drafting = plan.verification, 0.0
    else:
        steps, drafting = plan.target_seconds, plan.draft_seconds
    return _best_length(partial(_gain, steps, drafting), alpha, range(len(steps)))


def _best_length(gain: Callable[[float, int], float], alpha: float, gammas: Iterable[int]) -> AcceptanceGain:
    best = max(gammas, key=partial(gain, alpha))
    return AcceptanceGain(alpha, best, gain(alpha, best))


def _gain(target: Sequence[float], draft: float, alpha: float, gamma: int) -> float:
    return goodput(alpha, gamma, 1, lambda _, tokens: target[tokens - 1], lambda _, tokens: tokens * draft) * target[0]


def _pearl_gain(target: Sequence[float], draft: float, alpha: float, gamma: int) -> float:
    return pearl_speedup(alpha, gamma, draft / target[0], target[gamma - 1] / target[0])


def _verdict(gammas: list[LengthGain]) -> str:
    best = max(gammas, key=lambda row: row.cap)
    most = f"a perfect draft reaches {best.cap:.2f}x (gamma {best.gamma})"
    paying = [(row.break_even, row.gamma) for row in gammas if row.break_even is not None]
    if not paying:
        return f"cannot pay here: even {most}"
    alpha, gamma = min(paying)
    return f"pays from an acceptance of {alpha:.2f} (gamma {gamma}); {most}"


def check_plan(max_gamma: int, repeats: int, batches: Sequence[int], context: int) -> None:
    """Raise ``PeftlabError`` for invalid settings of a plan, before a model is loaded.

    Args:
        max_gamma, repeats, batches, context: as for ``plan``.
    """
    if context < 1:
        raise PeftlabError(f"context: {context} tokens; measure with 1 or more")
    if max_gamma < 1:
        raise PeftlabError(f"max_gamma: {max_gamma} drafts nothing; plan for 1 or more")
    if not batches or min(batches) < 1 or len({*batches}) < len(batches):
        raise PeftlabError(f"batch {','.join(map(str, batches))}: different whole numbers from 1")
    check_repeats(repeats)


Seconds = Mapping[tuple[str, int], list[float]]
"""(engine, tokens) -> seconds of each repeat, as ``step_seconds`` returns them."""


def plan(
    target: Engine,
    draft: Engine,
    *,
    max_gamma: int = 8,
    context: int = 128,
    repeats: int = 9,
    batches: Sequence[int] = (1,),
) -> MeasuredPlan:
    """Measure the steps of target and draft on this device, and return the gains that they allow.

    Args:
        target, draft: the engines. max_gamma: the longest draft to plan for. context: tokens in the cache.
        repeats: passes of each kind of step.
        batches: how many sequences are decoded together; the plan is for the first number, ``batches`` has them all.

    Raises:
        PeftlabError: ``max_gamma``, ``repeats``, ``context`` or a batch below 1, or a context that does not fit.
    """
    check_plan(max_gamma, repeats, batches, context)
    both = {"target": (target, max_gamma + 1), "draft": (draft, 1)}
    with Watch(target.device) as watch:
        seconds = {size: step_seconds(both, batch=size, context=context, repeats=repeats) for size in batches}
    first = seconds[batches[0]]
    found = plan_from_repeats(_target_repeats(first), first["draft", 1], watch.conditions(_all_repeats(seconds)))
    return MeasuredPlan(
        **_attributes(found),
        batch=batches[0],
        batches=[_batch_plan(size, of) for size, of in seconds.items()],
        context=context,
        kernels={"target": target.kind, "draft": draft.kind},
        threads=torch.get_num_threads(),
        device=str(target.device),
    )


def _target_repeats(seconds: Seconds) -> list[list[float]]:
    """Return the repeats of a target step over 1, 2, ... tokens."""
    return [times for (name, _), times in seconds.items() if name == "target"]


def _all_repeats(seconds: Mapping[int, Seconds]) -> list[list[float]]:
    return [times for of in seconds.values() for times in of.values()]


def _batch_plan(batch: int, seconds: Seconds) -> BatchPlan:
    target, draft = (
        [statistics.median(times) for times in _target_repeats(seconds)],
        statistics.median(seconds["draft", 1]),
    )
    gain = partial(_gain, target, draft)
    alphas = [_best_length(gain, alpha, range(len(target))) for alpha in GAIN_ALPHAS]
    return BatchPlan(batch, target, [each / target[0] for each in target], draft / target[0], alphas, None)


@dataclass(frozen=True)
class MeasuredAdvice:
    """The gains that each kind of draft could reach for a target on this device.

    Attributes:
        target_seconds: t(1), t(2), ..., medians. target_range: shortest and longest repeat. verification: t(k)/t(1).
        kinds: by kind and size. verdict: the one to train, in words.
        context: tokens in the cache. kernel: how the target computes a step. threads, device: where.
        conditions: of the machine. batch, batches: as of ``MeasuredPlan``.
    """

    target_seconds: list[float]
    target_range: list[tuple[float, float]]
    verification: list[float]
    kinds: list[KindAdvice]
    verdict: str
    batch: int
    batches: list[BatchPlan]
    context: int
    kernel: str
    threads: int
    device: str
    conditions: Conditions


def compare_kinds(
    target: Engine,
    costs: Sequence[DraftCost],
    alpha: float,
    *,
    max_gamma: int = 8,
    context: int = 128,
    repeats: int = 9,
    batches: Sequence[int] = (1,),
) -> MeasuredAdvice:
    """Measure the target's steps over 1 to ``max_gamma`` + 1 tokens, and compare kinds of drafts by them.

    Args:
        target: the engine. costs: of drafting with each kind. alpha: the acceptance to recommend for.
        max_gamma, context, repeats, batches: as for ``plan``.

    Raises:
        PeftlabError: ``max_gamma``, ``repeats``, ``context`` or a batch below 1, a context that does not fit, or no
            probability.
    """
    check_plan(max_gamma, repeats, batches, context)
    alone = {"target": (target, max_gamma + 1)}
    with Watch(target.device) as watch:
        seconds = {size: step_seconds(alone, batch=size, context=context, repeats=repeats) for size in batches}
    conditions, times = watch.conditions(_all_repeats(seconds)), _target_repeats(seconds[batches[0]])
    advised = [_batch_advice(size, of, costs, alpha) for size, of in seconds.items()]
    medians, verification = advised[0].target_seconds, advised[0].verification
    kinds = advise(costs, verification, alpha)
    return MeasuredAdvice(
        target_seconds=medians,
        target_range=[(min(each), max(each)) for each in times],
        verification=verification,
        kinds=kinds,
        verdict=uncertain(conditions.doubts(), recommendation(kinds)),
        batch=batches[0],
        batches=advised,
        context=context,
        kernel=target.kind,
        threads=torch.get_num_threads(),
        device=str(target.device),
        conditions=conditions,
    )


def _batch_advice(batch: int, seconds: Seconds, costs: Sequence[DraftCost], alpha: float) -> BatchPlan:
    target = [statistics.median(times) for times in _target_repeats(seconds)]
    verification = [each / target[0] for each in target]
    return BatchPlan(batch, target, verification, None, [], recommendation(advise(costs, verification, alpha)))
