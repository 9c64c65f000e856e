"""What a finished draft gains by its parts (tokens per step, verification, drafting), and its best length."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from peftlab.decoding.analysis.advice import FEATURE_TREE
from peftlab.decoding.analysis.step_times import step_seconds
from peftlab.decoding.drafters.base import Drafter
from peftlab.decoding.drafters.drawn_trees import DrawnTrees
from peftlab.decoding.drafters.feature_drafter import FeatureDrafter
from peftlab.decoding.drafters.head_drafter import HeadsDrafter
from peftlab.decoding.engines.base import Engine
from peftlab.decoding.verification.tree import best_tree, reach

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


@dataclass(frozen=True)
class PossibleDraft:
    """A draft that the target could verify in a step.

    Attributes:
        gamma: its tokens. width: the ``--width`` that makes it; None: none does.
        tokens: expected per step. effort: of drafting it, in a unit that depends on the drafter.
    """

    gamma: int
    width: int | None
    tokens: float
    effort: float


def possible_drafts(
    drafter: Drafter, histogram: Mapping[str, int], gamma: int, verification: Sequence[float]
) -> list[PossibleDraft]:
    """Return the drafts of 1, 2, ... tokens whose acceptance is known.

    Where rates of ranks were measured, they decide. Heads draft trees at the same effort for every number of nodes. An
    eagle3 layer drafts chains, in proportion to their length, and trees: each level after the first reads several
    nodes, which takes as many times longer as a target step over as many tokens.

    Args:
        histogram: tokens per step -> steps, of drafts of ``gamma`` tokens: shorter ones keep what they have accepted.
        verification: C(1), C(2), ...: of as many tokens as a draft may have, and one more.
    """
    longest = len(verification) - 1
    if isinstance(drafter, HeadsDrafter) and drafter.heads.ranks is not None:
        reached = reach(drafter.tree(longest), drafter.heads.ranks)
        return [PossibleDraft(n, None, tokens, 1.0) for n, tokens in enumerate(_and_one(reached), start=1)]
    if isinstance(drafter, FeatureDrafter) and (ranks := drafter.network.ranks) is not None:
        found = []
        for width in sorted({1, drafter.width if drafter.width > 1 else FEATURE_TREE}):
            tree = best_tree(longest, drafter.depth if width > 1 else longest, min(width, ranks.width), ranks)
            deepest = accumulate(map(len, tree), max)
            several = verification[min(width, longest) - 1]
            for n, (tokens, levels) in enumerate(zip(_and_one(reach(tree, ranks)), deepest, strict=True), start=1):
                found.append(PossibleDraft(n, width, tokens, 1 + (levels - 1) * several))
        return found
    steps = sum(histogram.values())
    shares = [sum(count for tokens, count in histogram.items() if int(tokens) > n) / steps for n in range(1, gamma + 1)]
    level = isinstance(drafter, HeadsDrafter)
    return [PossibleDraft(n, None, tokens, 1.0 if level else n) for n, tokens in enumerate(_and_one(shares), start=1)]


def _and_one(nodes: Iterable[float]) -> Iterator[float]:
    """Tokens per step of drafts of 1, 2, ... nodes, given how often each is accepted: one more follows them."""
    return (1 + tokens for tokens in accumulate(nodes))


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
    """Measure the target's steps and return what the draft gains.

    None where the context is too short for it, and for trees drawn from a draft model, whose nodes have no rates.

    Args:
        histogram: as for ``possible_drafts``. gamma: drafted tokens per step. tau: tokens per step.
        drafting: seconds of drafting per step.
    """
    longest = max(gamma, _LONGEST)
    context = _CONTEXT if target.limit is None else min(_CONTEXT, target.limit - longest - 1)
    if context < 1 or isinstance(drafter, DrawnTrees):
        return None
    seconds = step_seconds({"target": (target, longest + 1)}, context=context, repeats=repeats)
    times = [statistics.median(seconds["target", n]) for n in range(1, longest + 2)]
    verification, share = [time / times[0] for time in times], drafting / times[0]
    drafts = possible_drafts(drafter, histogram, gamma, verification)
    width = drafter.width if isinstance(drafter, FeatureDrafter) else None
    own = max((d for d in drafts if d.width in (None, width) and d.gamma <= gamma), key=lambda d: d.gamma)
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
