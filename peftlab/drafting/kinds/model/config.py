"""The section ``draft: {kind: model}``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import ConfigDict, Field, model_validator

from peftlab.decoding.analysis.advice import REDUCED, DraftCost, TargetWeights
from peftlab.drafting.config import DraftConfig, OtherKeys
from peftlab.models.config import PlainDtype
from peftlab.section import Section


class Layers(Section):
    """Some of the target's own layers."""

    layers: list[int] = Field(min_length=1, description="Their numbers from 0, rising.")


class ModelDraft(DraftConfig):
    """A second, smaller language model over the target's tokens."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    kind: Literal["model"] = "model"
    from_: str | None = Field(
        default=None, alias="from", description="The model to start from, a reference like target's."
    )
    truncate: Layers | None = Field(
        default=None,
        description="{layers: [...]}: start from these of the target's layers (from 0, rising), with its embeddings, "
        "final norm and LM head.",
    )
    dtype: PlainDtype = Field(
        default="fp32", description="Of its weights in memory; what trains beside them is in fp32."
    )
    vocabulary: int | None = Field(
        default=None,
        ge=1,
        description="Draft N tokens only, the most frequent of the target's text; the map is stored beside the merged "
        "weights and the ceiling p(V_d) reported. null: all.",
    )

    @model_validator(mode="after")
    def _one_start(self) -> ModelDraft:
        if (self.from_ is None) == (self.truncate is None):
            raise ValueError("needs exactly one of from: REF and truncate: {layers: [...]}")
        return self

    def problems(self, recipe: OtherKeys) -> Iterator[tuple[str, str]]:
        yield from super().problems(recipe)
        if self.vocabulary is not None and recipe.merge is False:
            yield "draft.vocabulary", "is stored beside the merged weights; remove merge: false"


def costs(target: TargetWeights) -> list[DraftCost]:
    """Return what drafts of some of the target's layers cost."""
    found = []
    for layers in sorted({max(1, target.layers // 8), max(1, target.layers // 4)}):
        for rows in sorted({target.vocabulary, min(target.vocabulary, REDUCED)}, reverse=True):
            less = rows < target.vocabulary
            size = f"{layers} layer{'s' * (layers > 1)}" + (f", {rows}" if less else "")
            kept = f"truncate: {{layers: {list(range(layers))}}}" + (f", vocabulary: {rows}" if less else "")
            each = (layers * target.layer + rows * target.hidden) / target.total
            found.append(DraftCost("model", size, f"kind: model, {kept}", 0.0, each))
    return found
