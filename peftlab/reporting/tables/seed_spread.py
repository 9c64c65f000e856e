"""Which row of a table is best on a task, and which rows the seeds' spread does not tell from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ranking:
    """The rows of one task against the best of them.

    Attributes:
        best: the row with the best mean over seeds on the validation set; several where their means are equal.
        within: rows whose distance to it is within the seeds' spread; beyond: rows whose distance exceeds it.
        untold: rows that cannot be compared: they, or the best one, have a single seed, or a score is not finite.
    """

    best: tuple[str, ...]
    within: tuple[str, ...]
    beyond: tuple[str, ...]
    untold: tuple[str, ...]

    def sentence(self) -> str:
        """Return what may be claimed, in words."""
        groups = {
            "within the seeds' spread of it": self.within,
            "worse by more than the seeds' spread": self.beyond,
            "too few seeds to say": self.untold,
        }
        parts = [f"{text}: {', '.join(rows)}" for text, rows in groups.items() if rows]
        return "; ".join([f"{', '.join(self.best)} {'is' if len(self.best) == 1 else 'are'} best", *parts]) + "."


def rank(scores: Mapping[str, Sequence[float]], *, lower_is_better: bool) -> Ranking | None:
    """Return the ranking of rows by their scores over seeds; None where there is no second row to compare with."""
    means = {row: math.fsum(values) / len(values) for row, values in scores.items()}
    finite = [row for row, mean in means.items() if math.isfinite(mean)]
    if len(scores) < 2 or not finite:
        return None
    value = (min if lower_is_better else max)(means[row] for row in finite)
    best = tuple(row for row in finite if means[row] == value)
    others: dict[bool | None, list[str]] = {False: [], True: [], None: []}
    for row in scores:
        if row not in best:
            others[exceeds_spread(scores[best[0]], scores[row])].append(row)
    return Ranking(best, tuple(others[False]), tuple(others[True]), tuple(others[None]))


def exceeds_spread(a: Sequence[float], b: Sequence[float]) -> bool | None:
    """Return whether the means of two samples of seeds differ by more than the spread of the seeds explains.

    Welch's test: |mean a - mean b| > t * sqrt(var a / n + var b / m), with sample variances, and t the two-sided 95 %
    quantile of Student's distribution at Welch and Satterthwaite's degrees of freedom. None where a sample has fewer
    than two values, or values that are not finite.
    """
    if min(len(a), len(b)) < 2 or not all(map(math.isfinite, (*a, *b))):
        return None
    errors = [_variance(values) / len(values) for values in (a, b)]
    distance, error = abs(math.fsum(a) / len(a) - math.fsum(b) / len(b)), sum(errors)
    if error == 0:  # no seed changes anything
        return distance > 0
    from scipy.special import stdtrit

    freedom = error**2 / sum(e**2 / (len(values) - 1) for e, values in zip(errors, (a, b), strict=True))
    return bool(distance > stdtrit(freedom, (1 + CONFIDENCE) / 2) * math.sqrt(error))


def _variance(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
