"""Images within token ids: an image's tokens have ids that say which image it is.

A text with images is then a list of integers like any other: it is stored, compared and decoded as such, and two texts
are equal only where their images are. Such an id is the placeholder's own and, in the bits above it, which no id of a
vocabulary has, a digest of the file. The embeddings of a model that sees put an image's states in the place of its
tokens (``tasks.image_prompts``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

_BITS, _DIGEST = 20, 40
LIMIT = 1 << _BITS
"""Ids from here on are of images; no vocabulary is as large."""

Ids = TypeVar("Ids", int, "Tensor")


def image_id(digest: str, token: int) -> int:
    """Return the id of the tokens of an image.

    Args:
        digest: of its file, hexadecimal. token: the placeholder's id.
    """
    return (1 + int(digest, 16) % (1 << _DIGEST)) << _BITS | token


def text_id(ids: Ids) -> Ids:
    """Return ids [...] of the vocabulary: an image's tokens have the placeholder's."""
    return ids & (LIMIT - 1)


def draft_places(ids: Sequence[int], rows: int | None) -> list[int]:
    """Return the place of each token of a text in what a draft reads of it; -1: it does not read it.

    Of each unbroken run of an image's tokens it reads ``rows`` parts of equal length, each as one; a run that is no
    longer is read as it is.

    Args:
        ids: of the text. rows: 0: no image is read; None: each token is.
    """
    if rows is None:
        return list(range(len(ids)))
    places, begin, following = list[int](), 0, 0
    while begin < len(ids):
        end = begin + 1
        seen = ids[begin] >= LIMIT
        while seen and end < len(ids) and ids[end] == ids[begin]:
            end += 1
        length = end - begin
        kept = min(rows, length) if seen else 1
        places += [following + place * kept // length if kept else -1 for place in range(length)]
        begin, following = end, following + kept
    return places
