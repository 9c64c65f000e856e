"""Recommend a kind of draft, its size and its shape: verification is measured, drafting estimated from weight counts.

S = τ / (C(n+1) + D): τ the tokens per step, C(n+1) the time of a target step over the n drafted tokens and the one
before them, D that of drafting, both in steps over one token. A step that reads its weights from memory takes time in
proportion to them, so D is estimated by the share of the target's weights that drafting reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peftlab.errors import PeftlabError

if TYPE_CHECKING:
    from peftlab.decoding.trees import RankRates


REDUCED = 8192
"""Tokens of a reduced vocabulary in the drafts that are compared."""
FEATURE_TREE = 4
"""Children of a node, and nodes read per level, in the trees of an EAGLE-3 layer that are compared."""
GAIN_ALPHAS = (0.3, 0.5, 0.7)
_RANKS = 8  # candidates per position that are modelled; further ones are hardly ever right


@dataclass(frozen=True)
class TargetWeights:
    """The weights that a target step reads, as counts of numbers.

    Attributes:
        layer: of one layer. layers: how many. vocabulary, hidden: rows and columns of the LM head.
    """

    layer: float
    layers: int
    vocabulary: int
    hidden: int

    @property
    def total(self) -> float:
        """Return the numbers that a step over one token reads."""
        return self.layer * self.layers + self.vocabulary * self.hidden


@dataclass(frozen=True)
class DraftCost:
    """The cost of drafting with one kind of draft, in target steps over one token.

    Attributes:
        kind: of ``draft.kind``. size: in words. recipe: the ``draft`` section that makes it.
        once: per step, however many tokens are drafted. each: per level, one after the other.
        depth: levels at most; None for any number. tree: whether it drafts trees.
        width: the ``--width`` that its trees need; None: they need none.
        passes: of a draft that is the target itself with masks. 2: drafting is a target step over as many tokens as are
            drafted, and the first of these is the target's own. 1: the verification reads masks, too, one for each
            level behind each token. None: any other draft.
    """

    kind: str
    size: str
    recipe: str
    once: float
    each: float
    depth: int | None = None
    tree: bool = False
    width: int | None = None
    passes: int | None = None

    def drafting_time(self, levels: int, several: float = 1.0) -> float:
        """Return D, the time of drafting: once + each · (1 + (levels - 1) · several).

        Args:
            levels: of the draft, one or more. several: time of a level after the first, relative to the first.
        """
        return self.once + self.each * (1 + (levels - 1) * several)

    def step_time(self, verification: Sequence[float], nodes: int, levels: int, several: float = 1.0) -> float | None:
        """Return C(n+1) + D of a draft, or None where verification of that many tokens was not measured.

        Args:
            verification: C(1) = 1, C(2), ... nodes, levels: of the draft. several: as for ``drafting_time``.
        """
        # With one pass, each of the nodes + 1 tokens is followed by a mask per level, all read in the verification.
        rows = (nodes + 1) * (levels + 1) if self.passes == 1 else nodes + 1
        if rows > len(verification):
            return None
        return verification[rows - 1] + (
            verification[levels - 1] if self.passes == 2 else self.drafting_time(levels, several)
        )

    def rates(self, alpha: float) -> RankRates:
        """Return the probabilities that choices are right by depth and rank, where a first choice is with ``alpha``."""
        from peftlab.decoding.trees import RankRates

        rates = rank_rates(alpha)
        # With two passes the first token is the target's own choice: it is always right, the other ranks never are.
        return rates if self.passes != 2 else RankRates(((1.0, *[1e-12] * (_RANKS - 1)), *rates.rates))


@dataclass(frozen=True)
class Choice:
    """The best draft of one kind at an acceptance.

    Attributes:
        alpha: acceptance of a first choice. nodes: drafted tokens; 0: do not draft. tree: whether they form a tree.
        gain: S.
    """

    alpha: float
    nodes: int
    tree: bool
    gain: float


@dataclass(frozen=True)
class KindAdvice:
    """The gains that one kind of draft can reach.

    Attributes:
        cost: of drafting. drafting: D of one token.
        break_even: the least acceptance at which it gains anything; None where none does.
        choices: the best draft at each of ``GAIN_ALPHAS``. stated: at the acceptance asked about.
    """

    cost: DraftCost
    drafting: float
    break_even: float | None
    choices: list[Choice]
    stated: Choice


def rank_rates(alpha: float) -> RankRates:
    """Return the probabilities α, α(1-α), α(1-α)², ... that the choices of rank 0, 1, 2, ... are right.

    Each choice is right as often as the first one where those before it are not.
    """
    from peftlab.decoding.trees import RankRates

    return RankRates((tuple(max(alpha * (1 - alpha) ** rank, 1e-12) for rank in range(_RANKS)),))


def best_draft(cost: DraftCost, verification: Sequence[float], alpha: float) -> Choice:
    """Return the draft of the largest gain S; the smallest one wins a tie.

    Args:
        cost: of drafting. verification: C(1) = 1, C(2), ..., C(n+1) for drafts of at most n tokens.
        alpha: acceptance of a first choice; that of the others by ``rank_rates``.
    """
    from peftlab.decoding.trees import best_tree, reach_probabilities

    if not 0 <= alpha <= 1:
        raise PeftlabError(f"alpha: {alpha} is not a probability")
    best = Choice(alpha, 0, False, 1.0)
    rates = cost.rates(alpha)
    for width in (1, cost.width or _RANKS) if cost.tree else (1,):
        # A draft that reads the nodes of its trees takes longer for them, as the target does for as many tokens.
        several = verification[min(width, len(verification)) - 1] if cost.width else 1.0
        whole = best_tree(len(verification) - 1, cost.depth or len(verification) - 1, width, rates)
        reached = reach_probabilities(whole, rates)
        for nodes in range(1, len(whole) + 1):
            levels = max(map(len, whole[:nodes]))
            time = cost.step_time(verification, nodes, levels, several)
            gain = 0.0 if time is None else (1 + sum(reached[:nodes])) / time
            if gain > best.gain * (1 + 1e-9):  # a gain that is equal to rounding is a tie
                best = Choice(alpha, nodes, nodes > levels, gain)
    return best


def advise(costs: Sequence[DraftCost], verification: Sequence[float], alpha: float) -> list[KindAdvice]:
    """Return the gains that each kind of draft can reach, in the order of ``costs``.

    Args:
        costs: of each kind. verification: as for ``best_draft``. alpha: the acceptance asked about.
    """
    return [
        KindAdvice(
            cost,
            (cost.step_time(verification, 1, 1) or verification[1]) - verification[1],
            _break_even(cost, verification),
            [best_draft(cost, verification, at) for at in GAIN_ALPHAS],
            best_draft(cost, verification, alpha),
        )
        for cost in costs
    ]


def _break_even(cost: DraftCost, verification: Sequence[float]) -> float | None:
    """Return the least acceptance of a first choice at which drafting gains anything; None where none does."""
    if not best_draft(cost, verification, 1.0).nodes:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if best_draft(cost, verification, middle).nodes else (middle, high)
    return high


def recommendation(kinds: Sequence[KindAdvice]) -> str:
    """Return a sentence that names the draft of the largest gain at the stated acceptance, and its options."""
    best = max(kinds, key=lambda kind: kind.stated.gain)
    at = f"at an acceptance of {best.stated.alpha:.2f}"
    if not best.stated.nodes:
        return f"{at} no kind of draft pays here; copy with --drafter suffix, which drafts for nothing"
    shape = f"{'a tree' if best.stated.tree else 'a chain'} of {best.stated.nodes}"
    options = f"--gamma {best.stated.nodes}"
    options += " --drafter one_pass" if best.cost.passes == 1 else ""
    options += f" --width {best.cost.width}" if best.stated.tree and best.cost.width else ""
    return (
        f"{at}: draft={{{best.cost.recipe}}}, {shape} ({options}), up to {best.stated.gain:.2f}x; "
        "--drafter suffix puts copying in front of it for nothing"
    )
