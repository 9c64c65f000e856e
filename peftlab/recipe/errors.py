"""What is wrong with a recipe: each problem in one line with its place, the reason and the nearest right spelling."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Annotated, Literal, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel, BeforeValidator, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from peftlab.errors import PeftlabError, same_setting, suggest, usual_form
from peftlab.files import Json

ModelT = TypeVar("ModelT", bound=BaseModel)
Keys = tuple[str | int, ...]
"""The path of a value in a recipe: ``("train", "betas", 0)``."""


@dataclass(frozen=True, order=True)
class Place:
    """A place in a recipe: a line of a file (``rank`` 0) or an override (its number, from 1)."""

    rank: int
    line: int
    source: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" if self.line else self.source


@dataclass(frozen=True, order=True)
class Problem:
    """One line of the final message; problems sort in the order of the file, then of the overrides."""

    place: Place
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


@dataclass
class Source:
    """A recipe as written.

    Attributes:
        data: plain values.
        places: where the value at each path of keys was written; ``()`` is the whole.
        problems: what is wrong so far.
    """

    data: dict[str, Json]
    places: dict[Keys, Place]
    problems: list[Problem] = field(default_factory=list)

    def place(self, keys: Keys) -> Place:
        """Return where ``keys`` was written, or the nearest section above it that was."""
        while keys not in self.places:
            keys = keys[:-1]
        return self.places[keys]

    def add_problem(self, keys: Keys, text: str) -> None:
        """Add a problem at the place of ``keys``."""
        self.problems.append(Problem(self.place(keys), text))

    def refuse_problems(self) -> None:
        """Raise ``PeftlabError`` with one line for each problem, if there is any."""
        if self.problems:
            raise PeftlabError("\n".join(map(str, sorted(self.problems))))


def dotted(keys: Iterable[str | int]) -> str:
    """Spell a path of keys as an override does: ``train.lr``."""
    return ".".join(map(str, keys))


def validated(recipe: type[ModelT], source: Source) -> ModelT | None:
    """Return ``source.data`` as a ``recipe``; None if it is not valid.

    Args:
        recipe: the kind of recipe.
        source: what was written; the problems of its data are added to it.
    """
    try:
        # Strict as for JSON: lists become tuples, but text never becomes a number.
        return recipe.model_validate_json(json.dumps(source.data), strict=True)
    except ValidationError as error:
        _explain(recipe, source, error)
        return None


def _explain(recipe: type[BaseModel], source: Source, error: ValidationError) -> None:
    """Add every problem of a validation error to ``source``."""
    seen = set()
    for item in error.errors(include_url=False):
        if item["type"] == "recipe":  # raised by a recipe's own check of keys that contradict each other
            for keys, reason in item["ctx"]["problems"]:
                source.add_problem(keys, reason)
            continue
        if item["type"] == "default_factory_not_called":  # a default that depends on a key with a problem of its own
            continue
        keys, text = _sentence(recipe, source, item)
        field_keys, field = _field_at(recipe, source.data, keys)
        if field and sections(field) and item["type"].startswith("bool") and isinstance(item["input"], dict):
            continue  # a section was meant, whose own branch of the union says what is wrong with it
        # Each branch of a union fails by itself, at one field: report the field once.
        if (field_keys or keys) not in seen:
            seen.add(field_keys or keys)
            source.add_problem(keys, f"{dotted(field_keys or keys)}: {text}" if keys else text)


def _sentence(recipe: type[BaseModel], source: Source, item: ErrorDetails) -> tuple[Keys, str]:
    """Return the keys that one of pydantic's errors is about, and what is wrong with their value."""
    kind, data = item["type"], source.data
    keys = _data_keys(item["loc"], data)
    if kind == "missing":
        keys = (*_data_keys(item["loc"][:-1], data), item["loc"][-1])
    if kind == "value_error":
        return keys, str(item["ctx"]["error"])
    if kind == "extra_forbidden":
        if keys[-1:] != item["loc"][-1:]:  # pydantic spells a key that is no Unicode text in another way
            return keys, f"unknown key {str(item['loc'][-1])!r}"
        return keys, _unknown_key(recipe, source, keys)
    field_keys, field = _field_at(recipe, data, keys)
    if field is None:
        return keys, item["msg"]
    if kind == "missing":
        return keys, f"missing. {field.description or describe(field)}"
    options = sections(field)
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        tag, section = str(field.discriminator), _value_at(data, keys)
        tags = section if isinstance(section, dict) else {}
        name = tags.get(tag)
        if isinstance(name, str):
            reason = f"unknown {dotted(keys)} {name!r}{usual_form(name) or suggest(name, options)}; "
        elif tag in tags:
            reason = ""
        else:
            able = [option for option, model in options.items() if tags.keys() <= fields(model).keys()]
            reason = f"missing; write {dotted(keys)}={{{tag}: {(able or list(options))[0]}, ...}}; "
        return (*keys, tag), f"{reason}one of {', '.join(options)}"
    value = _value_at(data, field_keys)
    if options and bool not in alternatives(field.annotation):
        hint = f" (write {{{field.discriminator}: {value}}})" if field.discriminator and isinstance(value, str) else ""
        return keys, f"expected keys below it, got {_shown(value)}{hint}"
    return keys, f"expected {describe(field)}, got {_shown(value)}{_value_hint(field, value)}"


_OLD_BOOLEANS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def _value_hint(field: FieldInfo, value: Json) -> str:
    """Return the value that was probably meant, in brackets; an empty text where nothing is near."""
    kinds, known = alternatives(field.annotation), _literals(field.annotation)
    words = [word for word in (value if isinstance(value, list) else [value]) if isinstance(word, str)]
    for word in words:
        if word not in known and (hint := usual_form(word) or suggest(word, known)):
            return hint
    if bool in kinds and words and words[0].lower() in _OLD_BOOLEANS:
        return f" (did you mean {_OLD_BOOLEANS[words[0].lower()]}?)"
    if list[str] in kinds and isinstance(value, str):
        return f" (did you mean [{value}]?)"
    if str in kinds and isinstance(value, (bool, int, float)):
        return " (put it in quotes)"
    return ""


def _unknown_key(recipe: type[BaseModel], source: Source, keys: Keys) -> str:
    """Return what is wrong with a key that its section does not have: refused, elsewhere, or misspelt."""
    if (refused := _refusal(keys, _value_at(source.data, keys))) is not None:
        return f"refused: {refused}"
    *above, key = map(str, keys)
    if form := usual_form(key) or usual_form(_value_at(source.data, keys)):
        return f"unknown key{form}"
    valid = all_sections(recipe, source.data)
    here = valid.get(".".join(above), {})
    name, _, rest = key.partition(":")
    if name in here and rest:  # YAML reads a colon without a blank as part of the key
        return f"unknown key (did you mean '{name}: {rest}', with a blank after the colon?)"
    section = source.data.get("method") if above == ["method"] else None
    method = section if isinstance(section, dict) else {}
    if method and source.place(("method", "name")).rank and not source.place(keys).rank:
        chosen = method.get("name")
        return f"no key of method {chosen}; remove it by '~{dotted(keys)}', or write 'method={{name: {chosen}}}'"
    if same_setting(key, here):
        return f"unknown key{suggest(key, here)}"
    for place, known in valid.items():
        if found := same_setting(key, known):
            where = f"'{place}.{found}'" if place else f"{found!r} at the top level"
            return f"unknown key (did you mean {where}?)"
    if method:
        owners = [name for name, model in sections(recipe.model_fields["method"]).items() if key in fields(model)]
        if owners:
            return f"unknown key; it belongs to method {' or '.join(owners)}, not {method.get('name')}"
    return f"unknown key{suggest(key, here) or '; keys here: ' + ', '.join(here)}"


def _shown(value: Json) -> str:
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


# Where a key is in the data and in the schema


def all_sections(recipe: type[BaseModel], data: Mapping[str, Json]) -> dict[str, dict[str, FieldInfo]]:
    """Return every section's fields by its dotted name, the top level (``""``) first, as ``data`` has chosen them.

    Sections of sections are those that ``data`` has.
    """
    found: dict[str, dict[str, FieldInfo]] = {}

    def add(name: str, model: type[BaseModel], values: Mapping[str, Json]) -> None:
        found[name] = fields(model)
        for key, info in fields(model).items():
            value = values.get(key)
            if (not name or isinstance(value, dict)) and (inner := _section(info, value)):
                add(f"{name}.{key}" if name else key, inner, value if isinstance(value, dict) else {})

    add("", recipe, data)
    return found


def _section(field: FieldInfo, value: Json) -> type[BaseModel] | None:
    """Return the model that checks ``value`` in ``field``; None if that is not a section or its tag is unknown."""
    models = sections(field)
    if not field.discriminator:
        return models.get("")
    tag = value.get(str(field.discriminator)) if isinstance(value, dict) else None
    return models.get(tag) if isinstance(tag, str) else next(iter(models.values()), None)


def _field_at(recipe: type[BaseModel], data: Json, keys: Keys) -> tuple[Keys, FieldInfo | None]:
    """Return the deepest field along ``keys``, and the keys up to it."""
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


def _data_keys(location: Keys, data: Json) -> Keys:
    """Return pydantic's location without the tags of union branches, which are not keys of the data."""
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


# The schema in words


def fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return a model's fields by the keys a recipe has for them (``from``, which Python does not take as a name).

    Without those that no recipe has: what is left out of the JSON Schema.
    """
    return {
        field.alias or name: field
        for name, field in model.model_fields.items()
        if not any(type(part).__name__ == "SkipJsonSchema" for part in field.metadata)
    }


def sections(field: FieldInfo) -> dict[str, type[BaseModel]]:
    """Return the models a field may contain, by their tag (``""`` where the field has no discriminator)."""
    models = [a for a in alternatives(field.annotation) if isinstance(a, type) and issubclass(a, BaseModel)]
    tag = str(field.discriminator) if field.discriminator else None
    return {_literals(model.model_fields[tag].annotation)[0] if tag else "": model for model in models}


def alternatives(annotation: object) -> list[object]:
    """Return the branches of a union, ``Annotated`` stripped; a plain type is its own only branch."""
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [inner for branch in get_args(annotation) for inner in alternatives(branch)]
    return [annotation]


def _literals(annotation: object) -> list[str]:
    """Return the words that occur literally anywhere in ``annotation``."""
    if get_origin(annotation) is Literal:
        return [value for value in get_args(annotation) if isinstance(value, str)]
    return [word for inner in get_args(annotation) for word in _literals(inner)]


def describe(field: FieldInfo) -> str:
    """Say what values a field takes: ``whole number from 1 or null``."""
    return _type_in_words(field.annotation, field.metadata)


_WORDS: dict[object, str] = {
    str: "text", int: "whole number", float: "number", bool: "true or false", NoneType: "null", object: "value",
}  # fmt: skip


def _type_in_words(annotation: object, constraints: Iterable[object]) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        written = next((each.json_schema_input_type for each in args[1:] if isinstance(each, BeforeValidator)), args[0])
        args = (written, *args[1:])
        inner = [c for a in args[1:] for c in (a.metadata if isinstance(a, FieldInfo) else [a])]
        return _type_in_words(args[0], [*inner, *constraints])
    if origin in (Union, UnionType):
        # "number" includes whole numbers; simple types come before lists, null comes last.
        kinds = [kind for kind in args if not (kind is int and float in args)]
        kinds.sort(key=lambda kind: (kind is NoneType, get_origin(kind) is list))
        return " or ".join(dict.fromkeys(_type_in_words(kind, constraints) for kind in kinds))
    if origin is Literal:
        words = [str(value).lower() if isinstance(value, bool) else str(value) for value in args]
        return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
    if origin is tuple and args[-1] is not Ellipsis:
        return f"[{', '.join(_type_in_words(a, ()) for a in args)}]"
    if origin in (list, tuple):
        return f"list of {_type_in_words(args[0], ())}{_size_in_words(constraints)}"
    if origin is dict:
        return f"mapping of name to {_type_in_words(args[1], ())}{_size_in_words(constraints)}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    words = [_WORDS.get(annotation, str(annotation))]
    for constraint in constraints if annotation in (int, float) else ():
        match constraint:
            case Gt(gt=bound):
                words.append(f"above {bound}")
            case Ge(ge=bound):
                words.append(f"from {bound}")
            case Lt(lt=bound):
                words.append(f"below {bound}")
            case Le(le=bound):
                words.append(f"to {bound}")
    return " ".join(words)


def _size_in_words(constraints: Iterable[object]) -> str:
    least = next((c.min_length for c in constraints if isinstance(c, MinLen)), None)
    most = next((c.max_length for c in constraints if isinstance(c, MaxLen)), None)
    if least is None and most is None:
        return ""
    if least == most:
        return f" ({least} entries)"
    if most is None:
        return f" ({least} or more entries)"
    return f" ({least or 0} to {most} entries)"


def _refusal(keys: Keys, value: Json) -> str | None:
    """Return why the key at ``keys`` is refused, whatever its value; None for a key that is merely unknown."""
    return _TWO_OF_FOUR if (*keys, value) == ("train", "sparsity", "2:4") else _REFUSED.get(keys)


# Keys that a reader of papers may try; the figures are in docs/guide/efficiency.md.
_TWO_OF_FOUR = (
    "2:4 sparsity needs a GPU's sparse products, which torch refuses on CPUs, and the largest gradients are biased; "
    "train.emulate.prune shows what an unbiased kind does to the score"
)
_GATES = (
    "gates that depend on the input make the rows of a batch disagree and break caches of keys and values; choices "
    "of train.layers are the same for all rows"
)
_REFUSED: dict[Keys, str] = {
    ("train", "sparsity"): "single zeros in a weight save no time: with half of them a product took 5.1 times as long "
    "as the dense on a CPU; fewer trained layers (train.layers) do",
    ("train", "gates"): _GATES,
    ("train", "layers", "gates"): _GATES,
    ("train", "sign_gradients"): "predictive sign gradients save only on hardware that computes leading bits first, "
    "and signs are biased; train.emulate.gradients shows few bits with an unbiased rounding",
    ("train", "local_blocks"): "blocks with exits of their own train another objective, and fewer bytes come with the "
    "same gradients: set train.gradient_accumulation_steps, or gradient_checkpointing",
}
