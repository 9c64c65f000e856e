"""A recipe's text: YAML 1.2 as plain values, where each of them was written, and overrides of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from peftlab.errors import PeftlabError
from peftlab.files import Json, read_text
from peftlab.recipe.suggestions import suggest

Keys = tuple[str | int, ...]
DataT = TypeVar("DataT")

_TAG = "tag:yaml.org,2002:"
_TYPED = {_TAG + name for name in ("null", "bool", "int", "float")}
# YAML 1.2 has no dates, merge keys or default values: what reads like one of them is text.
_TEXT = {_TAG + name for name in ("str", "timestamp", "merge", "value")}
# More than any recipe needs; without them a few lines of aliases would expand beyond any memory.
_MAX_VALUES, _MAX_LEVELS = 100_000, 50


@dataclass(frozen=True, order=True)
class Place:
    """Where something was written: a line of a file (``rank`` 0) or an override (its number, from 1)."""

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
class Document(Generic[DataT]):
    """A YAML document as written.

    Attributes:
        data: plain values.
        places: where the value at each path of keys was written; ``()`` is the document.
        problems: what is wrong so far.
    """

    data: DataT
    places: dict[Keys, Place]
    problems: list[Problem] = field(default_factory=list)

    def place(self, keys: Keys) -> Place:
        """Return where ``keys`` was written, or the nearest section above it that was."""
        while keys not in self.places:
            keys = keys[:-1]
        return self.places[keys]

    def complain(self, keys: Keys, text: str) -> None:
        """Add a problem at the place of ``keys``."""
        self.problems.append(Problem(self.place(keys), text))


Source = Document[dict[str, Json]]
"""A recipe as written."""


def dotted(keys: Iterable[str | int]) -> str:
    """Spell a path of keys as an override does: ``train.lr``."""
    return ".".join(map(str, keys))


def read_source(path: Path, shown: str) -> Source:
    """Read the recipe file ``path``, called ``shown`` in messages; its top level is a mapping.

    Raises:
        PeftlabError: not UTF-8, not YAML, empty, or not a mapping.
    """
    document = parse(read_text(path), lambda line: Place(0, line, shown))
    if document.data is None:
        raise PeftlabError(f"{shown}: the recipe is empty")
    if not isinstance(document.data, dict):
        found = "a list" if isinstance(document.data, list) else "one value"
        raise PeftlabError(f"{shown}: a recipe is a mapping of keys such as model and task, not {found}")
    return Source(document.data, document.places, document.problems)


def parse(text: str, place: Callable[[int], Place], at: Keys = ()) -> Document[Json]:
    """Parse one YAML 1.2 document, the value of the keys ``at`` of a recipe.

    ``place`` makes a Place of a line number (0 for the whole document). Duplicate keys and unknown tags become
    problems of the document.

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
    document: Document[Json] = Document(None, {at: place(0)})
    if root is not None:
        document.data = _Reader(yaml, document, place).value(root, at, ())
    return document


class _Reader:
    """Turns the nodes of one YAML document into plain values, and notes in ``source`` where each was written."""

    def __init__(self, yaml: YAML, source: Document[Json], place: Callable[[int], Place]) -> None:
        self.yaml, self.source, self.place = yaml, source, place
        self.count = 0

    def value(self, node: Node, keys: Keys, above: tuple[Node, ...]) -> Json:
        """Return the value of ``node``, the one at ``keys``; ``above`` are the nodes that contain it."""
        self.count += 1
        if self.count > _MAX_VALUES:
            raise PeftlabError(f"{self.place(0)}: more than {_MAX_VALUES:,} values, aliases expanded")
        if node in above:
            self.source.complain(keys, f"{dotted(keys)}: an alias refers to a value that contains it")
        elif len(above) > _MAX_LEVELS:
            self.source.complain(keys[:3], f"{dotted(keys[:3])}: nested too deeply")
        elif isinstance(node, MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, keys, (*above, node))
        elif isinstance(node, SequenceNode) and node.tag == _TAG + "seq":
            for index, item in enumerate(node.value):
                self.source.places[(*keys, index)] = self.place(item.start_mark.line + 1)
            return [self.value(item, (*keys, i), (*above, node)) for i, item in enumerate(node.value)]
        elif isinstance(node, ScalarNode) and node.tag in _TYPED | _TEXT:
            return self._scalar(node, keys)
        else:
            self.source.complain(keys, f"{dotted(keys)}: unknown tag {str(node.tag).replace(_TAG, '!!')}")
        return None

    def _scalar(self, node: ScalarNode, keys: Keys) -> Json:
        if node.tag in _TEXT:
            return node.value
        try:
            value = self.yaml.constructor.construct_object(node)
        except (ValueError, KeyError, YAMLError):
            value = node.value if node.tag != _TAG + "int" else 2**63  # more digits than Python converts
        if isinstance(value, int) and abs(value) >= 2**63:
            self.source.complain(keys, f"{dotted(keys)}: a number of {len(node.value)} digits is too large")
            return node.value
        # No setting is infinite or NaN: left as text, the schema refuses it with the text as it was written.
        return node.value if isinstance(value, float) and not math.isfinite(value) else value

    def _mapping(self, node: MappingNode, keys: Keys, above: tuple[Node, ...]) -> dict[str, Json]:
        values: dict[str, Json] = {}
        for key_node, value_node in node.value:
            here = self.place(key_node.start_mark.line + 1)
            if not isinstance(key_node, ScalarNode):
                self.source.problems.append(Problem(here, "a key is one word, not a list or a mapping"))
            elif key_node.value in values:
                first = self.source.places[(*keys, key_node.value)]
                text = f"{dotted((*keys, key_node.value))}: duplicate key"
                text += f", first on line {first.line}" if first.line else ""
                self.source.problems.append(Problem(here, text))
            else:
                inner = (*keys, key_node.value)
                self.source.places[inner] = here
                values[key_node.value] = self.value(value_node, inner, above)
        return values


def override(source: Source, text: str, number: int = 1) -> None:
    """Apply ``a.b=VALUE`` (in YAML) or ``~a.b`` (remove the key) to ``source``; mistakes become its problems.

    ``method=lora`` is short for ``method={name: lora}``.
    """
    place = Place(number, 0, f"override {text!r}")
    removing = text.startswith("~")
    name, equals, value_text = (text[1:], "=", "") if removing else text.partition("=")
    keys = tuple(name.strip().split("."))
    if not equals or not all(keys):
        source.problems.append(Problem(place, "write key=value, section.key=value, or ~section.key to remove one"))
        return
    section = source.data
    for depth, key in enumerate(keys[:-1], start=1):
        if section.get(key) is None and not removing:
            section[key] = {}
            source.places[keys[:depth]] = place
        inner = section.get(key)
        if not isinstance(inner, dict):
            reason = "no such key" + suggest(key, section) if inner is None else "has no keys below it"
            source.problems.append(Problem(place, f"{dotted(keys[:depth])}: {reason}"))
            return
        section = inner
    if removing:
        _remove(source, section, keys, place)
    else:
        _set(source, section, keys, place, value_text)


def _remove(source: Source, section: dict[str, Json], keys: Keys, place: Place) -> None:
    if keys[-1] not in section:
        text = f"{dotted(keys)}: no such key to remove{suggest(str(keys[-1]), section)}"
        source.problems.append(Problem(place, text))
        return
    del section[str(keys[-1])]
    _forget(source, keys)


def _set(source: Source, section: dict[str, Json], keys: Keys, place: Place, value_text: str) -> None:
    if not value_text.strip():
        source.problems.append(Problem(place, f"{dotted(keys)}: no value; write null or '' if that is meant"))
        return
    try:
        given = parse(value_text, lambda _: place, keys)
    except PeftlabError as error:
        source.problems.append(Problem(place, str(error).removeprefix(f"{place}: ")))
        return
    short = keys == ("method",) and isinstance(given.data, str)
    section[str(keys[-1])] = {"name": given.data} if short else given.data
    _forget(source, keys)
    source.places[keys] = place
    source.problems += given.problems


def _forget(source: Source, keys: Keys) -> None:
    for known in [known for known in source.places if known[: len(keys)] == keys]:
        del source.places[known]
