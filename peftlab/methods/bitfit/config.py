"""BitFit's configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from peftlab.methods.config import MethodConfig


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
