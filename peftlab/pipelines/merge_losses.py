"""What merging costs after training on a quantised base: the held-out loss before it and after either merge."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from peftlab.checkpoints.merge.config import Into
from peftlab.checkpoints.merge.options import MergeOptions
from peftlab.checkpoints.merge.run import merge_checkpoint
from peftlab.models.pretrained import load_base, load_config
from peftlab.outputs import scratch_directory
from peftlab.tasks.problem import Prepared


def merge_losses(task: Prepared, live: nn.Module, run_dir: Path, base: str, into: Into) -> dict[str, float]:
    """Return the mean loss on the first evaluation split of the live model and of both merges.

    Args:
        live: base and adapter as they were trained. into: what ``run_dir / "merged"`` was merged into; the other
            merge is made beside it and removed again.
    """
    other: Into = "original" if into == "dequantised" else "dequantised"
    device = next(live.parameters()).device
    with scratch_directory(run_dir / "merged", "other") as scratch:
        merge_checkpoint(run_dir / "adapter", base, scratch / other, MergeOptions(into=other))
        found = {
            "live": _loss(task, live),
            into: _loss(task, _merged(run_dir / "merged", task.auto_class, device)),
            other: _loss(task, _merged(scratch / other, task.auto_class, device)),
        }
    return {name: found[name] for name in ("live", "dequantised", "original")}


def _merged(directory: Path, auto_class: str, device: torch.device) -> nn.Module:
    dtype = load_config(str(directory)).dtype
    stored = dtype if isinstance(dtype, torch.dtype) else torch.float32
    model, _ = load_base(str(directory), auto_class, dtype=stored)
    return nn.Module.to(model, device)


@torch.inference_mode()
def _loss(task: Prepared, model: nn.Module) -> float:
    data = next(iter(task.held_out.values()))
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total = 0.0
    for i in range(0, len(data), 16):
        batch = task.collate([data[j] for j in range(i, min(i + 16, len(data)))])
        total += float(task.loss(model, {key: value.to(device) for key, value in batch.items()}))
    model.train(was_training)
    return total / task.denominator(data)(list(range(len(data))))
