"""The files of a model directory beside its weights: tokenizer, configuration, licence, model card."""

from __future__ import annotations

import json
import os
import re
import shutil
from fnmatch import fnmatch
from pathlib import Path

from peftlab.checkpoints.merge.options import MergeOptions
from peftlab.checkpoints.merge.plan import MergePlan
from peftlab.checkpoints.merge.report import MergeReport
from peftlab.checkpoints.model_card import code, fence, hub_id, model_card
from peftlab.checkpoints.quantised import quantization_config
from peftlab.files import write_text
from peftlab.models.plain import PlainModel

TOKENIZER = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.spm", "*.tiktoken",
    "sentencepiece*", "spiece*", "*.bpe", "bpe.codes", "normalizer.json", "chat_template*", "additional_chat_templates",
)  # fmt: skip
OTHERS = (
    "generation_config.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    "*.py", "LICEN[CS]E*", "NOTICE*", "USE_POLICY*", "COPYING*",
)  # fmt: skip


def copy_side_files(base: Path, adapter: Path | None, out: Path) -> list[str]:
    """Copy tokenizer, chat templates, custom code and licence to ``out``; return notes on what was left out.

    The tokenizer is the adapter's or run's if that directory has one (its vocabulary may have grown), else the
    base's. A symbolic link out of its directory is not followed: its target may be private.
    """
    homes = [adapter / "adapter", adapter] if adapter is not None else []
    own = next((home for home in homes if (home / "tokenizer_config.json").exists()), None)
    return _copy(own or base, out, TOKENIZER) + _copy(base, out, OTHERS)


def write_model_config(plan: MergePlan, out: Path) -> None:
    """Write ``config.json``, and ``generation_config.json`` where the model generates and none was copied."""
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
        model.generation_config.save_pretrained(out)


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
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() and _belongs(card, base) else ""
    front = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    lines = re.findall(r"^(license(?:_name|_link)?): *(\S.*)$", front.group(1), re.MULTILINE) if front else []
    return {key: value.strip().strip("'\"") for key, value in lines}


def _copy(source: Path, out: Path, patterns: tuple[str, ...]) -> list[str]:
    notes = []
    for entry in sorted(source.iterdir()):
        if not any(fnmatch(entry.name, pattern) for pattern in patterns):
            continue
        for file in sorted(entry.rglob("*")) if entry.name == "additional_chat_templates" else [entry]:
            if not _belongs(file, source):
                notes.append(f"{file} was left out: it is a link to {os.path.realpath(file)}, outside {source}")
            elif file.is_file():
                copied = out / file.relative_to(source)
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copied)
    return notes


def _belongs(file: Path, directory: Path) -> bool:
    """Whether a file is within the directory once links are followed, or is the hub cache's own copy of it.

    The cache keeps contents in ``blobs`` and links to them from ``snapshots/<revision>``.
    """
    # Unlike Path.resolve, realpath does not fail on circular links.
    home, target = Path(os.path.realpath(directory)), Path(os.path.realpath(file))
    cached = home.parent.name == "snapshots" and target.is_relative_to(home.parent.parent / "blobs")
    return cached or target.is_relative_to(home)
