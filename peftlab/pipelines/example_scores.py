"""What says how confident a model is of each training example, for ``train.sample``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from accelerate import Accelerator
from torch import nn

from peftlab.errors import PeftlabError
from peftlab.methods.modes import eval_mode
from peftlab.models.config import BaseConfig
from peftlab.recipe.schema import FinetuneRecipe
from peftlab.tasks.data import listed
from peftlab.tasks.problem import Prepared
from peftlab.training.distributed import AsTrained
from peftlab.training.spec import TrainingSpec

Load = Callable[[FinetuneRecipe, Sequence[str]], Prepared]
"""A recipe and a trained model's class names to its task with its model."""


def score_examples(
    spec: TrainingSpec, task: Prepared, recipe: FinetuneRecipe, load: Load, accelerator: Accelerator
) -> TrainingSpec:
    """Return ``spec`` with what scores its examples, where the recipe chooses examples by a score.

    Raises:
        PeftlabError: the scorer cannot be loaded, or was not trained for this task.
    """
    sample, confidence, rows = recipe.train.sample, task.confidence, spec.train
    if sample is None or not sample.chosen or confidence is None:
        return spec
    if sample.scorer is None:
        return replace(spec, confidence=lambda model, indices: confidence(model, rows.select(indices)))
    named = {"model": sample.scorer, "revision": None, "base": BaseConfig()}
    own = load(recipe.model_copy(update=named), task.task.labels)
    if own.fresh or own.train is None or own.confidence is None:
        reason = f"was not trained for {recipe.task}; new in it: {listed(own.fresh)}"
        raise PeftlabError(f"train.sample.scorer: {sample.scorer} {reason}")
    theirs, of_rows = own.train(), own.confidence
    waiting = [own.model]

    def score(_: nn.Module, indices: list[int]) -> Sequence[float]:
        model = AsTrained(waiting.pop(), accelerator, recipe.train.precision)  # it scores once, and is let go of
        with eval_mode(model):
            return of_rows(model, theirs.select(indices))

    return replace(spec, confidence=score)
