"""Draft runs on the same held-out text: differences of acceptance, paired by example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy
from numpy.typing import NDArray

from peftlab.reporting import facts

_DRAWS = 2000


def paired_lines(names: Sequence[str], results: Sequence[facts.Results]) -> Iterator[str]:
    """Yield, for each draft run after the first, its acceptance minus the first one's on the same examples, in a line.

    Tokens count alike; the 95 % interval is from examples drawn with replacement, the same for both. A run on other
    text, or on a single example, has no line.
    """
    first, *others = map(_examples, results)
    for name, other in zip(names[1:], others, strict=True):
        if first is None or other is None or first[0] != other[0] or len(first[1]) < 2:
            continue
        tokens, own = first[1:]
        gains = tokens * (other[2] - own)
        picked = numpy.random.default_rng(0).integers(len(tokens), size=(_DRAWS, len(tokens)))
        low, high = numpy.quantile(gains[picked].sum(-1) / tokens[picked].sum(-1), [0.025, 0.975])
        yield (
            f"Acceptance of {name} minus that of {names[0]}: {gains.sum() / tokens.sum():+.3f} "
            f"({low:+.3f} to {high:+.3f}), in pairs on the same {len(tokens)} held-out texts."
        )


def _examples(results: facts.Results) -> tuple[str, NDArray[numpy.float64], NDArray[numpy.float64]] | None:
    """Return the digest of a draft run's held-out text, and tokens and acceptance of each; None of any other run."""
    found = results.get("held_out")
    if not isinstance(found, Mapping):
        return None
    tokens, rates = (numpy.array(found.get(key), dtype=numpy.float64) for key in ("tokens", "acceptance"))
    return str(found.get("text")), tokens, rates
