"""The two small tables of the speculative decoding paper, and the acceptance that a divergence leaves possible."""

from __future__ import annotations

from dataclasses import dataclass

from peftlab.decoding.analysis.theory import (
    acceptance_floor_from_kl,
    acceptance_range_from_jsd,
    block_efficiency,
    operations_growth,
    speedup,
)

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)
GAMMAS = (1, 2, 3, 4, 5, 7, 10)
COSTS = (0.0, 0.02, 0.05, 0.1, 0.2)
DIVERGENCES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


@dataclass(frozen=True)
class Expected:
    """What independent acceptances of probability ``alpha`` give with drafts of ``gamma`` tokens.

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
