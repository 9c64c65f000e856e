"""The files of a task's splits, and their tables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.references import locate
from peftlab.tasks.reading.bad_rows import listed
from peftlab.tasks.reading.readers import Table, read_table, table_suffix

_SPLIT_STEMS = {
    "train": "train", "validation": "validation", "valid": "validation", "dev": "validation", "test": "test",
}  # fmt: skip


def split_files(reference: str, more: tuple[str, ...] = ()) -> dict[str, Path]:
    """Return the file of each split; a single file is the training split.

    Args:
        more: suffixes beside those of tables.
    """
    path = locate(reference, "data.path")
    if not isinstance(path, Path):
        folder = Path(path).parent
        siblings = [entry.name for entry in _entries(folder)] if os.path.isdir(folder) else []
        raise PeftlabError(f"data.path {path!r}: no such file or directory{did_you_mean(Path(path).name, siblings)}")
    if not path.is_dir():
        return {"train": path}
    files: dict[str, Path] = {}
    for file in _entries(path):
        suffix = table_suffix(file) or next((s for s in more if file.name.endswith(s)), None)
        split = _SPLIT_STEMS.get(file.name[: -len(suffix)].lower()) if suffix else None
        if split is None:
            continue
        if split in files:
            raise PeftlabError(f"{path}: both {files[split].name} and {file.name} could be the {split} split")
        files[split] = file
    if "train" not in files:
        there = listed(entry.name for entry in _entries(path)) if _entries(path) else "nothing"
        raise PeftlabError(f"{path}: no train.* file (csv, tsv, jsonl, json, parquet) in it, but {there}")
    return files


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError as error:
        raise PeftlabError(f"{directory}: cannot be read ({error})") from None


def split_tables(
    files: Mapping[str, Path], validation: float | str | None, all_files: Mapping[str, Path]
) -> dict[str, Table]:
    """Read the split files; validation comes from one of ``all_files`` or from ``data.validation``, not from both."""
    if "validation" in all_files and validation is not None:
        raise PeftlabError(f"data.validation is set, but {all_files['validation']} is the validation split already")
    if "validation" not in all_files and validation is None:
        raise PeftlabError(f"{all_files['train']}: data.validation must say how many examples to hold out, or all")
    tables = {split: read_table(file) for split, file in files.items()}
    for table in tables.values():
        if len(table) == 0:
            raise PeftlabError(f"{table.path}: no examples")
    return tables
