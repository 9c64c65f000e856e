"""Products with the weights of a model, packed once for the CPU.

In float32, weights that 16 bits represent exactly are stored in 16 (FBGEMM), which halves what a step reads from
memory; others are packed by oneDNN, whose products then cost nearly the same for 1 and for 8 tokens.

Weights may also be codes of at most 8 bits, times a scale, plus a minimum (``CodedWeight``): GGUF stores 16 or 32
weights of one output so, bitsandbytes' int8 a whole row. They are loaded dequantised; codes, scales and minima are
found in those numbers again, so that a dequantised copy works alike, and used only if they give every number bit for
bit. A few tokens are then multiplied by the codes (``coded_product``): 1.3 bytes are read per weight instead of 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from peftlab.methods.lora.layers import Gate


@dataclass(frozen=True)
class Addition:
    """A gated LoRA's x Aᵀ Bᵀ, for the rows of x that ``gate`` selects; ``a`` [r, inputs], ``b`` [outputs, r]."""

    a: Tensor
    b: Tensor
    gate: Gate


@dataclass(frozen=True)
class Linear:
    """A linear map x Wᵀ + bias, plus the addition of a gated LoRA for some rows.

    ``weight`` is [outputs, inputs], to be rounded to the model's dtype.
    """

    weight: Tensor
    bias: Tensor | None = None
    addition: Addition | None = None


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
    """Make the linear maps of a module multiply with packed weights, which must not change afterwards."""
    for linear in module.modules():
        if type(linear) is nn.Linear and can_pack(linear.weight):
            linear.forward = _packed_forward(linear)  # type: ignore[method-assign, assignment]


def _packed_forward(linear: nn.Linear) -> Product:
    with torch.no_grad():
        multiply, shrink = Products(pack=True).product([Linear(linear.weight.detach(), linear.bias)])
    return multiply if shrink == 1 else lambda x: multiply(x) * shrink


class Products:
    """A factory of a model's products; ``stored`` names the forms in which their weights are stored.

    Args:
        pack: pack the weights. dtype: of the products; None: the weights' own.
    """

    def __init__(self, pack: bool, dtype: torch.dtype | None = None):
        self._pack, self._dtype = pack, dtype
        self.stored: list[str] = []

    def product(self, linears: Sequence[Linear], outputs: int | None = None) -> tuple[Product, float]:
        """Return x -> (x / shrink) Wᵀ + bias, and shrink, by which the caller has to scale x.

        Args:
            linears: of the same input, stacked along the outputs. outputs: how many of them are computed.
        """
        multiply, shrink = self._product(linears, outputs)
        add = _lora_additions(linears, 1 / shrink)
        return (multiply if add is None else lambda x: add(multiply(x), x)), shrink

    def _product(self, linears: Sequence[Linear], outputs: int | None) -> tuple[Product, float]:
        weights, bias = self._weights_and_bias(linears, outputs)
        weight = _stack_weights(weights)
        if not self._pack:
            return lambda x: F.linear(x, weight, bias), 1.0
        if (grow := float16_scale(weight)) is not None:
            self._record_storage("weights in 16 bits")
            return _float16_product(weight * grow, bias), 1 / grow
        blocks = self._blocks(weights)
        if blocks is not None and blocks.by_row:
            several = _rowwise_product(blocks, bias)
        else:
            packed, pointwise = _onednn_weight(weight), torch.ops.mkldnn._linear_pointwise.default

            def several(x: Tensor) -> Tensor:
                return pointwise(x, packed, bias, "none", [], "")

        if blocks is None:
            return several, 1.0
        few, most = coded_product(blocks, bias), max_coded_rows(blocks) * weight.shape[1]
        return lambda x: few(x) if x.numel() <= most else several(x), 1.0

    def added(self, linear: Linear) -> Added:
        """Return (x, residual) -> residual + x Wᵀ + bias, one kernel where oneDNN packed the weights."""
        sum_up, add = self._added(linear), _lora_additions([linear], 1.0)
        return sum_up if add is None else lambda x, residual: add(sum_up(x, residual), x)

    def _added(self, linear: Linear) -> Added:
        (weight,), bias = self._weights_and_bias([linear])
        if not self._pack:
            return lambda x, residual: residual + F.linear(x, weight, bias)
        if (grow := float16_scale(weight)) is not None:
            self._record_storage("weights in 16 bits")
            half, shrink = _float16_product(weight * grow, None if bias is None else bias * grow), 1 / grow
            return lambda x, residual: torch.add(residual, half(x), alpha=shrink)
        blocks = self._blocks([weight])
        if blocks is not None and blocks.by_row:
            rows = _rowwise_product(blocks, bias)

            def several(x: Tensor, residual: Tensor) -> Tensor:
                return residual + rows(x)
        else:
            packed, fused = _onednn_weight(weight), torch.ops.mkldnn._linear_pointwise.binary

            def several(x: Tensor, residual: Tensor) -> Tensor:
                return fused(x, residual, packed, bias, "add")

        if blocks is None:
            return several
        few, most = coded_product(blocks, bias), max_coded_rows(blocks) * weight.shape[1]
        return lambda x, residual: residual + few(x) if x.numel() <= most else several(x, residual)

    def _weights_and_bias(
        self, linears: Sequence[Linear], outputs: int | None = None
    ) -> tuple[list[Tensor], Tensor | None]:
        """Return the weights of linear maps of one input and their concatenated bias, cut to ``outputs`` outputs."""
        weights = [linear.weight.to(self._dtype or linear.weight.dtype) for linear in linears]
        biases = [linear.bias for linear in linears if linear.bias is not None]
        bias = torch.cat(biases)[:outputs] if biases else None
        return (weights if outputs is None else [_stack_weights(weights)[:outputs]]), bias

    def _blocks(self, weights: Sequence[Tensor]) -> CodedWeight | None:
        blocks = coded_weight(weights)
        self._record_storage("packed by oneDNN" if blocks is None else str(blocks))
        return blocks

    def _record_storage(self, stored: str) -> None:
        if stored not in self.stored:
            self.stored.append(stored)


def float16_scale(weight: Tensor) -> float | None:
    """Return the power of two by which float32 weights become exact in float16; None where there is none.

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


def _stack_weights(weights: Sequence[Tensor]) -> Tensor:
    return torch.cat([*weights]) if len(weights) > 1 else weights[0]


def _lora_additions(linears: Sequence[Linear], factor: float) -> Added | None:
    """Return (y, x) -> y plus the LoRA additions of stacked maps for ``factor`` x, in place; None without any."""
    found = [linear.addition for linear in linears if linear.addition is not None]
    if not found:
        return None
    blocks = [linear.weight.new_zeros(len(linear.weight), 0) for linear in linears]
    for i, linear in enumerate(linears):
        if linear.addition is not None:
            blocks[i] = linear.addition.b
    a, b, gate = torch.cat([added.a for added in found]) * factor, torch.block_diag(*blocks), found[0].gate
    return lambda y, x: gate.add(y, x, a, b)


def _onednn_weight(weight: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR)


def _float16_product(weight: Tensor, bias: Tensor | None) -> Product:
    """Return x -> x Wᵀ + bias in float32, the weights kept in 16 bits."""
    packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
    dynamic = torch.ops.quantized.linear_dynamic_fp16.default
    return lambda x: dynamic(x, packed)


def _rowwise_product(blocks: CodedWeight, bias: Tensor | None) -> Product:
    """Return x -> x Wᵀ + bias in float32, W's codes kept in 16 bits, which represent whole numbers up to 2,048."""
    product, scales = _float16_product(blocks.codes.float(), None), blocks.scales.flatten()
    return lambda x: product(x).mul_(scales) if bias is None else torch.addcmul(bias, product(x), scales)


_ROWS_PER_READ = 256  # rows of a weight whose codes are found at a time, which bounds memory
_PROBED_BLOCKS = 256  # first blocks of a weight, which show whether it has a format, and its frequent codes
_MAX_STEPS = 16  # the largest difference of codes tried for the two nearest values of a block
_ROUNDING_DISTANCE = 0.02  # how far rounding may move a code from a whole number
_EXTRA_BITS = 24 - 17  # of a float32 number past those of GGUF's scales, which are a float16 times 6 bits


@dataclass(frozen=True)
class CodedWeight:
    """A weight [N, K]: block g of row n is scales[n, g] codes + minima[n, g].

    Attributes:
        codes: int8 [N, K]. scales: [N, K / size].
        minima: [N, K / size]; None where they are 0.
    """

    codes: Tensor
    scales: Tensor
    minima: Tensor | None

    @property
    def size(self) -> int:
        """Return how many weights share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    @property
    def by_row(self) -> bool:
        """Return whether a row is one block, without a minimum."""
        return self.scales.shape[1] == 1 and self.minima is None

    def __str__(self) -> str:
        bits = (int(self.codes.max()) - int(self.codes.min())).bit_length()
        return f"{bits}-bit rows" if self.by_row else f"{bits}-bit blocks of {self.size}"


@dataclass(frozen=True)
class _BlockFormat:
    """A format of blocks.

    Attributes:
        size: weights in a block; 0: a row.
        most: the largest code; without minima the largest magnitude of one.
        shifts: with minima what the smallest code of a block may be, else by how many units in the last place the
            quotient of its largest magnitude and code may differ from its scale.
    """

    size: int
    most: int
    shifts: Sequence[int] = (0,)
    minima: bool = False


_ROWS_OF_INT8 = _BlockFormat(0, 127, (0, -1, 1))  # bitsandbytes'
_FORMATS = (
    _ROWS_OF_INT8,
    _BlockFormat(32, 127),  # GGUF's Q4_0, Q5_0, Q8_0, IQ4_NL, IQ4_XS
    _BlockFormat(32, 31, range(31), minima=True),  # Q4_1, Q5_1, Q4_K, Q5_K
    _BlockFormat(16, 32),  # Q3_K, Q6_K
)


def coded_weight(weights: Sequence[Tensor]) -> CodedWeight | None:
    """Return codes and scales that give stacked float32 weights bit for bit; None if there are none.

    Where they have blocks of several sizes, all are cut to the smallest.
    """
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return None
    found = []
    for weight in weights:
        if weight.dtype != torch.float32 or (blocks := _blocks(weight)) is None:
            return None
        found.append(blocks)
    size = min(blocks.size for blocks in found)
    if any(blocks.size % size for blocks in found):
        return None

    def stacked(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.repeat_interleave(b.size // size, 1) for part, b in zip(parts, found, strict=True)])

    scales, minima = [blocks.scales for blocks in found], None
    if any(blocks.minima is not None for blocks in found):
        minima = stacked([torch.zeros_like(b.scales) if b.minima is None else b.minima for b in found])
    return CodedWeight(torch.cat([blocks.codes for blocks in found]), stacked(scales), minima)


def _blocks(weight: Tensor) -> CodedWeight | None:
    return next((blocks for form in _FORMATS if (blocks := _find_blocks(weight, form)) is not None), None)


def _find_blocks(weight: Tensor, form: _BlockFormat) -> CodedWeight | None:
    """Return codes and scales of one format, or None; the first blocks decide whether the others are tried."""
    size = form.size or weight.shape[1]
    if weight.shape[1] % size:
        return None
    first = weight[: -(-_PROBED_BLOCKS * size // weight.shape[1])].reshape(-1, size)[:_PROBED_BLOCKS]
    if _quantise(first[:2], form, []) is None or (probe := _quantise(first, form, [])) is None:
        return None
    usual = _frequent_spans(probe[0], form)
    coded = []
    for rows in weight.split(_ROWS_PER_READ):
        if (part := _quantise(rows.reshape(-1, size), form, usual)) is None:
            return None
        coded.append((part[0].to(torch.int8), *part[1:]))
    codes, scales, minima = (torch.cat(kind) for kind in zip(*coded, strict=True))
    by_row = (len(weight), -1)
    return CodedWeight(codes.view(by_row), scales.view(by_row), minima.view(by_row) if form.minima else None)


def _frequent_spans(codes: Tensor, form: _BlockFormat) -> list[tuple[int, int]]:
    """Return pairs (span of codes, shift), most frequent first: to try them is cheaper than to search each block."""
    if form.minima:
        low = codes.amin(1)
        pairs = torch.stack((codes.amax(1) - low, low), 1)
    else:
        pairs = torch.stack((codes.abs().amax(1), torch.zeros(len(codes))), 1)
    found, counts = pairs.long().unique(dim=0, return_counts=True)
    return [(int(span), int(shift)) for span, shift in found[counts.argsort(descending=True)].tolist()]


_Codes = tuple[Tensor, Tensor, Tensor]
"""Codes [B, size], scales and minima [B, 1] of blocks."""


def _quantise(values: Tensor, form: _BlockFormat, usual: Sequence[tuple[int, int]]) -> _Codes | None:
    """Return codes, scales and minima that give each value of blocks [B, size]; None if a block has none.

    Args:
        usual: spans and shifts that are tried first.
    """
    if usual:
        (span, shift), rest = usual[0], usual[1:]
        found, wrong = _try_span(values, form, values.new_tensor([[span]]), shift)
        return _replace_wrong(found, wrong, lambda: _quantise(values[wrong], form, rest))
    spans = _code_spans(values, form)
    return _quantise_with_spans(values, form, spans, form.shifts) if spans.all() else None


def _quantise_with_spans(values: Tensor, form: _BlockFormat, spans: Tensor, shifts: Sequence[int]) -> _Codes | None:
    """Return codes, scales and minima as ``_quantise`` does, for known spans [B, 1]."""
    if not shifts:
        return None
    found, wrong = _try_span(values, form, spans, shifts[0])
    return _replace_wrong(found, wrong, lambda: _quantise_with_spans(values[wrong], form, spans[wrong], shifts[1:]))


def _replace_wrong(found: _Codes, wrong: Tensor, others: Callable[[], _Codes | None]) -> _Codes | None:
    """Return ``found`` with the blocks at the places ``wrong`` replaced by those that ``others`` finds."""
    if len(wrong):
        if (right := others()) is None:
            return None
        for part, other in zip(found, right, strict=True):
            part[wrong] = other
    return found


def _code_spans(values: Tensor, form: _BlockFormat) -> Tensor:
    """Return the largest code of each block above its smallest, or 0 without minima, [B, 1]; 0 if not found.

    The smallest difference of two values is one, two or a few scales.
    """
    if not form.size:
        return values.new_full((len(values), 1), form.most)
    distances = values - values.amin(1, keepdim=True) if form.minima else values.abs()
    steps = functional.pad(distances.sort(1)[0], (1, 0)).diff(dim=1)
    step = torch.where(steps > 0, steps, torch.inf).amin(1, keepdim=True)
    largest = distances.amax(1, keepdim=True)
    spans = torch.where(largest == 0, 1.0, 0.0)
    for scales in range(1, _MAX_STEPS + 1):
        span = (scales * largest / step).round()
        codes = distances * (span / largest)
        near = (codes - codes.round()).abs().amax(1, keepdim=True) < _ROUNDING_DISTANCE
        spans = torch.where((spans == 0) & near & (span <= form.most), span, spans)
    return spans


def _try_span(values: Tensor, form: _BlockFormat, span: Tensor, shift: int) -> tuple[_Codes, Tensor]:
    """Return codes, scales and minima of blocks [B, size] for a span and a shift, and indices of wrong blocks."""
    if form.minima:
        low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
        scales = _round_to_scale_bits((high - low) / span)
        minima = torch.where(low == high, low, _round_to_scale_bits(low - scales * shift))
    else:
        scales = values.abs().amax(1, keepdim=True) / span
        scales = (scales.view(torch.int32) + shift).view(torch.float32)
        minima = torch.zeros_like(scales)
    codes = (values - minima).div_(scales).round_().nan_to_num_(0.0)  # 0 / 0 in a block of equal weights
    # A norm takes a tenth of the time of all(); it is nan where a value is not finite.
    off = torch.linalg.vector_norm((codes * scales).add_(minima).sub_(values), torch.inf, 1)
    return (codes, scales, minima), off.ne(0).nonzero().flatten()


def _round_to_scale_bits(x: Tensor) -> Tensor:
    """Return x rounded to the bits of stored scales: computed from rounded sums, they are off by a few units."""
    half = 1 << (_EXTRA_BITS - 1)
    return ((x.view(torch.int32) + half) & -(1 << _EXTRA_BITS)).view(torch.float32)


_TILE = 192  # outputs whose sums FBGEMM holds in registers; measured best of 64 to 384


def max_coded_rows(blocks: CodedWeight) -> int:
    """Return the most rows at which codes were measured no slower than 16 bits or oneDNN's float32."""
    return 2 if blocks.by_row else 4


def coded_product(blocks: CodedWeight, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return x -> x Wᵀ + bias in float32 for few rows x: sums of codes times x, scaled by block.

    The kernel is FBGEMM's weighted sum of rows of an 8-bit embedding table, the one in torch that multiplies codes by
    float32 with vector instructions on x86: row k of the table has the codes of input k, a bag is a block, x has the
    weights of a bag. The outputs are cut into tiles, so that the table is read once from its beginning to its end: the
    bags of all rows of x with one block follow one another.

    Args:
        blocks: W, [N, K]. bias: [N] or None.
    """
    outputs, inputs = blocks.codes.shape
    size, tiles = blocks.size, -(-outputs // _TILE)
    groups = inputs // size

    def tiled(x: Tensor) -> Tensor:
        """Cut [outputs, n] into tiles, [tiles, n, outputs of a tile]."""
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
        """Return the table's rows of every bag, and where the bags end, for n rows of x."""
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
