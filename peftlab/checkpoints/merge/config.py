"""What a merge is told: the ``merge`` section of a recipe, and the options of ``merge_checkpoint``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from peftlab.section import Section

if TYPE_CHECKING:
    import torch

    from peftlab.checkpoints.model_card import Training

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


@dataclass(frozen=True)
class MergeOptions:
    """Options of ``merge_checkpoint``; all have defaults.

    Attributes:
        dtype: of the merged weights; None: each keeps the dtype it is stored in.
        fp64: compute product and sum in fp64 instead of fp32.
        overwrite: replace the output if it is a model directory that peftlab wrote.
        allow_nonfinite: write NaN and infinity where they arise.
        into: what the update is added to where the base was quantised: ``dequantised``, the values that the model
            computed with in training, or ``original``, the weights before they were quantised. None: dequantised
            where the adapter says how its base was loaded, else the weights as they are stored.
        trust_remote_code: run the model code in the base directory.
        revision: git revision of a base on the hub; None: the one that the adapter names with that base.
        lora_alpha: α of a loralib file, which does not contain it.
        push_to_hub: id of a repository to upload the result to; a new one is private.
        recipe: text to embed in the model card. training: what the card says of the adapter's training.
    """

    dtype: torch.dtype | None = None
    fp64: bool = False
    overwrite: bool = False
    allow_nonfinite: bool = False
    into: Into | None = None
    trust_remote_code: bool = False
    revision: str | None = None
    lora_alpha: float | None = None
    push_to_hub: str | None = None
    recipe: str | None = None
    training: Training | None = None

    @property
    def precision(self) -> torch.dtype:
        """The dtype of product and sum."""
        import torch

        return torch.float64 if self.fp64 else torch.float32
