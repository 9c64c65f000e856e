"""Quantised weights: bitsandbytes' NF4 and int8 computed again bit for bit, and fp8 for merged checkpoints.

``TrainingWeights`` gives the values that a quantised base computed with in training, from the checkpoint that it was
quantised from: a merge adds the update to these. ``compress`` and ``decompress`` write and read fp8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peftlab.errors import PeftlabError
from peftlab.files import Json
from peftlab.models.quantised import DTYPES, BaseFormat, digest, is_linear, is_transposed

_STEP = 1 << 18  # weights computed at a time, so that intermediates stay small


def rows_per_step(weight: Tensor) -> int:
    """Return how many rows of a matrix (out, in) are computed at a time."""
    return max(1, _STEP // weight.shape[1])


# NF4 (Dettmers et al., QLoRA, arXiv 2305.14314). A weight is read flat, row after row, in blocks of 64. Each block is
# divided by its largest magnitude, each quotient is rounded to the nearest of 16 values, and two 4-bit codes share a
# byte, the first in the high half. Double quantisation also stores the magnitudes in 8 bits: their mean is subtracted,
# and the rest is quantised in blocks of 256.
#
# bitsandbytes 0.50.2 dequantises wrongly on CPUs with AVX-512 where a row's length is a multiple of 16 but not of 64;
# here, as in its other kernels, the format decides.

BLOCK = 64  # weights that share a magnitude
NESTED = 256  # magnitudes that share a magnitude of their own
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
class NestedMagnitudes:
    """Magnitudes in 8 bits: ``dynamic_code()[codes]`` times each block's magnitude, plus ``offset``."""

    codes: Tensor
    magnitudes: Tensor
    offset: Tensor

    def values(self) -> Tensor:
        """Return the magnitudes in fp32."""
        return dynamic_code()[self.codes.long()] * _repeat(self.magnitudes, NESTED, len(self.codes)) + self.offset


def block_magnitudes(weight: Tensor) -> Tensor:
    """Return the largest magnitude of each block of a flat weight, in fp32."""
    whole = len(weight) - len(weight) % BLOCK
    found = [part.view(-1, BLOCK).float().abs().amax(1) for part in weight[:whole].split(_STEP) if len(part)]
    if whole < len(weight):
        found.append(weight[whole:].float().abs().amax().clamp(min=_SMALLEST).view(1))
    return torch.cat(found)


def nest_magnitudes(magnitudes: Tensor) -> NestedMagnitudes:
    """Return block magnitudes, doubly quantised."""
    offset = magnitudes.mean()
    rest = magnitudes - offset
    padding = -len(rest) % NESTED
    blocks = F.pad(rest, (0, padding)).view(-1, NESTED)
    largest = blocks.abs().amax(1)
    quotients = blocks * (1 / largest)[:, None]
    codes = _nearest_codes()[((quotients.clamp(-1, 1) + 1) * 0.5 * 65535 + 0.5).nan_to_num().int()]
    codes[largest == 0] = 0
    return NestedMagnitudes(codes.view(-1)[: len(rest)], largest, offset)


def pack_nf4(weight: Tensor, magnitudes: Tensor) -> Tensor:
    """Return the 4-bit codes of a flat weight, two in a byte; a last one without a partner is paired with 7.

    Args:
        weight: (n,). magnitudes: the largest of each block of 64, (⌈n / 64⌉,).
    """
    flat = weight.float()
    whole = len(flat) - len(flat) % BLOCK
    inverse = 1.0 / magnitudes[: whole // BLOCK].clamp(min=_SMALLEST)
    quotients = (flat[:whole].view(-1, BLOCK) * inverse[:, None]).view(-1)
    if whole < len(flat):
        quotients = torch.cat([quotients, flat[whole:] / magnitudes[-1]])
    quotients = F.pad(quotients.clamp_(-1, 1), (0, len(flat) % 2))
    codes = torch.zeros(len(quotients), dtype=torch.uint8)
    for midpoint in _MIDPOINTS.tolist():  # three times as fast as torch.bucketize
        codes += quotients > midpoint
    return (codes[::2] << 4) | codes[1::2]


def unpack_nf4(codes: Tensor, magnitudes: Tensor, count: int) -> Tensor:
    """Return the first ``count`` weights that packed codes and block magnitudes stand for, in fp32.

    Args:
        codes: two in a byte, (⌈count / 2⌉,). magnitudes: of the blocks, (⌈count / 64⌉,). count: of weights.
    """
    halves = torch.stack([codes >> 4, codes & 15], 1).view(-1)[:count]
    return CODE[halves.int()] * _repeat(magnitudes, BLOCK, count)


def nf4_codes(weight: Tensor) -> Iterator[Tensor]:
    """Yield the packed codes of a weight of any shape, part by part in order."""
    flat = weight.detach().reshape(-1)
    for part, magnitudes in zip(flat.split(_STEP), block_magnitudes(flat).split(_STEP // BLOCK), strict=True):
        yield pack_nf4(part, magnitudes)


def nf4_values(weight: Tensor, *, double: bool, dtype: torch.dtype) -> Tensor:
    """Return what NF4 makes of a weight of any shape: quantised, dequantised to ``dtype``, in fp32.

    Args:
        double: with double quantisation.
    """
    flat = weight.detach().reshape(-1)
    exact = block_magnitudes(flat)
    kept = nest_magnitudes(exact).values() if double else exact
    out = torch.empty(weight.shape, dtype=torch.float32)
    parts = zip(
        flat.split(_STEP),
        out.view(-1).split(_STEP),
        exact.split(_STEP // BLOCK),
        kept.split(_STEP // BLOCK),
        strict=True,
    )
    for part, target, before, after in parts:
        target.copy_(unpack_nf4(pack_nf4(part, before), after, len(part)).to(dtype))
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
def _nearest_codes() -> Tensor:
    """Return the code nearest to each of 65,536 quotients between -1 and 1: bitsandbytes looks codes up in this."""
    code = dynamic_code()
    steps = (2.0 * torch.arange(65536)) / 65535 - 1.0
    return torch.bucketize(steps, 0.5 * (code[:-1] + code[1:]), out_int32=True).to(torch.uint8)


def _repeat(magnitudes: Tensor, block: int, count: int) -> Tensor:
    return magnitudes.repeat_interleave(block)[:count]


# int8 (Dettmers et al., LLM.int8(), arXiv 2208.07339): each row is divided by its largest magnitude.


def rows_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of a matrix (out, in), from -127 to 127, and each row's largest magnitude in fp32.

    bitsandbytes converts the weight to fp16 first, whatever it is stored in.
    """
    half = weight.to(torch.float16)
    magnitudes = half.abs().amax(1).float()
    return torch.round(half * (127.0 / magnitudes[:, None])).to(torch.int8), magnitudes


def int8_codes(weight: Tensor) -> Iterator[Tensor]:
    """Yield the codes of a matrix (out, in), part by part in order."""
    for part in weight.detach().split(rows_per_step(weight)):
        yield rows_int8(part)[0]


def int8_values(weight: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return what int8 makes of a matrix (out, in): quantised, dequantised to ``dtype``, in fp32.

    The products are those of the layer that trains on a CPU: codes · (magnitude · 1/127).

    Args:
        weight: (out, in). dtype: that the model computes in.
    """
    out = torch.empty(weight.shape, dtype=torch.float32)
    rows = rows_per_step(weight)
    for part, target in zip(weight.detach().split(rows), out.split(rows), strict=True):
        codes, magnitudes = rows_int8(part)
        target.copy_(codes.to(dtype).mul_(magnitudes[:, None].mul(1.0 / 127.0)))
    return out


class TrainingWeights:
    """The values of a base's weights after quantisation, by parameter.

    A weight may have been converted to another dtype before it was quantised, which gives other codes: peftlab
    quantises what is stored, ``from_pretrained(dtype=...)`` what it converted. The codes of one weight tell which.

    Args:
        model: the base, on the meta device, injected or not. how: its format in training.
        read: name to the stored weight; None where it is not stored by itself.
        source: the adapter's path, for messages.

    Raises:
        PeftlabError: a format that is not computed here, or the codes are not those of training.
    """

    def __init__(self, model: nn.Module, how: BaseFormat, read: Callable[[str], Tensor | None], source: str) -> None:
        known = how.dtype == "int8" or (how.dtype == "nf4" and how.block == BLOCK)
        if not known:
            blocks = f" in blocks of {how.block}" if how.block not in (0, BLOCK) else ""
            raise PeftlabError(
                f"{source}: its base was quantised to {how.dtype}{blocks}, which is not computed again here; "
                "--into original adds the update to the weights as they are stored"
            )
        self.how = how
        self.transposed = {
            f"{name}.weight": is_transposed(module)
            for name, module in model.named_modules()
            if is_linear(module) and name not in how.left
        }
        self._quantised_from = self._dtype_before(read, source)

    def __contains__(self, name: str) -> bool:
        return name in self.transposed

    def values(self, name: str, weight: Tensor) -> Tensor:
        """Return what the model computed with in place of ``weight`` as it is stored; in fp32."""
        matrix, compute = self._matrix(name, weight, self._quantised_from), DTYPES[self.how.compute]
        if self.how.dtype == "int8":
            found = int8_values(matrix, dtype=compute)
        else:
            found = nf4_values(matrix, double=self.how.double_quant, dtype=compute)
        return found.t().contiguous() if self.transposed[name] else found

    def _matrix(self, name: str, weight: Tensor, dtype: torch.dtype) -> Tensor:
        matrix = weight.to(dtype)
        return matrix.t() if self.transposed[name] else matrix

    def _dtype_before(self, read: Callable[[str], Tensor | None], source: str) -> torch.dtype:
        """Return the dtype that the weights had when they were quantised."""
        name = f"{self.how.first}.weight"
        weight = read(name)
        if not self.how.digest or weight is None:
            return torch.float32
        if name in self.transposed:
            codes = int8_codes if self.how.dtype == "int8" else nf4_codes
            for dtype in DTYPES.values():
                if digest(codes(self._matrix(name, weight, dtype))) == self.how.digest:
                    return dtype
        raise PeftlabError(
            f"{source}: {name} of this base does not have the codes that it had in training, so it is another base (or "
            "was quantised by other code); --into original adds the update to its weights as they are stored"
        )


# fp8 (e4m3) in the layout of compressed-tensors, which vLLM, SGLang and transformers read. A linear map's weight is the
# product of what is stored as ``weight`` (float8_e4m3fn, out x in) and as ``weight_scale`` (fp32, out x 1): each row's
# largest magnitude becomes 448, e4m3's largest number. Inputs are quantised while the model runs, one scale per token.
# (compressed-tensors calls this FP8_DYNAMIC, format ``float-quantized``.)

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


def compress(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix (out, in) in fp8 and the scale of each row (out, 1) in fp32; a row of zeros has scale 1."""
    codes, scales = torch.empty(weight.shape, dtype=FP8), torch.empty(weight.shape[0], 1)
    rows = rows_per_step(weight)
    for part, code, scale in zip(weight.split(rows), codes.split(rows), scales.split(rows), strict=True):
        exact = part.float()
        largest = exact.abs().amax(1, keepdim=True)
        scale.copy_(torch.where(largest > 0, largest / LARGEST, 1.0))
        code.copy_((exact / scale).clamp(-LARGEST, LARGEST))
    return codes, scales


def decompress(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the matrix in fp32.

    Args:
        codes: (out, in). scales: (out, 1).
    """
    return codes.float() * scales


def compressible(model: nn.Module) -> tuple[list[str], list[str]]:
    """Return a model's linear maps that are stored in fp8, and those that are not: the head, and what is tied."""
    from transformers.quantizers.base import get_keys_to_not_convert

    head = set(get_keys_to_not_convert(model))
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [name for name in linears if name not in head], [name for name in linears if name in head]


def quantization_config(left: Sequence[str]) -> dict[str, Json]:
    """Return the ``quantization_config`` of a model whose linear maps but for ``left`` are in fp8."""
    both: dict[str, Json] = {"num_bits": 8, "type": "float", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**both, "strategy": "channel", "dynamic": False},
                "input_activations": {**both, "strategy": "token", "dynamic": True},
                "output_activations": None,
            }
        },
        "ignore": list(left),
        "kv_cache_scheme": None,
    }
