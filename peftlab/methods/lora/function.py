"""The low-rank linear map as one autograd function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from peftlab.untyped import AutogradContext

Weight = Tensor | Callable[[torch.dtype], Tensor]
"""W (out, in), or the function that makes it in a dtype: of a weight that is stored in 4 or 8 bits."""


class LowRankLinear(Function):
    """y = x·Wᵀ + b + s·(drop(x)·Aᵀ)·Bᵀ with W and b frozen.

    Shapes: x (N, in), W (out, in), b (out) or None, A (r, in), B (out, r), keep (N, in) bool or None.

    For backward it keeps x, A, B and the dropout mask as one byte an element: x·Aᵀ is computed again, W is
    held by the layer in any case, and both products add into one buffer in place. A W that a function makes exists
    during each of the two passes alone.
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
        p: float,
    ) -> Tensor:
        ctx.save_for_backward(x, a, b, keep)
        ctx.weight, ctx.scale, ctx.p = weight, scale, p
        w = _dense(weight, x.dtype)
        y = torch.mm(x, w.t()) if bias is None else torch.addmm(bias, x, w.t())
        h = _dropped(x, keep, p).mm(a.t())  # (N, r)
        return y.addmm_(h, b.t(), alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b, keep = ctx.saved_tensors
        dropped = _dropped(x, keep, ctx.p)
        grad_h = grad.mm(b).mul_(ctx.scale)  # (N, r)
        grad_a = grad_h.t().mm(dropped) if ctx.needs_input_grad[3] else None
        grad_b = None
        if ctx.needs_input_grad[4]:
            grad_b = dropped.mm(a.t()).t().mm(grad).t().mul_(ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad.mm(_dense(ctx.weight, grad.dtype))
            if keep is None:
                grad_x.addmm_(grad_h, a)
            else:
                grad_x.add_(_dropped(grad_h.mm(a), keep, ctx.p))
        grad_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_bias, grad_a, grad_b, None, None, None


def _dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight(dtype)


def _dropped(x: Tensor, keep: Tensor | None, p: float) -> Tensor:
    return x if keep is None else keep.to(x.dtype).mul_(1.0 / (1.0 - p)).mul_(x)


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
    keep = torch.rand(x.shape, device=x.device).ge(p) if p > 0 else None
    with torch.autocast(device, enabled=False):
        y = LowRankLinear.apply(
            x.reshape(-1, x.shape[-1]), weight, bias, a, b, scale,
            None if keep is None else keep.view(-1, x.shape[-1]), p,
        )  # fmt: skip
    return y.view(*x.shape[:-1], y.shape[-1])


def frozen_linear(x: Tensor, weight: Weight, bias: Tensor | None, width: int) -> Tensor:
    """Return x·Wᵀ + bias, of ``width`` features; gradients flow to x and bias: an addition of rank 0."""
    return low_rank_linear(x, weight, bias, x.new_empty(0, x.shape[-1]), x.new_empty(width, 0), 0.0)
