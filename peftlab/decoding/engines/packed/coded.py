"""The product of a few rows with the codes of a weight in blocks: 1.3 bytes are read per weight instead of 4."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from peftlab.decoding.engines.packed.blocks import Blocks

_TILE = 192  # outputs whose sums FBGEMM holds in registers; measured best of 64 to 384


def few_rows(blocks: Blocks) -> int:
    """Return up to how many rows this was measured no slower than weights in 16 bits, or than oneDNN's float32."""
    return 2 if blocks.by_row else 4


def coded_product(blocks: Blocks, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return x -> x Wᵀ + bias in float32, for few rows x: codes are multiplied and summed, the sums of a block scaled.

    The kernel is FBGEMM's weighted sum of rows of an 8-bit embedding table, the one in torch that multiplies codes by
    float32 with vector instructions on x86: row k of the table has the codes of input k, a bag is a block, x has the
    weights. The outputs are cut into tiles, so that the table is read once from its beginning to its end: the bags of
    all rows of x with one block follow one another.
    """
    outputs, inputs = blocks.codes.shape
    size, tiles = blocks.size, -(-outputs // _TILE)
    groups = inputs // size

    def tiled(x: Tensor) -> Tensor:
        """[outputs, n] to [tiles, n, outputs of a tile]."""
        padded = x.new_zeros(tiles * _TILE, x.shape[1])
        padded[:outputs] = x
        return padded.view(tiles, _TILE, -1).transpose(1, 2).contiguous()

    least = int(blocks.codes.min())  # stored as 0: what is added to all codes is rounded in every sum
    one = torch.tensor([1.0, float(least)]).view(torch.uint8)  # the scale and the minimum of a table's row
    stored = (blocks.codes.short() - least).to(torch.uint8)
    table = torch.cat((tiled(stored).flatten(0, 1), one.expand(tiles * inputs, -1)), 1)
    scales = tiled(blocks.scales)[:, :, None]
    minima = None if blocks.minima is None else blocks.minima.t().contiguous()
    bags = torch.ops.quantized.embedding_bag_byte_rowwise_offsets.default

    @cache
    def places(n: int) -> tuple[Tensor, Tensor]:
        """The table's rows of every bag, and where the bags end: for n rows of x."""
        each = torch.arange(tiles * inputs, dtype=torch.int32).view(-1, 1, size).expand(-1, n, -1)
        return each.flatten(), torch.arange(0, tiles * inputs * n + 1, size, dtype=torch.int32)

    def multiply(x: Tensor) -> Tensor:
        grouped = x.reshape(-1, groups, size)
        n = len(grouped)
        rows, ends = places(n)
        weights = grouped.transpose(0, 1).expand(tiles, groups, n, size).reshape(-1)
        sums = bags(table, rows, ends, False, 0, False, weights, None, True)
        scaled = sums.view(tiles, groups, n, _TILE).mul_(scales).sum(1)
        result = scaled.transpose(0, 1).reshape(n, -1)[:, :outputs]
        if minima is not None:
            result = torch.addmm(result, grouped.sum(2), minima)
        if bias is not None:
            result = result + bias
        return result.reshape(*x.shape[:-1], outputs)

    return multiply
