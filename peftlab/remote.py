"""Runs at a URL, such as s3://bucket/run: stored by fsspec's file systems, worked on in a directory of this machine.

A run uploads what it has completed. Whenever it is stopped, what is at the URL can be continued: a checkpoint is
uploaded after the metrics that belong to it, a directory inside (``adapter/``, ``merged/``) before its mark, which says
that it is complete; what is no longer needed is removed last. What marks do not list is neither read nor removed.

Keys come from the environment and the files that each file system reads by itself; a URL that contains them is refused.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar

from peftlab.errors import PeftlabError, did_you_mean, reason
from peftlab.files import (
    LOCK,
    MARK,
    STAGING_PREFIX,
    URL,
    Mark,
    locked,
    main_process,
    parse_json,
    parse_mark,
    read_object,
    replacing,
    write_json,
)
from peftlab.untyped import Function

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")
Stamp = tuple[int, int]
"""Size and time of change of a file on this machine."""

_KEYS = re.compile(r"[^/@]*:[^/@]*@")  # NAME:PASSWORD@ at the start of what follows the protocol
_LOCAL = ("file", "local")
_READ_ONLY = ("http", "https", "data", "github", "gist")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "azure", "abfss": "azure", "az": "azure"}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PAUSES = (1.0, 5.0)  # seconds before a failed request is made again
_RECORD = "downloaded.json"
_CHECKPOINTS, _RESULTS = "checkpoints/", "results.json"


def check_url(url: str) -> None:
    """Check that runs can be stored below ``url``, without asking it.

    Raises:
        PeftlabError: an unknown or read-only protocol, keys in the URL, or the protocol's package is not installed.
    """
    _file_system_class(url)


def _file_system_class(url: str) -> Function[AbstractFileSystem]:
    from fsspec import available_protocols, get_filesystem_class, registry

    found = URL.fullmatch(url)
    if found is None or "://" not in url or not found[2]:
        raise PeftlabError(f"{url}: not a URL; write PROTOCOL://BUCKET/PATH")
    protocol, rest = found[1], found[2]
    if protocol in _LOCAL:
        raise PeftlabError(f"{url}: a directory of this machine; write its path, without {protocol}://")
    # An Azure URL names its container before an @: abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH.
    if _KEYS.match(rest):
        raise PeftlabError(f"{protocol}://...: contains a password, which recipes keep; leave it to the environment")
    known = sorted({*available_protocols(), *registry} - {*_LOCAL, *_READ_ONLY})
    if protocol not in known:
        why = "runs cannot be stored there" if protocol in _READ_ONLY else "unknown protocol"
        raise PeftlabError(
            f"{url}: {protocol}: {why}{did_you_mean(protocol, known)}; s3, gs and abfs are among those known"
        )
    try:
        return get_filesystem_class(protocol)
    except ImportError as error:
        extra = f"pip install 'peftlab[{_EXTRAS[protocol]}]'" if protocol in _EXTRAS else "install the package for it"
        raise PeftlabError(f"{url}: {extra} ({reason(error)})") from None


def local_place(url: str, purpose: str) -> Path:
    """Return the working directory of a URL on this machine: ``PEFTLAB_CACHE/PURPOSE/DIGEST/NAME``.

    ``PEFTLAB_CACHE`` is by default ``peftlab`` in ``XDG_CACHE_HOME``, else in ``~/.cache``; NAME ends the URL.

    Args:
        url: of a run.
        purpose: "runs" is where runs work, "references" what is read of others.
    """
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache = os.environ.get("PEFTLAB_CACHE") or os.path.join(user, "peftlab")
    url = url.rstrip("/")
    return Path(cache, purpose, hashlib.sha256(url.encode()).hexdigest()[:16], url.rpartition("/")[2])


class _Absent(PeftlabError):
    """There is no such file, bucket or directory."""


class RemoteDirectory:
    """A directory at a URL; names of its files are relative to it.

    Every method raises ``PeftlabError`` for what the file system or its transport refuses, after trying again. Making
    one raises it as ``check_url`` does.
    """

    def __init__(self, url: str) -> None:
        system = _file_system_class(url)
        self.url = url.rstrip("/")
        # What other machines write must be seen: no listing is remembered.
        self._system = self._ask("be opened", lambda: system(use_listings_cache=False, skip_instance_cache=True))
        self._root = self._system._strip_protocol(url).rstrip("/")

    def versions(self) -> dict[str, str]:
        """Return the files by name, each with a text that changes with its content; empty if there is none."""
        try:
            found = self._ask("be listed", lambda: self._system.find(self._root, detail=True))
        except _Absent:
            return {}
        versions: dict[str, str] = {}
        for path, info in found.items():
            name = path.removeprefix(self._root).lstrip("/")
            if info["type"] == "file" and name:
                versions[name] = hashlib.sha256(repr(sorted(info.items(), key=str)).encode()).hexdigest()[:16]
        return versions

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if there is none."""
        try:
            return self._ask("be read", lambda: self._system.cat_file(f"{self._root}/{name}"), name)
        except _Absent:
            return None

    def read_mark(self, name: str) -> Mark | None:
        """Return the mark that a file is; None if it is none, or there is none."""
        content = self.read(name)
        try:
            return None if content is None else parse_mark(parse_json(content.decode("utf-8")))
        except ValueError:
            return None

    def download(self, name: str, file: Path) -> None:
        """Write the content of the file ``name`` to ``file`` of this machine, whole or not at all."""
        with replacing(file) as temporary:
            self._ask("be read", lambda: self._system.get_file(f"{self._root}/{name}", str(temporary)), name)

    def upload(self, file: Path, name: str) -> None:
        """Write ``file`` as ``name``; object stores replace the one of that name when all of it has arrived."""
        self._ask("be written", lambda: self._system.put_file(str(file), f"{self._root}/{name}"), name)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with suppress(_Absent):
            self._ask("be removed", lambda: self._system.rm_file(f"{self._root}/{name}"), name)

    def listed_files(self, names: Collection[str]) -> list[str]:
        """Return those of ``names`` that the nearest mark above lists: files that peftlab wrote and completed."""
        marks = {PurePosixPath(name).parent: self.read_mark(name) for name in names if PurePosixPath(name).name == MARK}

        def ours(path: PurePosixPath) -> bool:
            for above in path.parents:
                if mark := marks.get(above):
                    return mark.lists(path.relative_to(above).as_posix())
            return False

        return [name for name in names if ours(PurePosixPath(name))]

    def _ask(self, what: str, request: Callable[[], T], name: str = "") -> T:
        """Return the answer to a request, made again after each pause while it fails.

        Args:
            what: what is asked for, as in "cannot be read".
            request: the call that asks.
            name: the file that is asked for; default: the directory.
        """
        where = f"{self.url}/{name}" if name else self.url
        for pause in (*_PAUSES, None):
            try:
                return request()
            except FileNotFoundError as error:
                raise _Absent(f"{where}: cannot {what} ({reason(error)})") from None
            except Exception as error:  # the transports' own types, too
                if what == "be read" and isinstance(error, OSError) and error.errno in _FULL:
                    raise  # the disk of this machine, whose file ``replacing`` names
                if pause is None or isinstance(error, PermissionError):
                    raise PeftlabError(f"{where}: cannot {what} ({reason(error)})") from None
                time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")


class Mirror:
    """A directory of this machine and its copy at a URL; made by ``mirrored``."""

    def __init__(self, remote: RemoteDirectory, directory: Path, replaced: Collection[str]) -> None:
        """Make the copy of ``directory`` at ``remote``; the files ``replaced`` there are removed before it begins."""
        self._remote, self._directory, self._replaced = remote, directory, replaced
        self._stored: dict[str, Stamp | None] = {}  # at the URL: the file here that was uploaded; None: unknown
        self._began = False
        self._failure = ""

    def continue_with(self, names: Collection[str], downloaded: bool) -> None:
        """Continue from what is at the URL.

        Args:
            names: the files that are there.
            downloaded: whether the files of this machine are the same.
        """
        here = _files(self._directory)
        self._stored = {name: here.get(name) if downloaded else None for name in names}

    def push(self) -> None:
        """Upload what has changed since, and remove what is no longer here.

        Raises:
            PeftlabError: the first upload failed. A later failure is printed, and the next call tries again.
        """
        try:
            self._push()
        except PeftlabError as error:
            if not self._began:
                raise
            self._failure = str(error)
            print(f"not uploaded, to be tried again: {error}; {self._directory} is complete", file=sys.stderr)
        else:
            self._began, self._failure = True, ""

    def end(self) -> None:
        """Upload what is left once the run has begun, and say where everything is.

        Raises:
            PeftlabError: it could not be uploaded.
        """
        if not self._began:
            return
        self.push()
        url = self._remote.url
        if self._failure:
            raise PeftlabError(
                f"{self._failure}\nall files are in {self._directory}; `peftlab resume {url}` here uploads them"
            )
        print(f"uploaded: {url}")

    def _push(self) -> None:
        here = _files(self._directory)
        self._remove(self._replaced)
        self._replaced = ()
        marks = {name for name in here.keys() & self._stored if name.endswith(f"/{MARK}")}
        if changed := {name for name in marks if self._stored[name] != here[name]}:
            self._remove(changed | {_RESULTS} & self._stored.keys())  # what they say is untrue until all is there
        for name in sorted(here, key=_order):
            if self._stored.get(name) != here[name]:
                self._remote.upload(self._directory / name, name)
                self._stored[name] = here[name]
        self._remove(self._stored.keys() - here.keys())

    def _remove(self, names: Collection[str]) -> None:
        """Remove files in the opposite of the order in which they are uploaded."""
        for name in sorted(names, key=_order, reverse=True):
            self._remote.remove(name)
            self._stored.pop(name, None)


def _order(name: str) -> tuple[int, str]:
    """Return a key by which files are uploaded so that what is there can always be continued."""
    if name == MARK:
        return 0, name
    if name == _RESULTS:  # says that the run has ended
        return 4, name
    if name.startswith(_CHECKPOINTS):
        return 2, name
    return (3 if name.endswith(f"/{MARK}") else 1), name


def _files(directory: Path) -> dict[str, Stamp]:
    """Return the complete files below a directory by name, with size and time of change."""
    found = {}
    for place, directories, names in os.walk(directory):
        directories[:] = [name for name in directories if not name.startswith(STAGING_PREFIX)]
        for name in names:
            if not name.startswith(STAGING_PREFIX):
                path = Path(place, name)
                found[path.relative_to(directory).as_posix()] = _stamp(path)
    return found


def _stamp(path: Path) -> Stamp:
    state = path.stat()
    return state.st_size, state.st_mtime_ns


@contextmanager
def mirrored(
    url: str, mark: Mark, *, overwrite: bool, resume: bool, advice: str
) -> Iterator[tuple[Mirror | None, Path]]:
    """Lock this machine's directory of the run at ``url`` for the block, and yield its copy and the directory.

    To resume, it is filled from the URL, unless it has all that is there and perhaps what could not be uploaded.
    After the block what is left is uploaded. Of several processes, only the main one does anything; for the others the
    copy is None.

    Args:
        url: where the run is stored.
        mark: of the run.
        overwrite, advice: as in ``files.refuse_loss``.
        resume: the run that is there is continued.

    Raises:
        PeftlabError: the URL cannot be used; without ``overwrite`` or ``resume`` it has files; with ``resume`` no run.
    """
    place = local_place(url, "runs")
    if not main_process():
        yield None, place
        return
    world = os.environ.get("WORLD_SIZE", "1")
    if os.environ.get("LOCAL_WORLD_SIZE", world) != world and not os.environ.get("PEFTLAB_CACHE"):
        raise PeftlabError(
            f"{url}: the machines of one run read its checkpoints from one directory; set PEFTLAB_CACHE to one that "
            "all of them share"
        )
    remote = RemoteDirectory(url)
    with locked(place.parent / LOCK, url):
        names = remote.versions()
        ours = remote.listed_files(names)
        _refuse_loss_at(remote, mark, names, overwrite=overwrite, resume=resume, advice=advice)
        mirror = Mirror(remote, place, () if resume else ours)
        if resume:
            complete = _has_newest_checkpoint(remote, names, place)
            if not complete:
                _download_all(remote, ours, place)
            mirror.continue_with(ours, downloaded=not complete)
        elif place.exists():  # of a run that is no longer at the URL, or is about to be replaced
            shutil.rmtree(place)
        try:
            yield mirror, place
        except Exception:
            try:
                mirror.end()
            except PeftlabError as error:  # the error that ended the run is the one to raise
                print(error, file=sys.stderr)
            raise
        mirror.end()


def _refuse_loss_at(
    remote: RemoteDirectory, mark: Mark, names: Collection[str], *, overwrite: bool, resume: bool, advice: str
) -> None:
    """Refuse a URL that has something else than a run, or a run that must neither be continued nor replaced."""
    there = remote.read_mark(MARK) if MARK in names else None
    if there is not None and there.kind != mark.kind:
        raise PeftlabError(f"{remote.url}: a {there.kind}, not a {mark.kind}")
    if resume and there is None:
        raise PeftlabError(
            f"{remote.url}: not a {mark.kind} that peftlab wrote (it has no {MARK}); there is nothing to resume"
        )
    if not resume and names and there is None:
        raise PeftlabError(
            f"{remote.url} exists already and was not written by peftlab (it has no {MARK}); choose another URL"
        )
    if not resume and there is not None and not overwrite:
        raise PeftlabError(f"{remote.url} exists already; {advice}")


def _has_newest_checkpoint(remote: RemoteDirectory, names: Collection[str], directory: Path) -> bool:
    """Return whether a directory has the newest checkpoint of the run whose files ``names`` are, or a newer one."""
    recipe = directory / "recipe.yaml"
    if not recipe.is_file() or recipe.read_bytes() != remote.read("recipe.yaml"):
        return False
    here, there = (
        max((n for n in found if n.startswith(f"{_CHECKPOINTS}step-") and n.endswith(".pt")), default="")
        for found in (_files(directory), names)
    )
    return here >= there


def _download_all(remote: RemoteDirectory, names: Collection[str], directory: Path) -> None:
    """Make a directory contain the files ``names`` of a URL and nothing else; those downloaded before are kept.

    The newest checkpoint is last: where it is, the other files are.
    """
    record = directory.parent / _RECORD
    versions = remote.versions()
    before = read_object(record) if record.exists() else {}
    here = _files(directory)
    for name in here.keys() - set(names):
        (directory / name).unlink()
    kept: dict[str, list[object]] = {}
    for name in sorted(names, key=lambda name: (name.startswith(_CHECKPOINTS), _order(name))):
        path = directory / name
        if name not in here or before.get(name) != [versions.get(name), *here[name]]:
            remote.download(name, path)
        kept[name] = [versions.get(name), *_stamp(path)]
    write_json(record, kept)


def download_run(url: str) -> Path:
    """Return the directory of this machine that has the run at ``url``, without its checkpoints, as it is there now.

    Raises:
        PeftlabError: there is no run at the URL.
    """
    remote = RemoteDirectory(url)
    place = local_place(remote.url, "references")
    with locked(place.parent / LOCK, remote.url, wait=60.0):
        names = [name for name in remote.listed_files(remote.versions()) if not name.startswith(_CHECKPOINTS)]
        if MARK not in names:
            raise PeftlabError(f"{remote.url}: not a run that peftlab wrote (it has no {MARK})")
        _download_all(remote, names, place)
    return place
