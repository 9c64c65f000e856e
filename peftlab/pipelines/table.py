"""A table recipe from start to end: missing cells are run, results gathered, the table written and printed.

A cell is one run of the table, in a process of its own; engines say where these processes are.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import LOCK, Json, claimed, is_locked, locked, read_mark, read_object, remove, write_text
from peftlab.pipelines.directory import RUN, TABLE, changed_keys, recipe_inputs
from peftlab.recipe.load import DRAFT, Cell, dump_recipe, load_recipe, table_cells
from peftlab.recipe.schema import AnyTable, Recipe, TableRecipe
from peftlab.registry import resolve
from peftlab.reporting.facts import duration, flatten, required
from peftlab.reporting.table_scores import Controls, Table, shown, summarise
from peftlab.reporting.table_views import print_table, table_csv, table_latex, table_page
from peftlab.tasks.table import find_task

LOCAL = "local"
# name -> the function that opens the engine, as ``open_engine`` does
ENGINES = {LOCAL: "peftlab.pipelines.cells:local_engine", "ray": "peftlab.pipelines.ray_engine:ray_engine"}
POLL = 0.2
"""Seconds after which a wait for cells ends, to look for signals."""
RESULTS = "results.json"
_FOUND = ("data.endpoint_model", "data.text", "data.label", "train.packing")  # what a run finds where a recipe has null
_WRITING_SHARE = 0.05  # of the time that a table runs, for writing it meanwhile


@dataclass(frozen=True)
class TableResults:
    """The table of a finished run, and the number of cells that were to be run: all, or those of a part."""

    cells: int
    table: Table


class CellsFailed(PeftlabError):
    """Some cells of a table failed; the others are in it."""

    status = 1


class Stopped(PeftlabError):
    """The table was asked to stop by a signal; the running cells have written their checkpoints."""

    def __init__(self, number: int, table: Path, on: str) -> None:
        where = "" if on == LOCAL else f" --on {shlex.quote(on)}"
        command = f"peftlab resume {shlex.quote(str(table))}{where}"
        super().__init__(f"stopped by {signal.Signals(number).name}; continue with `{command}`")
        self.status = 128 + number


def run_table(
    recipe: AnyTable,
    *,
    overwrite: bool = False,
    resume: bool = False,
    device: str = "auto",
    on: str = LOCAL,
    cpus: int | None = None,
    shard: Shard | None = None,
) -> TableResults:
    """Run the cells of ``recipe`` that have no result, write the table, and return it.

    Written into ``output_dir``: ``recipe.yaml``, ``table.csv``, ``table.tex``, ``table.html``, and each cell's run
    directory and output under ``cells/``. The table's files are also written while it fills. Running again runs
    what is missing, as resuming does: ``resume`` makes no difference.

    Args:
        recipe: the table's.
        overwrite: rerun cells whose recipe has changed; others are kept.
        resume: continue a table that was stopped.
        device, on, cpus: where the cells run, as in ``open_engine``.
        shard: run only this part of the cells, while other processes run the others; the table has what results there
            are when the part has ended. None: all cells, by this process alone.

    Raises:
        PeftlabError: a cell was run by another recipe, the directory contains something else, or another process
            runs the table or this part of it.
        CellsFailed: cells failed; the table without them is written.
        Stopped: SIGINT or SIGTERM.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise PeftlabError("a table starts its own processes, one for each GPU: run it without accelerate launch")
    directory = Path(recipe.output_dir)
    mark = read_mark(directory)
    begun = mark is not None and mark.kind == TABLE.kind
    hold = partial(claimed, directory, TABLE, inputs=recipe_inputs(recipe), shared=shard is not None)
    cells = table_cells(recipe)
    own = cells if shard is None else shard.part(cells)
    with open_engine(on, device, cpus) as engine, ExitStack() as held:
        claim = held.enter_context(hold(resume=begun))
        wait_for_cells(own)
        missing = missing_cells(own, overwrite=overwrite)
        claim.begin()
        write_text(claim.path / "recipe.yaml", dump_recipe(recipe))
        if shard is not None:
            held.close()
            held.enter_context(locked(directory / shard.lock, f"{directory}, shard {shard}"))
        part = "" if shard is None else f" in part {shard}"
        print(f"{len(own)} cells{part}, {len(own) - len(missing)} with results; {engine.size}", flush=True)
        files = TableFiles(recipe, cells, nullcontext if shard is None else partial(hold, resume=True))
        ran = 0

        def done(cell: Cell, reason: str) -> None:
            nonlocal ran
            ran += 1
            outcome = f"failed: {reason.splitlines()[0]}" if reason else _score_and_time(cell)
            print(f"[{ran}/{len(missing)}] {cell.directory.name}: {outcome}", flush=True)
            if reason:
                files.failed.append(f"{cell.directory.name}: {reason}")
            if ran < len(missing):
                files.update()

        try:
            failed = run_cells(missing, directory, engine, done)
        finally:
            table = files.write_all()
    print_table(table, controls=_controls(recipe))
    print(f"table: {directory / 'table.html'}, table.csv, table.tex")
    if failed:
        counts = f"{len(failed)} of {len(own)} cells failed; running the table again tries them again"
        raise CellsFailed("\n".join([counts, *files.failed]))
    return TableResults(len(own), table)


def _score_and_time(cell: Cell) -> str:
    results = read_object(cell.directory / RESULTS)
    metric = str(results["metric"])
    score = shown(metric, required(results, "score"))
    return f"{metric} {score}, {duration(required(results, 'train_seconds'))}"


# Which cells are run


@dataclass(frozen=True)
class Shard:
    """Every ``count``-th cell, from number ``index`` on (from 0): a part for one of the machines that share a table."""

    index: int
    count: int

    @classmethod
    def read(cls, text: str) -> Shard:
        """Return the shard that ``I/N`` names.

        Raises:
            PeftlabError: it is none of 0/N to N-1/N.
        """
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if found is None or not int(found[1]) < int(found[2]):
            raise PeftlabError(f"shard {text}: write I/N, part I of N, with I from 0 to N-1: 0/4, 1/4, 2/4 and 3/4")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def lock(self) -> str:
        """Name of the file that the process of this part locks."""
        return f"{LOCK}-{self.index}-of-{self.count}"

    def part(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells of this part, in order; a cell that starts from another one's result is where that one is.

        Args:
            cells: of the whole table, in the order they run.
        """
        numbers: dict[str, int] = {}
        independent = 0
        for cell in cells:
            start = numbers.get(cell.init_from or "")
            if start is None:
                start, independent = independent, independent + 1
            numbers[cell.recipe.output_dir] = start
        return [cell for cell in cells if numbers[cell.recipe.output_dir] % self.count == self.index]


def has_checkpoint(directory: Path) -> bool:
    """Return whether a run can be resumed."""
    return any(directory.glob("checkpoints/step-*.pt"))


def is_complete(cell: Cell) -> bool:
    """Return whether a cell has all its results: a run writes some before it measures; checkpoints are removed last."""
    return (cell.directory / RESULTS).exists() and not has_checkpoint(cell.directory)


def missing_cells(cells: Sequence[Cell], *, overwrite: bool) -> list[Cell]:
    """Return the cells that have no result yet, in order; with ``overwrite``, those that must be run anew as well.

    A cell must be run anew when it was run by another recipe or starts from such a cell; its directory is removed.

    Args:
        cells: of the table, in the order they run.
        overwrite: rerun cells whose recipe has changed.

    Raises:
        PeftlabError: without ``overwrite``, there are such cells; they are named with what differs. With it, one
            of them contains something that we did not write.
    """
    changed = {cell.directory: reason for cell in cells if (reason := _recipe_difference(cell))}
    if changed and not overwrite:
        lines = [f"{directory} was run by another recipe: {reason}" for directory, reason in changed.items()]
        more = f"\nand {len(lines) - 5} more cells" if len(lines) > 5 else ""
        advice = "pass --overwrite to run the changed cells anew, or choose another output_dir"
        raise PeftlabError("\n".join(lines[:5]) + f"{more}\n{advice}")
    restarted = {*changed, *(cell.directory for cell in cells if Path(cell.init_from or "") in changed)}
    for cell in cells:
        if cell.directory in restarted:
            remove(cell.directory, RUN.kind, recipe_inputs(cell.recipe))
    return [cell for cell in cells if not is_complete(cell)]


def _recipe_difference(cell: Cell) -> str:
    """Return the keys that differ from the recipe that a cell was run by; empty if none does or it was not run."""
    file = cell.directory / "recipe.yaml"
    if not file.exists():
        return ""
    try:
        before = load_recipe(file)
    except PeftlabError as error:
        return str(error).splitlines()[0]
    here, there = (dict(flatten(_settings_without_place(recipe))) for recipe in (cell.recipe, before))
    for key in _FOUND:  # in the run's recipe, not in the table's
        if here.get(key) is None:
            here[key] = there.get(key)
    return ", ".join(changed_keys(here, there).values())


def _settings_without_place(recipe: Recipe) -> dict[str, Json]:
    """Return a recipe's values without its place on disk: a table may be moved."""
    values = recipe.model_dump(mode="json")
    values.pop("output_dir")
    if values.get("init_from"):
        values["init_from"] = Path(values["init_from"]).name
    return values


def wait_for_cells(cells: Sequence[Cell], seconds: float = 60.0) -> None:
    """Wait for cells of a table that was killed: they notice within a step, write a checkpoint and end.

    Args:
        cells: those that may still run.
        seconds: the longest time.
    """
    until = time.monotonic() + seconds
    while any(is_locked(cell.directory) for cell in cells) and time.monotonic() < until:
        time.sleep(0.05)


# How cells are run


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
        device: where models run, as ``environment.resolve_device`` takes it.
        cpus: CPU cores of each cell, and the threads that PyTorch computes with. None: one on Ray; on this machine the
            cells of a CPU run one at a time, with as many threads as PyTorch chooses.

    Raises:
        PeftlabError: no such engine or device, or the engine cannot be reached.
    """
    if cpus is not None and cpus < 1:
        raise PeftlabError(f"--cpus {cpus}: a cell needs at least one CPU core")
    opened: AbstractContextManager[Engine] = resolve(ENGINES[check_engine(on)])(on, device, cpus)
    return opened


def run_cells(cells: Sequence[Cell], table: Path, engine: Engine, done: Callable[[Cell, str], None]) -> dict[Cell, str]:
    """Run ``cells`` and return the reasons of those that failed.

    Args:
        cells: those to run, in order.
        table: the table's directory, for messages.
        engine: runs them.
        done: called with each cell and the reason why it failed, or an empty text.

    Raises:
        Stopped: SIGINT or SIGTERM came; it was passed on to the cells and they have ended.
    """
    waiting = list(cells)
    failed: dict[Cell, str] = {}
    passed_on = 0
    with _stop_signals() as received:
        ended: list[tuple[Cell, str]] = []
        while ended or engine.running() or (waiting and not received):
            _start_ready_cells(waiting, engine, received)
            for cell, reason in ended:  # after others have taken their places: ``done`` may write files
                if reason and not received:
                    failed[cell] = reason
                if not (reason and received):
                    done(cell, reason)
            for number in received[passed_on:]:
                engine.stop(number)
                passed_on += 1
            ended = engine.ended() if engine.running() else []
    if received:
        raise Stopped(received[0], table, engine.on)
    return failed


def _start_ready_cells(waiting: list[Cell], engine: Engine, received: Sequence[int]) -> None:
    """Start those of ``waiting`` that the engine has room for and that start from no unfinished cell."""
    if received or not engine.free():
        return
    unfinished = {cell.recipe.output_dir for cell in (*waiting, *engine.running())}
    for cell in [cell for cell in waiting if str(Path(cell.init_from or "")) not in unfinished]:
        if received or not engine.free():
            return
        waiting.remove(cell)
        engine.start(cell)


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Yield the list of SIGINT and SIGTERM as they come."""
    received: list[int] = []
    own = threading.current_thread() is threading.main_thread()  # no other thread may set handlers
    numbers = (signal.SIGINT, signal.SIGTERM) if own else ()
    before = {number: signal.signal(number, lambda came, frame: received.append(came)) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# The files of a table


class TableFiles:
    """Writes ``table.csv``, ``table.tex`` and ``table.html``.

    Args:
        cells: all cells of the table.
        hold: holds the table's directory while they are written.

    Attributes:
        failed: a line for each cell that failed, for the page.
    """

    def __init__(
        self, recipe: AnyTable, cells: Sequence[Cell], hold: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._recipe, self._cells, self._hold = recipe, cells, hold
        self.failed: list[str] = []
        self._next = 0.0

    def update(self) -> None:
        """Write the files with the results so far, unless writing would take much of the table's time."""
        began = time.monotonic()
        if began >= self._next:
            try:
                with self._hold():
                    self._write()
            except PeftlabError:
                pass  # ``write_all`` says so, at the end
            now = time.monotonic()
            self._next = now + (now - began) / _WRITING_SHARE

    def write_all(self) -> Table:
        """Write the files with the results so far, print why there is no page, and return the table."""
        with self._hold():
            table, without_page = self._write()
        if without_page:
            print(f"no table.html: {without_page}")
        return table

    def _write(self) -> tuple[Table, str]:
        """Write the files and return the table, and why there is no page or an empty text."""
        recipe, controls = self._recipe, _controls(self._recipe)
        directory = Path(recipe.output_dir)
        if isinstance(recipe, TableRecipe):
            titles = {task: find_task(task).folder or task.rpartition("/")[2] for task in recipe.tasks}
            models = {row: str(keys.get("model", recipe.model)) for row, keys in recipe.rows.items()}
        else:
            titles = {DRAFT: "acceptance"}
            models = {row: str(keys.get("target", recipe.target)) for row, keys in recipe.rows.items()}
        complete = [cell for cell in self._cells if is_complete(cell)]
        results = [(cell.task, cell.row, read_object(cell.directory / RESULTS)) for cell in complete]
        table = summarise(models, len(recipe.seeds), titles, results)
        write_text(directory / "table.csv", table_csv(table, controls))
        write_text(directory / "table.tex", table_latex(table))
        try:
            write_text(directory / "table.html", table_page(table, self.failed, controls))
        except PeftlabError as error:
            return table, str(error)
        return table, ""


def _controls(recipe: AnyTable) -> Controls | None:
    """Return which row costs are relative to, and which rows are compared at equal cost."""
    if not isinstance(recipe, TableRecipe) or recipe.costs is None:
        return None
    return Controls(recipe.costs.of, recipe.costs.controls)
