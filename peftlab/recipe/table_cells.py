"""A table's cells: every task in every row with every seed, each a complete finetune recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import Json, to_json
from peftlab.recipe.problems import validated
from peftlab.recipe.schema import FinetuneRecipe, TableRecipe
from peftlab.recipe.source import Keys, Place, Source
from peftlab.tasks.table import TASKS

SHARED = ("model", "revision", "trust_remote_code", "base", "data", "train", "merge")
"""The keys that a table and its cells have in common."""
_OF_THE_TABLE = ("kind", "task", "output_dir")


@dataclass(frozen=True, eq=False)
class Cell:
    """One run of a table.

    Attributes:
        task, row, seed: its place in the table.
        recipe: the recipe to run; its ``output_dir`` is the cell's directory.
    """

    task: str
    row: str
    seed: int
    recipe: FinetuneRecipe

    @property
    def directory(self) -> Path:
        """The cell's run directory, ``cells/TASK-ROW-seedN`` below the table's."""
        return Path(self.recipe.output_dir)


def table_cells(recipe: TableRecipe) -> list[Cell]:
    """Return the cells of a table in the order they are run.

    Raises:
        PeftlabError: a cell is not a valid recipe, or the table's parts contradict each other.
    """
    source = Source({}, {(): Place(0, 0, "table")})
    cells = expand(recipe, source)
    if source.problems:
        raise PeftlabError("\n".join(map(str, sorted(source.problems))))
    return cells


def expand(recipe: TableRecipe, source: Source) -> list[Cell]:
    """Return the cells of ``recipe``; mistakes become problems of ``source``, at the place of the text.

    All cells of one seed come before those of the next, so that an interrupted table has every column and row; within
    a seed, tasks that others start from come first.
    """
    _consistent(recipe, source)
    if source.problems:
        return []
    shared = to_json(recipe.model_dump(mode="json", include=set(SHARED)))
    tasks = sorted(recipe.tasks, key=lambda task: task in recipe.init)
    cells = []
    for seed in recipe.seeds:
        for task in tasks:
            for row in recipe.rows:
                written = _cell_source(recipe, shared, source, task, row, seed)
                valid = validated(FinetuneRecipe, written)
                if valid is not None:
                    cells.append(Cell(task, row, seed, valid))
                source.problems += [p for p in written.problems if p not in source.problems]
    return cells


def _cell_source(
    recipe: TableRecipe, shared: Mapping[str, Json], source: Source, task: str, row: str, seed: int
) -> Source:
    """The cell as if it had been written by itself: the table's values, then the task's, then the row's."""
    cell = Source({}, {(): source.place(())})

    def merge(changes: Mapping[str, Json], at: Keys) -> None:
        for key, value in changes.items():
            before = cell.data.get(key)
            cell.data[key] = {**before, **value} if isinstance(value, dict) and isinstance(before, dict) else value
        for keys, place in source.places.items():
            if keys[: len(at)] == at and keys[len(at) :][:1] in {(key,) for key in changes}:
                cell.places[keys[len(at) :]] = place

    merge(shared, ())
    merge(to_json(recipe.per_task.get(task, {})), ("per_task", task))
    merge(to_json(recipe.rows[row]), ("rows", row))
    cell.data["task"] = task
    cell.places[("task",)] = source.place(("tasks", recipe.tasks.index(task)))
    if isinstance(train := cell.data["train"], dict):
        cell.data["train"] = {**train, "seed": seed}
    cell.data["output_dir"] = _directory(recipe, task, row, seed)
    if task in recipe.init:
        cell.data["init_from"] = _directory(recipe, recipe.init[task], row, seed)
    return cell


def _directory(recipe: TableRecipe, task: str, row: str, seed: int) -> str:
    name = f"{task.rpartition('/')[2]}-{_file_name(row)}-seed{seed}"
    return str(Path(recipe.output_dir, "cells", name))


def _file_name(row: str) -> str:
    return re.sub(r"[^\w.,=+-]+", "_", row, flags=re.ASCII)


def _consistent(recipe: TableRecipe, source: Source) -> None:
    """Add the problems that no single cell shows."""
    for key, listed in (("tasks", recipe.tasks), ("seeds", recipe.seeds)):
        for i, item in enumerate(listed):
            if item in listed[:i]:
                source.complain((key, i), f"{key}: {item} occurs twice")
    names: dict[str, str] = {}
    for row in recipe.rows:
        other = names.setdefault(_file_name(row), row)
        if other != row:
            source.complain(("rows", row), f"rows: {row!r} and {other!r} would have the same directories")
    if recipe.train.seed:
        source.complain(("train", "seed"), "train.seed: a table's seeds are listed under seeds")
    for section, changes in (("rows", recipe.rows), ("per_task", recipe.per_task)):
        for name, keys in changes.items():
            for key in keys.keys() & set(_OF_THE_TABLE):
                source.complain((section, name, key), f"{section}.{name}.{key}: the table sets it for all cells")
            if isinstance(train := keys.get("train"), dict) and "seed" in train:
                text = f"{section}.{name}.train.seed: a table's seeds are listed under seeds"
                source.complain((section, name, "train", "seed"), text)
    # Keys may name tasks that the table leaves out, so that tasks can be removed; what is no task at all is a mistake.
    for section, named in (("per_task", list(recipe.per_task)), ("init", list(recipe.init))):
        for task in named:
            if task not in TASKS:
                hint = did_you_mean(task, [*recipe.tasks, *TASKS])
                source.complain((section, task), f"{section}: unknown task {task!r}{hint}")
    for task, start in recipe.init.items():
        if task in recipe.tasks and (start not in recipe.tasks or start in recipe.init):
            reason = "itself under init" if start in recipe.init else "not under tasks"
            text = f"init.{task}: {start} is {reason}; '~init.{task}' starts from the pretrained model instead"
            source.complain(("init", task), text)
