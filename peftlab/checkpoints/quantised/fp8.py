"""Weights in fp8 (e4m3) in the layout of compressed-tensors, which vLLM, SGLang and transformers read.

A linear map's weight is the product of what is stored as ``weight`` (float8_e4m3fn, out × in) and as ``weight_scale``
(fp32, out × 1): each row's largest magnitude becomes 448, e4m3's largest number. Inputs are quantised while the model
runs, one scale per token. (compressed-tensors calls this FP8_DYNAMIC, format ``float-quantized``.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from peftlab.files import Json

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
_STEP = 1 << 18  # weights computed at a time, so that intermediates stay small


def compress(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix (out, in) in fp8 and the scale of each row (out, 1) in fp32; a row of zeros has scale 1."""
    codes, scales = torch.empty(weight.shape, dtype=FP8), torch.empty(weight.shape[0], 1)
    rows = rows_at_once(weight)
    for part, code, scale in zip(weight.split(rows), codes.split(rows), scales.split(rows), strict=True):
        exact = part.float()
        largest = exact.abs().amax(1, keepdim=True)
        scale.copy_(torch.where(largest > 0, largest / LARGEST, 1.0))
        code.copy_((exact / scale).clamp(-LARGEST, LARGEST))
    return codes, scales


def decompress(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the matrix in fp32."""
    return codes.float() * scales


def rows_at_once(weight: Tensor) -> int:
    """Return how many rows of a matrix are computed at a time."""
    return max(1, _STEP // weight.shape[1])


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
