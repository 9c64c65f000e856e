"""bitsandbytes' NF4 format (Dettmers et al., QLoRA, arXiv 2305.14314), bit for bit as its CPU code computes it.

A weight is read flat, row after row, in blocks of 64. Each block is divided by its largest magnitude, each quotient is
rounded to the nearest of 16 values, and two 4-bit codes share a byte, the first in the high half. Double quantisation
also stores the magnitudes in 8 bits: their mean is subtracted, and the rest is quantised in blocks of 256.

bitsandbytes 0.50.2 dequantises wrongly on CPUs with AVX-512 where a row's length is a multiple of 16 but not of 64;
here, as in its other kernels, the format decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 64  # weights that share a magnitude
NESTED = 256  # magnitudes that share a magnitude of their own
_STEP = 1 << 12  # blocks computed at a time, so that intermediates stay small
_SMALLEST = 1e-38  # what bitsandbytes divides by instead of a smaller magnitude

CODE = torch.tensor(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]
)  # fmt: skip
_MIDPOINTS = (CODE[:-1] + CODE[1:]) / 2


@dataclass(frozen=True)
class Nested:
    """Magnitudes in 8 bits: ``dynamic_code()[codes]`` times each block's magnitude, plus ``offset``."""

    codes: Tensor
    magnitudes: Tensor
    offset: Tensor

    def values(self) -> Tensor:
        """Return the magnitudes in fp32."""
        return dynamic_code()[self.codes.long()] * _spread(self.magnitudes, NESTED, len(self.codes)) + self.offset


def block_magnitudes(weight: Tensor) -> Tensor:
    """Return the largest magnitude of each block of a flat weight, in fp32."""
    whole = len(weight) - len(weight) % BLOCK
    found = [part.view(-1, BLOCK).float().abs().amax(1) for part in weight[:whole].split(_STEP * BLOCK) if len(part)]
    if whole < len(weight):
        found.append(weight[whole:].float().abs().amax().clamp(min=_SMALLEST).view(1))
    return torch.cat(found)


def nested(magnitudes: Tensor) -> Nested:
    """Return block magnitudes, doubly quantised."""
    offset = magnitudes.mean()
    rest = magnitudes - offset
    padding = -len(rest) % NESTED
    blocks = functional.pad(rest, (0, padding)).view(-1, NESTED)
    largest = blocks.abs().amax(1)
    quotients = blocks * (1 / largest)[:, None]
    codes = _nearest()[((quotients.clamp(-1, 1) + 1) * 0.5 * 65535 + 0.5).nan_to_num().int()]
    codes[largest == 0] = 0
    return Nested(codes.view(-1)[: len(rest)], largest, offset)


def packed(weight: Tensor, magnitudes: Tensor) -> Tensor:
    """Return the 4-bit codes of a flat weight, two in a byte; a last one without a partner is paired with 7."""
    flat = weight.float()
    whole = len(flat) - len(flat) % BLOCK
    inverse = 1.0 / magnitudes[: whole // BLOCK].clamp(min=_SMALLEST)
    quotients = (flat[:whole].view(-1, BLOCK) * inverse[:, None]).view(-1)
    if whole < len(flat):
        quotients = torch.cat([quotients, flat[whole:] / magnitudes[-1]])
    quotients = functional.pad(quotients.clamp_(-1, 1), (0, len(flat) % 2))
    codes = torch.zeros(len(quotients), dtype=torch.uint8)
    for midpoint in _MIDPOINTS.tolist():  # three times as fast as torch.bucketize
        codes += quotients > midpoint
    return (codes[::2] << 4) | codes[1::2]


def unpacked(codes: Tensor, magnitudes: Tensor, count: int) -> Tensor:
    """Return the first ``count`` weights that packed codes and block magnitudes stand for, in fp32."""
    halves = torch.stack([codes >> 4, codes & 15], 1).view(-1)[:count]
    return CODE[halves.int()] * _spread(magnitudes, BLOCK, count)


def nf4_codes(weight: Tensor) -> Iterator[Tensor]:
    """Yield the packed codes of a weight of any shape, part by part in order."""
    flat = weight.detach().reshape(-1)
    size = _STEP * BLOCK
    for part, magnitudes in zip(flat.split(size), block_magnitudes(flat).split(_STEP), strict=True):
        yield packed(part, magnitudes)


def nf4_values(weight: Tensor, *, double: bool, dtype: torch.dtype) -> Tensor:
    """Return what NF4 makes of a weight of any shape: quantised, dequantised to ``dtype``, in fp32.

    Args:
        double: with double quantisation.
    """
    flat = weight.detach().reshape(-1)
    exact = block_magnitudes(flat)
    kept = nested(exact).values() if double else exact
    out = torch.empty(weight.shape, dtype=torch.float32)
    parts = zip(
        flat.split(_STEP * BLOCK), out.view(-1).split(_STEP * BLOCK), exact.split(_STEP), kept.split(_STEP), strict=True
    )
    for part, target, before, after in parts:
        target.copy_(unpacked(packed(part, before), after, len(part)).to(dtype))
    return out


@cache
def dynamic_code() -> Tensor:
    """Return the 256 values of the 8-bit dynamic format (Dettmers, arXiv 1511.04561), in order."""
    values = [0.0, 1.0]
    for exponent in range(7):
        ends = torch.linspace(0.1, 1, 2**exponent + 1)
        means = 10 ** (exponent - 6) * ((ends[:-1] + ends[1:]) / 2)
        values += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(values))


@cache
def _nearest() -> Tensor:
    """Return the code nearest to each of 65,536 quotients between -1 and 1: bitsandbytes looks codes up in this."""
    code = dynamic_code()
    steps = (2.0 * torch.arange(65536)) / 65535 - 1.0
    return torch.bucketize(steps, 0.5 * (code[:-1] + code[1:]), out_int32=True).to(torch.uint8)


def _spread(magnitudes: Tensor, block: int, count: int) -> Tensor:
    return magnitudes.repeat_interleave(block)[:count]
