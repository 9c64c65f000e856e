"""The training loop: one global batch a step, split over processes and accumulation steps.

``train`` reads from top to bottom; what it needs follows: the state between steps, the batches as tensors, the
optimiser, and what can end a run: signals, running out of memory, parameters that do not learn in the first steps.
"""

from __future__ import annotations

import math
import shlex
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import Tensor, nn

from peftlab.errors import PeftlabError
from peftlab.methods.base import layer_index
from peftlab.methods.inject import trainable_parameters
from peftlab.models.costs import Meter
from peftlab.models.load import eval_mode
from peftlab.progress import Phase
from peftlab.tasks.problem import TrainingProblem
from peftlab.training.attention import gradients_in_fp32
from peftlab.training.config import TrainConfig
from peftlab.training.distributed import adapter_template, full_tensors
from peftlab.training.efficient import Emulation, LayerSampling, Muon, StochasticAdamW, frozen
from peftlab.training.order import Order, Selection, make_order, padded_tokens, split_rows
from peftlab.training.state import (
    Log,
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
    if resume and progress.step >= order.total:
        accelerator.print(f"nothing left to train after step {progress.step}; train.max_steps or train.epochs say more")
    log = Log(run_dir / "metrics.jsonl", accelerator, progress.step, progress.metrics_bytes, order)
    with log, StopSignals(accelerator) as signals:
        clock = time.perf_counter()
        patience = settings.early_stopping or math.inf
        for batch in trainer.batches(order, selection) if progress.stale < patience else ():
            factor = lr_factor(progress.step, order.total, settings.warmup, settings.scheduler)
            loss, norm = trainer.step(batch, factor, order.total)
            step = progress.step
            progress.seconds += time.perf_counter() - clock  # waiting for data counts, evaluation does not
            speed = progress.tokens / max(progress.seconds, 1e-9)
            # A fused optimiser skips the step itself where scaled gradients overflow, and accelerate does not see it.
            skipped = trainer.optimiser.step_was_skipped or accelerator.scaler is not None
            log.step(step, settings.peak_lr * factor, loss, norm, skipped, batch.indices, speed)
            trainer.check_first_steps()
            stop = signals.received()
            evaluating = step == order.total or (
                step % settings.eval_every == 0 if settings.eval_every else step in order.ends
            )
            if evaluating:
                trainer.evaluate(log)
            if evaluating or stop or (settings.save_every and step % settings.save_every == 0):
                progress.metrics_bytes = log.position()
                trainer.save(checkpoints, saved)
            if stop and step < order.total:
                raise Interrupted(stop, step, run_dir)
            if progress.stale >= patience:
                break
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
        attention: makes the context of a step's attention. meter: what each kind of step costs.
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
        stored = {parameter.dtype for parameter in trainable_parameters(problem.model).values()}
        if settings.precision == "fp16" and torch.float16 in stored:
            raise PeftlabError(
                "train.precision: fp16 scales the loss, and the gradients of weights in fp16 cannot be scaled back; "
                "store the weights that train in fp32 or bf16"
            )
        self.emulation = None if settings.emulate is None else Emulation(problem.model, settings.emulate)
        optimiser = make_optimiser(trainable_parameters(problem.model), settings, problem.lr_ratio, problem.optimizer)
        self.model: nn.Module
        self.optimiser: AcceleratedOptimizer
        self.model, self.optimiser = accelerator.prepare(problem.model, optimiser)
        self.progress = Progress()
        if resume is not None:
            self.progress = load_checkpoint(resume, accelerator, problem.model, self.optimiser)
        compiled = settings.compile and try_compile(problem, accelerator)
        # A compiled model takes the compiler's own attention.
        self.attention = nullcontext if compiled else gradients_in_fp32
        self.first_steps: FirstStepsCheck | None = None
        if self.progress.step == 0 and problem.new:
            narrow = bool(stored & {torch.bfloat16, torch.float16})
            rounded = settings.weights is not None or settings.emulate is not None or narrow
            if narrow and settings.weights is None:
                accelerator.print(
                    "the weights that train are stored in 16 bits, and each step is rounded to the nearest: small "
                    "steps are lost (train.weights=bf16_stochastic keeps their mean, base.dtype=fp32 all of them)"
                )
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
            if selection is not None and selection.is_round_start(progress.step, progress.chosen):
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
        scoring = Phase("scoring the examples to choose from")
        with scoring, advice, eval_mode(self.model), self.computing(), self.meter.scoring() as counter:
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
        resting = self.sampling.resting_parameters(progress.step) if self.sampling is not None else {}
        for parameter in resting.values():
            # A layer starts its next period with fresh averages: the optimiser has state for the active layers alone.
            self.optimiser.state.pop(parameter, None)
        for group in self.optimiser.param_groups:
            group["lr"] = group["peak_lr"] * factor
        for weight, inputs in batch.parts:
            *leading, longest = _shape(inputs)  # [rows, longest], or [rows, choices, longest]
            rows = math.prod(leading)
            kind = _step_kind(inputs, resting) + stage
            inputs = {key: value.to(accelerator.device, non_blocking=True) for key, value in inputs.items()}
            what = f"rows of {longest} tokens" if "input_ids" in inputs else "images"
            where = f"at step {progress.step + 1}, with {rows} {what} at once"
            advice = memory_advice(where, training_changes(settings, rows, longest))
            with advice, self.attention(), accelerator.accumulate(self.model):
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
        if self.first_steps is not None and self.accelerator.sync_gradients:
            overflow = self.accelerator.scaler is not None and not math.isfinite(float(norm))
            if not overflow and not self.optimiser.step_was_skipped:
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
        log.flush()  # a loss or gradient that is not finite stops here, before the model is scored
        half = max(1, self.settings.eval_batch_size // 2)
        advice = memory_advice("while evaluating", [f"train.eval_batch_size={half}"])
        with Phase("evaluating"), advice, self.computing():
            scores = self.problem.evaluate(self.model)
        score = next(iter(scores.values()))[self.problem.deciding]
        progress = self.progress
        if not math.isfinite(score):
            raise PeftlabError(
                f"the {self.problem.deciding} of the held-out examples is {score} after step {progress.step}; the "
                "checkpoints of earlier steps are intact. train.precision=fp32 or a lower train.lr usually helps"
            )
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


def _shape(inputs: Mapping[str, Tensor]) -> list[int]:
    """Return the shape of a batch's tokens; of images alone, each of which counts 1, [rows, 1]."""
    return list(inputs["input_ids"].shape) if "input_ids" in inputs else [len(inputs["pixel_values"]), 1]


def _step_kind(inputs: Mapping[str, Tensor], resting: Collection[str]) -> str:
    """Return what the cost of a step depends on: shape, whether anything is padding, and which layers rest."""
    mask = inputs.get("attention_mask")
    shape = "x".join(map(str, _shape(inputs)))
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
    tokens = list(problem.train["tokens"]) if "tokens" in problem.train.column_names else lengths

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
            sum(tokens[i] for i in indices),
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


# --- The optimiser.
_TABLES = {"markov_w1", "markov_w2", "lm_head", "lm_heads", "embed_tokens"}  # a row each token: not by Muon


def make_optimiser(
    parameters: Mapping[str, nn.Parameter], settings: TrainConfig, lr_ratio: Mapping[str, float], usual: str = "adamw"
) -> torch.optim.Optimizer:
    """Return a fused AdamW over the trainable parameters, or what ``settings.weights`` or ``optimizer`` ask for.

    Vectors (biases, norms, magnitudes) are not decayed. Parameters whose last name is in ``lr_ratio`` get that
    multiple of ``settings.peak_lr`` (LoRA+: ``{"lora_B": ratio}``). The schedule's factor multiplies each group's
    ``peak_lr``.

    Args:
        parameters: the trainable parameters by name.
        settings: the recipe's ``train`` section.
        lr_ratio: multiples of the learning rate by the last part of a parameter's name.
        usual: the optimiser where ``settings.optimizer`` is None.
    """
    by_muon = (settings.optimizer or usual) == "muon"
    groups: dict[tuple[float, float, bool], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        decay = settings.weight_decay if parameter.ndim > 1 else 0.0
        ratio = lr_ratio.get(name.rpartition(".")[2], 1.0)
        muon = by_muon and parameter.ndim == 2 and not set(name.split(".")) & _TABLES
        groups.setdefault((decay, ratio, muon), []).append(parameter)
    listed: list[dict[str, object]] = [
        {"params": members, "weight_decay": decay, "peak_lr": settings.peak_lr * ratio}
        | ({"muon": True} if muon else {})
        for (decay, ratio, muon), members in groups.items()
    ]
    if by_muon:
        # Singular values near 1 need no more digits than bf16 has, which takes half of fp32's time or less.
        dtype = torch.bfloat16 if settings.precision == "bf16" else torch.float32
        return Muon(listed, dtype, lr=settings.peak_lr, betas=settings.betas, eps=settings.eps)
    if settings.weights is not None:
        return StochasticAdamW(listed, settings.betas, settings.eps, settings.seed)
    return torch.optim.AdamW(listed, lr=settings.peak_lr, betas=settings.betas, eps=settings.eps, fused=True)


def lr_factor(step: int, total: int, warmup: float, kind: str) -> float:
    """Return the factor of the peak learning rate at optimiser step ``step`` (from 0) of ``total``.

    Linear warm-up from 0 over ``warmup`` steps (a share of ``total`` if below 1, rounded up, but never all of them),
    then ``constant``, ``linear`` decay to 0, or half a ``cosine`` to 0.

    Args:
        step: the optimiser step, from 0.
        total: optimiser steps of the run.
        warmup: steps of the warm-up, or a share of ``total`` if below 1.
        kind: ``constant``, ``linear`` or ``cosine``.
    """
    ramp = min(math.ceil(warmup * total), total - 1) if warmup < 1 else int(warmup)
    if step < ramp:
        return step / ramp
    if kind == "constant":
        return 1.0
    progress = (step - ramp) / max(1, total - ramp)
    return max(0.0, 1.0 - progress) if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def widen_to_fp32(model: nn.Module) -> None:
    """Give fp32 values to the parameters that train in place beside a frozen base in 16 bits.

    A 16-bit parameter loses small steps in rounding. The products then need autocast. Where nothing is frozen, the
    parameters are the base, and stay as they are stored.
    """
    parameters = list(model.parameters())
    if any(not p.requires_grad and p.is_floating_point() for p in parameters):
        for parameter in parameters:
            if parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.float()


# --- What can end a run: a signal, running out of memory, parameters that do not learn.
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


_NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc")


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
    if settings.gradient_checkpointing is not True:
        changes.append("train.gradient_checkpointing=true (slower, same result)")
    if settings.max_tokens:
        changes.append(f"train.max_tokens={settings.max_tokens // 2} with train.max_length={length} or less")
    elif examples > 1:
        changes.append(f"train.batch_size={max(1, settings.batch_size // 2)}")
    return [*changes, f"train.max_length={length}"] if longest > 1 and not settings.max_tokens else changes


FIRST_STEPS = 2  # LoRA's A has no gradient in the first step, while B is zero
_LEAST_LR = 1e-6  # below this, a step of AdamW may be rounded away in a weight near 1


class FirstStepsCheck:
    """Checks that each parameter learns in its first two optimiser steps whose learning rate is above ``_LEAST_LR``.

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
        if lr < _LEAST_LR:
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
        due = {name: parameter for name, parameter in self._waiting.items() if self._steps[name] >= FIRST_STEPS}
        unreached = [name for name in due if name not in self._reached]
        moved = {n.rpartition(".")[0] for n, p in due.items() if not torch.equal(full_tensors(p), self._start[n])}
        stuck = sorted({name.rpartition(".")[0] for name in due} - moved) if self._moves else []
        for what, names in (
            ("have no gradient", unreached),
            ("have gradients that are not finite", sorted(self._broken & due.keys())),
            ("have not changed", stuck),
        ):
            if names:
                shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
                raise PeftlabError(f"after {FIRST_STEPS} steps, trainable parameters {what}: {shown}")
        for name in due:
            del self._waiting[name], self._start[name]
        if not self._waiting:
            for hook in self._hooks:
                hook.remove()
        return not self._waiting
