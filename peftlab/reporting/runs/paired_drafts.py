"""Draft runs on the same held-out text: differences of acceptance, paired by example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from peftlab.reporting import facts

_DRAWS = 2000


@dataclass(frozen=True)
class PairedGain:
    """The acceptance of one draft minus that of another on the same examples, whose tokens count alike.

    Attributes:
        name, first: of the two, in words. gain: the difference; of several runs each, the mean over them.
        low, high: the 95 % interval, from examples drawn with replacement, the same for both.
        texts: examples. runs: of each draft.
    """

    name: str
    first: str
    gain: float
    low: float
    high: float
    texts: int
    runs: int

    def line(self) -> str:
        """Return it in a sentence."""
        means = f", means of {self.runs} seeds" if self.runs > 1 else ""
        return (
            f"Acceptance of {self.name} minus that of {self.first}: {self.gain:+.3f} ({self.low:+.3f} to "
            f"{self.high:+.3f}), in pairs on the same {self.texts} held-out texts{means}."
        )


def paired_gain(name: str, first: str, pairs: Sequence[tuple[facts.Results, facts.Results]]) -> PairedGain | None:
    """Return the gain of a draft over the first one; None where the texts are not all the same, or a single one.

    Args:
        pairs: (run of the first, run of the other); of several seeds, those with the same one.
    """
    found = [(_examples(one), _examples(other)) for one, other in pairs]
    runs = [(one, other) for one, other in found if one is not None and other is not None]
    if not runs or len(runs) < len(found) or len({each[0] for pair in runs for each in pair}) > 1:
        return None
    tokens = runs[0][0][1]
    if len(tokens) < 2:
        return None
    gains = tokens * numpy.mean([other[2] - one[2] for one, other in runs], axis=0)
    picked = numpy.random.default_rng(0).integers(len(tokens), size=(_DRAWS, len(tokens)))
    low, high = numpy.quantile(gains[picked].sum(-1) / tokens[picked].sum(-1), [0.025, 0.975])
    return PairedGain(name, first, float(gains.sum() / tokens.sum()), float(low), float(high), len(tokens), len(runs))


def paired_lines(names: Sequence[str], results: Sequence[facts.Results]) -> Iterator[str]:
    """Yield the gain of each draft run over the first one in a line; a run on other text has none."""
    for name, other in zip(names[1:], results[1:], strict=True):
        gain = paired_gain(name, names[0], [(results[0], other)])
        if gain is not None:
            yield gain.line()


def _examples(results: facts.Results) -> tuple[str, NDArray[numpy.float64], NDArray[numpy.float64]] | None:
    """Return the digest of a draft run's held-out text, and tokens and acceptance of each; None of any other run."""
    found = results.get("held_out")
    if not isinstance(found, Mapping):
        return None
    tokens, rates = (numpy.array(found.get(key), dtype=numpy.float64) for key in ("tokens", "acceptance"))
    return str(found.get("text")), tokens, rates
