"""The one kind of error that a user reads, and the sentences in it."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

_TYPED = 200  # characters: a longer name was not typed by hand
_COMPARED = 10_000  # names at most that a misspelt one is compared with


class PeftlabError(Exception):
    """A mistake in a recipe, a file or a call, in one message.

    The message names the file, key or module at fault, the reason, and the nearest right spelling where
    there is one. The command line prints it without a traceback and exits with ``status``.
    """

    status = 2


@contextmanager
def prefix_errors(where: str | Path) -> Iterator[None]:
    """Put the file or key ``where`` before the message of an error that is raised in the block."""
    try:
        yield
    except PeftlabError as error:
        raise PeftlabError(f"{where}: {error}") from None


def nearest(name: str, candidates: Iterable[str], n: int = 3) -> list[str]:
    """Return those of ``candidates`` that are spelled most like ``name``, best first, case ignored.

    Comparing two names takes time proportional to the product of their lengths, so a very long one, such as a text
    where a name is expected, has no neighbours.

    Args:
        name: as it was written.
        candidates: the right spellings.
        n: how many to return at most.
    """
    if len(name) > _TYPED:
        return []
    by_lower = {c.lower(): c for c in islice(candidates, _COMPARED) if len(c) <= _TYPED}
    return [by_lower[m] for m in difflib.get_close_matches(name.lower(), by_lower, n=n, cutoff=0.5)]


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the nearest candidate, or an empty string."""
    matches = nearest(name, candidates, n=1)
    return f" (did you mean '{matches[0]}'?)" if matches else ""


def os_error_text(error: OSError) -> str:
    """Return the message of a system error, the file's name first."""
    names = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    return f"{names}: {reason(error)}" if names else reason(error)


def reason(error: BaseException) -> str:
    """Return the first line of an error's message; of a system error's, without number and path."""
    text = (getattr(error, "strerror", None) or str(error)).strip()
    return text.splitlines()[0] if text else type(error).__name__


def quiet_libraries() -> None:
    """Let libraries that warn of parts of their own log errors alone; call it before they are imported.

    transformers imports torchao if it is there, whose warnings concern no run.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
