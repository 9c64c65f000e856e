"""The schema in words: what a field takes, for error messages and for the reference page."""

from __future__ import annotations

from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

_WORDS: dict[object, str] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    NoneType: "null",
    object: "value",
}


def describe(field: FieldInfo) -> str:
    """Say what values a field takes: ``whole number from 1 or null``."""
    return _type(field.annotation, field.metadata)


def alternatives(annotation: object) -> list[object]:
    """Return the branches of a union, ``Annotated`` stripped; a plain type is its own only branch."""
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [inner for branch in get_args(annotation) for inner in alternatives(branch)]
    return [annotation]


def literals(annotation: object) -> list[str]:
    """Return the words that occur literally anywhere in ``annotation``."""
    if get_origin(annotation) is Literal:
        return [value for value in get_args(annotation) if isinstance(value, str)]
    return [word for inner in get_args(annotation) for word in literals(inner)]


def sections(field: FieldInfo) -> dict[str, type[BaseModel]]:
    """Return the models a field may contain, by their tag (``""`` where the field has no discriminator)."""
    models = [a for a in alternatives(field.annotation) if isinstance(a, type) and issubclass(a, BaseModel)]
    tag = str(field.discriminator) if field.discriminator else None
    return {literals(model.model_fields[tag].annotation)[0] if tag else "": model for model in models}


def fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return a model's fields by the keys a recipe has for them (``from``, which Python does not take as a name).

    Without those that no recipe has: what is left out of the JSON Schema.
    """
    return {
        field.alias or name: field
        for name, field in model.model_fields.items()
        if not any(type(part).__name__ == "SkipJsonSchema" for part in field.metadata)
    }


def _type(annotation: object, constraints: Iterable[object]) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [c for a in args[1:] for c in (a.metadata if isinstance(a, FieldInfo) else [a])]
        return _type(args[0], [*inner, *constraints])
    if origin in (Union, UnionType):
        # "number" includes whole numbers; simple types come before lists, null comes last.
        kinds = [kind for kind in args if not (kind is int and float in args)]
        kinds.sort(key=lambda kind: (kind is NoneType, get_origin(kind) is list))
        return " or ".join(dict.fromkeys(_type(kind, constraints) for kind in kinds))
    if origin is Literal:
        words = [str(value).lower() if isinstance(value, bool) else str(value) for value in args]
        return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
    if origin is tuple and args[-1] is not Ellipsis:
        return f"[{', '.join(_type(a, ()) for a in args)}]"
    if origin in (list, tuple):
        return f"list of {_type(args[0], ())}{_size(constraints)}"
    if origin is dict:
        return f"mapping of name to {_type(args[1], ())}{_size(constraints)}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    word = _WORDS.get(annotation, str(annotation))
    return word + _range(constraints) if annotation in (int, float) else word


def _range(constraints: Iterable[object]) -> str:
    words = []
    for constraint in constraints:
        match constraint:
            case Gt(gt=bound):
                words.append(f" above {bound}")
            case Ge(ge=bound):
                words.append(f" from {bound}")
            case Lt(lt=bound):
                words.append(f" below {bound}")
            case Le(le=bound):
                words.append(f" to {bound}")
    return "".join(words)


def _size(constraints: Iterable[object]) -> str:
    least = next((c.min_length for c in constraints if isinstance(c, MinLen)), None)
    most = next((c.max_length for c in constraints if isinstance(c, MaxLen)), None)
    if least is None and most is None:
        return ""
    if least == most:
        return f" ({least} entries)"
    if most is None:
        return f" ({least} or more entries)"
    return f" ({least or 0} to {most} entries)"
