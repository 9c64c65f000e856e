"""The training loop."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional as F

from peftlab.methods import trainable_parameters
from peftlab.tasks.batches import epoch_batches, split_batch
from peftlab.training.canary import Canary
from peftlab.training.evaluate import evaluate
from peftlab.training.optimiser import lr_factor, make_optimiser
from peftlab.training.state import (
    Progress,
    checkpoint_path,
    load_checkpoint,
    read_checkpoint,
    restore_adapter,
    save_checkpoint,
)
from peftlab.training.log import Log


class Interrupted(Exception):
    """The run was asked to stop; its checkpoint is on disk."""


@dataclass
class Work:
    """What is trained on what.

    Attributes:
        model: the injected model. train: tokenised training set. evaluation: tokenised sets by split name.
        collate: list of examples to a batch of tensors with ``labels``.
        metric: an ``evaluate.Metric``; ``deciding`` names the score that counts, in the first evaluation split.
        lr_ratio: learning-rate multiples by last parameter name.
    """

    model: nn.Module
    train: Dataset
    evaluation: dict[str, Dataset]
    collate: Callable[[list[dict[str, Any]]], dict[str, Tensor]]
    metric: Any
    deciding: str
    regression: bool
    lr_ratio: dict[str, float]


def train(work: Work, settings: Any, accelerator: Accelerator, run_dir: Path, *, resume: bool = False) -> Progress:
    """Train ``work.model`` in place and leave it with the best evaluation's adapter.

    Each step takes one global batch of ``settings.batch_size`` examples, dealt over processes and accumulation
    steps; the loss is the mean over those examples, however they are dealt. The order of examples depends on
    the seed and the epoch alone.

    Args:
        settings: a recipe's ``train`` section.
        resume: go on from the newest checkpoint in ``run_dir``.

    Returns:
        What was done, with the best and the last evaluation.

    Raises:
        PeftlabError: a loss or gradient that is not finite, or a trainable parameter that nothing reaches.
        Interrupted: SIGINT or SIGTERM; a checkpoint was written.
    """
    lengths = work.train["length"]
    steps_per_epoch = math.ceil(len(lengths) / settings.batch_size)
    total = settings.max_steps or math.ceil(settings.epochs * steps_per_epoch)
    eval_every = settings.eval_every or steps_per_epoch
    checkpoints = run_dir / "checkpoints"

    optimiser = make_optimiser(trainable_parameters(work.model), settings, work.lr_ratio)
    model, optimiser = accelerator.prepare(work.model, optimiser)
    progress = load_checkpoint(checkpoints, accelerator, model, optimiser) if resume else Progress()
    log = Log(run_dir / "metrics.jsonl", accelerator, progress, steps_per_epoch, total)
    canary = Canary(work.model) if progress.step == 0 else None

    model.train()
    with _stop_signals() as stopping:
        for batch in remaining_batches(lengths, settings.batch_size, settings.seed, progress.step, total):
            lr = lr_factor(progress.step, total, settings.warmup, settings.scheduler)
            loss, norm = _step(work, batch, lr, settings, accelerator, model, optimiser, progress, canary)
            log.step(progress.step, settings.lr * lr, loss, norm)
            if canary is not None and canary.done(progress.step):
                canary = None
            evaluating = progress.step == total or progress.step % eval_every == 0
            if evaluating:
                log.flush()  # a loss that is not finite stops here, before it can become a checkpoint
                scores = evaluate(model, work, accelerator, settings.eval_batch_size)
                _note(progress, scores, next(iter(scores.values()))[work.deciding])
                log.evaluation(progress.step, scores, best=progress.best_step == progress.step)
            if evaluating or stopping:
                progress.metrics_bytes = log.position()
                save_checkpoint(checkpoints, accelerator, model, optimiser, progress, settings.keep_checkpoints)
            if stopping and progress.step < total:
                log.close()
                raise Interrupted
            if settings.early_stopping and progress.stale >= settings.early_stopping:
                break
    log.close()
    restore_adapter(work.model, read_checkpoint(checkpoint_path(checkpoints, progress.best_step)))
    return progress


def remaining_batches(lengths: list[int], batch_size: int, seed: int, start: int, total: int) -> Iterator[list[int]]:
    """Yield the global batches of steps ``start`` to ``total``: epoch after epoch, each in its own order."""
    steps_per_epoch = math.ceil(len(lengths) / batch_size)
    for epoch in range(start // steps_per_epoch, math.ceil(total / steps_per_epoch)):
        first = epoch * steps_per_epoch
        batches = epoch_batches(lengths, batch_size, seed=seed, epoch=epoch)
        yield from batches[max(0, start - first) : total - first]


def _step(
    work: Work,
    batch: list[int],
    lr: float,
    settings: Any,
    accelerator: Accelerator,
    model: nn.Module,
    optimiser: Any,
    progress: Progress,
    canary: Canary | None,
) -> tuple[Tensor, Tensor]:
    """Take one optimiser step on one global batch; return its mean loss and the gradient's norm."""
    started = time.perf_counter()
    shares = settings.gradient_accumulation_steps * accelerator.num_processes
    loss_sum = torch.zeros((), device=accelerator.device)
    norm = torch.zeros(())
    for group in optimiser.param_groups:
        group["lr"] = group["peak_lr"] * lr
    for share in split_batch(batch, shares)[accelerator.process_index :: accelerator.num_processes]:
        # Every process makes as many backward passes: an empty share repeats an example at no weight.
        inputs = work.collate([work.train[i] for i in share or batch[:1]])
        if share:
            progress.tokens += int(inputs["attention_mask"].sum())
            progress.padded_tokens += inputs["input_ids"].numel()
        inputs = {key: value.to(accelerator.device) for key, value in inputs.items()}
        with accelerator.accumulate(model):
            loss = example_losses(model, inputs, work.regression).sum() * bool(share)
            # accelerate divides by the accumulation steps, DDP by the processes; the mean is over the batch.
            accelerator.backward(loss * (shares / len(batch)))
            loss_sum += loss.detach()
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(
                    trainable_parameters(model).values(), settings.max_grad_norm or math.inf
                )
                if canary is not None:
                    canary.saw_gradients()
            optimiser.step()
            optimiser.zero_grad()
    progress.step += 1
    progress.examples += len(batch)
    progress.seconds += time.perf_counter() - started
    return accelerator.reduce(loss_sum, "sum") / len(batch), norm


def example_losses(model: nn.Module, inputs: dict[str, Tensor], regression: bool) -> Tensor:
    """Return the loss of each example (n,): cross-entropy, or squared error for regression, in fp32."""
    labels = inputs["labels"]
    logits = model(**{key: value for key, value in inputs.items() if key != "labels"}).logits.float()
    if regression:
        return F.mse_loss(logits.squeeze(-1), labels, reduction="none")
    return F.cross_entropy(logits, labels, reduction="none")


def _note(progress: Progress, scores: dict[str, dict[str, float]], score: float) -> None:
    progress.last_metrics = scores
    if progress.best_score is None or score > progress.best_score:
        progress.best_step, progress.best_score, progress.best_metrics = progress.step, score, scores
        progress.stale = 0
    else:
        progress.stale += 1


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM instead of dying of them; a second one of the same kind is not held up."""
    received: list[int] = []

    def note(number: int, frame: Any) -> None:
        received.append(number)
        signal.signal(number, before[number])

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
