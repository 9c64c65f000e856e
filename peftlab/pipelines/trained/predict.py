"""What a trained model says of rows without labels: classes with probabilities, or numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from datasets import Dataset
from numpy.typing import NDArray
from torch import Tensor

from peftlab.checkpoints.adapter import load_adapter
from peftlab.errors import PeftlabError
from peftlab.methods.modes import eval_mode
from peftlab.pipelines.finetune import model_source
from peftlab.pipelines.trained.finding import Trained, find_trained, refuse_untrained
from peftlab.tasks.labelled.analysis import softmax
from peftlab.tasks.labelled.labelled_task import load_classifier, tokens_for
from peftlab.tasks.labelled.scoring import Evaluation
from peftlab.tasks.table import Task, find_task
from peftlab.tasks.tokens import Collate, Row
from peftlab.training.distributed import accelerator_on

Texts = Sequence[str] | Sequence[tuple[str, str]]
"""Single texts, or pairs for a task of pairs."""


@dataclass(frozen=True)
class Predictions:
    """Answers in the order of the rows.

    Attributes:
        answers: class names; numbers for regression.
        classes: all class names, in label order; empty for regression.
        probabilities: [rows, classes]; None for regression.
    """

    answers: list[str] | list[float]
    classes: tuple[str, ...]
    probabilities: NDArray[np.float64] | None

    def as_json(self) -> dict[str, object]:
        """Return the attributes, the probabilities as lists."""
        shares = None if self.probabilities is None else self.probabilities.tolist()
        return {**vars(self), "probabilities": shares}

    def columns(self) -> dict[str, list[str] | list[float]]:
        """Return ``prediction`` and, for each class, ``probability NAME``."""
        found: dict[str, list[str] | list[float]] = {"prediction": self.answers}
        if self.probabilities is not None:
            found |= {f"probability {name}": self.probabilities[:, i].tolist() for i, name in enumerate(self.classes)}
        return found


def predict(
    reference: str | Path,
    texts: Texts,
    recipe_name: str | Path | None = None,
    overrides: Iterable[str] = (),
    *,
    device: str = "auto",
    on_rows: Callable[[int], None] | None = None,
) -> Predictions:
    """Return what the model that ``reference`` names says of ``texts``.

    Args:
        reference: a run, an adapter or a model, as ``peftlab.evaluate`` takes it.
        texts: texts, or pairs where the task has pairs; longer ones than ``train.max_length`` tokens are truncated.
        recipe_name: the recipe that names the task; default: ``recipe.yaml`` in that directory or above it.
        overrides: as for ``peftlab run``: ``train.eval_batch_size``, ``train.max_length``.
        device: as for ``peftlab.run``.
        on_rows: called with the number of rows of each batch as it begins.

    Raises:
        PeftlabError: no recipe is found, its task has no labels, there is no such model or one that is not trained,
            or a text is empty or not of the task's shape.
    """
    accelerator = accelerator_on(device)
    trained = find_trained(reference, recipe_name, overrides)
    task, settings = _task(trained), trained.recipe.train
    examples = _examples(task, texts)
    tokenizer, model, fresh = load_classifier(task, model_source(trained.loaded), settings.max_length)
    if trained.adapter is None:
        refuse_untrained(trained.loaded.model, fresh)
    else:
        load_adapter(model, trained.adapter)
    collate = Collate(tokenizer, task.regression)
    pad = collate.fill["input_ids"]
    tokens = tokens_for(str(reference), model, tokenizer, pad, settings.max_length, examples)

    def counted(rows: Sequence[Row]) -> dict[str, Tensor]:
        if on_rows is not None:
            on_rows(len(rows))
        return collate(rows)

    evaluation = Evaluation(task, {}, counted, settings.eval_batch_size)
    prepared = accelerator.prepare(model)
    with eval_mode(prepared):
        found = evaluation.predict(prepared, tokens)
    if task.regression:
        return Predictions([float(value) for value in found], (), None)
    probabilities = softmax(found)
    answers = [task.labels[i] for i in found.argmax(-1)]
    return Predictions(answers, task.labels, probabilities)


def _task(trained: Trained) -> Task:
    """Return the row of the table with the trained model's class names."""
    task, classes = find_task(trained.recipe.task), trained.class_names()
    if not task.labelled:
        raise PeftlabError(f"task {task.name} has no labels to predict; peftlab generate --target writes text")
    if classes is None:
        if not task.labels and not task.regression:
            raise PeftlabError(f"{trained.place}: does not say what its classes are called")
        return task
    return replace(task, labels=classes)


def _examples(task: Task, texts: Texts) -> Dataset:
    """Return the texts as a split without labels."""
    if len(texts) == 0:
        raise PeftlabError("no rows to predict")
    pairs = [text for text in texts if not isinstance(text, str)]
    if pairs and len(pairs) != len(texts):
        raise PeftlabError("texts: single texts and pairs are mixed")
    if task.glue and bool(pairs) != (len(task.text) == 2):
        raise PeftlabError(f"task {task.name} takes {'pairs of texts' if len(task.text) == 2 else 'single texts'}")
    names = ("text", "text_pair") if pairs else ("text",)
    columns = list(zip(*texts, strict=True)) if pairs else [texts]
    return Dataset.from_dict({name: list(column) for name, column in zip(names, columns, strict=True)})
