"""Weights that are a code of at most 8 bits, times a scale, plus a minimum: found, and multiplied by their codes.

GGUF's Q4_0, Q4_1 and Q8_0 store 32 weights of one output so. They are loaded as float32 numbers; the codes and scales
are found in those again, and used only if they give every number bit for bit. A step over a few tokens then reads
1.3 bytes per weight instead of 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

FEW = 4  # rows up to which multiplying by the codes was measured no slower than by oneDNN's packed float32
_BLOCK = 32  # weights that share a scale
_TILE = 192  # outputs whose sums FBGEMM holds in registers; measured best of 64 to 384
_ROWS = 256  # of a weight that are read at a time: the first show whether a weight is of such blocks


@dataclass(frozen=True)
class Blocks:
    """A weight [N, K]: block g of row n is scales[n, g] (codes - zero) + minima[n, g].

    Attributes:
        codes: uint8 [N, K]. zero: the code of 0, or of the minimum.
        scales: [N, K / 32]. minima: [N, K / 32]; None where they are 0.
    """

    codes: Tensor
    zero: int
    scales: Tensor
    minima: Tensor | None

    def __str__(self) -> str:
        return f"{8 if self.minima is None else 4}-bit blocks of {_BLOCK}"


def blocks_of(weight: Tensor) -> Blocks | None:
    """Return the blocks of which a float32 weight consists, every number exactly; None where it does not."""
    if (
        weight.dtype != torch.float32
        or weight.shape[1] % _BLOCK
        or "fbgemm" not in torch.backends.quantized.supported_engines
    ):
        return None
    parts = [part.reshape(-1, _BLOCK) for part in weight.split(_ROWS)]
    return _found(weight, parts, 0, lambda part: part.amin(1, keepdim=True), range(15, 0, -1)) or _found(
        weight, parts, 128, lambda part: part.new_zeros(len(part), 1), [127]
    )


def _found(
    weight: Tensor, parts: list[Tensor], zero: int, lowest: Callable[[Tensor], Tensor], spans: Sequence[int]
) -> Blocks | None:
    """Return the blocks above what ``lowest`` gives; ``spans``: what their largest codes may be, likely ones first."""
    coded = []
    for part in parts:
        minima = lowest(part)
        if (found := _coded(part, minima, spans)) is None:
            return None
        codes, scales = found
        coded.append(((codes + zero).to(torch.uint8), scales, minima))
    codes, scales, minima = (torch.cat(kind) for kind in zip(*coded, strict=True))
    by_row = (len(weight), -1)
    return Blocks(codes.view(by_row), zero, scales.view(by_row), None if zero else minima.view(by_row))


def _coded(values: Tensor, minima: Tensor, spans: Sequence[int]) -> tuple[Tensor, Tensor] | None:
    """Return codes and scales of blocks [B, 32] with scale * code + minimum equal to each value, or None.

    A scale is found by division: the largest distance from the minimum is a whole number of scales.
    """
    distances = values - minima
    scales = distances.abs().amax(1, keepdim=True) / spans[0]
    codes = distances.div_(scales).round_().nan_to_num_(0.0)  # 0 / 0 in a block of equal weights
    wrong = (codes * scales).add_(minima).ne(values).any(1).nonzero().flatten()
    if not len(wrong):
        return codes, scales
    if len(spans) == 1 or (others := _coded(values[wrong], minima[wrong], spans[1:])) is None:
        return None
    codes[wrong], scales[wrong] = others
    return codes, scales


def coded_product(blocks: Blocks, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return x -> x Wᵀ + bias in float32, for few rows x: codes are multiplied and summed, the sums of a block scaled.

    The kernel is FBGEMM's weighted sum of rows of an 8-bit embedding table, the one in torch that multiplies codes by
    float32 with vector instructions on x86: row k of the table has the codes of input k, a bag is a block, x has the
    weights. The outputs are cut into tiles, so that the table is read once from its beginning to its end: the bags of
    all rows of x with one block follow one another.
    """
    outputs, inputs = blocks.codes.shape
    tiles, groups = -(-outputs // _TILE), inputs // _BLOCK

    def tiled(x: Tensor) -> Tensor:
        """[outputs, n] to [tiles, n, outputs of a tile]."""
        padded = x.new_zeros(tiles * _TILE, x.shape[1])
        padded[:outputs] = x
        return padded.view(tiles, _TILE, -1).transpose(1, 2).contiguous()

    one = torch.tensor([1.0, -float(blocks.zero)]).view(torch.uint8)  # the scale and the minimum of a table's row
    table = torch.cat((tiled(blocks.codes).flatten(0, 1), one.expand(tiles * inputs, -1)), 1)
    scales = tiled(blocks.scales)[:, :, None]
    minima = None if blocks.minima is None else blocks.minima.t().contiguous()
    bags = torch.ops.quantized.embedding_bag_byte_rowwise_offsets.default

    @cache
    def places(n: int) -> tuple[Tensor, Tensor]:
        """The table's rows of every bag, and where the bags end: for n rows of x."""
        each = torch.arange(tiles * inputs, dtype=torch.int32).view(-1, 1, _BLOCK).expand(-1, n, -1)
        return each.flatten(), torch.arange(0, tiles * inputs * n + 1, _BLOCK, dtype=torch.int32)

    def multiply(x: Tensor) -> Tensor:
        grouped = x.reshape(-1, groups, _BLOCK)
        n = len(grouped)
        rows, ends = places(n)
        weights = grouped.transpose(0, 1).expand(tiles, groups, n, _BLOCK).reshape(-1)
        sums = bags(table, rows, ends, False, 0, False, weights, None, True)
        scaled = sums.view(tiles, groups, n, _TILE).mul_(scales).sum(1)
        result = scaled.transpose(0, 1).reshape(n, -1)[:, :outputs]
        if minima is not None:
            result = torch.addmm(result, grouped.sum(2), minima)
        if bias is not None:
            result = result + bias
        return result.reshape(*x.shape[:-1], outputs)

    return multiply
