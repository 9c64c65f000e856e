"""Merging an adapter into a base checkpoint, tensor by tensor: the model is never in memory.

Base weights are read, folded by the function that ``peftlab.merge`` uses, and written to files of the same names;
weights that the adapter does not change are copied byte for byte.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from torch import nn

from peftlab.checkpoints.adapter import Adapter, adapter_of, read_adapter
from peftlab.checkpoints.merge.base import plain_base, refuse_overlap, stored_base
from peftlab.checkpoints.merge.options import MergeOptions
from peftlab.checkpoints.merge.plan import MergePlan, plan_merge
from peftlab.checkpoints.merge.report import Figures, MergeReport
from peftlab.checkpoints.merge.sidefiles import copy_side_files, merge_card, write_model_config
from peftlab.checkpoints.merge.steps import Steps
from peftlab.checkpoints.tensors import OutputFile, run
from peftlab.errors import PeftlabError
from peftlab.files import staged_directory, write_json, write_text
from peftlab.methods.table import METHODS
from peftlab.models.finetuned import refuse_gated
from peftlab.references import upload


def merge_checkpoint(
    adapter: str | Path | Adapter, base: str | Path | None, out: str | Path, options: MergeOptions | None = None
) -> MergeReport:
    """Write ``base`` with ``adapter`` folded into its weights to ``out``: a plain Hugging Face directory.

    Each folded weight is W0 + ΔW, product and sum in fp32 and rounded once; all other weights are the base's bytes.
    Where the adapter was trained on a base in 4 or 8 bits, W0 is what that computed with (``MergeOptions.into``).
    Memory: the adapter and three times the largest tensor. ``out`` appears complete or not at all. Base keys that
    the task model has no parameter for (another head's, buffers no longer stored) are dropped and listed in the
    report, which is also written to ``out`` as ``merge.json``.

    Args:
        adapter: an adapter directory (peftlab's, peft's or AdapterHub's), a run directory, or a combined adapter.
        base: reference of the base model; None for the one the adapter names.
        options: default: ``MergeOptions()``.

    Raises:
        PeftlabError: the adapter has no linear fold or does not fit the base; a file is missing or damaged; a
            parameter is in neither; ``out`` exists or is inside the base directory; the disk is full.
    """
    options = options or MergeOptions()
    if isinstance(adapter, Adapter):
        place, name, read = None, "combined", adapter
    else:
        place, name = Path(adapter), str(adapter)
        for directory in (place, place / "adapter"):
            refuse_gated(directory)
        read = read_adapter(place, lora_alpha=options.lora_alpha, allow_nonfinite=options.allow_nonfinite)
    _refuse_without_fold(read, name)
    reference = str(base or read.base_reference or "")
    if not reference:
        raise PeftlabError(f"{name} names no base model; pass one (--base)")
    report = _merge(read, place, name, reference, Path(out), options)
    if options.push_to_hub:
        upload(Path(out), options.push_to_hub)
    return report


def check_merge(model: nn.Module, base: str, out: str | Path, options: MergeOptions) -> None:
    """Plan the merge of an injected model's adapter, as it will be once it is trained; nothing is written.

    A base that is dequantised or folded first is written by the class itself, whose names fit: it is not planned.

    Args:
        model: the model with its adapter. base, out, options: as for ``merge_checkpoint``.

    Raises:
        PeftlabError: as ``merge_checkpoint``.
    """
    adapter = adapter_of(model, base=base)
    _refuse_without_fold(adapter, "the adapter")
    directory, _ = stored_base(base, options)
    if directory is not None:
        refuse_overlap(Path(out), directory)
        plan_merge(adapter, directory, options, source="the adapter").close()


def _refuse_without_fold(adapter: Adapter, name: str) -> None:
    if not METHODS[adapter.config.name].folds:
        raise PeftlabError(
            f"{name}: method {adapter.config.name} has no linear fold; keep the adapter beside the base model and "
            "load it with peftlab.load_adapter"
        )


def _merge(
    adapter: Adapter, place: Path | None, name: str, reference: str, out: Path, options: MergeOptions
) -> MergeReport:
    """Merge ``adapter``, which was read from ``place`` and is called ``name``, into ``reference``."""
    started = time.perf_counter()
    with plain_base(reference, adapter, out, options) as (directory, notes):
        refuse_overlap(out, directory)
        # The copy of a GGUF file is what would be quantised on loading; that of a quantised checkpoint is the result.
        dequantised = bool(notes) and not reference.endswith(".gguf")
        plan = plan_merge(adapter, directory, options, source=name, dequantised=dequantised)
        inputs = {"the base model": directory, "the adapter": place}
        try:
            with staged_directory(out, "model", overwrite=options.overwrite, inputs=inputs) as staging:
                figures = Figures()
                total_bytes = _write_weights(plan, staging, figures, options)
                report = MergeReport(
                    out=str(out),
                    adapter=name,
                    base=reference,
                    architecture=type(plan.model).__name__,
                    method=adapter.config.name,
                    dtype=plan.dtype if plan.plain is None else "float8_e4m3fn",
                    tensors=sorted(figures.tensors, key=lambda row: row.name),
                    copied=figures.copied,
                    dropped=plan.dropped,
                    underflow=figures.underflow,
                    overflow=figures.overflow,
                    notes=[*plan.notes, *notes, *figures.notes(), *copy_side_files(directory, place, staging)],
                    warnings=figures.warnings(),
                    total_bytes=total_bytes,
                    seconds=time.perf_counter() - started,
                    into=_into(plan, adapter, dequantised=dequantised),
                    survived=figures.survived,
                    kept=figures.kept,
                )
                write_model_config(plan, staging)
                write_text(staging / "README.md", merge_card(report, directory, staging, options))
                write_json(staging / "merge.json", report)
        finally:
            plan.close()
    return report


def _into(plan: MergePlan, adapter: Adapter, *, dequantised: bool) -> str | None:
    """Return what the update was added to, if the base is quantised on disk or was in training."""
    if plan.trained is not None or dequantised:
        return "dequantised"
    return "original" if adapter.base.get("format") else None


def _write_weights(plan: MergePlan, staging: Path, figures: Figures, options: MergeOptions) -> int:
    """Write all merged files and, if there are several, their index; return the size of all weights in bytes."""
    outputs: list[OutputFile] = []
    try:
        for name, targets in plan.files.items():
            outputs.append(OutputFile(staging / name, {t.key: (t.dtype, t.shape) for t in targets}))
        where = {key: output for output in outputs for key in output.entries}
        largest = max(entry.nbytes for output in outputs for entry in output.entries.values())
        run(Steps(plan, where, figures, options), budget=2 * largest)
    finally:
        for output in outputs:
            output.close()
    total = sum(entry.nbytes for output in outputs for entry in output.entries.values())
    if len(outputs) > 1:
        _write_index(plan, staging, where, total)
    return total


def _write_index(plan: MergePlan, staging: Path, where: dict[str, OutputFile], total_bytes: int) -> None:
    parameters = {name for name, _ in plan.model.named_parameters(remove_duplicate=False)}
    targets = [target for targets in plan.files.values() for target in targets if target.name in parameters]
    count = sum(where[target.key].entries[target.key].numel for target in targets)
    index = {
        "metadata": {"total_parameters": count, "total_size": total_bytes},
        "weight_map": {key: output.path.name for key, output in where.items()},
    }
    write_text(staging / "model.safetensors.index.json", json.dumps(index, indent=2, sort_keys=True) + "\n")
