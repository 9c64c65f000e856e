"""A table's cells: every task in every row with every seed, each a complete finetune recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import Json, to_json
from peftlab.methods.table import METHODS
from peftlab.recipe.problems import validated
from peftlab.recipe.schema import FinetuneRecipe, TableRecipe
from peftlab.recipe.source import Keys, Place, Source
from peftlab.tasks.table import TASKS

SHARED = ("model", "revision", "trust_remote_code", "base", "data", "train", "merge")
"""The keys that a table and its cells have in common."""
PER_TASK = "per_task"
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
    """The cell as if it had been written by itself: the table's values, then the task's, the row's, and both's."""
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
    line = to_json(recipe.rows[row])
    of_tasks = line.pop(PER_TASK, {})
    merge(line, ("rows", row))
    here = of_tasks.get(task) if isinstance(of_tasks, dict) else None
    merge(here if isinstance(here, dict) else {}, ("rows", row, PER_TASK, task))
    cell.data["task"] = task
    cell.places[("task",)] = source.place(("tasks", recipe.tasks.index(task)))
    if isinstance(train := cell.data["train"], dict):
        cell.data["train"] = {**train, "seed": seed}
    cell.data["output_dir"] = _directory(recipe, task, row, seed)
    if "merge" not in line and not _folds(cell.data.get("method")):
        cell.data["merge"] = False
    if task in recipe.init and "init_from" not in line:
        cell.data["init_from"] = _directory(recipe, recipe.init[task], row, seed)
    return cell


def _folds(method: Json | None) -> bool:
    """Return whether a row's method has a linear fold; a wrong name is another check's problem."""
    name = method.get("name") if isinstance(method, dict) else None
    return not isinstance(name, str) or name not in METHODS or METHODS[name].folds


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
    if recipe.costs is not None:
        named: dict[Keys, str] = {("costs", "of"): recipe.costs.of}
        for row, control in recipe.costs.controls.items():
            named |= {("costs", "controls", row): row, ("costs", "controls", row, control): control}
        for at, row in named.items():
            if row not in recipe.rows:
                where = ".".join(map(str, at[:3]))
                source.complain(at[:3], f"{where}: no row {row!r}{did_you_mean(row, list(recipe.rows))}")
    changes = _changes(recipe, source)
    for at, keys in changes.items():
        where = ".".join(map(str, at))
        for key in keys.keys() & set(_OF_THE_TABLE):
            source.complain((*at, key), f"{where}.{key}: the table sets it for all cells")
        if isinstance(train := keys.get("train"), dict) and "seed" in train:
            source.complain((*at, "train", "seed"), f"{where}.train.seed: a table's seeds are listed under seeds")
    # Keys may name tasks that the table leaves out, so that tasks can be removed; what is no task at all is a mistake.
    for at in [*(at for at in changes if PER_TASK in at), *(("init", task) for task in recipe.init)]:
        task = str(at[-1])
        if task not in TASKS:
            hint = did_you_mean(task, [*recipe.tasks, *TASKS])
            source.complain(at, f"{'.'.join(map(str, at[:-1]))}: unknown task {task!r}{hint}")
    for task, start in recipe.init.items():
        if task in recipe.tasks and (start not in recipe.tasks or start in recipe.init):
            reason = "itself under init" if start in recipe.init else "not under tasks"
            text = f"init.{task}: {start} is {reason}; '~init.{task}' starts from the pretrained model instead"
            source.complain(("init", task), text)


def _changes(recipe: TableRecipe, source: Source) -> dict[Keys, dict[str, object]]:
    """Return the keys of a finetune recipe that differ in rows and tasks, by their place in the table."""
    found: dict[Keys, dict[str, object]] = {(PER_TASK, task): keys for task, keys in recipe.per_task.items()}
    for row, keys in recipe.rows.items():
        found["rows", row] = {key: value for key, value in keys.items() if key != PER_TASK}
        of_tasks = keys.get(PER_TASK, {})
        if not isinstance(of_tasks, dict) or not all(isinstance(value, dict) for value in of_tasks.values()):
            at = ("rows", row, PER_TASK)
            source.complain(at, f"{'.'.join(at)}: expected tasks, and keys below each, as the table's own per_task has")
            continue
        found |= {("rows", row, PER_TASK, task): value for task, value in of_tasks.items()}
    return found
