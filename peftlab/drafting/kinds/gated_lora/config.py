"""The section ``draft: {kind: gated_lora}``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from peftlab.decoding.advice import DraftCost, TargetWeights
from peftlab.decoding.table import DRAWN, HEAD, TIMES
from peftlab.drafting.config import DraftConfig, OtherKeys


class GatedLoraDraft(DraftConfig):
    """A LoRA on the target that acts on masks alone, which predict several tokens in one pass (arXiv 2609.04010)."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    kind: Literal["gated_lora"] = "gated_lora"
    language_model: ClassVar[bool] = False
    blocks: list[Annotated[int, Field(ge=2)]] = Field(
        default=[2, 4],
        min_length=1,
        description="Tokens of a block, rising: the target's own next one, and one for each mask behind it. Each "
        "number trains for an equal share of the steps; the last one drafts.",
    )
    mask_token: int | None = Field(
        default=None,
        ge=0,
        description="Token id that masks read; null: that of the draft that from names, else the highest id that the "
        "training text does not contain.",
    )
    noise: bool = Field(
        default=False,
        description="Masks read token ids drawn uniformly in place of mask_token, as Uno trains and SGLang serves.",
    )
    from_: str | None = Field(
        default=None, alias="from", description="A run or directory of such a draft to continue from; null: a new one."
    )

    def problems(self, recipe: OtherKeys) -> Iterator[tuple[str, str]]:
        yield from super().problems(recipe)
        if self.blocks != sorted(set(self.blocks)):
            yield "draft.blocks", f"{self.blocks} is not a rising list of different numbers"
        if self.noise and self.mask_token is not None:
            yield "draft.mask_token", "with noise: true masks have no id of their own; remove one of them"
        if recipe.method is not None and recipe.method.name != "lora":
            yield (
                "method",
                f"{recipe.method.name}: gated_lora trains by lora, which can act on some rows alone",
            )
        objective = recipe.objective
        if objective.name == "topk_kl" or objective.selective is not None or recipe.data.on_policy:
            yield "objective", "gated_lora trains without topk_kl, selective and on_policy"
        if recipe.acceptance_head:
            yield "acceptance_head", "reads the states of a model that drafts token by token; gated_lora does not"
        if recipe.policy.row.needs in (DRAWN, HEAD, TIMES):
            yield "policy", f"{recipe.policy.text}: needs a draft that draws token by token; masks predict all at once"
        if recipe.draft_window is not None:
            yield "draft_window", "limits the cache of a draft; gated_lora drafts in the target's"
        if recipe.merge:
            yield "merge", "the LoRA acts on masks alone, and the target stays as it is; there is nothing to merge"


def costs(target: TargetWeights) -> list[DraftCost]:
    """Return what masks cost in a pass of their own, a target step over as many tokens, and in the verification."""
    return [
        DraftCost("gated_lora", "two passes", "kind: gated_lora, blocks: [2, 4, 8]", 0.0, 0.0, 8, passes=2),
        DraftCost("gated_lora", "one pass", "kind: gated_lora", 0.0, 0.0, 3, passes=1),
    ]
