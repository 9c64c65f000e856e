"""What a trained model says of rows without labels: classes with probabilities, numbers, tags of words, choices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from peftlab.checkpoints.adapter import load_adapter
from peftlab.errors import PeftlabError
from peftlab.models.pretrained import eval_mode
from peftlab.pipelines.finetune import model_source
from peftlab.pipelines.trained.finding import Trained, find_trained, refuse_untrained
from peftlab.registry import resolve
from peftlab.tasks.answers import Answers, Predictions
from peftlab.tasks.labelled import Evaluation, load_classifier, tokens_for
from peftlab.tasks.table import find_task
from peftlab.tasks.tokens import Row
from peftlab.training.distributed import accelerator_on

Texts = Sequence[str] | Sequence[tuple[str, str]] | Sequence[Sequence[str]] | Sequence[tuple[str, Sequence[str]]]
"""Single texts; pairs for a task of pairs; lists of words for ``text/tokens``; for ``text/choice`` pairs of a text, it
may be empty, and a list of choices."""


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
    answers, settings = answers_of(trained), trained.recipe.train
    if len(texts) == 0:
        raise PeftlabError("no rows to predict")
    examples = answers.rows(texts).dataset()
    tokenizer, model, fresh = load_classifier(answers, model_source(trained.loaded), settings.max_length)
    if trained.adapter is None:
        refuse_untrained(trained.loaded.model, fresh)
    else:
        load_adapter(model, trained.adapter)
    tokens = tokens_for(str(reference), answers, model, tokenizer, settings.max_length, examples)
    collate = answers.collate(tokenizer)

    def counted(rows: Sequence[Row]) -> dict[str, Tensor]:
        if on_rows is not None:
            on_rows(len(rows))
        return collate(rows)

    evaluation = Evaluation(answers, {}, counted, settings.eval_batch_size)
    prepared = accelerator.prepare(model)
    with eval_mode(prepared):
        return answers.predictions(evaluation.outputs(prepared, tokens))


def answers_of(trained: Trained) -> Answers:
    """Return what the answers of a trained model's task are, with the model's class names."""
    task, classes = find_task(trained.recipe.task), trained.class_names()
    if not task.labelled:
        raise PeftlabError(f"task {task.name} has no labels to predict; peftlab generate --target writes text")
    if classes is None and not task.labels and task.classed:
        raise PeftlabError(f"{trained.place}: does not say what its classes are called")
    texts = tuple(trained.recipe.data.text or task.text)
    answers: Answers = resolve(task.answers)(
        replace(task, labels=task.labels if classes is None else classes, text=texts)
    )
    return answers
