"""Reading, writing and copying at places of open files: each by the system's own call where it has one.

macOS has no ``copy_file_range`` and no ``fdatasync``, Windows has no positioned reads and writes either.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

_SEEKING = threading.Lock()  # where a place must be sought first, threads share the descriptor's one position
_PART = 1 << 20


def open_binary(path: Path, flags: int) -> int:
    """Return a descriptor of a file; Windows translates no line ends in it."""
    return os.open(path, flags | getattr(os, "O_BINARY", 0), 0o644)


def read_at(descriptor: int, size: int, offset: int) -> bytes:
    """Return up to ``size`` bytes from ``offset``; none at the end of the file."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, offset)
    with _SEEKING:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, size)


def read_into(descriptor: int, view: memoryview, offset: int) -> int:
    """Fill ``view`` from ``offset`` on, and return how many bytes were read; 0 at the end of the file."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [view], offset)
    part = read_at(descriptor, min(_PART, len(view)), offset)
    view[: len(part)] = part
    return len(part)


def write_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Write ``view`` at ``offset``, and return how many bytes were written."""
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, view, offset)
    with _SEEKING:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, view)


def copy_at(source: int, target: int, size: int, begin: int, end: int) -> int:
    """Copy up to ``size`` bytes from ``begin`` of a file to ``end`` of another, and return how many were copied.

    Raises:
        OSError: the system, or these two file systems, cannot do so without reading them.
    """
    if not hasattr(os, "copy_file_range"):
        raise OSError(errno.ENOTSUP, "no copy_file_range")
    return os.copy_file_range(source, target, size, begin, end)


def flush(descriptor: int) -> None:
    """Wait until what was written is on the disk."""
    getattr(os, "fdatasync", os.fsync)(descriptor)
