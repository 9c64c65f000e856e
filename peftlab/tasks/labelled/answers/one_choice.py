"""One of a row's own choices: ``text/choice``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import cast

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from peftlab.errors import PeftlabError
from peftlab.tasks.columns import choice_columns
from peftlab.tasks.config import DataConfig
from peftlab.tasks.labelled.analysis import (
    Analysis,
    confusion_of,
    hard_example,
    largest,
    scores_by_class,
    softmax,
)
from peftlab.tasks.labelled.answers.base import Answers, Array, Predictions
from peftlab.tasks.labelled_texts import Examples
from peftlab.tasks.labels import items
from peftlab.tasks.own.choice_rows import LEAST, before_choices, row_choices
from peftlab.tasks.reading.bad_rows import Fault, refuse
from peftlab.tasks.reading.readers import Table
from peftlab.tasks.tokens import Batch, Collate, Row
from peftlab.untyped import Attributes


def encode_choices(batch: Batch, tokenizer: PreTrainedTokenizerBase, max_length: int) -> dict[str, list[object]]:
    """Return a list of tokens for each choice, as a pair with the text before it if there is any.

    ``length`` counts all choices of a row, padded to the longest.
    """
    choices = cast(list[list[str]], batch["text_pair"])
    ends = list(accumulate(map(len, choices), initial=0))
    before = [text for text, row in zip(batch["text"], choices, strict=True) for _ in row]
    after = [choice for row in choices for choice in row]
    texts = (before, after) if any(before) else (after,)
    tokens = tokenizer(*texts, truncation="longest_first", max_length=max_length, return_attention_mask=False)
    columns = {name: [values[a:b] for a, b in pairwise(ends)] for name, values in tokens.items()}
    return {**columns, "length": [len(row) * max(map(len, row)) for row in columns["input_ids"]]}


class OneChoice(Answers):
    """The choice with the largest logit; the loss is cross-entropy over a row's choices."""

    auto_class = "AutoModelForMultipleChoice"
    pipeline = "multiple-choice"

    def encode(self, batch: Batch, tokenizer: PreTrainedTokenizerBase, max_length: int) -> dict[str, list[object]]:
        """Return ``encode_choices``."""
        return encode_choices(batch, tokenizer, max_length)

    def head(self) -> Attributes:
        """Return nothing: the head gives one number for each choice."""
        return {}

    def collate(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[Row]], dict[str, Tensor]]:
        """Return the function to inputs of shape [rows, choices, longest].

        Rows with fewer choices than others repeat their first one; ``choices``, [rows, choices], says which are real.
        """
        pad = Collate(tokenizer, regression=False)

        def collate(rows: Sequence[Row]) -> dict[str, Tensor]:
            counts = [len(_lists(row["input_ids"])) for row in rows]
            most = max(counts)
            sequences = [
                {name: _lists(row[name])[place if place < count else 0] for name in pad.fill if name in row}
                for row, count in zip(rows, counts, strict=True)
                for place in range(most)
            ]
            batch = {name: value.view(len(rows), most, -1) for name, value in pad.padded(sequences).items()}
            batch["choices"] = torch.arange(most) < torch.tensor(counts).unsqueeze(1)
            if "label" in rows[0]:
                batch["labels"] = torch.tensor([row["label"] for row in rows], dtype=torch.int64)
            return batch

        return collate

    def logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits, [rows, choices], -inf where a row has no such choice."""
        return super().logits(model, batch).masked_fill(~batch["choices"], -torch.inf)

    def loss(self, model: nn.Module, batch: dict[str, Tensor], weights: Tensor | None = None) -> Tensor:
        """Return the sum of the cross-entropies."""
        return F.cross_entropy(self.logits(model, batch), batch["labels"], reduction="none").sum()

    def outputs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Sequence[Array]:
        """Return each row's logits, [choices]."""
        counts = batch["choices"].sum(-1).tolist()
        return [row[:n] for row, n in zip(self.logits(model, batch).cpu().numpy(), counts, strict=True)]

    def score(self, outputs: Sequence[Array], labels: Sequence[object]) -> dict[str, float]:
        """Return the accuracy and the mean cross-entropy."""
        answers = [int(each.argmax()) for each in outputs]
        return _accuracy(answers, _places(labels)) | {"loss": float(np.mean(_losses(outputs, _places(labels))))}

    def baseline(self, train: Sequence[object], labels: Sequence[object]) -> dict[str, float]:
        """Return the accuracy of always choosing the most frequent place (the first where equal)."""
        counts = Counter(_places(train))
        answer = min(counts, key=lambda place: (-counts[place], place))
        return _accuracy([answer] * len(labels), _places(labels))

    def analyse(self, outputs: Sequence[Array], examples: Dataset) -> Analysis:
        """Return scores and confusion by the place of the choice, and the hardest examples."""
        truth, answers = _places(examples["label"]), [int(each.argmax()) for each in outputs]
        losses = np.array(_losses(outputs, truth))
        confusion = confusion_of(max(map(len, outputs)), truth, answers)
        hardest = []
        for row in largest(losses):
            choices = examples[row]["text_pair"]
            right, chosen, probability = choices[truth[row]], choices[answers[row]], float(np.exp(-losses[row]))
            hardest.append(hard_example(examples, row, right, chosen, probability, float(losses[row])))
        names = [str(place) for place in range(len(confusion))]
        return Analysis(scores_by_class(names, confusion), confusion.tolist(), hardest=hardest)

    def confidence(self, outputs: Sequence[Array]) -> list[float]:
        """Return the probability of the chosen."""
        return [float(softmax(each).max()) for each in outputs]

    def predictions(self, outputs: Sequence[Array]) -> Predictions:
        """Return the places of the chosen, from 0, and each place's probability: 0 where a row has no such choice."""
        most = max(map(len, outputs))
        probabilities = np.zeros((len(outputs), most))
        for row, each in enumerate(outputs):
            probabilities[row, : len(each)] = softmax(each)
        answers = [int(each.argmax()) for each in outputs]
        return Predictions(answers, tuple(str(place) for place in range(most)), probabilities)

    def count(self, labels: Sequence[object]) -> Counter[int]:
        """Return nothing: there are no classes that rows share."""
        return Counter()

    def shown(self, row: Row, label: object, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
        """Return a line for each choice; the right one is what is learnt."""
        lines = [str(tokenizer.decode(ids)) for ids in _lists(row["input_ids"])]
        return [(f"\n{line}", place == label) for place, line in enumerate(lines)]

    def read(self, table: Table, names: Sequence[str], data: DataConfig) -> list[object]:
        """Return the text before the choices and the choices of a file's rows."""
        faults: list[Fault] = []
        choices = row_choices(table, data.choices, faults)
        columns = choice_columns(data.model_copy(update={"text": list(names) or None}), table.columns).inputs
        before = before_choices(table, [name for name, key in columns.items() if key == "data.text"], faults)
        refuse(faults)
        bad = [row for row, each in enumerate(choices) if len(each) < LEAST]
        refuse(table.fault((data.choices or ["choices"])[0], "has fewer than two choices", bad))
        return list(zip(before, choices, strict=True))

    def rows(self, given: Sequence[object]) -> Examples:
        """Return rows, each a text (perhaps empty) and a list of choices, as a split without labels."""
        texts, choices = [], []
        for number, row in enumerate(given):
            text, found = row if isinstance(row, list | tuple) and len(row) == 2 else (None, None)
            found = items(found)
            if not isinstance(text, str) or found is None or len(found) < LEAST:
                raise PeftlabError(f"row {number}: is no pair of a text and a list of two choices or more")
            texts.append(text)
            choices.append(found)
        return Examples(texts, choices, None)


def _lists(value: object) -> list[list[int]]:
    return cast(list[list[int]], value)


def _places(labels: Sequence[object]) -> list[int]:
    return [int(str(label)) for label in labels]


def _losses(outputs: Sequence[Array], places: Sequence[int]) -> list[float]:
    tiny = np.finfo(np.float64).tiny
    pairs = zip(outputs, places, strict=True)
    return [float(-np.log(np.maximum(softmax(each)[place], tiny))) for each, place in pairs]


def _accuracy(answers: Sequence[int], truth: Sequence[int]) -> dict[str, float]:
    return {"accuracy": float(np.mean([a == b for a, b in zip(answers, truth, strict=True)]))}
