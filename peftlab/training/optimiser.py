"""The optimiser's parameter groups and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from peftlab.training.config import TrainConfig


def make_optimiser(
    parameters: Mapping[str, nn.Parameter], settings: TrainConfig, lr_ratio: Mapping[str, float]
) -> torch.optim.AdamW:
    """Return a fused AdamW over the trainable parameters.

    Vectors (biases, norms, magnitudes) are not decayed. Parameters whose last name is in ``lr_ratio`` get that
    multiple of ``settings.peak_lr`` (LoRA+: ``{"lora_B": ratio}``). The schedule's factor multiplies each group's
    ``peak_lr``.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        decay = settings.weight_decay if parameter.ndim > 1 else 0.0
        ratio = lr_ratio.get(name.rpartition(".")[2], 1.0)
        groups.setdefault((decay, ratio), []).append(parameter)
    listed: list[dict[str, object]] = [
        {"params": members, "weight_decay": decay, "peak_lr": settings.peak_lr * ratio}
        for (decay, ratio), members in groups.items()
    ]
    return torch.optim.AdamW(listed, lr=settings.peak_lr, betas=settings.betas, eps=settings.eps, fused=True)


def widen(model: nn.Module) -> None:
    """Give fp32 values to the parameters that train in place beside a frozen base in 16 bits.

    A 16-bit parameter loses small steps in rounding. The products then need autocast. Where nothing is frozen, the
    parameters are the base, and stay as they are stored.
    """
    parameters = list(model.parameters())
    if any(not p.requires_grad and p.is_floating_point() for p in parameters):
        for parameter in parameters:
            if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.float()


def lr_factor(step: int, total: int, warmup: float, kind: str) -> float:
    """Return the factor of the peak learning rate at optimiser step ``step`` (from 0) of ``total``.

    Linear warm-up from 0 over ``warmup`` steps (a share of ``total`` if below 1, rounded up), then
    ``constant``, ``linear`` decay to 0, or half a ``cosine`` to 0.
    """
    ramp = math.ceil(warmup * total) if warmup < 1 else int(warmup)
    if step < ramp:
        return step / ramp
    if kind == "constant":
        return 1.0
    progress = (step - ramp) / max(1, total - ramp)
    return max(0.0, 1.0 - progress) if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
