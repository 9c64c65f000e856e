"""A grid from the command line: ``sweep.lr='[1e-4,5e-4]'`` on a finetune recipe makes a table of it."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from peftlab.errors import PeftlabError
from peftlab.files import Json
from peftlab.recipe.problems import all_sections
from peftlab.recipe.schema import FinetuneRecipe, Recipe
from peftlab.recipe.source import Keys, Place, Source, dotted, parse
from peftlab.recipe.table_cells import SHARED

SWEEP = "sweep."
_OF_A_ROW = ("method", "objective", "init_from", "generate")  # what a table has no key of its own for
_NAMED_WHOLE = ("generate",)  # sections whose keys are never meant by a bare one: theirs change no training


@dataclass(frozen=True)
class _Axis:
    """One swept key, its values, and the override it was written in."""

    keys: Keys
    values: list[Json]
    place: Place


def sweep(recipe: Recipe, source: Source, texts: Sequence[tuple[int, str]]) -> Source:
    """Return the table that a finetune recipe and its ``sweep.KEY=[...]`` overrides describe.

    Its rows are the combinations of all swept keys but the task and the seed, which are the table's own axes.
    A bare key means the one section that has it: ``lr`` is ``train.lr``, ``r`` is ``method.r``; ``seed`` is
    ``train.seed``, not the one that answers are sampled with.

    Args:
        recipe, source: the validated recipe without the sweeps, and its source.
        texts: (number, text) of the overrides.
    """
    if not isinstance(recipe, FinetuneRecipe):
        for number, text in texts:
            _axis(source, number, text)
        source.complain((SWEEP, texts[0][0]), f"only recipes of kind finetune are swept, this is a {recipe.kind}")
        return source
    axes = [axis for number, text in texts if (axis := _axis(source, number, text))]
    if source.problems:
        return source
    axes.sort(key=lambda axis: axis.keys != ("method",))  # the method first: it replaces its whole section
    shared = {key: copy.deepcopy(source.data[key]) for key in SHARED if source.data.get(key) is not None}
    if isinstance(train := shared.get("train"), dict):
        train.pop("seed", None)
    lines: dict[str, Json] = {}
    table = Source(
        {
            "kind": "table",
            **shared,
            "tasks": [recipe.task],
            "rows": lines,
            "seeds": [recipe.train.seed],
            "output_dir": f"{recipe.output_dir}-sweep",
        },
        {keys: place for keys, place in source.places.items() if keys[:1] in {(key,) for key in SHARED} or not keys},
    )
    table.places[("tasks", 0)] = source.place(("task",))
    rows = []
    for axis in axes:
        if axis.keys in (("task",), ("train", "seed")):
            name = "tasks" if axis.keys == ("task",) else "seeds"
            table.data[name] = axis.values
            table.places |= {(name, *i): axis.place for i in [(), *((n,) for n in range(len(axis.values)))]}
        else:
            rows.append(axis)
    names = _names([axis.keys for axis in rows])
    for values in product(*(axis.values for axis in rows)):
        pairs = zip(names, values, strict=True)
        label = " ".join(f"{name}={_shown(value)}" for name, value in pairs) or recipe.method.name
        lines[label] = _row(table, source, label, rows, values)
    return table


def _axis(source: Source, number: int, text: str) -> _Axis | None:
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
    sections = dict(all_sections(FinetuneRecipe, source.data))
    owners = [name for name, fields in sections.items() if name not in ("", *_NAMED_WHOLE) and keys[0] in fields]
    if len(keys) == 1 and keys[0] not in sections[""] and owners:
        if len(owners) > 1:
            full = " or ".join(f"{SWEEP}{section}.{keys[0]}" for section in owners)
            source.complain(at, f"{keys[0]}: write {full}")
            return None
        keys = (owners[0], *keys)
    if len(keys) > 2 or keys in (("data",), ("train",)):
        reason = "has no keys to sweep" if len(keys) > 2 else "is a section; sweep one of its keys"
        source.complain(at, f"{dotted(keys[:2])}: {reason}")
        return None
    return _Axis(keys, values, place)


def _row(table: Source, source: Source, label: str, axes: list[_Axis], values: Sequence[Json]) -> Json:
    """Return a row's own keys; the places where they were written are added to ``table``."""
    row = {key: copy.deepcopy(source.data[key]) for key in _OF_A_ROW if source.data.get(key) is not None}
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
    """The last of each path of keys; the whole path where two would be equal."""
    last = [str(path[-1]) for path in keys]
    return [name if last.count(name) == 1 else dotted(path) for name, path in zip(last, keys, strict=True)]


def _shown(value: Json) -> str:
    if isinstance(value, list):
        return ",".join(map(_shown, value))
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)
