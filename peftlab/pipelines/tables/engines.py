"""Where the cells of a table run: a table of engines, and what the scheduler asks of each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.recipe.table_cells import Cell
from peftlab.registry import resolve

POLL = 0.2
"""Seconds after which a wait for cells ends, to look for signals."""

LOCAL = "local"
# name -> the function that opens it, as ``open_engine`` does
ENGINES = {
    LOCAL: "peftlab.pipelines.tables.local_engine:local_engine",
    "ray": "peftlab.pipelines.tables.ray_engine:ray_engine",
}


class Engine(Protocol):
    """Runs cells, each in a process of its own, somewhere.

    Attributes:
        on: what ``--on`` named.
        size: how many cells run at the same time, for people.
    """

    on: str
    size: str

    def running(self) -> Sequence[Cell]:
        """Return the cells that were started and have not ended."""

    def free(self) -> bool:
        """Return whether another cell may be started."""

    def start(self, cell: Cell) -> None:
        """Start a cell, or let it wait for a place of its own."""

    def ended(self) -> list[tuple[Cell, str]]:
        """Wait for running cells, for ``POLL`` seconds at most; return those that ended and why each failed, or ''."""

    def stop(self, number: int) -> None:
        """Pass a signal on to the running cells, which write checkpoints and end; one that waits does not start."""


def check_engine(on: str) -> str:
    """Return the name of the engine that ``--on`` means.

    Raises:
        PeftlabError: there is none.
    """
    name, address, host = on.partition("://")
    if name not in ENGINES or (address and (name == LOCAL or not host)):
        raise PeftlabError(
            f"--on {on}: one of local, ray (the cluster of RAY_ADDRESS or of this machine) and ray://HOST:PORT"
            f"{did_you_mean(name, ENGINES)}"
        )
    return name


def open_engine(on: str, device: str, cpus: int | None) -> AbstractContextManager[Engine]:
    """Return the engine that ``--on`` names, open for the block.

    Args:
        on: ``local``: processes of this machine; ``ray`` or ``ray://HOST:PORT``: the nodes of a Ray cluster.
        device: where models run, as ``hardware.resolve_device`` takes it.
        cpus: CPU cores of each cell, and the threads that PyTorch computes with. None: one on Ray; on this machine the
            cells of a CPU run one at a time, with as many threads as PyTorch chooses.

    Raises:
        PeftlabError: no such engine or device, or the engine cannot be reached.
    """
    if cpus is not None and cpus < 1:
        raise PeftlabError(f"--cpus {cpus}: a cell needs at least one CPU core")
    opened: AbstractContextManager[Engine] = resolve(ENGINES[check_engine(on)])(on, device, cpus)
    return opened
