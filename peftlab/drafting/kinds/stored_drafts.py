"""Drafts on disk, of any kind: what a configuration says, and which directory a reference or a run means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from peftlab.errors import PeftlabError
from peftlab.files import read_object


def says(directory: str | Path, key: str, value: str | Sequence[str]) -> bool:
    """Whether ``config.json`` in a directory has this value of ``key``."""
    file = Path(directory) / "config.json"
    return file.is_file() and read_object(file).get(key) == value


def found_in(reference: str, folder: str, known: Callable[[Path], bool]) -> str | None:
    """Return the directory of a draft that ``reference`` is, or that it has as a run in ``folder``; None: neither.

    Args:
        known: whether a directory contains such a draft.
    """
    return next((str(place) for place in (Path(reference) / folder, Path(reference)) if known(place)), None)


def check_start(start: str | None, find: Callable[[str], str | None], why: str) -> None:
    """Refuse a draft to continue from that ``find`` does not know; None is a new one. ``why``: for the message."""
    if start is not None and find(start) is None:
        raise PeftlabError(f"draft.from: {start} {why}")


def newest_in(run: Path, folder: str, known: Callable[[Path], bool]) -> str:
    """Return the directory of the draft that a run has written to ``folder``; ``PeftlabError`` if there is none."""
    if not known(run / folder):
        raise PeftlabError(f"{run}: contains no {folder}/ to continue from; did the run end?")
    return str(run / folder)
