"""Merging an adapter into a base checkpoint, tensor by tensor: the model is never in memory.

Base weights are read, folded by the function that ``peftlab.merge`` uses, and written to files of the same names;
weights that the adapter does not change are copied byte for byte.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from peftlab.checkpoints.adapter import Adapter, adapter_of, load_model, read_adapter
from peftlab.checkpoints.gguf import (
    KEEP,
    TYPES,
    GgufBase,
    GgufFile,
    GgufModel,
    Incoming,
    architecture_of,
    gguf_type,
    plan_file,
)
from peftlab.checkpoints.merge_plan import MergeOptions, MergePlan, Target, plan_merge
from peftlab.checkpoints.merge_steps import Figures, MergeReport, Steps
from peftlab.checkpoints.quantised import quantization_config
from peftlab.checkpoints.tensors import (
    SAFETENSORS,
    SAFETENSORS_INDEX,
    Copy,
    OutputFile,
    open_shards,
    read_header,
    run,
    write_tensors,
)
from peftlab.errors import PeftlabError
from peftlab.files import (
    MARK,
    TOKENIZER,
    contains_path,
    read_object,
    real_path,
    scratch_directory,
    staged_directory,
    staged_file,
    typed_value,
    write_errors,
    write_json,
    write_text,
)
from peftlab.methods.config import METHODS
from peftlab.models.architectures import PlainModel, decoder, decoder_config, inside
from peftlab.models.config import base_directory, find_model, model_place, refuse_gated
from peftlab.models.load import check_directory, language_model_class, load_config, load_tokenizer, places
from peftlab.references import upload
from peftlab.untyped import Attributes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def merge_checkpoint(
    adapter: str | Path | Adapter,
    base: str | Path | None,
    out: str | Path,
    options: MergeOptions | None = None,
    *,
    combined: Sequence[Path] = (),
) -> MergeReport:
    """Write ``base`` with ``adapter`` folded into its weights to ``out``: a plain Hugging Face directory.

    Each folded weight is W0 + ΔW, product and sum in fp32 and rounded once; all other weights are the base's bytes.
    Where the adapter was trained on a base in 4 or 8 bits, W0 is what that computed with (``MergeOptions.into``).
    Memory: the adapter and three times the largest tensor. ``out`` appears complete or not at all. Base tensors that
    the task model has no parameter for (layers that predict further tokens, a vision tower) are copied as they are;
    the head of another task is dropped. Both are in the report, which is also written to ``out`` as ``merge.json``.

    Args:
        adapter: an adapter directory (peftlab's, peft's or AdapterHub's), a run directory, or a combined adapter.
        base: reference of the base model; None for the one the adapter names.
        options: default: ``MergeOptions()``.
        combined: directories of the adapters that a combined one is made of.

    Raises:
        PeftlabError: the adapter has no linear fold or does not fit the base; a file is missing or damaged; a
            parameter is in neither; ``out`` exists or is inside the base directory; the disk is full.
    """
    options = options or MergeOptions()
    places = list(combined) if isinstance(adapter, Adapter) else [Path(adapter)]
    for directory in (each for place in places for each in (place, place / "adapter")):
        refuse_gated(directory)
    if isinstance(adapter, Adapter):
        name, read = "combined", adapter
    else:
        name = str(adapter)
        read = read_adapter(adapter, lora_alpha=options.lora_alpha, allow_nonfinite=options.allow_nonfinite)
    _refuse_without_fold(read, name)
    reference = str(base or read.base_reference or "")
    if not reference:
        raise PeftlabError(f"{name} names no base model; pass one (--base)")
    if options.revision is None and reference == read.base_reference:
        options = replace(options, revision=read.revision)
    out, started = Path(out), time.perf_counter()
    to_file = out.suffix == ".gguf"
    _check_type(options, to_file)
    base_file = model_place(reference, revision=options.revision) if reference.endswith(".gguf") else None
    with _plain_base(reference, read, out, options) as (directory, notes, dequantised):
        refuse_overlap(out, directory)
        plan = plan_merge(read, directory, options, source=name, dequantised=dequantised)
        accounts = plan.accounts()
        into = "original" if read.base.get("format") else None  # of a base that was quantised on disk or in training
        into = "dequantised" if plan.trained is not None or dequantised else into
        inputs: dict[str, Path | None] = {"the base model": base_file or directory}
        inputs |= {f"the adapter {place}" if len(places) > 1 else "the adapter": place for place in places}
        stage = partial(staged_file, out) if to_file else partial(staged_directory, out, "model")
        try:
            with stage(overwrite=options.overwrite, inputs=inputs) as staging:
                figures = Figures()
                notes += copy_side_files(directory, places, staging)
                write_model_config(plan, directory, staging)
                dtype = plan.dtype if plan.plain is None else "float8_e4m3fn"
                if to_file:
                    metadata = {"general.name": out.stem, "general.description": "merged by peftlab"}
                    gguf = _GgufWriting(plan, staging, base_file, options, metadata | _gguf_licence(directory))
                    accounts, dtype = plan.accounts(), gguf.file.type.lower()
                    total_bytes = gguf.write(staging / out.name, figures)
                    notes += [*gguf.model.notes, *plan.ignored_note(to_file)]
                    plan.ignored = []
                else:
                    notes += plan.ignored_note(to_file)
                    total_bytes = _write_weights(plan, staging, figures, options)
                report = MergeReport(
                    out=str(out),
                    adapter=name,
                    base=reference,
                    revision=options.revision,
                    architecture=type(plan.model).__name__,
                    method=read.config.name,
                    dtype=dtype,
                    tensors=sorted(figures.tensors, key=lambda row: row.name),
                    copied=figures.copied,
                    dropped=plan.dropped,
                    underflow=figures.underflow,
                    overflow=figures.overflow,
                    notes=[*plan.notes, *notes, *figures.notes()],
                    warnings=figures.warnings(),
                    total_bytes=total_bytes,
                    seconds=time.perf_counter() - started,
                    into=into,
                    survived=figures.survived,
                    kept=figures.kept,
                    ignored=plan.ignored,
                    accounts=accounts,
                )
                if not to_file:
                    write_text(staging / "README.md", merge_card(report, directory, staging, options))
                    write_json(staging / "merge.json", report)
        finally:
            plan.close()
    if options.push_to_hub:
        upload(out, options.push_to_hub)
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
    directory, _ = _stored_base(base, options)
    if directory is not None:
        refuse_overlap(Path(out), directory)
        plan_merge(adapter, directory, options, source="the adapter").close()


def _refuse_without_fold(adapter: Adapter, name: str) -> None:
    if not METHODS[adapter.config.name].folds:
        raise PeftlabError(
            f"{name}: method {adapter.config.name} has no linear fold; keep the adapter beside the base model and "
            "load it with peftlab.load_adapter"
        )


def _check_type(options: MergeOptions, to_file: bool) -> None:
    """Refuse options that are those of the other kind of output."""
    if to_file:
        if options.gguf_type is not None:
            gguf_type(options.gguf_type)
        if options.dtype is not None:
            raise PeftlabError(f"a GGUF file's weights are stored as one of {', '.join(TYPES)}, not {options.dtype}")
        if options.push_to_hub:
            raise PeftlabError("a GGUF file is not pushed to the hub; upload it with the hub's own command (hf upload)")
    elif options.gguf_type is not None:
        raise PeftlabError(f"{options.gguf_type} is a type of GGUF files: name one to write (-o FILE.gguf)")


def _write_weights(plan: MergePlan, staging: Path, figures: Figures, options: MergeOptions) -> int:
    """Write all merged files and, if there are several, their index; return the size of all weights in bytes."""
    outputs: list[OutputFile] = []
    try:
        for name, targets in plan.files.items():
            own = name if len(plan.files) > 1 else SAFETENSORS  # the only name that is found without an index
            outputs.append(OutputFile(staging / own, {t.key: (t.dtype, t.shape) for t in targets}))
        where = {key: output for output in outputs for key in output.entries}
        largest = max(output.entries[key].nbytes for key, output in where.items())
        run(Steps(plan, where, figures, options), budget=2 * largest)
    finally:
        for output in outputs:
            output.close()
    total = sum(output.entries[key].nbytes for key, output in where.items())
    if len(outputs) > 1:
        parameters = {name for name, _ in plan.model.named_parameters(remove_duplicate=False)}
        keys = [target.key for targets in plan.files.values() for target in targets if target.name in parameters]
        count = sum(where[key].entries[key].numel for key in keys)
        index = {
            "metadata": {"total_parameters": count, "total_size": total},
            "weight_map": {key: output.path.name for key, output in where.items()},
        }
        write_text(staging / SAFETENSORS_INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
    return total


class _GgufWriting:
    """The GGUF file of a merge: planned as it is made, then written.

    Args:
        plan: of the merge; what the file has no place for becomes ``dropped``, and dtypes become those of the file.
        described: the directory with the merged model's configuration and tokenizer.
        base: the GGUF file that the base is; None for another base. metadata: texts by field.

    Raises:
        PeftlabError: the model or a tensor cannot be written in this format.
    """

    def __init__(
        self, plan: MergePlan, described: Path, base: Path | None, options: MergeOptions, metadata: Mapping[str, str]
    ) -> None:
        self.plan, self.options = plan, options
        architecture_of(type(plan.model).__name__)  # an unknown class is named before its configuration is read
        config = decoder_config(plan.model) or load_config(str(described))
        self.model = GgufModel(config, type(plan.model).__name__)
        self.base = None if base is None else GgufBase(base)
        targets = [target for each in plan.files.values() for target in each]
        changed = {
            target.key
            for target in targets
            if any(plan.changes(name) for name in (target.place.names if target.place else [target.name]))
        }
        beside = {target.key: target.source for target in targets if self.model.beside_text(target.name)}
        if lost := sorted(changed & beside.keys()):
            raise PeftlabError(f"the adapter changes {lost[0]}, which a GGUF file of the text model does not contain")
        plan.ignored += beside.values()
        plan.dropped |= dict.fromkeys(plan.ignored, f"llama.cpp's {self.model.name} has no place for it")
        written = [target for target in targets if target.source not in plan.dropped]
        wanted = None if options.gguf_type in (None, KEEP) else options.gguf_type
        incoming = [Incoming(target.key, target.name, target.dtype, target.shape) for target in written]
        self.file = plan_file(self.model, described, incoming, wanted, metadata, self.base, changed)
        dtypes = {key: dtype for key, (dtype, _) in self.file.incoming.items()}
        plan.files = {"": [replace(target, dtype=dtypes.get(target.key, target.dtype)) for target in written]}

    def write(self, path: Path, figures: Figures) -> int:
        """Write the file, and return the size of its tensors in bytes."""
        file = self.file
        output = GgufFile(path, file.head, file.stored, file.incoming, self.model)
        shard = None if self.base is None else self.base.shard()
        try:
            for key, values in file.extra.items():
                output.write(key, values)
            copies = [Copy(shard, name, output, name) for name in file.copied] if shard is not None else []
            keys = [key for key in file.stored if key not in file.extra and key not in file.copied]
            steps = Steps(self.plan, dict.fromkeys(keys, output), figures, self.options)
            # In fp32 a tensor may take twice what the base stores: one that does is folded alone.
            largest = max((_stored_size(steps.targets[key], output) for key in keys), default=0)
            run(chain(copies, output.steps(steps)), budget=2 * largest)
            figures.copied += len(copies)
        finally:
            output.close()
            if shard is not None:
                shard.close()
        return sum(tensor.nbytes for tensor in file.stored.values())


def _stored_size(target: Target, output: OutputFile) -> int:
    entry = target.shard.entries[target.source] if target.shard is not None else output.entries[target.key]
    return entry.nbytes


def _gguf_licence(base: Path) -> dict[str, str]:
    return {f"general.{key.replace('_', '.')}": value for key, value in _base_licence(base).items()}


@contextmanager
def _plain_base(
    reference: str, adapter: Adapter, out: Path, options: MergeOptions
) -> Iterator[tuple[Path, list[str], bool]]:
    """Yield the directory of a base's plain weights, notes on how they came about, and whether from quantised ones.

    Those are the values that a checkpoint quantised on disk computes with.

    A base that is itself an adapter (``models.config``) is merged into its own base beside ``out`` for the duration
    of the block. A GGUF file or a quantised checkpoint is loaded and saved there as plain fp32 weights, which takes
    memory for the whole model. Both take disk for it.

    Raises:
        PeftlabError: the base does not exist, or it is quantised and the update is to go into the original.
    """
    place, why = _stored_base(reference, options)
    if place is not None:
        yield place, [], False
        return
    with write_errors(out), scratch_directory(real_path(out), "base") as directory:
        parts = find_model(reference)
        if parts.adapters:
            plain, inner = directory / "merged", MergeOptions(trust_remote_code=options.trust_remote_code)
            # Loading it adds the inner adapter to plain weights, whatever that was trained beside (load_model).
            if _stored_base(parts.base, replace(inner, revision=parts.revision))[0] is not None:
                inner = replace(inner, into="original")
            report = merge_checkpoint(parts.adapters[-1], None, plain, inner)
            yield plain, [why], report.into == "dequantised"
            return
        notes = [why, *_save_plain(reference, adapter, directory, options)]
        # The copy of a GGUF file is what would be quantised on loading; that of a quantised checkpoint is the result.
        yield directory, notes, not reference.endswith(".gguf")


def _stored_base(reference: str, options: MergeOptions) -> tuple[Path | None, str]:
    """Return the local directory of a base model's plain weights; or None, and what has to be done to get them.

    Raises:
        PeftlabError: as ``_plain_base``.
    """
    if find_model(reference).adapters:
        return None, f"{reference} is an adapter: it was folded into its own base model first"
    place = model_place(reference, revision=options.revision)
    if place.suffix == ".gguf":
        quantised = f"{place.name} is quantised (GGUF)"
    else:
        if not place.is_dir():
            raise PeftlabError(f"base model {reference!r}: {place} is a file; name the directory or a .gguf file")
        plain = _is_plain(place)
        loading: Attributes = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
        method = "" if plain else quantisation(load_config(reference, **loading))
        if not method:
            return place, ""
        if options.into == "original":
            raise PeftlabError(
                f"{reference} is stored quantised ({method}) and does not contain its original weights; name the model "
                "that was quantised (--base), or merge --into dequantised: into a plain float32 copy of its values"
            )
        quantised = f"the base was quantised ({method})"
    return None, f"{quantised}: it was dequantised to float32 first, and the update was added to that"


def _is_plain(place: Path) -> bool:
    """Whether a model's ``config.json`` says by itself that its weights are plain: that of a known decoder."""
    try:
        known = decoder(read_object(place / "config.json"))
    except PeftlabError:
        return False  # loading it says what is wrong
    if known:
        check_directory(place)
    return bool(known)


def refuse_overlap(out: Path, base: Path) -> None:
    """Refuse an output that is, is inside or contains the base directory.

    Args:
        out: the directory to write. base: the directory of the base model.
    """
    if contains_path(base, out) or contains_path(out, base):
        raise PeftlabError(f"{out} is, is inside or contains the base directory {base}; choose another directory")


def quantisation(config: object) -> str:
    """Return how a model's weights are quantised, by its configuration; an empty text if they are not."""
    found = getattr(config, "quantization_config", None)
    if not found:
        return ""
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return str(getattr(method, "value", method) or "unknown method")


def _save_plain(reference: str, adapter: Adapter, directory: Path, options: MergeOptions) -> list[str]:
    """Write a quantised model's weights as fp32, the tensors beside them that its class does not read, and its files.

    Return notes on the files that were left out.
    """
    import transformers

    loading: Attributes = {"trust_remote_code": True} if options.trust_remote_code else {}
    config = load_config(reference, revision=options.revision, **loading)
    own = next((name for name in config.architectures or () if hasattr(transformers, name)), None)
    architecture = str(adapter.base.get("architecture") or own or language_model_class(config))
    model, _ = load_model(reference, architecture, revision=options.revision, **loading)
    quantised = getattr(model.config, "quantization_config", None) is not None
    if quantised:
        try:
            model = model.dequantize()
        except (NotImplementedError, ValueError, AttributeError) as error:
            raise PeftlabError(f"{reference} cannot be dequantised: {error}") from None
    # The original format of a quantised checkpoint would be the quantised one.
    model.save_pretrained(directory, save_original_format=not quantised)
    notes = []
    if not reference.endswith(".gguf"):
        place = model_place(reference, revision=options.revision)
        _add_unread(model, place, directory)
        notes = _copy(place, directory, (*OTHERS, "README.md"))  # whose card names the licence
    with suppress(PeftlabError):  # the base may have no tokenizer
        load_tokenizer(reference, revision=options.revision, **loading).save_pretrained(directory)
    return notes


_PLAIN = ("F64", "F32", "F16", "BF16", "I64", "BOOL")  # dtypes of values; quantisers' codes have others


def _add_unread(model: PreTrainedModel, quantised: Path, directory: Path) -> None:
    """Add to ``directory`` the tensors of a quantised checkpoint that belong to no leaf of its model.

    What a quantiser stores beside a weight, or in its place, lies below the name of a leaf module.
    """
    shards = open_shards(quantised)
    holders = {key: shard for shard in shards for key in shard.entries}
    leaves = [name for name, module in model.named_modules() if name and not any(module.children())]
    unread = [key for key, place in places(model, holders).items() if place is None and not inside(key, leaves)]
    coded = [key for key in unread if holders[key].entries[key].dtype not in _PLAIN]
    if coded:
        raise PeftlabError(
            f"{quantised}: {coded[0]} is stored as {holders[coded[0]].entries[coded[0]].dtype}, and "
            f"{type(model).__name__} has no such module to dequantise it; name the model that was quantised (--base)"
        )
    if unread:
        tensors = {key: holders[key].read(key) for key in unread}
        if (directory / SAFETENSORS).exists():  # beside it no index would be read
            (directory / SAFETENSORS).rename(directory / "model-read.safetensors")
        files = directory.glob("*.safetensors")
        saved = {key: file.name for file in files for key in read_header(file)[0]}
        write_tensors(directory / "model-unread.safetensors", tensors, {})
        index = {"metadata": {}, "weight_map": saved | dict.fromkeys(unread, "model-unread.safetensors")}
        write_json(directory / SAFETENSORS_INDEX, index)
    for shard in shards:
        shard.close()


OTHERS = (
    "generation_config.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    "*.py", "LICEN[CS]E*", "NOTICE*", "USE_POLICY*", "COPYING*",
)  # fmt: skip


def copy_side_files(base: Path, adapters: Sequence[Path], out: Path) -> list[str]:
    """Copy tokenizer, chat templates, custom code and licence to ``out``; return notes on what was left out.

    The tokenizer is that of the first adapter or run whose directory has one (its vocabulary may have grown), else
    the base's. A symbolic link out of its directory is not followed: its target may be private.

    Args:
        base: the base's directory. adapters: those of adapters or runs. out: the merged one.
    """
    homes = [home for place in adapters for home in (place / "adapter", place)]
    own = [home for home in homes if (home / "tokenizer_config.json").exists()]
    notes = _copy(own[0] if own else base, out, (*TOKENIZER, "additional_chat_templates")) + _copy(base, out, OTHERS)
    if len(own) > 1 and any(_files(home, TOKENIZER) != _files(own[0], TOKENIZER) for home in own[1:]):
        notes.append(f"the adapters have different tokenizers; that of {own[0]} was copied")
    return notes


def _files(directory: Path, patterns: tuple[str, ...]) -> dict[str, bytes]:
    """Return the contents of a directory's files whose names match a pattern."""
    matching = (file for file in directory.iterdir() if any(fnmatch(file.name, pattern) for pattern in patterns))
    return {file.name: file.read_bytes() for file in matching if file.is_file()}


def write_model_config(plan: MergePlan, base: Path, out: Path) -> None:
    """Write ``config.json``, and ``generation_config.json`` where the model generates and none was copied.

    Args:
        plan: of the merge. base: the base's directory. out: the merged directory.
    """
    model = plan.model
    if isinstance(model, PlainModel):
        left_out = ("torch_dtype", "_name_or_path")  # the earlier name of dtype; where the base was
        values = {key: value for key, value in vars(model.config).items() if key not in left_out}
        values["dtype"] = plan.dtype
        write_text(out / "config.json", json.dumps(values, indent=2, sort_keys=True) + "\n")
        return
    model.config.dtype = plan.dtype
    config = model.config
    if plan.composite is None:
        config.architectures = [type(model).__name__]
    else:
        config = plan.composite
        name = next(name for name, part in config.sub_configs.items() if part is type(model.config))
        setattr(config, name, model.config)
        if not model.config.tie_word_embeddings:
            config.tie_word_embeddings = False
        config.dtype = plan.dtype
    if plan.plain is not None:
        config.quantization_config = quantization_config(plan.plain)
    config.save_pretrained(out)
    if model.can_generate() and not (out / "generation_config.json").exists():
        generation = model.generation_config
        # Earlier versions wrote these settings into config.json, from which a model on the meta device takes none.
        for key, value in read_object(base / "config.json").items():
            if key in vars(generation) and key != "transformers_version":
                setattr(generation, key, value)
        write_text(out / "generation_config.json", generation.to_json_string())


def merge_card(report: MergeReport, base: Path, out: Path, options: MergeOptions) -> str:
    """Return the README.md of a merged directory: what it was made of and trained on, how to load it, the recipe.

    Args:
        report: of the merge. base: the base's directory, whose card names a licence.
        out: the directory that the card is for, in which a tokenizer may be.
        options: its ``training`` and ``recipe``.
    """
    licence, training = _base_licence(base), options.training
    data = {
        "base_model": hub_id(report.base),
        "base_model_relation": "finetune",
        "library_name": "transformers",
        **licence,
        **(training.data if training else {}),
    }
    name = training.name if training else Path(report.out).name
    folded = sum(row.kind == "folded" for row in report.tensors)
    parts = [
        f"{code(report.base)} with the {report.method} adapter {code(report.adapter)} merged into its weights by "
        f"peftlab{f', {training.summary}' if training else ''}: {folded} tensors folded, "
        f"{len(report.tensors) - folded} trained whole, {report.copied} as they were. `merge.json` has the figures of "
        "each.",
        *(training.parts if training else ()),
        f"## Use\n\n{fence(_loading(report.architecture, name, out), 'python')}",
    ]
    return model_card(data, name, parts, recipe=options.recipe, license_=licence.get("license"))


def _loading(architecture: str, name: str, out: Path) -> str:
    """Return the code that loads a merged directory."""
    shown = json.dumps(name)
    model = f"model = {architecture}.from_pretrained({shown})"
    if not (out / "tokenizer_config.json").exists():
        return f"from transformers import {architecture}\n\n{model}"
    tokenizer = f"tokenizer = AutoTokenizer.from_pretrained({shown})"
    return f"from transformers import AutoTokenizer, {architecture}\n\n{tokenizer}\n{model}"


def _base_licence(base: Path) -> dict[str, str]:
    """Return the licence lines of the base's own card: ``license``, ``license_name``, ``license_link``."""
    card = base / "README.md"
    text = (
        card.read_text(encoding="utf-8", errors="replace")
        if card.is_file() and _is_within_checkpoint(card, base)
        else ""
    )
    front = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    lines = re.findall(r"^(license(?:_name|_link)?): *(\S.*)$", front.group(1), re.MULTILINE) if front else []
    return {key: value.strip().strip("'\"") for key, value in lines}


def _copy(source: Path, out: Path, patterns: tuple[str, ...]) -> list[str]:
    notes = []
    for entry in sorted(source.iterdir()):
        if not any(fnmatch(entry.name, pattern) for pattern in patterns):
            continue
        for file in sorted(entry.rglob("*")) if entry.name == "additional_chat_templates" else [entry]:
            if not _is_within_checkpoint(file, source):
                notes.append(f"{file} was left out: it is a link to {os.path.realpath(file)}, outside {source}")
            elif file.is_file():
                copied = out / file.relative_to(source)
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copied)
    return notes


def _is_within_checkpoint(file: Path, directory: Path) -> bool:
    """Whether a file is within the directory once links are followed, or is the hub cache's own copy of it.

    The cache keeps contents in ``blobs`` and links to them from ``snapshots/<revision>``.
    """
    # Unlike Path.resolve, realpath does not fail on circular links.
    home, target = Path(os.path.realpath(directory)), Path(os.path.realpath(file))
    cached = home.parent.name == "snapshots" and target.is_relative_to(home.parent.parent / "blobs")
    return cached or target.is_relative_to(home)


def unmerge_checkpoint(
    merged: str | Path, out: str | Path, *, base: str | Path | None = None, overwrite: bool = False
) -> Path:
    """Write the base model of ``merged`` to ``out`` and return that path.

    A rounded sum cannot be undone, so the weights that the merge changed are read from the base again. That it is the
    same base is checked: all weights that the merge did not change must be equal in both.

    Args:
        merged: a directory that ``merge_checkpoint`` wrote. base: reference of its base; default: the one that
            its ``merge.json`` names.

    Raises:
        PeftlabError: no ``merge.json``, another base, or ``out`` exists.
    """
    merged, out = Path(merged), Path(out)
    report = merged / "merge.json"
    values = read_object(report)
    rows = typed_value(values, "tensors", list, report)
    objects = [row for row in rows if isinstance(row, dict)]
    if len(objects) < len(rows):
        raise PeftlabError(f"{report}: tensors must be a list of objects")
    changed = {typed_value(row, "name", str, report) for row in objects}
    changed.update(str(key) for row in objects if "keys" in row for key in typed_value(row, "keys", list, report))
    changed.update(typed_value(values, "dropped", dict, report))
    named = typed_value(values, "base", str, report)
    revision = values.get("revision") if base in (None, named) else None
    directory = base_directory(str(base or named), revision=revision if isinstance(revision, str) else None)
    for place in (merged, directory):
        refuse_overlap(out, place)
    _refuse_another_base(merged, directory, changed)
    inputs = {"the merged model": merged, "the base model": directory}
    with staged_directory(out, "model", overwrite=overwrite, inputs=inputs) as staging:
        shutil.copytree(directory, staging, dirs_exist_ok=True, ignore=lambda place, names: {MARK} & set(names))
    return out


def _refuse_another_base(merged: Path, base: Path, changed: set[str]) -> None:
    """Raise ``PeftlabError`` unless what a merge did not change (all but ``changed``) has the base's values."""
    with ExitStack() as opened:
        both = [open_shards(place) for place in (merged, base)]
        for shard in chain(*both):
            opened.callback(shard.close)
        merged_shards, base_shards = ({key: shard for shard in shards for key in shard.entries} for shards in both)
        compared = 0
        for key, shard in base_shards.items():
            if key in changed:
                continue
            # A merged key may carry the name of the body before it.
            other = next(
                (k for k in (key, *(k for k in merged_shards if k.endswith(f".{key}"))) if k in merged_shards), None
            )
            if other is None or other in changed:
                continue
            ours, theirs = merged_shards[other].read(other), shard.read(key)
            if (
                ours.dtype != theirs.dtype
            ):  # of a merge to another dtype, unless one of them contains a quantiser's codes
                if not all(one.is_floating_point() and one.element_size() > 1 for one in (ours, theirs)):
                    continue
                theirs = theirs.to(ours.dtype)
            if ours.shape != theirs.shape or ours.ne(theirs).any():
                raise PeftlabError(f"{merged} was not made of {base}: {other} differs, and the merge did not change it")
            compared += 1
        if not compared and not changed & merged_shards.keys():
            raise PeftlabError(f"{merged} was not made of {base}: they have no weights in common")


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
# What YAML 1.1 readers (the hub's Python client) and 1.2 readers alike read as a string without quotes.
_UNQUOTED = re.compile(r"[A-Za-z][\w-]*([./][A-Za-z][\w-]*)*", re.ASCII)
_NOT_A_STRING = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


def model_card(
    data: Mapping[str, object], name: str, parts: Sequence[str], *, recipe: str | None, license_: str | None
) -> str:
    """Return a model card: metadata, title, ``parts``, recipe, and what the base model's licence means for the result.

    Args:
        data: the front matter; nulls are left out.
        name: the model's name or directory. parts: Markdown blocks.
        recipe: the resolved recipe's YAML. license_: of the base model, as its own card calls it.
    """
    blocks = [f"---\n{front_matter(data)}---", f"# {prose(name)}", *parts]
    if recipe:
        blocks.append(f"## Recipe\n\n{fence(recipe, 'yaml')}")
    if license_:
        blocks.append(
            f"## Licence\n\nThe base model is licensed under {code(license_)}; "
            "its terms apply to what is derived from it."
        )
    return "\n\n".join(blocks) + "\n"


def hub_id(reference: str | None) -> str | None:
    """Return ``reference`` if the hub would accept it as an id: it refuses cards that name local paths."""
    named = reference and _HUB_ID.fullmatch(reference) and not Path(reference).exists()
    return reference if named else None


def front_matter(values: Mapping[str, object]) -> str:
    """Return ``values`` as YAML that YAML 1.1 and 1.2 readers understand alike; nulls are left out."""
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.width = 1 << 20
    yaml.allow_unicode = False
    buffer = io.StringIO()
    yaml.dump(_quoted(values), buffer)
    return buffer.getvalue()


def _quoted(value: object) -> object:
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString

    if isinstance(value, Mapping):
        return {key: _quoted(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_quoted(inner) for inner in value]
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, str) and (not _UNQUOTED.fullmatch(value) or value.lower() in _NOT_A_STRING):
        return DoubleQuotedScalarString(value)
    return value


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table.

    Args:
        header: the columns' names. rows: their cells.
    """
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(prose(cell) for cell in line)} |" for line in lines)


def prose(text: str) -> str:
    """Return ``text`` on one line with what Markdown or HTML would interpret escaped."""
    escaped = re.sub(r"([\\`*_\[\]|])", r"\\\1", " ".join(text.split()))
    return escaped.replace("&", "&amp;").replace("<", "&lt;")


def code(text: str) -> str:
    """Return ``text`` as inline code, whatever backticks it contains."""
    ticks = "`" * (_longest_run(text) + 1)
    return f"{ticks}{text}{ticks}" if len(ticks) == 1 else f"{ticks} {text} {ticks}"


def fence(text: str, language: str) -> str:
    """Return ``text`` as a fenced block, whatever fences it contains.

    Args:
        text: the block's lines. language: after the opening fence; may be empty.
    """
    ticks = "`" * max(3, _longest_run(text) + 1)
    return f"{ticks}{language}\n{text.rstrip()}\n{ticks}"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
