"""Labelled tasks: a model with a task head, trained on texts with labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftlab.errors import PeftlabError
from peftlab.models.architectures import embeddings_of
from peftlab.registry import resolve
from peftlab.tasks.answers import Answers, Array
from peftlab.tasks.batches import eval_batches
from peftlab.tasks.config import DataConfig
from peftlab.tasks.labelled_rows import load_task_data
from peftlab.tasks.problem import Loss, ModelSource, TaskOptions, TaskProblem, mean_loss, score_batches
from peftlab.tasks.table import Task
from peftlab.tasks.tokens import Row, largest_id, padding_token, tokenise


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
    tokenizer, model, fresh = load_classifier(answers, source, options.max_length)
    evaluated = [split for split in task.evaluation if split in splits]
    if not evaluated:
        there = ", ".join(splits) or "none"
        raise PeftlabError(f"task {task.name}: no labelled split to evaluate on; there is {there}")
    first = evaluated[0]
    tokens = partial(tokens_for, source.reference, answers, model, tokenizer, options.max_length)
    held_out = {split: tokens(splits[split]) for split in evaluated}
    train = tokens(splits["train"]) if options.train and "train" in splits else Dataset.from_dict({})
    labels = list(splits["train"]["label"]) if "train" in splits else None
    evaluation = Evaluation(answers, held_out, answers.collate(tokenizer), options.batch_size)
    loss: Loss = answers.loss
    if options.class_weights is not None and labels is not None:
        loss = partial(answers.loss, weights=answers.weights(options.class_weights, labels))
    return TaskProblem(
        task=task,
        tokenizer=tokenizer,
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
    """Return how many rows of each evaluation split have the text, or the pair of texts, of a training row.

    A split without such rows is left out.

    Args:
        task: the table's row.
        splits: examples by split, ``train`` among them.
    """
    inputs = {}
    for split, rows in splits.items():
        columns = rows.select_columns([name for name in ("text", "text_pair") if name in rows.column_names])[:]
        inputs[split] = [repr(row) for row in zip(*columns.values(), strict=True)]
    trained = set(inputs.get("train", ()))
    counts = {split: sum(row in trained for row in inputs.get(split, ())) for split in task.evaluation}
    return {split: count for split, count in counts.items() if count}


def load_classifier(
    answers: Answers, source: ModelSource, max_length: int
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel, list[str]]:
    """Return the tokenizer, the model with a head for the task's answers, and its freshly initialised parameters.

    Args:
        answers: the task's kind of answers, which decides the head.
        source: where the model comes from.
        max_length: tokens of the longest example.
    """
    tokenizer = source.tokenizer()
    model, fresh = source.model(answers.auto_class, max_length, answers.head())
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id
    return tokenizer, model, fresh


def tokens_for(
    reference: str,
    answers: Answers,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    split: Dataset,
) -> Dataset:
    """Return a split, tokenised; ``PeftlabError`` where the model's table of embeddings lacks a token.

    Args:
        reference: the model's reference, for messages.
        answers: the task's kind of answers.
        model: the model that reads the tokens.
        tokenizer: its tokenizer.
        max_length: tokens to which an example is truncated.
        split: the examples.
    """
    tokens = tokenise(split, tokenizer, max_length, answers.encode)
    largest = max(largest_id(tokens), padding_token(tokenizer))
    table, _ = embeddings_of(model)
    embedded = None if table is None else len(table.get_parameter("weight"))  # CANINE hashes its characters
    if embedded is not None and largest >= embedded:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise PeftlabError(
            f"{reference}: its tokenizer gives {token!r} the id {largest}, and the model has embeddings of "
            f"{embedded} tokens"
        )
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
