"""Verification of drafted chains and trees: the tokens that the target accepts, and the token that follows them.

p is the target's distribution, q the draft's, γ the number of drafted tokens, N that of a tree's nodes, V the
vocabulary. A step emits the accepted tokens and then the next token, so n_accepted + 1 in all; cutting at an
end-of-sequence token is left to the caller. Chains are verified for a batch: leading dimensions are free, and each row
has its own number of accepted tokens. Trees are verified one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from peftlab.decoding.sampling import (
    RandomSource,
    RowRandomSource,
    Sampling,
    TreeRandomSource,
    argmax,
    one_hot,
)
from peftlab.errors import PeftlabError


def acceptance_probability(p_x: Tensor, q_x: Tensor) -> Tensor:
    """Return min(1, p(x) / q(x)), and 0 where q(x) = 0.

    A token that the draft could not have drawn is rejected. So a row of zeros in q means "nothing was drafted
    here": it is always rejected, its residual is p, and ragged drafts can be padded with it.

    Args:
        p_x: [...], target probability of the drafted token.
        q_x: [...], draft probability of the same token.
    """
    return torch.where(q_x > 0, (p_x / q_x).clamp_max(1), 0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return norm(max(0, p - q)), the distribution after a rejection; p itself where that has no mass.

    It has no mass when p and q agree to rounding, and then a rejection has probability 0 to rounding as well.

    Args:
        p: [..., V].
        q: [..., V].
    """
    excess = (p - q).clamp_min(0)
    mass = excess.sum(-1, keepdim=True)
    return torch.where(mass > 0, excess / mass, p)


def verify_chain(
    target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, random: RandomSource
) -> tuple[Tensor, Tensor]:
    """Accept drafted tokens in turn with min(1, p/q); after a rejection sample the residual, else sample p.

    Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318). Lossless if each token was
    drawn from its row of ``draft_probs``.

    Args:
        target_probs: [..., γ+1, V]; row i follows the first i drafted tokens.
        draft_probs: [..., γ, V]; row i is what token i was drawn from. A row of zeros ends a shorter draft.
        tokens: [..., γ].
        random: what decides and what draws.

    Returns:
        n_accepted [...] in 0..γ and next_token [...].

    Raises:
        PeftlabError: shapes that do not fit together, as when the vocabularies differ in size.
    """
    _check_shapes(target_probs, draft_probs, tokens)
    accept = acceptance_probability(_gather(target_probs[..., :-1, :], tokens), _gather(draft_probs, tokens))
    n_accepted = _count_leading(random.bernoulli(accept))
    # Nothing was drafted after the last token, so there the residual against a row of zeros is p.
    p = _gather_row(target_probs, n_accepted)
    q = _gather_row(F.pad(draft_probs, (0, 0, 0, 1)), n_accepted)
    return n_accepted, random.draw(residual(p, q))


def verify_block(
    target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, random: RandomSource
) -> tuple[Tensor, Tensor]:
    """Verify a drafted chain as a whole: accepts at least as many tokens as ``verify_chain``, in expectation.

    Block verification (Sun et al. 2024, arXiv 2403.10444). With P_0 = 1, P_i = min(1, P_{i-1}·p(x_i)/q(x_i)) and
    S_i = Σ_x max(0, P_i·p(x) - q(x)) over the distributions after i tokens, token i passes with
    h_i = S_i / (S_i + 1 - P_i), on its own; the chain is accepted up to the last token that passes, and
    norm(max(0, P_i·p - q)) is drawn there. Lossless as ``verify_chain``. After the last drafted token q is a row of
    zeros, which makes h = P and the draw one from p.

    Args:
        target_probs: [..., γ+1, V]. draft_probs: [..., γ, V]. tokens: [..., γ]. random: decides and draws.

    Returns:
        n_accepted [...] in 0..γ and next_token [...].
    """
    _check_shapes(target_probs, draft_probs, tokens)
    drafted = F.pad(draft_probs, (0, 0, 0, 1))  # [..., γ+1, V]
    p_x, q_x = _gather(target_probs[..., :-1, :], tokens), _gather(draft_probs, tokens)
    ratios = torch.where(q_x > 0, p_x / q_x, 0)
    path = [torch.ones_like(ratios[..., 0])] if ratios.shape[-1] else []
    for ratio in ratios.unbind(-1):
        path.append((path[-1] * ratio).clamp_max(1))
    kept = torch.stack(path, -1) if path else target_probs.new_ones(target_probs.shape[:-1])  # P, [..., γ+1]
    surplus = (kept[..., None] * target_probs - drafted).clamp_min(0).sum(-1)  # S, [..., γ+1]
    room = surplus + (1 - kept)  # in this order: exactly S where P = 1, and so h = 1
    passed = random.bernoulli(torch.where(room > 0, surplus / room, 1)[..., 1:])
    places = torch.arange(1, tokens.shape[-1] + 1, device=tokens.device)
    n_accepted = F.pad(passed * places, (1, 0)).amax(-1)
    p = _gather_row(kept[..., None] * target_probs, n_accepted)
    return n_accepted, random.draw(residual(p, _gather_row(drafted, n_accepted)))


def verify_onehot(target_probs: Tensor, tokens: Tensor, random: RandomSource) -> tuple[Tensor, Tensor]:
    """Verify a deterministic draft (greedy, n-gram): accept x with p(x), else sample p without x.

    This is ``verify_chain`` with q one-hot at each token; a token of -1 ends a shorter draft.

    Args:
        target_probs: [..., γ+1, V].
        tokens: [..., γ].
        random: what decides and what draws.

    Returns:
        n_accepted [...] and next_token [...].
    """
    return verify_chain(target_probs, one_hot(tokens, target_probs), tokens.clamp_min(0), random)


def verify_greedy(target_argmax: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Accept tokens while they are the target's own greedy choice; then emit that choice.

    Args:
        target_argmax: [..., γ+1]; entry i follows the first i drafted tokens.
        tokens: [..., γ]; a token of -1 ends a shorter draft.

    Returns:
        n_accepted [...] and next_token [...].
    """
    if target_argmax.shape[-1] != tokens.shape[-1] + 1:
        raise PeftlabError(f"target_argmax {tuple(target_argmax.shape)}: must be one longer than {tuple(tokens.shape)}")
    n_accepted = _count_leading(tokens == target_argmax[..., :-1])
    return n_accepted, _gather(target_argmax, n_accepted)


def walk_greedy(choices: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> tuple[list[int], int]:
    """Follow the target's own choices down a tree as far as they were drafted.

    Args:
        choices: N+1 greedy tokens; entry 0 follows the root, entry i+1 follows node i.
        tokens: of the N nodes; -1 where nothing was drafted.
        parents: of the N nodes.

    Returns:
        The accepted path as node indices, and the next token after it.
    """
    children = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    path: list[int] = []
    node = -1
    while (below := children.get((node, choices[node + 1]))) is not None:
        path.append(below)
        node = below
    return path, choices[node + 1]


def _check_shapes(target_probs: Tensor, draft_probs: Tensor, tokens: Tensor) -> None:
    *lead, gamma, vocab = draft_probs.shape
    if target_probs.shape[-1] != vocab:
        raise PeftlabError(
            f"draft_probs: vocabulary of {vocab}, but the target's has {target_probs.shape[-1]}; "
            "cut both to the tokenizer's size before the softmax"
        )
    if tuple(tokens.shape) != (*lead, gamma) or tuple(target_probs.shape) != (*lead, gamma + 1, vocab):
        raise PeftlabError(
            f"shapes do not fit: target_probs {tuple(target_probs.shape)} must be [..., γ+1, V], "
            f"draft_probs {tuple(draft_probs.shape)} [..., γ, V], tokens {tuple(tokens.shape)} [..., γ]"
        )


def _gather(values: Tensor, index: Tensor) -> Tensor:
    """Return values[..., index]: [..., V], [...] -> [...]."""
    return values.gather(-1, index[..., None]).squeeze(-1)


def _gather_row(values: Tensor, index: Tensor) -> Tensor:
    """Return values[..., index, :]: [..., N, V], [...] -> [..., V]."""
    return values.take_along_dim(index[..., None, None], dim=-2).squeeze(-2)


def _count_leading(accepted: Tensor) -> Tensor:
    """Return the number of leading True along the last dimension: [..., γ] -> [...]."""
    return accepted.long().cumprod(-1).sum(-1)


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
        verify: verifies the drafts of one position.

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

    Args:
        tokens: [N], -1 where nothing was drafted. parents: N parent nodes.

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


def verify_traversal(
    target_probs: Tensor,
    draft_probs: Tensor,
    tokens: Tensor,
    parents: Sequence[int],
    random: RandomSource,
) -> tuple[list[int], int]:
    """Accept or reject whole paths, leaves first; on a chain this is ``verify_block``.

    Traversal verification (Weng et al. 2025, arXiv 2505.12398). The root has a = 1, a child that was drawn from q has
    min(1, a·p(x)/q(x)) with its parent's a and p. A leaf is accepted with a, and with it the path to it; the next token
    is then drawn from its p. A child that is rejected with all that is below it leaves its parent with
    p ← norm(max(0, a·p - q)) and a ← S / (S + 1 - a), S the sum of max(0, a·p - q), for the next child; a parent
    without further children is a leaf. A node is accepted with its a, whatever is below it: the output follows p.

    Lossless if each node's token was drawn from its row given its elder siblings and what is below them.

    Args:
        target_probs, draft_probs, tokens, parents, random: as for ``verify_tree``.

    Returns:
        The accepted path as node indices from the root down, and the next token after it.
    """
    children, drafted = children_of(tokens, parents), tokens.tolist()

    def accept(node: int, kept: Tensor) -> tuple[list[int], int] | None:
        """Return the accepted path below a node, and the token after it; None where the node itself is rejected."""
        p = target_probs[node + 1]
        for child in children.get(node, []):
            x, q = drafted[child], draft_probs[child]
            ratio = torch.where(q[x] > 0, kept * p[x] / q[x], 0)
            if (below := accept(child, ratio.clamp_max(1))) is not None:
                return [child, *below[0]], below[1]
            excess = (kept * p - q).clamp_min(0).sum()
            room = excess + (1 - kept)  # in this order: exactly the excess where a = 1, which then stays 1
            p, kept = residual(kept * p, q), torch.where(room > 0, excess / room, 1)
        # The root's a stays 1, and a tree of nothing takes no number but that of the draw, however far it is padded.
        return ([], int(random.draw(p))) if node < 0 or random.bernoulli(kept) else None

    found = accept(-1, target_probs.new_ones(()))
    assert found is not None
    return found


Accepted = tuple[list[list[int]], list[int]]
"""Accepted nodes of each row, as indices into its draft, and the token after them."""


@dataclass(frozen=True)
class Verifier:
    """A pair of lossless functions that verify sampled drafts.

    Attributes:
        chain: a function such as ``verify_chain``. tree: a function such as ``verify_tree``.
    """

    chain: Callable[[Tensor, Tensor, Tensor, RandomSource], tuple[Tensor, Tensor]]
    tree: Callable[[Tensor, Tensor, Tensor, Sequence[int], RandomSource], tuple[list[int], int]]


TRAVERSAL = Verifier(verify_block, verify_traversal)
TOKENS = Verifier(verify_chain, verify_tree)


def accept(
    logits: Tensor,
    tokens: Tensor,
    probs: Tensor | None,
    parents: Sequence[Sequence[int]] | None,
    sampling: Sampling,
    generators: Sequence[torch.Generator],
    verifier: Verifier = TRAVERSAL,
) -> Accepted:
    """Accept drafted chains, or one path of each row's tree.

    Args:
        logits: [b, N+1, V] of the target, after the last known token and each drafted one.
        tokens: [b, N], -1 where a row has fewer.
        probs: [b, N, V], what each token was drawn from; None if the draft is deterministic.
        parents: of the N nodes of each row, -1 for the root; None: all are chains.
        sampling: how the target's tokens are chosen.
        generators: one per row.
        verifier: of drafts that were drawn. One that is deterministic is verified token by token: none accepts more.
    """
    if parents is None:
        return _accept_chains(logits, tokens, probs, sampling, generators, verifier)
    if sampling.greedy:
        rows = zip(argmax(logits).tolist(), tokens.tolist(), parents, strict=True)
        walks = [walk_greedy(*row) for row in rows]
    else:
        p = sampling.probabilities(logits)
        walks = []
        for i, (drafted, tree, generator) in enumerate(zip(tokens, parents, generators, strict=True)):
            q, verify = (one_hot(drafted, p[i]), verify_tree) if probs is None else (probs[i], verifier.tree)
            walks.append(verify(p[i], q, drafted, tree, TreeRandomSource(generator)))
    return [path for path, _ in walks], [token for _, token in walks]


def _accept_chains(
    logits: Tensor,
    tokens: Tensor,
    probs: Tensor | None,
    sampling: Sampling,
    generators: Sequence[torch.Generator],
    verifier: Verifier,
) -> Accepted:
    if sampling.greedy:
        counts, following = verify_greedy(argmax(logits), tokens)
    else:
        p, random = sampling.probabilities(logits), RowRandomSource(generators)
        if probs is None:
            counts, following = verify_onehot(p, tokens, random)
        else:
            counts, following = verifier.chain(p, probs, tokens.clamp_min(0), random)
    lengths, following_tokens = torch.stack((counts, following)).tolist()
    return [list(range(n)) for n in lengths], following_tokens
