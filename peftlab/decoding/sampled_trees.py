"""Trees drawn from a draft model, level by level: RSD, SpecInfer, and K-SEQ's verification of independent drafts.

Each node is kept with the distribution that it was drawn from, by which verification stays exact (``sampling.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from peftlab.decoding.cache import shape_of
from peftlab.decoding.decode import DraftCandidate, Proposal, Row, TargetState
from peftlab.decoding.model_drafter import ModelDrafter, context_room
from peftlab.decoding.recurrent import StateCache
from peftlab.decoding.sampling import (
    RandomSource,
    RowRandomSource,
    Verifier,
    acceptance_probability,
    argmax,
    residual,
    verify_chain,
    verify_tree,
)
from peftlab.errors import PeftlabError


@dataclass
class DrawnTrees(ModelDrafter):
    """A drafter of trees of γ nodes that are drawn level by level; in greedy decoding, of the most probable tokens.

    The target verifies each node against what it was drawn from, its elder siblings removed where they were, so that
    the output is exact. Every level reads the tree above it in one pass.

    Attributes:
        grow: makes what a tree grows by.
    """

    grow: GrowthFactory = field(default_factory=lambda: rsd_c(2))
    provides = frozenset[str]()
    has_logits = False

    def candidates(self, acceptance: Sequence[float], verification: Sequence[float]) -> list[DraftCandidate]:
        """Return no candidates: the acceptance of the nodes of its trees was not measured."""
        return []

    def start(self, rows: list[Row], state: TargetState) -> None:
        super().start(rows, state)
        if isinstance(self._cache, StateCache):
            raise PeftlabError("draft: a state-space model drafts chains only, no trees; give width 1")

    def propose(self, rows: list[Row], budgets: list[int]) -> Proposal:
        budgets = [context_room(self.engine, row, budget) for row, budget in zip(rows, budgets, strict=True)]
        nodes, device, greedy = max(budgets), self.engine.device, self._sampling.greedy
        if nodes == 0:
            return Proposal.empty(len(rows), device)
        random = None if greedy else RowRandomSource([row.generator for row in rows])
        growth, logits = self.grow(), self._catch_up(rows).logits[:, -1:]
        # The slots past these tokens will have a tree, not a chain: the next step reads its accepted tokens again.
        self._read |= {row.index: len(row.tokens) for row in rows}
        tokens, drawn_from = torch.empty(len(rows), 0, dtype=torch.long, device=device), list[Tensor]()
        nodes_above = torch.full((len(rows), 1), -1, device=device)  # the last level, as nodes
        parents = tokens
        while True:
            level = growth.level(logits.float().softmax(-1) if greedy else self._sampling.probabilities(logits), random)
            parents = torch.cat((parents, nodes_above.gather(1, level.above)), 1)
            nodes_above = torch.arange(tokens.shape[1], tokens.shape[1] + level.tokens.shape[1], device=device)
            nodes_above = nodes_above.expand(len(rows), -1)
            tokens = torch.cat((tokens, level.tokens), 1)
            drawn_from.append(level.drawn_from)
            if tokens.shape[1] >= nodes:
                break
            logits = self._leaf_logits(rows, tokens, parents, level.tokens.shape[1])
        drafted = torch.arange(nodes, device=device) < torch.tensor(budgets, device=device)[:, None]
        tokens = tokens[:, :nodes].where(drafted, -1)
        probs = None if greedy else torch.cat(drawn_from, 1)[:, :nodes].where(drafted[..., None], 0)
        return Proposal(tokens, probs, parents=[tuple(line) for line in parents[:, :nodes].tolist()])

    def _leaf_logits(self, rows: list[Row], tokens: Tensor, parents: Tensor, width: int) -> Tensor:
        """Return the logits of the last ``width`` nodes of trees [b, n] below each row's last token, [b, width, V]."""
        n = tokens.shape[1]
        last = torch.tensor([[row.tokens[-1]] for row in rows], device=tokens.device)
        tree = shape_of([tuple(line) for line in parents.tolist()])
        starts = [len(row.tokens) - 1 for row in rows]
        block = self._cache.block([row.slot for row in rows], starts, n + 1, tree)
        keep = list(range(n + 1 - width, n + 1))
        return self.engine.forward(self._cache, torch.cat((last, tokens.clamp_min(0)), 1), block, keep).logits


@dataclass(frozen=True)
class Level:
    """The next level of b trees, siblings in the order in which they are verified.

    Attributes:
        tokens: [b, w]; -1 where nothing was left to draw.
        above: [b, w], the place of each one's parent in the level above.
        drawn_from: [b, w, V], what each was drawn from given its elder siblings; zeros at -1.
    """

    tokens: Tensor
    above: Tensor
    drawn_from: Tensor


class Growth(Protocol):
    """The growth of trees, level by level; each draft has an object of its own."""

    def level(self, q: Tensor, random: RandomSource | None) -> Level:
        """Return the level below the last one.

        Args:
            q: [b, k, V], the draft's distributions after each node of the last level, after the root at first.
            random: the draws, of generators of their own for the rows; None takes the most probable tokens.
        """
        ...


@dataclass
class Chains:
    """A growth into ``width`` chains, which begin with ``width`` draws of the first token.

    Without replacement they all differ: recursive rejection sampling with constant branching (RSD-C, Jeon et al. 2024,
    arXiv 2402.14160). With replacement the chains are independent drafts (SpecInfer, Miao et al. 2023, arXiv
    2305.09781; SpecTr, Sun et al. 2023, arXiv 2310.15141): equal beginnings share their nodes, and a sibling that
    repeats an elder one has no children of its own. Without randomness the first tokens differ either way.
    """

    width: int
    replacement: bool
    _eldest: Tensor | None = field(default=None, init=False)  # [b, w], the first place with the same tokens so far

    def level(self, q: Tensor, random: RandomSource | None) -> Level:
        if self._eldest is None:
            tokens, drawn_from = self._first_tokens(q[:, 0], random)
            above = torch.zeros_like(tokens)
        else:
            above = self._eldest
            drawn_from = q.gather(1, above[..., None].expand_as(q))
            tokens = argmax(drawn_from) if random is None else random.draw(drawn_from)
        tokens = tokens.where(drawn_from.sum(-1) > 0, -1)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        alike = (above[:, :, None] == above[:, None]) & (tokens[:, :, None] == tokens[:, None])
        self._eldest = alike.long().argmax(-1) if self.replacement else places.expand_as(tokens)
        return Level(tokens, above, drawn_from)

    def _first_tokens(self, q: Tensor, random: RandomSource | None) -> tuple[Tensor, Tensor]:
        width = min(self.width, q.shape[-1])
        if random is None:
            return q.topk(width, -1).indices, q[:, None].expand(-1, width, -1)
        return draw_drafts(q, width, random, self.replacement)


@dataclass
class StochasticBeam:
    """A growth into the first ``width`` sequences of each length, in an order drawn without replacement.

    Recursive rejection sampling with stochastic beam search (RSD-S, Jeon et al. 2024, arXiv 2402.14160). With φ the
    log-probability of a path and G_c ~ Gumbel(φ_c) of the children of a node, Z the largest of them, a child has
    G̃_c = -log(exp(-G̃_parent) - exp(-Z) + exp(-G_c)), at most its parent's; the largest G̃ of a level are kept, in their
    order. So the children of a node are drawn without replacement, and their number follows the draft's probabilities.
    Without randomness it is a beam search.
    """

    width: int
    _path: Tensor | None = field(default=None, init=False)  # [b, k], φ of the last level, and its G̃
    _value: Tensor | None = field(default=None, init=False)

    def level(self, q: Tensor, random: RandomSource | None) -> Level:
        b, k, v = q.shape
        if self._path is None or self._value is None:
            self._path = self._value = q.new_zeros(b, 1)
        paths = self._path[..., None] + q.log()
        values = paths if random is None else _bounded_gumbels(self._value[..., None], paths, random)
        self._value, best = values.flatten(1).topk(min(self.width, k * v), -1)
        self._path = paths.flatten(1).gather(1, best)
        above, tokens = best // v, best % v
        drawn_from = _exclude_elder_siblings(q, above, tokens)
        drawn = self._value > -torch.inf
        return Level(tokens.where(drawn, -1), above, drawn_from.where(drawn[..., None], 0))


def _bounded_gumbels(bound: Tensor, paths: Tensor, random: RandomSource) -> Tensor:
    """Return Gumbels with locations ``paths`` [b, k, V], given that the largest of a node is ``bound`` [b, k, 1]."""
    free = paths - random.exponentials(paths).log()
    # -log(exp(-bound) - exp(-Z) + exp(-G)) = bound - softplus(d), d = bound - G + log(1 - exp(G - Z)), which does not
    # overflow; d is -inf where G = Z, and the result then the bound itself.
    shift = bound - free + torch.log1p(-(free - free.amax(-1, keepdim=True)).exp())
    return (bound - torch.nn.functional.softplus(shift)).where(paths > -torch.inf, -torch.inf)


def _exclude_elder_siblings(q: Tensor, above: Tensor, tokens: Tensor) -> Tensor:
    """Return the distribution that each node was drawn from, [b, w, V]: its parent's q without elder siblings.

    Args:
        q: [b, k, V] of the level above. above, tokens: [b, w], as in ``Level``.
    """
    rows = q.gather(1, above[..., None].expand(-1, -1, q.shape[-1]))
    for elder in range(tokens.shape[1] - 1):
        younger = rows[:, elder + 1 :]
        place = tokens[:, elder, None, None].expand(-1, younger.shape[1], 1)
        sibling = (above[:, elder + 1 :] == above[:, elder, None])[..., None]
        younger.scatter_(2, place, younger.gather(2, place).where(~sibling, 0))
    return rows / rows.sum(-1, keepdim=True)


GrowthFactory = Callable[[], Growth]
"""Makes the growth of a new tree."""


def rsd_c(width: float) -> GrowthFactory:
    """Return a factory of ``Chains`` without replacement, ``width`` of them."""
    return lambda: Chains(int(width), replacement=False)


def rsd_s(width: float) -> GrowthFactory:
    """Return a factory of ``StochasticBeam`` growths of ``width`` sequences."""
    return lambda: StochasticBeam(int(width))


def specinfer(width: float) -> GrowthFactory:
    """Return a factory of ``Chains`` with replacement, ``width`` of them."""
    return lambda: Chains(int(width), replacement=True)


def draw_drafts(draft_probs: Tensor, k: int, random: RandomSource, replacement: bool) -> tuple[Tensor, Tensor]:
    """Draw k drafts for one position, each with the distribution that it was drawn from.

    Without replacement, each drawn token leaves q, which is renormalised; once q is used up, its row is
    zeros, which verification reads as "nothing drafted".

    Args:
        draft_probs: [..., V].
        k: how many.
        random: the draws.
        replacement: whether a token may be drawn again.

    Returns:
        tokens [..., k] and rows [..., k, V], as ``verify_drafts`` and ``verify_tree`` take them.
    """
    tokens, rows = [], []
    q = draft_probs
    for _ in range(k):
        x = random.draw(q)
        tokens.append(x)
        rows.append(q)
        if not replacement:
            q = q.scatter(-1, x[..., None], 0)
            mass = q.sum(-1, keepdim=True)
            q = torch.where(mass > 0, q / mass, q)
    return torch.stack(tokens, -1), torch.stack(rows, -2)


def kseq_rho(target_probs: Tensor, draft_probs: Tensor, k: int) -> float:
    """Return ρ* in [1, k], the least ρ at which K-SEQ with k drafts is exact.

    It solves p_acc(ρ) = ρ·β(ρ), with β = Σ min(q, p/ρ) and p_acc = 1 - (1-β)^k (SpecTr, arXiv 2310.15141).
    p_acc falls with ρ and ρ·β rises, so the root is unique where p and q overlap; bisection runs until its
    interval cannot be halved and returns the upper end, where the scheme is valid. Where they do not, ρ* = k.

    Args:
        target_probs: [V].
        draft_probs: [V].
        k: number of drafts, drawn with replacement.
    """
    valid, invalid = float(k), 1.0
    if _accept_ratio(target_probs, draft_probs, k, invalid) <= invalid:
        return invalid
    while invalid < (middle := (valid + invalid) / 2) < valid:
        if _accept_ratio(target_probs, draft_probs, k, middle) <= middle:
            valid = middle
        else:
            invalid = middle
    return valid


def verify_kseq(
    target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, random: RandomSource
) -> tuple[int | None, int]:
    """Try independent drafts for one position together: accept the first that passes min(1, p/(ρ*·q)).

    K-SEQ of SpecTr (Sun et al. 2023, arXiv 2310.15141). Where none passes, p ← norm(max(0, p - min(q, p/ρ)·p_acc/β)).
    Drafts of one distribution are tried together, runs of them in turn, so that other drafts may stand beside them;
    alone, a draft is tried as by ``verify_drafts``, which has the same arguments and results. Lossless if the drafts of
    a run were drawn with replacement. The index of an accepted token is that of the first draft equal to it.

    Args:
        target_probs: [V]. draft_probs: [k, V]. tokens: [k]. random: decides and draws.

    Returns:
        The index of the accepted draft, or None, and the emitted token.
    """
    p, drafted, end = target_probs, tokens.tolist(), 0
    while end < len(drafted):
        begin, q = end, draft_probs[end]
        while end < len(drafted) and torch.equal(draft_probs[end], q):
            end += 1
        rho = kseq_rho(p, q, end - begin)
        for x in drafted[begin:end]:
            if random.bernoulli(acceptance_probability(p[x], rho * q[x])):
                return drafted.index(x, begin), x
        p = residual(p, torch.minimum(q, p / rho) * _accept_ratio(p, q, end - begin, rho))
    return None, int(random.draw(p))


def verify_kseq_tree(
    target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, parents: Sequence[int], random: RandomSource
) -> tuple[list[int], int]:
    """Walk down a tree as ``verify_tree`` does, with ``verify_kseq`` over each node's children.

    Args:
        target_probs, draft_probs, tokens, parents, random: as for ``verify_tree``, as is the result.
    """
    return verify_tree(target_probs, draft_probs, tokens, parents, random, verify_kseq)


def _accept_ratio(p: Tensor, q: Tensor, k: int, rho: float) -> float:
    """Return p_acc / β = Σ_{j<k} (1-β)^j, which stays finite where p and q are disjoint and β = 0."""
    miss = float((q - p / rho).clamp_min(0).sum())  # 1 - β, exactly 0 where p = q and ρ = 1
    return sum(miss**j for j in range(k))


KSEQ = Verifier(verify_chain, verify_kseq_tree)
