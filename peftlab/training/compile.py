"""torch.compile as an option that never stops a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator

if TYPE_CHECKING:
    from peftlab.training.loop import Work


def compile_or_go_on(work: Work, accelerator: Accelerator) -> bool:
    """Compile ``work.model`` in place for batches of any shape; where that fails, say so and leave it alone.

    One forward and backward pass over the longest example finds out; it leaves no gradient and no trace in
    the random numbers.

    Returns:
        Whether the model is compiled.
    """
    lengths = list(work.train["length"])
    row = work.train[lengths.index(max(lengths))]
    inputs = {key: value.to(accelerator.device) for key, value in work.collate([row, row]).items()}
    devices = [accelerator.device] if accelerator.device.type == "cuda" else []
    work.model.train()
    work.model.compile(dynamic=True)
    try:
        with torch.random.fork_rng(devices):
            work.loss(work.model, inputs).backward()
        return True
    except Exception as error:  # whatever the compiler's many parts may raise
        work.model._compiled_call_impl = None
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = " ".join(lines[:2]) or type(error).__name__
        accelerator.print(f"train.compile: going on without, as torch.compile failed: {reason}")
        return False
    finally:
        work.model.zero_grad(set_to_none=True)
