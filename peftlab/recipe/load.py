"""From a recipe's YAML and overrides to a validated recipe, and back to text."""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.representer import RoundTripRepresenter

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import Json, read_text
from peftlab.recipe import library
from peftlab.recipe.errors import Keys, Place, Problem, Source, dotted, fields, suggest, validated
from peftlab.recipe.schema import KINDS, AnyTable, Recipe
from peftlab.recipe.tables import Axis, expand, sweep

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
        source.complain(("kind",), f"kind: unknown kind {kind!r}{hint}; one of {', '.join(KINDS)}")
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
            source.complain(keys, f"{dotted(keys)}: an alias refers to a value that contains it")
        elif len(above) > _MAX_LEVELS:
            source.complain(keys[:3], f"{dotted(keys[:3])}: nested too deeply")
        elif isinstance(node, MappingNode) and node.tag == _TAG + "map":
            return mapping(node, keys, (*above, node))
        elif isinstance(node, SequenceNode) and node.tag == _TAG + "seq":
            source.places |= {(*keys, i): place(item.start_mark.line + 1) for i, item in enumerate(node.value)}
            return [value(item, (*keys, i), (*above, node)) for i, item in enumerate(node.value)]
        elif isinstance(node, ScalarNode) and node.tag in _TYPED | _TEXT:
            return scalar(node, keys)
        else:
            source.complain(keys, f"{dotted(keys)}: unknown tag {str(node.tag).replace(_TAG, '!!')}")
        return None

    def scalar(node: ScalarNode, keys: Keys) -> Json:
        if node.tag in _TEXT:
            return node.value
        try:
            found = yaml.constructor.construct_object(node)
        except (ValueError, KeyError, YAMLError):
            found = node.value if node.tag != _TAG + "int" else 2**63  # more digits than Python converts
        if isinstance(found, int) and abs(found) >= 2**63:
            source.complain(keys, f"{dotted(keys)}: a number of {len(node.value)} digits is too large")
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

    def complain(problem: str) -> None:
        source.problems.append(Problem(place, problem))

    removing = text.startswith("~")
    name, equals, value_text = (text[1:], "=", "") if removing else text.partition("=")
    keys = tuple(name.strip().split("."))
    if not equals or not all(keys):
        return complain("write key=value, section.key=value, or ~section.key to remove one")
    section = source.data
    for depth, key in enumerate(keys[:-1], start=1):
        if section.get(key) is None and not removing:
            section[key] = {}
            source.places[keys[:depth]] = place
        inner = section.get(key)
        if not isinstance(inner, dict):
            reason = "no such key" + suggest(key, section) if inner is None else "has no keys below it"
            return complain(f"{dotted(keys[:depth])}: {reason}")
        section = inner
    if removing:
        if keys[-1] not in section:
            return complain(f"{dotted(keys)}: no such key to remove{suggest(keys[-1], section)}")
        del section[keys[-1]]
    else:
        if not value_text.strip():
            return complain(f"{dotted(keys)}: no value; write null or '' if that is meant")
        given = Source({}, {keys: place})
        try:
            value = parse(value_text, given, lambda _: place, keys)
        except PeftlabError as error:
            return complain(str(error).removeprefix(f"{place}: "))
        section[keys[-1]] = {"name": value} if keys == ("method",) and isinstance(value, str) else value
        source.problems += given.problems
    for known in [known for known in source.places if known[: len(keys)] == keys]:
        del source.places[known]
    if not removing:
        source.places[keys] = place


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
