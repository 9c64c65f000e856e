"""The one kind of error a user is meant to read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from itertools import islice

_TYPED = 200  # characters of a name
_COMPARED = 10_000  # names


class PeftlabError(Exception):
    """A mistake in a recipe, a file or a call, told in one message.

    The message names the file, key or module at fault, the reason, and the nearest right spelling where
    there is one. The command line prints it without a traceback and exits with ``status``.
    """

    status = 2


def nearest(name: str, candidates: Iterable[str], n: int = 3) -> list[str]:
    """Return up to ``n`` of ``candidates`` spelled most like ``name``, best first, case ignored.

    Comparing takes the product of two lengths: what is too long to have been typed, as a text where a name is
    expected, resembles nothing.
    """
    if len(name) > _TYPED:
        return []
    by_lower = {c.lower(): c for c in islice(candidates, _COMPARED) if len(c) <= _TYPED}
    return [by_lower[m] for m in difflib.get_close_matches(name.lower(), by_lower, n=n, cutoff=0.5)]


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the nearest candidate, or an empty string."""
    matches = nearest(name, candidates, n=1)
    return f" (did you mean '{matches[0]}'?)" if matches else ""
