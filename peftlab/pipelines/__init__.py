"""A recipe's whole way through the rooms, one file per kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from peftlab.pipelines.draft import run_draft
from peftlab.pipelines.finetune import run_finetune

RUNNERS: dict[str, Callable[..., dict[str, Any]]] = {"finetune": run_finetune, "draft": run_draft}


def run_recipe(recipe: Any, *, overwrite: bool = False, resume: bool = False) -> dict[str, Any]:
    """Run a recipe of any kind and return its results."""
    return RUNNERS[recipe.kind](recipe, overwrite=overwrite, resume=resume)
