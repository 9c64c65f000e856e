"""Regular expressions from recipes and adapter files, matched within a bounded time.

``re`` can take exponential time and cannot be interrupted; ``regex`` reads the same syntax and takes a timeout.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

from peftlab.errors import PeftlabError

if TYPE_CHECKING:
    import regex

MAX_SECONDS = 2.0  # CPU time of one pattern against all names; an ordinary one takes microseconds per name
MAX_LENGTH = 10_000  # characters of a pattern
MAX_REPETITIONS = 10_000  # product of the counts of a pattern, as in {2,5}; regex unrolls them

# What ``regex`` reads differently from ``re``: a brace that begins no repetition (fuzzy matching) and a
# bracket inside a set (named classes). Both are literals to ``re``.
_TOKEN = re.compile(
    r"""(?P<kept>\\N\{[^}]*\}|\\.|\{(?:\d+(?:,\d*)?|,\d*)\})
    |(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])
    |(?P<brace>\{)""",
    re.VERBOSE | re.DOTALL,
)
_REPEATED = re.compile(r"\{[\d,]+\}")


def matching(pattern: str, names: Iterable[str], *, what: str) -> list[str]:
    """Return those of ``names`` that ``pattern`` matches in full, as ``re.fullmatch`` does.

    Args:
        what: the recipe key of the pattern, for the error.

    Raises:
        PeftlabError: it is not a regular expression, or matching takes longer than ``MAX_SECONDS`` in all.
    """
    compiled = _compiled(pattern, what)
    end = time.thread_time() + MAX_SECONDS
    try:
        return [name for name in names if compiled.fullmatch(name, timeout=max(end - time.thread_time(), 1e-3))]
    except TimeoutError:
        raise PeftlabError(
            f"{what}: matching the regular expression {_shown(pattern)} takes more than {MAX_SECONDS:g} s; repetitions "
            "inside repetitions, as in (a+)+, take exponential time"
        ) from None


@lru_cache(maxsize=1024)
def _compiled(pattern: str, what: str) -> regex.Pattern[str]:
    import regex

    if len(pattern) > MAX_LENGTH:
        raise PeftlabError(f"{what}: a regular expression of {len(pattern)} characters; the limit is {MAX_LENGTH}")
    try:
        re.compile(pattern)
        counts = [int(max(re.findall(r"\d+", token[0]), key=int, default=1)) for token in _REPEATED.finditer(pattern)]
        if math.prod(counts) > MAX_REPETITIONS:
            raise PeftlabError(
                f"{what}: the counts in {_shown(pattern)} multiply to more than {MAX_REPETITIONS} repetitions"
            )
        return regex.compile(_TOKEN.sub(_literal, pattern), regex.VERSION0)
    except (re.error, regex.error, RecursionError, OverflowError, ValueError) as error:
        raise PeftlabError(f"{what}: {_shown(pattern)} is not a regular expression ({error})") from None


def _literal(token: re.Match[str]) -> str:
    if token["brace"]:
        return r"\{"
    if token["set"]:
        return "[" + re.sub(r"\\.|\[", lambda m: r"\[" if m[0] == "[" else m[0], token["set"][1:], flags=re.DOTALL)
    return token["kept"]


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 100 else f"{pattern[:100]}...")
