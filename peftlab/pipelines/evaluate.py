"""Scoring what lies on disk: a run, an adapter or a merged directory, on its recipe's task."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from peftlab.checkpoints.adapter import CONFIG_FILE, load_adapter
from peftlab.errors import PeftlabError
from peftlab.pipelines.finetune import load_task, make_work
from peftlab.recipe.loading import load_recipe
from peftlab.recipe.schema import FinetuneRecipe
from peftlab.training.evaluate import evaluate


def run_evaluate(
    directory: str | Path, recipe_name: str | Path | None = None, overrides: Iterable[str] = ()
) -> dict[str, dict[str, float]]:
    """Return the metrics by evaluation split of the model in ``directory``.

    Args:
        directory: a run (its adapter is scored), an adapter, or a merged or any other plain model directory.
        recipe_name: the recipe that names task and data; default: ``recipe.yaml`` in the directory or above it.
        overrides: as for ``peftlab run``: other data, another batch size.

    Raises:
        PeftlabError: no recipe is found, or ``directory`` holds no model.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise PeftlabError(f"{directory}: no such directory")
    recipe = load_recipe(recipe_name or _recipe_near(directory), overrides)
    if not isinstance(recipe, FinetuneRecipe):
        raise PeftlabError(f"{recipe_name}: a recipe of kind {recipe.kind} has no task to score")
    adapter = next((d for d in (directory, directory / "adapter") if (d / CONFIG_FILE).exists()), None)
    if adapter is None and not (directory / "config.json").exists():
        raise PeftlabError(f"{directory}: neither a run, an adapter nor a model directory")
    if adapter is None:
        recipe = recipe.model_copy(update={"model": str(directory), "revision": None})
    task = load_task(recipe)
    if adapter is not None:
        load_adapter(task.model, adapter)
    work = make_work(recipe, task, splits_only=True)
    accelerator = Accelerator()
    model: Any = accelerator.prepare(task.model)
    return evaluate(model, work, accelerator, recipe.train.eval_batch_size)


def _recipe_near(directory: Path) -> Path:
    for place in (directory, directory.parent):
        if (place / "recipe.yaml").exists():
            return place / "recipe.yaml"
    raise PeftlabError(f"{directory}: no recipe.yaml here or above; name one with --recipe")
