"""What merging costs after training on a quantised base: the held-out loss before it and after either merge."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from peftlab.checkpoints.merge.config import Into, MergeOptions
from peftlab.checkpoints.merge.run import merge_checkpoint
from peftlab.files import scratch_directory
from peftlab.models.pretrained import load_base, load_config
from peftlab.tasks.problem import TaskProblem


def merge_losses(task: TaskProblem, live: nn.Module, run_dir: Path, base: str, into: Into) -> dict[str, float]:
    """Return the mean loss on the first evaluation split of the live model and of both merges.

    Args:
        live: base and adapter as they were trained. into: what ``run_dir / "merged"`` was merged into; the other
            merge is made beside it and removed again.
    """
    other: Into = "original" if into == "dequantised" else "dequantised"
    device = next(live.parameters()).device
    with scratch_directory(run_dir / "merged", "other") as scratch:
        merge_checkpoint(run_dir / "adapter", base, scratch / other, MergeOptions(into=other))
        data = next(iter(task.held_out.values()))
        found = {
            "live": task.mean_loss(live, data),
            into: task.mean_loss(_merged(run_dir / "merged", task.auto_class, device), data),
            other: task.mean_loss(_merged(scratch / other, task.auto_class, device), data),
        }
    return {name: found[name] for name in ("live", "dequantised", "original")}


def _merged(directory: Path, auto_class: str, device: torch.device) -> nn.Module:
    dtype = load_config(str(directory)).dtype
    stored = dtype if isinstance(dtype, torch.dtype) else torch.float32
    model, _ = load_base(str(directory), auto_class, dtype=stored)
    return nn.Module.to(model, device)
