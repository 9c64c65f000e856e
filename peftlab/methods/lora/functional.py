"""The arithmetic of LoRA: the product of a layer with its gradient, and the fold into a weight.

One function folds, in memory and on disk. A CPU's matrix product gives other last bits when an operand begins elsewhere
relative to a multiple of 16 bytes, has other strides or is cut into other blocks, and with another number of threads.
So that equal inputs give equal bits wherever they are stored, every product of the fold has operands that were copied
to memory of their own, row after row (torch aligns it to 64 bytes), is taken over blocks that depend on the shape
alone, and runs in one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.nn.functional import dropout, linear

from peftlab.errors import PeftlabError
from peftlab.methods.base import FOLDING, Folding
from peftlab.methods.config import Start
from peftlab.methods.lora.dropout import Dropped, keep_mask, plain_on_cpu
from peftlab.untyped import AutogradContext

Weight = Tensor | Callable[[torch.dtype], Tensor]
"""W (out, in), or the function that makes it in a dtype: of a weight that is stored in 4 or 8 bits."""

# Weights summed at a time: W0, ΔW, their sum and what is stored of it stay in a core's cache of 2 MiB. With four times
# as many an operation on them takes two to four times as long; with fewer its start does.
FOLD_BLOCK = 1 << 17

# Bytes of activations that a thread masks at a time. A masked copy of a whole input, 12 MB for 2048 tokens of width
# 1536, is memory that malloc asks of the system at each call and gives back after it, and the system clears its pages
# each time: five times the work of the product that reads the copy.
MASK_BLOCK = 1 << 20


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
    if _transformed():
        with torch.autocast(device, enabled=False):
            low = linear(linear(dropout(x, p) if p > 0 else x, a), b)
            return linear(x, _dense(weight, dtype), bias) + low * scale
    rows = x.reshape(-1, x.shape[-1])
    kernels = _kernels() if _compiles(rows, a, p) else None
    dropped: Dropped | Tensor | None = None
    if p > 0:
        dropped = keep_mask(rows, p) if kernels is None else Dropped.drawn(p)
        scale /= 1 - p
    with torch.autocast(device, enabled=False):
        y = LowRankLinear.apply(rows, weight, bias, a, b, scale, dropped, kernels)
    return y.view(*x.shape[:-1], y.shape[-1])


def _transformed() -> bool:
    """Return whether a transform of ``torch.func`` or forward-mode differentiation is active."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _compiles(x: Tensor, a: Tensor, p: float) -> bool:
    """Return whether ``kernels`` multiplies x (N, in), dropped with p, and A (r, in): on a CPU, where it is faster."""
    narrow = 32 if p > 0 else 16 if x.dtype == torch.float32 else 0
    fits = 0 < len(a) <= narrow and x.dtype in (torch.float32, torch.bfloat16) and x.shape[1] % 16 == 0
    return fits and x.numel() >= 1 << 16 and x.is_contiguous() and plain_on_cpu(x)


@lru_cache(1)
def _kernels() -> ModuleType | None:
    """Return the compiled products; None without numba, or with a PyTorch without GNU's OpenMP."""
    try:
        from peftlab.methods.lora import kernels
    except (ImportError, AttributeError, OSError, RuntimeError):
        return None
    return kernels


def frozen_linear(x: Tensor, weight: Weight, bias: Tensor | None, width: int) -> Tensor:
    """Return x·Wᵀ + bias, of ``width`` features; gradients flow to x and bias: an addition of rank 0.

    Args:
        x: (..., in). weight: (out, in), or the function that makes it. bias: (out) or None.
        width: out, which a function does not tell.
    """
    return low_rank_linear(x, weight, bias, x.new_empty(0, x.shape[-1]), x.new_empty(width, 0), 0.0)


class LowRankLinear(Function):
    """y = x·Wᵀ + b + s·((x∘keep)·Aᵀ)·Bᵀ with W and b frozen.

    Shapes: x (N, in), W (out, in), b (out) or None, A (r, in), B (out, r). What is kept is a mask (N, in), uint8 of 0
    and 1, its rule where ``kernels`` multiply, or None: all of it.

    For backward it keeps A, B, x where A trains, (x∘keep)·Aᵀ (N, r) where B does, and a mask as one byte an element, a
    rule as nothing; W is held by the layer in any case. Both products add into one buffer in place. A W that a function
    makes exists during each of the two passes alone. Second derivatives (``create_graph``) are computed of x again.
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
        dropped: Dropped | Tensor | None,
        kernels: ModuleType | None,
    ) -> Tensor:
        keep = dropped if isinstance(dropped, Tensor) else None
        if kernels is not None:
            h = kernels.narrow_product(x, a, dropped)
        else:
            h = x.mm(a.t()) if keep is None else masked_product(x, keep, a)
        w = _dense(weight, x.dtype)
        y = torch.mm(x, w.t()) if bias is None else torch.addmm(bias, x, w.t())
        a_trains, b_trains = ctx.needs_input_grad[3:5]
        ctx.save_for_backward(x if a_trains else None, h if b_trains else None, a, b, keep)
        ctx.weight, ctx.scale, ctx.dropped, ctx.kernels = weight, scale, dropped, kernels
        # torch 2.11's compiler gives no gradient to an output that forward changes in place.
        add = y.addmm if torch.compiler.is_compiling() else y.addmm_
        return add(h, b.t(), alpha=scale)

    @staticmethod
    def backward(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, h, a, b, keep = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _differentiable_gradients(ctx, grad)
        # The same product (N, r), transposed on CPUs: MKL takes half the time where the long side comes second.
        grad_h = (b.t().mm(grad.t()).t() if grad.is_cpu else grad.mm(b)).mul_(ctx.scale)
        grad_x = grad.mm(_dense(ctx.weight, grad.dtype)) if ctx.needs_input_grad[0] else None
        if ctx.kernels is not None:
            grad_a = ctx.kernels.narrow_gradients(x, a, grad_h, grad_x, ctx.dropped)
        elif keep is None:
            grad_a = None if x is None else grad_h.t().mm(x)
            grad_x = None if grad_x is None else grad_x.addmm_(grad_h, a)
        else:
            grad_a = masked_gradients(x, keep, a, grad_h, grad_x)
        grad_b = None if h is None else h.t().mm(grad).t().mul_(ctx.scale)
        grad_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_bias, grad_a, grad_b, None, None, None


def _differentiable_gradients(ctx: AutogradContext, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return what ``LowRankLinear.backward`` does, with a graph for second derivatives.

    Args:
        ctx: of the forward pass. grad: of y (N, out).

    Raises:
        PeftlabError: B trains and A does not, so that the input was not kept.
    """
    x, h, a, b, keep = ctx.saved_tensors
    if x is None and h is not None:
        raise PeftlabError("second derivatives of LoRA need A to train too: for B alone the input is not kept")
    if isinstance(ctx.dropped, Dropped):
        rows = len(grad), a.shape[1]
        keep = torch.from_numpy(ctx.dropped.kept(0, rows[0] * rows[1])).view(rows)
    grad_h = grad.mm(b) * ctx.scale
    grad_a = grad_b = grad_x = None
    if x is not None:
        kept = x if keep is None else x * keep
        grad_a = grad_h.t().mm(kept)
        grad_b = None if h is None else grad.t().mm(kept.mm(a.t())) * ctx.scale
    if ctx.needs_input_grad[0]:
        low = grad_h.mm(a)
        grad_x = grad.mm(_dense(ctx.weight, grad.dtype)) + (low if keep is None else low * keep)
    grad_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
    return grad_x, None, grad_bias, grad_a, grad_b, None, None, None


def masked_product(x: Tensor, keep: Tensor, a: Tensor) -> Tensor:
    """Return (x∘keep)·Aᵀ, shape (N, r).

    Args:
        x: (N, in). keep: (N, in) uint8 of 0 and 1. a: (r, in).
    """
    step = _rows_at_a_time(keep, x.dtype)
    if step is None:
        return (x * keep).mm(a.t())
    h, scratch = x.new_empty(len(x), len(a)), x.new_empty(step, x.shape[1])
    for row, mask, out in zip(x.split(step), keep.split(step), h.split(step), strict=True):
        torch.mm(scratch[: len(row)].copy_(mask).mul_(row), a.t(), out=out)
    return h


def masked_gradients(x: Tensor | None, keep: Tensor, a: Tensor, grad_h: Tensor, grad_x: Tensor | None) -> Tensor | None:
    """Return grad_hᵀ·(x∘keep), A's gradient (r, in), and add (grad_h·A)∘keep to ``grad_x`` in place.

    Args:
        x: (N, in), or None where A does not train. keep: (N, in) uint8 of 0 and 1. a: (r, in).
        grad_h: (N, r). grad_x: (N, in), or None where x has no gradient.
    """
    step = _rows_at_a_time(keep, a.dtype)
    if step is None:
        if grad_x is not None:
            grad_x.add_(grad_h.mm(a).mul_(keep))
        return None if x is None else grad_h.t().mm(x * keep)
    # Sums of half-precision products are kept in fp32, as those within a product are.
    grad_a = None if x is None else a.new_zeros(a.shape, dtype=torch.promote_types(a.dtype, torch.float32))
    scratch, product = (a.new_empty(step, a.shape[1]) for _ in range(2))
    for start in range(0, len(keep), step):
        rows = slice(start, start + step)
        mask = scratch[: len(keep[rows])].copy_(keep[rows])
        if x is not None and grad_a is not None:
            grad_a += grad_h[rows].t().mm(torch.mul(x[rows], mask, out=product[: len(mask)]))
        if grad_x is not None:
            grad_x[rows].addcmul_(torch.mm(grad_h[rows], a, out=product[: len(mask)]), mask)
    return None if grad_a is None else grad_a.to(a.dtype)


def _rows_at_a_time(keep: Tensor, dtype: torch.dtype) -> int | None:
    """Return how many rows of activations are masked at a time; None: all, as few are and those of a GPU.

    Args:
        keep: their mask (N, in). dtype: that of the activations.
    """
    step = max(1, MASK_BLOCK * torch.get_num_threads() // (dtype.itemsize * max(1, keep.shape[1])))
    return step if step < len(keep) and plain_on_cpu(keep) else None


def _dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight(dtype)


def fold_weight(
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float,
    *,
    transposed: bool = False,
    magnitude: Tensor | None = None,
    how: Folding = FOLDING,
) -> Tensor:
    """Return W + scale·B·A: product and sum in fp32 (fp64 for an fp64 weight), rounded once to W's dtype.

    ``how`` may ask for more precision or another dtype. With ``magnitude`` (DoRA) each output row of the sum is
    scaled to the norm it gives. Blocks of rows keep the intermediates small; threads that meet after every block would
    lose more than they gain.

    Args:
        weight: (out, in); (in, out) with ``transposed``; (out, in, ...) for a convolution; for experts
            (experts, out, in), or (experts, in, out) with ``transposed``.
        a: (r, in) or (r, in, ...); for experts (experts·r, in). b: (out, r, ...); for experts (out, r·experts).
        magnitude: (out), in any shape.
    """
    if how.in_place:
        out = weight.detach()
    else:
        out = torch.empty(weight.shape, dtype=how.stored or weight.dtype, device=weight.device)
    if out.is_meta or not out.numel():
        return out
    with one_thread():
        if weight.ndim == 3 and a.ndim == 2:
            for w, x, y, z in zip(weight.detach(), *expert_factors(a, b, weight.shape[0]), out, strict=True):
                _fold_matrix(w, x, y, z, scale, transposed, None, how)
        else:
            w, x, y, z = (tensor.detach().flatten(1) for tensor in (weight, a, b, out))
            _fold_matrix(w, x, y, z, scale, transposed, magnitude, how)
    return out


def fold_bias(bias: Tensor, addition: Tensor, scale: float, how: Folding = FOLDING) -> Tensor:
    """Return bias + scale·addition, computed and rounded as in ``fold_weight``; both are (out).

    Args:
        bias: (out). addition: ``lora_bias`` (out). scale: α/r. how: precision and dtype.
    """
    dtype = torch.float64 if bias.dtype == torch.float64 else how.precision
    out = bias.detach() if how.in_place else torch.empty_like(bias, dtype=how.stored)
    if out.is_meta:
        return out
    before, delta = bias.detach().to(dtype, copy=True), addition.detach().to(dtype) * scale
    after = before + delta
    out.copy_(after)
    if how.watch is not None:
        how.watch(before, delta, after, out)
    return out


def _fold_matrix(
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    scale: float,
    transposed: bool,
    magnitude: Tensor | None,
    how: Folding,
) -> None:
    """Fold one matrix into ``out``, block by block."""
    dtype = torch.float64 if weight.dtype == torch.float64 else how.precision
    a, b = _own(a, dtype), _own(b, dtype)
    gain = None
    if magnitude is not None:
        norms = _norms_by_block(weight.t() if transposed else weight, a, b, scale)
        gain = magnitude.detach().flatten().to(dtype) / norms
    left, right = (a.t(), _own(b.t(), dtype)) if transposed else (b, a)
    right *= scale
    step = max(1, FOLD_BLOCK // weight.shape[1])
    start, update, total = (_scratch(weight, step, dtype) for _ in range(3))
    for index, (old, factor, new) in enumerate(zip(*(t.split(step) for t in (weight, left, out)), strict=True)):
        before, delta, after = (block[: len(old)] for block in (start, update, total))
        before.copy_(old)
        torch.mm(factor, right, out=delta)
        torch.add(before, delta, out=after)
        if gain is not None:
            after *= gain if transposed else gain[index * step :][: len(old), None]
            torch.sub(after, before, out=delta)
        new.copy_(after)
        if how.watch is not None:
            how.watch(before, delta, after, new)


def _own(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy in memory of its own, row after row and aligned, whatever the tensor's strides and address."""
    return torch.empty(tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor.detach())


def _scratch(weight: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(min(rows, weight.shape[0]), weight.shape[1], dtype=dtype, device=weight.device)


@contextmanager
def one_thread() -> Iterator[None]:
    """Within the block torch computes with one CPU thread."""
    threads = torch.get_num_threads()
    if threads > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads > 1:
            torch.set_num_threads(threads)


def _norms_by_block(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    step = max(1, FOLD_BLOCK // weight.shape[1])
    scratch = _scratch(weight, step, b.dtype)
    blocks = zip(weight.split(step), b.split(step), strict=True)
    return torch.cat([row_norms(scratch[: len(rows)].copy_(rows), a, part, scale) for rows, part in blocks])


def row_norms(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return ‖W + scale·B·A‖ of each row (out), without a gradient (DoRA, arXiv 2402.09353, section 4.3).

    The squared norm is ‖w‖² + 2s·w·Aᵀ·b + s²·bᵀ·A·Aᵀ·b: the update itself is never formed.

    Args:
        weight: (out, in). a: (r, in). b: (out, r). scale: α/r.
    """
    with torch.no_grad():
        a, w = a.to(b.dtype), weight.to(b.dtype)
        cross = ((w @ a.t()) * b).sum(1)
        square = ((b @ (a @ a.t())) * b).sum(1)
        return (w.square().sum(1) + 2 * scale * cross + scale**2 * square).clamp_min(0).sqrt()


def expert_factors(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return A (experts, r, in) and B (experts, out, r) from peft's layout: (experts·r, in), (out, r·experts).

    Args:
        a: (experts·r, in). b: (out, r·experts). experts: their number.
    """
    return a.reshape(experts, -1, a.shape[1]), b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)


def leading_part(weight: Tensor, rank: int, scale: float, start: Start, *, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return A (rank, in) and B (out, rank) in fp32, with scale·B·A the part of W that training starts from.

    ``pissa``: B·A are the ``rank`` largest singular values of W, divided by the scale. ``olora``: B and A are
    the first columns and rows of W = Q·R; of a weight that is stored transposed peft decomposes the stored form.
    peft computes both again whenever it loads such an adapter, so the result must be peft's.

    Args:
        weight: (out, in); (in, out) with ``transposed``.
    """
    if weight.is_meta:
        d_in, d_out = weight.shape if transposed else weight.shape[::-1]
        return weight.new_empty(rank, d_in, dtype=torch.float32), weight.new_empty(d_out, rank, dtype=torch.float32)
    with torch.no_grad():
        # A copy of its own: the bits would depend on where in memory the weight begins.
        w = weight.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if start == "olora":
            q, r = torch.linalg.qr(w)
            left, right = q[:, :rank], r[:rank]
            a, b = (left.t(), right.t()) if transposed else (right, left)
        else:
            u, s, vh = torch.linalg.svd(w.t() if transposed else w, full_matrices=False)
            root = (s[:rank] / scale).sqrt()
            a, b = root[:, None] * vh[:rank], u[:, :rank] * root
        return a.contiguous(), b.contiguous()
