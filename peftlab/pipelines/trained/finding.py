"""Finding a trained classifier or language model on the disk: its recipe, its adapter, the names of its classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from peftlab.checkpoints.adapter import CONFIG_FILE, Adapter, read_adapter
from peftlab.errors import PeftlabError
from peftlab.models.config import BaseConfig
from peftlab.models.pretrained import load_config
from peftlab.recipe.load import load_recipe
from peftlab.recipe.schema import FinetuneRecipe
from peftlab.references import similar_path
from peftlab.remote import local_copy
from peftlab.tasks.table import find_task


@dataclass(frozen=True)
class Trained:
    """A trained model that is not loaded yet.

    Attributes:
        recipe: task, data and settings.
        loaded: the same with what is to be loaded as its ``model``: the base of an adapter, or the model itself.
        place: directory of the adapter; adapter: what it contains. Both None for a whole model.
    """

    recipe: FinetuneRecipe
    loaded: FinetuneRecipe
    place: Path | None = None
    adapter: Adapter | None = None

    def class_names(self) -> tuple[str, ...] | None:
        """Return the class names in label order; none for regression; None where they are not stored.

        Raises:
            PeftlabError: what is stored is no list of names, or it has several numbers for a regression.
        """
        task, recipe = find_task(self.recipe.task), self.loaded
        if not task.labelled:
            return None
        if task.choices:
            return ()
        names: object
        if self.adapter is not None:
            config = self.adapter.base.get("config")
            names = config.get("id2label") if isinstance(config, dict) else None
            if names is None:
                return None  # of another library
        else:
            names = load_config(recipe.model, trust_remote_code=recipe.trust_remote_code).id2label
        place = self.place or recipe.model
        classes = _in_order(names, place)
        if not task.regression:
            return classes
        if len(classes) != 1:
            raise PeftlabError(f"{place}: has {len(classes)} classes, and task {recipe.task} needs one number")
        return ()


def find_trained(reference: str | Path, recipe_name: str | Path | None, overrides: Iterable[str]) -> Trained:
    """Return what ``reference`` names.

    Args:
        reference: a run (its adapter) or its URL, an adapter, or a model as ``models.finetuned.find_model`` takes it.
        recipe_name: the recipe that names task and data; default: ``recipe.yaml`` in that directory or above it.
        overrides: as for ``peftlab run``.

    Raises:
        PeftlabError: no recipe is found, it is of another kind, or there is no such model.
    """
    reference = local_copy(reference)
    directory = Path(reference)
    if not directory.is_dir() and recipe_name is None:
        raise PeftlabError(
            f"{directory}: no such directory{similar_path(str(directory))}; a model that is not in a directory needs "
            "--recipe"
        )
    recipe = load_recipe(recipe_name or _recipe_near(directory), overrides)
    if not isinstance(recipe, FinetuneRecipe):
        raise PeftlabError(f"{recipe_name}: a recipe of kind {recipe.kind} has no task to score")
    place = next((d for d in (directory, directory / "adapter") if (d / CONFIG_FILE).exists()), None)
    if place is not None:
        return Trained(recipe, recipe, place, read_adapter(place))
    if directory.is_dir() and not _is_model(directory):
        raise PeftlabError(f"{directory}: neither a run, an adapter nor a model directory")
    # Plain weights are not quantised again, which would change the model.
    base = BaseConfig() if recipe.base.quantised else recipe.base
    whole = {"model": str(reference), "revision": None, "base": base}
    return Trained(recipe, recipe.model_copy(update=whole))


def _in_order(names: object, place: str | Path) -> tuple[str, ...]:
    try:
        numbered = (
            {int(str(number)): str(name) for number, name in names.items()} if isinstance(names, Mapping) else None
        )
    except ValueError:
        numbered = None
    if numbered is None:
        raise PeftlabError(f"{place}: id2label is not a mapping from class numbers to names")
    return tuple(name for _, name in sorted(numbered.items()))


def refuse_untrained(model: str, fresh: list[str]) -> None:
    """Refuse a model with parameters that no checkpoint contains."""
    if fresh:
        raise PeftlabError(
            f"{model}: contains no trained weights for {', '.join(fresh[:5])}; its answers would be random"
        )


def _is_model(directory: Path) -> bool:
    return any((place / "config.json").exists() for place in (directory, directory / "merged"))


def _recipe_near(directory: Path) -> Path:
    for place in (directory, directory.parent):
        if (place / "recipe.yaml").exists():
            return place / "recipe.yaml"
    raise PeftlabError(f"{directory}: no recipe.yaml here or above; name one with --recipe")
