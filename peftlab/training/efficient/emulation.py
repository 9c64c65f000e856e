"""Training as hardware of few bits would compute it: ``train.emulate``. It costs time and saves nothing.

Emulated are the linear layers: their weights, their inputs, and the gradients of their outputs, from which backward
makes the gradients of weights and inputs. Everything else is fp32. There are two copies of the weights: the one that
computes, quantised, and the one that the optimiser updates, to which gradients pass as they are (straight through).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd import Function

from peftlab.methods.injection import trainable_parameters
from peftlab.models.conv1d import conv1d
from peftlab.training.config import EmulatedHardware
from peftlab.training.efficient.number_formats import (
    NEAREST,
    Noise,
    block_floating,
    dorefa,
    dorefa_weights,
    pruned,
    pruning_threshold,
)
from peftlab.untyped import AutogradContext


class _Through(Function):
    """Values in the place of others, whose gradient passes as it is."""

    @staticmethod
    def forward(ctx: AutogradContext, values: Tensor, quantised: Tensor) -> Tensor:
        return quantised

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _CoarseGradient(Function):
    """Values as they are, whose gradient is quantised."""

    @staticmethod
    def forward(ctx: AutogradContext, values: Tensor, hardware: EmulatedHardware) -> Tensor:
        ctx.hardware = hardware
        return values.view_as(values)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor, None]:
        return coarse_gradient(grad, ctx.hardware), None


def coarse_gradient(grad: Tensor, hardware: EmulatedHardware) -> Tensor:
    """Return a gradient [rows, ...] as the hardware has it; the noise is drawn from torch's generator."""
    if hardware.prune is not None:
        threshold = pruning_threshold(grad, hardware.prune)
        grad = pruned(grad, threshold, torch.rand_like(grad)) if threshold else grad
    if hardware.gradients is None:
        return grad
    noise = torch.rand_like(grad) if hardware.rounding == "stochastic" else NEAREST
    return _rounded(grad, hardware.gradients, hardware, noise)


def _rounded(values: Tensor, bits: int, hardware: EmulatedHardware, noise: Noise = NEAREST) -> Tensor:
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
        """Within the block, a forward pass and its backward, the layers compute as the hardware, with their copies."""
        hooks = [layer.register_forward_pre_hook(self._inputs) for layer in self.layers]
        hooks += [layer.register_forward_hook(self._outputs) for layer in self.layers]
        stored = [p.data for p in self._matrices]
        for parameter in self._matrices:
            parameter.data = self._copy(parameter)
        try:
            yield
        finally:
            for parameter, data in zip(self._matrices, stored, strict=True):
                parameter.data = data
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def store(self) -> None:
        """Round what trains to the bits of the stored copy, after a step has changed it."""
        if self._hardware.stored is not None:
            for parameter in self._trained.values():
                parameter.copy_(_rounded(parameter, self._hardware.stored, self._hardware))

    @torch.no_grad()
    def _copy(self, parameter: nn.Parameter) -> Tensor:
        bits, format_ = self._hardware.weights, self._hardware.format
        if bits is None:
            return parameter.data
        if id(parameter) in self._frozen_copies:
            return self._frozen_copies[id(parameter)]
        copy = dorefa_weights(parameter, bits) if format_ == "dorefa" else _rounded(parameter, bits, self._hardware)
        if id(parameter) not in self._trained:  # not by requires_grad: a layer that rests changes later
            self._frozen_copies[id(parameter)] = copy
        return copy

    def _inputs(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self._hardware.activations is None:
            return None
        first, *others = inputs
        return _Through.apply(first, _rounded(first.detach(), self._hardware.activations, self._hardware)), *others

    def _outputs(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        return _CoarseGradient.apply(output, self._hardware) if output.requires_grad else None
