"""What every method's configuration has in common, and the configurations of all methods but LoRA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, field_validator, model_validator
from pydantic.json_schema import SkipJsonSchema

from peftlab.section import Section


class MethodConfig(Section):
    """Base of the methods' configurations; ``name``, a ``Literal`` in each, selects the method in a recipe."""

    name: str
    modules_to_save: list[str] | None = Field(
        default=None,
        description="Further modules to train and save whole, by name suffix; the task head always is.",
    )
    first_layer: SkipJsonSchema[int | None] = Field(  # recipes say train.layers.from, for any method
        default=None,
        ge=0,
        description="Only the layers from this one on (from 0), the task head and modules_to_save train.",
    )

    def mismatch(self, shapes: Mapping[str, Sequence[int]]) -> str:
        """Return what in the configuration contradicts the shapes of an adapter's tensors; "" where nothing does.

        Checked before anything is allocated, so that a wrong size in a file costs no memory.

        Args:
            shapes: the shape of each of the adapter's tensors, by name.
        """
        return ""


class BitFitConfig(MethodConfig):
    """BitFit's field."""

    name: Literal["bitfit"] = "bitfit"
    biases: Literal["all", "sparse"] | list[str] = Field(
        default="all",
        description="all; sparse: the query's and the FFN's first bias (the paper's small variant); "
        "or the modules whose biases train, by name suffix.",
    )

    @field_validator("biases")
    @classmethod
    def _not_empty(cls, value: str | list[str]) -> str | list[str]:
        if not value or (isinstance(value, list) and "" in value):
            raise ValueError("names no module")
        return value


class FullConfig(MethodConfig):
    """Full finetuning: every parameter trains."""

    name: Literal["full"] = "full"


class HeadConfig(MethodConfig):
    """Linear probe: the task head trains, the body is frozen."""

    name: Literal["head"] = "head"


DEFAULT_BOTTLENECK = 64


class HoulsbyConfig(MethodConfig):
    """The bottleneck adapters' fields."""

    name: Literal["houlsby"] = "houlsby"
    bottleneck: int | None = Field(
        default=None, ge=1, description="Width m of the bottleneck; 64 where reduction_factor is not given either."
    )
    reduction_factor: float | None = Field(
        default=None, ge=1, description="Instead of bottleneck: m = width // factor."
    )
    non_linearity: Literal[
        "gelu", "gelu_new", "leakyrelu", "relu", "sigmoid", "silu", "swish", "tanh"
    ] = Field(default="gelu", description="Activation inside the bottleneck.")  # fmt: skip
    init_scale: float = Field(
        default=1e-2,
        gt=0,
        description="Standard deviation of W_down's initial values, from a normal distribution truncated at two; "
        "W_up starts at zero.",
    )
    placement: Literal["houlsby", "pfeiffer", "parallel"] = Field(
        default="houlsby",
        description="houlsby: after attention and after the FFN; pfeiffer: after the FFN; parallel: beside the FFN.",
    )
    skip_layers: list[int] | int | None = Field(
        default=None, description="Layers without adapters: their numbers, or how many of the first (AdapterDrop)."
    )
    train_layer_norms: bool = Field(default=True, description="Train all LayerNorms (RMSNorms) too.")
    train_head: bool = Field(default=True, description="Train the task head too.")

    @field_validator("skip_layers")
    @classmethod
    def _counted_from_zero(cls, value: list[int] | int | None) -> list[int] | int | None:
        if any(number < 0 for number in ([value] if isinstance(value, int) else value or [])):
            raise ValueError("layers are counted from 0")
        return value

    @model_validator(mode="after")
    def _one_width(self) -> HoulsbyConfig:
        if self.bottleneck is not None and self.reduction_factor is not None:
            raise ValueError("give bottleneck or reduction_factor, not both")
        return self

    def mismatch(self, shapes: Mapping[str, Sequence[int]]) -> str:
        widths = {shape[0] for name, shape in shapes.items() if name.endswith("adapter_down.weight") and shape}
        if self.bottleneck is not None and widths - {self.bottleneck}:
            return f"bottleneck {self.bottleneck}, and the adapters' width is {min(widths - {self.bottleneck})}"
        return ""

    def width(self, d: int) -> int:
        """Return the bottleneck's width m for activations of width ``d``."""
        if self.reduction_factor is not None:
            return max(1, int(d // self.reduction_factor))
        return self.bottleneck or DEFAULT_BOTTLENECK
