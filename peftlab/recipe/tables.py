"""Tables: their cells, each task in each row with each seed as a complete recipe, and the sweep that makes one."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import Json, to_json
from peftlab.methods.table import METHODS
from peftlab.recipe.errors import Keys, Place, Problem, Source, all_sections, dotted, validated
from peftlab.recipe.schema import (
    AnyTable,
    DraftRecipe,
    DraftTableRecipe,
    FinetuneRecipe,
    Recipe,
    TableRecipe,
    draft_of_a_reference,
)
from peftlab.tasks.table import TASKS

PER_TASK = "per_task"
DRAFT = "draft"
"""What the cells of a table of drafts have in the place of a task."""
_OF_THE_TABLE = ("kind", "output_dir")


@dataclass(frozen=True, eq=False)
class Cell:
    """One run of a table.

    Attributes:
        task, row, seed: its place in the table; of a draft, the task is ``DRAFT``.
        recipe: the recipe to run; its ``output_dir`` is the cell's directory.
    """

    task: str
    row: str
    seed: int
    recipe: FinetuneRecipe | DraftRecipe

    @property
    def directory(self) -> Path:
        """The cell's run directory, ``cells/TASK-ROW-seedN`` below the table's; ``cells/ROW-seedN`` of a draft."""
        return Path(self.recipe.output_dir)

    @property
    def init_from(self) -> str | None:
        """The run that it starts from, which may be another cell's; None: from no run."""
        return self.recipe.init_from if isinstance(self.recipe, FinetuneRecipe) else None


def cell_recipe(table: type[AnyTable]) -> type[FinetuneRecipe] | type[DraftRecipe]:
    """Return what the cells of a kind of table are."""
    return DraftRecipe if table is DraftTableRecipe else FinetuneRecipe


def shared_keys(table: type[AnyTable]) -> list[str]:
    """Return the keys that a kind of table and its cells have in common, with the same meaning."""
    return [key for key in table.model_fields if key in cell_recipe(table).model_fields and key not in _OF_THE_TABLE]


def table_cells(recipe: AnyTable) -> list[Cell]:
    """Return the cells of a table in the order they are run.

    Raises:
        PeftlabError: a cell is not a valid recipe, or the table's parts contradict each other.
    """
    source = Source({}, {(): Place(0, 0, "table")})
    cells = expand(recipe, source)
    source.refuse_problems()
    return cells


def expand(recipe: AnyTable, source: Source) -> list[Cell]:
    """Return the cells of ``recipe``; mistakes become problems of ``source``, at the place of the text.

    All cells of one seed come before those of the next, so that an interrupted table has every column and row; within
    a seed, tasks that others start from come first.

    Args:
        recipe: the table.
        source: what it was read from.
    """
    _consistent(recipe, source)
    if source.problems:
        return []
    values = to_json(recipe.model_dump(mode="json", by_alias=True, include=set(shared_keys(type(recipe)))))
    shared = {key: value for key, value in values.items() if value is not None}
    tasks = [DRAFT]
    if isinstance(recipe, TableRecipe):
        init = recipe.init
        tasks = sorted(recipe.tasks, key=lambda task: task in init)
    cells = []
    for seed in recipe.seeds:
        for task in tasks:
            for row in recipe.rows:
                written = _cell_source(recipe, shared, source, task, row, seed)
                valid = validated(cell_recipe(type(recipe)), written)
                if valid is not None:
                    cells.append(Cell(task, row, seed, valid))
                source.problems += [p for p in written.problems if p not in source.problems]
    return cells


def _cell_source(
    recipe: AnyTable, shared: Mapping[str, Json], source: Source, task: str, row: str, seed: int
) -> Source:
    """The cell as if it had been written by itself: the table's values, then the task's, the row's, and both's."""
    cell = Source({}, {(): source.place(())})
    fields = cell_recipe(type(recipe)).model_fields

    def merge(changes: Mapping[str, Json], at: Keys) -> None:
        for key, value in changes.items():
            tag = str(fields[key].discriminator) if key in fields else ""
            cell.data[key] = _merged(cell.data.get(key), value, tag)
        for keys, place in source.places.items():
            if keys[: len(at)] == at and keys[len(at) :][:1] in {(key,) for key in changes}:
                cell.places[keys[len(at) :]] = place

    merge(shared, ())
    line = to_json(recipe.rows[row])
    if isinstance(recipe, TableRecipe):
        merge(to_json(recipe.per_task.get(task, {})), ("per_task", task))
        of_tasks = line.pop(PER_TASK, {})
        merge(line, ("rows", row))
        here = of_tasks.get(task) if isinstance(of_tasks, dict) else None
        merge(here if isinstance(here, dict) else {}, ("rows", row, PER_TASK, task))
        cell.data["task"] = task
        cell.places[("task",)] = source.place(("tasks", recipe.tasks.index(task)))
        if task in recipe.init and "init_from" not in line:
            cell.data["init_from"] = _directory(recipe, recipe.init[task], row, seed)
    else:
        merge(line, ("rows", row))
        cell.data["kind"] = "draft"
    if isinstance(train := cell.data["train"], dict):
        cell.data["train"] = {**train, "seed": seed}
    cell.data["output_dir"] = _directory(recipe, task, row, seed)
    if "merge" not in line and not _folds(cell.data.get("method")):
        cell.data["merge"] = False
    return cell


def _merged(before: Json, value: Json, tag: str) -> Json:
    """Return a section with the keys of another over it, or the other alone where its ``tag`` names another kind."""
    if not isinstance(before, dict) or not isinstance(value, dict):
        return value
    kinds = [section[tag] for section in (before, value) if tag in section]
    return value if len(kinds) == 2 and kinds[0] != kinds[1] else {**before, **value}


def _folds(method: Json | None) -> bool:
    """Return whether a row's method has a linear fold; a wrong name is another check's problem."""
    name = method.get("name") if isinstance(method, dict) else None
    return not isinstance(name, str) or name not in METHODS or METHODS[name].folds


def _directory(recipe: AnyTable, task: str, row: str, seed: int) -> str:
    column = f"{task.rpartition('/')[2]}-" if isinstance(recipe, TableRecipe) else ""
    name = f"{column}{_file_name(row)}-seed{seed}"
    return str(Path(recipe.output_dir, "cells", name))


def _file_name(row: str) -> str:
    return re.sub(r"[^\w.,=+-]+", "_", row, flags=re.ASCII)


def _consistent(recipe: AnyTable, source: Source) -> None:
    """Add the problems that no single cell shows."""
    listed: dict[str, list[str] | list[int]] = {"seeds": recipe.seeds}
    if isinstance(recipe, TableRecipe):
        listed["tasks"] = recipe.tasks
    for key, items in listed.items():
        for i, item in enumerate(items):
            if item in items[:i]:
                source.complain((key, i), f"{key}: {item} occurs twice")
    names: dict[str, str] = {}
    for row in recipe.rows:
        other = names.setdefault(_file_name(row), row)
        if other != row:
            source.complain(("rows", row), f"rows: {row!r} and {other!r} would have the same directories")
    if recipe.train.seed:
        source.complain(("train", "seed"), "train.seed: a table's seeds are listed under seeds")
    changes = _changes(recipe, source)
    own = {*_OF_THE_TABLE, "task"} if isinstance(recipe, TableRecipe) else {*_OF_THE_TABLE}
    for at, keys in changes.items():
        where = ".".join(map(str, at))
        for key in keys.keys() & own:
            source.complain((*at, key), f"{where}.{key}: the table sets it for all cells")
        if isinstance(train := keys.get("train"), dict) and "seed" in train:
            source.complain((*at, "train", "seed"), f"{where}.train.seed: a table's seeds are listed under seeds")
    if isinstance(recipe, TableRecipe):
        _known_names(recipe, source, changes)


def _known_names(recipe: TableRecipe, source: Source, changes: Mapping[Keys, object]) -> None:
    """Add the problems of the rows and tasks that a table of tasks names."""
    if recipe.costs is not None:
        named: dict[Keys, str] = {("costs", "of"): recipe.costs.of}
        for row, control in recipe.costs.controls.items():
            named |= {("costs", "controls", row): row, ("costs", "controls", row, control): control}
        for at, row in named.items():
            if row not in recipe.rows:
                where = ".".join(map(str, at[:3]))
                source.complain(at[:3], f"{where}: no row {row!r}{did_you_mean(row, list(recipe.rows))}")
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


def _changes(recipe: AnyTable, source: Source) -> dict[Keys, dict[str, object]]:
    """Return the keys of a cell's recipe that differ in rows and tasks, by their place in the table."""
    if not isinstance(recipe, TableRecipe):
        return {("rows", row): keys for row, keys in recipe.rows.items()}
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


# Sweeps

_OF_A_ROW = ("draft", "method", "objective", "init_from", "generate")  # stated whole by each row, not by the table
_NAMED_WHOLE = ("generate",)  # sections whose keys are never meant by a bare one: theirs change no training
_SEED: Keys = ("train", "seed")


@dataclass(frozen=True)
class Axis:
    """One swept key, its values, and the override it was written in."""

    keys: Keys
    values: list[Json]
    place: Place


def sweep(recipe: Recipe, source: Source, asked: Sequence[Axis]) -> Source:
    """Return the table that the recipe of a run and its ``sweep.KEY=[...]`` overrides describe.

    Its rows are the combinations of all swept keys but the task and the seed, which are the table's own axes.
    A bare key means the one section that has it: ``lr`` is ``train.lr``, ``r`` is ``method.r``; ``seed`` is
    ``train.seed``, not the one that answers, or a draft's training text, are sampled with.

    Args:
        recipe: the validated recipe without the sweeps.
        source: what it was read from.
        asked: the swept keys as they were written.
    """
    if isinstance(recipe, AnyTable):
        for axis in asked[:1]:
            text = f"only recipes of kind finetune and draft are swept, this is a {recipe.kind}"
            source.problems.append(Problem(axis.place, text))
        return source
    axes = []
    for axis in asked:
        try:
            axes.append(replace(axis, keys=_setting(recipe, source, axis.keys)))
        except PeftlabError as error:
            source.problems.append(Problem(axis.place, str(error)))
    if source.problems:
        return source
    axes.sort(key=lambda axis: axis.keys != ("method",))  # the method first: it replaces its whole section
    table = _table(recipe, source)
    lines: dict[str, Json] = {}
    table.data["rows"] = lines
    columns: dict[Keys, str] = {_SEED: "seeds"}
    if isinstance(recipe, FinetuneRecipe):
        columns["task",] = "tasks"
    rows = []
    for axis in axes:
        if axis.keys in columns:
            name = columns[axis.keys]
            table.data[name] = axis.values
            table.places |= {(name, *i): axis.place for i in [(), *((n,) for n in range(len(axis.values)))]}
        else:
            rows.append(axis)
    only = recipe.method.name if isinstance(recipe, FinetuneRecipe) else recipe.draft.kind
    names = _names([axis.keys for axis in rows])
    for values in product(*(axis.values for axis in rows)):
        pairs = zip(names, values, strict=True)
        label = " ".join(f"{name}={_shown(value)}" for name, value in pairs) or only
        lines[label] = _row(table, source, label, rows, values)
    return table


def _table(recipe: FinetuneRecipe | DraftRecipe, source: Source) -> Source:
    """Return the table of a recipe, without its rows."""
    finetuned = isinstance(recipe, FinetuneRecipe)
    kind: type[AnyTable] = TableRecipe if finetuned else DraftTableRecipe
    shared = [key for key in shared_keys(kind) if key not in _OF_A_ROW]
    data = {key: copy.deepcopy(source.data[key]) for key in shared if source.data.get(key) is not None}
    if isinstance(train := data.get("train"), dict):
        train.pop("seed", None)
    data |= {"kind": "table" if finetuned else "draft_table", "seeds": [recipe.train.seed]}
    data["output_dir"] = f"{recipe.output_dir}-sweep"
    places = {
        keys: place for keys, place in source.places.items() if keys[:1] in {(key,) for key in shared} or not keys
    }
    if isinstance(recipe, FinetuneRecipe):
        data["tasks"] = [recipe.task]
        places["tasks", 0] = source.place(("task",))
    return Source(data, places)


def _setting(recipe: Recipe, source: Source, keys: Keys) -> Keys:
    """Return the full path of a swept key; ``PeftlabError`` where it is not one setting."""
    if keys == ("seed",):
        return _SEED
    known = all_sections(type(recipe), source.data)
    owners = [name for name, fields in known.items() if name not in ("", *_NAMED_WHOLE) and keys[0] in fields]
    if len(keys) == 1 and keys[0] not in known[""] and owners:
        if len(owners) > 1:
            raise PeftlabError(f"{keys[0]}: write {' or '.join(f'sweep.{name}.{keys[0]}' for name in owners)}")
        keys = (owners[0], *keys)
    if len(keys) > 2:
        raise PeftlabError(f"{dotted(keys[:2])}: sweep it as a whole: sweep.{dotted(keys[:2])}=[value, value]")
    if keys in (("data",), ("train",)):
        raise PeftlabError(f"{dotted(keys)}: is a section; sweep one of its keys")
    return keys


def _row(table: Source, source: Source, label: str, axes: list[Axis], values: Sequence[Json]) -> Json:
    """Return a row's own keys; the places where they were written are added to ``table``."""
    row = {key: copy.deepcopy(source.data[key]) for key in _OF_A_ROW if source.data.get(key) is not None}
    if "draft" in row:
        row["draft"] = to_json(draft_of_a_reference(row["draft"]))
    at = ("rows", label)
    table.places[at] = axes[0].place if axes else table.place(())
    table.places |= {
        (*at, *keys): place for keys, place in source.places.items() if keys[:1] in {(key,) for key in _OF_A_ROW}
    }
    for axis, value in zip(axes, values, strict=True):
        if axis.keys == ("method",):
            own = row.get("method")
            if not (isinstance(own, dict) and own.get("name") == value):  # the recipe's own method keeps its settings
                row["method"] = {"name": value} if isinstance(value, str) else value
        elif len(axis.keys) == 1:
            row[str(axis.keys[0])] = value
        else:
            section, key = map(str, axis.keys)
            above = row.get(section)
            row[section] = {**(above if isinstance(above, dict) else {}), key: value}
        table.places[(*at, *axis.keys)] = axis.place
    return row


def _names(keys: list[Keys]) -> list[str]:
    """The last of each path of keys, the section of its name or kind; the whole path where two would be equal."""
    last = [str(path[-2 if path[-1] in ("name", "kind") and len(path) > 1 else -1]) for path in keys]
    return [name if last.count(name) == 1 else dotted(path) for name, path in zip(last, keys, strict=True)]


def _shown(value: Json) -> str:
    if isinstance(value, list):
        return ",".join(map(_shown, value))
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)
