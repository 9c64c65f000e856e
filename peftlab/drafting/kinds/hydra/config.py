"""The section ``draft: {kind: hydra}``."""

from __future__ import annotations

from typing import Literal

from peftlab.decoding.advice import REDUCED, DraftCost, TargetWeights
from peftlab.drafting.kinds.medusa.config import HeadsConfig


class HydraDraft(HeadsConfig):
    """K heads on the target's last hidden state that also read the tokens drafted before (arXiv 2402.05109)."""

    kind: Literal["hydra"] = "hydra"


def costs(target: TargetWeights) -> list[DraftCost]:
    """Return what three heads on one LM head cost: level by level, two maps of all that a head reads, and the LM head.

    Embeddings count as wide as states.
    """
    heads, rows = 3, min(target.vocabulary, REDUCED)
    recipe = f"kind: hydra, heads: {heads}, shared_head: true"
    recipe += f", vocabulary: {rows}" if rows < target.vocabulary else ""
    maps = sum(2 * (i + 2) * target.hidden**2 for i in range(heads)) / heads
    each = (maps + rows * target.hidden) / target.total
    return [DraftCost("hydra", f"{heads} heads", recipe, 0.0, each, heads, tree=True)]
