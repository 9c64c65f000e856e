"""Which drafted tokens of a batch the target accepts: chains or trees, greedily or sampled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peftlab.decoding.verification.chain import verify_block, verify_greedy, verify_onehot
from peftlab.decoding.verification.multidraft import verify_tree
from peftlab.decoding.verification.sampling import RandomSource, RowRandomSource, Sampling, certain
from peftlab.decoding.verification.tree import walk_greedy

Accepted = tuple[list[list[int]], list[int]]
"""Accepted nodes of each row, as indices into its draft, and the token after them."""


def accept_chains(
    logits: Tensor, tokens: Tensor, probs: Tensor | None, sampling: Sampling, generators: Sequence[torch.Generator]
) -> Accepted:
    """Accept drafted chains.

    Args:
        logits: [b, N+1, V] of the target, after the last known token and each drafted one.
        tokens: [b, N], -1 where a row has fewer.
        probs: [b, N, V], what each token was drawn from; None if the draft is deterministic.
        sampling: how the target's tokens are chosen.
        generators: one per row.
    """
    if sampling.greedy:
        counts, following = verify_greedy(logits.argmax(-1), tokens)
    else:
        p, random = sampling.probabilities(logits), RowRandomSource(generators)
        if probs is None:
            counts, following = verify_onehot(p, tokens, random)
        else:
            counts, following = verify_block(p, probs, tokens.clamp_min(0), random)
    return [list(range(n)) for n in counts.tolist()], following.tolist()


def accept_trees(
    logits: Tensor,
    tokens: Tensor,
    probs: Tensor | None,
    parents: Sequence[Sequence[int]],
    sampling: Sampling,
    generators: Sequence[torch.Generator],
) -> Accepted:
    """Accept one path of each row's tree. Arguments as for ``accept_chains``.

    Args:
        parents: of the N nodes of each row, -1 for the root.
    """
    if sampling.greedy:
        rows = zip(logits.argmax(-1).tolist(), tokens.tolist(), parents, strict=True)
        walks = [walk_greedy(*row) for row in rows]
    else:
        p = sampling.probabilities(logits)
        walks = []
        for i, (drafted, tree, generator) in enumerate(zip(tokens, parents, generators, strict=True)):
            q = certain(drafted, p) if probs is None else probs[i]
            walks.append(verify_tree(p[i], q, drafted, tree, RandomSource(generator)))
    return [path for path, _ in walks], [token for _, token in walks]
