"""What can end a run from outside: running out of memory, and signals."""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from accelerate import Accelerator

from peftlab.errors import PeftlabError
from peftlab.training.config import TrainConfig

_NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc")


class Interrupted(PeftlabError):
    """The run received a signal and stopped after writing a checkpoint.

    The exit status is the shell's for that signal: 130 for SIGINT (Ctrl-C), 143 for SIGTERM.
    """

    def __init__(self, number: int, step: int, run_dir: Path) -> None:
        command = f"peftlab resume {shlex.quote(str(run_dir))}"
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}; continue with `{command}`")
        self.status = 128 + number


class StopSignals:
    """Records the first SIGINT and SIGTERM, so that the loop can end its step; a second one takes its usual effect."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator, self._received = accelerator, 0

    def __enter__(self) -> StopSignals:
        main = threading.current_thread() is threading.main_thread()  # no other thread may set handlers
        numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
        self._before = {number: signal.signal(number, self._record) for number in numbers}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        signal.signal(number, self._before[signal.Signals(number)])

    def received(self) -> int:
        """Return the signal that any process has received by now, or 0: every process the same."""
        if self._accelerator.num_processes == 1:
            return self._received
        numbers = torch.tensor([self._received], device=self._accelerator.device)
        return int(self._accelerator.gather(numbers).max())


@contextmanager
def memory_advice(where: str, changes: list[str]) -> Iterator[None]:
    """Within the block, running out of memory raises a ``PeftlabError`` that lists settings to change."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error).lower()
        if not isinstance(error, MemoryError) and not any(words in text for words in _NO_MEMORY):
            raise
        raise PeftlabError(f"out of memory {where}; set {', or '.join(changes)}") from None


def training_changes(settings: TrainConfig, examples: int, longest: int) -> list[str]:
    """Return settings that make a training step need less memory, those that keep the result first.

    Args:
        examples: examples of one backward pass.
        longest: tokens they are padded to.
    """
    steps, length = settings.gradient_accumulation_steps, max(2, longest // 2)
    changes = []
    if examples > 1:
        changes.append(f"train.gradient_accumulation_steps={2 * steps} (half the examples at once, same result)")
    if not settings.gradient_checkpointing:
        changes.append("train.gradient_checkpointing=true (slower, same result)")
    if settings.max_tokens:
        changes.append(f"train.max_tokens={settings.max_tokens // 2} with train.max_length={length} or less")
    elif examples > 1:
        changes.append(f"train.batch_size={max(1, settings.batch_size // 2)}")
    return [*changes, f"train.max_length={length}"] if not settings.max_tokens else changes
