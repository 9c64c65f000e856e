"""What is trained: a model, its examples, and the functions that compute its loss and its scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from datasets import Dataset
from torch import Tensor, nn

from peftlab.methods.modes import eval_mode
from peftlab.tasks.tokens import Row

Scores = dict[str, dict[str, float]]  # split to metric to value


@dataclass
class TrainingSpec:
    """One training problem; classification and distillation are two of them, and the trainer knows neither.

    Attributes:
        model: the injected model; training puts the model with the best adapter in its place.
        train: tokenised examples with a column ``length`` (tokens).
        collate: rows of ``train`` to one batch of tensors, ``input_ids`` of shape [rows, longest] among them.
        loss: (model, a batch) to the sum of the batch's losses, a scalar.
        denominator: indices of a global batch to what the sum of its losses is divided by: examples, or tokens.
        score: model to metrics by split, the deciding split first. It is called in eval mode, in every process.
        deciding: the metric on the first split by which the best checkpoint is chosen. higher_is_better: how.
        lr_ratio: multiples of the learning rate by the last part of a parameter's name.
        at_step: called before each step with its number, from 0, and the number of all; returns what the loss does in
            it where that changes its cost, else "". None: the loss is the same in all.
        row_tokens: tokens up to which ``collate`` puts neighbouring examples into one row; 0: each has its own.
        confidence: model and indices of ``train`` to how confident the model's answer to each is; the least confident
            are chosen (``train.sample``). Called in eval mode, in every process. None: nothing says so.
    """

    model: nn.Module
    train: Dataset
    collate: Callable[[Sequence[Row]], dict[str, Tensor]]
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    denominator: Callable[[list[int]], float]
    score: Callable[[nn.Module], Scores]
    deciding: str
    lr_ratio: Mapping[str, float]
    higher_is_better: bool = True
    row_tokens: int = 0
    confidence: Callable[[nn.Module, list[int]], Sequence[float]] | None = None
    at_step: Callable[[int, int], str] | None = None
    new: bool = True

    def evaluate(self, model: nn.Module) -> Scores:
        """Return the scores of ``model`` (the model itself, or as accelerate wraps it), computed in eval mode.

        Afterwards every module is in the mode it was in.
        """
        with eval_mode(model):
            return self.score(model)
