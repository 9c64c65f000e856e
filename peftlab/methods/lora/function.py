"""The low-rank linear map as one autograd function."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from peftlab.untyped import AutogradContext

Weight = Tensor | Callable[[torch.dtype], Tensor]
"""W (out, in), or the function that makes it in a dtype: of a weight that is stored in 4 or 8 bits."""


class LowRankLinear(Function):
    """y = x·Wᵀ + b + s·((x∘keep)·Aᵀ)·Bᵀ with W and b frozen.

    Shapes: x (N, in), W (out, in), b (out) or None, A (r, in), B (out, r), keep (N, in) uint8 of 0 and 1 or None.

    For backward it keeps x (where A or B trains), A, B and the dropout mask as one byte an element: x·Aᵀ is computed
    again, W is held by the layer in any case, and both products add into one buffer in place. A W that a function makes
    exists during each of the two passes alone.
    """

    @staticmethod
    def forward(
        ctx: AutogradContext,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
        keep: Tensor | None,
    ) -> Tensor:
        trains = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
        ctx.save_for_backward(x if trains else None, a, b, keep)
        ctx.weight, ctx.scale = weight, scale
        w = _dense(weight, x.dtype)
        y = torch.mm(x, w.t()) if bias is None else torch.addmm(bias, x, w.t())
        h = _dropped(x, keep).mm(a.t())  # (N, r)
        return y.addmm_(h, b.t(), alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b, keep = ctx.saved_tensors
        grad_h = grad.mm(b).mul_(ctx.scale)  # (N, r)
        grad_a = grad_b = grad_x = None
        if x is not None:
            dropped = _dropped(x, keep)
            grad_a = grad_h.t().mm(dropped) if ctx.needs_input_grad[3] else None
            grad_b = dropped.mm(a.t()).t().mm(grad).t().mul_(ctx.scale) if ctx.needs_input_grad[4] else None
        if ctx.needs_input_grad[0]:
            grad_x = grad.mm(_dense(ctx.weight, grad.dtype))
            if keep is None:
                grad_x.addmm_(grad_h, a)
            else:
                grad_x.add_(grad_h.mm(a).mul_(keep))
        grad_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_bias, grad_a, grad_b, None, None


def _dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight(dtype)


def _dropped(x: Tensor, keep: Tensor | None) -> Tensor:
    return x if keep is None else x * keep


def keep_mask(like: Tensor, p: float) -> Tensor:
    """Return a mask of uint8, of the shape of ``like``: 0 with probability p, else 1, each element independently.

    torch's generator alone decides. On CPUs an element takes one byte of it, and 53 bits more where the byte cannot
    decide: the probability is exactly p (from 2⁻⁹ on; below, to 2⁻⁶¹). On other devices it is p to 2⁻²⁴.
    """
    if like.device.type != "cpu" or type(like) is not Tensor or torch.compiler.is_compiling():
        return torch.rand(like.shape, device=like.device).ge(p).view(torch.uint8)
    count = like.numel()
    words = torch.empty(math.ceil(count / 8), dtype=torch.int64).random_(-(2**63), None)  # 0 to 2⁶³ without arguments
    return kept(words.view(torch.uint8)[:count], p).view(like.shape)


def kept(uniform: Tensor, p: float) -> Tensor:
    """Return for each of ``uniform``, bytes, whether what it decides is kept: 1 with probability 1 − p, else 0.

    A byte below ⌊256·p⌋ drops, one above keeps. Where it is equal, a further draw drops with probability
    256·p − ⌊256·p⌋.
    """
    bound, rest = threshold(p)
    keep = torch.ge(uniform, bound, out=torch.empty_like(uniform))  # comparing into uint8 is 8 times as fast as bool
    if rest > 0:
        undecided = torch.from_numpy(numpy.flatnonzero(uniform.numpy() == bound))  # torch's own takes 6 times as long
        keep[undecided] = torch.rand(len(undecided), dtype=torch.float64).ge(rest).to(torch.uint8)
    return keep


def threshold(p: float) -> tuple[int, float]:
    """Return ⌊256·p⌋ and 256·p − ⌊256·p⌋, both exact in floating point."""
    rest, bound = math.modf(256 * p)
    return int(bound), rest


def dropout(x: Tensor, p: float) -> Tensor:
    """Return x with elements zero with probability p, divided by 1 − p; for backward it keeps a byte an element."""
    return x * keep_mask(x, p) * (1 / (1 - p)) if p > 0 else x


def low_rank_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
    scale: float,
    p: float = 0.0,
) -> Tensor:
    """Return x·Wᵀ + bias + scale·dropout(x, p)·Aᵀ·Bᵀ; gradients flow to x, bias, A and B, not to W.

    Under autocast every operand is cast to the autocast dtype; otherwise A and B to that of x, so that
    fp32 adapters train beside half-precision weights.

    Args:
        x: (..., in). weight: (out, in), any strides, or the function that makes it. bias: (out) or None.
        a: (r, in). b: (out, r).
        scale: α/r or α/√r. p: dropout on the low-rank branch alone.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    x, a, b = (t if t.dtype == dtype else t.to(dtype) for t in (x, a, b))
    if isinstance(weight, Tensor) and weight.dtype != dtype:
        weight = weight.to(dtype)
    if bias is not None and bias.dtype != dtype:
        bias = bias.to(dtype)
    keep = None
    if p > 0:
        keep, scale = keep_mask(x, p).view(-1, x.shape[-1]), scale / (1 - p)
    with torch.autocast(device, enabled=False):
        y = LowRankLinear.apply(x.reshape(-1, x.shape[-1]), weight, bias, a, b, scale, keep)
    return y.view(*x.shape[:-1], y.shape[-1])


def frozen_linear(x: Tensor, weight: Weight, bias: Tensor | None, width: int) -> Tensor:
    """Return x·Wᵀ + bias, of ``width`` features; gradients flow to x and bias: an addition of rank 0."""
    return low_rank_linear(x, weight, bias, x.new_empty(0, x.shape[-1]), x.new_empty(width, 0), 0.0)
