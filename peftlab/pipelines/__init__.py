"""A recipe's whole way through the rooms, one file per kind."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# kind -> module and function; imported when a recipe of the kind is run
RUNNERS = {
    "finetune": ("peftlab.pipelines.finetune", "run_finetune"),
    "draft": ("peftlab.pipelines.draft", "run_draft"),
    "table": ("peftlab.pipelines.score_table", "run_table"),
}


def run_recipe(recipe: Any, *, overwrite: bool = False, resume: bool = False) -> dict[str, Any]:
    """Run a recipe of any kind and return its results."""
    module, function = RUNNERS[recipe.kind]
    return getattr(import_module(module), function)(recipe, overwrite=overwrite, resume=resume)
