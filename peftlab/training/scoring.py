"""Scoring a model on tokenised sets, one process or many."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from torch import nn
from torch.nn import functional as F

from peftlab.methods.modes import eval_mode
from peftlab.tasks.batches import eval_batches

if TYPE_CHECKING:
    from peftlab.training.loop import Work


def evaluate(model: nn.Module, work: Work, accelerator: Accelerator, batch_size: int) -> dict[str, dict[str, float]]:
    """Return the metrics and the mean loss of each evaluation split, read in eval mode; the mode is as before then."""
    with eval_mode(model):
        if work.score is not None:
            return work.score(model)
        return {split: _score(model, work, data, accelerator, batch_size) for split, data in work.evaluation.items()}


def predict(model: nn.Module, work: Work, data: Dataset, accelerator: Accelerator, batch_size: int) -> numpy.ndarray:
    """Return the logits of ``data`` in its own order: (n, classes), or (n,) for regression.

    Each process takes every n-th batch; no example is counted twice however unevenly they divide. Where some
    processes have a batch less, they repeat the first one: the processes of a wrapped model forward together.
    """
    batches = eval_batches(data["length"], batch_size)
    count = accelerator.num_processes
    turns = math.ceil(len(batches) / count) * count
    found: list[tuple[list[int], numpy.ndarray]] = []
    with torch.no_grad():
        for turn in range(accelerator.process_index, turns, count):
            batch = batches[turn] if turn < len(batches) else batches[0]
            inputs = work.collate(data.__getitems__(batch))
            inputs = {k: v.to(accelerator.device) for k, v in inputs.items() if k != "labels"}
            logits = model(**inputs).logits.float()
            found.append((batch, (logits.squeeze(-1) if work.regression else logits).cpu().numpy()))
    everything = gather_object(found)
    result = numpy.empty((len(data), *everything[0][1].shape[1:]), dtype=numpy.float32)
    for batch, logits in everything:
        result[batch] = logits
    return result


def _score(model: nn.Module, work: Work, data: Dataset, accelerator: Accelerator, batch_size: int) -> dict[str, float]:
    predictions = predict(model, work, data, accelerator, batch_size)
    labels = numpy.asarray(data["label"])
    if work.regression:
        loss = float(numpy.mean((predictions - labels) ** 2))
        return _metrics(work, predictions, labels) | {"loss": loss}
    loss = F.cross_entropy(torch.from_numpy(predictions), torch.from_numpy(labels)).item()
    return _metrics(work, predictions.argmax(-1), labels) | {"loss": loss}


def _metrics(work: Work, predictions: numpy.ndarray, labels: numpy.ndarray) -> dict[str, float]:
    scores = work.metric.compute(predictions=predictions, references=labels)
    return {name: float(value) for name, value in scores.items()}
