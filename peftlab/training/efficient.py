"""Implements training on less: sampled layers, weights in bf16 without an fp32 copy, and numbers of few bits.

``train.layers.active`` is layer-wise importance sampling (LISA, arXiv 2403.17919): in each period a few layers train,
drawn at random.

``train.weights: bf16_stochastic`` rounds each step's result to bf16 at random.

``train.emulate`` trains as hardware of few bits would compute it; it costs time and saves nothing. Emulated are the
linear layers: their weights, their inputs, and the gradients of their outputs, from which backward makes the gradients
of weights and inputs. Everything else is fp32. There are two copies of the weights: the one that computes, quantised,
and the one that the optimiser updates, to which gradients pass as they are (straight through).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch.optim.optimizer import StateDict

from peftlab.errors import PeftlabError
from peftlab.methods.base import layer_index
from peftlab.methods.inject import trainable_parameters
from peftlab.models.architectures import conv1d, inside, task_head
from peftlab.tasks.batches import seeded_order
from peftlab.training.config import EmulatedHardware
from peftlab.untyped import AutogradContext

_LAYER_DRAWS = 3  # sets these draws apart from those of the examples' order


class LayerSampling:
    """Decides which layers of an adapter train and which rest, as a pure function of seed and step.

    Attributes:
        layers: the parameters of each layer, by number and name. What belongs to no layer (the task head, embeddings)
            never rests.
    """

    def __init__(self, model: nn.Module, active: int, every: int, seed: int) -> None:
        head = task_head(model)
        self._active, self._every, self._seed = active, every, seed
        self.layers: dict[int, dict[str, nn.Parameter]] = {}
        for name, parameter in trainable_parameters(model).items():
            number = None if inside(name, head) else layer_index(name)
            if number is not None:
                self.layers.setdefault(number, {})[name] = parameter
        if active > len(self.layers):
            raise PeftlabError(f"train.layers.active: {active}, and only {len(self.layers)} layers train")

    def drawn(self, step: int) -> list[int]:
        """Return the numbers of the layers that train in ``step`` (from 0), in order."""
        order = seeded_order(len(self.layers), self._seed, step // self._every, _LAYER_DRAWS)
        return sorted(sorted(self.layers)[i] for i in order[: self._active])

    def resting_parameters(self, step: int) -> dict[str, nn.Parameter]:
        """Return the parameters that do not train in ``step``, by name."""
        drawn = self.drawn(step)
        return {name: p for number, those in self.layers.items() if number not in drawn for name, p in those.items()}


@contextmanager
def frozen(parameters: dict[str, nn.Parameter]) -> Iterator[None]:
    """Let the parameters require no gradient within the block; they are the adapter's, and require one outside it."""
    for parameter in parameters.values():
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters.values():
            parameter.requires_grad_(True)


# --- Weights in bf16 whose steps are rounded at random.
_BLOCK = 1 << 17  # values of a parameter that a CPU computes at a time, so that what comes between stays in its cache


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
        _keep_fp32(self, state_dict)


# --- Orthogonalised steps.
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # of Muon's authors: five steps bring singular values to about 1
_MOMENTUM = 0.95


class Muon(torch.optim.AdamW):
    """Muon for the groups with ``muon: True``, matrices all of them, and AdamW for the others.

    Muon (Jordan et al. 2024): the step of a matrix is the nearest orthogonal matrix to its Nesterov momentum, times
    0.2 √(longer side), so that its entries are as large as AdamW's steps and the same learning rate serves both
    (arXiv 2502.16982).

    Args:
        groups: of parameters. dtype: in which momenta are made orthogonal. betas, eps: AdamW's.
    """

    def __init__(
        self, groups: list[dict[str, object]], dtype: torch.dtype, lr: float, betas: tuple[float, float], eps: float
    ):
        super().__init__(groups, lr=lr, betas=betas, eps=eps)
        self._dtype = dtype

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load the state; torch's own would round the momenta to the parameters' bf16."""
        super().load_state_dict(state_dict)
        _keep_fp32(self, state_dict)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step for each parameter that has a gradient."""
        groups = self.param_groups
        for group in groups:
            for parameter in group["params"] if group.get("muon") else ():
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state["step"] = torch.zeros(())  # which AdamW expects of each parameter when it loads its state
                gradient = parameter.grad.float()
                state["momentum"].lerp_(gradient, 1 - _MOMENTUM)
                update = orthogonalise(gradient.lerp(state["momentum"], _MOMENTUM), self._dtype)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * 0.2 * max(parameter.shape) ** 0.5)
        self.param_groups = [group for group in groups if not group.get("muon")]
        try:
            super().step()
        finally:
            self.param_groups = groups


def orthogonalise(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix with the singular vectors of ``matrix`` [m, n] and singular values near 1, of ``dtype``."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
    x = (wide / wide.norm().clamp_min(1e-7)).to(dtype)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(5):
        square = x @ x.mT
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x if wide is matrix else x.mT


def _keep_fp32(optimiser: torch.optim.Optimizer, state_dict: StateDict) -> None:
    """Give each parameter the averages of ``state_dict`` that are in fp32 as they are."""
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    for place, values in state_dict["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor) and value.ndim and value.dtype == torch.float32:
                optimiser.state[parameters[place]][key] = value.to(parameters[place].device, copy=True)


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


# --- Number formats of few bits, and gradients of which few are left, as pure functions of fp32 values and noise.
# Noise is uniform on [0, 1), of the shape of the values: rounding by it is up with the probability of the part that is
# cut off, so that the mean over the noise is the value. Noise of ½ everywhere rounds to the nearest.
NEAREST = 0.5
Noise = Tensor | float


def dorefa_weights(weights: Tensor, bits: int) -> Tensor:
    """Return weights as DoReFa quantises them (arXiv 1606.06160), on the scale of the largest.

    M·(2·q(tanh w / 2M + ½) − 1), M = max |tanh w|, q the nearest of 2^bits levels on [0, 1]; one bit: the sign times
    the mean magnitude. The paper's result is on [−1, 1] whatever the weights; here it is on their own scale, which a
    trained layer needs.

    Args:
        weights: of any shape.
        bits: of a weight, at least 1.
    """
    if bits == 1:
        return weights.sign() * weights.abs().mean()
    squashed = weights.tanh()
    return _levels(squashed, squashed.abs().max(), bits, NEAREST)


def dorefa(values: Tensor, bits: int, noise: Noise = NEAREST) -> Tensor:
    """Return values [rows, ...] as one of 2^bits levels from −M to M, M each row's largest magnitude.

    Args:
        values: of shape [rows, ...].
        bits: of a value.
        noise: what is added to each scaled value before it is rounded down, in [0, 1); ``NEAREST`` rounds to nearest.
    """
    largest = values.abs().flatten(1).max(1).values if values.ndim > 1 else values.abs().max()
    return _levels(values, largest.view(-1, *[1] * (values.ndim - 1)) if values.ndim > 1 else largest, bits, noise)


def _levels(values: Tensor, largest: Tensor, bits: int, noise: Noise) -> Tensor:
    steps = 2**bits - 1
    scale = torch.where(largest > 0, largest, 1.0)
    # [−M, M] becomes [0, steps]; noise of ½ rounds to nearest, uniform noise keeps the mean.
    level = ((values / (2 * scale) + 0.5) * steps + noise).floor_().clamp_(0, steps)
    return (level / steps * 2 - 1) * scale * (largest > 0)


def block_floating(values: Tensor, bits: int, tile: int, noise: Noise = NEAREST) -> Tensor:
    """Return values whose blocks of ``tile`` neighbours along the last dimension share an exponent (HBFP).

    A mantissa has ``bits`` bits, its sign included; the exponent is the least with which the block's largest fits.

    Args:
        values: of shape [..., n].
        bits: of a mantissa, its sign included.
        tile: neighbours that share an exponent.
        noise: as for ``dorefa``.
    """
    last = values.shape[-1]
    blocks = F.pad(values, (0, -last % tile)).unflatten(-1, (-1, tile))
    most = 2 ** (bits - 1) - 1
    largest = blocks.abs().amax(-1, keepdim=True)
    exponent = torch.where(largest > 0, largest / most, 1.0).log2().ceil()  # a block of zeros has any exponent
    step = torch.exp2(exponent)
    if isinstance(noise, Tensor):
        noise = F.pad(noise, (0, -last % tile)).unflatten(-1, (-1, tile))
    rounded = (blocks / step + noise).floor_().clamp_(-most, most) * step
    return rounded.flatten(-2)[..., :last]


def pruned(values: Tensor, threshold: float, noise: Tensor) -> Tensor:
    """Return values of which each below ``threshold`` is ± it with probability |value| / threshold, and else 0.

    The mean over the noise is the value.

    Args:
        values: of any shape.
        threshold: as ``pruning_threshold`` returns it.
        noise: uniform on [0, 1), of the values' shape.
    """
    small = values.abs() < threshold
    kept = values.sign() * threshold * (noise * threshold < values.abs())
    return torch.where(small, kept, values)


def pruning_threshold(values: Tensor, sparsity: float) -> float:
    """Return the threshold by which ``pruned`` makes a share ``sparsity`` of log-normal values zero.

    (arXiv 2006.08173.) Zeros among ``values`` are left out. 0 where they have no spread to fit.

    Args:
        values: of any shape.
        sparsity: the share that becomes zero.
    """
    logs = values[values != 0].abs().double().log()
    if logs.numel() < 2 or not bool((sigma := logs.std()) > 0) or not bool(sigma.isfinite()):
        return 0.0
    return math.exp(float(logs.mean()) + _log_threshold(float(sigma), sparsity))


def _log_threshold(sigma: float, sparsity: float) -> float:
    """Return ln a with Φ(ln a/σ) − e^{σ²/2}/a·Φ(ln a/σ − σ) = sparsity, which grows with a, by bisection."""
    normal = NormalDist()
    low, high = -20 * sigma, 20 * sigma + sigma**2 + 20
    for _ in range(80):
        middle = (low + high) / 2
        if sparsity_at(middle, sigma, normal) < sparsity:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def sparsity_at(log_threshold: float, sigma: float, normal: NormalDist) -> float:
    """Return the expected share of zeros among log-normal values of median 1, by the threshold's logarithm.

    Args:
        log_threshold: the threshold's natural logarithm.
        sigma: standard deviation of the values' logarithms.
        normal: the standard normal distribution.
    """
    place = log_threshold / sigma
    return normal.cdf(place) - math.exp(sigma**2 / 2 - log_threshold) * normal.cdf(place - sigma)


class _StraightThrough(Function):
    """Quantised values forward; backward passes the gradient unchanged (straight-through estimator)."""

    @staticmethod
    def forward(ctx: AutogradContext, values: Tensor, quantised: Tensor) -> Tensor:
        return quantised

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _CoarseGradient(Function):
    """Values unchanged forward; backward quantises the gradient."""

    @staticmethod
    def forward(ctx: AutogradContext, values: Tensor, hardware: EmulatedHardware) -> Tensor:
        ctx.hardware = hardware
        return values.view_as(values)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None]:
        return coarse_gradient(grad, ctx.hardware), None


def coarse_gradient(grad: Tensor, hardware: EmulatedHardware) -> Tensor:
    """Return a gradient [rows, ...] in the hardware's number format; the noise is drawn from torch's generator.

    Args:
        grad: of shape [rows, ...].
        hardware: its number formats.
    """
    if hardware.prune is not None:
        threshold = pruning_threshold(grad, hardware.prune)
        grad = pruned(grad, threshold, torch.rand_like(grad)) if threshold else grad
    if hardware.gradients is None:
        return grad
    noise = torch.rand_like(grad) if hardware.rounding == "stochastic" else NEAREST
    return _round_to_format(grad, hardware.gradients, hardware, noise)


def _round_to_format(values: Tensor, bits: int, hardware: EmulatedHardware, noise: Noise = NEAREST) -> Tensor:
    if hardware.format == "bfp":
        return block_floating(values, bits, hardware.neighbours, noise)
    return dorefa(values, bits, noise)


class Emulation:
    """The linear layers of a model, and the two copies of their weights.

    Attributes:
        layers: the linear layers, adapted ones included.
    """

    def __init__(self, model: nn.Module, hardware: EmulatedHardware) -> None:
        self._hardware = hardware
        self.layers = [module for module in model.modules() if isinstance(module, (nn.Linear, *conv1d()))]
        matrices = {id(p): p for layer in self.layers for p in layer.parameters() if p.ndim > 1}
        self._matrices = list(matrices.values())
        self._trained = {id(p): p for p in trainable_parameters(model).values() if id(p) in matrices}
        self._frozen_copies: dict[int, Tensor] = {}
        self.store()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let the layers compute in the hardware's number formats within the block: a forward pass and its backward."""
        hooks = [layer.register_forward_pre_hook(self._quantise_inputs) for layer in self.layers]
        hooks += [layer.register_forward_hook(self._quantise_gradient) for layer in self.layers]
        stored = [p.data for p in self._matrices]
        for parameter in self._matrices:
            parameter.data = self._quantised_copy(parameter)
        try:
            yield
        finally:
            for parameter, data in zip(self._matrices, stored, strict=True):
                parameter.data = data
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def store(self) -> None:
        """Round the trained weights to the bits of the stored copy, after a step has changed them."""
        if self._hardware.stored is not None:
            for parameter in self._trained.values():
                parameter.copy_(_round_to_format(parameter, self._hardware.stored, self._hardware))

    @torch.no_grad()
    def _quantised_copy(self, parameter: nn.Parameter) -> Tensor:
        bits, format_ = self._hardware.weights, self._hardware.format
        if bits is None:
            return parameter.data
        if id(parameter) in self._frozen_copies:
            return self._frozen_copies[id(parameter)]
        copy = (
            dorefa_weights(parameter, bits)
            if format_ == "dorefa"
            else _round_to_format(parameter, bits, self._hardware)
        )
        if id(parameter) not in self._trained:  # not by requires_grad: a layer that rests changes later
            self._frozen_copies[id(parameter)] = copy
        return copy

    def _quantise_inputs(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self._hardware.activations is None:
            return None
        first, *others = inputs
        return _StraightThrough.apply(
            first, _round_to_format(first.detach(), self._hardware.activations, self._hardware)
        ), *others

    def _quantise_gradient(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        return _CoarseGradient.apply(output, self._hardware) if output.requires_grad else None
