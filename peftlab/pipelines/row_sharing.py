"""``train.packing``: whether the examples of a run share rows, decided on the loaded model."""

from __future__ import annotations

import sys

from accelerate import Accelerator
from torch import nn
from transformers.utils import is_flash_attn_2_available

from peftlab.tasks.problem import RowSharing, TrainingProblem
from peftlab.tasks.tokens import Row
from peftlab.training.config import TrainConfig
from peftlab.untyped import Unwrapped

_TRIED = 4  # examples that the model is tried on
_ONE_ROW = sys.maxsize


def share_rows(problem: TrainingProblem, settings: TrainConfig, accelerator: Accelerator) -> None:
    """Put several examples into a row, where that is wanted and the model computes the same.

    By default it is wanted on GPUs: on a CPU attention over a whole row costs more than padding batches of similar
    lengths. flash-attention, where it is installed and the precision is its own, takes each batch as one row. A
    model that does not keep the examples of a row apart is trained on padded batches, and a message says so.
    """
    wanted = settings.packing if settings.packing is not None else accelerator.device.type == "cuda"
    sharing = problem.sharing
    if sharing is None or not wanted:
        return
    examples = [problem.train[i] for i in range(min(_TRIED, len(problem.train)))]
    model: Unwrapped = nn.Module.to(problem.model, accelerator.device)  # transformers' own refuses weights in 8 bits
    flash = accelerator.device.type == "cuda" and settings.precision in ("bf16", "fp16") and is_flash_attn_2_available()
    if flash and _flash_attends(model, sharing, examples, accelerator):
        problem.row_tokens = _ONE_ROW
    else:
        with accelerator.autocast():
            fault = sharing.fault(model, examples)
        if fault is not None:
            accelerator.print(f"train.packing: {fault}; training on padded batches of similar lengths instead")
            return
        problem.row_tokens = settings.max_length


def _flash_attends(model: Unwrapped, sharing: RowSharing, examples: list[Row], accelerator: Accelerator) -> bool:
    """Let the model attend by flash-attention if it can and keeps the examples of a row apart; return whether."""
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("flash_attention_2")
        with accelerator.autocast():
            if sharing.fault(model, examples) is None:
                return True
    except (ImportError, ValueError):  # a model without it
        pass
    model.set_attn_implementation(before)
    return False
