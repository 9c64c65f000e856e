"""The bottleneck adapters' configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, field_validator, model_validator

from peftlab.methods.config import MethodConfig

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
