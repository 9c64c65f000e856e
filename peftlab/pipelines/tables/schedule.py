"""The order in which a table's cells run, on any engine: those that start from another one's result after it."""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from peftlab.errors import PeftlabError
from peftlab.pipelines.tables.engines import LOCAL, Engine
from peftlab.recipe.table_cells import Cell


class Stopped(PeftlabError):
    """The table was asked to stop by a signal; the running cells have written their checkpoints."""

    def __init__(self, number: int, table: Path, on: str) -> None:
        where = "" if on == LOCAL else f" --on {shlex.quote(on)}"
        command = f"peftlab resume {shlex.quote(str(table))}{where}"
        super().__init__(f"stopped by {signal.Signals(number).name}; continue with `{command}`")
        self.status = 128 + number


def run_cells(cells: Sequence[Cell], table: Path, engine: Engine, done: Callable[[Cell, str], None]) -> dict[Cell, str]:
    """Run ``cells`` and return the reasons of those that failed.

    Args:
        table: the table's directory, for messages.
        done: called with each cell and the reason why it failed, or an empty text.

    Raises:
        Stopped: SIGINT or SIGTERM came; it was passed on to the cells and they have ended.
    """
    waiting = list(cells)
    failed: dict[Cell, str] = {}
    passed_on = 0
    with _signals() as received:
        ended: list[tuple[Cell, str]] = []
        while ended or engine.running() or (waiting and not received):
            _start(waiting, engine, received)
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


def _start(waiting: list[Cell], engine: Engine, received: Sequence[int]) -> None:
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
def _signals() -> Iterator[list[int]]:
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
