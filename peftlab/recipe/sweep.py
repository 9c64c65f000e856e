"""A grid from the command line: ``sweep.lr='[1e-4,5e-4]'`` on the recipe of a run makes a table of it."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from peftlab.errors import PeftlabError
from peftlab.files import Json, to_json
from peftlab.recipe.problems import all_sections
from peftlab.recipe.schema import DraftRecipe, FinetuneRecipe, Recipe
from peftlab.recipe.source import Keys, Place, Source, dotted, parse
from peftlab.recipe.table_cells import shared_keys
from peftlab.recipe.table_schema import AnyTable, DraftTableRecipe, TableRecipe, draft_of_a_reference

SWEEP = "sweep."
_OF_A_ROW = ("draft", "method", "objective", "init_from", "generate")  # stated whole by each row, not by the table
_NAMED_WHOLE = ("generate",)  # sections whose keys are never meant by a bare one: theirs change no training
_SEED: Keys = ("train", "seed")


@dataclass(frozen=True)
class _Axis:
    """One swept key, its values, and the override it was written in."""

    keys: Keys
    values: list[Json]
    place: Place


def sweep(recipe: Recipe, source: Source, texts: Sequence[tuple[int, str]]) -> Source:
    """Return the table that the recipe of a run and its ``sweep.KEY=[...]`` overrides describe.

    Its rows are the combinations of all swept keys but the task and the seed, which are the table's own axes.
    A bare key means the one section that has it: ``lr`` is ``train.lr``, ``r`` is ``method.r``; ``seed`` is
    ``train.seed``, not the one that answers, or a draft's training text, are sampled with.

    Args:
        recipe, source: the validated recipe without the sweeps, and its source.
        texts: (number, text) of the overrides.
    """
    axes = [axis for number, text in texts if (axis := _axis(type(recipe), source, number, text))]
    if isinstance(recipe, AnyTable):
        where = (SWEEP, texts[0][0])
        source.complain(where, f"only recipes of kind finetune and draft are swept, this is a {recipe.kind}")
    if source.problems or isinstance(recipe, AnyTable):
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


def _axis(recipe: type[Recipe], source: Source, number: int, text: str) -> _Axis | None:
    """Return one override's axis; None, with a problem added to ``source``, if it is not valid."""
    place = Place(number, 0, f"override {text!r}")
    name, equals, value_text = text.removeprefix(SWEEP).partition("=")
    keys: Keys = tuple(name.strip().split("."))
    at: Keys = (SWEEP, number)
    source.places[at] = place
    if not equals or not all(keys):
        source.complain(at, f"write {SWEEP}key=[value, value]")
        return None
    try:
        given = parse(value_text, lambda _: place, at)
    except PeftlabError as error:
        source.complain(at, str(error).removeprefix(f"{place}: "))
        return None
    source.problems += given.problems
    values = given.data
    if not isinstance(values, list) or not values:
        source.complain(at, f"{dotted(keys)}: a sweep takes a list of values: {SWEEP}{dotted(keys)}=[value, value]")
        return None
    if any(value in values[:i] for i, value in enumerate(values)):
        source.complain(at, f"{dotted(keys)}: a value occurs twice")
        return None
    keys = _SEED if keys == ("seed",) else keys
    sections = dict(all_sections(recipe, source.data))
    owners = [name for name, fields in sections.items() if name not in ("", *_NAMED_WHOLE) and keys[0] in fields]
    if len(keys) == 1 and keys[0] not in sections[""] and owners:
        if len(owners) > 1:
            full = " or ".join(f"{SWEEP}{section}.{keys[0]}" for section in owners)
            source.complain(at, f"{keys[0]}: write {full}")
            return None
        keys = (owners[0], *keys)
    if len(keys) > 2 or keys in (("data",), ("train",)):
        whole = f"sweep it as a whole: {SWEEP}{dotted(keys[:2])}=[value, value]"
        source.complain(at, f"{dotted(keys[:2])}: {whole if len(keys) > 2 else 'is a section; sweep one of its keys'}")
        return None
    return _Axis(keys, values, place)


def _row(table: Source, source: Source, label: str, axes: list[_Axis], values: Sequence[Json]) -> Json:
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
