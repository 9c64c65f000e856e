"""What a recipe says, by PyYAML's parser and the core schema of YAML 1.2; and whether a printed recipe says that."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import yaml

from peftlab.methods.config import METHODS
from peftlab.recipe.schema import KINDS, OWN_MODULES_LR

_TAG = "tag:yaml.org,2002:"
_CORE = (
    (re.compile(r"~|null|Null|NULL|"), lambda text: None),
    (re.compile(r"true|True|TRUE"), lambda text: True),
    (re.compile(r"false|False|FALSE"), lambda text: False),
    (re.compile(r"[-+]?[0-9]+"), int),
    (re.compile(r"0o[0-7]+"), lambda text: int(text[2:], 8)),
    (re.compile(r"0x[0-9a-fA-F]+"), lambda text: int(text[2:], 16)),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
)


class Unreadable(Exception):
    """PyYAML does not read the text, or it is not what a recipe may be."""


def read(text: str) -> Any:
    """Return a YAML document as plain values; duplicate keys and foreign tags are ``Unreadable``."""
    try:
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise Unreadable(str(error)) from None
    return _value(root) if root is not None else None


def _value(node: yaml.Node) -> Any:
    if isinstance(node, yaml.SequenceNode):
        return [_value(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        if len(keys) != len(set(map(str, keys))):
            raise Unreadable("a key is double")
        return {key: _value(value) for key, (_, value) in zip(keys, node.value, strict=True)}
    if node.style is not None:
        return node.value
    for pattern, convert in _CORE:
        if pattern.fullmatch(node.value):
            return convert(node.value)
    return node.value


def overridden(data: Any, overrides: Iterable[str]) -> Any:
    """Return ``data`` after ``key=value`` and ``~key`` in turn."""
    for text in overrides:
        name, _, value_text = text.removeprefix("~").partition("=")
        *above, last = name.strip().split(".")
        section = data
        for key in above:
            if section.get(key) is None:
                section[key] = {}
            section = section[key]
        if text.startswith("~"):
            del section[last]
        else:
            value = read(value_text)
            section[last] = {"name": value} if (above, last) == ([], "method") and isinstance(value, str) else value
    return data


def disagreement(stated: Any, printed: Any, schema: dict[str, Any]) -> str:
    """Return where ``printed`` is neither what was stated nor, where nothing was, the schema's default."""
    kind = stated.get("kind", "finetune")
    name = KINDS[kind].__name__
    if kind in ("finetune", "draft"):
        printed = _without_own_lr(stated.get("train"), printed)
    return _differs(stated, printed, {"$ref": f"#/$defs/{name}"}, schema["$defs"], kind)


def _without_own_lr(stated: Any, printed: dict[str, Any]) -> dict[str, Any]:
    """Return what was printed with null in the place of the method's own learning rate, which stands for it."""
    if isinstance(stated, dict) and stated.get("lr") is not None:
        return printed
    method = printed["method"]
    own = OWN_MODULES_LR if method is None else METHODS[method["name"]].default_lr
    return {**printed, "train": {**printed["train"], "lr": None}} if printed["train"]["lr"] == own else printed


def _differs(stated: Any, printed: Any, node: dict[str, Any], definitions: dict[str, Any], where: str) -> str:
    if where in ("draft.draft", "draft_table.draft") and isinstance(stated, str):
        stated = {"kind": "model", "from": stated}
    if isinstance(stated, str) and isinstance(printed, list):  # a text stands for the list of it alone
        stated = [stated]
    if not isinstance(stated, dict):
        return "" if _equal(stated, printed) else f"{where}: printed {printed!r}, the file says {stated!r}"
    if not isinstance(printed, dict):
        return f"{where}: printed {printed!r}, the file says {stated!r}"
    properties = _section(node, stated, definitions).get("properties")
    if properties is None:  # a mapping of free keys
        return "" if _equal(stated, printed) else f"{where}: printed {printed!r}, the file says {stated!r}"
    if set(printed) != set(properties):
        return f"{where}: printed the keys {sorted(printed)}"
    for key, value in printed.items():
        inner = properties[key]
        if key in stated:
            fault = _differs(stated[key], value, inner, definitions, f"{where}.{key}")
            if fault:
                return fault
        elif "default" in inner and not isinstance(inner["default"], dict):
            if not _equal(inner["default"], value):
                return f"{where}.{key}: printed {value!r}, the default is {inner['default']!r}"
        elif isinstance(value, dict) and _section(inner, value, definitions).get("properties"):
            tag = {"name": value["name"]} if "name" in value else {}
            fault = _differs(tag, value, inner, definitions, f"{where}.{key}")
            if fault:
                return fault
        elif value is None and "default" not in inner and {"type": "null"} in inner.get("anyOf", []):
            continue  # the default depends on other keys, and may be null
        elif value not in ({}, inner.get("default", {})):
            return f"{where}.{key}: printed {value!r}, nothing was stated"
    return ""


def _section(node: dict[str, Any], value: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the definition that a mapping is described by."""
    if "$ref" in node:
        return definitions[node["$ref"].rpartition("/")[2]]
    for option in node.get("anyOf", []):
        if "discriminator" in option:
            return _section(option, value, definitions)
    if "discriminator" in node:
        reference = node["discriminator"]["mapping"].get(value.get(node["discriminator"]["propertyName"], "lora"))
        return definitions[reference.rpartition("/")[2]]
    references = [option for option in node.get("anyOf", []) if "$ref" in option]
    return _section(references[0], value, definitions) if references else {}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return set(one) == set(other) and all(_equal(value, other[key]) for key, value in one.items())
    return one == other and isinstance(one, bool) == isinstance(other, bool)
