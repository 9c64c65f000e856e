"""torch.compile as an option that never stops a run."""

from __future__ import annotations

import torch
from accelerate import Accelerator

from peftlab.training.spec import TrainingSpec


def compile_or_go_on(spec: TrainingSpec, accelerator: Accelerator) -> bool:
    """Compile ``spec.model`` in place for batches of any shape; where that fails, say so and leave it alone.

    One forward and backward pass over the longest example finds out; it leaves no gradient and no trace in
    the random numbers.

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
    except Exception as error:  # whatever the compiler's many parts may raise
        spec.model._compiled_call_impl = None
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = " ".join(lines[:2]) or type(error).__name__
        accelerator.print(f"train.compile: going on without, as torch.compile failed: {reason}")
        return False
    finally:
        spec.model.zero_grad(set_to_none=True)
