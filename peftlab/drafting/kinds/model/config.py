"""The section ``draft: {kind: model}``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import ConfigDict, Field, model_validator

from peftlab.decoding.analysis.advice import REDUCED, DraftCost, TargetWeights
from peftlab.drafting.config import DraftConfig, OtherKeys
from peftlab.models.config import PlainDtype
from peftlab.section import Section

_STARTS = "from: REF, truncate: {layers: [...]} and new: {layers: N, width: H}"


class Layers(Section):
    """Some of the target's own layers."""

    layers: list[int] = Field(min_length=1, description="Their numbers from 0, rising.")


class NewModel(Section):
    """The sizes of a model with random weights; its other settings are derived from the target's."""

    layers: int = Field(ge=1, description="How many layers.")
    width: int = Field(ge=1, description="Numbers of a hidden state.")


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
    new: NewModel | None = Field(
        default=None,
        description="{layers: N, width: H}: start from random weights in a small model of the target's family, over "
        "its tokens; with method: full. H is a multiple of the target's head size, or of one that is a multiple of 8.",
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
        if sum(start is not None for start in (self.from_, self.truncate, self.new)) != 1:
            raise ValueError(f"needs exactly one of {_STARTS}")
        return self

    def problems(self, recipe: OtherKeys) -> Iterator[tuple[str, str]]:
        yield from super().problems(recipe)
        if self.new is not None and recipe.method is not None and recipe.method.name != "full":
            reason = "leaves random weights as they are, and a new draft has no others; write method: full"
            yield "method", f"{recipe.method.name} {reason}"
        if self.vocabulary is not None and recipe.merge is False:
            yield "draft.vocabulary", "is stored beside the merged weights; remove merge: false"


def costs(target: TargetWeights) -> list[DraftCost]:
    """Return what drafts of some of the target's layers cost, and a new one of an eighth of them at half the width."""
    found = []
    for layers in sorted({max(1, target.layers // 8), max(1, target.layers // 4)}):
        for rows in sorted({target.vocabulary, min(target.vocabulary, REDUCED)}, reverse=True):
            kept = f"truncate: {{layers: {list(range(layers))}}}"
            found.append(_cost(target, _layers(layers), kept, layers * target.layer, target.hidden, rows))
    layers, width = max(1, target.layers // 8), target.hidden // 2
    if width:
        size, made = f"new, {_layers(layers)} of {width}", f"new: {{layers: {layers}, width: {width}}}"
        body = layers * target.layer * (width / target.hidden) ** 2
        found.append(_cost(target, size, made, body, width, min(target.vocabulary, REDUCED)))
    return found


def _layers(count: int) -> str:
    return f"{count} layer{'s' * (count > 1)}"


def _cost(target: TargetWeights, size: str, start: str, body: float, width: int, rows: int) -> DraftCost:
    """Return the cost of a draft with ``body`` numbers in its layers and ``rows`` of ``width`` in its LM head."""
    less = rows < target.vocabulary
    each = (body + rows * width) / target.total
    recipe = f"kind: model, {start}" + (f", vocabulary: {rows}" if less else "")
    return DraftCost("model", size + (f", {rows}" if less else ""), recipe, 0.0, each)
