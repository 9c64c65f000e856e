"""Scores of what is stored on disk: a run, an adapter or a merged directory, on its recipe's task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from accelerate import Accelerator
from torch import nn

from peftlab.checkpoints.adapter import CONFIG_FILE, load_adapter, read_adapter
from peftlab.errors import PeftlabError
from peftlab.methods.modes import eval_mode
from peftlab.models.config import BaseConfig
from peftlab.models.pretrained import load_config
from peftlab.pipelines.answer_scores import asked_answers
from peftlab.pipelines.finetune import load_task, model_source
from peftlab.recipe.loading import load_recipe
from peftlab.recipe.schema import FinetuneRecipe
from peftlab.tasks.prepared import Prepared
from peftlab.tasks.table import find_task


def evaluate(
    reference: str | Path, recipe_name: str | Path | None = None, overrides: Iterable[str] = ()
) -> dict[str, dict[str, float]]:
    """Return the metrics by evaluation split of the model that ``reference`` names; its answers' as ``generate``.

    The class names and their order are the trained model's, not those of the file that is scored.

    Args:
        reference: a run (its adapter is scored), an adapter, or a model as ``models.finetuned.find_model`` takes it.
        recipe_name: the recipe that names task and data; default: ``recipe.yaml`` in that directory or above it.
        overrides: as for ``peftlab run``: other data, another batch size; ``data.validation=all`` scores a whole file.

    Raises:
        PeftlabError: no recipe is found, there is no such model or one whose head is not trained, or the
            data's labels are not the model's classes.
    """
    directory = Path(reference)
    if not directory.is_dir() and recipe_name is None:
        raise PeftlabError(f"{directory}: no such directory; a model that is not in a directory needs --recipe")
    recipe = load_recipe(recipe_name or _recipe_near(directory), overrides)
    if not isinstance(recipe, FinetuneRecipe):
        raise PeftlabError(f"{recipe_name}: a recipe of kind {recipe.kind} has no task to score")
    place = next((d for d in (directory, directory / "adapter") if (d / CONFIG_FILE).exists()), None)
    if place is None and directory.is_dir() and not _is_model(directory):
        raise PeftlabError(f"{directory}: neither a run, an adapter nor a model directory")
    if place is None:
        whole = {"model": str(reference), "revision": None, "base": _plain(recipe)}
        task = _load_whole(recipe.model_copy(update=whole))
    else:
        task = _load_adapted(recipe, place)
    accelerator = Accelerator()
    answers = asked_answers(task, recipe.generate, accelerator)
    if task.refer is not None:
        task.compare_with(nn.Module.to(_starting_model(recipe, task), accelerator.device))
    model = accelerator.prepare(task.model)
    with eval_mode(model):
        scores = task.score(model)
        return scores if answers is None else {**scores, "generate": answers(task.model)}


def _plain(recipe: FinetuneRecipe) -> BaseConfig:
    """Return how a directory of plain weights is loaded: not quantised again, which would change the model."""
    return BaseConfig() if recipe.base.quantised else recipe.base


def _starting_model(recipe: FinetuneRecipe, task: Prepared) -> nn.Module:
    """Load the model that training started from."""
    model, _ = model_source(recipe).model(task.auto_class, recipe.train.max_length)
    if recipe.init_from is not None:
        load_adapter(model, read_adapter(recipe.init_from))
    return model


def _load_whole(recipe: FinetuneRecipe) -> Prepared:
    """Load a plain model and the data, whose labels are read as the classes that its configuration names."""
    names = load_config(recipe.model, trust_remote_code=recipe.trust_remote_code).id2label
    task = load_task(recipe, _classes(recipe, names, recipe.model))
    if task.fresh:
        raise PeftlabError(
            f"{recipe.model}: contains no trained weights for {', '.join(task.fresh[:5])}; its scores would be random"
        )
    return task


def _load_adapted(recipe: FinetuneRecipe, place: Path) -> Prepared:
    """Load base model, adapter and data, whose labels are read as the classes that the adapter names.

    An adapter of another library names none: then the labels must be class numbers.
    """
    adapter = read_adapter(place)
    config = adapter.base.get("config")
    names = config.get("id2label") if isinstance(config, dict) else None
    task = load_task(recipe, None if names is None else _classes(recipe, names, str(place)))
    own = not find_task(recipe.task).glue and task.task.labels
    if names is None and own and own != tuple(map(str, range(len(own)))):
        raise PeftlabError(
            f"{place}: does not say what its classes are called, and the data calls them {', '.join(own)}; label the "
            "rows by class number, from 0"
        )
    load_adapter(task.model, adapter)
    return task


def _classes(recipe: FinetuneRecipe, names: object, place: str) -> tuple[str, ...] | None:
    """Return a model's class names in label order; none for regression; None where the task has no labels."""
    if not find_task(recipe.task).labelled:
        return None
    try:
        numbered = (
            {int(str(number)): str(name) for number, name in names.items()} if isinstance(names, Mapping) else None
        )
    except ValueError:
        numbered = None
    if numbered is None:
        raise PeftlabError(f"{place}: id2label is not a mapping from class numbers to names")
    classes = tuple(name for _, name in sorted(numbered.items()))
    if not find_task(recipe.task).regression:
        return classes
    if len(classes) != 1:
        raise PeftlabError(f"{place}: has {len(classes)} classes, and task {recipe.task} needs one number")
    return ()


def _is_model(directory: Path) -> bool:
    return any((place / "config.json").exists() for place in (directory, directory / "merged"))


def _recipe_near(directory: Path) -> Path:
    for place in (directory, directory.parent):
        if (place / "recipe.yaml").exists():
            return place / "recipe.yaml"
    raise PeftlabError(f"{directory}: no recipe.yaml here or above; name one with --recipe")
