"""What says how confident a model is of each training example, for ``train.sample``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from accelerate import Accelerator
from torch import nn

from peftlab.errors import PeftlabError
from peftlab.models.config import BaseConfig
from peftlab.models.pretrained import eval_mode
from peftlab.recipe.schema import FinetuneRecipe
from peftlab.tasks.data import listed
from peftlab.tasks.problem import TaskProblem
from peftlab.training.distributed import AsTrained

Load = Callable[[FinetuneRecipe, Sequence[str]], TaskProblem]
"""A recipe and a trained model's class names to its task with its model."""


def score_examples(task: TaskProblem, recipe: FinetuneRecipe, load: Load, accelerator: Accelerator) -> None:
    """Let ``train.sample.scorer`` say how confident it is of each example, where the recipe names one.

    Raises:
        PeftlabError: the scorer cannot be loaded, or was not trained for this task.
    """
    sample = recipe.train.sample
    if sample is None or sample.scorer is None:
        return
    named = {"model": sample.scorer, "revision": None, "base": BaseConfig()}
    own = load(recipe.model_copy(update=named), task.task.labels)
    if own.fresh or own.confidence is None:
        reason = f"was not trained for {recipe.task}; new in it: {listed(own.fresh)}"
        raise PeftlabError(f"train.sample.scorer: {sample.scorer} {reason}")
    confidence, waiting = own.confidence, [own.model]

    def score(_: nn.Module, indices: list[int]) -> Sequence[float]:
        model = AsTrained(waiting.pop(), accelerator, recipe.train.precision)  # used once: its memory is free after it
        with eval_mode(model):
            return confidence(model, indices)

    task.confidence = score
