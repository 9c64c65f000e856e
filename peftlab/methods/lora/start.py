"""Starting LoRA from the leading part of the base weight: PiSSA (arXiv 2404.02948) and OLoRA (2406.01775)."""

from __future__ import annotations

import torch
from torch import Tensor

from peftlab.methods.lora.config import Start


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
