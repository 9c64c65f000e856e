"""The dtypes that a user can name: ``fp32``, ``bf16`` and ``fp16``."""

from __future__ import annotations

import torch

from peftlab.errors import PeftlabError, did_you_mean

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STORED = {**DTYPES, "fp8": torch.float8_e4m3fn}
_LONG_NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}


def compute_dtype(precision: str) -> torch.dtype:
    """Return the dtype of activations at a ``train.precision``: TF32 is a way to multiply fp32."""
    return DTYPES.get(precision, torch.float32)


def torch_dtype(name: str, option: str = "dtype") -> torch.dtype:
    """Return the dtype that ``fp32``, ``bf16`` or ``fp16`` names.

    Args:
        option: what the user set, for the error message.

    Raises:
        PeftlabError: any other name; torch's own names are answered with ours.
    """
    return _named(name, option, DTYPES)


def stored_dtype(name: str, option: str = "dtype") -> torch.dtype:
    """Return the dtype that weights on disk are asked to have: as ``torch_dtype``, or ``fp8`` (e4m3)."""
    return _named(name, option, STORED)


def _named(name: str, option: str, known: dict[str, torch.dtype]) -> torch.dtype:
    if name in known:
        return known[name]
    hint = f"; write {_LONG_NAMES[name]}" if name in _LONG_NAMES else did_you_mean(name, known)
    raise PeftlabError(f"{option} {name}: one of {', '.join(known)}{hint}")
