"""From a recipe file and overrides to a validated recipe, and back to text."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedSeq
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.representer import RoundTripRepresenter

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import Json
from peftlab.recipe import library
from peftlab.recipe.problems import validated
from peftlab.recipe.schema import KINDS, Recipe
from peftlab.recipe.source import Source, override, read_source
from peftlab.recipe.sweep import SWEEP, sweep
from peftlab.recipe.table_cells import expand
from peftlab.recipe.table_schema import AnyTable
from peftlab.recipe.wording import fields

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
    path = recipe_file(name)
    source = read_source(path, _shown(path))
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
        source = sweep(recipe, source, sweeps)
        recipe = None if source.problems else validated(KINDS[str(source.data["kind"])], source)
    if isinstance(recipe, AnyTable):
        expand(recipe, source)
    if recipe is None or source.problems:
        raise PeftlabError("\n".join(map(str, sorted(source.problems))))
    return recipe


def parse_fields(texts: Iterable[str]) -> dict[str, Json]:
    """Return the mapping of ``key=value`` texts; each value is YAML 1.2, as in overrides.

    Raises:
        PeftlabError: naming every text that is not of that form.
    """
    source = Source({}, {})
    for number, text in enumerate(texts, start=1):
        override(source, text, number)
    if source.problems:
        raise PeftlabError("\n".join(map(str, sorted(source.problems))))
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
    beside = [str(p) for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    hint = did_you_mean(str(name), [*beside, *library.files()])
    raise PeftlabError(f"{name}: no such file and no shipped recipe of that name{hint}")


def _shown(path: Path) -> str:
    """``path`` as a user would type it here: relative if it is below the working directory."""
    return os.path.relpath(path) if path.absolute().is_relative_to(Path.cwd()) else str(path)


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
    """Mappings in block style, lists in brackets, the way recipes are written."""
    if isinstance(value, dict):
        return {key: _in_flow_style(inner) for key, inner in value.items()}
    if isinstance(value, list):
        items = CommentedSeq(map(_in_flow_style, value))
        items.fa.set_flow_style()
        return items
    return value
