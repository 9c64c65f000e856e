"""Folding a low-rank update into a weight: one function, in memory and on disk.

A CPU's matrix product gives other last bits when an operand begins elsewhere relative to a multiple of 16 bytes,
has other strides or is cut into other blocks, and with another number of threads. So that equal inputs give equal
bits wherever they are stored, every product here has operands that were copied to memory of its own, row after row
(torch aligns it to 64 bytes), is taken over blocks that depend on the shape alone, and runs in one thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from peftlab.methods.leaf import FOLDING, Folding
from peftlab.methods.lora.config import Start

# Weights summed at a time. Of smaller blocks the operations are so short that threads wait for the interpreter's lock;
# larger ones leave the cache.
FOLD_BLOCK = 1 << 19


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
    """Return bias + scale·addition, computed and rounded as in ``fold_weight``; both are (out)."""
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
    """
    with torch.no_grad():
        a, w = a.to(b.dtype), weight.to(b.dtype)
        cross = ((w @ a.t()) * b).sum(1)
        square = ((b @ (a @ a.t())) * b).sum(1)
        return (w.square().sum(1) + 2 * scale * cross + scale**2 * square).clamp_min(0).sqrt()


def expert_factors(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return A (experts, r, in) and B (experts, out, r) from peft's layout: (experts·r, in), (out, r·experts)."""
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
