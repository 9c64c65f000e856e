"""Trackers of metrics: always ``metrics.jsonl``, and those that the recipe names."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from accelerate.tracking import GeneralTracker

from peftlab.errors import PeftlabError


class JsonlTracker(GeneralTracker):
    """Appends one JSON object per line to ``path``, a line for each call of ``log``.

    The file contains nothing that differs between two runs of one recipe (no clock), so that a resumed run's
    file equals an uninterrupted one's.
    """

    name = "jsonl"
    requires_logging_directory = False

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        """Open ``path`` and truncate it to ``keep_bytes`` bytes, its length at the checkpoint."""
        super().__init__()
        self._file = open(path, "ab")  # noqa: SIM115
        self._file.truncate(keep_bytes)

    @property
    def tracker(self) -> BinaryIO:
        """The file object."""
        return self._file

    def store_init_configuration(self, values: Mapping[str, object]) -> None:
        """Do nothing: the resolved recipe is stored beside the file."""

    def log(self, values: Mapping[str, object], step: int | None, **kwargs: object) -> None:
        """Append ``{"step": step, **values}``; a number that is not finite becomes null, as JSON has none."""
        self._file.write((json.dumps(_finite({"step": step, **values})) + "\n").encode())

    def flush(self) -> None:
        """Write buffered lines to the file; ``PeftlabError`` if that fails, as on a full disk."""
        try:
            self._file.flush()
        except OSError as error:
            raise PeftlabError(
                f"{self._file.name}: cannot be written ({error.strerror}); the newest checkpoint is complete"
            ) from None

    def position(self) -> int:
        """Flush to the disk and return the file's length in bytes."""
        self.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def finish(self) -> None:
        """Close the file; ``flush`` has already reported a full disk."""
        with suppress(OSError):
            self._file.close()


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_trackers(names: list[str]) -> None:
    """Raise ``PeftlabError`` for a tracker whose package is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise PeftlabError(f"train.trackers: {name} is not installed; pip install 'peftlab[{name}]'")


def flat(values: Mapping[str, object], prefix: str = "") -> dict[str, float]:
    """Return the numbers in nested ``values`` under slash-joined names, as the other trackers need them."""
    result: dict[str, float] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            result |= flat(value, f"{name}/")
        elif isinstance(value, (int, float)):
            result[name] = value
    return result
