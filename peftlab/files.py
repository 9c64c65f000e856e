"""Reading files that may be anything, and writing files that are either absent or complete.

What is written gets a temporary name, is synced and then renamed.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from peftlab.errors import PeftlabError

T = TypeVar("T")

_KINDS: dict[type, str] = {
    dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null",
}  # fmt: skip
STAGING_PREFIX = ".peftlab-tmp-"


def fsync_path(path: Path) -> None:
    """Flush a file or a directory entry to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success sync it and rename it over ``path``.

    On an exception the temporary file and the directories made for it are removed, and ``path`` is left as it was.
    """
    path = Path(path)
    made = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{STAGING_PREFIX}{secrets.token_hex(4)}-{path.name}")
    try:
        yield temporary
        fsync_path(temporary)
        os.replace(temporary, path)
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
        raise PeftlabError(f"{Path(path).name}: cannot hold the file name in {shown}, which is not UTF-8") from None
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` as indented JSON to ``path`` atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        PeftlabError: no such file, one that cannot be opened, or none at all: a directory, or a pipe or device,
            which would block or never end.
    """
    try:
        # Opening a pipe for reading waits for a writer, unless told not to.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
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
    """Return the content of a regular UTF-8 file; errors as in ``read_bytes``, and for other bytes than UTF-8."""
    content = read_bytes(path)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise PeftlabError(f"{path}:{line}: not UTF-8 ({error.reason})") from None


def parse_json(text: str, pairs: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None = None) -> Any:
    """Return the value of a JSON text; whatever is wrong with it is a ``ValueError`` that says so.

    Args:
        pairs: makes an object of its keys and values; default: a dictionary.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError:
        raise
    except ValueError:  # Python's own limit on the digits of an integer, which advises to change Python's settings
        raise ValueError("an integer of more than 4,300 digits") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: str | Path) -> Any:
    """Return the value in a JSON file.

    Raises:
        PeftlabError: as ``read_text``; not JSON, or a string in it contains half a surrogate pair, which no file
            can store.
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


def read_object(path: str | Path) -> dict[str, Any]:
    """Return the object in a JSON file; errors as in ``read_json``, and for a value that is no object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise PeftlabError(f"{path}: must be a JSON object, not {json_kind(value)}")
    return value


def member(values: Mapping[str, Any], key: str, kind: type[T], where: str | Path) -> T:
    """Return the value of a key, which is of type ``kind``; ``PeftlabError`` where it is missing or another type."""
    value = values.get(key)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        wrong = f"must be {_KINDS.get(kind, 'a number')}, not {json_kind(value)}" if key in values else "is missing"
        raise PeftlabError(f"{where}: {key} {wrong}")
    return value


def json_kind(value: Any) -> str:
    """Return JSON's word for the type of a value."""
    return _KINDS.get(type(value), "a number")


def told(error: OSError) -> str:
    """Return what the system says about a file, the file's name first."""
    names = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    return f"{names}: {reason(error)}" if names else reason(error)


def reason(error: BaseException) -> str:
    """Return the first line of what an error says, without the number and the path in one of the system's."""
    said = (getattr(error, "strerror", None) or str(error)).strip()
    return said.splitlines()[0] if said else type(error).__name__


def real(path: str | Path) -> Path:
    """Return ``path`` absolute and without links: it means the same whatever becomes of the current directory."""
    try:
        return Path(os.path.realpath(path))
    except ValueError as error:  # a null character
        raise PeftlabError(f"{str(path)!r}: not a path ({error})") from None
