"""The optimiser's parameter groups and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor, nn

from peftlab.training.config import TrainConfig

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict

_BLOCK = 1 << 17  # values of a parameter that a CPU computes at a time, so that what comes between stays in its cache


def make_optimiser(
    parameters: Mapping[str, nn.Parameter], settings: TrainConfig, lr_ratio: Mapping[str, float]
) -> torch.optim.Optimizer:
    """Return a fused AdamW over the trainable parameters; ``StochasticAdamW`` where ``settings.weights`` ask for it.

    Vectors (biases, norms, magnitudes) are not decayed. Parameters whose last name is in ``lr_ratio`` get that
    multiple of ``settings.peak_lr`` (LoRA+: ``{"lora_B": ratio}``). The schedule's factor multiplies each group's
    ``peak_lr``.

    Args:
        parameters: the trainable parameters by name.
        settings: the recipe's ``train`` section.
        lr_ratio: multiples of the learning rate by the last part of a parameter's name.
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
    if settings.weights is not None:
        return StochasticAdamW(listed, settings.betas, settings.eps, settings.seed)
    return torch.optim.AdamW(listed, lr=settings.peak_lr, betas=settings.betas, eps=settings.eps, fused=True)


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW on bf16 parameters, computed in fp32 and rounded at random, so that the mean of each step is exact.

    A parameter takes 12 bytes: 2 of its own, 2 of its gradient, 8 of the averages; with an fp32 copy it would be 16.
    The noise is a function of seed, step and place of the parameter alone.
    """

    def __init__(
        self, groups: list[dict[str, object]], betas: tuple[float, float], eps: float, seed: int, lr: float = 0.0
    ) -> None:
        super().__init__(groups, {"betas": betas, "eps": eps, "lr": lr, "taken": 0})
        self._seed = seed

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step for each parameter that has a gradient."""
        parameters = [(group, parameter) for group in self.param_groups for parameter in group["params"]]
        for group in self.param_groups:
            group["taken"] += 1  # of the optimiser: a parameter's own count begins again when its layer has rested
        for place, (group, parameter) in enumerate(parameters):
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                averages = (torch.zeros_like(parameter, dtype=torch.float32) for _ in range(2))
                state["step"], (state["exp_avg"], state["exp_avg_sq"]) = torch.zeros(()), averages
            state["step"] += 1
            step, (beta1, beta2) = int(state["step"]), group["betas"]
            generator = torch.Generator(parameter.device).manual_seed(_seed_of(self._seed, group["taken"], place))
            for weight, grad, mean, square in _row_blocks(
                parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"]
            ):
                gradient = grad.float()
                mean.lerp_(gradient, 1 - beta1)
                square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                scale = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
                value = weight.float().mul_(1 - group["lr"] * group["weight_decay"])
                value.addcdiv_(mean, scale, value=-group["lr"] / (1 - beta1**step))
                if weight.dtype == torch.bfloat16:
                    value = round_to_bf16(value, _noise(value, generator))
                weight.copy_(value)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load the state; torch's own would round the averages to the parameters' bf16."""
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for place, values in state_dict["state"].items():
            parameter = parameters[place]
            for key in ("exp_avg", "exp_avg_sq"):
                self.state[parameter][key] = values[key].to(parameter.device, copy=True)


def _seed_of(*parts: int) -> int:
    return int(numpy.random.SeedSequence(parts).generate_state(1, numpy.uint64)[0] >> numpy.uint64(1))


def _row_blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield tensors of the same shape in blocks of rows, small enough for a CPU's cache; elsewhere yield them whole."""
    first, *_ = tensors = tuple(map(torch.atleast_1d, tensors))
    rows = max(1, len(first))
    if first.device.type == "cpu":
        rows = max(1, _BLOCK * rows // max(1, first.numel()))
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return random int32 from 0 to 2^16 − 1, of the shape of ``like``: four from each word of 64 bits."""
    words = torch.empty(math.ceil(like.numel() / 4), dtype=torch.int64, device=like.device)
    words.random_(-(2**63), None, generator=generator)  # 0 to 2^63 without arguments
    return words.view(torch.uint16)[: like.numel()].view(like.shape).to(torch.int32)


def round_to_bf16(value: Tensor, noise: Tensor) -> Tensor:
    """Return fp32 values as bf16, up or down by their noise: the mean over all noises is the value.

    Args:
        value: fp32, of any shape.
        noise: whole numbers from 0 to 2^16 − 1, int32, of the values' shape.
    """
    # bf16 is the upper half of fp32's bits: noise in the lower half carries into it with the share that is cut off.
    bits = value.view(torch.int32)
    rounded = bits.add(noise).bitwise_and_(-(1 << 16)).view(torch.float32)
    return torch.where(value.isnan(), value, rounded).bfloat16()  # of infinity the bits that the noise meets are 0


def widen_to_fp32(model: nn.Module) -> None:
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

    Args:
        step: the optimiser step, from 0.
        total: optimiser steps of the run.
        warmup: steps of the warm-up, or a share of ``total`` if below 1.
        kind: ``constant``, ``linear`` or ``cosine``.
    """
    ramp = math.ceil(warmup * total) if warmup < 1 else int(warmup)
    if step < ramp:
        return step / ramp
    if kind == "constant":
        return 1.0
    progress = (step - ramp) / max(1, total - ramp)
    return max(0.0, 1.0 - progress) if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
