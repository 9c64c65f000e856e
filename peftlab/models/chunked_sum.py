"""Sums over tokens of a function of their hidden states, without ever holding the logits of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from peftlab.untyped import AutogradContext

Loss = Callable[[Tensor, Tensor], Tensor]
"""Row indices [t] and their hidden states [t, H] to the sum of their losses."""


def last_position(input_ids: Tensor) -> Tensor:
    """Return ``logits_to_keep`` with which a model's LM head runs on the last position of each row alone, [1].

    With the number 1 the model takes a slice, and torch multiplies a slice of several rows by a copy of the weight for
    each row where the weight is frozen.

    Args:
        input_ids: [b, n], on the model's device.
    """
    return input_ids.new_tensor([-1])


def chunked_sum(loss: Loss, hidden: Tensor, rows: Tensor, chunk: int, parameters: Sequence[Tensor] = ()) -> Tensor:
    """Return Σ ``loss(some rows, hidden[some rows])`` over ``rows``, ``chunk`` of them at a time.

    The gradient of each chunk is taken as soon as its loss is known and multiplied by the incoming gradient in the
    backward pass, so that what ``loss`` computes exists for one chunk at a time and nothing is computed twice. There
    is no second derivative.

    Args:
        loss: a function of states and ``parameters``; of nothing else that needs a gradient.
        hidden: [T, H].
        rows: [n], indices of the states to sum over; the others get a gradient of zero.
        parameters: tensors that ``loss`` uses; those that require a gradient get one, summed in fp32 at least.

    Returns:
        A scalar in fp32 at least.
    """
    # Inside an autograd function the gradient mode is always off, so what the caller wants is read here.
    return _ChunkedSum.apply(hidden, loss, rows.split(chunk), torch.is_grad_enabled(), *parameters)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class _ChunkedSum(torch.autograd.Function):
    """See ``chunked_sum``; the forward pass takes the gradients that the backward pass returns."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        hidden: Tensor,
        loss: Loss,
        chunks: Sequence[Tensor],
        with_gradient: bool,
        *parameters: Tensor,
    ) -> Tensor:
        total = torch.zeros((), dtype=_wide(hidden), device=hidden.device)
        d_hidden = torch.zeros_like(hidden) if with_gradient and hidden.requires_grad else None
        trained = [with_gradient and parameter.requires_grad for parameter in parameters]
        leaves = [parameter for parameter, wanted in zip(parameters, trained, strict=True) if wanted]
        # A half-precision sum over many chunks would lose the small ones.
        sums = [torch.zeros_like(leaf, dtype=_wide(leaf)) for leaf in leaves]
        for rows in chunks:
            with torch.set_grad_enabled(with_gradient):
                part = hidden[rows].detach().requires_grad_(d_hidden is not None)
                value = loss(rows, part)
            total += value.detach()
            wanted = [*leaves, *([part] if d_hidden is not None else [])]
            if not wanted:
                continue
            gradients = torch.autograd.grad(value, wanted)
            if d_hidden is not None:
                d_hidden[rows] = gradients[-1]
            for own, gradient in zip(sums, gradients, strict=False):
                own += gradient
        found = iter([own.to(leaf.dtype) for own, leaf in zip(sums, leaves, strict=True)])
        ctx.save_for_backward(d_hidden, *(next(found) if wanted else None for wanted in trained))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, d_total: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, *others = (None if d is None else d * d_total.to(d.dtype) for d in ctx.saved_tensors)
        return d_hidden, None, None, None, *others
