"""torch.compile as an option: where it fails, the run continues without it."""

from __future__ import annotations

import torch
from accelerate import Accelerator

from peftlab.training.spec import TrainingSpec


def try_compile(spec: TrainingSpec, accelerator: Accelerator) -> bool:
    """Compile ``spec.model`` in place for batches of any shape; if that fails, print why and leave it as it was.

    One forward and backward pass over the longest example shows whether it works; gradients are cleared and the
    random number generators restored afterwards.

    Returns:
        Whether the model is compiled.
    """
    lengths = list(spec.train["length"])
    row = spec.train[lengths.index(max(lengths))]
    inputs = {key: value.to(accelerator.device) for key, value in spec.collate([row, row]).items()}
    devices = [accelerator.device] if accelerator.device.type == "cuda" else []
    spec.model.train()
    spec.model.compile(dynamic=True)
    try:
        with torch.random.fork_rng(devices):
            spec.loss(spec.model, inputs).backward()
        return True
    except Exception as error:  # the compiler raises many types
        spec.model._compiled_call_impl = None
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = " ".join(lines[:2]) or type(error).__name__
        accelerator.print(f"train.compile: continuing without it, as torch.compile failed: {reason}")
        return False
    finally:
        spec.model.zero_grad(set_to_none=True)
