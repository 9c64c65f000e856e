"""How far a command has come, on stderr: bars on a terminal, lines in a file.

``Phase`` is one part of a command: reading data, training, merging. A file gets a line when a phase begins, at each 5 %
of counted work, when nothing was written for 30 seconds, whatever the process is busy with, and when a phase took more
than 10 seconds. A terminal gets the first and the last of these, and a bar in between.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from peftlab.files import main_process

if TYPE_CHECKING:
    from tqdm import tqdm

T = TypeVar("T")

EVERY = 30.0  # seconds without a line, at most
APART = 10.0  # seconds between two lines of counted work, at least
SHARE = 0.05  # of counted work, after which it is worth a line
LONG = 10.0  # seconds from which the end of a phase is worth a line

_open: list[Phase] = []  # the innermost last
_last_line = 0.0


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 prompt" or "2 prompts".

    Args:
        count: of the things. noun: of one of them, whose plural ends in s.
    """
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


class Phase:
    """A part of a command, whose block shows that it runs and, where its work is counted, how far it is.

    Lines announce and end the outermost phase; one within its block is named by the bar, or by the lines between.

    Args:
        what: in words, such as ``reading data``.
        total: units of work; None where they are not known or not counted.
        unit: their name; empty where they are not counted.
        done: units done before, in a run that was resumed.
        note: of the line that announces it: what it costs, and which key skips it.
    """

    def __init__(self, what: str, total: int | None = None, unit: str = "", *, done: int = 0, note: str = "") -> None:
        self.what, self.total, self.unit, self.done, self._note = what, total, unit, done, note
        self._first, self._written, self._values = done, done, ""
        self._bar: tqdm[object] | None = None
        self._outer: Phase | None = None
        self._ended = threading.Event()
        self._shown = main_process()

    def __enter__(self) -> Phase:
        self._began = time.monotonic()
        if not self._shown:
            return self
        terminal = sys.stderr.isatty()
        self._outer = _open[-1] if _open else None
        if self._outer is None:
            if not (terminal and self.unit):
                note(f"{self.what} ({self._note}) ..." if self._note else f"{self.what} ...")
        elif self._outer._bar is not None:
            self._outer._bar.set_description(self.what)
        if terminal and self.unit:
            from tqdm.auto import tqdm

            self._bar = tqdm(
                desc=self.what if self._outer is not None else None,
                total=self.total,
                initial=self.done,
                unit=self.unit,
                file=sys.stderr,
                dynamic_ncols=True,
                leave=False,
            )
        _open.append(self)
        if self._outer is None and not terminal:
            threading.Thread(target=self._write_when_silent, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._ended.set()
        if not self._shown:
            return
        _open.remove(self)
        if self._bar is not None:
            self._bar.close()
        outer = self._outer._bar if self._outer is not None else None
        if outer is not None:
            outer.unpause()  # the time of this phase does not count towards the time of the outer one's units
            outer.set_description(refresh=False)
            outer.clear()  # for lines that follow
        if kind is None and self._outer is None and (took := time.monotonic() - self._began) > LONG:
            note(f"{self.what}: took {duration(took)}")

    def advance(self, units: int = 1, values: str = "") -> None:
        """Count work that is done.

        Args:
            units: how many more.
            values: what to show beside them, such as a loss and a speed; without it, units per second are shown.
        """
        self.done, self._values = self.done + units, values
        if self._bar is not None:
            if values:
                self._bar.set_postfix_str(values, refresh=False)
            self._bar.update(units)
        elif self._shown:
            silent = time.monotonic() - _last_line
            enough = self.total is not None and self.done - self._written >= SHARE * self.total
            if silent >= EVERY or (enough and silent >= APART):
                self._written = self.done
                note(self.line())

    def line(self) -> str:
        """Return how far the phase is: ``training: step 40/200 (20 %), loss 0.4312, 2 min 14 s left``."""
        spent = time.monotonic() - self._began
        if not self.unit:
            return f"{self.what}: {duration(spent)} so far"
        made = self.done - self._first
        if self.total is None:
            return f"{self.what}: {self.unit} {self.done:,}, {duration(spent)} so far"
        parts = [f"{self.unit} {self.done:,}/{self.total:,} ({100 * self.done / max(1, self.total):.0f} %)"]
        parts += [self._values] if self._values else []
        if made:
            units = f"{self.unit}es" if self.unit.endswith("h") else f"{self.unit}s"
            parts += [] if self._values else [f"{per_second(made / spent)} {units}/s"]
            parts += [f"{duration(spent / made * (self.total - self.done))} left"]
        return f"{self.what}: {', '.join(parts)}"

    def _write_when_silent(self) -> None:
        """Write a line of the innermost phase whenever there was none for 30 seconds, until this phase ends."""
        while not self._ended.wait(max(0.05, EVERY - (time.monotonic() - _last_line))):
            if time.monotonic() - _last_line >= EVERY:
                with suppress(IndexError):  # it ends in this moment
                    note(_open[-1].line())


def counted(items: Iterable[T], what: str, total: int, unit: str) -> Generator[T, None, None]:
    """Yield ``items`` within a phase that counts them.

    Args:
        items: what is worked on, one after the other.
        what: in words.
        total: how many there are.
        unit: what one is called.
    """
    with Phase(what, total, unit) as phase:
        for item in items:
            yield item
            phase.advance()


def duration(seconds: float) -> str:
    """Return a time span in its two largest units: ``4.2 s``, ``2 min 14 s``, ``3 h 5 min``."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def per_second(rate: float) -> str:
    """Return a number per second: whole from 10 on, below with two decimals."""
    return f"{rate:,.{0 if rate >= 10 else 2}f}"


def note(line: str) -> None:
    """Write a line to stderr, after what stdout has kept back.

    Args:
        line: the text.
    """
    global _last_line
    _last_line = time.monotonic()
    with suppress(OSError, ValueError):  # a reader that is gone, a file that is closed
        sys.stdout.flush()
        print(line, file=sys.stderr, flush=True)
