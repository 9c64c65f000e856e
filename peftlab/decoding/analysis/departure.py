"""How far a lossy rule departs from the target's distribution, measured while it decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from peftlab.decoding.drafters.base import Row, Verified
from peftlab.decoding.verification.lossy import LossyRule, emitted_law
from peftlab.decoding.verification.sampling import Sampling, certain


@dataclass(frozen=True)
class LossyResult:
    """What a lossy rule did.

    Attributes:
        rule: its name.
        distance: mean over the output's tokens of the total variation between the law of the token and the target's p
            after the same text; in the best pairing with an exact token, the probability that the two differ. At
            temperature 0, the share of tokens that are not the target's choice there. None where nothing was output.
        differing: share of tokens that differ from the exact greedy output, place by place; None when sampling.
    """

    rule: str
    distance: float | None
    differing: float | None = None

    def line(self) -> str:
        """Return it in a sentence."""
        text = f"lossy: {self.rule}"
        if self.distance is not None:
            text += f", total variation from the target's distribution {self.distance:.3f} per token"
        if self.differing is not None:
            text += f", {100 * self.differing:.1f} % of the tokens differ from the exact output"
        return text


@dataclass
class Departure:
    """An ``observe`` for ``decode.decode`` that measures ``LossyResult.distance``.

    Attributes:
        rule, sampling: as given to ``decode``. tokens: measured so far.
    """

    rule: LossyRule
    sampling: Sampling
    tokens: int = field(default=0, init=False)
    _total: float = field(default=0.0, init=False)

    def __call__(self, rows: list[Row], verified: Verified) -> None:
        draft = verified.draft
        laws, allowed = self.rule.laws(verified.output.logits, self.sampling)
        for i, path in enumerate(verified.paths):
            tokens = draft.tokens[i].tolist()
            drawn = certain(draft.tokens[i], laws) if draft.probs is None else draft.probs[i]
            for node in (-1, *path):
                below = [
                    child for child, parent in enumerate(draft.parents_of(i)) if parent == node and tokens[child] >= 0
                ]
                p = laws[i, node + 1]
                law = emitted_law(p, allowed[i, node + 1], [drawn[child] for child in below])
                self._total += float((law - p).abs().sum()) / 2
                self.tokens += 1

    def result(self, differing: float | None = None) -> LossyResult:
        """Return what was measured.

        Args:
            differing: as in the result.
        """
        return LossyResult(self.rule.name, self._total / self.tokens if self.tokens else None, differing)


def differing_share(exact: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> float:
    """Return the share of places at which two lists of outputs differ; a missing token differs from any."""
    places = [pair for both in zip(exact, other, strict=True) for pair in zip_longest(*both)]
    return sum(one != two for one, two in places) / max(1, len(places))
