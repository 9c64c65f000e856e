"""Labelled tasks: a model with a task head, trained on texts with labels, and the kinds of answers that it gives.

``prepare`` reads from top to bottom; each kind of answer has its head, loss, scores, predictions and analysis:
``OneClass`` (``text/classification``, GLUE), ``Number`` (``text/regression``, STS-B), ``ManyClasses``
(``text/multilabel``), ``OneChoice`` (``text/choice``) and ``WordTags`` (``text/tokens``); ``ImageClass`` is in
``tasks.images``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import ClassVar, cast

import numpy as np
import torch
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import typed_value
from peftlab.models.architectures import embeddings_of
from peftlab.registry import resolve
from peftlab.tasks.batches import (
    WHOLE,
    Batch,
    Collate,
    Row,
    encode_texts,
    eval_batches,
    largest_id,
    model_inputs,
    padding_or_end,
    padding_token,
    split_rows,
    tokenise,
    whole_lengths,
)
from peftlab.tasks.data import Fault, Table, choice_columns, is_missing, is_unicode, items, refuse
from peftlab.tasks.labelled_rows import (
    ABSENT,
    MIN_CHOICES,
    NO_ENTITY,
    Examples,
    context_texts,
    entities,
    is_entity_scheme,
    load_task_data,
    refuse_faulty_rows,
    row_choices,
)
from peftlab.tasks.metrics import (
    Analysis,
    ClassScores,
    analyse,
    class_scores,
    compute_metrics,
    confusion_of,
    hardest_examples,
    majority_baseline,
    scores_by_class,
    softmax,
)
from peftlab.tasks.problem import Loss, ModelSource, TaskOptions, TaskProblem, mean_loss, score_batches
from peftlab.tasks.table import DataConfig, Task
from peftlab.untyped import Attributes, Processor

Array = NDArray[np.float32]
Weights = str | Mapping[str, float]
"""``balanced``, or class name to weight."""


def prepare(task: Task, data: DataConfig, source: ModelSource, options: TaskOptions) -> TaskProblem:
    """Read a labelled task's data, load its model, and return both with the functions that train and score it.

    Args:
        task: the table's row.
        data: the recipe's data section.
        source: where the model comes from.
        options: what else the recipe says.

    Raises:
        PeftlabError: anything wrong with data or model, or no labelled split to evaluate on.
    """
    loaded = load_task_data(task.name, data, options.classes)
    task, splits = loaded.task, loaded.splits
    answers: Answers = resolve(task.answers)(task)
    processor, model, fresh = load_classifier(answers, source, options.max_length)
    evaluated = [split for split in task.evaluation if split in splits and "label" in splits[split].column_names]
    if not evaluated:
        there = ", ".join(splits) or "none"
        raise PeftlabError(f"task {task.name}: no labelled split to evaluate on; there is {there}")
    first = evaluated[0]
    tokens = partial(tokens_for, source.reference, answers, model, processor, options.max_length)
    held_out = {split: tokens(splits[split]) for split in evaluated}
    train = tokens(splits["train"]) if options.train and "train" in splits else Dataset.from_dict({})
    used = {"train": train, **held_out} if len(train) else held_out
    labels = list(splits["train"]["label"]) if "train" in splits else None
    evaluation = Evaluation(answers, held_out, answers.collate(processor), options.batch_size)
    loss: Loss = answers.loss
    if options.class_weights is not None and labels is not None:
        loss = partial(answers.loss, weights=answers.weights(options.class_weights, labels))
    return TaskProblem(
        task=task,
        processor=processor,
        model=model,
        fresh=fresh,
        train=train,
        held_out=held_out,
        collate=evaluation.collate,
        loss=loss,
        mean_loss=partial(mean_loss, answers.loss, evaluation.collate, answers.denominator),
        denominator=answers.denominator(train) if len(train) else len,
        score=evaluation.score,
        deciding=task.metrics[0],
        baseline=None if labels is None else answers.baseline(labels, list(splits[first]["label"])),
        classes=class_counts(answers, splits),
        left_out=loaded.left_out,
        splits={name: split_rows(rows, options.max_length) for name, rows in used.items()},
        repeated=repeated_rows(task, splits),
        fingerprint=loaded.fingerprint,
        analyse=lambda model: answers.analyse(evaluation.outputs(model, held_out[first]), splits[first]),
        confidence=None
        if task.regression
        else lambda model, indices: answers.confidence(evaluation.outputs(model, train.select(indices))),
        auto_class=answers.auto_class,
        pipeline=answers.pipeline,
    )


def class_counts(answers: Answers, splits: Mapping[str, Dataset]) -> dict[str, dict[str, int]]:
    """Return class name, in label order, to its number of examples by labelled split; empty without classes.

    Args:
        answers: the task's kind of answers.
        splits: tokenised examples by split.
    """
    counts = {split: answers.count(rows["label"]) for split, rows in splits.items() if "label" in rows.column_names}
    return {
        name: {split: counted[place] for split, counted in counts.items()}
        for place, name in enumerate(answers.task.labels)
    }


def repeated_rows(task: Task, splits: Mapping[str, Dataset]) -> dict[str, int]:
    """Return how many rows of each evaluation split have the text, pair of texts or image of a training row.

    A split without such rows is left out.

    Args:
        task: the table's row.
        splits: examples by split, ``train`` among them.
    """
    inputs, compared = {}, ("digest",) if task.image else ("text", "text_pair")
    for split, rows in splits.items():
        columns = rows.select_columns([name for name in compared if name in rows.column_names])[:]
        inputs[split] = [repr(row) for row in zip(*columns.values(), strict=True)]
    trained = set(inputs.get("train", ()))
    scored = [split for split in task.evaluation if split in splits and "label" in splits[split].column_names]
    counts = {split: sum(row in trained for row in inputs[split]) for split in scored}
    return {split: count for split, count in counts.items() if count}


def load_classifier(
    answers: Answers, source: ModelSource, max_length: int
) -> tuple[Processor, PreTrainedModel, list[str]]:
    """Return the tokenizer or image processor, the model with a head for the task's answers, and its new parameters.

    Args:
        answers: the task's kind of answers, which decides the head.
        source: where the model comes from.
        max_length: tokens of the longest example.
    """
    processor = answers.processor(source)
    model, fresh = source.model(answers.auto_class, max_length, answers.head())
    if isinstance(processor, PreTrainedTokenizerBase) and (pad := padding_or_end(processor)) is not None:
        for config in (model.config, model.config.get_text_config()):  # a decoder's head reads the last other token
            config.pad_token_id = pad
    return processor, model, fresh


def tokens_for(
    reference: str, answers: Answers, model: PreTrainedModel, processor: Processor, max_length: int, split: Dataset
) -> Dataset:
    """Return a split as ``Answers.tokens`` makes it; ``PeftlabError`` where the model cannot take such inputs.

    Args:
        reference: the model's reference, for messages.
        answers: the task's kind of answers.
        model: the model that reads the tokens.
        processor: its tokenizer or image processor.
        max_length: tokens to which an example is truncated.
        split: the examples.
    """
    tokens = answers.tokens(split, processor, max_length)
    answers.check_inputs(reference, model, processor, tokens)
    return tokens


@dataclass(frozen=True)
class Evaluation:
    """Labelled splits and how a model is scored on them.

    Attributes:
        answers: the task's kind of answers.
        splits: tokenised examples by split name, the deciding split first.
        collate: rows to one batch of tensors.
        batch_size: examples per batch and process.
    """

    answers: Answers
    splits: Mapping[str, Dataset]
    collate: Callable[[Sequence[Row]], dict[str, Tensor]]
    batch_size: int

    def score(self, model: nn.Module) -> dict[str, dict[str, float]]:
        """Return the task's metrics and the mean loss of each split; the model should be in eval mode.

        Every process must call it, and each gets the same result.
        """
        return {
            split: self.answers.score(self.outputs(model, data), list(data["label"]))
            for split, data in self.splits.items()
        }

    def outputs(self, model: nn.Module, data: Dataset) -> list[Array]:
        """Return what the answer of each row of ``data`` is read from, in its own order.

        Args:
            model: the model, in eval mode.
            data: tokenised rows.
        """
        batches = eval_batches(data["length"], self.batch_size)
        found = score_batches(data, batches, self.collate, lambda batch: self.answers.outputs(model, batch))
        rows: dict[int, Array] = {}
        for batch, part in zip(batches, found, strict=True):
            rows |= zip(batch, part, strict=True)
        return [rows[place] for place in range(len(data))]


# --- The kinds of answers.
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
        """Return the attributes as JSON values, the probabilities as lists."""
        shares = None if self.probabilities is None else self.probabilities.tolist()
        return {**vars(self), "probabilities": shares}

    def columns(self) -> dict[str, Sequence[object]]:
        """Return ``prediction`` and, for each class, ``probability NAME``."""
        found: dict[str, Sequence[object]] = {"prediction": self.answers}
        if self.probabilities is not None:
            found |= {f"probability {name}": self.probabilities[:, i].tolist() for i, name in enumerate(self.classes)}
        return found


class Answers(ABC):
    """A kind of answer. This base class has the usual case: a text or a pair of texts, and one answer for it.

    Args:
        task: the table's row, with ``labels`` filled in.
    """

    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"  # of transformers, as is the pipeline
    pipeline: ClassVar[str] = "text-classification"
    problem: ClassVar[str | None] = None  # transformers' problem_type

    def __init__(self, task: Task) -> None:
        self.task = task

    def head(self) -> Attributes:
        """Return the options of ``from_pretrained`` that make the head."""
        names = self.task.labels
        options: Attributes = {"num_labels": len(names) or 1}
        if self.problem is not None:
            options["problem_type"] = self.problem
        if names:
            options["id2label"] = dict(enumerate(names))
            options["label2id"] = {name: i for i, name in enumerate(names)}
        return options

    def processor(self, source: ModelSource) -> Processor:
        """Load what makes inputs of rows: the model's tokenizer."""
        return source.tokenizer()

    def encode(self, batch: Batch, tokenizer: PreTrainedTokenizerBase, max_length: int) -> dict[str, list[object]]:
        """Tokenise a batch of rows and return its columns, as ``tokens.tokenise`` stores them.

        Args:
            batch: columns of rows, as ``Examples`` has them.
            tokenizer: the model's tokenizer.
            max_length: tokens, special ones included, to which an example is truncated.
        """
        return encode_texts(batch, tokenizer, max_length)

    def tokens(self, split: Dataset, tokenizer: Processor, max_length: int) -> Dataset:
        """Return the rows of a split as the model's inputs are made of them, with their ``length`` and ``label``.

        Args:
            split: the examples.
            tokenizer: the model's tokenizer or image processor.
            max_length: tokens to which an example is truncated.
        """
        return tokenise(split, tokenizer, max_length, self.encode)

    def check_inputs(self, reference: str, model: PreTrainedModel, tokenizer: Processor, tokens: Dataset) -> None:
        """Raise ``PeftlabError`` where the model's table of embeddings lacks a token.

        Args:
            reference: the model's reference, for the message.
            model: the model that reads the tokens.
            tokenizer: its tokenizer.
            tokens: what ``tokens`` returned.
        """
        largest = max(largest_id(tokens), padding_token(tokenizer))
        table, _ = embeddings_of(model)
        embedded = None if table is None else len(table.get_parameter("weight"))  # CANINE hashes its characters
        if embedded is not None and largest >= embedded:
            token = tokenizer.convert_ids_to_tokens(largest)
            raise PeftlabError(
                f"{reference}: its tokenizer gives {token!r} the id {largest}, and the model has embeddings of "
                f"{embedded} tokens"
            )

    @abstractmethod
    def collate(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[Row]], dict[str, Tensor]]:
        """Return the function of tokenised rows to a batch, with ``labels`` where the rows have them."""

    def logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the model's logits in fp32.

        Args:
            model: the model with the task's head.
            batch: what ``collate`` returned.
        """
        return model(**model_inputs(batch)).logits.float()

    @abstractmethod
    def loss(self, model: nn.Module, batch: dict[str, Tensor], weights: Tensor | None = None) -> Tensor:
        """Return the sum of the batch's losses, a scalar, each multiplied by the weight of its class.

        Args:
            model: the model with the task's head.
            batch: what ``collate`` returned, with ``labels``.
            weights: shape (classes,), in fp32; None: all 1.
        """

    def denominator(self, train: Dataset) -> Callable[[list[int]], float]:
        """Return the function of a global batch's indices to what the sum of its losses is divided by."""
        return len

    def outputs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Sequence[Array]:
        """Return an array for each row, its logits of shape (classes,), from which its answer is read.

        Args:
            model: the model with the task's head.
            batch: what ``collate`` returned.
        """
        return list(self.logits(model, batch).cpu().numpy())

    @abstractmethod
    def score(self, outputs: Sequence[Array], labels: Sequence[object]) -> dict[str, float]:
        """Return the task's metrics and the mean ``loss``.

        Args:
            outputs: of each row, as ``outputs`` returns them.
            labels: of each row.
        """

    @abstractmethod
    def baseline(self, train: Sequence[object], labels: Sequence[object]) -> dict[str, float]:
        """Return the metrics of always giving the most frequent answer of ``train``, for ``labels``.

        Args:
            train: labels of the training split.
            labels: labels to compare the answer with.
        """

    @abstractmethod
    def analyse(self, outputs: Sequence[Array], examples: Dataset) -> Analysis:
        """Return what the model gets right and wrong.

        Args:
            outputs: of each row, as ``outputs`` returns them.
            examples: the same rows, with their labels.
        """

    def confidence(self, outputs: Sequence[Array]) -> list[float]:
        """Return the probability of each row's answer, from 0 to 1.

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
            return torch.tensor([self.balanced_weight(n, counts, len(labels)) if n else 1.0 for n in seen])
        for name in given:
            if name not in names:
                known = ", ".join(names[:20])
                raise PeftlabError(f"train.class_weights: no class {name!r}{did_you_mean(name, names)}; one of {known}")
        return torch.tensor([given.get(name, 1.0) for name in names])

    def balanced_weight(self, count: int, counts: Counter[int], examples: int) -> float:
        """Return the ``balanced`` weight of a class that occurs ``count`` times: every class has the same share.

        Args:
            count: labels that name the class.
            counts: class index to the number of labels that name it.
            examples: number of training examples.
        """
        return counts.total() / (len(self.task.labels) * count)

    def shown(self, row: Row, label: object, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
        """Return a tokenised row as text parts, each with whether it is a label that the model learns.

        Args:
            row: a tokenised row.
            label: its label; None where it has none.
            tokenizer: the one that made the tokens.
        """
        text = str(tokenizer.decode(typed_value(row, "input_ids", list, "an example")))
        return [(text, False), *([] if label is None else [(self.label_name(label), True)])]

    def label_name(self, label: object) -> str:
        """Return a label as text."""
        return self.task.labels[int(str(label))] if self.task.labels else str(label)

    def read(self, table: Table, names: Sequence[str], data: DataConfig) -> list[object]:
        """Return the inputs of a file's rows, as ``rows`` takes them; a row without inputs is an error.

        Args:
            table: the file.
            names: the text columns, if any were named.
            data: the recipe's data section.
        """
        if not 1 <= len(names) <= 2:
            raise PeftlabError(f"a row has one text column or two, not {len(names) or 'none'}; name them by --text")
        columns = [table.column(name, "a text") for name in names]
        faults: list[Fault] = []
        for name, column in zip(names, columns, strict=True):
            absent = {row for row, value in enumerate(column) if is_missing(value)}
            bad = [i for i, v in enumerate(column) if i not in absent and not (isinstance(v, str) and is_unicode(v))]
            faults += table.fault(name, ABSENT, sorted(absent))
            faults += table.fault(name, "is not a text", bad)
        refuse_faulty_rows(faults)
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


class OneClass(Answers):
    """Answers with the class of the largest logit; the loss is cross-entropy."""

    problem = "single_label_classification"

    def collate(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[Row]], dict[str, Tensor]]:
        """Return ``Collate`` with class indices."""
        return Collate(tokenizer, regression=False)

    def loss(self, model: nn.Module, batch: dict[str, Tensor], weights: Tensor | None = None) -> Tensor:
        """Return the sum of the cross-entropies."""
        logits = self.logits(model, batch)
        weights = None if weights is None else weights.to(logits.device)
        return F.cross_entropy(logits, batch["labels"], weights, reduction="none").sum()

    def score(self, outputs: Sequence[Array], labels: Sequence[object]) -> dict[str, float]:
        """Return the task's metrics and the mean cross-entropy."""
        logits, truth = np.stack(outputs), np.asarray(labels)
        loss = F.cross_entropy(torch.from_numpy(logits), torch.from_numpy(truth)).item()
        return compute_metrics(self.task, logits.argmax(-1), truth) | {"loss": loss}

    def baseline(self, train: Sequence[object], labels: Sequence[object]) -> dict[str, float]:
        """Return the metrics of the majority class."""
        return majority_baseline(self.task, np.asarray(train), np.asarray(labels))

    def analyse(self, outputs: Sequence[Array], examples: Dataset) -> Analysis:
        """Return scores by class, the confusion matrix and the hardest examples."""
        return analyse(self.task.labels, np.stack(outputs), examples)

    def confidence(self, outputs: Sequence[Array]) -> list[float]:
        """Return the probability of the most probable class."""
        return softmax(np.stack(outputs)).max(-1).tolist()

    def predictions(self, outputs: Sequence[Array]) -> Predictions:
        """Return class names, and the probability of every class."""
        logits = np.stack(outputs)
        return Predictions([self.task.labels[i] for i in logits.argmax(-1)], self.task.labels, softmax(logits))


class Number(Answers):
    """Answers with the model's one logit as a number; the loss is the squared error."""

    problem = "regression"

    def collate(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[Row]], dict[str, Tensor]]:
        """Return ``Collate`` with numbers."""
        return Collate(tokenizer, regression=True)

    def logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the numbers, [rows]."""
        return super().logits(model, batch).squeeze(-1)

    def loss(self, model: nn.Module, batch: dict[str, Tensor], weights: Tensor | None = None) -> Tensor:
        """Return the sum of the squared errors."""
        return F.mse_loss(self.logits(model, batch), batch["labels"], reduction="none").sum()

    def score(self, outputs: Sequence[Array], labels: Sequence[object]) -> dict[str, float]:
        """Return the task's metrics and the mean squared error."""
        numbers, truth = np.stack(outputs), np.asarray(labels, np.float64)
        return compute_metrics(self.task, numbers, truth) | {"loss": float(np.mean((numbers - truth) ** 2))}

    def baseline(self, train: Sequence[object], labels: Sequence[object]) -> dict[str, float]:
        """Return the metrics of always answering the training labels' mean."""
        return majority_baseline(self.task, np.asarray(train, np.float64), np.asarray(labels, np.float64))

    def analyse(self, outputs: Sequence[Array], examples: Dataset) -> Analysis:
        """Return points for a scatter plot and the hardest examples."""
        return analyse((), np.stack(outputs), examples)

    def predictions(self, outputs: Sequence[Array]) -> Predictions:
        """Return the numbers."""
        return Predictions([float(value) for value in outputs])

    def count(self, labels: Sequence[object]) -> Counter[int]:
        """Return an empty count: there are no classes."""
        return Counter()


Sets = Sequence[Sequence[int]]


class ManyClasses(Answers):
    """Answers with every class whose probability, the sigmoid of its logit, is 0.5 or more.

    The loss of an example is the mean over the classes of the binary cross-entropy. A class weight multiplies the loss
    of the examples that have the class (``pos_weight``); ``balanced`` is the others divided by them.
    """

    problem = "multi_label_classification"

    def collate(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[Row]], dict[str, Tensor]]:
        """Return ``Collate`` with a row of 0 and 1 for each example."""
        pad = Collate(tokenizer, regression=False)

        def collate(rows: Sequence[Row]) -> dict[str, Tensor]:
            batch = pad.padded(rows)
            if "label" in rows[0]:
                batch["labels"] = torch.from_numpy(self._matrix([row["label"] for row in rows])).float()
            return batch

        return collate

    def loss(self, model: nn.Module, batch: dict[str, Tensor], weights: Tensor | None = None) -> Tensor:
        """Return the sum of the examples' mean binary cross-entropies."""
        logits = self.logits(model, batch)
        weights = None if weights is None else weights.to(logits.device)
        losses = F.binary_cross_entropy_with_logits(logits, batch["labels"], pos_weight=weights, reduction="none")
        return losses.mean(-1).sum()

    def score(self, outputs: Sequence[Array], labels: Sequence[object]) -> dict[str, float]:
        """Return F1 over all decisions (micro) and averaged over all classes (macro), exact matches, and the loss."""
        logits, truth = np.stack(outputs), self._matrix(labels)
        return _metrics(logits >= 0, truth) | {"loss": float(_binary_losses(logits, truth).mean())}

    def baseline(self, train: Sequence[object], labels: Sequence[object]) -> dict[str, float]:
        """Return the metrics of the most frequent set of classes (the first in order where equal)."""
        counts = Counter(tuple(each) for each in _sets(train))
        answer = min(counts, key=lambda each: (-counts[each], each))
        return _metrics(self._matrix([answer] * len(labels)), self._matrix(labels))

    def analyse(self, outputs: Sequence[Array], examples: Dataset) -> Analysis:
        """Return the scores of each class and the hardest examples."""
        logits, truth = np.stack(outputs), self._matrix(examples["label"])
        predicted, losses = logits >= 0, _binary_losses(logits, truth)
        counts = zip((predicted & truth).sum(0), predicted.sum(0), truth.sum(0), strict=True)
        scores = [class_scores(int(hits), int(of_predicted), int(of_true)) for hits, of_predicted, of_true in counts]

        def names(row: int) -> tuple[str, str, None]:
            return self.label_name(np.flatnonzero(truth[row])), self.label_name(np.flatnonzero(predicted[row])), None

        by_class = dict(zip(self.task.labels, scores, strict=True))
        return Analysis(by_class=by_class, hardest=hardest_examples(examples, losses, names))

    def confidence(self, outputs: Sequence[Array]) -> list[float]:
        """Return the mean over the classes of the probability of the decision, present or absent."""
        return np.exp(-np.logaddexp(0, -np.abs(np.stack(outputs).astype(np.float64)))).mean(-1).tolist()

    def predictions(self, outputs: Sequence[Array]) -> Predictions:
        """Return lists of class names, and each class's own probability."""
        logits = np.stack(outputs).astype(np.float64)
        answers = [[name for name, yes in zip(self.task.labels, row, strict=True) if yes] for row in logits >= 0]
        return Predictions(answers, self.task.labels, np.exp(-np.logaddexp(0, -logits)))

    def count(self, labels: Sequence[object]) -> Counter[int]:
        """Return the number of examples that have each class."""
        return Counter(chain.from_iterable(_sets(labels)))

    def balanced_weight(self, count: int, counts: Counter[int], examples: int) -> float:
        """Return the number of examples without the class, divided by those with it."""
        return (examples - count) / count

    def label_name(self, label: object) -> str:
        """Return the names of a set of classes."""
        return ", ".join(self.task.labels[i] for i in _sets([label])[0]) or "none"

    def _matrix(self, labels: Sequence[object]) -> NDArray[np.bool_]:
        """Return which of the classes each example has: [examples, classes]."""
        found = np.zeros((len(labels), len(self.task.labels)), np.bool_)
        for row, places in enumerate(_sets(labels)):
            found[row, list(places)] = True
        return found


def _sets(labels: Sequence[object]) -> Sets:
    return cast(Sets, labels)


def _binary_losses(logits: Array, truth: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return each example's mean binary cross-entropy."""
    wide = logits.astype(np.float64)
    return np.logaddexp(0, np.where(truth, -wide, wide)).mean(-1)


def _metrics(predicted: NDArray[np.bool_], truth: NDArray[np.bool_]) -> dict[str, float]:
    """Return the metrics of decisions [examples, classes]; a class that is neither predicted nor true scores 0."""
    hits, either = (predicted & truth).sum(0), predicted.sum(0) + truth.sum(0)
    return {
        "micro_f1": float(2 * hits.sum() / max(1, either.sum())),
        "macro_f1": float((2 * hits / np.maximum(1, either)).mean()),
        "subset_accuracy": float((predicted == truth).all(-1).mean()),
    }


class OneChoice(Answers):
    """Answers with the choice of the largest logit; the loss is cross-entropy over a row's choices."""

    auto_class = "AutoModelForMultipleChoice"
    pipeline = "multiple-choice"

    def encode(self, batch: Batch, tokenizer: PreTrainedTokenizerBase, max_length: int) -> dict[str, list[object]]:
        """Return a list of tokens for each choice, as a pair with the text before it if there is any.

        ``tokens`` counts those of all choices of a row, ``length`` those with each choice padded to the longest.
        """
        choices = cast(list[list[str]], batch["text_pair"])
        ends = list(accumulate(map(len, choices), initial=0))
        before = [text for text, row in zip(batch["text"], choices, strict=True) for _ in row]
        after = [choice for row in choices for choice in row]
        texts = (before, after) if any(before) else (after,)
        tokens = tokenizer(*texts, truncation="longest_first", max_length=max_length, return_attention_mask=False)
        whole = whole_lengths(tokens, tokenizer, max_length, *texts)
        columns = {name: [values[a:b] for a, b in pairwise(ends)] for name, values in {**tokens, WHOLE: whole}.items()}
        counts = [[len(choice) for choice in row] for row in columns["input_ids"]]
        lengths = [len(row) * max(row) for row in counts]
        longest = [max(row) for row in columns[WHOLE]]
        return {**columns, "tokens": [*map(sum, counts)], "length": lengths, WHOLE: longest}

    def head(self) -> Attributes:
        """Return no options: the head gives one logit for each choice."""
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
        return _accuracy(answers, _places(labels)) | {"loss": float(np.mean(_choice_losses(outputs, _places(labels))))}

    def baseline(self, train: Sequence[object], labels: Sequence[object]) -> dict[str, float]:
        """Return the accuracy of always choosing the most frequent place (the first where equal)."""
        counts = Counter(_places(train))
        answer = min(counts, key=lambda place: (-counts[place], place))
        return _accuracy([answer] * len(labels), _places(labels))

    def analyse(self, outputs: Sequence[Array], examples: Dataset) -> Analysis:
        """Return scores and confusion by the place of the choice, and the hardest examples."""
        truth, answers = _places(examples["label"]), [int(each.argmax()) for each in outputs]
        losses = np.array(_choice_losses(outputs, truth))
        confusion = confusion_of(max(map(len, outputs)), truth, answers)

        def describe(row: int) -> tuple[str, str, float]:
            choices = examples[row]["text_pair"]
            return choices[truth[row]], choices[answers[row]], float(np.exp(-losses[row]))

        names = [str(place) for place in range(len(confusion))]
        hardest = hardest_examples(examples, losses, describe)
        return Analysis(scores_by_class(names, confusion), confusion.tolist(), hardest=hardest)

    def confidence(self, outputs: Sequence[Array]) -> list[float]:
        """Return the probability of the chosen choice."""
        return [float(softmax(each).max()) for each in outputs]

    def predictions(self, outputs: Sequence[Array]) -> Predictions:
        """Return the places of the choices, from 0, and each place's probability: 0 where a row has no such choice."""
        most = max(map(len, outputs))
        probabilities = np.zeros((len(outputs), most))
        for row, each in enumerate(outputs):
            probabilities[row, : len(each)] = softmax(each)
        answers = [int(each.argmax()) for each in outputs]
        return Predictions(answers, tuple(str(place) for place in range(most)), probabilities)

    def count(self, labels: Sequence[object]) -> Counter[int]:
        """Return an empty count: rows share no classes."""
        return Counter()

    def shown(self, row: Row, label: object, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
        """Return a line for each choice; the model learns the right one."""
        lines = [str(tokenizer.decode(ids)) for ids in _lists(row["input_ids"])]
        return [(f"\n{line}", place == label) for place, line in enumerate(lines)]

    def read(self, table: Table, names: Sequence[str], data: DataConfig) -> list[object]:
        """Return the text before the choices and the choices of a file's rows."""
        faults: list[Fault] = []
        choices = row_choices(table, data.choices, faults)
        columns = choice_columns(data.model_copy(update={"text": list(names) or None}), table.columns).inputs
        before = context_texts(table, [name for name, key in columns.items() if key == "data.text"], faults)
        refuse(faults)
        bad = [row for row, each in enumerate(choices) if len(each) < MIN_CHOICES]
        refuse(table.fault((data.choices or ["choices"])[0], "has fewer than two choices", bad))
        return list(zip(before, choices, strict=True))

    def rows(self, given: Sequence[object]) -> Examples:
        """Return rows, each a text (perhaps empty) and a list of choices, as a split without labels."""
        texts, choices = [], []
        for number, row in enumerate(given):
            text, found = row if isinstance(row, list | tuple) and len(row) == 2 else (None, None)
            found = items(found)
            if not isinstance(text, str) or found is None or len(found) < MIN_CHOICES:
                raise PeftlabError(f"row {number}: is no pair of a text and a list of two choices or more")
            texts.append(text)
            choices.append(found)
        return Examples(texts, choices, None)


def _lists(value: object) -> list[list[int]]:
    return cast(list[list[int]], value)


def _places(labels: Sequence[object]) -> list[int]:
    return [int(str(label)) for label in labels]


def _choice_losses(outputs: Sequence[Array], places: Sequence[int]) -> list[float]:
    tiny = np.finfo(np.float64).tiny
    pairs = zip(outputs, places, strict=True)
    return [float(-np.log(np.maximum(softmax(each)[place], tiny))) for each, place in pairs]


def _accuracy(answers: Sequence[int], truth: Sequence[int]) -> dict[str, float]:
    return {"accuracy": float(np.mean([a == b for a, b in zip(answers, truth, strict=True)]))}


Tags = Sequence[Sequence[int]]
_NO_TOKEN, _NO_WORD = -1, -2  # in ``first``: a word that was cut off or has no token; padding
_IGNORED = -100


def _first_tokens(words: list[str], text: str, offsets: Sequence[tuple[int, int]]) -> list[int]:
    """Return the place of each word's first token; ``offsets`` are the characters of ``text`` that each token has."""
    starts = [0, *accumulate(len(word) + 1 for word in words[:-1])]
    found = [_NO_TOKEN] * len(words)
    for place, (begin, end) in enumerate(offsets):
        begin += len(text[begin:end]) - len(text[begin:end].lstrip())  # some tokens include the blank before a word
        if begin < end:
            word = bisect_right(starts, begin) - 1
            found[word] = place if found[word] == _NO_TOKEN else found[word]
    return found


class WordTags(Answers):
    """Tags each word by the logits at its first token; the loss is cross-entropy, divided by the words of a batch.

    Words without a token are answered ``O`` (the first tag, where there is none) and count in every score.
    """

    auto_class = "AutoModelForTokenClassification"
    pipeline = "token-classification"

    def encode(self, batch: Batch, tokenizer: PreTrainedTokenizerBase, max_length: int) -> dict[str, list[object]]:
        """Return the tokens of sentences, their words joined by blanks, and ``first``: each word's first token.

        A word that was cut off at ``max_length``, or of which the tokenizer makes no token, has -1.
        """
        if not tokenizer.is_fast:
            raise PeftlabError(
                f"text/tokens: {type(tokenizer).__name__} does not say which token belongs to which word"
            )
        sentences = cast(list[list[str]], batch["text"])
        texts = [" ".join(words) for words in sentences]
        tokens = tokenizer(
            texts, truncation=True, max_length=max_length, return_attention_mask=False, return_offsets_mapping=True
        )
        offsets = tokens.pop("offset_mapping")
        first = [_first_tokens(*row) for row in zip(sentences, texts, offsets, strict=True)]
        whole = whole_lengths(tokens, tokenizer, max_length, texts)
        return {**tokens, "length": [len(ids) for ids in tokens["input_ids"]], WHOLE: whole, "first": first}

    def collate(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[Row]], dict[str, Tensor]]:
        """Return ``Collate`` with ``first`` and ``labels`` of shape [rows, words]."""
        pad = Collate(tokenizer, regression=False)

        def collate(rows: Sequence[Row]) -> dict[str, Tensor]:
            batch = pad.padded(rows)
            longest = batch["input_ids"].shape[1]
            shifts = [longest - len(_ints(row["input_ids"])) if pad.left else 0 for row in rows]
            firsts = [
                [place + shift if place >= 0 else place for place in _ints(row["first"])]
                for row, shift in zip(rows, shifts, strict=True)
            ]
            batch["first"] = _padded(firsts, _NO_WORD)
            if "label" in rows[0]:
                batch["labels"] = _padded([_ints(row["label"]) for row in rows], _IGNORED)
                batch["labels"][batch["first"] < 0] = _IGNORED
            return batch

        return collate

    def logits(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits at the words' first tokens: [rows, words, tags]."""
        found = super().logits(model, batch)
        places = batch["first"].clamp(min=0).unsqueeze(-1).expand(-1, -1, found.shape[-1])
        return found.gather(1, places)

    def loss(self, model: nn.Module, batch: dict[str, Tensor], weights: Tensor | None = None) -> Tensor:
        """Return the sum of the words' cross-entropies."""
        logits = self.logits(model, batch).flatten(0, 1)
        weights = None if weights is None else weights.to(logits.device)
        return F.cross_entropy(logits, batch["labels"].flatten(), weights, ignore_index=_IGNORED, reduction="sum")

    def denominator(self, train: Dataset) -> Callable[[list[int]], float]:
        """Return the function of a global batch's indices to its number of words that have a token."""
        counts = [sum(place >= 0 for place in first) for first in train["first"]]
        return lambda batch: float(max(1, sum(counts[i] for i in batch)))

    def outputs(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Sequence[Array]:
        """Return each sentence's logits, [words, tags]; NaN for a word without a token."""
        logits = self.logits(model, batch).masked_fill((batch["first"] < 0).unsqueeze(-1), float("nan"))
        words = (batch["first"] > _NO_WORD).sum(-1).tolist()
        return [row[:n] for row, n in zip(logits.cpu().numpy(), words, strict=True)]

    def score(self, outputs: Sequence[Array], labels: Sequence[object]) -> dict[str, float]:
        """Return the metrics of entities, the words' accuracy, and their mean loss."""
        losses = np.concatenate(self._losses(outputs, labels))
        metrics = self._metrics([self._tags(each) for each in outputs], _tags(labels))
        return metrics | {"loss": float(np.nanmean(losses))}

    def baseline(self, train: Sequence[object], labels: Sequence[object]) -> dict[str, float]:
        """Return the metrics of the most frequent tag (the lower index where equal) for every word."""
        counts = self.count(train)
        answer = min(counts, key=lambda tag: (-counts[tag], tag))
        return self._metrics([[answer] * len(tags) for tags in _tags(labels)], _tags(labels))

    def analyse(self, outputs: Sequence[Array], examples: Dataset) -> Analysis:
        """Return the scores of each type of entity, and the sentences with the largest mean loss.

        Tags that are not of entities have scores each, and a confusion matrix of words.
        """
        answers, truth = [self._tags(each) for each in outputs], _tags(examples["label"])
        by_word = self._losses(outputs, truth)
        losses = np.array([float(np.nanmean(each)) if np.isfinite(each).any() else 0.0 for each in by_word])
        hardest = hardest_examples(
            examples, losses, lambda row: (self.label_name(truth[row]), self.label_name(answers[row]), None)
        )
        if is_entity_scheme(self.task.labels):
            return Analysis(by_class=self._by_type(answers, truth), hardest=hardest)
        confusion = confusion_of(len(self.task.labels), *(list(chain.from_iterable(each)) for each in (truth, answers)))
        return Analysis(scores_by_class(self.task.labels, confusion), confusion.tolist(), hardest=hardest)

    def confidence(self, outputs: Sequence[Array]) -> list[float]:
        """Return the mean over the words that have a token of the probability of the tag; 1 for a sentence without."""
        known = [each[np.isfinite(each).all(-1)] for each in outputs]
        return [float(softmax(each).max(-1).mean()) if len(each) else 1.0 for each in known]

    def predictions(self, outputs: Sequence[Array]) -> Predictions:
        """Return the tags of each sentence's words."""
        return Predictions([[self.task.labels[tag] for tag in self._tags(each)] for each in outputs])

    def count(self, labels: Sequence[object]) -> Counter[int]:
        """Return the number of words that have each tag."""
        return Counter(chain.from_iterable(_tags(labels)))

    def label_name(self, label: object) -> str:
        """Return a sentence's tags."""
        return " ".join(self.task.labels[tag] for tag in _ints(label))

    def shown(self, row: Row, label: object, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
        """Return a sentence with each word's tag after the word's first token."""
        ids, tags = _ints(row["input_ids"]), {} if label is None else dict(enumerate(_ints(label)))
        ends = [(place + 1, tags.get(word)) for word, place in enumerate(_ints(row["first"])) if place >= 0]
        parts, begin = [], 0
        for end, tag in ends:
            parts.append((str(tokenizer.decode(ids[begin:end])), False))
            parts += [] if tag is None else [(f" {self.task.labels[tag]} ", True)]
            begin = end
        return [*parts, (str(tokenizer.decode(ids[begin:])), False)]

    def read(self, table: Table, names: Sequence[str], data: DataConfig) -> list[object]:
        """Return the words of a file's rows."""
        column = (names or ["tokens"])[0]
        found = [items(value) for value in table.column(column, "the words")]
        refuse(table.fault(column, "is no list of words", [row for row, words in enumerate(found) if not words]))
        return list(found)

    def rows(self, given: Sequence[object]) -> Examples:
        """Return sentences, each a list of words or a text that is split at blanks, as a split without labels."""
        found = [items(row) or [] for row in given]
        if not all(found):
            raise PeftlabError(f"row {found.index([])}: is no list of words")
        return Examples(found, None, None)

    def _tags(self, logits: Array) -> list[int]:
        """Return the words' most likely tags."""
        outside = self.task.labels.index(NO_ENTITY) if NO_ENTITY in self.task.labels else 0
        known = np.isfinite(logits).all(-1)
        return np.where(known, np.nan_to_num(logits).argmax(-1), outside).tolist()

    def _losses(self, outputs: Sequence[Array], labels: Sequence[object]) -> list[NDArray[np.float64]]:
        """Return the cross-entropy of each sentence's words; NaN for words without a token."""
        tiny = np.finfo(np.float64).tiny
        pairs = zip(outputs, _tags(labels), strict=True)
        return [-np.log(np.maximum(softmax(logits)[np.arange(len(tags)), tags], tiny)) for logits, tags in pairs]

    def _metrics(self, answers: Tags, truth: Tags) -> dict[str, float]:
        right = sum(a == b for pair in zip(answers, truth, strict=True) for a, b in zip(*pair, strict=True))
        accuracy = right / max(1, sum(map(len, truth)))
        if self.task.metrics == ("accuracy",):
            return {"accuracy": accuracy}
        scores = list(self._by_type(answers, truth, together=True).values())
        one = scores[0] if scores else ClassScores(0.0, 0.0, 0.0, 0)
        return {
            "entity_f1": one.f1,
            "entity_precision": one.precision,
            "entity_recall": one.recall,
            "accuracy": accuracy,
        }

    def _by_type(self, answers: Tags, truth: Tags, *, together: bool = False) -> dict[str, ClassScores]:
        """Return the scores of the entities by their type, or of all ``together``."""
        said, true, hits = (Counter[str]() for _ in range(3))
        for pair in zip(answers, truth, strict=True):
            found, wanted = (set(entities([self.task.labels[tag] for tag in tags])) for tags in pair)
            for counts, those in ((said, found), (true, wanted), (hits, found & wanted)):
                counts.update("" if together else kind for kind, _, _ in those)
        return {kind: class_scores(hits[kind], said[kind], true[kind]) for kind in sorted({*said, *true})}


def _ints(value: object) -> list[int]:
    return cast(list[int], value)


def _tags(labels: Sequence[object]) -> Tags:
    return cast(Tags, labels)


def _padded(rows: Sequence[list[int]], fill: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows], dtype=torch.int64)
