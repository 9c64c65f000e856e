"""Files that are either absent or complete: written under a temporary name, synced, renamed."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peftlab.errors import PeftlabError

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

    On an exception the temporary file is removed and ``path`` is left as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{STAGING_PREFIX}{os.getpid()}-{path.name}")
    try:
        yield temporary
        fsync_path(temporary)
        os.replace(temporary, path)
        fsync_path(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` (UTF-8) to ``path`` atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` as indented JSON to ``path`` atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: str | Path) -> Any:
    """Read a JSON file; a missing or malformed one raises ``PeftlabError`` naming file and line."""
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PeftlabError(f"{path}: no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise PeftlabError(f"{path}: not valid JSON ({error})") from None


@contextmanager
def staged_directory(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty directory beside ``path`` that becomes ``path`` by one rename on success.

    Whatever happens before that, ``path`` is untouched: absent, or (with ``overwrite``) as it was. Leftovers
    of processes that died while staging the same ``path`` are removed first.

    Raises:
        PeftlabError: ``path`` exists and ``overwrite`` is false.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise PeftlabError(f"{path} exists already; choose another directory or pass --overwrite")
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f"{STAGING_PREFIX}{path.name}-"
    for leftover in path.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
    staging.chmod(0o777 & ~_umask())
    try:
        yield staging
        for file in staging.rglob("*"):
            if file.is_file():
                fsync_path(file)
        fsync_path(staging)
        if path.exists():
            retired = Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
            os.replace(path, retired / "old")
            os.replace(staging, path)
            shutil.rmtree(retired)
        else:
            os.replace(staging, path)
        fsync_path(path.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
