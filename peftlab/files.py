"""Reading files with clear errors, and writing files that are either absent or complete.

A file is written under a temporary name, synced and then renamed. One in a staging directory is synced with all others
there, when they are complete (``outputs.staged_directory``).
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
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
_WRITE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO}
# Libraries in Rust (tokenizers, safetensors) raise errors of their own types; shutil.Error has the texts of several.
_OS_ERROR = re.compile(r"\(os error (\d+)\)|\[errno (\d+)\]", re.IGNORECASE)


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
    if "inline_container.cc" in str(error):  # torch.save, which does not know the reason
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
        with write_errors(path, consequence):
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
    """Write ``to_json(value)``, indented, to ``path`` atomically."""
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


def member(values: Mapping[str, object], key: str, kind: type[T], where: str | Path) -> T:
    """Return the value of a key, which is of type ``kind``; ``PeftlabError`` where it is missing or another type."""
    value = values.get(key)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        wrong = f"must be {_KINDS.get(kind, 'a number')}, not {json_kind(value)}" if key in values else "is missing"
        raise PeftlabError(f"{where}: {key} {wrong}")
    return value


def json_kind(value: object) -> str:
    """Return JSON's word for the type of a value."""
    return _KINDS.get(type(value), "a number")


def real(path: str | Path) -> Path:
    """Return ``path`` absolute and without links: it means the same whatever becomes of the current directory."""
    try:
        return Path(os.path.realpath(path))
    except ValueError as error:  # a null character
        raise PeftlabError(f"{str(path)!r}: not a path ({error})") from None
