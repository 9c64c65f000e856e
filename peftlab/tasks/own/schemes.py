"""Entities in a sequence of tags, as conlleval and seqeval count them.

A tag is ``O`` (outside) or a prefix and a type: ``B-PER``, ``I-PER``. One rule reads all the usual schemes (IOB1, IOB2,
IOE, IOBES, BILOU): a word continues the entity of the word before it if its prefix is I or E (L), that of the word
before it is B or I, and both have one type; any other tag but O begins an entity.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

OUTSIDE = "O"
Entity = tuple[str, int, int]
"""Type, first and last word."""
_TAG = re.compile(r"([BIESLU])(?:-(.*))?", re.DOTALL)
_SAME = {"L": "E", "U": "S"}  # BILOU's letters, and IOBES's


def entity_tag(tag: str) -> bool:
    """Return whether a tag is ``O`` or like ``B-PER`` (or ``B``, where there is one type)."""
    return tag == OUTSIDE or _TAG.fullmatch(tag) is not None


def of_entities(tags: Collection[str]) -> bool:
    """Return whether a set of tags is one of entities: it contains ``O``, and one like ``B-PER`` or no other kind."""
    return OUTSIDE in tags and (any("-" in tag and entity_tag(tag) for tag in tags) or all(map(entity_tag, tags)))


def entity_type(tag: str) -> str | None:
    """Return the type of an entity's tag, ``_`` where it names none; None for ``O``."""
    return None if tag == OUTSIDE else _parts(tag)[1]


def entities(tags: Sequence[str]) -> list[Entity]:
    """Return the entities of a sentence whose words have ``tags``, in order."""
    found: list[Entity] = []
    before = ("", "")
    for place, tag in enumerate(tags):
        prefix, kind = now = _parts(tag)
        if prefix in "IE" and before[0] in ("B", "I") and before[1] == kind:
            found[-1] = (kind, found[-1][1], place)
        elif tag != OUTSIDE:
            found.append((kind, place, place))
        before = now
    return found


def _parts(tag: str) -> tuple[str, str]:
    matched = _TAG.fullmatch(tag)
    if matched is None:
        return OUTSIDE, ""
    return _SAME.get(matched[1], matched[1]), matched[2] or "_"
