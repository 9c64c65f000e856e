"""Curves of ``metrics.jsonl``, read in one pass and thinned on the way: a run of any length takes the same memory."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, field
from pathlib import Path

from peftlab.errors import PeftlabError
from peftlab.files import Json, parse_json

MAX_POINTS = 500


@dataclass(slots=True)
class Bucket:
    """Consecutive points of a curve seen as one: their mean, and the range of y."""

    count: int
    x_sum: float
    y_sum: float
    low: float
    high: float
    last: float

    def absorb(self, count: int, x_sum: float, y_sum: float, low: float, high: float, last: float) -> None:
        """Take in the points of the bucket that follows, given by its fields."""
        self.count += count
        self.x_sum += x_sum
        self.y_sum += y_sum
        if low < self.low:
            self.low = low
        if high > self.high:
            self.high = high
        self.last = last


class Curve:
    """A curve of at most ``MAX_POINTS`` buckets, each the mean of equally many points.

    When the buckets are full, neighbours are merged pairwise and each bucket takes twice as many points from
    then on, so one pass of constant memory does for any length. A point at a step already seen replaces what
    was there from that step on: a resumed run writes the steps since its checkpoint a second time.
    """

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self.per_bucket = 1

    def add(self, x: float, y: float) -> None:
        """Append the point (x, y)."""
        buckets = self.buckets
        while buckets and buckets[-1].last >= x:
            buckets.pop()
        if buckets and (newest := buckets[-1]).count < self.per_bucket:
            newest.absorb(1, x, y, y, y, x)
            return
        if len(buckets) == MAX_POINTS:
            for first, second in zip(buckets[::2], buckets[1::2], strict=True):
                first.absorb(*astuple(second))
            del buckets[1::2]
            self.per_bucket *= 2
        buckets.append(Bucket(1, x, y, y, y, x))

    @property
    def x(self) -> list[float]:
        """Mean x of each bucket."""
        return [bucket.x_sum / bucket.count for bucket in self.buckets]

    @property
    def y(self) -> list[float]:
        """Mean y of each bucket."""
        return [bucket.y_sum / bucket.count for bucket in self.buckets]


@dataclass
class History:
    """The content of ``metrics.jsonl``.

    Attributes:
        train: curves over steps of the training lines' ``loss`` and ``lr``.
        evaluation: curves over steps, by (split, metric), in the order of appearance.
        lines: lines read, blank ones aside.
        damaged: lines that are not the JSON object they should be.
        non_finite: values that are NaN or infinite, and so in no curve.
    """

    train: dict[str, Curve] = field(default_factory=lambda: {"loss": Curve(), "lr": Curve()})
    evaluation: dict[tuple[str, str], Curve] = field(default_factory=dict)
    lines: int = 0
    damaged: int = 0
    non_finite: int = 0

    def add_line(self, line: str) -> None:
        """Take in one line of the file."""
        self.lines += 1
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if not (isinstance(row, dict) and self._add_row(row)):
            self.damaged += 1

    def _add_row(self, row: dict[str, Json]) -> bool:
        """Take in the values of a line; False if one of them is of another type than it should be."""
        step, split, scores = row.get("step"), row.get("split", ""), row.get("eval", {})
        if not (isinstance(step, int | float) and isinstance(split, str) and isinstance(scores, dict)):
            return False
        if "eval" in row:
            return all(self._add(self._of(split, metric), step, value) for metric, value in scores.items())
        return all(self._add(curve, step, row.get(name)) for name, curve in self.train.items())

    def _of(self, split: str, metric: str) -> Curve:
        return self.evaluation.setdefault((split, metric), Curve())

    def _add(self, curve: Curve, step: float, value: Json) -> bool:
        if not isinstance(value, int | float):
            return value is None
        if math.isfinite(value):
            curve.add(step, value)
        else:
            self.non_finite += 1
        return True


def read_history(path: Path) -> History:
    """Read ``metrics.jsonl`` in one pass.

    Raises:
        PeftlabError: there is no such file. A damaged line (a killed run leaves one) is counted, not raised.
    """
    history = History()
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if not line.isspace():
                    history.add_line(line)
    except FileNotFoundError:
        raise PeftlabError(f"{path}: no such file") from None
    return history
