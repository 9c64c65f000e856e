"""Weights that are a code of at most 8 bits, times a scale, plus a minimum, found in float32 numbers.

GGUF stores 16 or 32 weights of one output so, bitsandbytes' int8 a whole row. They are loaded dequantised; codes,
scales and minima are found in those numbers again, so that a dequantised copy works alike, and used only if they give
every number bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_ROWS = 256  # of a weight that are read at a time
_PROBED = 256  # blocks that show whether a weight is of a form, and which codes are usual
_STEPS = 16  # scales between the two nearest values of a block, at most
_NEAR = 0.02  # how far from a whole number rounding takes a code
_EXTRA_BITS = 24 - 17  # of a float32 number past those of GGUF's scales, which are a float16 times 6 bits


@dataclass(frozen=True)
class Blocks:
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
        """Weights that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    @property
    def by_row(self) -> bool:
        """Whether a row is one block, without a minimum."""
        return self.scales.shape[1] == 1 and self.minima is None

    def __str__(self) -> str:
        bits = (int(self.codes.max()) - int(self.codes.min())).bit_length()
        return f"{bits}-bit rows" if self.by_row else f"{bits}-bit blocks of {self.size}"


@dataclass(frozen=True)
class _Form:
    """What blocks may look like.

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


_ROWS_OF_INT8 = _Form(0, 127, (0, -1, 1))  # bitsandbytes'
_FORMS = (
    _ROWS_OF_INT8,
    _Form(32, 127),  # GGUF's Q4_0, Q5_0, Q8_0, IQ4_NL, IQ4_XS
    _Form(32, 31, range(31), minima=True),  # Q4_1, Q5_1, Q4_K, Q5_K
    _Form(16, 32),  # Q3_K, Q6_K
)


def blocks_of(weights: Sequence[Tensor]) -> Blocks | None:
    """Return the blocks of which float32 weights, one below the other, consist, every number exactly; else None.

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
    return Blocks(torch.cat([blocks.codes for blocks in found]), stacked(scales), minima)


def _blocks(weight: Tensor) -> Blocks | None:
    return next((blocks for form in _FORMS if (blocks := _of_form(weight, form)) is not None), None)


def _of_form(weight: Tensor, form: _Form) -> Blocks | None:
    """Return the blocks of one form; the first few show whether there are any."""
    size = form.size or weight.shape[1]
    if weight.shape[1] % size:
        return None
    first = weight[: -(-_PROBED * size // weight.shape[1])].reshape(-1, size)[:_PROBED]
    if _coded(first[:2], form, []) is None or (probe := _coded(first, form, [])) is None:
        return None
    usual = _usual(probe[0], form)
    coded = []
    for rows in weight.split(_ROWS):
        if (part := _coded(rows.reshape(-1, size), form, usual)) is None:
            return None
        coded.append((part[0].to(torch.int8), *part[1:]))
    codes, scales, minima = (torch.cat(kind) for kind in zip(*coded, strict=True))
    by_row = (len(weight), -1)
    return Blocks(codes.view(by_row), scales.view(by_row), minima.view(by_row) if form.minima else None)


def _usual(codes: Tensor, form: _Form) -> list[tuple[int, int]]:
    """Return the most frequent pairs of a span of codes and a shift: trying them is cheaper than finding a block's."""
    if form.minima:
        low = codes.amin(1)
        pairs = torch.stack((codes.amax(1) - low, low), 1)
    else:
        pairs = torch.stack((codes.abs().amax(1), torch.zeros(len(codes))), 1)
    found, counts = pairs.long().unique(dim=0, return_counts=True)
    return [(int(span), int(shift)) for span, shift in found[counts.argsort(descending=True)].tolist()]


_Coded = tuple[Tensor, Tensor, Tensor]
"""Codes [B, size], scales and minima [B, 1] of blocks."""


def _coded(values: Tensor, form: _Form, usual: Sequence[tuple[int, int]]) -> _Coded | None:
    """Return what gives each value of blocks [B, size]; None if a block is not of the form.

    Args:
        usual: spans and shifts that are tried first.
    """
    if usual:
        (span, shift), rest = usual[0], usual[1:]
        found, wrong = _tried(values, form, values.new_tensor([[span]]), shift)
        return _with_others(found, wrong, lambda: _coded(values[wrong], form, rest))
    spans = _spans(values, form)
    return _shifted(values, form, spans, form.shifts) if spans.all() else None


def _shifted(values: Tensor, form: _Form, spans: Tensor, shifts: Sequence[int]) -> _Coded | None:
    """As ``_coded``, the spans [B, 1] known."""
    if not shifts:
        return None
    found, wrong = _tried(values, form, spans, shifts[0])
    return _with_others(found, wrong, lambda: _shifted(values[wrong], form, spans[wrong], shifts[1:]))


def _with_others(found: _Coded, wrong: Tensor, others: Callable[[], _Coded | None]) -> _Coded | None:
    """Put what ``others`` finds into the places where what was found is wrong."""
    if len(wrong):
        if (right := others()) is None:
            return None
        for part, other in zip(found, right, strict=True):
            part[wrong] = other
    return found


def _spans(values: Tensor, form: _Form) -> Tensor:
    """Return the largest code of blocks above the smallest, or above 0 without minima, [B, 1]; 0 where there is none.

    The smallest difference of two values is one, two or a few scales.
    """
    if not form.size:
        return values.new_full((len(values), 1), form.most)
    distances = values - values.amin(1, keepdim=True) if form.minima else values.abs()
    steps = functional.pad(distances.sort(1)[0], (1, 0)).diff(dim=1)
    step = torch.where(steps > 0, steps, torch.inf).amin(1, keepdim=True)
    largest = distances.amax(1, keepdim=True)
    spans = torch.where(largest == 0, 1.0, 0.0)
    for scales in range(1, _STEPS + 1):
        span = (scales * largest / step).round()
        codes = distances * (span / largest)
        near = (codes - codes.round()).abs().amax(1, keepdim=True) < _NEAR
        spans = torch.where((spans == 0) & near & (span <= form.most), span, spans)
    return spans


def _tried(values: Tensor, form: _Form, span: Tensor, shift: int) -> tuple[_Coded, Tensor]:
    """Return codes, scales and minima of blocks [B, size] by a span and a shift, and the blocks they do not give."""
    if form.minima:
        low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
        scales = _short((high - low) / span)
        minima = torch.where(low == high, low, _short(low - scales * shift))
    else:
        scales = values.abs().amax(1, keepdim=True) / span
        scales = (scales.view(torch.int32) + shift).view(torch.float32)
        minima = torch.zeros_like(scales)
    codes = (values - minima).div_(scales).round_().nan_to_num_(0.0)  # 0 / 0 in a block of equal weights
    # A norm takes a tenth of the time of all(); it is nan where a value is not finite.
    off = torch.linalg.vector_norm((codes * scales).add_(minima).sub_(values), torch.inf, 1)
    return (codes, scales, minima), off.ne(0).nonzero().flatten()


def _short(x: Tensor) -> Tensor:
    """Round to the bits that scales and minima have: found from rounded sums, they are off by a few units."""
    half = 1 << (_EXTRA_BITS - 1)
    return ((x.view(torch.int32) + half) & -(1 << _EXTRA_BITS)).view(torch.float32)
