"""The training problem: a model with its examples, loss and scores, and for a task the facts about its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor, nn
from transformers import BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerBase

from peftlab.errors import PeftlabError
from peftlab.models.config import BaseConfig
from peftlab.models.load import (
    eval_mode,
    load_base,
    load_image_processor,
    load_processor,
    load_tokenizer,
    position_limit,
    storage,
)
from peftlab.tasks.batches import Row, SplitRows
from peftlab.tasks.generated import Contexts
from peftlab.tasks.metrics import Analysis
from peftlab.tasks.table import PreferenceObjective, Task
from peftlab.untyped import Attributes, Function, Processor

Scores = dict[str, dict[str, float]]  # split to metric to value


@dataclass(frozen=True)
class ModelSource:
    """The source of a task's model: its reference in the recipe, how it is stored, and ``train.precision``.

    ``load``: what loads it, as ``load_base`` does.
    """

    reference: str
    revision: str | None = None
    trust_remote_code: bool = False
    base: BaseConfig = field(default_factory=BaseConfig)
    precision: str = "fp32"
    load: Function[tuple[PreTrainedModel, list[str]]] = load_base

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the model's tokenizer."""
        return load_tokenizer(self.reference, revision=self.revision, trust_remote_code=self.trust_remote_code)

    def image_processor(self) -> BaseImageProcessor:
        """Load the model's image processor."""
        return load_image_processor(self.reference, revision=self.revision, trust_remote_code=self.trust_remote_code)

    def text_and_image_processor(self) -> Processor:
        """Load the model's processor of images and text."""
        return load_processor(self.reference, revision=self.revision, trust_remote_code=self.trust_remote_code)

    def model(
        self, auto_class: str, max_length: int, options: Attributes | None = None
    ) -> tuple[PreTrainedModel, list[str]]:
        """Load the model and the names of its fresh parameters; ``options`` are passed to ``from_pretrained``.

        Args:
            auto_class: transformers auto class.
            max_length: tokens of the longest example.
            options: passed to ``from_pretrained``; None for none.

        Raises:
            PeftlabError: it cannot be loaded, or has positions for fewer than ``max_length`` tokens.
        """
        load_options = storage(self.base, self.precision)
        load_options |= {"revision": self.revision, "trust_remote_code": self.trust_remote_code}
        model, fresh = self.load(self.reference, auto_class, **load_options, **(options or {}))
        limit = position_limit(model)
        if limit is not None and max_length > limit:
            raise PeftlabError(f"train.max_length is {max_length}; {self.reference} has positions for {limit} tokens")
        return model, fresh


Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]
"""Model and batch to the sum of the batch's losses."""


@dataclass(frozen=True)
class TaskOptions:
    """The part of a recipe that a task's ``prepare`` needs besides the data section and the model.

    Attributes:
        max_length: tokens of the longest example.
        batch_size: examples per evaluation batch and process.
        train: whether to tokenise the training split; evaluation alone does not need it.
        classes: a trained model's class names in label order; None: those of task and data.
        objective: the recipe's section, for a task that has objectives.
        label_smoothing: share of each token's training loss that is the mean over the vocabulary.
        class_weights: ``balanced``, or class name to what the training loss of its examples is multiplied by.
    """

    max_length: int
    batch_size: int
    train: bool = True
    classes: Sequence[str] | None = None
    objective: PreferenceObjective | None = None
    label_smoothing: float = 0.0
    class_weights: str | Mapping[str, float] | None = None


@dataclass(frozen=True)
class RowSharing:
    """The functions by which a task's examples share rows (``train.packing``).

    Attributes:
        collate: examples, and the tokens of a row, to one batch: neighbours share a row while they fit.
        fault: why a model computes something else for examples in one row than for each alone; None if it does not.
    """

    collate: Callable[[Sequence[Row], int], dict[str, Tensor]]
    fault: Callable[[PreTrainedModel, Sequence[Row]], str | None]


@dataclass(kw_only=True)
class TrainingProblem:
    """The input of the training loop: a model, its examples, and the functions that compute its loss and scores.

    A finetune task and the training of a draft are two of them; the loop knows neither.

    Attributes:
        model: the injected model; training puts the model with the best adapter in its place.
        train: tokenised examples with a column ``length`` (tokens; an image counts 1). Where an example has padding
            inside, ``length`` counts it, and a column ``tokens`` does not.
        collate: rows to one padded batch of tensors, among them ``input_ids`` of shape [rows, longest], or of images
            alone ``pixel_values``.
        loss: (model, a batch) to the sum of the batch's losses, a scalar.
        denominator: indices of a global batch to what the sum of its losses is divided by: examples, or tokens.
        score: model to metrics by split, the deciding split first. It is called in eval mode, in every process.
        deciding: the metric on the first split by which the best checkpoint is chosen.
        higher_is_better: whether more of it is better.
        lr_ratio: multiples of the learning rate by the last part of a parameter's name.
        optimizer: where ``train.optimizer`` is null.
        sharing: how examples share rows; None where each needs its own.
        row_tokens: tokens of the rows that examples share; 0: each has its own.
        confidence: model and indices of ``train`` to how probable the model's answer to each is; the least confident
            are chosen (``train.sample``). Called in eval mode, in every process. None: answers have no probabilities.
        at_step: called before each step with its number, from 0, and the number of all; returns what the loss does in
            it where that changes its cost, else "". None: the loss is the same in all.
        new: whether no step was ever trained, so that the first steps must show that each parameter learns.
    """

    model: nn.Module
    train: Dataset
    collate: Callable[[Sequence[Row]], dict[str, Tensor]]
    loss: Loss
    denominator: Callable[[list[int]], float]
    score: Callable[[nn.Module], Scores]
    deciding: str
    higher_is_better: bool = True
    lr_ratio: Mapping[str, float] = field(default_factory=dict)
    optimizer: str = "adamw"
    sharing: RowSharing | None = None
    row_tokens: int = 0
    confidence: Callable[[nn.Module, list[int]], Sequence[float]] | None = None
    at_step: Callable[[int, int], str] | None = None
    new: bool = True

    def batch(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Return training examples as one batch: padded, or in rows that they share."""
        if self.row_tokens and self.sharing is not None:
            return self.sharing.collate(rows, self.row_tokens)
        return self.collate(rows)

    def evaluate(self, model: nn.Module) -> Scores:
        """Return the scores of ``model`` (the model itself, or as accelerate wraps it), computed in eval mode.

        Afterwards every module is in the mode it was in.
        """
        with eval_mode(model):
            return self.score(model)


@dataclass(kw_only=True)
class TaskProblem(TrainingProblem):
    """The training problem that a task's ``prepare`` returns, with facts about its data; nothing is injected yet.

    Attributes:
        train: the tokenised training split; empty where there is none, or where ``TaskOptions`` did not want it.
        task: the row, with ``labels`` and ``text`` filled in from the data.
        processor: what made inputs of the data, saved beside the adapter: the tokenizer, or the image processor.
        fresh: parameters that the checkpoint does not contain, newly initialised.
        held_out: tokenised splits to evaluate on, the deciding one first.
        mean_loss: model and a held-out split to its mean loss, without smoothing and class weights, in one process.
        baseline: metrics of always giving the same answer; None: the model before training is the baseline.
        fingerprint: SHA-256 of the rows, equal on every machine.
        classes: class name to its number of examples by split; empty where there are none.
        left_out: reason to the number of rows that are in no split.
        splits: split to how many rows it has, and how many ``train.max_length`` leaves out or truncates.
        repeated: evaluation split to the number of its rows whose text a training row has too, where there are any.
        auto_class, pipeline: of transformers, for the model card.
        refer: (model, tokenised rows) to the rows with outputs of the model that training starts from, which
            the loss and the scores compare with; every process calls it. None: they compare with no model.
        sample: model to a short output for a held-out input, to be read by people; None where there is none.
        analyse: model to what it gets right and wrong in the deciding split; every process calls it. None where
            answers are not single labels.
        contexts: (at most so many, or None for all) to the held-out prompts that can be answered; None where a row
            has no prompt.
    """

    model: PreTrainedModel
    task: Task
    processor: Processor
    fresh: list[str]
    held_out: dict[str, Dataset]
    mean_loss: Callable[[nn.Module, Dataset], float]
    fingerprint: str
    baseline: Mapping[str, float] | None = None
    classes: dict[str, dict[str, int]] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    splits: dict[str, SplitRows] = field(default_factory=dict)
    repeated: dict[str, int] = field(default_factory=dict)
    auto_class: str = "AutoModelForSequenceClassification"
    pipeline: str = "text-classification"
    refer: Callable[[nn.Module, Dataset], Dataset] | None = None
    sample: Callable[[nn.Module], str] | None = None
    analyse: Callable[[nn.Module], Analysis] | None = None
    contexts: Callable[[int | None], Contexts] | None = None

    def compare_with(self, model: nn.Module) -> None:
        """Store the outputs of ``model`` for all rows, where loss and scores compare with a reference model."""
        if self.refer is not None:
            if len(self.train):
                self.train = self.refer(model, self.train)
            # In place: ``score`` reads the same dict.
            self.held_out |= {split: self.refer(model, rows) for split, rows in self.held_out.items()}


def refuse_no_training(task: str, rows: int, validation: float | str | None) -> None:
    """Raise ``PeftlabError`` if there are no rows to train on.

    Args:
        task: its name. rows: of the training split. validation: ``data.validation``.
    """
    if not rows:
        whole = "; data.validation=all is for peftlab eval" if validation == "all" else ""
        raise PeftlabError(f"task {task}: there is no training split{whole}")


@torch.inference_mode()
def mean_loss(
    loss: Loss,
    collate: Callable[[Sequence[Row]], dict[str, Tensor]],
    denominator: Callable[[Dataset], Callable[[list[int]], float]],
    model: nn.Module,
    data: Dataset,
) -> float:
    """Return the mean loss of ``model`` on a split, in eval mode and in this process alone.

    Args:
        loss, collate: as of ``TrainingProblem``.
        denominator: function of a split to the function of its indices that the sum of their losses is divided by.
        model: on its device.
        data: the tokenised split.
    """
    device = next(model.parameters()).device
    total = 0.0
    with eval_mode(model):
        for i in range(0, len(data), 16):
            batch = collate([data[j] for j in range(i, min(i + 16, len(data)))])
            total += float(loss(model, {key: value.to(device) for key, value in batch.items()}))
    return total / denominator(data)(list(range(len(data))))


T = TypeVar("T")


@torch.no_grad()
def score_batches(
    data: Dataset,
    batches: Sequence[list[int]],
    collate: Callable[[Sequence[Row]], dict[str, Tensor]],
    score: Callable[[dict[str, Tensor]], T],
) -> list[T]:
    """Return ``score`` of each batch of ``data``'s rows, in the order of ``batches`` and in every process.

    Each process takes every n-th batch, on its own device. No batch counts twice however unevenly they divide: where
    some processes have a batch less, they repeat the first one, as the processes of a wrapped model forward together.

    Args:
        data: tokenised rows.
        batches: indices of the rows of each batch.
        collate: rows to one batch of tensors.
        score: function of a batch, on this process's device, to its entry in the result.
    """
    state = PartialState()
    found: list[tuple[int, T]] = []
    for turn in range(0, len(batches), state.num_processes):
        place = turn + state.process_index
        mine = batches[place if place < len(batches) else 0]
        inputs = {key: value.to(state.device) for key, value in collate(data.__getitems__(mine)).items()}
        found.append((place, score(inputs)))
    values: dict[int, T] = dict(gather_object(found))
    return [values[place] for place in range(len(batches))]
