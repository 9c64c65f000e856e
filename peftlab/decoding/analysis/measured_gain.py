"""What a finished draft gains by its parts (tokens per step, verification, drafting), and its best length."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from peftlab.decoding.analysis.step_times import step_seconds
from peftlab.decoding.drafters.base import Drafter
from peftlab.decoding.engines.base import Engine

_LONGEST = 12
_CONTEXT = 128


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
        """Return it in a sentence."""
        options = f"--gamma {self.best_gamma}" + ("" if self.best_width is None else f" --width {self.best_width}")
        best = f"best by these rates: {options}, {self.best_gain:.2f}x"
        return (
            f"S = tau / (C({self.gamma + 1}) + D) = {self.tau:.2f} / ({self.verification[self.gamma]:.2f} + "
            f"{self.drafting:.2f}) = {self.gain:.2f}; " + (best if self.best_gamma else "by these rates no draft pays")
        )


def measured_gain(
    target: Engine,
    drafter: Drafter,
    acceptance: Sequence[float | None],
    *,
    gamma: int,
    tau: float,
    drafting: float,
    repeats: int = 3,
) -> MeasuredGain | None:
    """Measure the target's steps and return what the draft gains.

    None where the context is too short for it, and where the acceptance of no draft is known (``Drafter.possible``).

    Args:
        acceptance: by position, None where none was tried. gamma: drafted tokens per step. tau: tokens per step.
        drafting: seconds of drafting per step.
    """
    longest = max(gamma, _LONGEST)
    context = _CONTEXT if target.limit is None else min(_CONTEXT, target.limit - longest - 1)
    if context < 1:
        return None
    seconds = step_seconds({"target": (target, longest + 1)}, context=context, repeats=repeats)
    times = [statistics.median(seconds["target", n]) for n in range(1, longest + 2)]
    verification, share = [time / times[0] for time in times], drafting / times[0]
    rates = [rate or 0.0 for rate in acceptance]
    drafts = drafter.possible([*rates, *[0.0] * (gamma - len(rates))], verification)
    if not drafts:
        return None
    own = max((d for d in drafts if d.own and d.gamma <= gamma), key=lambda d: d.gamma)
    gains = [d.tokens / (verification[d.gamma] + share * d.effort / own.effort) for d in drafts]
    most = max(gains)
    best, best_gain = (drafts[gains.index(most)], most) if most > 1 else (None, 1.0)
    return MeasuredGain(
        gamma=gamma,
        tau=tau,
        verification=verification,
        drafting=share,
        gain=tau / (verification[gamma] + share),
        best_gamma=best.gamma if best else 0,
        best_gain=best_gain,
        best_width=best.width if best else None,
    )
