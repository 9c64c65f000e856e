"""What a finetune recipe needs to run: labels that can be read, targets that match, space for what is written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from peftlab.errors import PeftlabError
from peftlab.pipelines.checks.recipe_data import runs_of
from peftlab.pipelines.inspect import inspect_model
from peftlab.recipe.schema import FinetuneRecipe, Recipe, injected_method
from peftlab.reporting.classes import data_lines
from peftlab.reporting.console import Inspection
from peftlab.rows import resolve
from peftlab.tasks.labelled.data import load_task_data
from peftlab.tasks.labelled.labelled_task import class_counts, repeated_rows
from peftlab.tasks.table import find_task

_FLOAT = 4  # bytes of a number in fp32
_MOMENTS = 2  # numbers that AdamW stores for each trained parameter


def deep_check(recipe: Recipe) -> list[str]:
    """Read all labels, find the method's targets on the meta device, and compare the space of the disk.

    Returns:
        A line for each thing that was checked.

    Raises:
        PeftlabError: anything that would stop the run; or the recipe is of kind draft.
    """
    runs = runs_of(recipe)
    if not runs:
        raise PeftlabError(f"--deep: a recipe of kind {recipe.kind} has no labels or targets to check; others have")
    data = {(each.task, repr(each.data)): each for each in runs}
    methods = {(each.task, repr(each.method)): each for each in runs}
    lines = [line for each in data.values() for line in _data_lines(each)]
    found = {key: _inspected(each) for key, each in methods.items()}
    lines += [_target_line(each, found[key]) for key, each in methods.items()]
    needed = sum(_bytes(each, found[each.task, repr(each.method)]) for each in runs)
    return [*lines, _space_line(recipe.output_dir, needed)]


def _data_lines(recipe: FinetuneRecipe) -> list[str]:
    """Return the sizes of the splits, and what a run says of its data before it trains."""
    task = find_task(recipe.task)
    if task.labelled:
        data = load_task_data(recipe.task, recipe.data)
        sizes = {split: len(rows) for split, rows in data.splits.items()}
        counts = class_counts(resolve(task.answers)(data.task), data.splits)
        remarks = data_lines(counts, data.left_out, repeated_rows(data.task, data.splits))
    else:
        _, splits, left_out = resolve(task.load)(task, recipe.data)
        sizes, remarks = {split: len(rows) for split, rows in splits.items()}, data_lines({}, left_out)
    listed = ", ".join(f"{split} {size:,}" for split, size in sizes.items())
    return [f"data of {recipe.task}: {listed}", *remarks]


def _inspected(recipe: FinetuneRecipe) -> Inspection:
    task = find_task(recipe.task)
    auto_class: str | None = resolve(task.answers).auto_class if task.labelled else None
    method = injected_method(recipe.method, recipe.train)
    return inspect_model(recipe.model, method.name, method.model_dump(exclude={"name"}), auto_class)


def _target_line(recipe: FinetuneRecipe, found: Inspection) -> str:
    targets = ", ".join(
        f"{pattern} ({count})" for pattern, count in {**found.matches, **found.trained_in_place}.items()
    )
    parameters = f"{found.trainable:,} of {found.total:,} parameters"
    return f"method {recipe.method.name} trains {parameters} of {found.architecture}: {targets or 'the task head'}"


def _space_line(output_dir: str, needed: int) -> str:
    """Compare the bytes of the checkpoints, adapters and merged models of all runs with what is free."""
    place = next(p for p in (Path(output_dir).absolute(), *Path(output_dir).absolute().parents) if os.path.isdir(p))
    free = shutil.disk_usage(place).free
    text = f"checkpoints and models need {needed / 2**20:,.1f} MB in {output_dir}; {free / 2**20:,.0f} MB are free"
    if needed > free:
        raise PeftlabError(f"output_dir: {text}")
    return text


def _bytes(recipe: FinetuneRecipe, found: Inspection) -> int:
    """Return the bytes of a run: checkpoints kept, the best and one being written; adapter; merged model."""
    checkpoints = recipe.train.keep_checkpoints + 2
    trained = found.trainable * _FLOAT * (checkpoints * (1 + _MOMENTS) + 1)
    return trained + (found.total * _FLOAT if found.folds and recipe.merge is not False else 0)
