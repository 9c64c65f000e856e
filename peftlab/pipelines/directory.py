"""The output directories of runs and tables: the files written there, and the inputs that must not be overwritten."""

from __future__ import annotations

import shlex
from contextlib import AbstractContextManager

from peftlab.outputs import Claim, Inputs, Mark, claimed
from peftlab.recipe.schema import DraftRecipe, FinetuneRecipe, Recipe, TableRecipe

RUN = Mark(
    "run",
    [
        "recipe.yaml",
        "provenance.json",
        "metrics.jsonl",
        "checkpoints/step-*.pt",
        "checkpoints/step-*.pt.damaged",
        "acceptance_head.safetensors",
        "results.json",
        "report.html",
        "updates/replay-*.jsonl",
        "peftlab/*",  # a tracker's, named after the project
    ],
)
TABLE = Mark("table", ["recipe.yaml", "table.csv", "table.tex", "table.html", "cells/*.log"])


def run_directory(
    recipe: FinetuneRecipe | DraftRecipe, *, overwrite: bool, resume: bool
) -> AbstractContextManager[Claim]:
    """Lock the directory of ``recipe``'s run while it runs; errors as in ``peftlab.outputs.claimed``."""
    path = recipe.output_dir
    advice = (
        f"choose another output_dir, continue with `peftlab resume {shlex.quote(path)}`, or pass --overwrite to lose it"
    )
    return claimed(path, RUN, overwrite=overwrite, resume=resume, inputs=recipe_inputs(recipe), advice=advice)


def check_directory(recipe: Recipe, *, overwrite: bool) -> None:
    """Check that a run of ``recipe`` may write its directory; a table's is its runs' and may exist."""
    if not isinstance(recipe, TableRecipe):
        with run_directory(recipe, overwrite=overwrite, resume=False):
            pass


def recipe_inputs(recipe: Recipe) -> Inputs:
    """Return the paths and references that a recipe reads, by what they are."""
    if isinstance(recipe, DraftRecipe):
        return {
            "the target": recipe.target,
            "the draft": getattr(recipe.draft, "from_", None),
            "the reference model": recipe.objective.reference,
            "the prompts": recipe.data.prompts if isinstance(recipe.data.prompts, str) else None,
            "the requests": recipe.data.replay,
            "the data sets": recipe.data.cache,
        }
    start = None if isinstance(recipe, TableRecipe) else recipe.init_from
    sample = recipe.train.sample
    return {
        "the model": recipe.model,
        "the data": recipe.data.path,
        "the run to start from": start,
        "the scorer": sample.scorer if sample is not None else None,
    }
