"""Classification and regression: a model with a task head, trained on texts with labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftlab.errors import PeftlabError
from peftlab.tasks.config import DataConfig
from peftlab.tasks.labelled.analysis import Analysis, analyse
from peftlab.tasks.labelled.data import load_task_data
from peftlab.tasks.labelled.metrics import majority_baseline
from peftlab.tasks.labelled.scoring import Evaluation, summed_loss
from peftlab.tasks.prepared import ModelSource, Prepared
from peftlab.tasks.table import Task
from peftlab.tasks.tokens import Collate, largest_id, tokenise
from peftlab.untyped import Attributes


def prepare(
    task: Task,
    data: DataConfig,
    source: ModelSource,
    *,
    max_length: int,
    batch_size: int,
    classes: Sequence[str] | None = None,
) -> Prepared:
    """Return a task with labels and its model: the data first, as it is cheap to read and most often wrong.

    Args:
        max_length: tokens an example is truncated to. batch_size: examples per evaluation batch and process.
        classes: a trained model's class names in label order; None: those of task and data.

    Raises:
        PeftlabError: anything wrong with data or model, or no labelled split to evaluate on.
    """
    loaded = load_task_data(task.name, data, classes)
    task, splits = loaded.task, loaded.splits
    tokenizer, model, fresh = load_classifier(task, source, max_length)
    evaluated = [split for split in task.evaluation if split in splits]
    if not evaluated:
        raise PeftlabError(
            f"task {task.name}: no labelled split to evaluate on; there is {', '.join(splits) or 'none'}"
        )
    collate = Collate(tokenizer, task.regression)
    tokens = partial(tokens_for, source.reference, model, tokenizer, collate.fill["input_ids"], max_length)
    held_out = {split: tokens(splits[split]) for split in evaluated}
    train: Callable[[], Dataset] | None = None
    baseline = None
    if "train" in splits:
        train = partial(tokens, splits["train"])
        baseline = majority_baseline(task, splits["train"]["label"], splits[evaluated[0]]["label"])
    evaluation = Evaluation(task, held_out, collate, batch_size)

    def taken_apart(model: nn.Module) -> Analysis:
        return analyse(task.labels, evaluation.predict(model, held_out[evaluated[0]]), splits[evaluated[0]])

    return Prepared(
        task=task,
        tokenizer=tokenizer,
        model=model,
        fresh=fresh,
        train=train,
        held_out=held_out,
        collate=collate,
        loss=partial(summed_loss, regression=task.regression),
        denominator=lambda _: len,
        score=evaluation.score,
        deciding=task.metrics[0],
        baseline=baseline,
        classes=loaded.class_counts(),
        left_out=loaded.left_out,
        fingerprint=loaded.fingerprint,
        analyse=taken_apart,
    )


def load_classifier(
    task: Task, source: ModelSource, max_length: int
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel, list[str]]:
    """Return the tokenizer, the model with a head for the task's labels, and its freshly initialised parameters."""
    tokenizer = source.tokenizer()
    options: Attributes = {
        "num_labels": len(task.labels) or 1,
        "problem_type": "regression" if task.regression else "single_label_classification",
    }
    if task.labels:
        options["id2label"] = dict(enumerate(task.labels))
        options["label2id"] = {name: i for i, name in enumerate(task.labels)}
    model, fresh = source.model("AutoModelForSequenceClassification", max_length, options)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id
    return tokenizer, model, fresh


def tokens_for(
    reference: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pad: int,
    max_length: int,
    split: Dataset,
) -> Dataset:
    """Return a split, tokenised; ``PeftlabError`` where the model has no embedding of a token."""
    tokens = tokenise(split, tokenizer, max_length)
    largest, embedded = max(largest_id(tokens), pad), len(model.get_input_embeddings().get_parameter("weight"))
    if largest >= embedded:
        token = tokenizer.convert_ids_to_tokens(largest)
        raise PeftlabError(
            f"{reference}: its tokenizer gives {token!r} the id {largest}, and the model has embeddings of "
            f"{embedded} tokens"
        )
    return tokens
