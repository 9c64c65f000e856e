"""The copy of a run's directory at a URL: a run works in a directory of this machine and uploads what it has completed.

Whenever it is stopped, what is at the URL can be continued: a checkpoint is uploaded after the metrics that belong to
it, a directory inside (``adapter/``, ``merged/``) before its mark, which says that it is complete; what is no longer
needed is removed last. What marks do not list is neither read nor removed.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from peftlab.errors import PeftlabError
from peftlab.files import (
    LOCK,
    MARK,
    STAGING_PREFIX,
    Mark,
    locked,
    main_process,
    parse_json,
    parse_mark,
    read_object,
    write_json,
)
from peftlab.references import is_url
from peftlab.remote.remote_directory import RemoteDirectory, local_place

_RECORD = "downloaded.json"
_CHECKPOINTS, _RESULTS = "checkpoints/", "results.json"
Stamp = tuple[int, int]
"""Size and time of change of a file on this machine."""


class Mirror:
    """A directory of this machine and its copy at a URL; made by ``mirrored``."""

    def __init__(self, remote: RemoteDirectory, directory: Path, replaced: Collection[str]) -> None:
        """Args: replaced: files at the URL that are removed before the first upload."""
        self._remote, self._directory, self._replaced = remote, directory, replaced
        self._stored: dict[str, Stamp | None] = {}  # at the URL: the file here that was uploaded; None: unknown
        self._began = False
        self._failure = ""

    def continue_with(self, names: Collection[str], downloaded: bool) -> None:
        """Go on from files that are at the URL; ``downloaded``: the ones here are the same."""
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
    """Return the complete files below a directory by name."""
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
        mark: of the run. overwrite, advice: as in ``outputs.refuse_loss``.

    Raises:
        PeftlabError: the URL cannot be used; without ``overwrite`` or ``resume`` it has files; with ``resume`` no run.
    """
    place = local_place(url, "runs")
    if not main_process():
        yield None, place
        return
    _check_machines(url)
    remote = RemoteDirectory.at(url)
    with locked(place.parent / LOCK, url):
        names = remote.versions()
        ours = _listed(remote, names)
        _check(remote, mark, names, overwrite=overwrite, resume=resume, advice=advice)
        mirror = Mirror(remote, place, () if resume else ours)
        if resume:
            complete = _as_far(remote, names, place)
            if not complete:
                download(remote, ours, place)
            mirror.continue_with(ours, downloaded=not complete)
        elif place.exists():  # of a run that is no longer at the URL, or is about to be replaced
            shutil.rmtree(place)
        try:
            yield mirror, place
        except Exception:
            _end_after_error(mirror)
            raise
        mirror.end()


def _end_after_error(mirror: Mirror) -> None:
    try:
        mirror.end()
    except PeftlabError as error:  # the error that ended the run is the one to raise
        print(error, file=sys.stderr)


def _check_machines(url: str) -> None:
    world = os.environ.get("WORLD_SIZE", "1")
    if os.environ.get("LOCAL_WORLD_SIZE", world) != world and not os.environ.get("PEFTLAB_CACHE"):
        raise PeftlabError(
            f"{url}: the machines of one run read its checkpoints from one directory; set PEFTLAB_CACHE to one that "
            "all of them share"
        )


def _check(
    remote: RemoteDirectory, mark: Mark, names: Collection[str], *, overwrite: bool, resume: bool, advice: str
) -> None:
    """Refuse a URL that has something else than a run, or a run that must neither be continued nor replaced."""
    there = _read_mark(remote, MARK) if MARK in names else None
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


def _read_mark(remote: RemoteDirectory, name: str) -> Mark | None:
    return parse_mark(_parsed(remote.read(name)))


def _parsed(content: bytes | None) -> object:
    try:
        return None if content is None else parse_json(content.decode("utf-8"))
    except ValueError:
        return None


def _listed(remote: RemoteDirectory, names: Collection[str]) -> list[str]:
    """Return the files that the nearest mark above each lists: those that peftlab wrote and completed."""
    marks = {PurePosixPath(name).parent: _read_mark(remote, name) for name in names if PurePosixPath(name).name == MARK}

    def ours(name: str) -> bool:
        above = next((place for place in PurePosixPath(name).parents if marks.get(place) is not None), None)
        found = None if above is None else marks[above]
        if above is None or found is None:
            return False
        return found.lists(PurePosixPath(name).relative_to(above).as_posix())

    return [name for name in names if ours(name)]


def _as_far(remote: RemoteDirectory, names: Collection[str], directory: Path) -> bool:
    """Return whether a directory has the newest checkpoint of the run whose files ``names`` are, or a newer one."""
    recipe = directory / "recipe.yaml"
    if not recipe.is_file() or recipe.read_bytes() != remote.read("recipe.yaml"):
        return False
    here, there = (
        max((n for n in found if n.startswith(f"{_CHECKPOINTS}step-") and n.endswith(".pt")), default="")
        for found in (_files(directory), names)
    )
    return here >= there


def download(remote: RemoteDirectory, names: Collection[str], directory: Path) -> None:
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
    for name in sorted(names, key=_order):
        path = directory / name
        if name not in here or before.get(name) != [versions.get(name), *here[name]]:
            remote.download(name, path)
        kept[name] = [versions.get(name), *_stamp(path)]
    write_json(record, kept)


def local_copy(reference: str | Path) -> str:
    """Return the directory of this machine that a run's URL stands for, downloaded; any other reference unchanged.

    Checkpoints are not downloaded.

    Raises:
        PeftlabError: there is no run at the URL.
    """
    if not is_url(reference):
        return str(reference)
    remote = RemoteDirectory.at(str(reference))
    place = local_place(remote.url, "references")
    with locked(place.parent / LOCK, remote.url, wait=60.0):
        names = [name for name in _listed(remote, remote.versions()) if not name.startswith(_CHECKPOINTS)]
        if MARK not in names:
            raise PeftlabError(f"{remote.url}: not a run that peftlab wrote (it has no {MARK})")
        download(remote, names, place)
    return str(place)
