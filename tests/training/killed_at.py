"""Run as a program: peftlab's command line, killed once at the point of its work that ``KILLED`` names.

``before NAME``: the upload of a file; ``saved STEP``: the checkpoint of a step is complete, in the last process of
several. A process that torchrun starts again is not killed. ``SIGNAL`` names another signal than SIGKILL.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import wraps
from pathlib import Path

from peftlab.cli.app import main
from peftlab.remote import RemoteDirectory

WHEN, _, WHAT = os.environ["KILLED"].partition(" ")


def _kill() -> None:
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        os.kill(os.getpid(), signal.Signals[os.environ.get("SIGNAL", "SIGKILL")])


def _at_upload(upload: Callable[[RemoteDirectory, Path, str], None]) -> Callable[[RemoteDirectory, Path, str], None]:
    @wraps(upload)
    def call(remote: RemoteDirectory, file: Path, name: str) -> None:
        if ("before", name) == (WHEN, WHAT):
            _kill()
        upload(remote, file, name)
        if ("after", name) == (WHEN, WHAT):
            _kill()

    return call


def _at_checkpoint(save: Callable[..., None]) -> Callable[..., None]:
    @wraps(save)
    def call(directory, accelerator, model, optimiser, progress, keep):
        save(directory, accelerator, model, optimiser, progress, keep)
        if ("saved", str(progress.step)) == (WHEN, WHAT) and accelerator.is_last_process:
            _kill()

    return call


if __name__ == "__main__":
    RemoteDirectory.upload = _at_upload(RemoteDirectory.upload)  # type: ignore[method-assign]
    import peftlab.training.loop

    peftlab.training.loop.save_checkpoint = _at_checkpoint(peftlab.training.loop.save_checkpoint)
    main()
