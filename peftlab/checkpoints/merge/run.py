"""Merging an adapter into a base checkpoint, tensor by tensor: the model is never in memory.

Base weights are read, folded by the very function that ``peftlab.merge`` uses, and written to files of the
same names; what no adapter touches is copied byte for byte.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from peftlab.checkpoints.adapter import Adapter, read_adapter
from peftlab.checkpoints.io.stream import OutputFile, run
from peftlab.checkpoints.merge.base import plain_base, refuse_overlap
from peftlab.checkpoints.merge.plan import MergePlan, plan_merge
from peftlab.checkpoints.merge.report import MergeReport
from peftlab.checkpoints.merge.sidefiles import copy_side_files, merge_card, write_model_config
from peftlab.checkpoints.merge.steps import Steps
from peftlab.checkpoints.merge.verify import verify_merge
from peftlab.errors import PeftlabError
from peftlab.files import write_json, write_text
from peftlab.hub import upload
from peftlab.methods.table import METHODS
from peftlab.outputs import staged_directory

__all__ = ["MergeReport", "merge_checkpoint", "verify_merge"]


def merge_checkpoint(
    adapter: str | Path | Adapter,
    base: str | Path | None,
    out: str | Path,
    *,
    dtype: torch.dtype | None = None,
    fp64: bool = False,
    overwrite: bool = False,
    allow_nonfinite: bool = False,
    dequantize: bool = False,
    trust_remote_code: bool = False,
    lora_alpha: float | None = None,
    push_to_hub: str | None = None,
    recipe: str | None = None,
    card: str | None = None,
) -> MergeReport:
    """Write ``base`` with ``adapter`` folded into its weights to ``out``: a plain Hugging Face directory.

    Each folded weight is W0 + ΔW, product and sum in fp32 and rounded once; all other weights are the base's
    bytes. Memory: the adapter and three times the largest tensor. ``out`` appears at once and complete, or not
    at all. Base keys that the task model has no place for (another head's, buffers of old) are dropped and
    listed in the report, which also lies in ``out`` as ``merge.json``.

    Args:
        adapter: an adapter directory (of ours or of peft's), a run directory, or a combined adapter.
        base: reference of the base model; None for the one the adapter names.
        dtype: of the merged weights; None: each as it is stored.
        fp64: product and sum in fp64.
        overwrite: replace ``out`` if it is a model directory that peftlab wrote.
        allow_nonfinite: write NaN and infinity where they arise.
        dequantize: accept a bitsandbytes, GPTQ or AWQ base; it becomes a plain one, several times as large.
        trust_remote_code: run the model code that the base directory brings along.
        lora_alpha: α of a loralib file, which does not say it.
        push_to_hub: id of a repository to upload ``out`` to when it is complete, private if it is new.
        recipe: text to embed in the model card. card: the whole README.md; None: a short one is written.

    Raises:
        PeftlabError: the adapter has no linear fold or does not fit the base; a file is missing or damaged;
            a parameter is in neither; ``out`` exists or is inside the base directory; the disk is full.
    """
    started = time.perf_counter()
    name = str(adapter) if not isinstance(adapter, Adapter) else "combined"
    held = (
        adapter
        if isinstance(adapter, Adapter)
        else read_adapter(adapter, lora_alpha=lora_alpha, allow_nonfinite=allow_nonfinite)
    )
    if not METHODS[held.config.name].folds:
        raise PeftlabError(
            f"{name}: method {held.config.name} has no linear fold; keep the adapter beside the base model and "
            "load it with peftlab.load_adapter"
        )
    reference = str(base or held.base_reference or "")
    if not reference:
        raise PeftlabError(f"{name} names no base model; pass one (--base)")
    with plain_base(reference, held, Path(out), dequantize, trust_remote_code) as (directory, notes):
        refuse_overlap(Path(out), directory)
        plan = plan_merge(held, directory, source=name, stored=dtype, trust_remote_code=trust_remote_code)
        plan.notes += notes
        kind = type(plan.model).__name__
        report = MergeReport(str(out), name, reference, kind, held.config.name, plan.dtype, dropped=plan.dropped)
        report.notes = plan.notes
        precision = torch.float64 if fp64 else torch.float32
        own = Path(adapter) if not isinstance(adapter, Adapter) else None
        inputs = {"the base model": directory, "the adapter": own}
        try:
            with staged_directory(out, "model", overwrite=overwrite, inputs=inputs) as staging:
                _write_weights(plan, staging, report, precision, allow_nonfinite)
                report.judge()
                report.notes += copy_side_files(directory, own, staging)
                write_model_config(plan.model, staging, plan.dtype)
                write_text(staging / "README.md", card or merge_card(report, directory, recipe))
                report.seconds = time.perf_counter() - started
                write_json(staging / "merge.json", report.to_dict())
        except OSError as error:
            reason = error.strerror or str(error)
            raise PeftlabError(f"{out}: cannot be written ({reason}); nothing of it was left behind") from error
        finally:
            plan.close()
    if push_to_hub:
        upload(Path(out), push_to_hub)
    return report


def _write_weights(
    plan: MergePlan, staging: Path, report: MergeReport, precision: torch.dtype, allow_nonfinite: bool
) -> None:
    """Write all merged files and, if there are several, their index."""
    outputs: list[OutputFile] = []
    try:
        for name, targets in plan.files.items():
            outputs.append(OutputFile(staging / name, {t.key: (t.dtype, t.shape) for t in targets}))
        where = {key: output for output in outputs for key in output.entries}
        largest = max(entry.nbytes for output in outputs for entry in output.entries.values())
        run(
            Steps(plan, where, report, precision=precision, allow_nonfinite=allow_nonfinite),
            budget=2 * largest,
        )
    finally:
        for output in outputs:
            output.close()
    report.tensors.sort(key=lambda row: row.name)
    report.total_bytes = sum(entry.nbytes for output in outputs for entry in output.entries.values())
    if len(outputs) > 1:
        parameters = {name for name, _ in plan.model.named_parameters(remove_duplicate=False)}
        count = sum(
            where[target.key].entries[target.key].numel
            for targets in plan.files.values()
            for target in targets
            if target.name in parameters
        )
        weight_map = {key: output.path.name for key, output in where.items()}
        index = {
            "metadata": {"total_parameters": count, "total_size": report.total_bytes},
            "weight_map": weight_map,
        }
        write_text(staging / "model.safetensors.index.json", json.dumps(index, indent=2, sort_keys=True) + "\n")
