"""Published figures of speculative decoding: other people's, with their source, to be shown beside one's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from peftlab.files import Json, member, read_object

FILE = Path(__file__).with_name("published_drafts.json")


@dataclass(frozen=True)
class PublishedSpeed:
    """What a paper measured, with targets and machines of its own.

    Attributes:
        system: that drafts. benchmark: its prompts. tau: tokens per target step. source: the paper.
        like: the drafter of ``draft bench`` that is of the same kind.
    """

    system: str
    benchmark: str
    tau: float
    source: str
    like: str


@dataclass(frozen=True)
class PublishedTheory:
    """The table of formulas of a paper, as printed there.

    Attributes:
        source: the paper. cells: (alpha, gamma) -> (operations, speed-up at c = 0).
    """

    source: str
    cells: dict[tuple[float, int], tuple[float, float]]


def published_speeds() -> list[PublishedSpeed]:
    """Return the measured figures."""
    rows: list[dict[str, Json]] = member(read_object(FILE), "measured", list, FILE)
    texts = ("system", "benchmark", "source", "like")
    return [
        PublishedSpeed(tau=member(row, "tau", float, FILE), **{name: member(row, name, str, FILE) for name in texts})
        for row in rows
    ]


def published_theory() -> PublishedTheory:
    """Return the table of formulas."""
    table = member(read_object(FILE), "theory", dict, FILE)
    rows: list[tuple[float, int, float, float]] = member(table, "rows", list, FILE)
    cells = {(alpha, gamma): (operations, speed) for alpha, gamma, operations, speed in rows}
    return PublishedTheory(member(table, "source", str, FILE), cells)
