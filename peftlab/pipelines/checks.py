"""Checks that the models and data that a recipe names exist, and that the data have their columns.

Neither torch nor a model is loaded, and the hub is not asked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from peftlab.errors import PeftlabError
from peftlab.models.finetuned import find_model
from peftlab.recipe.schema import AnyTable, DraftRecipe, FinetuneRecipe, Recipe
from peftlab.recipe.tables import table_cells
from peftlab.references import locate
from peftlab.registry import resolve
from peftlab.tasks.config import DataConfig
from peftlab.tasks.data import Columns, Table, split_files, split_tables
from peftlab.tasks.table import Task, find_task

if TYPE_CHECKING:
    pass


def check_data(recipe: Recipe) -> None:
    """Check that the files that ``recipe`` names are there, can be read and have the columns that its task reads.

    Data of the hub are not asked for.

    Raises:
        PeftlabError: a file or column is missing, or a file cannot be read.
    """
    for task, data in {(each.task, repr(each.data)): (each.task, each.data) for each in runs_of(recipe)}.values():
        _check_columns(find_task(task), data)
    prompts = [run.data.prompts for run in _all_runs(recipe) if isinstance(run, DraftRecipe)]
    for file in dict.fromkeys(each for each in prompts if isinstance(each, str)):
        if not isinstance(locate(file, "data.prompts"), Path):
            raise PeftlabError(f"data.prompts {file!r}: no such file")


def runs_of(recipe: Recipe) -> list[FinetuneRecipe]:
    """Return the finetune recipes that running ``recipe`` runs: itself, or a table's cells."""
    return [run for run in _all_runs(recipe) if isinstance(run, FinetuneRecipe)]


def _all_runs(recipe: Recipe) -> list[FinetuneRecipe | DraftRecipe]:
    return [cell.recipe for cell in table_cells(recipe)] if isinstance(recipe, AnyTable) else [recipe]


def columns_read(task: Task, data: DataConfig) -> list[str]:
    """Return the columns of a training row that a task reads; without those that are recognised row by row.

    Args:
        task: the table's row.
        data: the recipe's data section.

    Raises:
        PeftlabError: as ``check_data``.
    """
    if task.glue or data.path is None:
        return [*task.text, *(["label"] if task.labelled else [])]
    tables = _tables(task, data)
    return list(tables["train"][1]) if "train" in tables else []


def _check_columns(task: Task, data: DataConfig) -> None:
    if data.path is None:
        return
    if task.glue:
        from peftlab.tasks.glue import glue_directory

        glue_directory(task, data.path)
        return
    for table, needed in _tables(task, data).values():
        for name, key in needed.items():
            if name not in table.columns:
                table.column(name, key)


def _tables(task: Task, data: DataConfig) -> dict[str, tuple[Table, dict[str, str]]]:
    """Return the table of each split of the user's files, and the columns that it must have, each with its key.

    A document, whose paragraphs or lines are rows, has none.
    """
    files = split_files(str(data.path), () if task.labelled else (".txt",))
    with_columns = {split: file for split, file in files.items() if file.suffix != ".txt"}
    tables = split_tables(with_columns, data.validation, files)
    of: Callable[[DataConfig, Collection[str]], Columns] = resolve(task.columns)
    return {split: (table, of(data, table.columns).needed(split, table)) for split, table in tables.items()}


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
