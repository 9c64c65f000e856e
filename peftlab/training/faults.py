"""Detects what can end a run: signals, running out of memory, and parameters that do not learn in the first steps."""

from __future__ import annotations

import shlex
import signal
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from peftlab.errors import PeftlabError
from peftlab.methods.inject import trainable_parameters
from peftlab.training.config import TrainConfig
from peftlab.training.distributed import full_tensors

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
    """Raise, where the block runs out of memory, a ``PeftlabError`` that lists settings to change.

    Args:
        where: what needed the memory, for the message.
        changes: settings to change, in the order in which to try them.
    """
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


STEPS = 2  # LoRA's A has no gradient in the first step, while B is zero
LEAST_LR = 1e-6  # below this, a step of AdamW may be rounded away in a weight near 1


class FirstStepsCheck:
    """Checks that each parameter learns in its first two optimiser steps whose learning rate is above ``LEAST_LR``.

    After its second one a trainable parameter must have had a gradient, all its gradients must have been finite, and
    in each module group (the parameters of one parent module) at least one parameter must have changed. Where layers
    rest in some steps, theirs do not count, and the check ends when every layer has had its two.

    Args:
        gradients_kept: False where gradients are gone after the step (ZeRO): then each is checked in a hook.
        moves: False where a small step moves a weight only sometimes (stochastic rounding): gradients alone count.
    """

    def __init__(self, model: nn.Module, *, gradients_kept: bool = True, moves: bool = True) -> None:
        self._moves = moves
        self._waiting = trainable_parameters(model)
        self._start = {name: full_tensors(parameter).clone() for name, parameter in self._waiting.items()}
        self._reached: set[str] = set()
        self._broken: set[str] = set()
        self._steps: Counter[str] = Counter()
        self._hooks = [
            parameter.register_hook(partial(self._record_gradient, name))
            for name, parameter in self._waiting.items()
            if not gradients_kept
        ]

    def record_step(self, lr: float, resting: Collection[str] = ()) -> None:
        """Record a step just taken with learning rate ``lr``; call it before the gradients are cleared.

        Args:
            resting: names of the parameters that did not train in this step.
        """
        if lr < LEAST_LR:
            return
        for name, parameter in self._waiting.items():
            self._steps[name] += name not in resting
            if parameter.grad is not None:
                self._record_gradient(name, parameter.grad)

    def _record_gradient(self, name: str, gradient: Tensor) -> None:
        self._reached.add(name)
        if not torch.isfinite(full_tensors(gradient)).all():
            self._broken.add(name)

    def done(self) -> bool:
        """Return whether all have had both steps; raise ``PeftlabError`` naming the parameters that do not learn."""
        due = {name: parameter for name, parameter in self._waiting.items() if self._steps[name] >= STEPS}
        unreached = [name for name in due if name not in self._reached]
        moved = {_module_group(n) for n, p in due.items() if not torch.equal(full_tensors(p), self._start[n])}
        stuck = sorted({_module_group(name) for name in due} - moved) if self._moves else []
        for what, names in (
            ("have no gradient", unreached),
            ("have gradients that are not finite", sorted(self._broken & due.keys())),
            ("have not changed", stuck),
        ):
            if names:
                more = f" and {len(names) - 5} more" if len(names) > 5 else ""
                raise PeftlabError(f"after {STEPS} steps, trainable parameters {what}: {', '.join(names[:5])}{more}")
        for name in due:
            del self._waiting[name], self._start[name]
        if not self._waiting:
            for hook in self._hooks:
                hook.remove()
        return not self._waiting


def _module_group(name: str) -> str:
    return name.rpartition(".")[0]
