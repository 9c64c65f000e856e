"""Run as a program: each recipe is run by a process that kills itself, then resumed by a fresh one.

Arguments: recipe files. A process dies by SIGKILL within its 23rd forward pass of training.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.figure  # what a run needs is loaded once, before the processes part
import sklearn.metrics
import torch
import transformers.models.bert.modeling_bert

import peftlab.pipelines
import peftlab.recipe.load
from peftlab.cli.app import main
from peftlab.tasks.labelled import OneClass

# Plots stay empty: to draw them takes a third of a tiny run.
matplotlib.figure.Figure.savefig = lambda self, file, **options: file.write('<svg viewBox="0 0 1 1"></svg>')  # type: ignore[method-assign]
assert sklearn and transformers and peftlab

FORWARD = 23


def child(work: Callable[[], None]) -> int:
    """Run ``work`` in a process of its own and return its exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def command(*arguments: str) -> None:
    """Run the command line with ``arguments``."""
    sys.argv = ["peftlab", *arguments]
    try:
        main()
    except SystemExit as leave:
        if leave.code:
            raise


def dying(recipe: str) -> None:
    """Run ``recipe`` until its 23rd forward pass."""
    losses, calls = OneClass.loss, 0

    def last_words(*arguments: Any, **options: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == FORWARD:
            os.kill(os.getpid(), signal.SIGKILL)
        return losses(*arguments, **options)

    OneClass.loss = last_words  # type: ignore[method-assign]
    command("run", recipe)


if __name__ == "__main__":
    for recipe in sys.argv[1:]:
        assert child(lambda file=recipe: dying(file)) == -signal.SIGKILL, recipe  # type: ignore[misc]
        newest = max((Path(recipe).parent / "run" / "checkpoints").glob("*.pt")).name
        assert newest == "step-00000006.pt", newest
        *_, last = (Path(recipe).parent / "run" / "metrics.jsonl").read_text().splitlines()
        assert json.loads(last)["step"] == 7, last  # the last whole step, which the checkpoint does not have
        assert child(lambda file=recipe: command("resume", str(Path(file).parent / "run"))) == 0, recipe  # type: ignore[misc]
