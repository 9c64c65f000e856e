"""What a merge changed, measured per tensor, and the report of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from peftlab.checkpoints.quantised import compress, decompress, rows_per_step

ROUNDING_LIMIT = 0.1  # share of ΔW that rounding may lose before the report warns
_BLOCK = 1 << 20  # elements compared at a time


@dataclass(frozen=True)
class TensorReport:
    """One tensor of a merged checkpoint that differs from the base's.

    Attributes:
        name: its key in the merged checkpoint.
        kind: ``folded`` (W0 + ΔW), ``replaced`` (trained whole), ``added`` (the base has none) or ``dequantised``
            (the value that a quantised base computes with; ΔW is its difference from the weight as stored).
        dtype: of the merged tensor. shape: of it.
        ratio: ‖ΔW‖ / ‖W0‖, before rounding; None for an added tensor.
        changed: share of the weights that differ from W0 after rounding.
        survived: share of ΔW that remains after rounding: 1 − ‖ΔW′ − ΔW‖² / ‖ΔW‖², where ΔW′ is what the stored
            weights differ by.
        nonfinite: how many of the stored weights are NaN or infinite.
        kept: of a weight in fp8, the update's share along itself: ⟨ΔW′, ΔW⟩ / ‖ΔW‖², where ΔW′ is the difference
            between W0 + ΔW and W0, both in fp8. The rest of ΔW′ is rounding noise; None for other dtypes.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    ratio: float | None
    changed: float
    survived: float
    nonfinite: int
    kept: float | None = None


@dataclass(frozen=True)
class BaseAccounts:
    """What became of the tensors in the base's files.

    Attributes:
        tensors: how many there are. changed: by the merge. copied: with the values they have.
        left_out: named in the report's ``dropped``, with the reason.
    """

    tensors: int = 0
    changed: int = 0
    copied: int = 0
    left_out: int = 0

    def line(self) -> str:
        """Return the accounts as a line of text."""
        found = self.changed + self.copied + self.left_out
        return (
            f"{found} of {self.tensors} base tensors accounted for: {self.changed} changed, {self.copied} copied, "
            f"{self.left_out} left out"
        )


@dataclass(frozen=True)
class MergeReport:
    """What ``merge_checkpoint`` wrote; ``merge.json`` has the same keys.

    Attributes:
        out: the directory. adapter, base: what was merged.
        architecture: the class of the merged model. method: the adapter's.
        dtype: the dtype of most of the weights.
        tensors: what was folded, replaced or added.
        copied: how many tensors are the base's own.
        dropped: base keys that were left out, and why.
        ignored: base keys that the class has no parameter for, copied as they are.
        accounts: what became of the base's tensors.
        underflow, overflow: how many weights a change of dtype made 0 or infinite, by tensor; of those that the
            adapter changes, the infinite ones are in ``tensors``.
        notes: what the reader should know. warnings: what the reader should act on.
        total_bytes: size of all weights. seconds: wall time.
        into: ``dequantised`` or ``original``: what the update was added to; None where the base is not quantised.
        survived, kept: as a tensor's, over all folded tensors together; None where nothing was folded or, ``kept``,
            stored in fp8.
    """

    out: str
    adapter: str
    base: str
    architecture: str
    method: str
    dtype: str
    tensors: list[TensorReport]
    copied: int
    dropped: dict[str, str]
    underflow: dict[str, int]
    overflow: dict[str, int]
    notes: list[str]
    warnings: list[str]
    total_bytes: int
    seconds: float
    into: str | None = None
    survived: float | None = None
    kept: float | None = None
    ignored: list[str] = field(default_factory=list)
    accounts: BaseAccounts = BaseAccounts()


@dataclass
class Figures:
    """What is measured while a merge's tensors are written, in any order; the fields are ``MergeReport``'s."""

    tensors: list[TensorReport] = field(default_factory=list)
    copied: int = 0
    underflow: dict[str, int] = field(default_factory=dict)
    overflow: dict[str, int] = field(default_factory=dict)
    tallies: list[Tally] = field(default_factory=list)

    @property
    def survived(self) -> float | None:
        """The share of all updates together that is left after rounding."""
        delta = math.fsum(tally.delta for tally in self.tallies)
        return max(0.0, 1 - math.fsum(tally.error for tally in self.tallies) / delta) if delta else None

    @property
    def kept(self) -> float | None:
        """The share of all updates together along themselves, for fp8."""
        delta = math.fsum(tally.delta for tally in self.tallies)
        along = [tally.along for tally in self.tallies if tally.along is not None]
        return math.fsum(along) / delta if delta and along else None

    def notes(self) -> list[str]:
        """Return the notes that the figures call for."""
        found = [f"{_counted(self.underflow)} became 0 in the change of dtype"] if self.underflow else []
        if self.kept is not None:
            error, delta = (math.fsum(getattr(tally, key) for tally in self.tallies) for key in ("error", "delta"))
            worst = min((row for row in self.tensors if row.kept is not None), key=lambda row: row.kept or 0.0)
            found.append(
                f"fp8 keeps {self.kept:.1%} of the update along itself (worst: {worst.name}, {worst.kept:.1%}); "
                f"rounding adds noise of {math.sqrt(error / delta):.2g} times the update's norm"
            )
        return found

    def warnings(self) -> list[str]:
        """Return the warnings that the figures call for."""
        found = []
        if self.overflow:
            found.append(f"{_counted(self.overflow)} became infinite in the change of dtype")
        # In fp8 the noise of rounding exceeds most updates, whatever they are: there ``kept`` says what is left of one.
        lossy = [
            row
            for row in self.tensors
            if row.kind == "folded" and row.kept is None and 1 - row.survived > ROUNDING_LIMIT
        ]
        if lossy:
            worst = min(lossy, key=lambda row: row.survived)
            found.append(
                f"rounding to {worst.dtype} loses more than {ROUNDING_LIMIT:.0%} of the update in {len(lossy)} of "
                f"{len(self.tensors)} tensors (worst: {worst.name}, {1 - worst.survived:.0%}); merge with --dtype "
                "fp32, or keep the adapter unmerged"
            )
        return found


class Tally:
    """Sums over the blocks of one tensor while it is merged: what it was, what was added, what is stored.

    Args:
        converted: the tensor is stored in another dtype than the base's.
    """

    def __init__(self, converted: bool) -> None:
        self.converted = converted
        self.weight = self.delta = self.error = 0.0
        self.along: float | None = None  # of fp8: ⟨what is stored of ΔW, ΔW⟩
        self.changed = self.numel = self.underflow = 0

    def __call__(self, before: Tensor, delta: Tensor, after: Tensor, stored: Tensor) -> None:
        """Count one block: W0, ΔW and their sum in one dtype, and what is stored of the sum."""
        start = before
        if self.converted:
            start = before.to(stored.dtype).to(before.dtype)  # W0 itself is rounded, too
            self.underflow += _nonzero(after) - _nonzero(stored)
        moved = stored.to(before.dtype, copy=True).sub_(start)
        self.numel += moved.numel()
        self.changed += _nonzero(moved)
        self.weight += _square(before)
        self.delta += _square(delta)
        self.error += _square(moved.sub_(delta))

    def row(self, name: str, kind: str, stored: Tensor) -> TensorReport:
        """Return the figures of the whole tensor."""
        clean = math.isfinite(self.weight + self.delta + self.error)  # then W0, ΔW and what is stored are finite
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
            0 if clean else int((~torch.isfinite(stored.float())).sum()),
            None if self.along is None else self.along / self.delta if self.delta else 1.0,
        )


def compressed(before: Tensor, value: Tensor, codes: Tensor, scales: Tensor) -> Tally:
    """Return the figures of a merged weight in fp8.

    Args:
        before: W0. value: W0 + ΔW. codes, scales: what is stored of it; each is compared with W0 in fp8.
    """
    tally, along = Tally(converted=False), []
    rows = rows_per_step(value)
    for old, new, code, scale in zip(*(t.detach().split(rows) for t in (before, value, codes, scales)), strict=True):
        start, stored = decompress(*compress(old)), decompress(code, scale)
        delta = new - old.float()
        tally(start, delta, new, stored)
        along.append(float(torch.dot((stored - start).flatten(), delta.flatten())))
    tally.along = math.fsum(along)
    return tally


def replaced(name: str, before: Tensor | None, value: Tensor, stored: Tensor) -> TensorReport:
    """Return the row of a tensor that is trained whole.

    Args:
        before: W0; None where the base has none. value, stored: the tensor as trained and as stored.
    """
    tally = Tally(before is not None and before.dtype != stored.dtype)
    kind = "replaced"
    if before is None or before.shape != stored.shape:
        kind, before = "added", torch.zeros_like(value)
    wide = torch.float64 if before.dtype == torch.float64 else torch.float32
    for old, new, kept in _blocks(before, value, stored):
        tally(old.to(wide), new.to(wide) - old.to(wide), new.to(wide), kept)
    row = tally.row(name, kind, stored)
    return row if kind == "replaced" else replace(row, ratio=None, changed=1.0)


def out_of_range(value: Tensor, stored: Tensor) -> tuple[int, int]:
    """Return how many elements of ``value`` became infinite, and how many 0, when it was converted to ``stored``."""
    overflow = underflow = 0
    for old, new in _blocks(value, stored):
        underflow += _nonzero(old) - _nonzero(new)
        if not math.isfinite(_square(new)):
            overflow += int((torch.isfinite(old) & ~torch.isfinite(new)).sum())
    return overflow, underflow


def _counted(lost: Mapping[str, int]) -> str:
    worst = max(lost, key=lambda name: lost[name])
    return f"{sum(lost.values()):,} weights in {len(lost)} tensors (most: {worst}, {lost[worst]:,})"


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.detach().reshape(-1).split(_BLOCK) for tensor in tensors), strict=True)


def _square(block: Tensor) -> float:
    """Return the sum of squares; in fp64 where fp32 overflows."""
    flat = block.reshape(-1).float() if block.itemsize < 4 else block.reshape(-1)
    total = float(torch.dot(flat, flat))
    return total if math.isfinite(total) or flat.dtype == torch.float64 else _square(flat.double())


def _nonzero(block: Tensor) -> int:
    # Several times as fast as torch.count_nonzero, which does not use vector instructions.
    return int(np.count_nonzero((block.float() if block.itemsize < 4 else block).numpy() != 0))
