"""The section ``draft: {kind: early_exit}``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from peftlab.decoding.analysis.advice import DraftCost, TargetWeights
from peftlab.drafting.config import DraftConfig, OtherKeys


class EarlyExitDraft(DraftConfig):
    """The target itself, trained so that its first layers predict what the whole model does (LayerSkip)."""

    kind: Literal["early_exit"] = "early_exit"
    exits: list[Annotated[int, Field(ge=1)]] = Field(
        min_length=1,
        max_length=1,
        description="[k]: exit after the first k layers, through the final norm and the LM head. The merged model is "
        "target and draft at once.",
    )

    def problems(self, recipe: OtherKeys) -> Iterator[tuple[str, str]]:
        yield from super().problems(recipe)
        objective, data = recipe.objective, recipe.data
        if objective.name == "topk_kl" or objective.selective is not None or data.on_policy:
            yield "objective", "an early exit trains without topk_kl, selective and on_policy"
        if recipe.acceptance_head:
            yield "acceptance_head", "reads a draft model's states; there is none with an early exit"


def costs(target: TargetWeights) -> list[DraftCost]:
    """Return what an exit after an eighth of the layers costs."""
    exit_ = max(1, target.layers // 8)
    each = (exit_ * target.layer + target.vocabulary * target.hidden) / target.total
    return [DraftCost("early_exit", f"exit {exit_}", f"kind: early_exit, exits: [{exit_}]", 0.0, each)]
