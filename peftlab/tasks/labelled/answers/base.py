"""What the answers of a labelled task are: their head, their loss, their scores, and what is said of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import member
from peftlab.tasks.config import DataConfig
from peftlab.tasks.labelled.analysis import Analysis
from peftlab.tasks.labelled_texts import Examples
from peftlab.tasks.labels import is_missing
from peftlab.tasks.reading.bad_rows import Fault, refuse
from peftlab.tasks.reading.content import is_unicode
from peftlab.tasks.reading.readers import Table
from peftlab.tasks.table import Task
from peftlab.tasks.tokens import Batch, Row, encode_texts, model_inputs
from peftlab.untyped import Attributes

Array = NDArray[np.float32]
Weights = str | Mapping[str, float]
"""``balanced``, or class name to weight."""


@dataclass(frozen=True)
class Predictions:
    """Answers in the order of the rows.

    Attributes:
        answers: class names; lists of them for ``text/multilabel``; the words' tags; places of the chosen; numbers.
        classes: what ``probabilities`` has columns for: all class names in label order, or the places of choices.
        probabilities: [rows, classes], of each class by itself for ``text/multilabel``; None for numbers and tags.
    """

    answers: Sequence[str] | Sequence[float] | Sequence[Sequence[str]]
    classes: tuple[str, ...] = ()
    probabilities: NDArray[np.float64] | None = None

    def as_json(self) -> dict[str, object]:
        """Return the attributes, the probabilities as lists."""
        shares = None if self.probabilities is None else self.probabilities.tolist()
        return {**vars(self), "probabilities": shares}

    def columns(self) -> dict[str, Sequence[object]]:
        """Return ``prediction`` and, for each class, ``probability NAME``."""
        found: dict[str, Sequence[object]] = {"prediction": self.answers}
        if self.probabilities is not None:
            found |= {f"probability {name}": self.probabilities[:, i].tolist() for i, name in enumerate(self.classes)}
        return found


class Answers(ABC):
    """One kind of answer; this base has what is usual for a text, or a pair of texts, and one answer for it.

    Args:
        task: the table's row, with ``labels`` filled in.
    """

    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"  # of transformers, as is the pipeline
    pipeline: ClassVar[str] = "text-classification"
    problem: ClassVar[str | None] = None  # transformers' problem_type

    def __init__(self, task: Task) -> None:
        self.task = task

    def head(self) -> Attributes:
        """Return what ``from_pretrained`` is told about the head."""
        names = self.task.labels
        options: Attributes = {"num_labels": len(names) or 1}
        if self.problem is not None:
            options["problem_type"] = self.problem
        if names:
            options["id2label"] = dict(enumerate(names))
            options["label2id"] = {name: i for i, name in enumerate(names)}
        return options

    def encode(self, batch: Batch, tokenizer: PreTrainedTokenizerBase, max_length: int) -> dict[str, list[object]]:
        """Return the tokens of rows, see ``tokens.tokenise``."""
        return encode_texts(batch, tokenizer, max_length)

    @abstractmethod
    def collate(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[Row]], dict[str, Tensor]]:
        """Return the function of tokenised rows to a batch, with ``labels`` where the rows have them."""

    def logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the model's logits in fp32."""
        return model(**model_inputs(batch)).logits.float()

    @abstractmethod
    def loss(self, model: nn.Module, batch: dict[str, Tensor], weights: Tensor | None = None) -> Tensor:
        """Return the sum of the batch's losses, of each class by its weight."""

    def denominator(self, train: Dataset) -> Callable[[list[int]], float]:
        """Return the function of a global batch's indices to what the sum of its losses is divided by."""
        return len

    def outputs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Sequence[Array]:
        """Return an array for each row: what its answer is read from."""
        return list(self.logits(model, batch).cpu().numpy())

    @abstractmethod
    def score(self, outputs: Sequence[Array], labels: Sequence[object]) -> dict[str, float]:
        """Return the task's metrics and the mean ``loss``."""

    @abstractmethod
    def baseline(self, train: Sequence[object], labels: Sequence[object]) -> dict[str, float]:
        """Return the metrics of always giving the most frequent answer of ``train``, for ``labels``."""

    @abstractmethod
    def analyse(self, outputs: Sequence[Array], examples: Dataset) -> Analysis:
        """Return what the model gets right and wrong."""

    def confidence(self, outputs: Sequence[Array]) -> list[float]:
        """Return how probable each row's answer is, from 0 to 1; an answer without probabilities has none.

        Raises:
            NotImplementedError: the answers have no probabilities (``Task.regression``).
        """
        raise NotImplementedError

    @abstractmethod
    def predictions(self, outputs: Sequence[Array]) -> Predictions:
        """Return the answers."""

    def count(self, labels: Sequence[object]) -> Counter[int]:
        """Return how often each class, by its index, occurs."""
        return Counter(int(str(label)) for label in labels)

    def weights(self, given: Weights, labels: Sequence[object]) -> Tensor:
        """Return the weight of each class.

        Args:
            given: ``balanced``, or weights by class name; other classes weigh 1.
            labels: of the training examples.

        Raises:
            PeftlabError: a name is no class.
        """
        names, counts = self.task.labels, self.count(labels)
        if isinstance(given, str):
            seen = (counts[place] for place in range(len(names)))
            return torch.tensor([self.balance(n, counts, len(labels)) if n else 1.0 for n in seen])
        for name in given:
            if name not in names:
                known = ", ".join(names[:20])
                raise PeftlabError(f"train.class_weights: no class {name!r}{did_you_mean(name, names)}; one of {known}")
        return torch.tensor([given.get(name, 1.0) for name in names])

    def balance(self, count: int, counts: Counter[int], examples: int) -> float:
        """Return the ``balanced`` weight of a class that occurs ``count`` times: every class has the same share."""
        return counts.total() / (len(self.task.labels) * count)

    def shown(self, row: Row, label: object, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
        """Return a tokenised row as the model reads it, in parts, each with whether it is what is learnt."""
        text = str(tokenizer.decode(member(row, "input_ids", list, "an example")))
        return [(text, False), *([] if label is None else [(self.name(label), True)])]

    def name(self, label: object) -> str:
        """Return what a label is called."""
        return self.task.labels[int(str(label))] if self.task.labels else str(label)

    def read(self, table: Table, names: Sequence[str], data: DataConfig) -> list[object]:
        """Return the inputs of a file's rows, as ``rows`` takes them; every row without is an error.

        Args:
            names: the text columns, if any were named. data: the recipe's data section.
        """
        if not 1 <= len(names) <= 2:
            raise PeftlabError(f"a row has one text column or two, not {len(names) or 'none'}; name them by --text")
        columns = [table.column(name, "a text") for name in names]
        faults: list[Fault] = []
        for name, column in zip(names, columns, strict=True):
            bad = [i for i, v in enumerate(column) if not isinstance(v, str) or is_missing(v) or not is_unicode(v)]
            faults += table.fault(name, "is not a text", bad)
        refuse(faults)
        return list(columns[0]) if len(columns) == 1 else list(zip(*columns, strict=True))

    def rows(self, given: Sequence[object]) -> Examples:
        """Return inputs, texts or pairs of texts, as a split without labels."""
        pairs = [row for row in given if not isinstance(row, str)]
        if pairs and len(pairs) != len(given):
            raise PeftlabError("texts: single texts and pairs are mixed")
        columns = self.task.text
        if columns and bool(pairs) != (len(columns) == 2):
            kind = "pairs of texts" if len(columns) == 2 else "single texts"
            raise PeftlabError(f"texts: the model was trained on {kind} ({', '.join(columns)})")
        if not all(isinstance(row, str) or (isinstance(row, list | tuple) and len(row) == 2) for row in given):
            raise PeftlabError("texts: a row is a text or a pair of texts")
        found = list(zip(*pairs, strict=True)) if pairs else [given]
        return Examples(list(found[0]), list(found[1]) if pairs else None, None)
