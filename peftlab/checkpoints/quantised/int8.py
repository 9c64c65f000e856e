"""bitsandbytes' int8 format (Dettmers et al., LLM.int8(), arXiv 2208.07339): each row by its largest magnitude."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_STEP = 1 << 18  # weights computed at a time, so that intermediates stay small


def rows_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of a matrix (out, in), from -127 to 127, and each row's largest magnitude in fp32.

    bitsandbytes converts the weight to fp16 first, whatever it is stored in.
    """
    half = weight.to(torch.float16)
    magnitudes = half.abs().amax(1).float()
    return torch.round(half * (127.0 / magnitudes[:, None])).to(torch.int8), magnitudes


def int8_codes(weight: Tensor) -> Iterator[Tensor]:
    """Yield the codes of a matrix (out, in), part by part in order."""
    for part in weight.detach().split(max(1, _STEP // weight.shape[1])):
        yield rows_int8(part)[0]


def int8_values(weight: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return what int8 makes of a matrix (out, in): quantised, dequantised to ``dtype``, in fp32.

    The products are those of the layer that trains on a CPU: codes · (magnitude · 1/127).
    """
    out = torch.empty(weight.shape, dtype=torch.float32)
    rows = max(1, _STEP // weight.shape[1])
    for part, target in zip(weight.detach().split(rows), out.split(rows), strict=True):
        codes, magnitudes = rows_int8(part)
        target.copy_(codes.to(dtype).mul_(magnitudes[:, None].mul(1.0 / 127.0)))
    return out
