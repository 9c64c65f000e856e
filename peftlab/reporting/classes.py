"""The classes of a run: counts, warnings about them, and a remark where the score is only the baseline's."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass

from peftlab.reporting import facts

Counts = Mapping[str, Mapping[str, int]]
"""Class name to its number of examples by split, as ``classes`` of ``results.json``."""

FEW = 5
_SHOWN = 20


def data_lines(classes: Counts, left_out: Mapping[str, int], repeated: Mapping[str, int] | None = None) -> list[str]:
    """Return what is printed about the data before training: counts, rows left out, warnings.

    Args:
        repeated: split to the number of its rows whose text a training row has too.
    """
    header, *rows = class_rows(classes, _SHOWN)
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    table = [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in (header, *rows)
    ]
    return [
        *(table if classes else []),
        *(f"left out: {count:,} rows ({reason})" for reason, count in left_out.items()),
        *(f"warning: {text}" for text in class_warnings(classes)),
        *(
            f"warning: {split} rows with the text of a training row: {count:,}; scores may be too high"
            for split, count in (repeated or {}).items()
        ),
    ]


def class_rows(classes: Counts, most: int) -> list[tuple[str, ...]]:
    """Return a header and a row for each of the first ``most`` classes: name and count by split."""
    splits = list(next(iter(classes.values()), {}))
    rows = [
        (_plain(name), *(f"{counts.get(split, 0):,}" for split in splits))
        for name, counts in list(classes.items())[:most]
    ]
    rest = len(classes) - most
    more = [(f"and {rest:,} more", *("" for _ in splits))] if rest > 0 else []
    return [("class", *splits), *rows, *more]


def class_warnings(classes: Counts) -> list[str]:
    """Return what is suspicious: classes with few training rows, and names that differ in case or spaces alone."""
    few = [f"{_plain(name)} ({counts['train']})" for name, counts in classes.items() if counts.get("train", FEW) < FEW]
    alike: dict[str, list[str]] = {}
    for name in classes:
        alike.setdefault("".join(unicodedata.normalize("NFKC", name).casefold().split()), []).append(repr(name))
    doubles = [", ".join(names[:_SHOWN]) for names in alike.values() if len(names) > 1]
    return [
        *([f"fewer than {FEW} training rows: {_some(few)}"] if few else []),
        *(f"class names that differ only in case or spaces: {names}" for names in doubles[:_SHOWN]),
    ]


def class_counts(results: facts.Results) -> Counts:
    """Return ``classes`` of ``results.json``; empty for regression and where it is missing."""
    classes = results.get("classes")
    return classes if isinstance(classes, Mapping) else {}


def score_rows(results: facts.Results, most: int) -> list[tuple[str, ...]]:
    """Return a header and precision, recall, F1 and support of each of the first ``most`` classes; else nothing."""
    scores = results.get("by_class")
    if not isinstance(scores, Mapping):
        return []
    rows = [
        (_plain(name), *(facts.number(float(row[key])) for key in ("precision", "recall", "f1")), f"{row['support']:,}")
        for name, row in list(scores.items())[:most]
    ]
    rest = len(scores) - most
    more = [(f"and {rest:,} more", "", "", "", "")] if rest > 0 else []
    return [("class", "precision", "recall", "F1", "support"), *rows, *more]


@dataclass(frozen=True)
class Confusion:
    """Examples by [class of the label][class predicted]; ``names`` in the order of both."""

    names: list[str]
    counts: list[list[int]]

    def share(self, row: int, column: int) -> float:
        """Return the part of a label's examples that were taken for a class."""
        return self.counts[row][column] / max(1, sum(self.counts[row]))


def confusion(results: facts.Results, most: int) -> Confusion | None:
    """Return the confusion matrix; None where there is none, or of more classes than ``most``."""
    counts, scores = results.get("confusion"), results.get("by_class")
    if not isinstance(counts, list) or not isinstance(scores, Mapping) or len(counts) > most:
        return None
    return Confusion([_plain(name) for name in scores], counts)


def baseline_remark(results: facts.Results) -> str | None:
    """Return a sentence where the score equals that of always giving the same answer, else None."""
    score, baseline = facts.real(results.get("score")), facts.real(results.get("baseline_score"))
    if "classes" not in results or score is None or baseline is None or not math.isclose(score, baseline):
        return None
    metric = str(results["metric"])
    return f"The {facts.label(metric)} equals the {facts.baseline_name(metric)} (one answer for all)."


def _some(items: list[str]) -> str:
    rest = len(items) - _SHOWN
    return ", ".join(items[:_SHOWN]) + (f" and {rest:,} more" if rest > 0 else "")


def _plain(name: str) -> str:
    """Return a class name on one line, shortened where it is long."""
    line = " ".join(name.split())
    return line if len(line) <= 40 else f"{line[:37]}..."
