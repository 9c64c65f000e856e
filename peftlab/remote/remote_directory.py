"""A directory at a URL, such as s3://bucket/run: fsspec's file systems, with one clear error for whatever fails.

Keys come from the environment and the files that each file system reads by itself; a URL that contains them is refused.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from peftlab.errors import PeftlabError, did_you_mean, reason
from peftlab.files import replacing
from peftlab.references import URL
from peftlab.untyped import Function

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")
_KEYS = re.compile(r"[^/@]*:[^/@]*@")
_LOCAL = ("file", "local")
_READ_ONLY = ("http", "https", "data", "github", "gist")
_PAUSES = (1.0, 5.0)  # seconds before a failed request is made again


def check_url(url: str) -> None:
    """Check that runs can be stored below ``url``, without asking it.

    Raises:
        PeftlabError: an unknown or read-only protocol, keys in the URL, or the protocol's package is not installed.
    """
    _file_system_class(url)


def local_place(url: str, purpose: str) -> Path:
    """Return the working directory of a URL on this machine: ``PEFTLAB_CACHE/PURPOSE/DIGEST/NAME``.

    ``PEFTLAB_CACHE`` is by default ``peftlab`` in ``XDG_CACHE_HOME``, else in ``~/.cache``; NAME ends the URL.

    Args:
        purpose: "runs" is where runs work, "references" what is read of others.
    """
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = os.environ.get("PEFTLAB_CACHE") or os.path.join(user, "peftlab")
    url = url.rstrip("/")
    return Path(cache, purpose, hashlib.sha256(url.encode()).hexdigest()[:16], url.rpartition("/")[2])


@dataclass(frozen=True)
class RemoteDirectory:
    """A directory at a URL; names of its files are relative to it.

    Every method raises ``PeftlabError`` for what the file system or its transport refuses, after trying again.
    """

    url: str
    _system: AbstractFileSystem
    _root: str

    @classmethod
    def at(cls, url: str) -> RemoteDirectory:
        """Return the directory at ``url``; errors as in ``check_url``."""
        system = _file_system_class(url)
        # What other machines write must be seen: no listing is remembered.
        opened = _asked(url, "be opened", partial(system, use_listings_cache=False, skip_instance_cache=True))
        return cls(url.rstrip("/"), opened, opened._strip_protocol(url).rstrip("/"))

    def versions(self) -> dict[str, str]:
        """Return the files by name, each with a text that changes with its content; empty if there is none."""
        found: dict[str, dict[str, object]] = self._ask(
            "be listed", partial(self._system.find, self._root, detail=True), {}
        )
        versions: dict[str, str] = {}
        for path, info in found.items():
            name = path.removeprefix(self._root).lstrip("/")
            if info["type"] == "file" and name:
                versions[name] = hashlib.sha256(repr(sorted(info.items(), key=str)).encode()).hexdigest()[:16]
        return versions

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if there is none."""
        return self._ask("be read", partial(self._system.cat_file, self._path(name)), None, name)

    def download(self, name: str, file: Path) -> None:
        """Write a file's content to ``file`` of this machine, whole or not at all."""
        with replacing(file) as temporary:
            _asked(self._named(name), "be read", partial(self._system.get_file, self._path(name), str(temporary)))

    def upload(self, file: Path, name: str) -> None:
        """Write ``file``; object stores replace the one of that name when all of it has arrived."""
        _asked(self._named(name), "be written", partial(self._system.put_file, str(file), self._path(name)))

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        self._ask("be removed", partial(self._system.rm_file, self._path(name)), None, name)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _named(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def _ask(self, what: str, request: Callable[[], T], absent: T, name: str = "") -> T:
        """Return the answer to a request, or ``absent`` where there is no such file."""
        try:
            return _asked(self._named(name), what, request)
        except _Absent:
            return absent


class _Absent(PeftlabError):
    """There is no such file, bucket or directory."""


def _asked(where: str, what: str, request: Callable[[], T], pauses: Sequence[float] = _PAUSES) -> T:
    """Return the answer to a request, made again after each pause while it fails."""
    try:
        return request()
    except FileNotFoundError as error:
        raise _Absent(f"{where}: cannot {what} ({reason(error)})") from None
    except Exception as error:  # the transports' own types, too
        if not pauses or isinstance(error, PermissionError):
            raise PeftlabError(f"{where}: cannot {what} ({reason(error)})") from None
    time.sleep(pauses[0])
    return _asked(where, what, request, pauses[1:])


def _file_system_class(url: str) -> Function[AbstractFileSystem]:
    from fsspec import available_protocols, get_filesystem_class, registry

    found = URL.fullmatch(url)
    if found is None or "://" not in url or not found[2]:
        raise PeftlabError(f"{url}: not a URL; write PROTOCOL://BUCKET/PATH")
    protocol, rest = found[1], found[2]
    if protocol in _LOCAL:
        raise PeftlabError(f"{url}: a directory of this machine; write its path, without {protocol}://")
    if _KEYS.match(rest):
        raise PeftlabError(f"{protocol}://...: contains a password, which recipes keep; leave it to the environment")
    known = sorted({*available_protocols(), *registry} - {*_LOCAL, *_READ_ONLY})
    if protocol not in known:
        why = "runs cannot be stored there" if protocol in _READ_ONLY else "unknown protocol"
        raise PeftlabError(
            f"{url}: {protocol}: {why}{did_you_mean(protocol, known)}; s3, gs and az are among those known"
        )
    try:
        return get_filesystem_class(protocol)
    except ImportError as error:
        extra = "pip install 'peftlab[s3]'" if protocol in ("s3", "s3a") else "install the package for it"
        raise PeftlabError(f"{url}: {extra} ({reason(error)})") from None
