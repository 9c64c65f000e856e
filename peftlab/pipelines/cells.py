"""Runs a table's cells in processes of this machine: one for each GPU at a time, or as many as its CPU cores hold.

A process of its own confines a cell's peak memory, its CUDA context and a crash. The processes are forked from a server
that has imported the libraries once and computed nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from peftlab.environment import cores, resolve_device
from peftlab.errors import PeftlabError, quiet_libraries
from peftlab.pipelines.table import LOCAL, POLL, Engine, has_checkpoint
from peftlab.recipe.load import Cell
from peftlab.recipe.schema import DraftRecipe, FinetuneRecipe

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

    import torch

# The server of the processes imports this module first, so that what it imports next prints no warnings.
quiet_libraries()

_ALL = [__name__, "matplotlib.figure", "jinja2"]
# kind of recipe -> what such cells import; a package that is not installed is left out.
PRELOADED = {
    "finetune": [*_ALL, "peftlab.pipelines.finetune", "peftlab.tasks.labelled", "sklearn.metrics"],
    "draft": [*_ALL, "peftlab.pipelines.draft"],
}


class LocalEngine:
    """Runs one cell for each slot at a time.

    Args:
        slots: CUDA_VISIBLE_DEVICES of each.
        device: where the cells run, as ``run_recipe`` takes it.
        threads: that PyTorch computes with in each; None: as many as it chooses.
    """

    on = LOCAL

    def __init__(self, slots: Sequence[str], device: str, threads: int | None) -> None:
        self.size = f"{len(slots)} at a time"
        self._free_slots, self._device, self._threads = list(slots), device, threads
        self._running: dict[int, tuple[CellProcess, str]] = {}

    def running(self) -> list[Cell]:
        return [process.cell for process, _ in self._running.values()]

    def free(self) -> bool:
        return bool(self._free_slots)

    def start(self, cell: Cell) -> None:
        slot = self._free_slots.pop(0)
        process = CellProcess(cell, slot, self._device, self._threads)
        self._running[process.ended] = (process, slot)

    def ended(self) -> list[tuple[Cell, str]]:
        found = []
        for ready in wait(list(self._running), POLL):
            process, slot = self._running.pop(ready)  # type: ignore[arg-type]
            self._free_slots.append(slot)
            found.append((process.cell, process.reason()))
        return found

    def stop(self, number: int) -> None:
        for process, _ in self._running.values():
            process.stop(number)


@contextmanager
def local_engine(on: str, device: str, cpus: int | None) -> Iterator[Engine]:
    """Yield an engine of this machine's processes; arguments and errors as in ``open_engine``.

    Args:
        on: what ``--on`` named.
        device: where models run.
        cpus: CPU cores of each cell; None: one cell runs at a time.
    """
    if cpus is not None and cpus > cores():
        raise PeftlabError(f"--cpus {cpus}: this machine has {cores()} CPU cores")
    yield LocalEngine(_slots(resolve_device(device), cpus), device, cpus)


def _slots(device: torch.device, cpus: int | None) -> list[str]:
    """Return CUDA_VISIBLE_DEVICES for each cell that runs at the same time: a GPU each, or none."""
    import torch

    if device.type != "cuda":
        return [""] * (cores() // cpus if cpus and device.type == "cpu" else 1)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    return named[: torch.cuda.device_count()]


class CellProcess:
    """Starts a cell's process and watches it; the cell's output goes into ``NAME.log`` beside its directory.

    A cell with checkpoints continues from the newest.

    Args:
        slot: its CUDA_VISIBLE_DEVICES.
        device: where it runs, as ``run_recipe`` takes it.
        threads: that PyTorch computes with; None: as many as it chooses.

    Attributes:
        ended: becomes ready, for ``multiprocessing.connection.wait``, when the process has ended.
    """

    def __init__(self, cell: Cell, slot: str, device: str, threads: int | None) -> None:
        context = _context(cell.recipe.kind)
        self.cell = cell
        self._listening, answering = context.Pipe(duplex=False)
        work = (cell.recipe, slot, device, threads, answering)
        self._process: BaseProcess = context.Process(target=_run_cell, args=work)
        with _without_main_module():
            self._process.start()
        answering.close()
        self.ended = self._process.sentinel

    def stop(self, number: int) -> None:
        """Send the process a signal, after which it writes a checkpoint and ends."""
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def reason(self) -> str:
        """Wait for the process to end and return why the cell has no result; an empty text if it has one."""
        self._process.join()
        code = self._process.exitcode
        try:
            return self._listening.recv()
        except EOFError:
            how = signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"
            return f"its process ended by {how}; see {log_file(self.cell.recipe)}"
        finally:
            self._listening.close()


def _context(kind: str) -> ForkServerContext | SpawnContext:
    """Return a context whose processes are forked from a server without threads, or spawned where that is unsafe.

    Args:
        kind: of the cells' recipes, whose imports the server has if it is started for them.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED[kind])
    return context


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Let a process that is started in the block not execute this one's program again: a cell needs nothing of it."""
    program = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program


def log_file(recipe: FinetuneRecipe | DraftRecipe) -> Path:
    """Return where a cell's output goes."""
    directory = Path(recipe.output_dir)
    return directory.with_name(f"{directory.name}.log")


def _run_cell(
    recipe: FinetuneRecipe | DraftRecipe,
    slot: str,
    device: str,
    threads: int | None,
    answering: Connection[str, str],
) -> None:
    """Run or resume the recipe, in the cell's process, and send the reason of a failure or an empty text."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # the terminal's Ctrl-C is for the table, which passes it on
    _end_with_parent()
    os.environ["CUDA_VISIBLE_DEVICES"] = slot
    log = log_file(recipe)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    quiet_libraries()
    import torch

    from peftlab.pipelines.recipes import run_recipe

    if threads is not None:
        torch.set_num_threads(threads)
    directory = Path(recipe.output_dir)
    resume = has_checkpoint(directory)
    reason = ""
    try:
        run_recipe(recipe, overwrite=not resume, resume=resume, device=device)
        # The results are written; the optimiser states of many full finetunings would fill a disk.
        shutil.rmtree(directory / "checkpoints", ignore_errors=True)
    except PeftlabError as error:
        print(f"error: {error}", file=sys.stderr)
        reason = str(error)
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}; see {log}"
    sys.stdout.flush()
    with suppress(BrokenPipeError):  # who started it is gone
        answering.send(reason[:10_000])  # a pipe takes 64 KiB before it is read; the log has all


def _end_with_parent() -> None:
    """Ask this process to stop, as a signal would, when the one that started it is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
