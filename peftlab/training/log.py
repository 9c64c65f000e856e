"""What a run reports while it runs: the metrics file, the trackers, the progress bar."""

from __future__ import annotations

import math
from pathlib import Path

from accelerate import Accelerator
from torch import Tensor
from tqdm.auto import tqdm

from peftlab.errors import PeftlabError
from peftlab.training.order import Order
from peftlab.training.trackers import JsonlTracker, flat

READ_EVERY = 10  # steps between reading the losses: each read waits for the device
NAMED = 64  # examples of a bad batch that the error lists


class Log:
    """Writes losses and scores to the metrics file, the trackers and the terminal, from the main process only.

    Args:
        path: the metrics file; what it contains after ``keep_bytes`` was written after the checkpoint and is removed.
        step: steps completed before.
    """

    def __init__(self, path: Path, accelerator: Accelerator, step: int, keep_bytes: int, order: Order) -> None:
        self._accelerator, self._order = accelerator, order
        self._file = JsonlTracker(path, keep_bytes) if accelerator.is_main_process else None
        self._pending: list[tuple[int, float, Tensor, Tensor, list[int]]] = []
        # None: no bar where standard error is no terminal (a log file, CI)
        hidden = None if accelerator.is_main_process else True
        self._bar = tqdm(total=order.total, initial=step, unit="step", disable=hidden, dynamic_ncols=True, leave=False)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
        if self._file is not None:
            self._file.finish()

    def step(self, step: int, lr: float, loss: Tensor, norm: Tensor, batch: list[int]) -> None:
        """Record a training step; losses are read from the device every ``READ_EVERY`` steps."""
        self._pending.append((step, lr, loss, norm, batch))
        self._bar.update()
        if len(self._pending) >= READ_EVERY:
            self.flush()

    def flush(self) -> None:
        """Write the pending steps; raise ``PeftlabError`` at the first loss that is not finite."""
        for step, lr, loss, norm, batch in self._pending:
            value = loss.item()
            if not math.isfinite(value):
                named = ", ".join(map(str, sorted(batch)[:NAMED]))
                more = f" and {len(batch) - NAMED} more" if len(batch) > NAMED else ""
                raise PeftlabError(
                    f"the loss is {value} at step {step}, on training examples {named}{more} (from 0); the "
                    "checkpoints of earlier steps are intact. A lower train.lr, a longer train.warmup or "
                    "train.precision=fp32 usually helps"
                )
            self._write(step, {"loss": value, "lr": lr, "grad_norm": float(norm)})
            self._bar.set_postfix(loss=f"{value:.4f}", refresh=False)
        self._pending.clear()
        if self._file is not None:
            self._file.flush()

    def evaluating(self) -> None:
        """Write the pending steps, as ``flush`` does, and show in the bar that an evaluation is running."""
        self.flush()
        self._bar.set_description("evaluating")

    def evaluation(self, step: int, scores: dict[str, dict[str, float]], *, best: bool) -> None:
        """Write and print an evaluation, one line per split; the first split is the deciding one."""
        self._bar.unpause()  # evaluation time does not count towards the time per step
        self._bar.set_description(refresh=False)
        self._bar.clear()
        for split, values in scores.items():
            self._write(step, {"split": split, "eval": values})
            shown = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
            mark = " (best)" if best and split == next(iter(scores)) else ""
            self._accelerator.print(f"step {step}/{self._order.total}: {split} {shown}{mark}", flush=True)

    def position(self) -> int:
        """Write the pending steps to the disk and return the length of the metrics file."""
        self.flush()
        return self._file.position() if self._file is not None else 0

    def _write(self, step: int, values: dict[str, object]) -> None:
        values = {"epoch": self._order.epoch(step), **values}
        if self._file is not None:
            self._file.log(values, step)
        if self._accelerator.trackers:
            self._accelerator.log(flat(values), step=step)
