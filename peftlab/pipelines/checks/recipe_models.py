"""Whether the models that a recipe names are there; no weights are read, and the hub is not asked."""

from __future__ import annotations

from pathlib import Path

from peftlab.errors import PeftlabError
from peftlab.models.finetuned import find_model
from peftlab.pipelines.checks.recipe_data import runs_of
from peftlab.recipe.schema import Recipe
from peftlab.references import locate


def check_models(recipe: Recipe) -> None:
    """Check that each model that running ``recipe`` starts from is there, if it is a path or a file of a package.

    Raises:
        PeftlabError: no such path, package or file of it; a directory that contains no model.
    """
    runs = runs_of(recipe)
    scorers = [each.train.sample.scorer for each in runs if each.train.sample and each.train.sample.scorer]
    for reference in dict.fromkeys([*(each.model for each in runs), *scorers]):
        place = locate(find_model(reference).base)
        if isinstance(place, Path) and place.is_dir() and not (place / "config.json").exists():
            raise PeftlabError(f"model {reference!r}: {place} has no config.json")
