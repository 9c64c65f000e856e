"""Attention in 16 bits on a CPU whose gradients are computed in fp32, which takes less time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import cast

import torch
from torch import Tensor, autograd
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention import SDPBackend

from peftlab.environment import describe_cpu
from peftlab.untyped import AutogradContext, Function

_FEW_KEYS = 256  # up to which fp32 is faster than bf16 on matrix units, too; otherwise it is for any number


@contextmanager
def gradients_in_fp32() -> Iterator[None]:
    """Within the block ``scaled_dot_product_attention`` in 16 bits on a CPU has its gradients computed in fp32.

    Results, and what is kept for backward, are those of PyTorch's fused kernel. Its gradients in 16 bits are rounded
    in between and slow; here they are rounded at the end. Calls with dropout, and those for which PyTorch would
    not take the fused kernel, remain as they are. Backward belongs into the block: it can compute a layer again.
    """
    theirs: Function[Tensor] = functional.scaled_dot_product_attention
    attention: Function[Tensor | None] = _attention

    def attend(*args: object, **options: object) -> Tensor:
        ours = attention(*args, **options)
        return theirs(*args, **options) if ours is None else ours

    # A TorchFunctionMode would do without replacing the function, but Tensor.backward leaves it.
    functional.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = theirs


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Return what ``scaled_dot_product_attention`` would; None where that is to be called."""
    if query.device.type != "cpu" or query.dtype == torch.float64 or dropout_p or not torch.is_grad_enabled():
        return None
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
    query, key, value = (operand.to(dtype) for operand in (query, key, value))
    trains = any(operand.requires_grad for operand in (query, key, value))
    on_matrix_units = dtype == torch.bfloat16 and key.shape[-2] > _FEW_KEYS and _has_matrix_units()
    if not trains or dtype.itemsize != 2 or on_matrix_units:
        return None
    if attn_mask is not None:
        if attn_mask.requires_grad:
            return None
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=dtype).masked_fill_(~attn_mask, -torch.inf)
        attn_mask = attn_mask.to(dtype)
    choice = torch._fused_sdp_choice(
        query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    if choice != SDPBackend.FLASH_ATTENTION.value:
        return None
    return cast(Tensor, _FusedAttention.apply(query, key, value, attn_mask, is_causal, scale))


class _FusedAttention(autograd.Function):
    """softmax(scale·Q·Kᵀ + mask)·V by the fused kernel: Q (b, heads, n, d), K and V (b, heads or a divisor, m, d)."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float | None,
    ) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, logsumexp = kernel(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
        ctx.save_for_backward(query, key, value, mask, out, logsumexp)
        ctx.causal, ctx.scale = causal, scale
        return cast(Tensor, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, out, logsumexp = ctx.saved_tensors
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        operands = (operand.float() for operand in (grad, query, key, value, out))
        wide = None if mask is None else mask.float()
        gradients = kernel(*operands, logsumexp, 0.0, ctx.causal, attn_mask=wide, scale=ctx.scale)
        return *(gradient.to(query.dtype) for gradient in gradients), None, None, None


@cache
def _has_matrix_units() -> bool:
    return "amx_bf16" in describe_cpu().features
