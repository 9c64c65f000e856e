"""The steps of a merge: for each tensor of the merged files, what is read and what is computed from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from peftlab.checkpoints.merge.config import MergeOptions
from peftlab.checkpoints.merge.plan import MergePlan, Target
from peftlab.checkpoints.merge.report import Figures, Tally, TensorReport, compressed, out_of_range, replaced
from peftlab.checkpoints.quantised import compress
from peftlab.checkpoints.tensors import DTYPES, Copy, Job, OutputFile, Shard, copy_step
from peftlab.errors import PeftlabError
from peftlab.methods.leaf import Adapted, Folding, recast
from peftlab.models.skeleton import converted


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
        groups = self._groups()
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
        """Return a merged weight in fp8 and its scales; ``start`` is what the update is added to, or replaces it."""
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
        self.figures.tensors.append(row)
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

    def _groups(self) -> dict[str, list[Target]]:
        """Return the targets that become model tensors together, by the first of those."""
        groups: dict[str, list[Target]] = {}
        for target in self.targets.values():
            if target.place is not None and target.place.converter is not None:
                groups.setdefault(target.place.name, []).append(target)
        return groups

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
                    row = Target(name, name, group[0].dtype, tuple(whole[name].shape))
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
