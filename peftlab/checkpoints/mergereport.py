"""What a merge did to each tensor, as numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

ROUNDING_LIMIT = 0.1  # part of ΔW that rounding may eat before the report warns
_BLOCK = 1 << 20  # elements compared at a time


@dataclass(frozen=True)
class TensorReport:
    """One tensor of a merged checkpoint that is not the base's.

    Attributes:
        name: its key in the merged checkpoint.
        kind: ``folded`` (W0 + ΔW), ``replaced`` (trained whole) or ``added`` (the base has none).
        dtype: of the merged tensor. shape: of it.
        ratio: ‖ΔW‖ / ‖W0‖, before rounding; None for an added tensor.
        changed: share of the weights that differ from W0 after rounding.
        survived: share of ΔW that is left after rounding: 1 − ‖ΔW′ − ΔW‖² / ‖ΔW‖², where ΔW′ is what the stored
            weights differ by. Of a tensor of more than 16 thousand weights these three are taken from strips of
            rows of that size, spread over it: one in eight weights, up to a quarter million.
        nonfinite: how many of the stored weights are NaN or infinite.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    ratio: float | None
    changed: float
    survived: float
    nonfinite: int


@dataclass
class MergeReport:
    """What ``merge_checkpoint`` wrote.

    Attributes:
        out: the directory. adapter, base: what went in.
        architecture: the class of the merged model. method: the adapter's.
        dtype: the dtype of most of the weights.
        tensors: what was folded, replaced or added.
        copied: how many tensors are the base's own.
        dropped: base keys that were left out, and why.
        notes: what the reader should know of. warnings: what the reader should act on.
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
    warnings: list[str] = field(default_factory=list)
    total_bytes: int = 0
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, as ``merge.json`` holds it."""
        return asdict(self)

    def judge(self) -> None:
        """Add the warnings that the tensors' figures call for."""
        eaten = [row for row in self.tensors if row.kind == "folded" and 1 - row.survived > ROUNDING_LIMIT]
        if eaten:
            worst = min(eaten, key=lambda row: row.survived)
            self.warnings.append(
                f"rounding to {worst.dtype} eats more than {ROUNDING_LIMIT:.0%} of the update in {len(eaten)} of "
                f"{len(self.tensors)} tensors (worst: {worst.name}, {1 - worst.survived:.0%}); merge with --dtype "
                "fp32, or keep the adapter unmerged"
            )


class Tally:
    """Sums over the blocks of one tensor while it is folded: what went in, what came out, what was stored.

    Args:
        converted: the tensor is stored in another dtype than the base's.
    """

    def __init__(self, converted: bool) -> None:
        self.converted = converted
        self.weight = self.delta = self.error = 0.0
        self.changed = self.numel = 0
        self.finite = True

    def __call__(self, before: Tensor | None, after: Tensor, stored: Tensor) -> None:
        """Count one block.

        Args:
            before: its first rows of W0 in the precision of the fold; None: look for NaN and infinity alone.
            after: the sum in that precision. stored: what is stored of it.
        """
        if stored.is_floating_point():
            # A finite sum of squares below the square of the largest stored number: all of them are finite.
            self.finite &= _square(after) < torch.finfo(stored.dtype).max ** 2
        if before is None:
            return
        after, stored = after[: len(before)], stored[: len(before)]
        # In another dtype than the base's W0 itself is rounded, too.
        start = before.to(stored.dtype).to(before.dtype) if self.converted else before
        moved = stored.to(before.dtype) - start
        delta = after - before
        self.numel += moved.numel()
        self.changed += int(torch.count_nonzero(moved))
        self.weight += _square(before)
        self.delta += _square(delta)
        self.error += _square(moved.sub_(delta))

    def row(self, name: str, kind: str, stored: Tensor) -> TensorReport:
        """Return the figures of the whole tensor."""
        nonfinite = 0 if self.finite else int((~torch.isfinite(stored)).sum())
        clean = math.isfinite(self.weight + self.delta + self.error)
        ratio = math.sqrt(self.delta / self.weight) if self.weight and clean else None
        survived = max(0.0, 1 - self.error / self.delta) if self.delta and clean else 1.0
        return TensorReport(
            name,
            kind,
            str(stored.dtype).removeprefix("torch."),
            tuple(stored.shape),
            ratio,
            self.changed / self.numel if self.numel else 0.0,
            survived,
            nonfinite,
        )


def replaced(name: str, before: Tensor | None, value: Tensor, stored: Tensor) -> TensorReport:
    """Return the row of a tensor that is trained whole: W0 (None where the base has none), its value as trained
    and as stored."""
    tally = Tally(before is not None and before.dtype != stored.dtype)
    kind = "replaced"
    if before is None or before.shape != stored.shape:
        kind, before = "added", torch.zeros_like(value)
    flat = [tensor.reshape(-1).split(_BLOCK) for tensor in (before, value, stored)]
    for old, new, kept in zip(*flat, strict=True):
        tally(old.float(), new.float(), kept)
    row = tally.row(name, kind, stored)
    return row if kind == "replaced" else TensorReport(**asdict(row) | {"ratio": None, "changed": 1.0})


def summary(report: MergeReport) -> Mapping[str, Any]:
    """Return the few figures that a console or a card shows of a report."""
    folded = [row for row in report.tensors if row.kind == "folded"]
    ratios = [row.ratio for row in folded if row.ratio is not None]
    return {
        "tensors folded": len(folded),
        "tensors trained whole": len(report.tensors) - len(folded),
        "tensors copied": report.copied,
        "largest ‖ΔW‖/‖W‖": max(ratios, default=0.0),
        "least share of ΔW kept": min((row.survived for row in folded), default=1.0),
        "base keys dropped": len(report.dropped),
        "bytes": report.total_bytes,
        "seconds": report.seconds,
    }


def _square(block: Tensor) -> float:
    flat = block.reshape(-1)
    return float(torch.dot(flat, flat))
