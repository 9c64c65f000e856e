"""Verification of several drafts for one position, and of token trees. One sequence at a time.

p is the target's distribution, q the draft's, k the number of drafts, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from peftlab.decoding.verification.chain import acceptance_probability, residual
from peftlab.decoding.verification.sampling import RandomSource
from peftlab.errors import PeftlabError


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


def verify_drafts(
    target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, random: RandomSource
) -> tuple[int | None, int]:
    """Try k drafts for one position in turn: accept x_i with min(1, p/q_i), else p ← norm(max(0, p - q_i)).

    Lossless if x_i was drawn from row i given the drafts before it. Equal rows are drafts with replacement
    (SpecInfer, arXiv 2305.09781); rows that lose each drawn token are recursive rejection sampling without
    replacement (RSD, arXiv 2402.14160), which accepts at least as often; rows may come from different models.

    Args:
        target_probs: [V].
        draft_probs: [k, V]; k may be 0, and then the token is a plain draw from p.
        tokens: [k].
        random: what decides and what draws.

    Returns:
        The index of the accepted draft, or None, and the emitted token.
    """
    p = target_probs
    for i, x in enumerate(tokens.tolist()):
        q = draft_probs[i]
        if random.bernoulli(acceptance_probability(p[x], q[x])):
            return i, x
        p = residual(p, q)
    return None, int(random.draw(p))


VerifyDrafts = Callable[[Tensor, Tensor, Tensor, RandomSource], tuple[int | None, int]]
"""Verifies several drafts for one position, as ``verify_drafts`` does."""


def verify_tree(
    target_probs: Tensor,
    draft_probs: Tensor,
    tokens: Tensor,
    parents: Sequence[int],
    random: RandomSource,
    verify: VerifyDrafts = verify_drafts,
) -> tuple[list[int], int]:
    """Walk down a token tree: ``verify`` each node's children, in order, until none is accepted.

    SpecInfer's multi-step verification (arXiv 2305.09781). With ``verify_drafts`` it is lossless if each node's token
    was drawn from its row given its elder siblings. A chain is the tree in which each node has one child.

    Args:
        target_probs: [N+1, V]; row 0 follows the prefix (the root), row i+1 follows node i.
        draft_probs: [N, V]; row i is what node i's token was drawn from.
        tokens: [N]; -1 where nothing was drafted, which takes no random number: a row's output does not depend on how
            far its tree is padded.
        parents: N parent nodes, -1 for the root; a parent comes before its children.
        random: what decides and what draws.
        verify: of the drafts of one position.

    Returns:
        The accepted path as node indices from the root down, and the next token after it.

    Raises:
        PeftlabError: a parent that does not come before its child.
    """
    children = children_of(tokens, parents)
    path: list[int] = []
    node = -1
    while True:
        below = children.get(node, [])
        accepted, token = verify(target_probs[node + 1], draft_probs[below], tokens[below], random)
        if accepted is None:
            return path, token
        node = below[accepted]
        path.append(node)


def children_of(tokens: Tensor, parents: Sequence[int]) -> dict[int, list[int]]:
    """Return the children of each node that has some, in order, -1 for the root; a node of token -1 is no child.

    Raises:
        PeftlabError: a parent that does not come before its child.
    """
    children: dict[int, list[int]] = {}
    for node, (parent, token) in enumerate(zip(parents, tokens.tolist(), strict=True)):
        if not -1 <= parent < node:
            raise PeftlabError(f"parents[{node}]: {parent} is neither -1 (the root) nor an earlier node")
        if token >= 0:
            children.setdefault(parent, []).append(node)
    return children


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
    a run were drawn with replacement. Of equal drafts the first is returned.
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
    """Walk down a tree as ``verify_tree`` does, with ``verify_kseq`` over each node's children."""
    return verify_tree(target_probs, draft_probs, tokens, parents, random, verify_kseq)


def _accept_ratio(p: Tensor, q: Tensor, k: int, rho: float) -> float:
    """p_acc / β = Σ_{j<k} (1-β)^j, which stays finite where p and q are disjoint and β = 0."""
    miss = float((q - p / rho).clamp_min(0).sum())  # 1 - β, exactly 0 where p = q and ρ = 1
    return sum(miss**j for j in range(k))
