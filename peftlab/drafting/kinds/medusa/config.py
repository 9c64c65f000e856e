"""The section ``draft: {kind: medusa}``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import ConfigDict, Field

from peftlab.decoding.advice import REDUCED, DraftCost, TargetWeights
from peftlab.drafting.config import DraftConfig, OtherKeys


class HeadsConfig(DraftConfig):
    """What kinds of heads on the target's last hidden state have in common."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    usual_method: ClassVar[str | None] = None
    from_: str | None = Field(
        default=None, alias="from", description="A run or directory of such heads to continue from; null: new ones."
    )
    heads: int = Field(default=4, ge=1, description="K: head i (from 0) predicts the token i + 2 positions ahead.")
    shared_head: bool = Field(
        default=False,
        description="Every head uses the target's own LM head, which stays frozen (multi-token "
        "prediction); false: each trains a copy W2.",
    )
    decay: float = Field(default=0.8, gt=0, le=1, description="Head i's loss is weighted decay^i.")
    preserve: float = Field(
        default=5.0,
        ge=0,
        description="Medusa-2, where the recipe's method trains the target too: weight of KL(base | trained model), "
        "which keeps the model what it was (5 is the paper's 1 : 0.2).",
    )
    vocabulary: int | None = Field(
        default=None,
        ge=1,
        description="Draft N tokens only, the most frequent of the target's text: the heads are written without the "
        "other rows, and the ceiling p(V_d) is reported. null: all.",
    )

    def problems(self, recipe: OtherKeys) -> Iterator[tuple[str, str]]:
        yield from self.needs_pair(recipe, "heads train", "there is none with heads")
        if recipe.policy.row.needs:
            yield "policy", f"{recipe.policy.text}: chooses the length of a chain, and heads draft trees"
        if recipe.draft_window is not None:
            yield "draft_window", "limits the cache of a draft; heads have none"
        if recipe.method is None and recipe.merge:
            yield "merge", "method: null leaves the target as it is; there is nothing to merge"


class MedusaDraft(HeadsConfig):
    """K heads on the target's last hidden state, each guessing one token further ahead (arXiv 2401.10774)."""

    kind: Literal["medusa"] = "medusa"
    bias: bool = Field(default=False, description="Whether each head's inner map W1 has a bias.")
    markov: int | None = Field(
        default=None,
        ge=1,
        description="Rank of a bias W2 W1[x] on the heads' logits, x the token drafted before; it trains with the "
        "heads. null: heads do not see each other's choices.",
    )


def costs(target: TargetWeights) -> list[DraftCost]:
    """Return what four heads on one LM head cost, without and with a Markov bias."""
    heads, rank, rows = 4, 64, min(target.vocabulary, REDUCED)
    recipe = f"kind: medusa, heads: {heads}, shared_head: true"
    recipe += f", vocabulary: {rows}" if rows < target.vocabulary else ""
    once = (heads * target.hidden**2 + rows * target.hidden) / target.total
    bias = rank * rows / target.total
    return [
        DraftCost("medusa", f"{heads} heads", recipe, once, 0.0, heads, tree=True),
        DraftCost("medusa", f"{heads} heads, Markov", f"{recipe}, markov: {rank}", once, bias, heads, tree=True),
    ]
