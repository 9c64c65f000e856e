"""The optimiser's parameter groups and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor, nn

from peftlab.training.config import TrainConfig

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict


def make_optimiser(
    parameters: Mapping[str, nn.Parameter], settings: TrainConfig, lr_ratio: Mapping[str, float]
) -> torch.optim.Optimizer:
    """Return a fused AdamW over the trainable parameters; ``StochasticAdamW`` where ``settings.weights`` ask for it.

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
            gradient = parameter.grad.float()
            mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
            square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            scale = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
            value = parameter.float().mul_(1 - group["lr"] * group["weight_decay"])
            value.addcdiv_(mean, scale, value=-group["lr"] / (1 - beta1**step))
            generator = torch.Generator(parameter.device).manual_seed(_key(self._seed, group["taken"], place))
            noise = torch.randint(1 << 16, value.shape, generator=generator, device=value.device, dtype=torch.int32)
            parameter.copy_(round_to_bf16(value, noise) if parameter.dtype == torch.bfloat16 else value)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load the state; torch's own would round the averages to the parameters' bf16."""
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for place, values in state_dict["state"].items():
            parameter = parameters[place]
            for key in ("exp_avg", "exp_avg_sq"):
                self.state[parameter][key] = values[key].to(parameter.device, copy=True)


def _key(*parts: int) -> int:
    return int(numpy.random.SeedSequence(parts).generate_state(1, numpy.uint64)[0] >> numpy.uint64(1))


def round_to_bf16(value: Tensor, noise: Tensor) -> Tensor:
    """Return fp32 values as bf16, up or down by their noise: the mean over all noises is the value.

    Args:
        noise: whole numbers from 0 to 2^16 − 1, int32, of the values' shape.
    """
    bits = value.view(torch.int32)
    rounded = bits.add(noise).bitwise_and_(-(1 << 16)).view(torch.float32)
    return torch.where(value.isfinite(), rounded, value).bfloat16()


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
