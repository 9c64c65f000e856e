"""Merging an adapter into a base checkpoint, tensor by tensor: the model is never in memory.

Base weights are read, folded by the very function that ``peftlab.merge`` uses, and written to files of the
same names; what no adapter touches is copied byte for byte.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from peftlab.checkpoints.adapter import Adapter, fill, read_adapter
from peftlab.checkpoints.mergecheck import verify_merge
from peftlab.checkpoints.mergereport import MergeReport, TensorReport, compare
from peftlab.checkpoints.shards import Shard, open_shards
from peftlab.checkpoints.sidefiles import copy_side_files, merge_card, write_model_config
from peftlab.checkpoints.stream import Copy, Job, OutputFile, copying, run
from peftlab.checkpoints.taskmodel import Place, places, task_model, tied_names
from peftlab.checkpoints.tensorfiles import DTYPES, NAMES
from peftlab.errors import PeftlabError
from peftlab.files import staged_directory, write_json, write_text
from peftlab.methods import METHODS, inject, injection
from peftlab.methods.plan import Adapted
from peftlab.references import locate


def merge_checkpoint(
    adapter: str | Path,
    base: str | Path | None,
    out: str | Path,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    recipe: str | None = None,
    card: str | None = None,
) -> MergeReport:
    """Write ``base`` with ``adapter`` folded into its weights to ``out``: a plain Hugging Face directory.

    Each folded weight is W0 + ΔW, product and sum in fp32 and rounded once. Memory: the adapter and a few
    tensors. ``out`` appears at once and complete, or not at all.

    Args:
        adapter: an adapter directory (of ours or of peft's) or a run directory.
        base: reference of the base model; None for the one the adapter names.
        dtype: of the merged weights; None: each as it is stored.
        overwrite: replace ``out`` if it exists.
        recipe: text to embed in the model card. card: the whole README.md; None: a short one is written.

    Raises:
        PeftlabError: the adapter has no linear fold or does not fit the base; a file is missing or damaged;
            a parameter is in neither; ``out`` exists or lies in the base directory.
    """
    started = time.perf_counter()
    held = read_adapter(adapter)
    if not METHODS[held.config.name].folds:
        raise PeftlabError(
            f"{adapter}: method {held.config.name} has no linear fold; keep the adapter beside the base model and "
            "load it with peftlab.load_adapter"
        )
    reference = str(base or held.base_reference or "")
    if not reference:
        raise PeftlabError(f"{adapter} names no base model; pass one (--base)")
    directory = base_directory(reference)
    _refuse_overlap(Path(out), directory)
    plan = plan_merge(held, directory, source=str(adapter), dtype=dtype)
    report = MergeReport(
        str(out), str(adapter), reference, type(plan.model).__name__, held.config.name, plan.dtype, dropped=plan.dropped
    )
    try:
        with staged_directory(out, overwrite=overwrite) as staging:
            _write_weights(plan, staging, report)
            copy_side_files(directory, _adapter_directory(Path(adapter)), staging)
            write_model_config(plan.model, staging, plan.dtype)
            write_text(staging / "README.md", card or merge_card(report, directory, recipe))
            report.seconds = time.perf_counter() - started
            write_json(staging / "merge.json", report.to_dict())
    except OSError as error:
        raise PeftlabError(f"{out}: cannot be written ({error.strerror or error}); nothing was left behind") from error
    finally:
        for shard in plan.shards:
            shard.close()
    return report


@dataclass
class MergePlan:
    """What a merge will write, decided from names and shapes alone.

    Attributes:
        model: the task model on the meta device, adapter injected.
        adapter: the adapter. shards: the base's files.
        found: for each base key its place in the model.
        folded: merged key of each weight to fold, to its leaf's name. replaced: to the adapter's tensor.
        dropped: base keys left out, and why. dtype: the dtype of most weights, by torch's name.
        target: the dtype to write, or None.
    """

    model: PreTrainedModel
    adapter: Adapter
    shards: list[Shard]
    found: dict[str, Place]
    folded: dict[str, str]
    replaced: dict[str, Tensor]
    dropped: dict[str, str]
    dtype: str
    target: torch.dtype | None


def plan_merge(adapter: Adapter, directory: Path, *, source: str, dtype: torch.dtype | None) -> MergePlan:
    """Decide where each tensor of a merged checkpoint comes from; refuse what does not fit."""
    model = task_model(adapter, directory)
    inject(model, adapter.config)
    fill(model, adapter.tensors, source=source)
    leaves = injection(model).replaced
    folded = {f"{leaf}.{key}": leaf for leaf in leaves for key in model.get_submodule(leaf).fold()}
    replaced = {name: adapter.tensors[name] for name in injection(model).originals}
    shards = open_shards(directory)
    found: dict[str, Place] = {}
    dropped: dict[str, str] = {}
    tied = tied_names(model)
    state = {name: tensor.shape for name, tensor in model.state_dict(keep_vars=True).items()}
    everywhere = places(model, [key for shard in shards for key in shard.entries])
    named = {place.name for place in everywhere.values() if place}
    for shard in shards:
        for key, entry in shard.entries.items():
            place = everywhere[key]
            if place is None:
                dropped[key] = f"{type(model).__name__} has no such parameter"
            elif place.name in tied and tied[place.name] in named:
                dropped[key] = f"tied to {tied[place.name]}"
            elif place.name not in replaced and place.converter is None and entry.shape != tuple(state[place.name]):
                raise PeftlabError(
                    f"{shard.path}: {key!r} has shape {entry.shape}, {type(model).__name__} wants {tuple(state[place.name])}"
                )
            else:
                found[key] = place
    _refuse_missing(model, {place.name for place in found.values()} | replaced.keys(), tied, directory)
    sizes: Counter[str] = Counter()
    for shard in shards:
        for entry in shard.entries.values():
            sizes[entry.dtype] += entry.nbytes if DTYPES[entry.dtype].is_floating_point else 0
    main = str(dtype or DTYPES[sizes.most_common(1)[0][0]]).removeprefix("torch.")
    return MergePlan(model, adapter, shards, found, folded, replaced, dropped, main, dtype)


def base_directory(reference: str) -> Path:
    """Return the local directory of a base model: a path, a package's, or the hub's snapshot."""
    place = locate(reference, "base model")
    if isinstance(place, str):
        from huggingface_hub import snapshot_download

        try:
            place = Path(snapshot_download(place, ignore_patterns=["*.h5", "*.msgpack", "*.onnx", "*.gguf", "*.ot"]))
        except (OSError, ValueError) as error:
            raise PeftlabError(f"base model {reference!r}: {str(error).strip().splitlines()[0]}") from None
    return place


def _adapter_directory(path: Path) -> Path:
    return path / "adapter" if (path / "adapter" / "adapter_config.json").exists() else path


def _refuse_overlap(out: Path, base: Path) -> None:
    target, source = out.resolve(), base.resolve()
    if target == source or source in target.parents or target in source.parents:
        raise PeftlabError(f"{out} is, lies in or holds the base directory {base}; choose another place")


def _refuse_missing(model: PreTrainedModel, given: set[str], tied: dict[str, str], base: Path) -> None:
    buffers = {name for name, _ in model.named_buffers()}
    added = {
        f"{leaf}.{name}"
        for leaf in injection(model).replaced
        for name in model.get_submodule(leaf).added
    }
    missing = [
        name
        for name, _ in model.named_parameters(remove_duplicate=False)
        if name not in given and tied.get(name) not in given and name not in added and name not in buffers
    ]
    if missing:
        raise PeftlabError(
            f"{base} and the adapter together lack {len(missing)} parameters of {type(model).__name__}: "
            f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}"
        )


def _write_weights(plan: MergePlan, staging: Path, report: MergeReport) -> None:
    """Write all shards and their index."""
    outputs, where = _open_outputs(plan, staging)
    try:
        jobs = list(_jobs(plan, outputs, where, report))
        largest = max(entry.nbytes for output in outputs for entry in output.entries.values())
        run(jobs, budget=2 * largest)
    finally:
        for output in outputs:
            output.close()
    total = sum(entry.nbytes for output in outputs for entry in output.entries.values())
    report.total_bytes = total
    if len(outputs) > 1:
        count = sum(entry.numel for output in outputs for entry in output.entries.values())
        weight_map = {key: output.path.name for output in outputs for key in output.entries}
        index = {"metadata": {"total_parameters": count, "total_size": total}, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        write_text(staging / "model.safetensors.index.json", text)


def _open_outputs(plan: MergePlan, staging: Path) -> tuple[list[OutputFile], dict[str, OutputFile]]:
    """Open the merged files; returns them and the file of each merged key."""
    main = getattr(torch, plan.dtype)
    contents: list[dict[str, tuple[str, tuple[int, ...]]]] = []
    for shard in plan.shards:
        content = {}
        for key, entry in shard.entries.items():
            place = plan.found.get(key)
            if place is not None:
                shape = tuple(plan.replaced[place.name].shape) if place.name in plan.replaced else entry.shape
                content[place.key] = (_stored(entry.dtype, plan.target), shape)
        contents.append(content)
    held = {place.name for place in plan.found.values()}
    for name, tensor in plan.replaced.items():
        if name not in held:
            contents[-1][name] = (NAMES[main], tuple(tensor.shape))
    outputs = [
        OutputFile(staging / shard.output_name, content)
        for shard, content in zip(plan.shards, contents, strict=True)
        if content
    ]
    return outputs, {key: output for output in outputs for key in output.entries}


def _stored(dtype: str, target: torch.dtype | None) -> str:
    return NAMES[target] if target is not None and DTYPES[dtype].is_floating_point else dtype


def _jobs(
    plan: MergePlan, outputs: list[OutputFile], where: dict[str, OutputFile], report: MergeReport
) -> Iterable[Job | Copy]:
    """Yield the steps of a merge, in the order of the merged files."""
    source = {plan.found[key].key: (shard, key) for shard in plan.shards for key in shard.entries if key in plan.found}
    for output in outputs:
        for key, entry in output.entries.items():
            shard, base_key = source.get(key, (None, ""))
            name = plan.found[base_key].name if shard is not None else key
            if name in plan.replaced:
                reads = [(shard, base_key)] if shard is not None else []
                yield Job(reads, _replace(plan, key, name, entry.dtype, report), where, 2 * entry.nbytes)
            elif name in plan.folded:
                assert shard is not None
                yield Job([(shard, base_key)], _fold(plan, key, name, entry.dtype, report), where, 2 * entry.nbytes)
            elif shard.entries[base_key].dtype == entry.dtype:
                report.copied += 1
                yield copying(shard, base_key, output, key)
            else:
                report.copied += 1
                target = DTYPES[entry.dtype]
                nbytes = entry.nbytes + shard.entries[base_key].nbytes
                yield Job([(shard, base_key)], lambda read, k=key, t=target: {k: read[0].to(t)}, where, nbytes)


def _replace(plan: MergePlan, key: str, name: str, dtype: str, report: MergeReport):
    def make(read: list[Tensor]) -> dict[str, Tensor]:
        tensor = plan.replaced[name].to(DTYPES[dtype])
        report.tensors.append(compare(key, "replaced" if read else "added", read[0] if read else None, tensor))
        return {key: tensor}

    return make


def _fold(plan: MergePlan, key: str, name: str, dtype: str, report: MergeReport):
    leaf = plan.model.get_submodule(plan.folded[name])
    assert isinstance(leaf, Adapted) and isinstance(leaf, nn.Module)
    own = name.removeprefix(f"{plan.folded[name]}.")

    def make(read: list[Tensor]) -> dict[str, Tensor]:
        held = dict(leaf._parameters)
        for added in leaf.added:
            tensor = plan.adapter.tensors.get(f"{plan.folded[name]}.{added}")
            if tensor is not None:
                leaf._parameters[added] = nn.Parameter(tensor, requires_grad=False)
        leaf._parameters[own] = nn.Parameter(read[0], requires_grad=False)
        with torch.no_grad():
            folded = leaf.fold()[own].to(DTYPES[dtype])
        leaf._parameters.update(held)
        report.tensors.append(compare(key, "folded", read[0], folded))
        return {key: folded}

    return make


__all__ = ["MergeReport", "TensorReport", "merge_checkpoint", "verify_merge"]
