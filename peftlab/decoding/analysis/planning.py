"""Whether a draft can make decoding faster on this device: measured step times, and the gains that they allow."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import torch

from peftlab.decoding.analysis.advice import DraftCost, KindAdvice, advise, recommendation
from peftlab.decoding.analysis.conditions import Conditions, Watch, uncertain
from peftlab.decoding.analysis.statistics import Interval
from peftlab.decoding.analysis.step_times import check_repeats, step_seconds
from peftlab.decoding.analysis.theory import goodput
from peftlab.decoding.engines.base import Engine
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
        pays: whether some draft can gain anything.
        verdict: in words.
    """

    c: float
    target_seconds: list[float]
    draft_seconds: float
    verification: list[float]
    gammas: list[LengthGain]
    alphas: list[AcceptanceGain]
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
class MeasuredPlan(DraftPlan):
    """A plan for two engines.

    Attributes:
        context: tokens in the cache.
        kernels: how target and draft compute a step.
        threads, device: where.
    """

    context: int
    kernels: dict[str, str]
    threads: int
    device: str


ALPHAS = tuple(i / 20 for i in range(1, 21))


def plan_from_times(target: list[float], draft: float) -> Gains:
    """Return the gains that step times allow.

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
    gammas = [LengthGain(g, gain(1.0, g), _break_even(partial(gain, gamma=g))) for g in range(1, longest + 1)]
    alphas = []
    for alpha in ALPHAS:
        best = max(range(longest + 1), key=partial(gain, alpha))
        alphas.append(AcceptanceGain(alpha, best, gain(alpha, best)))
    return Gains(
        c=draft / target[0],
        target_seconds=target,
        draft_seconds=draft,
        verification=[t / target[0] for t in target],
        gammas=gammas,
        alphas=alphas,
        pays=any(row.break_even is not None for row in gammas),
        verdict=_verdict(gammas),
    )


def plan_from_repeats(target: list[list[float]], draft: list[float], conditions: Conditions) -> DraftPlan:
    """Return what measured step times allow, and how sure that is.

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
    """The attributes as they are, for a plan that has more of them."""
    return {field.name: getattr(of, field.name) for field in fields(of)}


def _intervals(target: list[list[float]], draft: list[float], draws: int = 1000) -> tuple[Interval, Interval]:
    """The intervals of c and of the largest gain at α = 1; repeats are drawn together, as the steps took turns."""
    if len(draft) < 2:
        return None, None
    from scipy.stats import bootstrap

    def c_and_cap(*times: Sequence[float]) -> tuple[float, float]:
        *steps, drafting = map(statistics.median, times)
        return drafting / steps[0], max(_gain(steps, drafting, 1.0, g) for g in range(1, len(steps)))

    found = bootstrap(
        (*target, draft), c_and_cap, paired=True, vectorized=False, n_resamples=draws, method="percentile", rng=0
    ).confidence_interval
    (c_low, cap_low), (c_high, cap_high) = found
    return (float(c_low), float(c_high)), (float(cap_low), float(cap_high))


def best_gamma_at(plan: Gains, alpha: float) -> AcceptanceGain:
    """Return the draft length of the largest gain at an acceptance."""
    gain = partial(_gain, plan.target_seconds, plan.draft_seconds, alpha)
    best = max(range(len(plan.target_seconds)), key=gain)
    return AcceptanceGain(alpha, best, gain(best))


def _gain(target: list[float], draft: float, alpha: float, gamma: int) -> float:
    return goodput(alpha, gamma, 1, lambda _, tokens: target[tokens - 1], lambda _: draft) * target[0]


def _verdict(gammas: list[LengthGain]) -> str:
    best = max(gammas, key=lambda row: row.cap)
    most = f"a perfect draft reaches {best.cap:.2f}x (gamma {best.gamma})"
    paying = [(row.break_even, row.gamma) for row in gammas if row.break_even is not None]
    if not paying:
        return f"cannot pay here: even {most}"
    alpha, gamma = min(paying)
    return f"pays from an acceptance of {alpha:.2f} (gamma {gamma}); {most}"


def _break_even(gain: Callable[[float], float]) -> float | None:
    """The least α at which the gain is 1; None where no draft gains anything."""
    if gain(1.0) <= 1:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if gain(middle) < 1 else (low, middle)
    return high


def check_plan(max_gamma: int, repeats: int) -> None:
    """Raise ``PeftlabError`` for settings that plan nothing, before a model is loaded."""
    if max_gamma < 1:
        raise PeftlabError(f"max_gamma: {max_gamma} drafts nothing; plan for 1 or more")
    check_repeats(repeats)


def plan(target: Engine, draft: Engine, *, max_gamma: int = 8, context: int = 128, repeats: int = 9) -> MeasuredPlan:
    """Measure target and draft on this device.

    Raises:
        PeftlabError: ``max_gamma`` or ``repeats`` below 1, or a context that does not fit.
    """
    check_plan(max_gamma, repeats)
    both = {"target": (target, max_gamma + 1), "draft": (draft, 1)}
    with Watch(target.device) as watch:
        seconds = step_seconds(both, context=context, repeats=repeats)
    times = [seconds["target", k] for k in range(1, max_gamma + 2)]
    found = plan_from_repeats(times, seconds["draft", 1], watch.conditions(list(seconds.values())))
    return MeasuredPlan(
        **_attributes(found),
        context=context,
        kernels={"target": target.kind, "draft": draft.kind},
        threads=torch.get_num_threads(),
        device=str(target.device),
    )


@dataclass(frozen=True)
class MeasuredAdvice:
    """What each kind of draft could gain for a target on this device.

    Attributes:
        target_seconds: t(1), t(2), ..., medians. target_range: shortest and longest repeat. verification: t(k)/t(1).
        kinds: by kind and size. verdict: the one to train, in words.
        context: tokens in the cache. kernel: how the target computes a step. threads, device: where.
        conditions: of the machine.
    """

    target_seconds: list[float]
    target_range: list[tuple[float, float]]
    verification: list[float]
    kinds: list[KindAdvice]
    verdict: str
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
) -> MeasuredAdvice:
    """Measure the target's steps over 1 to ``max_gamma`` + 1 tokens, and compare kinds of drafts by them.

    Args:
        costs: of drafting with each kind. alpha: the acceptance to recommend for.

    Raises:
        PeftlabError: ``max_gamma`` or ``repeats`` below 1, a context that does not fit, or no probability.
    """
    check_plan(max_gamma, repeats)
    with Watch(target.device) as watch:
        seconds = step_seconds({"target": (target, max_gamma + 1)}, context=context, repeats=repeats)
    times = [seconds["target", k] for k in range(1, max_gamma + 2)]
    medians = [statistics.median(each) for each in times]
    verification = [each / medians[0] for each in medians]
    conditions = watch.conditions(times)
    kinds = advise(costs, verification, alpha)
    return MeasuredAdvice(
        target_seconds=medians,
        target_range=[(min(each), max(each)) for each in times],
        verification=verification,
        kinds=kinds,
        verdict=uncertain(conditions.doubts(), recommendation(kinds)),
        context=context,
        kernel=target.kind,
        threads=torch.get_num_threads(),
        device=str(target.device),
        conditions=conditions,
    )


def finite(value: float | None) -> str:
    """Return a gain or an acceptance for a table; a dash where there is none."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.2f}"
