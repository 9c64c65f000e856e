"""Products with the weights of a model, packed once for the CPU.

In float32, weights that 16 bits represent exactly are stored in 16 (FBGEMM), which halves what a step reads from
memory; others are packed by oneDNN, whose products then cost nearly the same for 1 and for 8 tokens. Where they are
codes of at most 8 bits (``blocks.py``), a few tokens are multiplied by the codes (``coded.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from peftlab.decoding.engines.packed.blocks import Blocks, blocks_of
from peftlab.decoding.engines.packed.coded import coded_product, few_rows
from peftlab.decoding.engines.structure import Linear

Product = Callable[[Tensor], Tensor]
Added = Callable[[Tensor, Tensor], Tensor]
_PACKED_FOR = 8  # rows that oneDNN packs the weights for; measured no slower at 1 and at 64


def can_pack(weights: Tensor | PreTrainedModel) -> bool:
    """Return whether weights can be packed for the CPU: with oneDNN, in float32 or bfloat16."""
    return (
        weights.device.type == "cpu"
        and weights.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and (weights.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack_linears(module: nn.Module) -> None:
    """Let the linear maps of a module whose weights do not change any more multiply with packed weights."""
    for linear in module.modules():
        if type(linear) is nn.Linear and can_pack(linear.weight):
            linear.forward = _of_packed(linear)  # type: ignore[method-assign, assignment]


def _of_packed(linear: nn.Linear) -> Product:
    with torch.no_grad():
        multiply, shrink = Products(pack=True).product([Linear(linear.weight.detach(), linear.bias)])
    return multiply if shrink == 1 else lambda x: multiply(x) * shrink


class Products:
    """Makes the products of a model; ``stored`` says in what ways the weights of those made so far are stored.

    Args:
        pack: pack the weights. dtype: of the products; None: the weights' own.
    """

    def __init__(self, pack: bool, dtype: torch.dtype | None = None):
        self._pack, self._dtype = pack, dtype
        self.stored: list[str] = []

    def product(self, linears: Sequence[Linear], outputs: int | None = None) -> tuple[Product, float]:
        """Return x -> (x / shrink) Wᵀ + bias, and shrink, a factor for whatever computes x.

        Args:
            linears: of the same input, stacked along the outputs. outputs: how many of them are computed.
        """
        multiply, shrink = self._product(linears, outputs)
        add = _additions(linears, 1 / shrink)
        return (multiply if add is None else lambda x: add(multiply(x), x)), shrink

    def _product(self, linears: Sequence[Linear], outputs: int | None) -> tuple[Product, float]:
        weights, bias = self._parts(linears, outputs)
        weight = _stacked(weights)
        if not self._pack:
            return lambda x: F.linear(x, weight, bias), 1.0
        if (grow := growth(weight)) is not None:
            self._note("weights in 16 bits")
            return _half(weight * grow, bias), 1 / grow
        blocks = self._blocks(weights)
        if blocks is not None and blocks.by_row:
            several = _rows(blocks, bias)
        else:
            packed, pointwise = _packed(weight), torch.ops.mkldnn._linear_pointwise.default

            def several(x: Tensor) -> Tensor:
                return pointwise(x, packed, bias, "none", [], "")

        if blocks is None:
            return several, 1.0
        few, most = coded_product(blocks, bias), few_rows(blocks) * weight.shape[1]
        return lambda x: few(x) if x.numel() <= most else several(x), 1.0

    def added(self, linear: Linear) -> Added:
        """Return (x, residual) -> residual + x Wᵀ + bias, one kernel where oneDNN packed the weights."""
        sum_up, add = self._added(linear), _additions([linear], 1.0)
        return sum_up if add is None else lambda x, residual: add(sum_up(x, residual), x)

    def _added(self, linear: Linear) -> Added:
        (weight,), bias = self._parts([linear])
        if not self._pack:
            return lambda x, residual: residual + F.linear(x, weight, bias)
        if (grow := growth(weight)) is not None:
            self._note("weights in 16 bits")
            half, shrink = _half(weight * grow, None if bias is None else bias * grow), 1 / grow
            return lambda x, residual: torch.add(residual, half(x), alpha=shrink)
        blocks = self._blocks([weight])
        if blocks is not None and blocks.by_row:
            rows = _rows(blocks, bias)

            def several(x: Tensor, residual: Tensor) -> Tensor:
                return residual + rows(x)
        else:
            packed, fused = _packed(weight), torch.ops.mkldnn._linear_pointwise.binary

            def several(x: Tensor, residual: Tensor) -> Tensor:
                return fused(x, residual, packed, bias, "add")

        if blocks is None:
            return several
        few, most = coded_product(blocks, bias), few_rows(blocks) * weight.shape[1]
        return lambda x, residual: residual + few(x) if x.numel() <= most else several(x, residual)

    def _parts(self, linears: Sequence[Linear], outputs: int | None = None) -> tuple[list[Tensor], Tensor | None]:
        """Return the weights of linear maps of one input, and their biases in one, as far as outputs are computed."""
        weights = [linear.weight.to(self._dtype or linear.weight.dtype) for linear in linears]
        biases = [linear.bias for linear in linears if linear.bias is not None]
        bias = torch.cat(biases)[:outputs] if biases else None
        return (weights if outputs is None else [_stacked(weights)[:outputs]]), bias

    def _blocks(self, weights: Sequence[Tensor]) -> Blocks | None:
        blocks = blocks_of(weights)
        self._note("packed by oneDNN" if blocks is None else str(blocks))
        return blocks

    def _note(self, stored: str) -> None:
        if stored not in self.stored:
            self.stored.append(stored)


def growth(weight: Tensor) -> float | None:
    """The power of two that moves float32 weights into float16 without rounding a single one; None where none does.

    Checkpoints in bfloat16 or float16 contain numbers that float16 represents, too, once the largest is
    moved to the top of its range: with activations, products and sums in float32, the result is the same from half the
    bytes.
    """
    if (
        weight.dtype != torch.float32
        or not torch.any(weight)
        or "fbgemm" not in torch.backends.quantized.supported_engines
    ):
        return None
    grow = 2.0 ** (15 - int(torch.frexp(weight.abs().max()).exponent))
    grown = weight * grow
    return grow if torch.equal(grown.half().float(), grown) else None


def _stacked(weights: Sequence[Tensor]) -> Tensor:
    return torch.cat([*weights]) if len(weights) > 1 else weights[0]


def _additions(linears: Sequence[Linear], factor: float) -> Added | None:
    """Return (y, x) -> y with the additions of stacked linear maps, of ``factor`` x, in place; None: they have none."""
    found = [linear.addition for linear in linears if linear.addition is not None]
    if not found:
        return None
    blocks = [linear.weight.new_zeros(len(linear.weight), 0) for linear in linears]
    for i, linear in enumerate(linears):
        if linear.addition is not None:
            blocks[i] = linear.addition.b
    a, b, gate = torch.cat([added.a for added in found]) * factor, torch.block_diag(*blocks), found[0].gate
    return lambda y, x: gate.add(y, x, a, b)


def _packed(weight: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR)


def _half(weight: Tensor, bias: Tensor | None) -> Product:
    """x -> x Wᵀ + bias in float32, the weights kept in 16 bits."""
    packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
    dynamic = torch.ops.quantized.linear_dynamic_fp16.default
    return lambda x: dynamic(x, packed)


def _rows(blocks: Blocks, bias: Tensor | None) -> Product:
    """x -> x Wᵀ + bias in float32, W's codes kept in 16 bits, which represent whole numbers up to 2,048."""
    product, scales = _half(blocks.codes.float(), None), blocks.scales.flatten()
    return lambda x: product(x).mul_(scales) if bias is None else torch.addcmul(bias, product(x), scales)
