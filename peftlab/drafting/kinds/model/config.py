"""The section ``draft: {kind: model}``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from peftlab.decoding.advice import REDUCED, DraftCost, TargetWeights
from peftlab.drafting.config import DraftConfig, OtherKeys
from peftlab.models.config import PlainDtype
from peftlab.section import Section

_STARTS = (
    "from: REF, truncate: {layers: [...]} or {keep: N, by: gates}, prune: {ffn: 0.4} and new: {layers: N, width: H}"
)


class Truncation(Section):
    """Some of the target's own layers, named or chosen by gates."""

    layers: list[int] | None = Field(default=None, min_length=1, description="Their numbers from 0, rising.")
    keep: int | None = Field(default=None, ge=1, description="How many to keep; which, is chosen.")
    by: Literal["gates"] | None = Field(
        default=None,
        description="gates: a gate for each layer trains on the target's text, the target frozen, under a price on "
        "open gates that ends where keep of them are open.",
    )
    steps: int | None = Field(default=None, ge=1, description="With keep: batches that the gates train on; null: 100.")

    @model_validator(mode="after")
    def _one_way(self) -> Truncation:
        if (self.layers is None) == (self.keep is None):
            raise ValueError("give either layers, a list, or keep, how many, with by: gates")
        if self.keep is not None and self.by is None:
            raise ValueError("keep needs a way to choose the layers: by: gates")
        if self.layers is not None and (self.by is not None or self.steps is not None):
            raise ValueError("by and steps are for keep; the layers are named")
        return self

    @property
    def batches(self) -> int:
        """Batches that the gates train on."""
        return self.steps or 100


class Pruning(Section):
    """The target with fewer heads and feed-forward units in every layer, chosen by early-bird search."""

    ffn: float = Field(default=0.0, ge=0, lt=1, description="Share of each layer's feed-forward units that is removed.")
    kv_groups: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of each layer's key-value heads that is removed, with the query heads that read them.",
    )
    rounds: int = Field(default=1, ge=1, description="Searches one after the other, each for a part of the share.")
    rewind: bool = Field(
        default=True, description="Start the draft from the target's weights, not from those trained in the search."
    )
    steps: int = Field(default=200, ge=1, description="Batches of a search at most.")
    distance: float = Field(
        default=0.1, gt=0, lt=1, description="A search ends once the last five masks differ in less than this share."
    )

    @model_validator(mode="after")
    def _something(self) -> Pruning:
        if not self.ffn and not self.kv_groups:
            raise ValueError("removes nothing; give ffn, kv_groups or both a share above 0")
        return self

    def shares(self) -> dict[str, float]:
        """Return the share that is removed of each part, by its key."""
        return {"ffn": self.ffn, "kv_groups": self.kv_groups}


class NewModel(Section):
    """The sizes of a model with random weights; its other settings are derived from the target's."""

    layers: int = Field(ge=1, description="How many layers.")
    width: int = Field(ge=1, description="Numbers of a hidden state.")


class ModelDraft(DraftConfig):
    """A second, smaller language model over the target's tokens."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)
    several_targets: ClassVar[bool] = True

    kind: Literal["model"] = "model"
    from_: str | None = Field(
        default=None, alias="from", description="The model to start from, a reference like target's."
    )
    truncate: Truncation | None = Field(
        default=None,
        description="{layers: [...]}: start from these of the target's layers (from 0, rising), with its embeddings, "
        "final norm and LM head. {keep: N, by: gates}: from N of them, chosen on the target's text in steps (100) "
        "batches.",
    )
    prune: Pruning | None = Field(
        default=None,
        description="{ffn: 0.4, kv_groups: 0.33}: start from the target with these shares of each layer's feed-forward "
        "units and key-value heads removed, chosen by a search on the target's text: rounds (1), each of at most steps "
        "(200) batches, ended once masks differ in less than distance (0.1); rewind (true): from the target's weights.",
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
        if self.starts != 1:
            raise ValueError(f"needs exactly one of {_STARTS}")
        return self

    @property
    def starts(self) -> int:
        """How many models to start from the recipe names."""
        return sum(start is not None for start in (self.from_, self.truncate, self.prune, self.new))

    @property
    def searched(self) -> bool:
        """Whether what the draft consists of is found on the target's text."""
        return self.prune is not None or (self.truncate is not None and self.truncate.layers is None)

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
