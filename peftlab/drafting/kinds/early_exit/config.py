"""The section ``draft: {kind: early_exit}``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from peftlab.decoding.advice import DraftCost, TargetWeights
from peftlab.drafting.config import DraftConfig, OtherKeys


class EarlyExitDraft(DraftConfig):
    """The target itself, trained so that its first layers predict what the whole model does (LayerSkip)."""

    kind: Literal["early_exit"] = "early_exit"
    exits: list[Annotated[int, Field(ge=1)]] = Field(
        min_length=1,
        description="[k, ...], rising: exits after the first k layers, through the final norm and the LM head. The "
        "merged model is target and draft at once; the first exit drafts, and --draft exit:K chooses another.",
    )
    scale: float | None = Field(
        default=None,
        gt=0,
        description="LayerSkip's e_scale: an exit after k of L layers weighs scale (0 + ... + k-1), the whole model "
        "L-1 + scale (0 + ... + L-2), in the loss as shares of their sum; null: all weigh the same.",
    )
    curriculum: Literal["rotational", "gradual"] | None = Field(
        default=None,
        description="rotational: every R-th exit trains, in the next step those after them; gradual: the exits join "
        "one by one in the first half of the steps, the last one first; null: all train in every step.",
    )
    every: int = Field(default=2, ge=2, description="rotational: R.")
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Layer dropout: layer l of L is left out for a row with probability dropout (2^(l/(L-1)) - 1), "
        "from the third step on.",
    )
    dropout_schedule: Literal["constant", "exponential"] = Field(
        default="constant",
        description="constant: the same in all steps; exponential: times 2^(t/(T-1)) - 1 in step t of T.",
    )

    def problems(self, recipe: OtherKeys) -> Iterator[tuple[str, str]]:
        yield from super().problems(recipe)
        if self.exits != sorted(set(self.exits)):
            yield "draft.exits", f"{self.exits} is not a rising list of different numbers"
        if self.scale is not None and self.exits[0] == 1:
            yield "draft.scale", "an exit after one layer would weigh nothing; remove the exit or the scale"
        if self.curriculum == "rotational" and self.every > len(self.exits):
            yield "draft.every", f"{self.every} of {len(self.exits)} exits: some steps would train none"
        yield from self.needs_pair(recipe, "an early exit trains", "there is none with an early exit")


def costs(target: TargetWeights) -> list[DraftCost]:
    """Return what an exit after an eighth of the layers costs."""
    exit_ = max(1, target.layers // 8)
    each = (exit_ * target.layer + target.vocabulary * target.hidden) / target.total
    return [DraftCost("early_exit", f"exit {exit_}", f"kind: early_exit, exits: [{exit_}]", 0.0, each)]
