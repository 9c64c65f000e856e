"""What a finished draft gains by its parts (tokens per step, verification, drafting), and its best length."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from peftlab.decoding.analysis.step_times import step_seconds
from peftlab.decoding.drafters.base import Drafter
from peftlab.decoding.drafters.head_drafter import HeadsDrafter
from peftlab.decoding.engines.base import Engine
from peftlab.decoding.verification.tree import reach

_LONGEST = 8
_CONTEXT = 128


@dataclass(frozen=True)
class MeasuredGain:
    """The gain of a draft by S = τ / (C(n+1) + D), single sequences.

    Attributes:
        gamma: drafted tokens per step. tau: measured tokens per step.
        verification: C(1), C(2), ...; C(gamma + 1) is the one that counts. drafting: measured D of ``gamma`` tokens.
        gain: S at ``gamma``.
        best_gamma: the draft length of the largest S by the measured acceptance; 0: do not draft. best_gain: its S.
    """

    gamma: int
    tau: float
    verification: list[float]
    drafting: float
    gain: float
    best_gamma: int
    best_gain: float

    def line(self) -> str:
        """Return it in a sentence."""
        best = f"best by these rates: --gamma {self.best_gamma}, {self.best_gain:.2f}x"
        return (
            f"S = tau / (C({self.gamma + 1}) + D) = {self.tau:.2f} / ({self.verification[self.gamma]:.2f} + "
            f"{self.drafting:.2f}) = {self.gain:.2f}; " + (best if self.best_gamma else "by these rates no draft pays")
        )


def expected_tokens(drafter: Drafter, histogram: Mapping[str, int], gamma: int) -> list[float]:
    """Return the tokens per step of drafts of 0, 1, 2, ... tokens, as far as acceptance was measured.

    Args:
        histogram: tokens per step -> steps, of drafts of ``gamma`` tokens: shorter ones keep what they have accepted.
            Of heads with measured rates of ranks, those rates decide, and the drafts are trees.
    """
    if isinstance(drafter, HeadsDrafter) and drafter.heads.ranks is not None:
        nodes = reach(drafter.tree(max(gamma, _LONGEST)), drafter.heads.ranks)
    else:
        steps = sum(histogram.values())
        nodes = [
            sum(count for tokens, count in histogram.items() if int(tokens) > n) / steps for n in range(1, gamma + 1)
        ]
    return list(accumulate(nodes, initial=1.0))


def measured_gain(
    target: Engine,
    drafter: Drafter,
    histogram: Mapping[str, int],
    *,
    gamma: int,
    tau: float,
    drafting: float,
    repeats: int = 3,
) -> MeasuredGain | None:
    """Measure the target's steps and return what the draft gains; None where the context is too short for it.

    Args:
        histogram: as for ``expected_tokens``. gamma: drafted tokens per step. tau: tokens per step.
        drafting: seconds of drafting per step. It is taken to be the same for every number of nodes of heads, and in
            proportion to the length of other drafts.
    """
    longest = max(gamma, _LONGEST)
    context = _CONTEXT if target.limit is None else min(_CONTEXT, target.limit - longest - 1)
    if context < 1:
        return None
    seconds = step_seconds({"target": (target, longest + 1)}, context=context, repeats=repeats)
    times = [statistics.median(seconds["target", n]) for n in range(1, longest + 2)]
    verification, share = [time / times[0] for time in times], drafting / times[0]
    level = isinstance(drafter, HeadsDrafter)
    expected = expected_tokens(drafter, histogram, gamma)
    gains = [1.0]
    for n, tokens in enumerate(expected[1:], start=1):
        gains.append(tokens / (verification[n] + share * (1 if level else n / gamma)))
    best = max(range(len(gains)), key=gains.__getitem__)
    gain = tau / (verification[gamma] + share)
    return MeasuredGain(gamma, tau, verification, share, gain, best, gains[best])
