"""The section ``draft: {kind: eagle3}``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator

from peftlab.decoding.advice import FEATURE_TREE, REDUCED, DraftCost, TargetWeights
from peftlab.decoding.table import TIMES
from peftlab.drafting.config import DraftConfig, OtherKeys
from peftlab.methods.table import METHODS


class StateConfig(DraftConfig):
    """What kinds of networks on the target's states have in common."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    usual_method: ClassVar[str | None] = None
    language_model: ClassVar[bool] = False
    steps: int = Field(
        default=3,
        ge=1,
        description="Tokens that each position drafts in training, one after the other, on its own states "
        "(training-time test).",
    )
    decay: float = Field(default=1.0, gt=0, le=1, description="The loss of step k (from 0) is weighted decay^k.")
    vocabulary: int | None = Field(
        default=8192,
        ge=1,
        description="Draft N tokens only, the most frequent of the target's text, and report the ceiling p(V_d). null, "
        "or as many as the target has: all.",
    )
    store_gb: float | None = Field(
        default=None,
        gt=0,
        description="Compute the target's states of the training text once, keep them in bf16 beside the text "
        "(data.cache), in at most this many GB, and read them in every step; null: compute them anew in every step.",
    )
    from_: str | None = Field(
        default=None, alias="from", description="A run or directory of such a draft to continue from; null: a new one."
    )

    def problems(self, recipe: OtherKeys) -> Iterator[tuple[str, str]]:
        yield from self.needs_pair(recipe, f"{self.kind} trains", f"{self.kind} is not a model of its own")
        if recipe.policy.row.needs == TIMES:
            reason = f"needs the time of a draft step; {self.kind} is not a model of its own"
            yield "policy", f"{recipe.policy.text}: {reason}"
        if recipe.method is not None and self.from_ is None:
            what = f"a new {self.kind} layer trains whole"
            yield "method", f"{what}; write method: null, or tune a trained layer: draft.from"
        elif recipe.method is not None and not METHODS[recipe.method.name].folds:
            yield "method", f"{recipe.method.name} has no linear fold, and an {self.kind} layer is stored folded"
        if recipe.merge:
            reason = "leaves the target as it is and stores its layer folded; there is nothing to merge"
            yield "merge", f"{self.kind} {reason}"


class Eagle3Draft(StateConfig):
    """One decoder layer that reads three of the target's states and the next token (EAGLE-3, arXiv 2503.01840)."""

    kind: Literal["eagle3"] = "eagle3"
    regression: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the SmoothL1 distance between what the LM head reads of the layer and of the target, "
        "beside the objective. EAGLE-1's loss on its one feature: features: [L], steps: 1, regression: 10.",
    )
    features: list[int] | None = Field(
        default=None,
        min_length=1,
        description="Layers of the target, from 0 and rising, whose entering states are read, L for the state that the "
        "LM head reads; null: 2, L/2 and L - 3.",
    )

    @field_validator("features")
    @classmethod
    def _rising(cls, layers: list[int] | None) -> list[int] | None:
        if layers is not None and (min(layers) < 0 or layers != sorted(set(layers))):
            raise ValueError("must be layer numbers from 0, rising")
        return layers


def costs(target: TargetWeights) -> list[DraftCost]:
    """Return what a layer over [embedding; feature] costs: a layer with q, k and v twice as wide, and a reduced head.

    The fusion of the target's states is read once per step. Each level reads the layer and the head once, whether it is
    one link of a chain or several nodes of a tree.
    """
    return [layer_cost("eagle3", target, once=3 * target.hidden**2 / target.total)]


def layer_cost(kind: str, target: TargetWeights, once: float = 0.0) -> DraftCost:
    """Return what a layer, the map of embedding and state into it and a reduced head cost at each level, and ``once``.

    The map's 2H² weights are as many as queries, keys and values of twice the width add to a layer.
    """
    rows = min(target.vocabulary, REDUCED)
    recipe = f"kind: {kind}" + (f", vocabulary: {rows}" if rows < target.vocabulary else "")
    each = (target.layer + 2 * target.hidden**2 + rows * target.hidden) / target.total
    return DraftCost(kind, "1 layer", recipe, once, each, tree=True, width=FEATURE_TREE)
