"""Files and output directories: read with clear errors, written complete or not at all, and owned by one process.

A file is written under a temporary name, synced and then renamed. A directory that appears at once is written beside
its place and renamed (``staged_directory``); one that a run fills step by step is locked while it does (``claimed``).
Each contains ``peftlab.json``: its kind, and the files in it that peftlab wrote. Only such a directory is ever
replaced, only by one of the same kind, and only if it contains nothing else and none of the inputs.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import platform
import re
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, is_dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, TypeAlias, TypeVar, overload, runtime_checkable

from peftlab.errors import PeftlabError, reason

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
"""A value that JSON or YAML can represent."""


@runtime_checkable
class AsJson(Protocol):
    """A result whose JSON is not just its fields."""

    def as_json(self) -> Mapping[str, object]: ...


_KINDS: dict[type, str] = {
    dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null",
}  # fmt: skip
STAGING_PREFIX = ".peftlab-tmp-"
LOCK = f"{STAGING_PREFIX}lock"
MARK = "peftlab.json"
URL = re.compile(r"([A-Za-z][\w+.-]+(?:::[\w+.-]+)*):/+(.*)", re.DOTALL)  # Path makes one slash of two
_WRITE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
# Libraries in Rust (tokenizers, safetensors) raise errors of their own types; shutil.Error has the texts of several.
_OS_ERROR = re.compile(r"\(os error (\d+)\)|\[errno (\d+)\]", re.IGNORECASE)


def is_url(reference: str | Path) -> bool:
    """Return whether a reference is a URL and no path; ``package:NAME/path`` and ``C:/path`` are none."""
    return URL.fullmatch(str(reference)) is not None


def fsync_path(path: Path) -> None:
    """Flush a file or a directory entry to the disk; Windows flushes no directory, and no file open for reading."""
    windows = os.name == "nt"
    if windows and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def write_errors(path: str | Path, consequence: str = "") -> Iterator[None]:
    """Turn what a full disk raises in the block into an error that names ``path`` and the reason.

    Args:
        path: what is being written, as the user knows it.
        consequence: what it means, added to the message.

    Raises:
        PeftlabError: the system could not write; any other exception passes.
    """
    try:
        yield
    except PeftlabError:
        raise
    except Exception as error:
        if why := _write_error(error):
            raise PeftlabError(f"{path}: cannot be written ({why}){consequence and f'; {consequence}'}") from error
        raise


def _write_error(error: Exception) -> str:
    """Return why the system could not write, if that is what an exception says; else an empty text."""
    found = _OS_ERROR.search(str(error))
    code = int(found[1] or found[2]) if found else None
    if isinstance(error, shutil.Error):
        source, _, text = error.args[0][0]
        return os.strerror(code) if code in _WRITE_ERRORS else f"{source}: {text}"
    if isinstance(error, OSError):
        code, name = error.errno, str(error.filename or "")
        # An error without a name, or with that of a temporary file, would not say what could not be written.
        return reason(error) if code in _WRITE_ERRORS or (code and (not name or STAGING_PREFIX in name)) else ""
    if "inline_container.cc" in str(error) or "iostream error" in str(error):  # torch.save, which knows no reason
        return reason(error)
    return os.strerror(code) if code in _WRITE_ERRORS else ""


@contextmanager
def replacing(path: str | Path, consequence: str = "") -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success sync it and rename it over ``path``.

    In a staging directory it is not synced yet. On an exception the temporary file and the directories made for it are
    removed, and ``path`` is left as it was.

    Args:
        path: the file to write. consequence: what it means that it cannot be written, for the message.

    Raises:
        PeftlabError: the system could not write it, as on a full disk.
    """
    path = Path(path)
    made = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = any(parent.name.startswith(STAGING_PREFIX) for parent in path.absolute().parents)
    temporary = path.with_name(f"{STAGING_PREFIX}{secrets.token_hex(4)}-{path.name}")
    try:
        # In a staging directory, whose name says nothing, the error is told with the directory's own.
        with nullcontext() if staged else write_errors(path, consequence):
            yield temporary
            if not staged:
                fsync_path(temporary)
            os.replace(temporary, path)
            if not staged:
                fsync_path(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        for parent in made:
            with suppress(OSError):  # it is not empty: another process writes there as well
                parent.rmdir()
        raise


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` (UTF-8) to ``path`` atomically.

    Args:
        path: the file.
        text: its whole content.

    Raises:
        PeftlabError: the text names a file whose name is not UTF-8.
    """
    try:
        content = text.encode("utf-8")
    except UnicodeEncodeError as error:
        shown = ascii(text[max(0, error.start - 40) : error.end + 20])
        raise PeftlabError(f"{Path(path).name}: cannot contain the file name in {shown}, which is not UTF-8") from None
    with replacing(path) as temporary:
        temporary.write_bytes(content)


@overload
def to_json(value: AsJson | DataclassInstance | Mapping[str, object]) -> dict[str, Json]: ...
@overload
def to_json(value: object) -> Json: ...
def to_json(value: object) -> Json:
    """Return ``value`` in JSON's types: a dataclass is an object with its fields, a tuple a list, a path a string.

    A value that has ``as_json`` is what that returns.

    Raises:
        TypeError: JSON has no such value.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, AsJson):
        return to_json(value.as_json())
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"JSON has no value for a {type(value).__name__}")


def write_json(path: str | Path, value: object) -> None:
    """Write ``to_json(value)``, indented, to ``path`` atomically; errors as in ``write_text``."""
    write_text(path, json.dumps(to_json(value), indent=2, ensure_ascii=False) + "\n")


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        PeftlabError: no such file, one that cannot be opened, or not a regular file: reading a pipe or a device
            might block or never end.
    """
    try:
        # Without O_NONBLOCK, which Windows lacks, opening a pipe waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise PeftlabError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise PeftlabError(f"{path}: cannot be read ({reason(error)})") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise PeftlabError(f"{path}: not a regular file")
    return open(descriptor, "rb")


def read_bytes(path: str | Path) -> bytes:
    """Return the content of a regular file; errors as in ``open_regular``."""
    with open_regular(path) as file:
        try:
            return file.read()
        except OSError as error:
            raise PeftlabError(f"{path}: cannot be read ({reason(error)})") from None


def read_text(path: str | Path) -> str:
    """Return the content of a regular UTF-8 file; errors as in ``read_bytes``, and for bytes that are not UTF-8."""
    content = read_bytes(path)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise PeftlabError(f"{path}:{line}: not UTF-8 ({error.reason})") from None


def parse_json(text: str, pairs: Callable[[list[tuple[str, Json]]], dict[str, Json]] | None = None) -> Json:
    """Return the value of a JSON text; any mistake in it raises ``ValueError``.

    Args:
        text: one JSON document.
        pairs: makes an object of its keys and values; default: a dictionary.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError:
        raise
    except ValueError:  # Python's limit on an integer's digits, whose message is about Python's settings
        raise ValueError("an integer of more than 4,300 digits") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: str | Path) -> Json:
    """Return the value in a JSON file.

    Raises:
        PeftlabError: as ``read_text``; not JSON, or a string in it contains half a surrogate pair, which UTF-8
            cannot encode.
    """
    text = read_text(path)
    try:
        value = parse_json(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise PeftlabError(f"{path}: not valid JSON (a string contains half a surrogate pair)") from None
    except ValueError as error:
        raise PeftlabError(f"{path}: not valid JSON ({error})") from None
    return value


def read_object(path: str | Path) -> dict[str, Json]:
    """Return the object in a JSON file; errors as in ``read_json``, and for a value that is not an object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise PeftlabError(f"{path}: must be a JSON object, not {json_kind(value)}")
    return value


def typed_value(values: Mapping[str, object], key: str, kind: type[T], where: str | Path) -> T:
    """Return the value of a key of a JSON object, which is of type ``kind``.

    Args:
        values: the object.
        key: its key.
        kind: the type of the value; ``int`` does not take true and false.
        where: the file, for the message.

    Raises:
        PeftlabError: the key is missing, or its value is of another type.
    """
    value = values.get(key)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        wrong = f"must be {_KINDS.get(kind, 'a number')}, not {json_kind(value)}" if key in values else "is missing"
        raise PeftlabError(f"{where}: {key} {wrong}")
    return value


def json_kind(value: object) -> str:
    """Return JSON's word for the type of a value."""
    return _KINDS.get(type(value), "a number")


def real_path(path: str | Path) -> Path:
    """Return ``path`` absolute and without links: it means the same whatever becomes of the current directory."""
    try:
        return Path(os.path.realpath(path))
    except ValueError as error:  # a null character
        raise PeftlabError(f"{str(path)!r}: not a path ({error})") from None


# Locks


@contextmanager
def locked(file: Path, path: str | Path, *, wait: float = 0.0) -> Iterator[bool]:
    """Hold the operating system's lock on ``file`` for the block; the file is made for it and removed afterwards.

    Yields whether it is held: where the system has no locks, a warning is printed, and nothing is locked.

    A lock ends with the process that holds it, however that ends, so that nothing has to be removed by hand. A file
    server may keep the lock of a host that is gone: the file names host and process, for ``remove_lost_lock``. Missing
    directories above ``file`` are made, and removed again if nothing was put into them.

    Args:
        file: the lock's own file.
        path: the output that the lock protects, for messages.
        wait: seconds to wait for another process.

    Raises:
        PeftlabError: another process holds it, or the file cannot be made.
    """
    made = [directory for directory in file.parents if not os.path.exists(directory)]
    until = time.monotonic() + max(wait, 0.2)  # ``is_locked`` of another process holds it for a moment
    try:
        while (opened := _open_locked(file, path)) is None:
            if time.monotonic() >= until:
                host, process = _owner(file)
                who = f" ({host}, process {process})" if host else ""
                raise PeftlabError(
                    f"{path}: another process is writing it{who}; wait for it to end, or choose another directory"
                )
            time.sleep(0.05)
    except OSError as error:
        raise PeftlabError(f"{path}: cannot be written ({error.strerror or error})") from None
    descriptor, held = opened
    try:
        yield held
    finally:
        if os.name != "nt" and _same_file(file, descriptor):
            file.unlink()  # before the lock is released: afterwards the file may be another process's
        os.close(descriptor)
        if os.name == "nt":  # removes no open file
            with suppress(OSError):
                file.unlink()
        for directory in made:
            with suppress(OSError):
                directory.rmdir()


def _open_locked(file: Path, path: str | Path) -> tuple[int, bool] | None:
    """Return a descriptor of ``file`` and whether it holds its lock; None where another process does."""
    from filelock import lock_descriptor

    while True:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # its last owner removed the directory just now
            continue
        free = held = False
        try:
            free = held = lock_descriptor(descriptor, blocking=False)
        except OSError as error:
            free, why = True, f"this system has no file locks ({reason(error)})"
            print(f"{path}: {why}; start no second process that writes it", file=sys.stderr)
        if free and _same_file(file, descriptor):
            try:
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"{platform.node()} {os.getpid()}\n".encode())
            except OSError:  # the disk is full
                file.unlink()
                os.close(descriptor)
                raise
            return descriptor, held
        os.close(descriptor)
        if not free:
            return None  # else its last owner removed the file between the two calls: make it anew


def is_locked(directory: str | Path) -> bool:
    """Return whether a process holds the run directory ``directory``; False where the system has no locks."""
    from filelock import lock_descriptor

    try:
        descriptor = os.open(real_path(directory) / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        return not lock_descriptor(descriptor, blocking=False)
    except OSError:
        return False
    finally:
        os.close(descriptor)


def remove_lost_lock(directory: str | Path, hosts: Collection[str]) -> None:
    """Remove the lock on a run directory if a host that is gone holds it.

    Args:
        directory: the run directory.
        hosts: the names of the hosts that are alive.
    """
    file = real_path(directory) / LOCK
    host, _ = _owner(file)
    if host and host not in hosts:
        file.unlink(missing_ok=True)


def _owner(file: Path) -> tuple[str, str]:
    """Return host and process id of the owner of a lock; empty texts where it has not written them yet."""
    with suppress(OSError, ValueError):
        host, process = file.read_text(encoding="utf-8").split()
        return host, process
    return "", ""


def _same_file(path: Path, descriptor: int) -> bool:
    """Return whether ``path`` still names what ``descriptor`` has opened."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


# Output directories


Inputs = Mapping[str, "str | Path | None"]
"""What an output must not destroy: paths by their names in messages ("the model"). A value that is not a path, such
as a hub id, is ignored."""
_REMOVED = f"{STAGING_PREFIX}removed-"
_PATIENCE = 600.0  # seconds to wait for the processes that hold a shared directory: hundreds that end write it in turn
TOKENIZER = (
    "tokenizer*", "*.tokenizer", "*vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.spm",
    "spm*.model", "*.tiktoken", "tekken.json", "sentencepiece*", "spiece*", "*.bpe", "bpe.codes", "normalizer.json",
    "dict.txt", "emoji.json", "byte_maps.json", "word_shape.json", "word_pronunciation.json", "chat_template*",
)  # fmt: skip
"""The files of a tokenizer, as patterns; ``additional_chat_templates`` beside them is a directory."""
_MODEL = (
    "README.md", "config.json", "generation_config.json", "merge.json", "*.safetensors", "*.safetensors.index.json",
    "pytorch_model*.bin", "pytorch_model.bin.index.json", "adapter_config.json", "gated_lora.json", "target.json",
    "draft_vocabulary.json", "data.json", "*preprocessor_config.json", "processor_config.json", "*.py", "*.gguf",
    *TOKENIZER, "additional_chat_templates/*", "LICEN[CS]E*", "NOTICE*", "USE_POLICY*", "COPYING*",
)  # fmt: skip
MERGE_INPUTS = "merge_inputs.safetensors"
"""In a run: held-out examples as the model reads them, on which a merge of its adapter is verified."""
WRITTEN: dict[str, tuple[str, ...]] = {
    "run": (
        "recipe.yaml", "provenance.json", MERGE_INPUTS, "metrics.jsonl",
        "checkpoints/recipe.yaml", "checkpoints/step-*.pt", "checkpoints/step-*.pt.damaged",
        "acceptance_head.safetensors", "results.json", "report.html", "updates/replay-*.jsonl",
        "settings.json", "windows/*.json", "stream.json", "stream.html",  # of an update that serves a stream
        "peftlab/*",  # a tracker's, named after the project
    ),
    "table": ("recipe.yaml", "table.csv", "table.tex", "table.html", "cells/*.log"),
    "model": _MODEL,
    "adapter": _MODEL,
    "draft": (*_MODEL, "metrics.jsonl"),  # between the requests of a stream
}  # fmt: skip
"""The files that peftlab writes, by the kind of directory, as patterns in which ``*`` matches any characters.

A file of another name is never removed, whatever the directory's mark lists: a mark may come from elsewhere."""


@dataclass(frozen=True)
class Mark:
    """The content of ``peftlab.json``.

    Attributes:
        kind: "run", "table", "model", "adapter" or "draft".
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
        return parse_mark(read_json(directory / MARK))
    except (PeftlabError, OSError):
        return None


def parse_mark(value: object) -> Mark | None:
    """Return the mark that the JSON of a ``peftlab.json`` is; None if it is none."""
    kind, files = (value.get("kind"), value.get("files")) if isinstance(value, dict) else (None, None)
    if not isinstance(kind, str) or not isinstance(files, list) or not all(isinstance(name, str) for name in files):
        return None
    return Mark(kind, files)


def write_mark(directory: Path, mark: Mark) -> None:
    """Write ``mark`` as the ``peftlab.json`` of ``directory``."""
    write_json(directory / MARK, {"written_by": "peftlab", "kind": mark.kind, "files": list(mark.files)})


def record_file(directory: Path, name: str) -> None:
    """Add the file ``name``, which is about to be written into ``directory``, to the directory's mark."""
    mark = read_mark(directory)
    if mark is not None and glob.escape(name) not in mark.files:
        write_mark(directory, Mark(mark.kind, [*mark.files, glob.escape(name)]))


def contains_path(outer: str | Path, inner: str | Path) -> bool:
    """Return whether ``inner`` is ``outer`` or below it: by device and inode, so through links and bind mounts too."""
    above = {path for start in (Path(inner).absolute(), real_path(inner)) for path in (start, *start.parents)}
    return os.path.exists(outer) and any(os.path.exists(path) and os.path.samefile(path, outer) for path in above)


def refuse_loss(
    path: str | Path, kind: str, *, overwrite: bool, inputs: Inputs | None = None, advice: str = ""
) -> None:
    """Refuse an output at ``path`` that would destroy something.

    An absent or empty directory may be written. Any other is replaced only with ``overwrite``, and only if it is a
    directory that peftlab wrote, of the same kind, contains no other files, and neither is nor contains an input,
    the current directory or the home directory.

    Args:
        path: the output.
        kind: of the directory to write.
        overwrite: whether a directory of this kind may be replaced.
        inputs: what must stay.
        advice: what to do where ``overwrite`` is missing, for the message.

    Raises:
        PeftlabError: the output would destroy something, which is named.
    """
    if is_url(path):
        raise PeftlabError(f"{path}: written on this machine alone; only the output_dir of a run may be a URL")
    place = real_path(path)
    try:
        obstacle = _obstacle(place, kind, inputs or {}, overwrite, advice) if os.path.lexists(place) else ""
    except OSError as error:
        obstacle = f"cannot be read: {error.filename}: {error.strerror}"
    if obstacle:
        raise PeftlabError(f"{path} {obstacle}")


def _obstacle(place: Path, kind: str, inputs: Inputs, overwrite: bool, advice: str) -> str:
    """Return why an existing ``place`` must not be replaced, or an empty text."""
    other = "choose another directory"
    kept: list[tuple[str, Path]] = []  # what no output may destroy, if it exists
    with suppress(OSError):
        kept.append(("the current directory", Path.cwd()))
    with suppress(OSError, RuntimeError):
        kept.append(("the home directory", Path.home()))
    for name, value in inputs.items():
        with suppress(OSError, RuntimeError, ValueError):
            if value and (path := Path(value).expanduser()).exists():
                kept.append((name, path))
    for name, path in kept:
        if contains_path(place, path):
            return f"is or contains {name} ({path}); {other}"
    if not place.is_dir():
        return f"exists already and is not a directory; {other}"
    if _is_free(place):
        return ""
    mark = read_mark(place)
    if mark is None:
        return f"exists already and was not written by peftlab (it has no {MARK}); remove it yourself, or {other}"
    if mark.kind != kind:
        return f"exists already and is a {mark.kind}, not a {kind}; {other}"
    if not overwrite:
        return f"exists already; {advice or f'{other} or pass --overwrite'}"
    inodes = {}  # of inputs and the files they link to: the hub's cache keeps a model as links
    for name, path in kept:
        for file in (path, *(link for link in (path.iterdir() if path.is_dir() else ()) if link.is_symlink())):
            with suppress(OSError):
                state = file.stat()
                if file is path or stat.S_ISREG(state.st_mode):
                    inodes[state.st_dev, state.st_ino] = name
    for file, ours in _below(place, place, mark):
        state = file.lstat()
        if (state.st_dev, state.st_ino) in inodes:
            return f"contains {inodes[state.st_dev, state.st_ino]}; {other}"
        if not ours:
            return f"contains {file.relative_to(place)}, which peftlab did not write; move it, or {other}"
    return ""


def _is_free(place: Path) -> bool:
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
        place = real_path(self.path)
        if self._overwrite:
            refuse_loss(self.path, self._mark.kind, overwrite=True, inputs=self._inputs)
            # The mark stays until all else is gone: if this process is killed, the rest can still be removed. A
            # directory is renamed first, so that no half of a model is ever seen under its name.
            for path in list(place.iterdir()):
                if path.is_dir() and not path.is_symlink():
                    if not path.name.startswith(_REMOVED):
                        path = path.rename(path.with_name(f"{_REMOVED}{secrets.token_hex(4)}-{path.name}"))
                    shutil.rmtree(path)
                elif path.name not in (LOCK, MARK):
                    path.unlink()
        for path in place.glob(f"{STAGING_PREFIX}*"):  # left by a process that was killed
            if path.name.startswith(_REMOVED):
                shutil.rmtree(path)
            elif path.is_file() and not path.name.startswith(LOCK):
                path.unlink()
        write_mark(place, self._mark)


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
        path: the directory.
        mark: the directory's future mark.
        overwrite, inputs, advice: as in ``refuse_loss``.
        resume: the directory exists and its run is continued.
        shared: several processes hold it in turn: another one is waited for, and what it has begun is continued.

    Raises:
        PeftlabError: another process writes it; ``refuse_loss`` refuses; or, with ``resume``, it is no run's.
    """
    claim = Claim(Path(path), mark, inputs or {}, overwrite and not resume)
    if not main_process():
        yield claim
        return
    place = real_path(path)
    refuse = partial(refuse_loss, path, mark.kind, overwrite=overwrite, inputs=inputs, advice=advice)

    def begun() -> bool:  # by another process that shares it: the one with the lock writes the mark first
        there = read_mark(place)
        return shared and there is not None and there.kind == mark.kind

    if resume:
        there = read_mark(place)
        if there is None:
            raise PeftlabError(
                f"{path}: not a {mark.kind} that peftlab wrote (it has no {MARK}); there is nothing to resume"
            )
        if there.kind != mark.kind:
            raise PeftlabError(f"{path}: a {there.kind}, not a {mark.kind}; it cannot be resumed as one")
    elif not _is_free(place) and not is_locked(place) and not begun():
        refuse()
    with locked(place / LOCK, path, wait=_PATIENCE if shared else 0.0):
        # Checked again: another process may have written and ended since.
        if not (resume or begun() or _is_free(place)):
            refuse()
        yield claim


def main_process() -> bool:
    """Return whether this is the first of a launcher's processes, by the variables that accelerate reads."""
    names = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
    return next((os.environ[name] for name in names if name in os.environ), "0") in ("0", "-1")


def remove(path: str | Path, kind: str, inputs: Inputs | None = None) -> None:
    """Remove a directory that peftlab wrote, if it exists.

    Args:
        path, kind, inputs: as in ``refuse_loss``, whose conditions it must meet.
    """
    place = real_path(path)
    if place.exists():
        with locked(place / LOCK, path):
            refuse_loss(path, kind, overwrite=True, inputs=inputs)
            shutil.rmtree(place)


@contextmanager
def scratch_directory(place: Path, purpose: str) -> Iterator[Path]:
    """Yield an empty directory beside ``place`` that is removed afterwards.

    One process at a time has one for the same place and purpose; those of processes that were killed are removed.

    Args:
        place: the output that it serves.
        purpose: a word of the directory's name.
    """
    with locked(place.with_name(f"{LOCK}-{purpose}-{place.name}"), place) as held:
        if held:  # whoever made them held this lock, and has ended
            left = re.compile(rf"{re.escape(STAGING_PREFIX + purpose)}-[0-9a-f]{{8}}-{re.escape(place.name)}")
            for path in place.parent.iterdir():
                if left.fullmatch(path.name):
                    if (path / "old").exists() and not os.path.lexists(place):  # killed between two renames
                        os.replace(path / "old", place)
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
        path: the directory to write.
        kind, overwrite, inputs: as in ``refuse_loss``.

    Raises:
        PeftlabError: ``refuse_loss`` refuses, another process writes ``path``, the system could not write, as on a
            full disk, or the staging directory was removed.
    """
    from concurrent.futures import ThreadPoolExecutor

    refuse_loss(path, kind, overwrite=overwrite, inputs=inputs)
    place = real_path(path)
    with write_errors(path, "nothing was left behind"), scratch_directory(place, "out") as scratch:
        staging, old = scratch / "new", scratch / "old"
        staging.mkdir()
        # While it is open no other directory gets its inode. Windows opens no directory.
        descriptor = os.open(staging, os.O_RDONLY) if os.name != "nt" else None
        try:
            yield staging
            if not (staging.is_dir() if descriptor is None else _same_file(staging, descriptor)):
                raise PeftlabError(
                    f"{path}: its staging directory {staging} was removed by someone; nothing was written"
                )
        finally:
            if descriptor is not None:
                os.close(descriptor)
        files = sorted(file for file in staging.rglob("*") if file.is_file())
        write_mark(staging, Mark(kind, [glob.escape(file.relative_to(staging).as_posix()) for file in files]))
        with ThreadPoolExecutor(16) as threads:  # all at once: a file system that keeps a journal then writes it once
            list(threads.map(fsync_path, [staging, *staging.rglob("*")]))
        refuse_loss(path, kind, overwrite=overwrite, inputs=inputs)
        if place.exists():
            os.replace(place, old)
        try:
            os.replace(staging, place)
        except BaseException:
            if old.exists():
                os.replace(old, place)
            raise
        fsync_path(place.parent)


@contextmanager
def staged_file(path: str | Path, *, overwrite: bool = False, inputs: Inputs | None = None) -> Iterator[Path]:
    """Yield an empty directory beside ``path``, in which the file of that name becomes ``path`` on success.

    Whatever happens before that, ``path`` is untouched: absent, or (with ``overwrite``) as it was.

    Args:
        path: the file to write.
        overwrite: whether a file there may be replaced. inputs: what must stay.

    Raises:
        PeftlabError: ``path`` is in the way, or the system could not write, as on a full disk.
    """
    if is_url(path):
        raise PeftlabError(f"{path}: written on this machine alone; only the output_dir of a run may be a URL")
    place = real_path(path)

    def refuse() -> None:
        for name, value in (inputs or {}).items():
            if value is not None and os.path.exists(value) and place.exists() and os.path.samefile(value, place):
                raise PeftlabError(f"{path} is {name}; choose another name")
        if place.is_dir():
            raise PeftlabError(f"{path} is a directory; name a file")
        if os.path.lexists(place) and not overwrite:
            raise PeftlabError(f"{path} exists; choose another name, or replace it with --overwrite")

    refuse()
    place.parent.mkdir(parents=True, exist_ok=True)
    with write_errors(path, "nothing was left behind"), scratch_directory(place, "out") as scratch:
        staging = scratch / "new"  # a name without the file's suffix
        staging.mkdir()
        yield staging
        fsync_path(staging / place.name)
        refuse()
        os.replace(staging / place.name, place)
        fsync_path(place.parent)
