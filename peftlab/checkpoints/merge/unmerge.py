"""Undoing a merge on disk: the base's own weights again, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

from peftlab.checkpoints.merge.base import base_directory, refuse_overlap
from peftlab.checkpoints.tensors import Shard, open_shards
from peftlab.errors import PeftlabError
from peftlab.files import MARK, Json, member, read_object, staged_directory


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
    changed = {member(row, "name", str, report) for row in _objects(member(values, "tensors", list, report), report)}
    changed |= set(member(values, "dropped", dict, report))
    directory = base_directory(str(base) if base else member(values, "base", str, report))
    for place in (merged, directory):
        refuse_overlap(out, place)
    _same_base(merged, directory, changed)
    inputs = {"the merged model": merged, "the base model": directory}
    with staged_directory(out, "model", overwrite=overwrite, inputs=inputs) as staging:
        shutil.copytree(directory, staging, dirs_exist_ok=True, ignore=lambda place, names: {MARK} & set(names))
    return out


def _objects(rows: list[Json], path: Path) -> list[dict[str, Json]]:
    objects = [row for row in rows if isinstance(row, dict)]
    if len(objects) < len(rows):
        raise PeftlabError(f"{path}: tensors must be a list of objects")
    return objects


def _same_base(merged: Path, base: Path, changed: set[str]) -> None:
    ours, theirs = _by_key(open_shards(merged)), _by_key(open_shards(base))
    compared = 0
    for key, shard in theirs.items():
        if key in changed:
            continue
        # A merged key may carry the name of the body before it.
        other = next((k for k in (key, *(k for k in ours if k.endswith(f".{key}"))) if k in ours), None)
        if other is None or other in changed:
            continue
        mine, yours = ours[other].read(other), shard.read(key)
        if mine.dtype == yours.dtype and (mine.shape != yours.shape or mine.ne(yours).any()):
            raise PeftlabError(f"{merged} was not made of {base}: {other} differs, and the merge did not change it")
        compared += mine.dtype == yours.dtype
    if not compared and not changed & ours.keys():
        raise PeftlabError(f"{merged} was not made of {base}: they have no weights in common")


def _by_key(shards: list[Shard]) -> dict[str, Shard]:
    return {key: shard for shard in shards for key in shard.entries}
