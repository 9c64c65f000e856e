"""Pickled state dicts, read as tensors alone: code in a pickle never runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor

from peftlab.errors import PeftlabError, reason
from peftlab.files import open_regular
from peftlab.untyped import Unpickled

# The part of torch's message that names the fault in the file; the rest advises to load it without protection.
_FAULT = re.compile(r"unsupported (?:global|class|operand)\W+(?:GLOBAL )?[\w.]+", re.IGNORECASE)


def read_pickle(path: Path, *, mapped: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a pickled state dict.

    Args:
        mapped: leave the values in the file until they are used, where the file's format allows it.

    Raises:
        PeftlabError: not a regular file, a damaged one, or one that contains anything but tensors by name.
    """
    loaded = unpickle(path, mapped=mapped)
    if not _named(loaded):
        raise PeftlabError(f"{path}: contains something other than tensors by name")
    return loaded


def unpickle(path: Path, *, mapped: bool = False) -> Unpickled:
    """Return the tensors, numbers, texts and containers of a pickle, on the CPU.

    Args:
        mapped: as in ``read_pickle``.

    Raises:
        PeftlabError: not a regular file, a damaged one, or one that contains other objects.
    """
    open_regular(path).close()
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        except RuntimeError as error:
            if not mapped or "mmap" not in str(error):
                raise
            # Files of torch before 1.6 cannot be mapped.
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can raise anything
        raise PeftlabError(f"{path}: cannot be read as tensors alone ({_fault(error)})") from None


def _named(value: object) -> TypeGuard[dict[str, Tensor]]:
    return isinstance(value, dict) and all(isinstance(k, str) and isinstance(t, Tensor) for k, t in value.items())


def _fault(error: Exception) -> str:
    if found := _FAULT.search(str(error)):
        return found[0]
    return "not a pickle of tensors" if "weights_only" in str(error) else reason(error)
