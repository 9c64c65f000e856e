"""The training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional as F

from peftlab.methods.injection import trainable_parameters
from peftlab.training.canary import Canary
from peftlab.training.compile import compile_or_go_on
from peftlab.training.faults import Interrupted, StopSignals, memory_advice, training_changes
from peftlab.training.feed import Fed, feed
from peftlab.training.log import Log
from peftlab.training.optimiser import lr_factor, make_optimiser
from peftlab.training.order import make_order
from peftlab.training.scoring import evaluate
from peftlab.training.sharded import outline
from peftlab.training.state import (
    Progress,
    checkpoint_path,
    load_checkpoint,
    read_checkpoint,
    restore_adapter,
    save_checkpoint,
)


@dataclass
class Work:
    """What is trained on what.

    Attributes:
        model: the injected model. train: tokenised training set. evaluation: tokenised sets by split name.
        collate: list of examples to a batch of tensors with ``labels``.
        metric: an ``evaluate.Metric``; ``deciding`` names the score that counts, on the first evaluation
            split.
        lr_ratio: learning-rate multiples by last parameter name.
        losses: (model, a share's inputs) to the losses to sum up; None for those of ``example_losses``.
        mass: a global batch's indices to what its summed losses are divided by: its examples, or tokens kept.
        score: model to scores by evaluation split; None for ``metric`` on the logits of ``evaluation``.
    """

    model: nn.Module
    train: Dataset
    evaluation: dict[str, Dataset]
    collate: Callable[[list[dict[str, Any]]], dict[str, Tensor]]
    metric: Any
    deciding: str
    regression: bool
    lr_ratio: dict[str, float]
    losses: Callable[[nn.Module, dict[str, Tensor]], Tensor] | None = None
    mass: Callable[[list[int]], float] = len
    score: Callable[[nn.Module], dict[str, dict[str, float]]] | None = None

    def loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """Return the sum of a share's losses."""
        if self.losses is not None:
            return self.losses(model, inputs).sum()
        return example_losses(model, inputs, self.regression).sum()


def train(work: Work, settings: Any, accelerator: Accelerator, run_dir: Path, *, resume: bool = False) -> Progress:
    """Train ``work.model`` and leave in its place the model with the best evaluation's adapter, in eval mode.

    Each step takes one global batch, dealt over processes and accumulation steps; the loss is the mean over
    its examples (or by ``work.mass``), however they are dealt. The order of examples depends on the seed and
    the epoch alone. Checkpoints are written at evaluations, every ``settings.save_every`` steps and when asked to stop.

    ``work.model`` is the same object as before, but under FSDP2: there it is a plain copy whose frozen
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
    order = make_order(work.train["length"], settings)
    checkpoints = run_dir / "checkpoints"
    parts = settings.gradient_accumulation_steps * accelerator.num_processes

    final = outline(work.model) if accelerator.is_fsdp2 else work.model
    optimiser = make_optimiser(trainable_parameters(work.model), settings, work.lr_ratio)
    model, optimiser = accelerator.prepare(work.model, optimiser)
    progress = load_checkpoint(checkpoints, accelerator, work.model, optimiser) if resume else Progress()
    if settings.compile:
        compile_or_go_on(work, accelerator)
    zero = accelerator.distributed_type == DistributedType.DEEPSPEED
    canary = Canary(work.model, gradients_stay=not zero) if progress.step == 0 else None

    model.train()
    with (
        Log(run_dir / "metrics.jsonl", accelerator, progress.step, progress.metrics_bytes, order) as log,
        StopSignals(accelerator) as signals,
    ):
        clock = time.perf_counter()
        for fed in feed(work, order.batches(progress.step), parts, accelerator):
            if settings.early_stopping and progress.stale >= settings.early_stopping:
                break
            lr = lr_factor(progress.step, order.total, settings.warmup, settings.scheduler)
            loss, norm = _step(work, fed, lr, settings, accelerator, model, optimiser, progress, canary)
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
                    scores = evaluate(model, work, accelerator, size)
                _note(progress, scores, next(iter(scores.values()))[work.deciding])
                log.evaluation(progress.step, scores, best=progress.best_step == progress.step)
            if evaluating or signal or _due(progress.step, settings.save_every, []):
                progress.metrics_bytes = log.position()
                save_checkpoint(checkpoints, accelerator, work.model, optimiser, progress, settings.keep_checkpoints)
            if signal and progress.step < order.total:
                raise Interrupted(signal, progress.step, run_dir)
            clock = time.perf_counter()
    work.model = final
    restore_adapter(final, read_checkpoint(checkpoint_path(checkpoints, progress.best_step)))
    final.eval()  # what comes next decodes, scores or times it: dropout would make every pass another one
    return progress


def _step(
    work: Work,
    fed: Fed,
    lr: float,
    settings: Any,
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
            loss = work.loss(model, inputs) * weight
            # accelerate divides by the accumulation steps, DDP, FSDP and ZeRO by the processes; the mean is over
            # the global batch. ZeRO clips and steps in here too; the next three calls do nothing but tell.
            accelerator.backward(loss * (parts / work.mass(fed.batch)))
            loss_sum += loss.detach()
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(
                    trainable_parameters(work.model).values(), settings.max_grad_norm or math.inf
                )
            optimiser.step()
            if canary is not None and accelerator.sync_gradients and not optimiser.step_was_skipped:
                canary.saw_step(settings.lr * lr)
            optimiser.zero_grad()
    progress.step += 1
    progress.examples += len(fed.batch)
    progress.tokens += fed.tokens
    progress.padded_tokens += fed.padded_tokens
    return accelerator.reduce(loss_sum, "sum") / work.mass(fed.batch), norm


def example_losses(model: nn.Module, inputs: dict[str, Tensor], regression: bool) -> Tensor:
    """Return the loss of each example (n,): cross-entropy, or squared error for regression, in fp32."""
    labels = inputs["labels"]
    logits = model(**{key: value for key, value in inputs.items() if key != "labels"}).logits.float()
    if regression:
        return F.mse_loss(logits.squeeze(-1), labels, reduction="none")
    return F.cross_entropy(logits, labels, reduction="none")


def _due(step: int, every: int | None, otherwise: list[int]) -> bool:
    return step % every == 0 if every else step in otherwise


def _note(progress: Progress, scores: dict[str, dict[str, float]], score: float) -> None:
    progress.last_metrics = scores
    if progress.best_score is None or score > progress.best_score:
        progress.best_step, progress.best_score, progress.best_metrics = progress.step, score, scores
        progress.stale = 0
    else:
        progress.stale += 1
