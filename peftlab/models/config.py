"""The ``base`` and ``merge`` sections of a recipe: how the weights of the base and of the merged model are stored."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from peftlab.section import Section

PlainDtype = Literal["fp32", "bf16", "fp16"]


class BaseConfig(Section):
    """How the weights of the pretrained model are stored in memory."""

    dtype: Literal["fp32", "bf16", "fp16", "int8", "nf4"] = Field(
        default="fp32",
        description="int8, nf4: the linear maps but for the LM head in 8 or 4 bits (bitsandbytes), the other weights "
        "in the dtype of train.precision.",
    )
    double_quant: bool = Field(
        default=False, description="nf4: quantise the scales of the blocks too; 4.13 bits a weight in place of 4.5."
    )

    @model_validator(mode="after")
    def _possible(self) -> BaseConfig:
        if self.double_quant and self.dtype != "nf4":
            raise ValueError(f"double_quant: dtype {self.dtype} has no blocks with scales; it belongs to nf4")
        return self

    @property
    def quantised(self) -> bool:
        """Whether the linear maps are stored in 8 or 4 bits."""
        return self.dtype in ("int8", "nf4")


def _or_default(value: object) -> object:
    return BaseConfig() if value is None else value


Base = Annotated[BaseConfig, BeforeValidator(_or_default)]
"""The section as a recipe has it, where null is fp32."""


Into = Literal["dequantised", "original"]
"""What an update is added to where the base was quantised while it was trained."""


class MergeConfig(Section):
    """How merged/ is written."""

    into: Into = Field(
        default="dequantised",
        description="On a base in int8 or nf4: what the update is added to, the values that the model computed with "
        "in training, or the original weights.",
    )
    latency: bool = Field(
        default=False,
        description="Measure the forward pass of the merged model, and of base and adapter, relative to the base's.",
    )


def merge_into(merge: bool | MergeConfig | None) -> Into | None:
    """Return what a recipe's ``merge`` says of ``into``; None where it says nothing."""
    return merge.into if isinstance(merge, MergeConfig) else None


def measures_latency(merge: bool | MergeConfig | None) -> bool:
    """Whether a recipe's ``merge`` asks for the latency."""
    return isinstance(merge, MergeConfig) and merge.latency
