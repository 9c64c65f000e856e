"""The training loop: one global batch a step, split over processes and accumulation steps.

``train`` reads from top to bottom; what it needs follows: the state between steps, the batches as tensors, the log.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor, nn
from tqdm.auto import tqdm

from peftlab.errors import PeftlabError
from peftlab.methods.base import layer_index
from peftlab.methods.inject import trainable_parameters
from peftlab.models.costs import Meter
from peftlab.models.load import eval_mode
from peftlab.tasks.batches import padded_tokens, split_rows
from peftlab.tasks.problem import TrainingProblem
from peftlab.training.config import TrainConfig
from peftlab.training.distributed import adapter_template
from peftlab.training.efficient import Emulation, LayerSampling, Selection, frozen
from peftlab.training.faults import FirstStepsCheck, Interrupted, StopSignals, memory_advice, training_changes
from peftlab.training.optimiser import lr_factor, make_optimiser
from peftlab.training.order import Order, make_order
from peftlab.training.state import (
    Progress,
    checkpoint_path,
    load_checkpoint,
    read_checkpoint,
    restore_adapter,
    save_checkpoint,
)


def train(
    problem: TrainingProblem,
    settings: TrainConfig,
    accelerator: Accelerator,
    run_dir: Path,
    *,
    resume: bool = False,
    saved: Callable[[], None] = lambda: None,
) -> Progress:
    """Train ``problem.model`` and replace it by the model with the best evaluation's adapter, in eval mode.

    Each step takes one global batch, split over processes and accumulation steps; its loss is the sum over the
    batch divided by ``problem.denominator``, however the batch is split. The order of examples depends on the seed and
    the epoch alone. Checkpoints are written at evaluations, every ``settings.save_every`` steps and after a signal.

    ``problem.model`` remains the same object, except under FSDP2: there it becomes a plain copy whose frozen parameters
    are on the meta device.

    Args:
        problem: what to train.
        settings: the recipe's ``train`` section.
        accelerator: devices and processes, see ``make_accelerator``.
        run_dir: gets ``metrics.jsonl`` and ``checkpoints``.
        resume: continue from the newest checkpoint in ``run_dir``.
        saved: called by the main process after each checkpoint.

    Returns:
        The progress made, with the best and the last evaluation.

    Raises:
        PeftlabError: a loss or gradient that is not finite, a trainable parameter without a gradient, out of memory,
            no space on the disk.
        Interrupted: SIGINT or SIGTERM; a checkpoint was written.
    """
    lengths, row_tokens = problem.train["length"], min(problem.row_tokens, settings.max_length)
    order = make_order(lengths, settings, row_tokens)
    selected = settings.sample is not None and settings.sample.by_score
    selection = Selection(lengths, settings, row_tokens, order.total) if selected else None
    checkpoints = run_dir / "checkpoints"
    final = adapter_template(problem.model) if accelerator.is_fsdp2 else problem.model
    trainer = Trainer(problem, settings, accelerator, checkpoints if resume else None)
    progress = trainer.progress
    log = Log(run_dir / "metrics.jsonl", accelerator, progress.step, progress.metrics_bytes, order)
    with log, StopSignals(accelerator) as signals:
        clock = time.perf_counter()
        for batch in trainer.batches(order, selection):
            if settings.early_stopping and progress.stale >= settings.early_stopping:
                break
            factor = lr_factor(progress.step, order.total, settings.warmup, settings.scheduler)
            loss, norm = trainer.step(batch, factor, order.total)
            step = progress.step
            progress.seconds += time.perf_counter() - clock  # waiting for data counts, evaluation does not
            log.step(step, settings.peak_lr * factor, loss, norm, batch.indices)
            trainer.check_first_steps()
            signal = signals.received()
            evaluating = step == order.total or (
                step % settings.eval_every == 0 if settings.eval_every else step in order.ends
            )
            if evaluating:
                trainer.evaluate(log)
            if evaluating or signal or (settings.save_every and step % settings.save_every == 0):
                progress.metrics_bytes = log.position()
                trainer.save(checkpoints, saved)
            if signal and step < order.total:
                raise Interrupted(signal, step, run_dir)
            clock = time.perf_counter()
    restore_adapter(final, read_checkpoint(checkpoint_path(checkpoints, progress.best_step)))
    problem.model = final.eval()  # what follows decodes, scores or times it: with dropout every pass would differ
    return progress


class Trainer:
    """A training run between two steps: model, optimiser and progress, and the step itself.

    Attributes:
        model: ``problem.model`` as accelerate wraps it.
        progress: of the run so far.
        parts: parts each global batch is split into, over processes and accumulation steps.
        first_steps: the check of the run's first steps; None once it has passed, and in a resumed run.
        sampling: which layers rest in a step; None if all train.
        emulation: of other hardware's number formats; None where there is none.
        meter: what each kind of step costs.
    """

    def __init__(
        self, problem: TrainingProblem, settings: TrainConfig, accelerator: Accelerator, resume: Path | None
    ) -> None:
        """Make the optimiser, wrap model and optimiser for devices and processes, and load the newest checkpoint.

        Args:
            problem, settings, accelerator: as for ``train``.
            resume: the directory of the checkpoints to continue from; None for a new run.
        """
        self.problem, self.settings, self.accelerator = problem, settings, accelerator
        layers, kind = settings.layers, accelerator.distributed_type
        single, zero = kind == DistributedType.NO, kind == DistributedType.DEEPSPEED
        name = "FSDP2" if accelerator.is_fsdp2 else kind.value
        self.sampling = None
        if layers is not None and layers.active is not None:
            self.sampling = LayerSampling(problem.model, layers.active, layers.period, settings.seed)
            if not single:
                raise PeftlabError(
                    f"train.layers.active: resting layers have no gradients, which {name} waits for; train in one "
                    "process, or with train.layers.from alone"
                )
        for key, value in (("weights", settings.weights), ("emulate", settings.emulate)):
            if value is not None and kind in (DistributedType.FSDP, DistributedType.DEEPSPEED):
                raise PeftlabError(
                    f"train.{key}: {name} divides parameters or averages; train in plain processes (DDP)"
                )
        self.emulation = None if settings.emulate is None else Emulation(problem.model, settings.emulate)
        optimiser = make_optimiser(trainable_parameters(problem.model), settings, problem.lr_ratio)
        self.model: nn.Module
        self.optimiser: AcceleratedOptimizer
        self.model, self.optimiser = accelerator.prepare(problem.model, optimiser)
        self.progress = Progress()
        if resume is not None:
            self.progress = load_checkpoint(resume, accelerator, problem.model, self.optimiser)
        compiled = settings.compile and try_compile(problem, accelerator)
        self.first_steps: FirstStepsCheck | None = None
        if self.progress.step == 0 and problem.new:
            rounded = settings.weights is not None or settings.emulate is not None
            self.first_steps = FirstStepsCheck(problem.model, gradients_kept=not zero, moves=not rounded)
        self.model.train()
        self.parts = settings.gradient_accumulation_steps * accelerator.num_processes
        self.meter = Meter(
            problem.model,
            self.progress.step_costs,
            active=single and not compiled,
            fp32_averages=settings.weights is not None,
        )

    def batches(self, order: Order, selection: Selection | None) -> Iterator[GlobalBatch]:
        """Yield the batches that are left; where a score chooses examples, it does so when a round begins.

        Args:
            order: the run's order of examples.
            selection: the rounds of a run that chooses examples by a score; None for all others.
        """
        progress = self.progress
        while progress.step < order.total:
            if selection is not None and selection.begins(progress.step, progress.chosen):
                progress.chosen.append(selection.choose(progress.chosen, self._confidence))
            batches = order.batches(progress.step)
            if selection is not None:
                batches = selection.batches(progress.step, progress.chosen)
            yield from load_batches(self.problem, batches, self.parts, self.accelerator)

    def _confidence(self, indices: list[int]) -> Sequence[float]:
        """Return the confidence of the model as it is for each example, and count what this costs."""
        assert self.problem.confidence is not None
        half = max(1, self.settings.eval_batch_size // 2)
        advice = memory_advice("while scoring examples", [f"train.eval_batch_size={half}"])
        with advice, eval_mode(self.model), self.computing(), self.meter.scoring() as counter:
            found = self.problem.confidence(self.model, indices)
        self.progress.scored_examples += len(indices)
        self.progress.scoring_flops += counter.flops
        return found

    def step(self, batch: GlobalBatch, factor: float, total: int) -> tuple[Tensor, Tensor]:
        """Take one optimiser step, of ``total``, at ``factor`` times the peak rates.

        Args:
            batch: the global batch.
            factor: the schedule's factor, see ``lr_factor``.
            total: optimiser steps of the run.

        Returns:
            The mean loss and the gradient's norm.
        """
        accelerator, progress, settings = self.accelerator, self.progress, self.settings
        stage = "" if self.problem.at_step is None else self.problem.at_step(progress.step, total)
        denominator = self.problem.denominator(batch.indices)
        loss_sum = torch.zeros((), device=accelerator.device)
        norm = torch.zeros(())
        resting = self.sampling.resting(progress.step) if self.sampling is not None else {}
        for parameter in resting.values():
            # A layer starts its next period with fresh averages: the optimiser has state for the active layers alone.
            self.optimiser.state.pop(parameter, None)
        for group in self.optimiser.param_groups:
            group["lr"] = group["peak_lr"] * factor
        for weight, inputs in batch.parts:
            *leading, longest = inputs["input_ids"].shape  # [rows, longest], or [rows, choices, longest]
            rows = math.prod(leading)
            kind = _step_kind(inputs, resting) + stage
            inputs = {key: value.to(accelerator.device, non_blocking=True) for key, value in inputs.items()}
            where = f"at step {progress.step + 1}, with {rows} rows of {longest} tokens at once"
            with memory_advice(where, training_changes(settings, rows, longest)), accelerator.accumulate(self.model):
                with frozen(resting) if resting else nullcontext(), self.computing():
                    with self.meter.forward(kind):
                        loss = self.problem.loss(self.model, inputs) * weight
                    # accelerate divides by the accumulation steps, DDP, FSDP and ZeRO by the processes; the denominator
                    # is the global batch's. Under ZeRO, backward also clips and steps, and _update does neither again.
                    with self.meter.backward(kind):
                        accelerator.backward(loss * (self.parts / denominator))
                progress.step_kinds[kind] = progress.step_kinds.get(kind, 0) + 1
                loss_sum += loss.detach()
                norm = self._update(norm, settings.peak_lr * factor, resting)
        progress.step += 1
        progress.examples += len(batch.indices)
        progress.tokens += batch.tokens
        progress.padded_tokens += batch.padded_tokens
        return accelerator.reduce(loss_sum, "sum") / denominator, norm

    def _update(self, norm: Tensor, lr: float, resting: Collection[str]) -> Tensor:
        """Clip and step, once the last accumulation step's gradients are there; return the gradient's norm."""
        if self.accelerator.sync_gradients:
            parameters = trainable_parameters(self.problem.model).values()
            # Without a limit, clipping at infinity still computes the norm, which is logged and must be finite.
            norm = self.accelerator.clip_grad_norm_(parameters, self.settings.max_grad_norm or math.inf)
        self.optimiser.step()
        if self.emulation is not None:
            self.emulation.store()
        if self.first_steps is not None and self.accelerator.sync_gradients and not self.optimiser.step_was_skipped:
            self.first_steps.record_step(lr, resting)
        self.optimiser.zero_grad()
        return norm

    def computing(self) -> AbstractContextManager[None]:
        """Return a context in which the model computes in the emulated hardware's number formats, if any."""
        return nullcontext() if self.emulation is None else self.emulation.computing()

    def check_first_steps(self) -> None:
        """Raise ``PeftlabError`` for a parameter that does not learn, after the steps that show it."""
        if self.first_steps is not None and self.first_steps.done():
            self.first_steps = None

    def evaluate(self, log: Log) -> None:
        """Score the model, and record the scores in the progress and the log."""
        log.evaluating()  # a loss that is not finite stops here, before it is scored
        half = max(1, self.settings.eval_batch_size // 2)
        with memory_advice("while evaluating", [f"train.eval_batch_size={half}"]), self.computing():
            scores = self.problem.evaluate(self.model)
        score = next(iter(scores.values()))[self.problem.deciding]
        progress = self.progress
        progress.last_metrics = scores
        sign = 1 if self.problem.higher_is_better else -1
        if progress.best_score is None or sign * score > sign * progress.best_score:
            progress.best_step, progress.best_score, progress.best_metrics = progress.step, score, scores
            progress.stale = 0
        else:
            progress.stale += 1
        log.evaluation(progress.step, scores, best=progress.best_step == progress.step)

    def save(self, directory: Path, saved: Callable[[], None]) -> None:
        """Write a checkpoint; the main process then calls ``saved``.

        Args:
            directory: of the checkpoints.
            saved: called by the main process once the checkpoint is written.
        """
        keep = self.settings.keep_checkpoints
        save_checkpoint(directory, self.accelerator, self.problem.model, self.optimiser, self.progress, keep)
        if self.accelerator.is_main_process:
            saved()


def _step_kind(inputs: Mapping[str, Tensor], resting: Collection[str]) -> str:
    """Return what the cost of a step depends on: shape, whether anything is padding, and which layers rest."""
    mask = inputs.get("attention_mask")
    shape = "x".join(map(str, inputs["input_ids"].shape))
    padded = "" if mask is None or bool(mask.all()) else " padded"
    rest = sorted({layer_index(name) or 0 for name in resting})
    return shape + padded + (f" without {','.join(map(str, rest))}" if rest else "")


T = TypeVar("T")


@dataclass
class GlobalBatch:
    """One step's global batch and this process's part of it.

    Attributes:
        indices: of the examples, over all processes.
        parts: for each backward pass of this process a weight, 1 or 0 (0 for a part without examples, which only
            keeps the processes in step), and the inputs, on the CPU.
        tokens, padded_tokens: of the global batch, without and with padding.
    """

    indices: list[int]
    parts: list[tuple[int, dict[str, Tensor]]]
    tokens: int
    padded_tokens: int


def load_batches(
    problem: TrainingProblem, batches: Iterable[list[int]], parts: int, accelerator: Accelerator
) -> Iterator[GlobalBatch]:
    """Yield each batch, split into ``parts`` over accumulation steps and processes, as tensors.

    On a device with its own memory a thread makes each batch during the step before, in pinned memory.

    Args:
        problem: its training examples and how they become batches.
        batches: indices of each global batch.
        parts: accumulation steps times processes.
        accelerator: its processes and device.
    """
    pinned = accelerator.device.type == "cuda"
    lengths = list(problem.train["length"])

    def collated(indices: list[int]) -> dict[str, Tensor]:
        inputs = problem.batch(problem.train.__getitems__(indices))
        return {key: value.pin_memory() for key, value in inputs.items()} if pinned else inputs

    def load(indices: list[int]) -> GlobalBatch:
        split = split_rows(indices, parts, lengths, problem.row_tokens)
        mine = split[accelerator.process_index :: accelerator.num_processes]
        # Every process makes the same number of backward passes: an empty part repeats an example with weight 0.
        return GlobalBatch(
            indices,
            [(int(bool(part)), collated(part or indices[:1])) for part in mine],
            sum(lengths[i] for i in indices),
            sum(padded_tokens([lengths[i] for i in part], problem.row_tokens) for part in split),
        )

    loaded = map(load, batches)
    return loaded if accelerator.device.type == "cpu" else prefetch(loaded)


def prefetch(items: Iterator[T]) -> Iterator[T]:
    """Yield ``items``, each made by a thread while the one before is in use."""
    end = object()
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, items, end)
        while (item := following.result()) is not end:
            following = thread.submit(next, items, end)
            yield item  # type: ignore[misc]


def try_compile(problem: TrainingProblem, accelerator: Accelerator) -> bool:
    """Compile ``problem.model`` in place for batches of any shape; if that fails, print why and leave it as it was.

    One forward and backward pass over the longest example shows whether it works; gradients are cleared and the
    random number generators restored afterwards.

    Args:
        problem: its model is compiled.
        accelerator: devices and processes.

    Returns:
        Whether the model is compiled.
    """
    lengths = list(problem.train["length"])
    row = problem.train[lengths.index(max(lengths))]
    inputs = {key: value.to(accelerator.device) for key, value in problem.batch([row, row]).items()}
    devices = [accelerator.device] if accelerator.device.type == "cuda" else []
    problem.model.train()
    problem.model.compile(dynamic=True)
    try:
        with torch.random.fork_rng(devices):
            problem.loss(problem.model, inputs).backward()
        return True
    except Exception as error:  # the compiler raises many types
        problem.model._compiled_call_impl = None
        lines = [line for line in str(error).splitlines() if line.strip()]
        reason = " ".join(lines[:2]) or type(error).__name__
        accelerator.print(f"train.compile: continuing without it, as torch.compile failed: {reason}")
        return False
    finally:
        problem.model.zero_grad(set_to_none=True)


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
        self._file = MetricsFile(path, keep_bytes) if accelerator.is_main_process else None
        self._pending: list[tuple[int, float, Tensor, Tensor, list[int]]] = []
        # None: no bar where standard error is no terminal (a log file, CI)
        hidden = None if accelerator.is_main_process else True
        self._bar = tqdm(total=order.total, initial=step, unit="step", disable=hidden, dynamic_ncols=True, leave=False)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()
        if self._file is not None:
            self._file.close()

    def step(self, step: int, lr: float, loss: Tensor, norm: Tensor, batch: list[int]) -> None:
        """Record a training step; losses are read from the device every ``READ_EVERY`` steps.

        Args:
            step: optimiser steps completed.
            lr: the learning rate of the step.
            loss: its mean loss, a scalar.
            norm: the gradient's norm before clipping, a scalar.
            batch: indices of the global batch's examples.
        """
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
        """Write and print an evaluation, one line per split; the first split is the deciding one.

        Args:
            step: optimiser steps completed.
            scores: metrics by split.
            best: whether it is the best evaluation so far.
        """
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
            self._file.write({"step": step, **values})
        if self._accelerator.trackers:
            self._accelerator.log(flat(values), step=step)


class MetricsFile:
    """``metrics.jsonl``: one JSON object per line.

    The file contains nothing that differs between two runs of one recipe (no clock), so that a resumed run's file
    equals an uninterrupted one's.

    Args:
        path: the file.
        keep_bytes: its length at the checkpoint, to which it is truncated.
    """

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        self._file = open(path, "ab")  # noqa: SIM115
        self._file.truncate(keep_bytes)

    def write(self, values: Mapping[str, object]) -> None:
        """Append ``values`` as a line; a number that is not finite becomes null, as JSON has none."""
        self._file.write((json.dumps(_null_if_not_finite(values)) + "\n").encode())

    def flush(self) -> None:
        """Write buffered lines to the file; ``PeftlabError`` if that fails, as on a full disk."""
        try:
            self._file.flush()
        except OSError as error:
            raise PeftlabError(
                f"{self._file.name}: cannot be written ({error.strerror}); the newest checkpoint is complete"
            ) from None

    def position(self) -> int:
        """Flush to the disk and return the file's length in bytes."""
        self.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Close the file; ``flush`` has already reported a full disk."""
        with suppress(OSError):
            self._file.close()


def _null_if_not_finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _null_if_not_finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flat(values: Mapping[str, object], prefix: str = "") -> dict[str, float]:
    """Return the numbers in nested ``values`` under slash-joined names, as accelerate's trackers need them.

    Args:
        values: numbers, and mappings of them.
        prefix: of the names, with its slash.
    """
    result: dict[str, float] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            result |= flat(value, f"{name}/")
        elif isinstance(value, (int, float)):
            result[name] = value
    return result
