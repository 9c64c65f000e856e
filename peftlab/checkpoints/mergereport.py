"""What a merge did to each tensor, as numbers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorReport:
    """One tensor of a merged checkpoint that is not the base's.

    Attributes:
        name: its key in the merged checkpoint.
        kind: ``folded`` (W0 + ΔW), ``replaced`` (trained whole) or ``added`` (the base has none).
        dtype: of the merged tensor. shape: of it.
        ratio: ‖W − W0‖ / ‖W0‖; None for an added tensor.
        changed: share of the weights that differ from the base's after rounding.
        nonfinite: how many are NaN or infinite.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    ratio: float | None = None
    changed: float = 1.0
    nonfinite: int = 0


@dataclass
class MergeReport:
    """What ``merge_checkpoint`` wrote.

    Attributes:
        out: the directory. adapter, base: what went in.
        architecture: the class of the merged model. method: the adapter's.
        dtype: the dtype of most of the weights.
        tensors: what was folded, replaced or added.
        copied: how many tensors are the base's, byte for byte.
        dropped: base keys that were left out, and why.
        notes: what the reader should know of.
        total_bytes: size of all weights. seconds: wall time.
    """

    out: str
    adapter: str
    base: str
    architecture: str
    method: str
    dtype: str
    tensors: list[TensorReport] = field(default_factory=list)
    copied: int = 0
    dropped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    total_bytes: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, as ``merge.json`` holds it."""
        return asdict(self)


def compare(name: str, kind: str, before: Tensor | None, after: Tensor) -> TensorReport:
    """Return the row of one tensor, from its values before and after."""
    nonfinite = int((~torch.isfinite(after)).sum()) if after.is_floating_point() else 0
    dtype = str(after.dtype).removeprefix("torch.")
    if before is None or before.shape != after.shape:
        return TensorReport(name, kind, dtype, tuple(after.shape), nonfinite=nonfinite)
    size = float(before.float().norm())
    moved = float((after.float() - before.float()).norm())
    ratio = moved / size if size else (math.inf if moved else 0.0)
    changed = float((after != before).float().mean()) if after.numel() else 0.0
    return TensorReport(name, kind, dtype, tuple(after.shape), ratio, changed, nonfinite)
