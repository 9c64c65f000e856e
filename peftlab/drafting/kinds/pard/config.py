"""The section ``draft: {kind: pard}``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from peftlab.decoding.advice import REDUCED, DraftCost, TargetWeights
from peftlab.decoding.table import DRAWN, HEAD, TIMES
from peftlab.drafting.config import OtherKeys
from peftlab.drafting.kinds.model.config import ModelDraft


class PardDraft(ModelDraft):
    """A smaller language model that writes K tokens in one pass, reading masks in their place (arXiv 2504.18583)."""

    several_targets: ClassVar[bool] = False
    kind: Literal["pard"] = "pard"  # type: ignore[assignment]
    tokens: int = Field(default=8, ge=1, description="K: tokens that one pass writes.")
    mask_token: int | None = Field(
        default=None,
        ge=0,
        description="Token id that stands for a token to be written; null: that of the draft that from names, else the "
        "highest id that the training text does not contain.",
    )
    retain: float = Field(
        default=0.7,
        gt=0,
        le=1,
        description="Share r of an example's tokens at which i masks are trained: r^i, drawn anew in every step.",
    )
    retain_least: float = Field(default=0.2, gt=0, le=1, description="The least such share.")

    @model_validator(mode="after")
    def _one_start(self) -> PardDraft:
        if self.starts:  # else an eighth of the target's layers
            super()._one_start()  # type: ignore[operator]  # a method, which pydantic's annotation does not say
        return self

    def problems(self, recipe: OtherKeys) -> Iterator[tuple[str, str]]:
        yield from super().problems(recipe)
        objective = recipe.objective
        if objective.name == "topk_kl" or objective.selective is not None:
            yield "objective", "pard trains without topk_kl and selective"
        if recipe.acceptance_head:
            yield "acceptance_head", "reads the states of a model that drafts token by token; pard does not"
        if recipe.policy.row.needs in (DRAWN, HEAD, TIMES):
            yield "policy", f"{recipe.policy.text}: needs a draft that draws token by token; pard writes all at once"
        if recipe.merge is False:
            yield "merge", "a pard draft is its merged weights, which name the mask; remove merge: false"


def costs(target: TargetWeights) -> list[DraftCost]:
    """Return what a draft of an eighth of the target's layers costs: one pass, as over one token, for any depth."""
    layers, rows = eighth(target.layers), min(target.vocabulary, REDUCED)
    recipe = "kind: pard" + (f", vocabulary: {rows}" if rows < target.vocabulary else "")
    once = (layers * target.layer + rows * target.hidden) / target.total
    return [DraftCost("pard", f"{layers} layer{'s' * (layers > 1)}", recipe, once, 0.0, 8, tree=True, width=4)]


def eighth(layers: int) -> int:
    """Return an eighth of a number of layers, rounded up."""
    return -(-layers // 8)
