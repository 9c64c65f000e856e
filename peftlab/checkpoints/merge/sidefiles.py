"""The files of a model directory beside its weights: tokenizer, configuration, licence, model card."""

from __future__ import annotations

import json
import os
import re
import shutil
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import ModelCardData
from transformers import PreTrainedModel

from peftlab.checkpoints.merge.report import MergeReport
from peftlab.checkpoints.model_card import code, fence, hub_id, model_card

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


def write_model_config(model: PreTrainedModel, out: Path, dtype: str) -> None:
    """Write ``config.json``, and ``generation_config.json`` where the model generates and none was copied."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = dtype
    model.config.save_pretrained(out)
    if model.can_generate() and not (out / "generation_config.json").exists():
        model.generation_config.save_pretrained(out)


def merge_card(report: MergeReport, base: Path, recipe: str | None) -> str:
    """Return a README.md for a merged directory: what it was made of, how to load it, the recipe."""
    licence = _base_licence(base)
    data = ModelCardData(
        base_model=hub_id(report.base),
        base_model_relation="finetune",
        library_name="transformers",
        license=licence.get("license"),
        license_name=licence.get("license_name"),
        license_link=licence.get("license_link"),
    )
    name = Path(report.out).name
    changed = [row for row in report.tensors if row.kind == "folded"]
    parts = [
        f"{code(report.base)} with the {report.method} adapter {code(report.adapter)} merged into its weights by "
        f"peftlab: {len(changed)} tensors folded, {len(report.tensors) - len(changed)} trained whole, {report.copied} "
        "as they were. `merge.json` has the figures of each.",
        "## Use\n\n"
        + fence(
            f"from transformers import {report.architecture}\n\n"
            f"model = {report.architecture}.from_pretrained({json.dumps(name)})",
            "python",
        ),
    ]
    return model_card(data, name, parts, recipe=recipe, license_=licence.get("license"))


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
