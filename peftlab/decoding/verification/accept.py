"""Which drafted tokens of a batch the target accepts: chains or trees, greedily or sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peftlab.decoding.verification.chain import verify_block, verify_chain, verify_greedy, verify_onehot
from peftlab.decoding.verification.multidraft import verify_kseq_tree, verify_tree
from peftlab.decoding.verification.sampling import (
    RandomSource,
    RowRandomSource,
    Sampling,
    TreeRandomSource,
    certain,
    largest,
)
from peftlab.decoding.verification.traversal import verify_traversal
from peftlab.decoding.verification.tree import walk_greedy

Accepted = tuple[list[list[int]], list[int]]
"""Accepted nodes of each row, as indices into its draft, and the token after them."""


@dataclass(frozen=True)
class Verifier:
    """How sampled drafts are verified; each is lossless.

    Attributes:
        chain: as ``chain.verify_chain``. tree: as ``multidraft.verify_tree``.
    """

    chain: Callable[[Tensor, Tensor, Tensor, RandomSource], tuple[Tensor, Tensor]]
    tree: Callable[[Tensor, Tensor, Tensor, Sequence[int], RandomSource], tuple[list[int], int]]


TRAVERSAL = Verifier(verify_block, verify_traversal)
TOKENS = Verifier(verify_chain, verify_tree)
KSEQ = Verifier(verify_chain, verify_kseq_tree)


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
        rows = zip(largest(logits).tolist(), tokens.tolist(), parents, strict=True)
        walks = [walk_greedy(*row) for row in rows]
    else:
        p = sampling.probabilities(logits)
        walks = []
        for i, (drafted, tree, generator) in enumerate(zip(tokens, parents, generators, strict=True)):
            q, verify = (certain(drafted, p[i]), verify_tree) if probs is None else (probs[i], verifier.tree)
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
        counts, following = verify_greedy(largest(logits), tokens)
    else:
        p, random = sampling.probabilities(logits), RowRandomSource(generators)
        if probs is None:
            counts, following = verify_onehot(p, tokens, random)
        else:
            counts, following = verifier.chain(p, probs, tokens.clamp_min(0), random)
    lengths, following_tokens = torch.stack((counts, following)).tolist()
    return [list(range(n)) for n in lengths], following_tokens
