"""A task with a model: what is trained, how it is scored, and what is said about the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftlab.tasks.table import Task
from peftlab.tasks.tokens import Row

Scores = dict[str, dict[str, float]]  # split to metric to value


@dataclass(frozen=True)
class ModelSource:
    """Where a task's model comes from, as a recipe names it."""

    reference: str
    revision: str | None = None
    trust_remote_code: bool = False


@dataclass
class Prepared:
    """What the ``prepare`` function of a task's row returns; nothing is injected yet.

    Attributes:
        task: the row, with ``labels`` and ``text`` filled in from the data.
        fresh: parameters that the checkpoint does not contain, newly initialised.
        train: tokenises the training split; None where there is none.
        held_out: tokenised splits to evaluate on, the deciding one first.
        collate: rows to one batch of tensors.
        loss: (model, a batch) to the sum of the batch's losses.
        denominator: (training set) to the function of a global batch's indices that the sum is divided by.
        score: model to metrics by split; every process calls it.
        deciding: the metric that decides which checkpoint is best. higher_is_better: in which direction.
        baseline: metrics of always giving the same answer; None: the model before training is the baseline.
        classes: class name to its number of examples by split; empty where there are none.
        left_out: reason to the number of rows that are in no split.
        fingerprint: SHA-256 of the rows, equal on every machine.
        auto_class, pipeline: of transformers, for the model card.
        sample: model to a short output for a held-out input, to be read by people; None where there is none.
    """

    task: Task
    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel
    fresh: list[str]
    train: Callable[[], Dataset] | None
    held_out: dict[str, Dataset]
    collate: Callable[[Sequence[Row]], dict[str, Tensor]]
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    denominator: Callable[[Dataset], Callable[[list[int]], float]]
    score: Callable[[nn.Module], Scores]
    deciding: str
    baseline: Mapping[str, float] | None
    fingerprint: str
    higher_is_better: bool = True
    classes: dict[str, dict[str, int]] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    auto_class: str = "AutoModelForSequenceClassification"
    pipeline: str = "text-classification"
    sample: Callable[[nn.Module], str] | None = None
