"""The arithmetic of speculative decoding, without a model: the gain of chains, of trees, and of kinds of drafts.

α is the probability that a drafted token is accepted, γ the number of drafted tokens per step, c the time of
one draft step over that of one target step, τ (block efficiency) the tokens of output per target step.
Formulas without a paper named are those of Leviathan et al. 2023 (arXiv 2211.17192).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING

from peftlab.errors import PeftlabError

if TYPE_CHECKING:
    from torch import Tensor


def acceptance_rate(p: Tensor, q: Tensor) -> Tensor:
    """Return α = Σ min(p, q) = 1 - TV(p, q) = E_q[min(1, p/q)]: [..., V], [..., V] -> [...].

    Computed as 1 - ½·Σ|p - q|, which is exactly 1 where both are the same, and at least 0.

    Args:
        p, q: [..., V], distributions of target and draft.
    """
    return (1 - (p - q).abs().sum(-1) / 2).clamp_min(0)  # Σp and Σq are rounded, and may exceed 1


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


def break_even(pays: Callable[[float], bool], tolerance: float = 0.0) -> float | None:
    """Return the least acceptance at which a draft pays; None where not even a perfect one does.

    Args:
        pays: acceptance -> whether the draft pays; where it does, it does at every higher acceptance, too.
        tolerance: how far above the least one the result may be; 0: the least float at which it pays.
    """
    if not pays(1.0):
        return None
    if pays(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while high - low > tolerance and low < (middle := (low + high) / 2) < high:
        low, high = (low, middle) if pays(middle) else (middle, high)
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
    draft_time: Callable[[int, int], float],
) -> float:
    """Return tokens per second of a batch: B·τ / (target_time(B, γ+1) + draft_time(B, γ)).

    SmartSpec (Liu et al. 2024, arXiv 2406.14066). A target step over few tokens is bound by memory and costs
    the same for 1 as for 8; as the batch grows, verification becomes bound by arithmetic and drafting stops
    paying. Both show only in the two cost functions.

    Args:
        alpha: acceptance.
        gamma: drafted tokens per step; 0 is plain decoding.
        batch: sequences B.
        target_time: (B, tokens of each sequence in one target forward) -> seconds.
        draft_time: (B, γ of 1 or more) -> seconds of drafting.
    """
    _check(alpha, gamma)
    step = target_time(batch, gamma + 1) + (draft_time(batch, gamma) if gamma else 0.0)
    return batch * block_efficiency(alpha, gamma) / step


def best_goodput_gamma(
    alpha: float,
    batch: int,
    target_time: Callable[[int, int], float],
    draft_time: Callable[[int, int], float],
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


# PEARL (Liu et al. 2024, arXiv 2408.11850) lets draft and target run at the same time. A phase lasts as long as the
# slower of one target step and γ draft steps. In each, the draft writes γ tokens further along the sequence while the
# target verifies.
#
# - pre-verify: the target reads the prefix and verifies the first of these tokens alone. It yields 1 token: the
#   accepted one, after which the γ-1 others await verification, or its correction.
# - post-verify: the target reads the tokens that await, and verifies these γ-1 and the first new one, γ in all.
#   If all are accepted, it yields γ, and the γ-1 newest await; at the first rejection after n it yields n+1, and the
#   schedule is back in pre-verify.


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


# Candidate trees: the set of candidates to verify together, by the rate at which each rank is right. A node is the path
# of ranks that leads to it: (0, 2) is the third choice after the first choice. Trees are lists of paths in which a
# parent comes before its children.

Path = tuple[int, ...]


def rank_probability(depth: int, rank: int) -> float:
    """Return the estimated probability that a candidate is right where its parent is: .55, .19, .07, ... by rank.

    Args:
        depth: ignored. rank: from 0.
    """
    return 0.55 * 0.35**rank


@dataclass(frozen=True)
class RankRates:
    """The measured rates at which candidates of each depth and rank are right where their parent is.

    Attributes:
        rates: rates[depth][rank], positive and falling in rank.
    """

    rates: tuple[tuple[float, ...], ...]

    @classmethod
    def counted(cls, right: Sequence[Sequence[float]], tried: Sequence[float]) -> RankRates:
        """Return rates from counts, those of a depth falling in rank.

        Half a candidate is added to ``right`` and one to ``tried``: what was never right is not known to be impossible.

        Args:
            right: how often the candidate of each depth and rank was right. tried: how often each depth was tried.
        """
        rates = (((one + 0.5) / (n + 1) for one in ones) for ones, n in zip(right, tried, strict=True))
        return cls(tuple(tuple(accumulate(each, min)) for each in rates))

    @property
    def width(self) -> int:
        """Return how many ranks were measured."""
        return len(self.rates[0])

    def __call__(self, depth: int, rank: int) -> float:
        """Return the rate of a depth and rank, both from 0; past the measured ones, that of the last."""
        of_depth = self.rates[min(depth, len(self.rates) - 1)]
        return of_depth[min(rank, len(of_depth) - 1)]


@lru_cache
def best_tree(
    size: int,
    depth: int,
    width: int,
    probability: Callable[[int, int], float] = rank_probability,
) -> tuple[Path, ...]:
    """Return the ``size`` nodes most likely to be reached, best first, by the product of rank probabilities.

    It is the tree of the most expected tokens under ``probability``, and its first n nodes are the best tree
    of size n. Of equally likely nodes the one of the lower level comes first. Candidates run out at Σ width^d nodes.

    Args:
        size: nodes, at most.
        depth: levels, at most.
        width: children of a node, at most.
        probability: (depth from 0, rank from 0) -> probability, positive and falling in rank.
    """
    tree: list[Path] = []
    heap: list[tuple[float, int, Path]] = [(-probability(0, 0), 1, (0,))]
    while heap and len(tree) < size:
        score, level, path = heapq.heappop(heap)
        tree.append(path)
        rank = path[-1]
        # The next sibling and the first child are no likelier than the node: the heap gives nodes in falling order.
        if rank + 1 < width:
            sibling = score / probability(level - 1, rank) * probability(level - 1, rank + 1)
            heapq.heappush(heap, (sibling, level, (*path[:-1], rank + 1)))
        if level < depth:
            heapq.heappush(heap, (score * probability(level, 0), level + 1, (*path, 0)))
    return tuple(tree)


def reach_probabilities(tree: Sequence[Path], probability: Callable[[int, int], float]) -> list[float]:
    """Return the probability that each node of a tree is accepted: the product of its path's rank probabilities.

    Args:
        tree: paths. probability: as for ``best_tree``.
    """
    return [math.prod(probability(depth, rank) for depth, rank in enumerate(path)) for path in tree]


def expected_tokens(tree: Sequence[Path], probability: Callable[[int, int], float]) -> list[float]:
    """Return the expected tokens per step of a tree's first 1, 2, ... nodes: the accepted ones and one more.

    Args:
        tree: paths, a parent before its children. probability: as for ``best_tree``.
    """
    return [1 + accepted for accepted in accumulate(reach_probabilities(tree, probability))]


@lru_cache
def parents_of(tree: tuple[Path, ...]) -> tuple[int, ...]:
    """Return the parent of each node of a tree of paths, -1 for the root."""
    place = {path: i for i, path in enumerate(tree)}
    return tuple(place.get(path[:-1], -1) for path in tree)


# The kind of a draft, its size and its shape: verification is measured, drafting estimated from weight counts.
#
# S = τ / (C(n+1) + D): τ the tokens per step, C(n+1) the time of a target step over the n drafted tokens and the one
# before them, D that of drafting, both in steps over one token. A step that reads its weights from memory takes time in
# proportion to them, so D is estimated by the share of the target's weights that drafting reads.

REDUCED = 8192
"""Tokens of a reduced vocabulary in the drafts that are compared."""
FEATURE_TREE = 4
"""Children of a node, and nodes read per level, at most, in the trees of an EAGLE-3 layer that are compared."""
FEATURE_DEPTH = 6
"""Levels of an EAGLE-3 layer's tree, at most; a chain may be longer."""
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
        depth: levels at most; None for any number, in trees ``FEATURE_DEPTH``. tree: whether it drafts trees.
        width: the largest ``--width`` of the trees that are compared, where it drafts chains without that option; None:
            without it the draft's trees have all choices.
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
        rates = rank_rates(alpha)
        # With two passes the first token is the target's own choice: it is always right, the other ranks never are.
        return rates if self.passes != 2 else RankRates(((1.0, *[1e-12] * (_RANKS - 1)), *rates.rates))


@dataclass(frozen=True)
class Choice:
    """The best draft of one kind at an acceptance.

    Attributes:
        alpha: acceptance of a first choice. nodes: drafted tokens; 0: do not draft. tree: whether they form a tree.
        gain: S. width: the ``--width`` that makes it; None: none is needed.
    """

    alpha: float
    nodes: int
    tree: bool
    gain: float
    width: int | None = None


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
    return RankRates((tuple(max(alpha * (1 - alpha) ** rank, 1e-12) for rank in range(_RANKS)),))


def best_draft(cost: DraftCost, verification: Sequence[float], alpha: float) -> Choice:
    """Return the draft of the largest gain S; the smallest one wins a tie.

    Compared are the chains and trees that ``--gamma`` and ``--width`` make. A drafter fills a tree with the likeliest
    nodes, however deep they lie: where alpha rises, a tree of n nodes gets deeper, and its levels may cost more than
    they gain.

    Args:
        cost: of drafting. verification: C(1) = 1, C(2), ..., C(n+1) for drafts of at most n tokens.
        alpha: acceptance of a first choice; that of the others by ``rank_rates``.
    """
    _check(alpha)
    best = Choice(alpha, 0, False, 1.0)
    rates, longest = cost.rates(alpha), len(verification) - 1
    # Fewer choices are better only where they make a tree cheaper: a draft that reads its trees' nodes takes longer for
    # them, as the target does for as many tokens.
    for width in range(1, cost.width + 1) if cost.width else (_RANKS if cost.tree else 1,):
        several = verification[min(width, len(verification)) - 1] if cost.width else 1.0
        whole = best_tree(longest, cost.depth or (longest if width == 1 else FEATURE_DEPTH), width, rates)
        reached = reach_probabilities(whole, rates)
        for nodes in range(1, len(whole) + 1):
            levels = max(map(len, whole[:nodes]))
            time = cost.step_time(verification, nodes, levels, several)
            gain = 0.0 if time is None else (1 + sum(reached[:nodes])) / time
            if gain > best.gain * (1 + 1e-9):  # a gain that is equal to rounding is a tie
                best = Choice(alpha, nodes, nodes > levels, gain, width if cost.width and width > 1 else None)
    return best


def advise(costs: Sequence[DraftCost], verification: Sequence[float], alpha: float) -> list[KindAdvice]:
    """Return the gains that each kind of draft can reach, in the order of ``costs``.

    Args:
        costs: of each kind. verification: as for ``best_draft``. alpha: the acceptance asked about.
    """

    def advice(cost: DraftCost) -> KindAdvice:
        best = partial(best_draft, cost, verification)
        # With one pass D is a difference of two measured times, which noise can make negative.
        drafting = max(0.0, (cost.step_time(verification, 1, 1) or verification[1]) - verification[1])
        least = break_even(lambda at: best(at).nodes > 0, tolerance=1e-3)
        return KindAdvice(cost, drafting, least, [best(at) for at in GAIN_ALPHAS], best(alpha))

    return [advice(cost) for cost in costs]


def recommendation(kinds: Sequence[KindAdvice]) -> str:
    """Return a sentence that names the draft of the largest gain at the stated acceptance, and its options."""
    best = max(kinds, key=lambda kind: kind.stated.gain)
    at = f"at an acceptance of {best.stated.alpha:.2f}"
    if not best.stated.nodes:
        return f"{at} no kind of draft pays here; copy with --drafter suffix, which drafts for nothing"
    shape = f"{'a tree' if best.stated.tree else 'a chain'} of {best.stated.nodes}"
    options = f"--gamma {best.stated.nodes}"
    options += " --drafter one_pass" if best.cost.passes == 1 else ""
    options += "" if best.stated.width is None else f" --width {best.stated.width}"
    return (
        f"{at}: draft={{{best.cost.recipe}}}, {shape} ({options}), up to {best.stated.gain:.2f}x; "
        "--drafter suffix puts copying in front of it for nothing"
    )
