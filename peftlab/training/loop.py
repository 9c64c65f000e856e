"""The training loop."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from peftlab.methods.injection import trainable_parameters
from peftlab.training.canary import Canary
from peftlab.training.compile import compile_or_go_on
from peftlab.training.config import TrainConfig
from peftlab.training.faults import Interrupted, StopSignals, memory_advice, training_changes
from peftlab.training.feed import Fed, feed
from peftlab.training.log import Log
from peftlab.training.optimiser import lr_factor, make_optimiser
from peftlab.training.order import make_order
from peftlab.training.sharded import outline
from peftlab.training.spec import TrainingSpec
from peftlab.training.state import (
    Progress,
    checkpoint_path,
    load_checkpoint,
    read_checkpoint,
    restore_adapter,
    save_checkpoint,
)


def train(
    spec: TrainingSpec, settings: TrainConfig, accelerator: Accelerator, run_dir: Path, *, resume: bool = False
) -> Progress:
    """Train ``spec.model`` and leave in its place the model with the best evaluation's adapter, in eval mode.

    Each step takes one global batch, dealt over processes and accumulation steps; the loss is the mean over
    its examples (or by ``spec.denominator``), however they are dealt. The order of examples depends on the seed and
    the epoch alone. Checkpoints are written at evaluations, every ``settings.save_every`` steps and when asked to stop.

    ``spec.model`` is the same object as before, but under FSDP2: there it is a plain copy whose frozen
    parameters lie on the meta device.

    Args:
        settings: a recipe's ``train`` section.
        resume: go on from the newest checkpoint in ``run_dir``.

    Returns:
        What was done, with the best and the last evaluation.

    Raises:
        PeftlabError: a loss or gradient that is not finite, a trainable parameter that nothing reaches, no
            memory, no room on the disk.
        Interrupted: SIGINT or SIGTERM; a checkpoint was written.
    """
    order = make_order(spec.train["length"], settings)
    checkpoints = run_dir / "checkpoints"
    parts = settings.gradient_accumulation_steps * accelerator.num_processes

    final = outline(spec.model) if accelerator.is_fsdp2 else spec.model
    optimiser = make_optimiser(trainable_parameters(spec.model), settings, spec.lr_ratio)
    model, optimiser = accelerator.prepare(spec.model, optimiser)
    progress = load_checkpoint(checkpoints, accelerator, spec.model, optimiser) if resume else Progress()
    if settings.compile:
        compile_or_go_on(spec, accelerator)
    zero = accelerator.distributed_type == DistributedType.DEEPSPEED
    canary = Canary(spec.model, gradients_stay=not zero) if progress.step == 0 else None

    model.train()
    with (
        Log(run_dir / "metrics.jsonl", accelerator, progress.step, progress.metrics_bytes, order) as log,
        StopSignals(accelerator) as signals,
    ):
        clock = time.perf_counter()
        for fed in feed(spec, order.batches(progress.step), parts, accelerator):
            if settings.early_stopping and progress.stale >= settings.early_stopping:
                break
            lr = lr_factor(progress.step, order.total, settings.warmup, settings.scheduler)
            loss, norm = _step(spec, fed, lr, settings, accelerator, model, optimiser, progress, canary)
            progress.seconds += time.perf_counter() - clock  # waiting for data counts, evaluation does not
            log.step(progress.step, settings.lr * lr, loss, norm, fed.batch)
            if canary is not None and canary.done():
                canary = None
            signal = signals.received()
            evaluating = progress.step == order.total or _due(progress.step, settings.eval_every, order.ends)
            if evaluating:
                log.evaluating()  # a loss that is not finite stops here, before it is scored
                size = settings.eval_batch_size
                with memory_advice("while evaluating", [f"train.eval_batch_size={max(1, size // 2)}"]):
                    scores = spec.evaluate(model)
                _note(progress, scores, next(iter(scores.values()))[spec.deciding])
                log.evaluation(progress.step, scores, best=progress.best_step == progress.step)
            if evaluating or signal or _due(progress.step, settings.save_every, []):
                progress.metrics_bytes = log.position()
                save_checkpoint(checkpoints, accelerator, spec.model, optimiser, progress, settings.keep_checkpoints)
            if signal and progress.step < order.total:
                raise Interrupted(signal, progress.step, run_dir)
            clock = time.perf_counter()
    spec.model = final
    restore_adapter(final, read_checkpoint(checkpoint_path(checkpoints, progress.best_step)))
    final.eval()  # what comes next decodes, scores or times it: dropout would make every pass another one
    return progress


def _step(
    spec: TrainingSpec,
    fed: Fed,
    lr: float,
    settings: TrainConfig,
    accelerator: Accelerator,
    model: nn.Module,
    optimiser: Any,
    progress: Progress,
    canary: Canary | None,
) -> tuple[Tensor, Tensor]:
    """Take one optimiser step on one global batch; return its mean loss and the gradient's norm."""
    parts = settings.gradient_accumulation_steps * accelerator.num_processes
    loss_sum = torch.zeros((), device=accelerator.device)
    norm = torch.zeros(())
    for group in optimiser.param_groups:
        group["lr"] = group["peak_lr"] * lr
    for weight, inputs in fed.shares:
        examples, longest = inputs["input_ids"].shape
        inputs = {key: value.to(accelerator.device, non_blocking=True) for key, value in inputs.items()}
        where = f"at step {progress.step + 1}, with {examples} examples of {longest} tokens at once"
        with (
            memory_advice(where, training_changes(settings, examples, longest)),
            accelerator.accumulate(model),
        ):
            loss = spec.loss(model, inputs) * weight
            # accelerate divides by the accumulation steps, DDP, FSDP and ZeRO by the processes; the mean is over
            # the global batch. ZeRO clips and steps in here too; the next three calls do nothing but tell.
            accelerator.backward(loss * (parts / spec.denominator(fed.batch)))
            loss_sum += loss.detach()
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(
                    trainable_parameters(spec.model).values(), settings.max_grad_norm or math.inf
                )
            optimiser.step()
            if canary is not None and accelerator.sync_gradients and not optimiser.step_was_skipped:
                canary.saw_step(settings.lr * lr)
            optimiser.zero_grad()
    progress.step += 1
    progress.examples += len(fed.batch)
    progress.tokens += fed.tokens
    progress.padded_tokens += fed.padded_tokens
    return accelerator.reduce(loss_sum, "sum") / spec.denominator(fed.batch), norm


def _due(step: int, every: int | None, otherwise: list[int]) -> bool:
    return step % every == 0 if every else step in otherwise


def _note(progress: Progress, scores: dict[str, dict[str, float]], score: float) -> None:
    progress.last_metrics = scores
    if progress.best_score is None or score > progress.best_score:
        progress.best_step, progress.best_score, progress.best_metrics = progress.step, score, scores
        progress.stale = 0
    else:
        progress.stale += 1
