"""Locks of the operating system's on files: one process at a time writes a directory.

A lock ends with the process that holds it, however that ends, so that nothing has to be removed by hand afterwards. A
file server may keep the lock of a host that is gone: the file names host and process, for ``remove_lost``.
"""

from __future__ import annotations

import errno
import os
import platform
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from peftlab.errors import PeftlabError
from peftlab.files import STAGING_PREFIX, real

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]
LOCK = f"{STAGING_PREFIX}lock"


def locks_work() -> bool:
    """Return whether this system has locks at all."""
    return fcntl is not None


@contextmanager
def locked(file: Path, path: str | Path, *, wait: float = 0.0) -> Iterator[None]:
    """Hold the lock on ``file`` for the block; the file is made for it and removed afterwards.

    Missing directories above ``file`` are made, and removed again if nothing was put into them. Where the system has
    no such locks, a warning is printed and nothing is locked.

    Args:
        path: the output that the lock protects, for messages. wait: seconds to wait for another process.

    Raises:
        PeftlabError: another process holds it, or the file cannot be made.
    """
    made = [directory for directory in file.parents if not os.path.exists(directory)]
    try:
        descriptor = _open_locked(file, path, time.monotonic() + wait)
    except OSError as error:
        raise PeftlabError(f"{path}: cannot be written ({error.strerror or error})") from None
    try:
        yield
    finally:
        if os.name != "nt" and same_file(file, descriptor):
            file.unlink()  # before the lock is released: afterwards the file may be another process's
        os.close(descriptor)
        if os.name == "nt":  # removes no open file
            file.unlink(missing_ok=True)
        for directory in made:
            with suppress(OSError):
                directory.rmdir()


def _open_locked(file: Path, path: str | Path, until: float) -> int:
    """Return a descriptor of ``file`` that holds the lock and is still the file of that name."""
    while True:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # its last owner removed the directory just now
            continue
        if not _lock(descriptor, path):
            os.close(descriptor)
            if time.monotonic() < until:
                time.sleep(0.05)
                continue
            host, process = _owner(file)
            who = f" ({host}, process {process})" if host else ""
            raise PeftlabError(
                f"{path}: another process is writing it{who}; wait for it to end, or choose another directory"
            )
        if same_file(file, descriptor):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{platform.node()} {os.getpid()}\n".encode())
            return descriptor
        os.close(descriptor)  # its last owner removed the file between the two calls


def _lock(descriptor: int, path: str | Path) -> bool:
    """Take the lock; False where another process holds it."""
    try:
        if fcntl is None:
            raise OSError(errno.ENOTSUP, "no fcntl")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        why = error.strerror or str(error)
        print(f"{path}: this system has no file locks ({why}); start no second process that writes it", file=sys.stderr)
    return True


def _owner(file: Path) -> tuple[str, str]:
    """Return host and process id of the owner of a lock; empty texts where it has not written them yet."""
    with suppress(OSError, ValueError):
        host, process = file.read_text(encoding="utf-8").split()
        return host, process
    return "", ""


def remove_lost(directory: str | Path, hosts: Collection[str]) -> None:
    """Remove the lock on a run directory that a host holds which is not among ``hosts``, those that are alive."""
    file = real(directory) / LOCK
    host, _ = _owner(file)
    if host and host not in hosts:
        file.unlink(missing_ok=True)


def same_file(file: Path, descriptor: int) -> bool:
    """Return whether the path ``file`` still names what ``descriptor`` has opened."""
    try:
        return os.path.samestat(os.stat(file), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def is_locked(directory: str | Path) -> bool:
    """Return whether a process holds the run directory ``directory``; False where the system has no locks."""
    if fcntl is None:
        return False
    try:
        descriptor = os.open(real(directory) / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
