"""The recipe reference, generated from the schema: JSON Schema for editors, ``docs/reference/recipes.md`` for users.

``python -m peftlab.recipe.document`` writes the page into the repository.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic.json_schema import models_json_schema

from peftlab.files import write_text
from peftlab.methods.config import METHODS
from peftlab.recipe import library
from peftlab.recipe.errors import describe, fields, sections
from peftlab.recipe.schema import KINDS

_INTRODUCTION = """\
# Recipes

<!-- Written by `python -m peftlab.recipe.document` from the schema; edit the descriptions there. -->

A recipe is one YAML 1.2 file that determines a run. It is validated as a whole before anything is loaded; every
mistake is reported with file, line and the nearest right spelling.

    peftlab run glue/cola-lora                         # a shipped recipe by its short name; needs the hub
    peftlab run my.yaml train.lr=2e-4 method.r=16      # overrides: key=value, the value is YAML
    peftlab run my.yaml method=full '~data.validation' output_dir=runs/full   # another method by name; ~ removes a key
    peftlab run my.yaml sweep.lr='[1e-4, 5e-4]'        # a grid: see guide/tables.md

Overrides apply from left to right. Paths are relative to the working directory, not to the recipe's file. The run
directory contains the resolved recipe, which can be run again.
"""


def json_schema() -> dict[str, object]:
    """Return the JSON Schema (draft 2020-12) of all kinds of recipe, for editors that complete YAML."""
    references, schema = models_json_schema([(kind, "validation") for kind in KINDS.values()])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "peftlab recipe",
        "anyOf": list(references.values()),
        **schema,
    }


def reference_markdown() -> str:
    """Return the reference page: the shipped recipes, and a table for every kind, section and method."""
    parts = [_INTRODUCTION, "## Shipped recipes\n", _table(("name", "what it does"), _shipped_rows())]
    described: set[type[BaseModel]] = set()
    for kind, recipe in KINDS.items():
        parts += [f"## `kind: {kind}`\n", _first_line(recipe) + "\n", _fields(recipe, "")]
        for name, field in recipe.model_fields.items():
            models = {tag: model for tag, model in sections(field).items() if model not in described}
            if not models:  # described with an earlier kind
                continue
            described.update(models.values())
            if field.discriminator:
                listing = ", ".join(f"`{tag}`" for tag in models)
                parts.append(f"## `{name}`\n\nOne of {listing}, selected by `{field.discriminator}`.\n")
            for tag, model in models.items():
                of = "" if recipe is next(iter(KINDS.values())) else f" of `kind: {kind}`"
                title = f"### `{name}: {{{field.discriminator}: {tag}}}`" if tag else f"## `{name}`{of}"
                parts += [f"{title}\n", _first_line(model) + "\n", _fields(model, str(field.discriminator))]
                if name == "method":
                    parts.append(f"Its learning rate where `train.lr` is null: {METHODS[str(tag)].default_lr:g}.\n")
    return "\n".join(parts)


def _shipped_rows() -> Iterator[tuple[str, str]]:
    for name, summary in library.shipped():
        yield f"`{name}`", summary


def _fields(model: type[BaseModel], discriminator: str) -> str:
    rows = [
        (f"`{name}`", describe(field), _default(field), field.description or "")
        for name, field in fields(model).items()
        if name != discriminator
    ]
    return _table(("key", "takes", "default", "meaning"), rows) if rows else "No keys.\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return f"`{{name: {value.name}}}`" if hasattr(value, "name") else "see below"
    return f"`{json.dumps(value)}`"


def _first_line(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip().splitlines()[0].replace("``", "`")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


if __name__ == "__main__":
    write_text(library.recipes_root().parent / "docs" / "reference" / "recipes.md", reference_markdown())
