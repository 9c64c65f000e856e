"""A recipe's whole way through the rooms, one file per kind."""

from __future__ import annotations

from typing import Any

from peftlab.pipelines.finetune import run_finetune

RUNNERS = {"finetune": run_finetune}


def run_recipe(recipe: Any, *, overwrite: bool = False, resume: bool = False) -> dict[str, Any]:
    """Run a recipe of any kind and return its results."""
    return RUNNERS[recipe.kind](recipe, overwrite=overwrite, resume=resume)
