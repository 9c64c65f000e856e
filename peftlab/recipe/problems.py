"""The schema's validation errors as messages with the place in the recipe and the nearest right spelling."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from peftlab.errors import did_you_mean
from peftlab.files import Json
from peftlab.recipe.former import former_spellings
from peftlab.recipe.refused import refusal
from peftlab.recipe.source import Keys, Source, dotted
from peftlab.recipe.suggestions import meant, suggest
from peftlab.recipe.wording import alternatives, describe, fields, literals, sections

ModelT = TypeVar("ModelT", bound=BaseModel)

_OLD_BOOLEANS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def validated(recipe: type[ModelT], source: Source) -> ModelT | None:
    """Return ``source.data`` as a ``recipe``; None if it is not valid, with its problems added to ``source``."""
    former = former_spellings(source.data)
    for keys, text in former:
        source.complain(keys, text)
    if former:
        return None
    try:
        # Strict as for JSON: lists become tuples, but text never becomes a number.
        return recipe.model_validate_json(json.dumps(source.data), strict=True)
    except ValidationError as error:
        explain(recipe, source, error)
        return None


def explain(recipe: type[BaseModel], source: Source, error: ValidationError) -> None:
    """Add to ``source`` every problem in ``error``, raised when ``recipe`` validated ``source.data``."""
    seen = set()
    for item in error.errors(include_url=False):
        if item["type"] == "recipe":
            for at, reason in item["ctx"]["problems"]:
                source.complain(at, reason)
            continue
        if item["type"] == "default_factory_not_called":  # a default that depends on a key with a problem of its own
            continue
        keys, text = _sentence(recipe, source, item)
        field_keys, field = _field_at(recipe, source.data, keys)
        if (
            field is not None
            and sections(field)
            and item["type"].startswith("bool")
            and isinstance(item["input"], dict)
        ):
            continue  # a section was meant, whose own branch of the union says what is wrong with it
        # Each branch of a union fails by itself, at one field: report the field once.
        if (field_keys or keys) not in seen:
            seen.add(field_keys or keys)
            source.complain(keys, f"{dotted(field_keys or keys)}: {text}" if keys else text)


def _sentence(recipe: type[BaseModel], source: Source, item: ErrorDetails) -> tuple[Keys, str]:
    kind = item["type"]
    location = item["loc"]
    keys = _data_keys(location, source.data)
    if kind == "missing":
        keys = (*_data_keys(location[:-1], source.data), location[-1])
    if kind == "value_error":
        return keys, str(item["ctx"]["error"])
    if kind == "extra_forbidden":
        return keys, _unknown_key(recipe, source, keys)
    field_keys, field = _field_at(recipe, source.data, keys)
    if field is None:
        return keys, item["msg"]
    if kind == "missing":
        return keys, f"missing. {field.description or describe(field)}"
    options = sections(field)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        tag = str(field.discriminator)
        section = _value_at(source.data, keys)
        tags = section if isinstance(section, dict) else {}
        name = tags.get(tag)
        listing = f"one of {', '.join(options)}"
        unknown = f"unknown {dotted(keys)} {name!r}{did_you_mean(name, options)}; " if isinstance(name, str) else ""
        return (*keys, tag), f"{unknown if tag in tags else 'missing; '}{listing}"
    value = _value_at(source.data, field_keys)
    if options and bool not in alternatives(field.annotation):
        hint = f" (write {{{field.discriminator}: {value}}})" if field.discriminator and isinstance(value, str) else ""
        return keys, f"expected keys below it, got {_shown(value)}{hint}"
    return keys, f"expected {describe(field)}, got {_shown(value)}{_value_hint(field, value)}"


def _value_hint(field: FieldInfo, value: Json) -> str:
    kinds, known = alternatives(field.annotation), literals(field.annotation)
    words = [word for word in (value if isinstance(value, list) else [value]) if isinstance(word, str)]
    for word in words:
        if word not in known and (hint := did_you_mean(word, known)):
            return hint
    if bool in kinds and words and words[0].lower() in _OLD_BOOLEANS:
        return f" (did you mean {_OLD_BOOLEANS[words[0].lower()]}?)"
    if list[str] in kinds and isinstance(value, str):
        return f" (did you mean [{value}]?)"
    if str in kinds and isinstance(value, (bool, int, float)):
        return " (put it in quotes)"
    return ""


def _unknown_key(recipe: type[BaseModel], source: Source, keys: Keys) -> str:
    if (reason := refusal(tuple(map(str, keys)), _value_at(source.data, keys))) is not None:
        return f"refused: {reason}"
    *above, key = map(str, keys)
    valid = dict(all_sections(recipe, source.data))
    here = valid.get(".".join(above), {})
    field, _, rest = key.partition(":")
    if field in here and rest:  # YAML reads a colon without a blank as part of the key
        return f"unknown key (did you mean '{field}: {rest}', with a blank after the colon?)"
    section = source.data.get("method") if above == ["method"] else None
    method = section if isinstance(section, dict) else {}
    if method and source.place(("method", "name")).rank and not source.place(keys).rank:
        chosen = method.get("name")
        return f"no key of method {chosen}; remove it by '~{dotted(keys)}', or write 'method={{name: {chosen}}}'"
    if meant(key, here):
        return f"unknown key{suggest(key, here)}"
    for section, known in valid.items():
        if found := meant(key, known):
            place = f"'{section}.{found}'" if section else f"{found!r} at the top level"
            return f"unknown key (did you mean {place}?)"
    if method:
        owners = [name for name, model in sections(recipe.model_fields["method"]).items() if key in fields(model)]
        if owners:
            return f"unknown key; it belongs to method {' or '.join(owners)}, not {method.get('name')}"
    return f"unknown key{suggest(key, here) or '; keys here: ' + ', '.join(here)}"


def all_sections(recipe: type[BaseModel], data: Mapping[str, Json]) -> list[tuple[str, dict[str, FieldInfo]]]:
    """Every section's dotted name and fields, the top level (``""``) first, as ``data`` has chosen them."""
    found: list[tuple[str, dict[str, FieldInfo]]] = [("", fields(recipe))]
    for name, field in recipe.model_fields.items():
        model = _section(field, data.get(name))
        if model:
            found.append((name, fields(model)))
    return found


def _section(field: FieldInfo, value: Json) -> type[BaseModel] | None:
    """The model that checks ``value`` in ``field``; None if that is not a section or its tag is unknown."""
    models = sections(field)
    if not field.discriminator:
        return models.get("")
    tag = value.get(str(field.discriminator)) if isinstance(value, dict) else None
    return models.get(tag) if isinstance(tag, str) else next(iter(models.values()), None)


def _field_at(recipe: type[BaseModel], data: Json, keys: Keys) -> tuple[Keys, FieldInfo | None]:
    """The deepest field along ``keys``, and the keys up to it."""
    model: type[BaseModel] | None = recipe
    found: tuple[Keys, FieldInfo | None] = ((), None)
    for depth, key in enumerate(keys, start=1):
        if model is None or key not in fields(model):
            # Below a section this is an unknown key; below a plain field, an element of its value.
            return found if model is None else (keys[:depth], None)
        field = fields(model)[str(key)]
        found = (keys[:depth], field)
        data = data.get(str(key)) if isinstance(data, dict) else None
        model = _section(field, data)
    return found


def _data_keys(location: tuple[str | int, ...], data: Json) -> Keys:
    """Pydantic's location without the tags of union branches, which are not keys of the data."""
    keys: list[str | int] = []
    for step in location:
        with suppress(LookupError):
            data = _item(data, step)
            keys.append(step)
    return tuple(keys)


def _value_at(data: Json, keys: Keys) -> Json:
    for key in keys:
        data = _item(data, key)
    return data


def _item(data: Json, key: str | int) -> Json:
    """Return the value of a section's key or of a list's index; ``LookupError`` if there is none."""
    if isinstance(data, dict):
        return data[str(key)]
    if isinstance(data, list) and isinstance(key, int):
        return data[key]
    raise LookupError(key)


def _shown(value: Json) -> str:
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
