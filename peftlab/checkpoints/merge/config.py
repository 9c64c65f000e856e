"""The ``merge`` section of a recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from peftlab.section import Section

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


def into(merge: bool | MergeConfig | None) -> Into | None:
    """Return what a recipe's ``merge`` says of ``into``; None where it says nothing."""
    return merge.into if isinstance(merge, MergeConfig) else None


def times(merge: bool | MergeConfig | None) -> bool:
    """Whether a recipe's ``merge`` asks for the latency."""
    return isinstance(merge, MergeConfig) and merge.latency
