"""Running a table's cells: each in a process of its own, as many at a time as there are GPUs.

A process of its own confines a cell's peak memory, its CUDA context and a crash. The processes are forked from a
server that has imported the libraries once and computed nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from peftlab.errors import PeftlabError
from peftlab.files import Json
from peftlab.locks import is_locked
from peftlab.outputs import remove
from peftlab.pipelines.directory import RUN, recipe_inputs
from peftlab.quiet import quiet_libraries
from peftlab.recipe.loading import load_recipe
from peftlab.recipe.schema import FinetuneRecipe, Recipe
from peftlab.recipe.table_cells import Cell
from peftlab.reporting.facts import flatten

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

    import torch

    Running = tuple[BaseProcess, Connection[str, str], Cell, str]  # a cell's process, its pipe, the cell, its slot

RESULTS = "results.json"
# What every cell imports; a package that is not installed is left out.
_PRELOADED = [
    "peftlab.pipelines.tables.quiet_server",
    "peftlab.pipelines.finetune",
    "peftlab.tasks.labelled.evaluation",
    "sklearn.metrics",
    "matplotlib.figure",
    "jinja2",
]


class Stopped(PeftlabError):
    """The table was asked to stop by a signal; the running cells have written their checkpoints."""

    def __init__(self, number: int, table: Path) -> None:
        super().__init__(
            f"stopped by {signal.Signals(number).name}; continue with `peftlab resume {shlex.quote(str(table))}`"
        )
        self.status = 128 + number


def missing_cells(cells: Sequence[Cell], *, overwrite: bool) -> list[Cell]:
    """Return the cells that have no result yet, in order; with ``overwrite``, those that must be run anew as well.

    A cell must be run anew when it was run by another recipe or starts from such a cell; its directory is removed.

    Raises:
        PeftlabError: without ``overwrite``, there are such cells; they are named with what differs. With it, one
            of them contains something that we did not write.
    """
    changed = {cell.directory: reason for cell in cells if (reason := _difference(cell))}
    if changed and not overwrite:
        lines = [f"{directory} was run by another recipe: {reason}" for directory, reason in changed.items()]
        more = f"\nand {len(lines) - 5} more cells" if len(lines) > 5 else ""
        advice = "pass --overwrite to run the changed cells anew, or choose another output_dir"
        raise PeftlabError("\n".join(lines[:5]) + f"{more}\n{advice}")
    anew = {*changed, *(cell.directory for cell in cells if Path(cell.recipe.init_from or "") in changed)}
    for cell in cells:
        if cell.directory in anew:
            remove(cell.directory, RUN.kind, recipe_inputs(cell.recipe))
    return [cell for cell in cells if not (cell.directory / RESULTS).exists()]


def _difference(cell: Cell) -> str:
    """Return the keys that differ from the recipe that a cell was run by; empty if none does or it was not run."""
    file = cell.directory / "recipe.yaml"
    if not file.exists():
        return ""
    try:
        before = load_recipe(file)
    except PeftlabError as error:
        return str(error).splitlines()[0]
    here, there = (dict(flatten(_settings(recipe))) for recipe in (cell.recipe, before))
    differ = [key for key in {**there, **here} if here.get(key) != there.get(key)]
    return ", ".join(f"{key} {there.get(key)}, now {here.get(key)}" for key in differ)


def _settings(recipe: Recipe) -> dict[str, Json]:
    """Return a recipe's values without its place on disk: a table may be moved."""
    values = recipe.model_dump(mode="json")
    values.pop("output_dir")
    if values.get("init_from"):
        values["init_from"] = Path(values["init_from"]).name
    return values


def let_end(cells: Sequence[Cell], seconds: float = 60.0) -> None:
    """Wait for cells of a table that was killed: they notice within a step, write a checkpoint and end."""
    until = time.monotonic() + seconds
    while any(is_locked(cell.directory) for cell in cells) and time.monotonic() < until:
        time.sleep(0.05)


def gpu_slots(device: torch.device) -> list[str]:
    """Return what CUDA_VISIBLE_DEVICES is for each cell that runs at the same time: a GPU each, else one cell."""
    import torch

    if device.type != "cuda":
        return [""]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    return named[: torch.cuda.device_count()]


def run_cells(
    cells: Sequence[Cell], table: Path, slots: Sequence[str], done: Callable[[Cell, str], None], device: str
) -> dict[Cell, str]:
    """Run ``cells``, one for each slot at a time, and return the reasons of those that failed.

    A cell with checkpoints continues from the newest. What a cell prints goes into ``NAME.log`` beside its directory.

    Args:
        table: the table's directory.
        slots: CUDA_VISIBLE_DEVICES for each cell that runs at the same time.
        done: called with each cell and the reason why it failed, or an empty text.
        device: where each runs, as ``run_finetune`` takes it.

    Raises:
        Stopped: SIGINT or SIGTERM came; it was passed on to the cells and they have ended.
    """
    context = _context()
    waiting, free = list(cells), list(slots)
    running: dict[int, Running] = {}
    failed: dict[Cell, str] = {}
    with _passing_on(running) as received:
        while running or (waiting and not received):
            while free and not received and (cell := _startable(waiting, running)):
                waiting.remove(cell)
                slot = free.pop(0)
                listening, answering = context.Pipe(duplex=False)
                process: BaseProcess = context.Process(target=_work, args=(cell.recipe, slot, device, answering))
                process.start()
                answering.close()
                running[process.sentinel] = (process, listening, cell, slot)
            for sentinel in wait(list(running)):
                process, listening, cell, slot = running.pop(sentinel)  # type: ignore[arg-type]
                process.join()
                free.append(slot)
                reason = _reason(process.exitcode, listening, cell)
                if reason and not received:
                    failed[cell] = reason
                if not (reason and received):
                    done(cell, reason)
    if received:
        raise Stopped(received[0], table)
    return failed


def _context() -> ForkServerContext | SpawnContext:
    """Processes forked from a server without threads where that is safe, else started from nothing."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _startable(waiting: list[Cell], running: dict[int, Running]) -> Cell | None:
    """Return the first waiting cell that does not start from an unfinished one."""
    to_come = {cell.directory for cell in (*waiting, *(entry[2] for entry in running.values()))}
    return next((cell for cell in waiting if Path(cell.recipe.init_from or "") not in to_come), None)


@contextmanager
def _passing_on(running: dict[int, Running]) -> Iterator[list[int]]:
    """Pass SIGINT and SIGTERM on to the running processes; yield the list of those that came."""
    received: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        received.append(number)
        for process, *_ in list(running.values()):
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)

    own = threading.current_thread() is threading.main_thread()  # no other thread may set handlers
    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM) if own}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _reason(exitcode: int | None, listening: Connection[str, str], cell: Cell) -> str:
    """Return why a process ended without a result; empty if it has one."""
    try:
        return listening.recv()
    except EOFError:
        how = signal.Signals(-exitcode).name if exitcode is not None and exitcode < 0 else f"exit status {exitcode}"
        return f"its process ended by {how}; see {log_file(cell.recipe)}"
    finally:
        listening.close()


def log_file(recipe: FinetuneRecipe) -> Path:
    """Return where a cell's output goes."""
    directory = Path(recipe.output_dir)
    return directory.with_name(f"{directory.name}.log")


def _work(recipe: FinetuneRecipe, slot: str, device: str, answering: Connection[str, str]) -> None:
    """A cell's process: run or resume the recipe and send the reason of a failure, or an empty text."""
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
    from peftlab.pipelines.finetune import run_finetune

    checkpoints = Path(recipe.output_dir) / "checkpoints"
    resume = any(checkpoints.glob("step-*.pt"))
    try:
        run_finetune(recipe, overwrite=not resume, resume=resume, device=device)
        # The results are written; the optimiser states of many full finetunings would fill a disk.
        shutil.rmtree(checkpoints, ignore_errors=True)
    except PeftlabError as error:
        print(f"error: {error}", file=sys.stderr)
        answering.send(str(error))
    except Exception as error:
        traceback.print_exc()
        answering.send(f"{type(error).__name__}: {error}; see {log}")
    else:
        answering.send("")
    sys.stdout.flush()


def _end_with_parent() -> None:
    """Ask this process to stop, as a signal would, when the one that started it is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
