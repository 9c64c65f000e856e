"""What a run shows while it runs: a bar on a terminal, lines alone in a file."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios

import pytest
import tiny

from tests.forked import python

WIDTH = 80


def on_terminal(*arguments):
    """Run Python on a terminal of its own, ``WIDTH`` wide, and return all that was written there."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDTH, 0, 0))
    ours = ("COLUMNS", "LINES", "TQDM_DISABLE", "TQDM_LEAVE")  # the command line sets the last two, in tests too
    environment = {name: value for name, value in tiny.environment().items() if name not in ours}
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)], stdin=slave, stdout=slave, stderr=slave, env=environment
    )
    os.close(slave)
    said = b""
    try:
        while chunk := os.read(master, 4096):
            said += chunk
    except OSError:  # Linux's way of saying that the other end is closed
        pass
    os.close(master)
    assert process.wait(60) == 0, said.decode()
    return said.decode()


@pytest.mark.slow
def test_a_bar_on_a_terminal_and_lines_in_a_file(still, rows, tmp_path):
    values = {**tiny.recipe(still, rows, tmp_path / "run", eval_every=4), "merge": True}
    recipe = tiny.write_recipe(values, tmp_path / "recipe.yaml")
    program = ("-m", "peftlab", "run", recipe)

    shown = on_terminal(*program)
    pieces = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown))
    wide = [piece for piece in pieces if len(piece) > WIDTH and not piece.startswith("run directory: ")]
    assert wide == []
    assert any(piece.startswith("evaluating:") and "4/8" in piece for piece in pieces)
    steps = [piece for piece in pieces if piece.startswith("step ")]
    assert [step.split(":")[0] for step in steps] == ["step 4/8", "step 8/8"]

    done = python(*program, "--overwrite")
    assert done.returncode == 0, done.stderr
    phases = ["reading data and model ...", "training ...", "analysing the predictions ...", "merging ..."]
    assert done.stderr.splitlines()[:4] == phases and done.stderr.count("\n") == 5
    assert all(line in pieces for line in ("reading data and model ...", "merging ..."))
    assert "\r" not in done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("step ")] == steps
