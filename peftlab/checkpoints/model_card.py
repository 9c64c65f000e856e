"""README.md of a directory for the hub: front matter, and Markdown that survives any name, recipe or table cell."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
# What YAML 1.1 readers (the hub's Python client) and 1.2 readers alike read as a string without quotes.
_PLAIN = re.compile(r"[A-Za-z][\w-]*([./][A-Za-z][\w-]*)*", re.ASCII)
_NOT_A_STRING = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


@dataclass(frozen=True)
class Training:
    """What a card says of the training behind a model.

    Attributes:
        name: title and model name. summary: what was trained on what, the end of the card's first sentence.
        parts: Markdown blocks. data: front matter: task, data sets, results.
    """

    name: str
    summary: str
    parts: Sequence[str]
    data: Mapping[str, object]


def model_card(
    data: Mapping[str, object], name: str, parts: Sequence[str], *, recipe: str | None, license_: str | None
) -> str:
    """Return a model card: metadata, title, ``parts``, recipe, and what the base model's licence means for the result.

    Args:
        data: the front matter; nulls are left out.
        name: the model's name or directory. parts: Markdown blocks.
        recipe: the resolved recipe's YAML. license_: of the base model, as its own card calls it.
    """
    blocks = [f"---\n{front_matter(data)}---", f"# {prose(name)}", *parts]
    if recipe:
        blocks.append(f"## Recipe\n\n{fence(recipe, 'yaml')}")
    if license_:
        blocks.append(
            f"## Licence\n\nThe base model is licensed under {code(license_)}; "
            "its terms apply to what is derived from it."
        )
    return "\n\n".join(blocks) + "\n"


def hub_id(reference: str | None) -> str | None:
    """Return ``reference`` if the hub would accept it as an id: it refuses cards that name local paths."""
    named = reference and _HUB_ID.fullmatch(reference) and not Path(reference).exists()
    return reference if named else None


def front_matter(values: Mapping[str, object]) -> str:
    """Return ``values`` as YAML that YAML 1.1 and 1.2 readers understand alike; nulls are left out."""
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.width = 1 << 20
    yaml.allow_unicode = False
    buffer = io.StringIO()
    yaml.dump(_quoted(values), buffer)
    return buffer.getvalue()


def _quoted(value: object) -> object:
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString

    if isinstance(value, Mapping):
        return {key: _quoted(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_quoted(inner) for inner in value]
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, str) and (not _PLAIN.fullmatch(value) or value.lower() in _NOT_A_STRING):
        return DoubleQuotedScalarString(value)
    return value


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(prose(cell) for cell in line)} |" for line in lines)


def prose(text: str) -> str:
    """Return ``text`` on one line with what Markdown or HTML would interpret escaped."""
    escaped = re.sub(r"([\\`*_\[\]|])", r"\\\1", " ".join(text.split()))
    return escaped.replace("&", "&amp;").replace("<", "&lt;")


def code(text: str) -> str:
    """Return ``text`` as inline code, whatever backticks it contains."""
    ticks = "`" * (_longest_run(text) + 1)
    return f"{ticks}{text}{ticks}" if len(ticks) == 1 else f"{ticks} {text} {ticks}"


def fence(text: str, language: str) -> str:
    """Return ``text`` as a fenced block, whatever fences it contains."""
    ticks = "`" * max(3, _longest_run(text) + 1)
    return f"{ticks}{language}\n{text.rstrip()}\n{ticks}"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
