"""The steps of a merge: what is read for each tensor, what is computed from it, and the figures of what changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from peftlab.checkpoints.merge_plan import BaseAccounts, MergeOptions, MergePlan, Target
from peftlab.checkpoints.quantised import compress, decompress, rows_per_step
from peftlab.checkpoints.tensors import DTYPES, Copy, Job, OutputFile, Shard, copy_step
from peftlab.errors import PeftlabError
from peftlab.methods.base import Adapted, Folding, recast
from peftlab.models.load import converted

ROUNDING_LIMIT = 0.1  # share of ΔW that rounding may lose before the report warns
_BLOCK = 1 << 17  # elements compared at a time: with what is computed of them they stay in a core's cache


@dataclass(frozen=True)
class TensorReport:
    """One tensor of a merged checkpoint that differs from the base's.

    Attributes:
        name: its key in the merged checkpoint; of experts that are stored one by one, the model's name for all of them.
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
        keys: of experts that are stored one by one, their keys in the merged checkpoint; else empty.
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
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class MergeReport:
    """What ``merge_checkpoint`` wrote; ``merge.json`` has the same keys.

    Attributes:
        out: the directory. adapter, base: what was merged. revision: the git revision of a base on the hub.
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
    accounts: BaseAccounts = field(default_factory=BaseAccounts)
    revision: str | None = None


@dataclass
class Figures:
    """Figures measured while a merge's tensors are written, in any order; the fields are ``MergeReport``'s."""

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
        """Count one block: W0, ΔW and their sum in one dtype, and what is stored of it, which may be the sum itself."""
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
    """Return how many elements of ``value`` became infinite, and how many 0, when it was converted to ``stored``.

    Args:
        value: before the conversion. stored: after it, of the same shape.
    """
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


class Steps:
    """The steps of one merge.

    Args:
        plan: what to write. outputs: the file of each merged key. figures: collects each tensor's.
    """

    def __init__(
        self, plan: MergePlan, outputs: dict[str, OutputFile], figures: Figures, options: MergeOptions
    ) -> None:
        self.plan, self.outputs, self.figures, self.options = plan, outputs, figures, options
        self.targets = {target.key: target for targets in plan.files.values() for target in targets}

    def __iter__(self) -> Iterator[Job | Copy]:
        """Yield the steps in the order of the merged files."""
        groups: dict[str, list[Target]] = {}  # those that become model tensors together, by the first of these
        for target in self.targets.values():
            if target.place is not None and target.place.converter is not None:
                groups.setdefault(target.place.name, []).append(target)
        scales = {target.scale for target in self.targets.values()}
        for key, output in self.outputs.items():
            if key in scales:  # written with its weight
                continue
            target = self.targets[key]
            if target.place is not None and target.place.converter is not None:
                group = groups.pop(target.place.name, None)
                if group is not None:
                    yield from self._group(group)
            else:
                yield self._single(target, output)

    def _single(self, target: Target, output: OutputFile) -> Job | Copy:
        shard, key = target.shard, target.source
        entry = shard.entries[key] if shard is not None else None
        reads = [(shard, key)] if shard is not None else []
        nbytes = output.entries[target.key].nbytes + (entry.nbytes if entry is not None else 0)
        wide = self.plan.trained is not None and target.name in self.plan.trained
        if wide or target.scale:
            nbytes += 4 * output.entries[target.key].numel  # the values in fp32
        if self.plan.changes(target.name):

            def change(read: list[Tensor]) -> dict[str, Tensor]:
                return self._changed(target, target.name, read[0] if read else None)

            if entry is not None and entry.dtype == target.dtype and target.name in self.plan.folded and not wide:
                nbytes = entry.nbytes  # folded in place
            return Job(reads, change, self.outputs, nbytes)
        assert shard is not None and entry is not None
        self.figures.copied += 1
        if entry.dtype == target.dtype:
            return copy_step(shard, key, output, target.key)

        def convert(read: list[Tensor]) -> dict[str, Tensor]:
            if target.scale:
                return dict(zip((target.key, target.scale), compress(read[0]), strict=True))
            return {target.key: self._converted(target, read[0])}

        return Job(reads, convert, self.outputs, nbytes)

    def _changed(self, target: Target, name: str, base: Tensor | None) -> dict[str, Tensor]:
        """Return a parameter's merged value, for fp8 with its scales, by key; record its figures."""
        given, trained = self.plan.given.get(name), self.plan.trained
        start = base if given is None else given
        if given is None and base is not None and trained is not None and name in trained:
            start = trained.values(name, base)
        assert start is not None
        if target.scale:
            return self._compressed(target, name, base, start)
        stored = DTYPES[target.dtype]
        if name in self.plan.folded:
            tally = Tally(start.dtype != stored)
            in_place = stored == start.dtype and given is None
            value = self._fold(name, start, Folding(self.options.precision, stored, tally, in_place))
            self._record(target, tally.row(target.key, "folded", value), tally.underflow, tally)
        else:
            value = start.to(stored)
            row = replaced(target.key, base, start, value)
            row = replace(row, kind="dequantised") if given is None else row
            self._record(target, row, out_of_range(start, value)[1])
        return {target.key: value}

    def _compressed(self, target: Target, name: str, base: Tensor | None, start: Tensor) -> dict[str, Tensor]:
        """Return a merged weight in fp8 and its scales; ``start`` is W0, or the value where nothing is folded."""
        folds = name in self.plan.folded
        how = Folding(self.options.precision, torch.float32)
        value = self._fold(name, start, how) if folds else start.float()
        codes, scales = compress(value)
        before = start if folds else base
        tally = compressed(torch.zeros_like(value) if before is None else before, value, codes, scales)
        kind = "folded" if folds else "added" if base is None else "replaced"
        row = tally.row(target.key, kind if folds or name in self.plan.given else "dequantised", codes)
        self._record(target, row, 0, tally if folds else None)
        return {target.key: codes, target.scale: scales}

    def _record(self, target: Target, row: TensorReport, underflow: int, tally: Tally | None = None) -> None:
        """Record the figures of a changed tensor; those of one with an update also count overall."""
        if row.nonfinite and not self.options.allow_nonfinite:
            raise PeftlabError(
                f"{target.key}: {row.nonfinite} merged weights are NaN or infinite; --allow-nonfinite writes them"
            )
        self.figures.tensors.append(replace(row, keys=target.pieces))
        if tally is not None:
            self.figures.tallies.append(tally)
        if underflow:
            self.figures.underflow[target.key] = underflow

    def _converted(self, target: Target, value: Tensor) -> Tensor:
        """Return a base tensor in the dtype it is stored in; record what is out of that dtype's range."""
        stored = value.to(DTYPES[target.dtype])
        if stored.dtype == value.dtype:
            return value
        overflow, underflow = out_of_range(value, stored)
        if overflow and not self.options.allow_nonfinite:
            raise PeftlabError(
                f"{target.key}: {overflow} weights are too large for {target.dtype}; choose another --dtype, or "
                "--allow-nonfinite writes infinity"
            )
        if overflow:
            self.figures.overflow[target.key] = overflow
        if underflow:
            self.figures.underflow[target.key] = underflow
        return stored

    def _fold(self, name: str, weight: Tensor, how: Folding) -> Tensor:
        """Fold by the leaf's own function, on a copy of the empty leaf with weight and adapter put in."""
        leaf_name = self.plan.folded[name]
        empty = self.plan.model.get_submodule(leaf_name)
        leaf = recast(type(empty), empty)
        assert isinstance(leaf, Adapted)
        own = name.removeprefix(f"{leaf_name}.")
        for key, parameter in leaf._parameters.items():
            value = weight if key == own else self.plan.values.get(id(parameter))
            if value is not None:
                leaf._parameters[key] = nn.Parameter(value, requires_grad=False)
            elif key in leaf.added and parameter is not None:
                raise PeftlabError(f"{leaf_name}.{key}: the adapter has no values for it")
        leaf.update_start()
        with torch.no_grad():
            return leaf.fold(replace(how, only=own))[own]

    def _group(self, group: list[Target]) -> Iterator[Job | Copy]:
        """Yield the steps of base tensors that the model has in another form, as experts stored one by one."""
        place = group[0].place
        assert place is not None
        if not any(self.plan.changes(name) for name in place.names):
            for target in group:
                yield self._single(target, self.outputs[target.key])
            return
        from transformers.core_model_loading import dot_natural_key

        group = sorted(group, key=lambda target: dot_natural_key(target.source))
        reads: list[tuple[Shard, str]] = []
        for target in group:
            assert target.shard is not None
            reads.append((target.shard, target.source))
        nbytes = 3 * sum(self.outputs[target.key].entries[target.key].nbytes for target in group)
        yield Job(reads, self._regroup(group), self.outputs, nbytes)

    def _regroup(self, group: list[Target]) -> Callable[[list[Tensor]], dict[str, Tensor]]:
        place = group[0].place
        assert place is not None and place.converter is not None
        converter, model = place.converter, self.plan.model

        def make(read: list[Tensor]) -> dict[str, Tensor]:
            parts = [(t.place.name, t.place.bare, t.place.pattern) for t in group if t.place is not None]
            whole = converted(converter, list(zip(parts, read, strict=True)), model)
            for name in whole:
                if self.plan.changes(name):
                    shape, keys = tuple(whole[name].shape), tuple(target.key for target in group)
                    row = Target(name, name, group[0].dtype, shape, pieces=keys)
                    whole |= self._changed(row, name, whole[name])
            back = converter.reverse_transform()
            pieces = []
            for name, tensor in whole.items():
                renamed, pattern = back.rename_source_key(name)
                pieces.append(((renamed, name, pattern or ""), tensor))
            split = converted(back, pieces, model)
            found = {}
            for target in group:
                assert target.place is not None
                bare = target.place.bare
                name = next(n for n in split if n == bare or n.endswith(f".{bare}") or bare.endswith(f".{n}"))
                found[target.key] = self._converted(target, split.pop(name))
            return found

        return make
