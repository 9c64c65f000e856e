"""A task with a model: what is trained, how it is scored, and the facts about its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftlab.errors import PeftlabError
from peftlab.models.config import BaseConfig
from peftlab.models.positions import position_limit
from peftlab.models.pretrained import load_base, load_tokenizer, storage
from peftlab.tasks.generated import Contexts
from peftlab.tasks.metrics import Analysis
from peftlab.tasks.table import Task
from peftlab.tasks.tokens import Row
from peftlab.untyped import Attributes, Function

# ===== A task with a model: what is trained, how it is scored, and what is said about the data.
Scores = dict[str, dict[str, float]]  # split to metric to value


@dataclass(frozen=True)
class ModelSource:
    """Where a task's model comes from, as a recipe names it, how it is stored, and the recipe's ``train.precision``.

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

    def model(
        self, auto_class: str, max_length: int, options: Attributes | None = None
    ) -> tuple[PreTrainedModel, list[str]]:
        """Load the model and the names of its fresh parameters; ``options`` are passed to ``from_pretrained``.

        Raises:
            PeftlabError: it cannot be loaded, or has positions for fewer than ``max_length`` tokens.
        """
        told = storage(self.base, self.precision)
        told |= {"revision": self.revision, "trust_remote_code": self.trust_remote_code}
        model, fresh = self.load(self.reference, auto_class, **told, **(options or {}))
        limit = position_limit(model)
        if limit is not None and max_length > limit:
            raise PeftlabError(f"train.max_length is {max_length}; {self.reference} has positions for {limit} tokens")
        return model, fresh


Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]
"""Model and batch to the sum of the batch's losses."""


@dataclass(frozen=True)
class RowSharing:
    """How a task's examples share rows (``train.packing``).

    Attributes:
        collate: examples, and the tokens of a row, to one batch: neighbours share a row while they fit.
        fault: why a model computes something else for examples in one row than for each alone; None if it does not.
    """

    collate: Callable[[Sequence[Row], int], dict[str, Tensor]]
    fault: Callable[[PreTrainedModel, Sequence[Row]], str | None]


@dataclass
class Prepared:
    """What the ``prepare`` function of a task's row returns; nothing is injected yet.

    Attributes:
        task: the row, with ``labels`` and ``text`` filled in from the data.
        fresh: parameters that the checkpoint does not contain, newly initialised.
        train: tokenises the training split; None where there is none.
        held_out: tokenised splits to evaluate on, the deciding one first.
        collate: rows to one batch of tensors.
        loss: what is trained. smoothed: it with ``train.label_smoothing``; None where it has no labels to smooth.
        weighted: it with ``train.class_weights``; None where there is no training split, or no classes.
        denominator: (training set) to the function of a global batch's indices that the sum is divided by.
        score: model to metrics by split; every process calls it.
        deciding: the metric that decides which checkpoint is best. higher_is_better: in which direction.
        baseline: metrics of always giving the same answer; None: the model before training is the baseline.
        classes: class name to its number of examples by split; empty where there are none.
        left_out: reason to the number of rows that are in no split.
        repeated: evaluation split to the number of its rows whose text a training row has too, where there are any.
        fingerprint: SHA-256 of the rows, equal on every machine.
        auto_class, pipeline: of transformers, for the model card.
        sharing: how examples share rows; None where each needs its own.
        refer: (model, tokenised rows) to the rows with what the model that training starts from makes of them, which
            the loss and the scores compare with; every process calls it. None: they compare with no model.
        sample: model to a short output for a held-out input, to be read by people; None where there is none.
        analyse: model to what it gets right and wrong in the deciding split; every process calls it. None where
            answers are not single labels.
        confidence: model and tokenised rows to how probable the model's answer to each is; every process calls it. None
            where answers have no probabilities.
        contexts: (at most so many, or None for all) to the held-out prompts that can be answered; None where a row
            has no prompt.
    """

    task: Task
    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel
    fresh: list[str]
    train: Callable[[], Dataset] | None
    held_out: dict[str, Dataset]
    collate: Callable[[Sequence[Row]], dict[str, Tensor]]
    loss: Loss
    denominator: Callable[[Dataset], Callable[[list[int]], float]]
    score: Callable[[nn.Module], Scores]
    deciding: str
    baseline: Mapping[str, float] | None
    fingerprint: str
    higher_is_better: bool = True
    classes: dict[str, dict[str, int]] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    repeated: dict[str, int] = field(default_factory=dict)
    auto_class: str = "AutoModelForSequenceClassification"
    pipeline: str = "text-classification"
    sharing: RowSharing | None = None
    smoothed: Callable[[float], Loss] | None = None
    weighted: Callable[[str | Mapping[str, float]], Loss] | None = None
    refer: Callable[[nn.Module, Dataset], Dataset] | None = None
    sample: Callable[[nn.Module], str] | None = None
    analyse: Callable[[nn.Module], Analysis] | None = None
    contexts: Callable[[int | None], Contexts] | None = None
    confidence: Callable[[nn.Module, Dataset], Sequence[float]] | None = None

    def compare_with(self, model: nn.Module) -> None:
        """Score held-out rows against ``model`` as it is now, where the scores compare with a model."""
        if self.refer is not None:  # in place: ``score`` reads the same dict
            self.held_out |= {split: self.refer(model, rows) for split, rows in self.held_out.items()}


# ===== Batches of an evaluation, shared out among the processes of a run.
T = TypeVar("T")


@torch.no_grad()
def over_processes(
    data: Dataset,
    batches: Sequence[list[int]],
    collate: Callable[[Sequence[Row]], dict[str, Tensor]],
    score: Callable[[dict[str, Tensor]], T],
) -> list[T]:
    """Return ``score`` of each batch of ``data``'s rows, in the order of ``batches`` and in every process.

    Each process takes every n-th batch, on its own device. No batch counts twice however unevenly they divide: where
    some processes have a batch less, they repeat the first one, as the processes of a wrapped model forward together.
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
