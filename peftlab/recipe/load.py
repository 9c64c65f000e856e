"""From a recipe's YAML and overrides to a validated recipe, a table's cells, or a sweep's table; and back to text."""

from __future__ import annotations

import copy
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.representer import RoundTripRepresenter

from peftlab.errors import PeftlabError, did_you_mean, same_setting, suggest
from peftlab.files import Json, read_text, to_json
from peftlab.methods.config import METHODS
from peftlab.recipe import library
from peftlab.recipe.errors import Keys, Place, Problem, Source, all_sections, dotted, fields, validated
from peftlab.recipe.schema import (
    KINDS,
    AnyTable,
    DraftRecipe,
    DraftTableRecipe,
    FinetuneRecipe,
    Recipe,
    TableRecipe,
    section_of_reference,
)
from peftlab.tasks.table import TASKS

SWEEP = "sweep."
_TAG = "tag:yaml.org,2002:"
_TYPED = {_TAG + name for name in ("null", "bool", "int", "float")}
# YAML 1.2 has no dates, merge keys or default values: what reads like one of them is text.
_TEXT = {_TAG + name for name in ("str", "timestamp", "merge", "value")}
# More than any recipe needs; without them a few lines of aliases would expand beyond any memory.
_MAX_VALUES, _MAX_LEVELS = 100_000, 50
_SIMPLE = re.compile(r"[A-Za-z0-9_][\w./:=@-]*[\w./]|[A-Za-z0-9_]", re.ASCII)


def load_recipe(name: str | Path, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe, apply ``overrides`` in order and validate the result.

    Args:
        name: a file, or the short name of a shipped recipe (``glue/cola-lora``); a file wins.
        overrides: ``train.lr=1e-4`` (the value is YAML 1.2), ``~data.path`` to remove a key,
            ``method=lora`` for ``method={name: lora}``; ``sweep.lr=[1e-4,5e-4]`` makes a table of it.

    Raises:
        PeftlabError: with one line for each problem, beginning with ``FILE:LINE:`` or
            ``override '...':``.
    """
    source = read_source(recipe_file(name))
    sweeps = []
    for number, text in enumerate(overrides, start=1):
        if text.startswith(SWEEP):
            sweeps.append((number, text))
        else:
            override(source, text, number)
    kind = source.data.get("kind", next(iter(KINDS)))
    recipe: Recipe | None = None
    if isinstance(kind, str) and kind in KINDS:
        recipe = validated(KINDS[kind], source)
    else:
        hint = did_you_mean(str(kind), KINDS)
        source.add_problem(("kind",), f"kind: unknown kind {kind!r}{hint}; one of {', '.join(KINDS)}")
    if recipe is not None and sweeps:
        axes = []
        for number, text in sweeps:
            place = Place(number, 0, f"override {text!r}")
            try:
                axes.append(_swept_key(source, text, place))
            except PeftlabError as error:
                source.problems.append(Problem(place, str(error).removeprefix(f"{place}: ")))
        source = sweep(recipe, source, axes)
        recipe = None if source.problems else validated(KINDS[str(source.data["kind"])], source)
    if isinstance(recipe, AnyTable):
        expand(recipe, source)
    source.refuse_problems()
    assert recipe is not None, "a recipe without problems is valid"
    return recipe


def recipe_file(name: str | Path) -> Path:
    """Return the file that ``name`` means: itself, or a shipped recipe's.

    Raises:
        PeftlabError: there is neither; the nearest files and shipped recipes are named.
    """
    path = Path(name)
    if path.exists() and not path.is_dir():
        return path
    short = str(name).removesuffix(".yaml")
    if short in library.files():
        return library.find(short)
    if path.is_dir():
        inside = ", ".join(sorted(p.name for p in path.glob("*.yaml"))) or "none"
        raise PeftlabError(f"{name} is a directory, not a recipe; recipes in it: {inside}")
    siblings = [str(p) for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    hint = did_you_mean(str(name), [*siblings, *library.files()])
    raise PeftlabError(f"{name}: no such file and no shipped recipe of that name{hint}")


def read_source(path: Path) -> Source:
    """Read a recipe file, whose top level is a mapping.

    Raises:
        PeftlabError: not UTF-8, not YAML, empty, or not a mapping.
    """
    # As a user would type it here: relative if it is below the working directory.
    shown = os.path.relpath(path) if path.absolute().is_relative_to(Path.cwd()) else str(path)
    source = Source({}, {(): Place(0, 0, shown)})
    data = parse(read_text(path), source, lambda line: Place(0, line, shown))
    if data is None:
        raise PeftlabError(f"{shown}: the recipe is empty")
    if not isinstance(data, dict):
        found = "a list" if isinstance(data, list) else "one value"
        raise PeftlabError(f"{shown}: a recipe is a mapping of keys such as model and task, not {found}")
    source.data = data
    return source


def parse(text: str, source: Source, place: Callable[[int], Place], at: Keys = ()) -> Json:
    """Return one YAML 1.2 document as plain values.

    ruamel's nodes are read rather than what it makes of them: they have each line, all of several equal keys, and dates
    as they were written.

    Args:
        text: the document.
        source: where each value was written is added to its places; duplicate keys and unknown tags to its problems.
        place: makes a Place of a line number (0 for the whole document).
        at: the keys of the recipe whose value the document is.

    Raises:
        PeftlabError: the text is not one YAML document, or its aliases expand to more values than a recipe may have.
    """
    yaml = YAML(typ="safe", pure=True)
    try:
        root = yaml.compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = " ".join(part for part in (error.context, error.problem) if part)
        raise PeftlabError(f"{place(mark.line + 1 if mark else 0)}: not valid YAML: {reason}") from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise PeftlabError(f"{place(line)}: not valid YAML: character U+{error.character:04X} is not allowed") from None
    except YAMLError as error:
        raise PeftlabError(f"{place(0)}: not valid YAML: {error}") from None
    except RecursionError:
        raise PeftlabError(f"{place(0)}: nested too deeply for a recipe") from None
    count = 0

    def value(node: Node, keys: Keys, above: tuple[Node, ...]) -> Json:
        """Return the value of ``node``, the one at ``keys``; ``above`` are the nodes that contain it."""
        nonlocal count
        count += 1
        if count > _MAX_VALUES:
            raise PeftlabError(f"{place(0)}: more than {_MAX_VALUES:,} values, aliases expanded")
        if node in above:
            source.add_problem(keys, f"{dotted(keys)}: an alias refers to a value that contains it")
        elif len(above) > _MAX_LEVELS:
            source.add_problem(keys[:3], f"{dotted(keys[:3])}: nested too deeply")
        elif isinstance(node, MappingNode) and node.tag == _TAG + "map":
            return mapping(node, keys, (*above, node))
        elif isinstance(node, SequenceNode) and node.tag == _TAG + "seq":
            source.places |= {(*keys, i): place(item.start_mark.line + 1) for i, item in enumerate(node.value)}
            return [value(item, (*keys, i), (*above, node)) for i, item in enumerate(node.value)]
        elif isinstance(node, ScalarNode) and node.tag in _TYPED | _TEXT:
            return scalar(node, keys)
        else:
            source.add_problem(keys, f"{dotted(keys)}: unknown tag {str(node.tag).replace(_TAG, '!!')}")
        return None

    def scalar(node: ScalarNode, keys: Keys) -> Json:
        if node.tag in _TEXT:
            return node.value
        try:
            found = yaml.constructor.construct_object(node)
        except (ValueError, KeyError, YAMLError):
            found = node.value if node.tag != _TAG + "int" else 2**63  # more digits than Python converts
        if isinstance(found, int) and abs(found) >= 2**63:
            source.add_problem(keys, f"{dotted(keys)}: a number of {len(node.value)} digits is too large")
            return node.value
        # No setting is infinite or NaN: left as text, the schema refuses it with the text as it was written.
        return node.value if isinstance(found, float) and not math.isfinite(found) else found

    def mapping(node: MappingNode, keys: Keys, above: tuple[Node, ...]) -> dict[str, Json]:
        values: dict[str, Json] = {}
        for key_node, value_node in node.value:
            here = place(key_node.start_mark.line + 1)
            if not isinstance(key_node, ScalarNode):
                source.problems.append(Problem(here, "a key is one word, not a list or a mapping"))
                continue
            inner = (*keys, key_node.value)
            if key_node.value in values:
                first = source.places[inner].line
                source.problems.append(
                    Problem(here, f"{dotted(inner)}: duplicate key{f', first on line {first}' if first else ''}")
                )
            else:
                source.places[inner] = here
                values[key_node.value] = value(value_node, inner, above)
        return values

    return None if root is None else value(root, at, ())


def override(source: Source, text: str, number: int = 1) -> None:
    """Apply ``a.b=VALUE`` (in YAML) or ``~a.b`` (remove the key) to ``source``; mistakes become its problems.

    ``method=lora`` is short for ``method={name: lora}``.

    Args:
        source: the recipe.
        text: the override.
        number: its number among the overrides, from 1.
    """
    place = Place(number, 0, f"override {text!r}")

    def add_problem(problem: str) -> None:
        source.problems.append(Problem(place, problem))

    removing = text.startswith("~")
    name, equals, value_text = (text[1:], "=", "") if removing else text.partition("=")
    keys = tuple(name.strip().split("."))
    if not equals or not all(keys):
        return add_problem("write key=value, section.key=value, or ~section.key to remove one")
    section = source.data
    for depth, key in enumerate(keys[:-1], start=1):
        if section.get(key) is None and not removing:
            section[key] = {}
            source.places[keys[:depth]] = place
        inner = section.get(key)
        if not isinstance(inner, dict):
            reason = "no such key" + suggest(key, section) if inner is None else "has no keys below it"
            return add_problem(f"{dotted(keys[:depth])}: {reason}")
        section = inner
    if removing:
        if keys[-1] not in section:
            return add_problem(f"{dotted(keys)}: no such key to remove{suggest(keys[-1], section)}")
        del section[keys[-1]]
    else:
        if not value_text.strip():
            return add_problem(f"{dotted(keys)}: no value; write null or '' if that is meant")
        given = Source({}, {(): place, keys: place})
        try:
            value = parse(value_text, given, lambda _: place, keys)
        except PeftlabError as error:
            return add_problem(str(error).removeprefix(f"{place}: "))
        section[keys[-1]] = {"name": value} if keys == ("method",) and isinstance(value, str) else value
        source.problems += given.problems
    for known in [known for known in source.places if known[: len(keys)] == keys]:
        del source.places[known]
    if not removing:
        source.places[keys] = place


def parse_fields(texts: Iterable[str]) -> dict[str, Json]:
    """Return the mapping of ``key=value`` texts; each value is YAML 1.2, as in overrides.

    Raises:
        PeftlabError: naming every text that is not of that form.
    """
    source = Source({}, {})
    for number, text in enumerate(texts, start=1):
        override(source, text, number)
    source.refuse_problems()
    return source.data


# Tables: their cells, each task in each row with each seed as a complete recipe

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


def runs_of(recipe: Recipe) -> list[FinetuneRecipe | DraftRecipe]:
    """Return the recipes that running ``recipe`` runs: itself, or a table's cells."""
    return [cell.recipe for cell in table_cells(recipe)] if isinstance(recipe, AnyTable) else [recipe]


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
        own = {*to_json(recipe.per_task.get(task, {})), *line, *(here if isinstance(here, dict) else {})}
        cell.data["task"] = task
        cell.places[("task",)] = source.place(("tasks", recipe.tasks.index(task)))
        if task in recipe.init and "init_from" not in own:
            cell.data["init_from"] = _directory(recipe, recipe.init[task], row, seed)
    else:
        merge(line, ("rows", row))
        own = {*line}
        cell.data["kind"] = "draft"
    if isinstance(train := cell.data["train"], dict):
        cell.data["train"] = {**train, "seed": seed}
    cell.data["output_dir"] = _directory(recipe, task, row, seed)
    if "merge" not in own and not _folds(cell.data.get("method")):
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
                source.add_problem((key, i), f"{key}: {item} occurs twice")
    names: dict[str, str] = {}
    for row in recipe.rows:
        other = names.setdefault(_file_name(row), row)
        if other != row:
            source.add_problem(("rows", row), f"rows: {row!r} and {other!r} would have the same directories")
    if recipe.train.seed:
        source.add_problem(("train", "seed"), "train.seed: a table's seeds are listed under seeds")
    changes = _changes(recipe, source)
    own = {*_OF_THE_TABLE, "task"} if isinstance(recipe, TableRecipe) else {*_OF_THE_TABLE}
    for at, keys in changes.items():
        where = ".".join(map(str, at))
        for key in keys.keys() & own:
            source.add_problem((*at, key), f"{where}.{key}: the table sets it for all cells")
        if isinstance(train := keys.get("train"), dict) and "seed" in train:
            source.add_problem((*at, "train", "seed"), f"{where}.train.seed: a table's seeds are listed under seeds")
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
                source.add_problem(at[:3], f"{where}: no row {row!r}{did_you_mean(row, list(recipe.rows))}")
    # Keys may name tasks that the table leaves out, so that tasks can be removed; what is no task at all is a mistake.
    for at in [*(at for at in changes if PER_TASK in at), *(("init", task) for task in recipe.init)]:
        task = str(at[-1])
        if task not in TASKS:
            hint = did_you_mean(task, [*recipe.tasks, *TASKS])
            source.add_problem(at, f"{'.'.join(map(str, at[:-1]))}: unknown task {task!r}{hint}")
    for task, start in recipe.init.items():
        if task in recipe.tasks and (start not in recipe.tasks or start in recipe.init):
            reason = "itself under init" if start in recipe.init else "not under tasks"
            text = f"init.{task}: {start} is {reason}; '~init.{task}' starts from the pretrained model instead"
            source.add_problem(("init", task), text)


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
            source.add_problem(
                at, f"{'.'.join(at)}: expected tasks, and keys below each, as the table's own per_task has"
            )
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


def _swept_key(source: Source, text: str, place: Place) -> Axis:
    """Return what the override ``sweep.KEY=[...]`` asks for; ``PeftlabError`` where that is not valid."""
    name, equals, value_text = text.removeprefix(SWEEP).partition("=")
    keys: Keys = tuple(name.strip().split("."))
    if not equals or not all(keys):
        raise PeftlabError(f"write {SWEEP}key=[value, value]")
    source.places[text,] = place
    values = parse(value_text, source, lambda _: place, (text,))
    if not isinstance(values, list) or not values:
        raise PeftlabError(f"{dotted(keys)}: a sweep takes a list of values: {SWEEP}{dotted(keys)}=[value, value]")
    if any(value in values[:i] for i, value in enumerate(values)):
        raise PeftlabError(f"{dotted(keys)}: a value occurs twice")
    return Axis(keys, values, place)


def sweep(recipe: Recipe, source: Source, swept_axes: Sequence[Axis]) -> Source:
    """Return the table that the recipe of a run and its ``sweep.KEY=[...]`` overrides describe.

    Its rows are the combinations of all swept keys but the task and the seed, which are the table's own axes.
    A bare key means the one section that has it: ``lr`` is ``train.lr``, ``r`` is ``method.r``; ``seed`` is
    ``train.seed``, not the one that answers, or a draft's training text, are sampled with.

    Args:
        recipe: the validated recipe without the sweeps.
        source: what it was read from.
        swept_axes: the swept keys as they were written.
    """
    if isinstance(recipe, AnyTable):
        for axis in swept_axes[:1]:
            text = f"only recipes of kind finetune and draft are swept, this is a {recipe.kind}"
            source.problems.append(Problem(axis.place, text))
        return source
    axes = []
    for axis in swept_axes:
        try:
            axes.append(replace(axis, keys=_setting(recipe, source, axis.keys)))
            if axes[-1].keys in [other.keys for other in axes[:-1]]:
                raise PeftlabError(f"{dotted(axis.keys)}: swept twice; give all values in one list")
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
    elif len(keys) == 1 and keys[0] not in known[""]:
        every = [field for fields in known.values() for field in fields]
        if not same_setting(str(keys[0]), every) and (hint := did_you_mean(str(keys[0]), every)):
            raise PeftlabError(f"{keys[0]}: unknown key{hint}")
    if len(keys) > 2:
        raise PeftlabError(f"{dotted(keys[:2])}: sweep it as a whole: sweep.{dotted(keys[:2])}=[value, value]")
    if keys in (("data",), ("train",)):
        raise PeftlabError(f"{dotted(keys)}: is a section; sweep one of its keys")
    return keys


def _row(table: Source, source: Source, label: str, axes: list[Axis], values: Sequence[Json]) -> Json:
    """Return a row's own keys; the places where they were written are added to ``table``."""
    row = {key: copy.deepcopy(source.data[key]) for key in _OF_A_ROW if source.data.get(key) is not None}
    if "draft" in row:
        row["draft"] = to_json(section_of_reference(row["draft"]))
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


# Back to text


def dump_recipe(recipe: Recipe, header: str = "") -> str:
    """Return ``recipe`` with all its defaults as YAML text that loads to an equal recipe.

    Args:
        recipe: any kind of recipe.
        header: lines to put above it as comments.
    """
    yaml = YAML()
    yaml.Representer = _Representer
    yaml.width = 2**20
    out = io.StringIO()
    values = recipe.model_dump(mode="json", by_alias=True)
    if not isinstance(recipe, AnyTable) and recipe.method is not None:
        values["method"] = {key: values["method"][key] for key in fields(type(recipe.method))}
    yaml.dump(_in_flow_style(values), out)
    return "".join(f"# {line}".rstrip() + "\n" for line in header.splitlines()) + out.getvalue()


class _Representer(RoundTripRepresenter):
    """Writes ``null`` rather than nothing, and all but simple words in double quotes."""

    def null(self, value: None) -> ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:null", "null")

    def text(self, value: str) -> ScalarNode:
        # The emitter's own choice of quotes misses a few: [? x], [: x], the control character U+0085.
        return self.represent_scalar("tag:yaml.org,2002:str", value, style=None if _SIMPLE.fullmatch(value) else '"')


_Representer.add_representer(type(None), _Representer.null)
_Representer.add_representer(str, _Representer.text)


def _in_flow_style(value: Json) -> Json:
    """Return mappings in block style, lists in brackets, the way recipes are written."""
    if isinstance(value, dict):
        return {key: _in_flow_style(inner) for key, inner in value.items()}
    if isinstance(value, list):
        items = CommentedSeq(map(_in_flow_style, value))
        items.fa.set_flow_style()
        return items
    return value
