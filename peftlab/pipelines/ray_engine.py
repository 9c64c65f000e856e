"""Cells as tasks of a Ray cluster, whose nodes share the table's directory.

A task runs its cell as this machine would, in a process of its own, so that a Ray worker imports nothing of ours but
the server that it forks its cells from. Ray starts a task again whose worker or node died; the cell then continues from
its newest checkpoint.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from peftlab.environment import check_device_name
from peftlab.errors import PeftlabError
from peftlab.files import MARK, is_locked, remove_lost_lock
from peftlab.pipelines.cells import LocalEngine
from peftlab.pipelines.table import POLL, Engine, Stopped, is_complete, run_cells, wait_for_cells
from peftlab.recipe.load import Cell

if TYPE_CHECKING:
    from ray import ObjectRef

RETRIES = 8  # nodes or workers that a cell may lose before it counts as failed
_CONNECT = 5.0  # seconds


@dataclass(frozen=True)
class Task:
    """What a Ray worker is told of a cell.

    Attributes:
        cwd: the directory that relative paths in the recipe are relative to.
        argv: the command that runs the table.
        table: the table's directory.
        device, threads: as in ``LocalEngine``.
    """

    cell: Cell
    cwd: str
    argv: list[str]
    table: str
    device: str
    threads: int


class RayEngine:
    """Submits cells to the cluster that this process is connected to; they wait there for a node.

    Args:
        on: what ``--on`` named. device: as in ``open_engine``. cpus: CPU cores and threads of each cell.
    """

    def __init__(self, on: str, device: str, cpus: int) -> None:
        import ray

        resources = ray.cluster_resources()
        gpus = 1 if device == "cuda" or (device == "auto" and resources.get("GPU")) else 0
        self.on, self._device, self._cpus = on, device, cpus
        # A GPU's memory is free when the cell's process ends: the worker need not end with it (max_calls=0).
        needs = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=RETRIES, max_calls=0)
        self._submit = needs(run_task)
        self._running: dict[ObjectRef[str], Cell] = {}
        self.size = f"{_places(cpus, gpus)} at a time on Ray"

    def running(self) -> list[Cell]:
        return list(self._running.values())

    def free(self) -> bool:
        return True

    def start(self, cell: Cell) -> None:
        table = str(cell.directory.parents[1])
        task = Task(cell, os.getcwd(), sys.argv, table, self._device, self._cpus)
        self._running[self._submit.options(name=cell.directory.name).remote(task)] = cell

    def ended(self) -> list[tuple[Cell, str]]:
        import ray

        ready, _ = ray.wait(list(self._running), timeout=POLL)
        return [(self._running.pop(reference), _answer(reference)) for reference in ready]

    def stop(self, number: int) -> None:
        import ray

        for reference in self._running:
            ray.cancel(reference)  # SIGINT in the worker, whichever signal came


@contextmanager
def ray_engine(on: str, device: str, cpus: int | None) -> Iterator[Engine]:
    """Yield an engine of a Ray cluster; arguments and errors as in ``open_engine``.

    ``ray`` is the cluster that RAY_ADDRESS names or that runs on this machine; where there is none, Ray starts one on
    this machine for the block. A connection that the caller has already is used and kept.
    """
    check_device_name(device)
    try:
        import ray
    except ImportError:
        raise PeftlabError(f"--on {on} needs Ray: pip install 'peftlab[ray]'") from None
    connected = ray.is_initialized()
    if not connected:
        _connect(on)
    try:
        yield RayEngine(on, device, cpus or 1)
    except ConnectionError as error:  # of ray://; what the cells had done is in their directories
        raise PeftlabError(f"--on {on}: the connection was lost ({error}); run the table again to continue") from None
    finally:
        if not connected:
            ray.shutdown()


def _connect(on: str) -> None:
    """Connect this process to the cluster."""
    import ray

    named = os.environ.get("RAY_ADDRESS", "") if on == "ray" else on
    host, separator, port = named.removeprefix("ray://").rpartition(":")
    try:
        if separator and port.isdigit():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=_CONNECT).close()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(None if on == "ray" else on, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, ImportError, ray.exceptions.RayError) as error:
        where = f" ({named}, from RAY_ADDRESS)" if on == "ray" and named else ""
        reason = str(error).strip().partition("\n")[0]
        raise PeftlabError(f"--on {on}{where}: no Ray cluster can be reached: {reason}") from None


def _places(cpus: int, gpus: int) -> int:
    """Return how many cells the nodes have room for; where for none, print what they wait for."""
    import ray

    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    places = sum(
        int(min(node.get("CPU", 0) // cpus, node.get("GPU", 0) // gpus if gpus else float("inf"))) for node in alive
    )
    if not places:
        needed = f"{cpus} CPUs" if cpus > 1 else "a CPU"
        print(f"no node of the cluster has {needed}{' and a GPU' if gpus else ''}: the cells wait until one joins")
    return places


def _answer(reference: ObjectRef[str]) -> str:
    """Return why a cell whose task has ended has no result; an empty text if it has one."""
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.TaskCancelledError:
        return "stopped before it started"
    except ray.exceptions.RayTaskError as error:
        return f"{type(error.cause).__name__}: {error.cause}"
    except ray.exceptions.RayError as error:
        return f"its Ray worker or node ended {RETRIES + 1} times: {str(error).strip().partition(chr(10))[0]}"


def run_task(task: Task) -> str:
    """In a Ray worker: run the cell and return why it has no result, or an empty text."""
    host = socket.gethostname()
    if not Path(task.cwd, task.table, MARK).exists():
        return f"node {host} does not see {Path(task.cwd, task.table)}: all nodes must share the table's directory"
    os.chdir(task.cwd)
    sys.argv = task.argv
    directory = task.cell.directory
    if is_complete(task.cell):
        return ""  # the worker died after the cell had ended
    wait_for_cells([task.cell])  # in the process of a worker that died
    import ray

    if is_locked(directory):  # by a process on a node that died: a file server may keep its lock
        alive = [node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]]
        remove_lost_lock(directory, [host, *alive])
    slot = os.environ.get("CUDA_VISIBLE_DEVICES", "") if ray.get_gpu_ids() else ""
    engine = LocalEngine([slot], task.device, task.threads)
    try:
        failed = run_cells([task.cell], Path(task.table), engine, lambda cell, reason: None)
    except Stopped as stopped:
        if stopped.status == 128 + signal.SIGTERM:
            os._exit(1)  # the node is going: to Ray the worker has crashed, and another one continues the cell
        return str(stopped)
    return failed.get(task.cell, "")
