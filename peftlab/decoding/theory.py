"""The arithmetic of speculative decoding, without a model.

α is the probability that a drafted token is accepted, γ the number of drafted tokens per step, c the time of
one draft step over that of one target step, τ (block efficiency) the tokens of output per target step.
Formulas without a paper named are those of Leviathan et al. 2023 (arXiv 2211.17192).

PEARL (Liu et al. 2024, arXiv 2408.11850) lets draft and target run at the same time. A phase lasts as long as the
slower of one target step and γ draft steps. In each, the draft writes γ tokens further along the sequence while the
target verifies.

- pre-verify: the target reads the prefix and verifies the first of these tokens alone. It yields 1 token: the
  accepted one, after which the γ-1 others await verification, or its correction.
- post-verify: the target reads the tokens that await, and verifies these γ-1 and the first new one, γ in all.
  If all are accepted, it yields γ, and the γ-1 newest await; at the first rejection after n it yields n+1, and the
  schedule is back in pre-verify.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peftlab.errors import PeftlabError

if TYPE_CHECKING:
    from torch import Tensor


def acceptance_rate(p: Tensor, q: Tensor) -> Tensor:
    """Return α = Σ min(p, q) = 1 - TV(p, q) = E_q[min(1, p/q)]: [..., V], [..., V] -> [...].

    Computed as 1 - ½·Σ|p - q|, which is exactly 1 where both are the same.

    Args:
        p, q: [..., V], distributions of target and draft.
    """
    return 1 - (p - q).abs().sum(-1) / 2


def vocabulary_cap(p: Tensor, draft_vocabulary: Tensor) -> Tensor:
    """Return p(V_d), the largest α that any draft over the tokens ``draft_vocabulary`` can reach.

    p keeps its full vocabulary: renormalised over V_d it would no longer be what verification compares with.

    Args:
        p: [..., V].
        draft_vocabulary: [V_d], distinct token ids.
    """
    return p[..., draft_vocabulary].sum(-1)


def block_efficiency(alpha: float, gamma: int) -> float:
    """Return τ = (1 - α^(γ+1)) / (1 - α) = Σ_{i≤γ} α^i, which is γ+1 at α = 1.

    Args:
        alpha: acceptance. gamma: drafted tokens per step.
    """
    _check(alpha, gamma)
    return sum(alpha**i for i in range(gamma + 1))


def block_efficiency_by_position(alphas: Iterable[float]) -> float:
    """Return τ = 1 + Σ_k Π_{i≤k} α_i, with α_i the acceptance at position i given that all before it were accepted."""
    total = reached = 1.0
    for alpha in alphas:
        _check(alpha)
        reached *= alpha
        total += reached
    return total


def speedup(alpha: float, gamma: int, c: float) -> float:
    """Return the gain in wall-clock time τ / (γc + 1): below 1 the draft slows decoding down.

    Args:
        alpha: acceptance. gamma: drafted tokens per step. c: time of a draft step over that of a target step.
    """
    _check(alpha, gamma, c)
    return block_efficiency(alpha, gamma) / (gamma * c + 1)


def operations_growth(alpha: float, gamma: int, c_hat: float) -> float:
    """Return the growth in arithmetic per token, (1 - α)(γĉ + γ + 1) / (1 - α^(γ+1)) = (γĉ + γ + 1) / τ.

    Args:
        alpha: acceptance.
        gamma: drafted tokens per step.
        c_hat: arithmetic of the draft per token over that of the target.
    """
    _check(alpha, gamma, c_hat)
    return (gamma * c_hat + gamma + 1) / block_efficiency(alpha, gamma)


def cap(gamma: int, c: float) -> float:
    """Return the gain of a perfect draft, (γ+1) / (γc+1): no acceptance can beat it at this γ and c.

    Args:
        gamma, c: as for ``speedup``.
    """
    return speedup(1.0, gamma, c)


def break_even_alpha(gamma: int, c: float) -> float:
    """Return the α at which the gain is 1, or infinity where even a perfect draft loses (c > 1).

    At γ = 1 it is c itself.

    Args:
        gamma, c: as for ``speedup``.

    Raises:
        PeftlabError: γ < 1, where there is no draft to break even.
    """
    if gamma < 1:
        raise PeftlabError(f"gamma: {gamma} drafts nothing; break-even needs 1 or more")
    if cap(gamma, c) < 1:
        return math.inf
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2) < high:
        if speedup(middle, gamma, c) < 1:
            low = middle
        else:
            high = middle
    return high


def best_gamma(alpha: float, c: float, max_gamma: int) -> int:
    """Return the γ in 0..max_gamma of the largest gain; the smallest wins a tie, and 0 means not to draft.

    Args:
        alpha, c: as for ``speedup``. max_gamma: the largest γ.
    """
    return max(range(max_gamma + 1), key=lambda gamma: speedup(alpha, gamma, c))


def acceptance_floor_from_kl(kl: float) -> float:
    """Return the α that KL (nats, either direction) guarantees: max(1 - √(KL/2), ½·exp(-KL)).

    Pinsker's inequality for small KL, Bretagnolle and Huber's for large.
    """
    return max(1 - math.sqrt(kl / 2), math.exp(-kl) / 2)


def acceptance_range_from_jsd(jsd: float) -> tuple[float, float]:
    """Return the bounds 1 - √(2·JSD) and 1 - JSD/ln 2 of α, which follow from TV²/2 ≤ JSD ≤ ln2·TV, in nats."""
    return max(0.0, 1 - math.sqrt(2 * jsd)), 1 - jsd / math.log(2)


def goodput(
    alpha: float,
    gamma: int,
    batch: int,
    target_time: Callable[[int, int], float],
    draft_time: Callable[[int], float],
) -> float:
    """Return tokens per second of a batch: B·τ / (target_time(B, γ+1) + γ·draft_time(B)).

    SmartSpec (Liu et al. 2024, arXiv 2406.14066). A target step over few tokens is bound by memory and costs
    the same for 1 as for 8; as the batch grows, verification becomes bound by arithmetic and drafting stops
    paying. Both show only in the two cost functions.

    Args:
        alpha: acceptance.
        gamma: drafted tokens per step; 0 is plain decoding.
        batch: sequences B.
        target_time: (B, tokens of each sequence in one target forward) -> seconds.
        draft_time: B -> seconds of a draft forward over one token of each.
    """
    _check(alpha, gamma)
    step = target_time(batch, gamma + 1) + (gamma * draft_time(batch) if gamma else 0.0)
    return batch * block_efficiency(alpha, gamma) / step


def best_goodput_gamma(
    alpha: float,
    batch: int,
    target_time: Callable[[int, int], float],
    draft_time: Callable[[int], float],
    max_gamma: int,
) -> int:
    """Return the γ in 0..max_gamma of the largest goodput; the smallest wins a tie.

    Args:
        alpha, batch, target_time, draft_time: as for ``goodput``. max_gamma: the largest γ.
    """
    return max(range(max_gamma + 1), key=lambda g: goodput(alpha, g, batch, target_time, draft_time))


def _check(alpha: float, gamma: int = 0, c: float = 0.0) -> None:
    if not 0 <= alpha <= 1:
        raise PeftlabError(f"alpha: {alpha} is not a probability")
    if gamma < 0:
        raise PeftlabError(f"gamma: {gamma} is negative")
    if not c >= 0:
        raise PeftlabError(f"c: {c} is not a cost ratio >= 0")


def pearl_tokens_per_phase(alpha: float, gamma: int) -> float:
    """Return the expected tokens per phase, Σ_{i<γ} α^i / (1 + α - α^γ), for independent acceptances.

    From one pre-verify to the next, 1/(1-α) tokens come out in 1 + α/(1 - α^γ) phases. At α = 1 it is γ.

    Args:
        alpha: acceptance. gamma: tokens drafted per phase.
    """
    if gamma < 1:
        raise PeftlabError(f"gamma: {gamma} drafts nothing; PEARL needs 1 or more")
    return block_efficiency(alpha, gamma - 1) / (1 + alpha - alpha**gamma)


def pearl_speedup(alpha: float, gamma: int, c: float, step: float = 1.0) -> float:
    """Return the gain over plain decoding, tokens per phase / max(``step``, γc).

    A perfect draft gains min(γ, 1/c) where ``step`` is 1. The two models are taken not to slow each other down, as
    on two devices.

    Args:
        alpha: acceptance. gamma: tokens drafted per phase.
        c: a draft step, and ``step``: a target step over γ tokens, both in target steps over one token.
    """
    if not c >= 0:
        raise PeftlabError(f"c: {c} is not a cost ratio >= 0")
    return pearl_tokens_per_phase(alpha, gamma) / max(step, gamma * c)


ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)
GAMMAS = (1, 2, 3, 4, 5, 7, 10)
COSTS = (0.0, 0.02, 0.05, 0.1, 0.2)
DIVERGENCES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


@dataclass(frozen=True)
class Expected:
    """The expected results of drafts of ``gamma`` tokens with independent acceptances of probability ``alpha``.

    Attributes:
        tokens: per target step. operations: arithmetic per token by that of plain decoding, for a draft of none.
        speedup: at each cost c of ``COSTS``, in target steps per draft step.
    """

    alpha: float
    gamma: int
    tokens: float
    operations: float
    speedup: list[float]


@dataclass(frozen=True)
class Bound:
    """Between which values the acceptance lies at a divergence of the draft from the target, per token.

    Attributes:
        nats: of the divergence. floor: where it is the KL divergence, in either direction: the acceptance is no lower.
        low, high: where it is the Jensen-Shannon divergence.
    """

    nats: float
    floor: float
    low: float
    high: float


@dataclass(frozen=True)
class Theory:
    """The formulas of ``theory`` over a grid (Leviathan et al. 2023, arXiv 2211.17192).

    Attributes:
        costs: c of each ``speedup``. rows: by acceptance, then by length. bounds: by divergence.
    """

    costs: list[float]
    rows: list[Expected]
    bounds: list[Bound]


def theory_grid() -> Theory:
    """Return the grid of ``ALPHAS`` and ``GAMMAS``, and the bounds of ``DIVERGENCES``; nothing is measured."""
    rows = [
        Expected(
            alpha,
            gamma,
            block_efficiency(alpha, gamma),
            operations_growth(alpha, gamma, 0.0),
            [speedup(alpha, gamma, c) for c in COSTS],
        )
        for alpha in ALPHAS
        for gamma in GAMMAS
    ]
    bounds = [Bound(d, acceptance_floor_from_kl(d), *acceptance_range_from_jsd(d)) for d in DIVERGENCES]
    return Theory([*COSTS], rows, bounds)
