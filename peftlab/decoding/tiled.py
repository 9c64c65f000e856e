"""Weights in tiles, for the compiled products of ``kernels.py``.

A tile is sixteen outputs. It has their weights of the first input, then those of the second, and so on. Numbers are
bfloat16 or float16 where that gives every weight exactly, codes (``packed.CodedWeight``) with one scale for a row or a
block, and perhaps a minimum, or float32. Codes of at most 4 bits are halves of a byte, of two inputs: the lower half is
the first one's. Scales and minima are float16 where that gives all of them exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from peftlab.decoding.packed import Linear, coded_weight, float16_scale

LANES = 16
"""Outputs of a tile: the numbers of a vector."""
F32, BF16, F16, INT8, UINT4, PAIRS = range(6)
"""Forms of tiled weights; PAIRS are bfloat16 numbers that multiply inputs in bfloat16."""


@dataclass(frozen=True)
class TiledWeight:
    """A linear map with its weight [N, K] in tiles; the tensors keep the memory that instructions name.

    Attributes:
        form: of its numbers. inputs: K. tiles: N / 16, rounded up.
        codes: [tiles, K / 2, 2, 16], in which UINT4 has the 2 in a byte; of PAIRS [tiles, K / 2, 16, 2].
        factor: what sums are multiplied by.
        bias: [16 tiles]. size: inputs of a block. least: what is to be added to each code.
        scales, minima: [tiles, K / size, 16]; None where they are 1 and 0.
        stored: the form in words.
    """

    form: int
    inputs: int
    tiles: int
    codes: Tensor
    bias: Tensor | None
    stored: str
    factor: float = 1.0
    size: int = 0
    least: int = 0
    scales: Tensor | None = None
    minima: Tensor | None = None

    @property
    def sums_needed(self) -> bool:
        """Return whether a product needs the sums of a block's inputs."""
        return self.minima is not None or self.least != 0

    def fields(self) -> dict[str, float]:
        """Return the fields of an instruction that multiplies with this weight."""

        def address(x: Tensor | None) -> int:
            return 0 if x is None else x.data_ptr()

        return {
            "form": self.form,
            "inputs": self.inputs,
            "tiles": self.tiles,
            "codes": address(self.codes),
            "bias": address(self.bias),
            "factor": self.factor,
            "size": self.size or self.inputs,
            "least": self.least,
            "scales": address(self.scales),
            "minima": address(self.minima),
            "halves": self.scales is not None and self.scales.dtype == torch.float16,
        }


def tile_linears(
    linears: Sequence[Linear], *, outputs: int | None = None, interleaved: bool = False, rounded: bool = False
) -> TiledWeight:
    """Return linear maps of one input, stacked along the outputs, in tiles.

    Args:
        linears: with an even number of inputs and no additions. outputs: how many of them are computed.
        interleaved: the outputs are two halves (gates, and what they multiply), of which the tiles take turns.
        rounded: the weights are bfloat16 and their inputs are rounded to bfloat16.
    """
    weights = [linear.weight[:outputs].float() for linear in linears]
    biases = [linear.bias.float() for linear in linears if linear.bias is not None]
    weight = torch.cat(weights)
    halves = 2 if interleaved else 1
    inputs, tiles = weight.shape[1], halves * -(-len(weight) // (halves * LANES))

    def tiled(x: Tensor) -> Tensor:
        """Cut rows [N, n] into tiles, [tiles, n, 16]."""
        parts = x.view(halves, -1, x.shape[1])
        parts = F.pad(parts, (0, 0, 0, tiles // halves * LANES - parts.shape[1]))
        parts = parts.view(halves, tiles // halves, LANES, -1).transpose(0, 1).flatten(0, 1)
        return parts.transpose(1, 2).contiguous()

    bias = tiled(torch.cat(biases)[:outputs, None]).flatten() if biases else None
    half = weight.bfloat16()
    if rounded:
        pairs = tiled(half).unflatten(1, (-1, 2)).transpose(2, 3).contiguous()
        return TiledWeight(PAIRS, inputs, tiles, pairs, bias, "weights and inputs in bf16")
    if torch.equal(half.float(), weight):
        return TiledWeight(BF16, inputs, tiles, tiled(half), bias, "weights in 16 bits")
    if (grow := float16_scale(weight)) is not None:
        return TiledWeight(F16, inputs, tiles, tiled((weight * grow).half()), bias, "weights in 16 bits", 1 / grow)
    blocks = coded_weight(weights)
    if blocks is None:
        return TiledWeight(F32, inputs, tiles, tiled(weight), bias, "weights in 32 bits")
    numbers = torch.stack([blocks.scales] if blocks.minima is None else [blocks.scales, blocks.minima])
    if torch.equal(numbers.half().float(), numbers):
        numbers = numbers.half()
    form, least, codes = INT8, 0, tiled(blocks.codes)
    low = int(blocks.codes.min())
    if int(blocks.codes.max()) - low < 16:
        shifted = tiled((blocks.codes - low).to(torch.uint8)).view(tiles, inputs // 2, 2, LANES)
        form, least, codes = UINT4, low, shifted[:, :, 0] | shifted[:, :, 1] << 4
    return TiledWeight(
        form,
        inputs,
        tiles,
        codes,
        bias,
        str(blocks),
        size=blocks.size,
        least=least,
        scales=tiled(numbers[0]),
        minima=None if blocks.minima is None else tiled(numbers[1]),
    )
