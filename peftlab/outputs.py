"""Output directories: which of them may be replaced, and how they appear complete or not at all.

A directory that peftlab makes contains ``peftlab.json``: its kind, and the files in it that peftlab wrote. Only such a
directory is ever replaced, only by one of the same kind, and only if it contains nothing else and none of the inputs.
One process at a time writes a directory (``peftlab.locks``).
"""

from __future__ import annotations

import glob
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from peftlab.errors import PeftlabError
from peftlab.files import STAGING_PREFIX, fsync_path, read_json, real, write_errors, write_json
from peftlab.locks import LOCK, is_locked, locked, locks_work, same_file
from peftlab.references import is_url

MARK = "peftlab.json"

Inputs = Mapping[str, "str | Path | None"]
"""What an output must not destroy: paths by their names in messages ("the model"). A value that is not a path, such
as a hub id, is ignored."""
_REMOVED = f"{STAGING_PREFIX}removed-"

_MODEL = (
    "README.md", "config.json", "generation_config.json", "merge.json", "*.safetensors", "*.safetensors.index.json",
    "pytorch_model*.bin", "pytorch_model.bin.index.json", "adapter_config.json", "gated_lora.json", "target.json",
    "draft_vocabulary.json", "data.json", "*preprocessor_config.json", "processor_config.json", "*.py", "*.gguf",
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.spm", "*.tiktoken",
    "sentencepiece*", "spiece*", "*.bpe", "bpe.codes", "normalizer.json", "chat_template*",
    "additional_chat_templates/*", "LICEN[CS]E*", "NOTICE*", "USE_POLICY*", "COPYING*",
)  # fmt: skip
WRITTEN: dict[str, tuple[str, ...]] = {
    "run": (
        "recipe.yaml", "provenance.json", "metrics.jsonl", "checkpoints/step-*.pt", "checkpoints/step-*.pt.damaged",
        "acceptance_head.safetensors", "results.json", "report.html", "updates/replay-*.jsonl",
        "settings.json", "windows/*.json", "stream.json", "stream.html",  # of an update that serves a stream
        "peftlab/*",  # a tracker's, named after the project
    ),
    "table": ("recipe.yaml", "table.csv", "table.tex", "table.html", "cells/*.log"),
    "model": _MODEL,
    "adapter": _MODEL,
    "draft": _MODEL,
}  # fmt: skip
"""The files that peftlab writes, by the kind of directory, as patterns in which ``*`` matches any characters.

A file of another name is never removed, whatever the directory's mark lists: a mark may come from elsewhere."""


@dataclass(frozen=True)
class Mark:
    """The content of ``peftlab.json``.

    Attributes:
        kind: "run", "table", "model" or "adapter".
        files: patterns of the files that peftlab wrote, relative to the directory; ``*`` matches any characters. A
            directory inside with its own mark is described by that.
    """

    kind: str
    files: Sequence[str]

    def lists(self, name: str) -> bool:
        """Return whether peftlab wrote the file ``name``: the mark lists it, and its kind of directory can have it."""
        return name == MARK or all(
            any(fnmatchcase(name, pattern) for pattern in patterns)
            for patterns in (self.files, WRITTEN.get(self.kind, ()))
        )


def read_mark(directory: Path) -> Mark | None:
    """Return the mark of a directory; None if it has none that can be read."""
    try:
        value = read_json(directory / MARK)
    except (PeftlabError, OSError):
        return None
    return parse_mark(value)


def parse_mark(value: object) -> Mark | None:
    """Return the mark that the JSON of a ``peftlab.json`` is; None if it is none."""
    kind, files = (value.get("kind"), value.get("files")) if isinstance(value, dict) else (None, None)
    if not isinstance(kind, str) or not isinstance(files, list):
        return None
    names = [name for name in files if isinstance(name, str)]
    return Mark(kind, names) if len(names) == len(files) else None


def write_mark(directory: Path, mark: Mark) -> None:
    """Write a directory's ``peftlab.json``."""
    write_json(directory / MARK, {"written_by": "peftlab", "kind": mark.kind, "files": list(mark.files)})


def contains(outer: str | Path, inner: str | Path) -> bool:
    """Return whether ``inner`` is ``outer`` or below it, by device and inode, so through links and bind mounts too."""
    above = {path for start in (Path(inner).absolute(), real(inner)) for path in (start, *start.parents)}
    return os.path.exists(outer) and any(os.path.exists(path) and os.path.samefile(path, outer) for path in above)


def refuse_loss(
    path: str | Path, kind: str, *, overwrite: bool, inputs: Inputs | None = None, advice: str = ""
) -> None:
    """Refuse an output at ``path`` that would destroy something.

    An absent or empty directory may be written. Any other is replaced only with ``overwrite``, and only if it is a
    directory that peftlab wrote, of the same kind, contains no other files, and neither is nor contains an input,
    the current directory or the home directory.

    Args:
        kind: of the directory to write. advice: the advice of the message where ``overwrite`` is missing.

    Raises:
        PeftlabError: the output would destroy something, which is named.
    """
    if is_url(path):
        raise PeftlabError(f"{path}: written on this machine alone; only the output_dir of a run may be a URL")
    place = real(path)
    try:
        reason = _obstacle(place, kind, _kept(inputs or {}), overwrite, advice) if os.path.lexists(place) else ""
    except OSError as error:
        reason = f"cannot be read: {error.filename}: {error.strerror}"
    if reason:
        raise PeftlabError(f"{path} {reason}")


def _obstacle(place: Path, kind: str, kept: list[tuple[str, Path]], overwrite: bool, advice: str) -> str:
    """Return why an existing ``place`` must not be replaced, or an empty text."""
    other = "choose another directory"
    for name, each in kept:
        if contains(place, each):
            return f"is or contains {name} ({each}); {other}"
    if not place.is_dir():
        return f"exists already and is not a directory; {other}"
    if _free(place):
        return ""
    mark = read_mark(place)
    if mark is None:
        return f"exists already and was not written by peftlab (it has no {MARK}); remove it yourself, or {other}"
    if mark.kind != kind:
        return f"exists already and is a {mark.kind}, not a {kind}; {other}"
    if not overwrite:
        return f"exists already; {advice or f'{other} or pass --overwrite'}"
    names = _identities(kept)
    for found, ours in _below(place, place, mark):
        state = found.lstat()
        if (state.st_dev, state.st_ino) in names:
            return f"contains {names[state.st_dev, state.st_ino]}; {other}"
        if not ours:
            return f"contains {found.relative_to(place)}, which peftlab did not write; move it, or {other}"
    return ""


def _kept(inputs: Inputs) -> list[tuple[str, Path]]:
    """Return what no output may destroy, if it exists, with its name."""
    found = []
    with suppress(OSError):
        found.append(("the current directory", Path.cwd()))
    with suppress(OSError, RuntimeError):
        found.append(("the home directory", Path.home()))
    for name, value in inputs.items():
        with suppress(OSError, RuntimeError, ValueError):
            if value and (path := Path(value).expanduser()).exists():
                found.append((name, path))
    return found


def _identities(kept: list[tuple[str, Path]]) -> dict[tuple[int, int], str]:
    """Return the names by device and inode, of linked files too: the hub's cache keeps a model as links."""
    names = {}
    for name, path in kept:
        links = [each for each in path.iterdir() if each.is_symlink() and each.is_file()] if path.is_dir() else []
        for each in (path, *links):
            with suppress(OSError):
                state = each.stat()
                names[state.st_dev, state.st_ino] = name
    return names


def _free(place: Path) -> bool:
    """Return whether a directory is absent, or empty but for what a process killed at its very start leaves."""
    if not os.path.isdir(place):
        return not os.path.lexists(place)
    begun = (LOCK, f"{STAGING_PREFIX}*-{MARK}")
    return all(any(fnmatchcase(path.name, name) for name in begun) for path in place.iterdir())


def _below(directory: Path, top: Path, mark: Mark) -> Iterator[tuple[Path, bool]]:
    """Yield what is below a directory but half-written files, and whether the nearest mark lists it."""
    for path in sorted(directory.iterdir()):
        if path.name.startswith(STAGING_PREFIX):
            continue
        if path.is_dir() and not path.is_symlink():
            yield path, True
            inner = read_mark(path)
            yield from _below(path, path, inner) if inner else _below(path, top, mark)
        else:
            yield path, mark.lists(path.relative_to(top).as_posix())


@dataclass
class Claim:
    """A directory that this process alone writes files into, one after another.

    Attributes:
        path: the directory as the user named it; for a URL, its working directory on this machine.
        completed: called by the main process whenever what is in the directory could be continued elsewhere.
    """

    path: Path
    _mark: Mark
    _inputs: Inputs
    _overwrite: bool
    completed: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Write the directory's mark; with ``overwrite``, remove first what an earlier run left in it."""
        place = real(self.path)
        if self._overwrite:
            refuse_loss(self.path, self._mark.kind, overwrite=True, inputs=self._inputs)
            for path in list(place.iterdir()):
                if path.name not in (LOCK, MARK):  # kept: if this process is killed, the rest can still be removed
                    _remove_at_once(path)
        for path in place.glob(f"{_REMOVED}*"):
            shutil.rmtree(path)
        for path in place.glob(f"{STAGING_PREFIX}*"):
            if path.is_file() and not path.name.startswith(LOCK):
                path.unlink()  # a half-written file of a process that was killed
        write_mark(place, self._mark)


def _remove_at_once(path: Path) -> None:
    """Remove a file or a directory, of which a process that is killed meanwhile leaves nothing under its name."""
    if path.is_dir() and not path.is_symlink():
        if not path.name.startswith(_REMOVED):
            path = path.rename(path.with_name(f"{_REMOVED}{secrets.token_hex(4)}-{path.name}"))
        shutil.rmtree(path)
    else:
        path.unlink()


# Seconds to wait for processes that hold a shared directory: hundreds that end together write it in turn.
_PATIENCE = 600.0


@contextmanager
def claimed(
    path: str | Path,
    mark: Mark,
    *,
    overwrite: bool = False,
    resume: bool = False,
    inputs: Inputs | None = None,
    advice: str = "",
    shared: bool = False,
) -> Iterator[Claim]:
    """Lock a run's directory for the block; nothing in it changes before ``begin``.

    Of several processes of one run, only the main one checks and locks it.

    Args:
        mark: the directory's future mark. overwrite, inputs, advice: as in ``refuse_loss``.
        resume: the directory exists and its run is continued.
        shared: several processes hold it in turn: another one is waited for, and what it has begun is continued.

    Raises:
        PeftlabError: another process writes it; ``refuse_loss`` refuses; or, with ``resume``, it is no run's.
    """
    claim = Claim(Path(path), mark, inputs or {}, overwrite and not resume)
    if not main_process():
        yield claim
        return
    place = real(path)
    refuse = partial(refuse_loss, path, mark.kind, overwrite=overwrite, inputs=inputs, advice=advice)
    if resume:
        there = read_mark(place)
        if there is None:
            raise PeftlabError(
                f"{path}: not a {mark.kind} that peftlab wrote (it has no {MARK}); there is nothing to resume"
            )
        if there.kind != mark.kind:
            raise PeftlabError(f"{path}: a {there.kind}, not a {mark.kind}; it cannot be resumed as one")
    elif not _free(place) and not is_locked(place) and not (shared and _begun(place, mark)):
        refuse()
    with locked(place / LOCK, path, wait=_PATIENCE if shared else 0.0):
        begun = resume or (shared and _begun(place, mark))
        if not begun and not _free(place):  # another process may have written and ended since
            refuse()
        yield claim


def _begun(place: Path, mark: Mark) -> bool:
    """Return whether a process has begun a directory of this kind: the process with its lock writes the mark first."""
    there = read_mark(place)
    return there is not None and there.kind == mark.kind


def main_process() -> bool:
    """Return whether this is the first of a launcher's processes, by the variables that accelerate reads."""
    names = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
    return next((os.environ[name] for name in names if name in os.environ), "0") in ("0", "-1")


def remove(path: str | Path, kind: str, inputs: Inputs | None = None) -> None:
    """Remove a directory that peftlab wrote, if it exists, on the conditions of ``refuse_loss``."""
    place = real(path)
    if place.exists():
        with locked(place / LOCK, path):
            refuse_loss(path, kind, overwrite=True, inputs=inputs)
            shutil.rmtree(place)


@contextmanager
def scratch_directory(place: Path, purpose: str) -> Iterator[Path]:
    """Yield an empty directory beside ``place`` that is removed afterwards.

    One process at a time has one for the same place and purpose; those of processes that were killed are removed.
    """
    with locked(place.with_name(f"{LOCK}-{purpose}-{place.name}"), place):
        if locks_work():  # whoever made them held this lock, and has ended
            left = re.compile(rf"{re.escape(STAGING_PREFIX + purpose)}-[0-9a-f]{{8}}-{re.escape(place.name)}")
            for path in place.parent.iterdir():
                if left.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)
        scratch = place.with_name(f"{STAGING_PREFIX}{purpose}-{secrets.token_hex(4)}-{place.name}")
        scratch.mkdir()
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def staged_directory(
    path: str | Path, kind: str, *, overwrite: bool = False, inputs: Inputs | None = None
) -> Iterator[Path]:
    """Yield an empty directory beside ``path`` that becomes ``path``, with a mark, by one rename on success.

    Whatever happens before that, ``path`` is untouched: absent, or (with ``overwrite``) as it was.

    Args:
        kind, overwrite, inputs: as in ``refuse_loss``.

    Raises:
        PeftlabError: ``refuse_loss`` refuses, another process writes ``path``, the system could not write, as on a
            full disk, or the staging directory was removed.
    """
    refuse_loss(path, kind, overwrite=overwrite, inputs=inputs)
    place = real(path)
    with write_errors(path, "nothing was left behind"), scratch_directory(place, "out") as scratch:
        staging = scratch / "new"
        staging.mkdir()
        with _watched(staging) as still_there:
            yield staging
            if not still_there():
                raise PeftlabError(
                    f"{path}: its staging directory {staging} was removed by someone; nothing was written"
                )
            files = sorted(file for file in staging.rglob("*") if file.is_file())
            write_mark(staging, Mark(kind, [glob.escape(file.relative_to(staging).as_posix()) for file in files]))
            _flush([staging, *staging.rglob("*")])
        refuse_loss(path, kind, overwrite=overwrite, inputs=inputs)
        _exchange(staging, place, scratch / "old")
        fsync_path(place.parent)


def _flush(paths: Sequence[Path]) -> None:
    """Flush files and directories to the disk, all at once: a file system that keeps a journal then writes it once."""
    with ThreadPoolExecutor(min(len(paths), 16)) as threads:
        for done in [threads.submit(fsync_path, path) for path in paths]:
            done.result()


@contextmanager
def _watched(directory: Path) -> Iterator[Callable[[], bool]]:
    """Yield whether the path still names this directory."""
    if os.name == "nt":  # opens no directory
        yield directory.is_dir
        return
    descriptor = os.open(directory, os.O_RDONLY)  # while it is open no other directory gets its inode
    try:
        yield lambda: same_file(directory, descriptor)
    finally:
        os.close(descriptor)


def _exchange(new: Path, place: Path, old: Path) -> None:
    if place.exists():
        os.replace(place, old)
    try:
        os.replace(new, place)
    except BaseException:
        if old.exists():
            os.replace(old, place)
        raise


def record(directory: Path, name: str) -> None:
    """Add to a directory's mark a file that is about to be written into it."""
    mark = read_mark(directory)
    if mark is not None and glob.escape(name) not in mark.files:
        write_mark(directory, Mark(mark.kind, [*mark.files, glob.escape(name)]))
