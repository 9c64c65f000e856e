"""Verification of a token tree path by path, from its leaves up. One sequence at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peftlab.decoding.verification.chain import residual
from peftlab.decoding.verification.multidraft import children_of
from peftlab.decoding.verification.sampling import RandomSource


def verify_traversal(
    target_probs: Tensor,
    draft_probs: Tensor,
    tokens: Tensor,
    parents: Sequence[int],
    random: RandomSource,
) -> tuple[list[int], int]:
    """Accept or reject whole paths, leaves first; on a chain this is ``chain.verify_block``.

    Traversal verification (Weng et al. 2025, arXiv 2505.12398). The root has a = 1, a child that was drawn from q has
    min(1, a·p(x)/q(x)) with its parent's a and p. A leaf is accepted with a, and with it the path to it; the next token
    is then drawn from its p. A child that is rejected with all that is below it leaves its parent with
    p ← norm(max(0, a·p - q)) and a ← S / (S + 1 - a), S the sum of max(0, a·p - q), for the next child; a parent
    without further children is a leaf. A node is accepted with its a, whatever is below it: the output follows p.

    Lossless if each node's token was drawn from its row given its elder siblings and what is below them. Arguments and
    results as for ``multidraft.verify_tree``.
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
