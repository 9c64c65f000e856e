"""The options of a merge on disk."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from peftlab.checkpoints.merge.config import Into
from peftlab.checkpoints.model_card import Training


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
    lora_alpha: float | None = None
    push_to_hub: str | None = None
    recipe: str | None = None
    training: Training | None = None

    @property
    def precision(self) -> torch.dtype:
        """The dtype of product and sum."""
        return torch.float64 if self.fp64 else torch.float32
