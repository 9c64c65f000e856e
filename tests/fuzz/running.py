"""One command, in this process or as its own, and what it came to."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from unittest import mock

LIMIT = 20  # seconds
IMPORTING = 40  # seconds that a process may take beside, to import torch and transformers on a busy machine
_MESSAGE = 20_000  # characters that a message may have


class Hang(BaseException):
    """A command took longer than the limit."""


@dataclass(frozen=True)
class Outcome:
    """What a command came to.

    Attributes:
        status: its exit status. out, err: what it printed.
        fault: why it is a fault whatever the input was (a traceback, a hang, another status); empty if it is none.
        hung: whether it was stopped at the limit of time.
    """

    status: int
    out: str
    err: str
    fault: str = ""
    hung: bool = False


def judged(status: int, out: str, err: str) -> Outcome:
    """Return the outcome of a command that ended by itself."""
    if "Traceback (most recent call last)" in err:
        return Outcome(status, out, err, err[-1500:])
    if status not in (0, 2):
        return Outcome(status, out, err, f"exit status {status}: {err[-500:]}")
    if status == 2 and not err.strip():
        return Outcome(status, out, err, "refused without a word")
    if len(err) > _MESSAGE:
        return Outcome(status, out, err, f"a message of {len(err)} characters: {err[:500]}")
    return Outcome(status, out, err)


def in_process(arguments: Sequence[str], folder: Path) -> Outcome:
    """Run ``peftlab ARGUMENTS`` in ``folder``, within this process."""
    from peftlab.cli.app import main

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hang("".join(traceback.format_stack(frame)[-4:]))

    out, err = io.StringIO(), io.StringIO()
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    status = 0
    try:
        with (
            contextlib.chdir(folder),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch.object(sys, "argv", ["peftlab", *arguments]),
        ):
            main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except Hang as hang:
        return Outcome(-1, out.getvalue(), err.getvalue(), f"longer than {LIMIT} s, in\n{hang}", hung=True)
    except BaseException:
        return Outcome(-1, out.getvalue(), err.getvalue(), traceback.format_exc()[-1500:])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return judged(status, out.getvalue(), err.getvalue())


def as_process(arguments: Sequence[str], folder: Path) -> Outcome:
    """Run ``peftlab ARGUMENTS`` in ``folder`` as a process of its own; importing takes some of its seconds."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-m", "peftlab", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, cwd=folder, env=environment, timeout=LIMIT + IMPORTING, check=False
        )
    except subprocess.TimeoutExpired:
        return Outcome(-1, "", "", f"longer than {LIMIT + IMPORTING} s", hung=True)
    return judged(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))
