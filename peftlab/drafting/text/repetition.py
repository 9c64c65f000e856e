"""How much of the target's text is repetition: of the training text, and of itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from datasets import Dataset

_SEEN, _REPEATED = 8, 4  # tokens of the n-grams


@dataclass(frozen=True)
class Repetition:
    """What a drafter could copy instead of predict, as shares of 1; None where no text is long enough.

    Attributes:
        seen: share of the 8-grams of held-out answers that occur in an answer of the training text.
        repeated: share of the 4-grams of held-out answers that occurred before in the same answer.
    """

    seen: float | None
    repeated: float | None

    def line(self) -> str:
        """Return it in a sentence."""
        parts = (
            (self.seen, f"of their {_SEEN}-grams occur in the training text"),
            (self.repeated, f"of their {_REPEATED}-grams repeat an earlier one of the same answer"),
        )
        return "held-out answers: " + ", ".join(f"{100 * share:.1f} % {of}" for share, of in parts if share is not None)


def repetition(train: Dataset, held_out: Dataset) -> Repetition:
    """Return how much of the held-out answers is repetition; both sets as ``make_dataset`` makes them."""
    known = {gram for answer in _answers(train) for gram in _grams(answer, _SEEN)}
    seen: list[bool] = []
    repeated: list[bool] = []
    for answer in _answers(held_out):
        seen += [gram in known for gram in _grams(answer, _SEEN)]
        earlier: set[tuple[int, ...]] = set()
        for gram in _grams(answer, _REPEATED):
            repeated.append(gram in earlier)
            earlier.add(gram)
    return Repetition(_share(seen), _share(repeated))


def _answers(data: Dataset) -> Iterable[list[int]]:
    for ids, prompt in zip(data["input_ids"], data["prompt"], strict=True):
        yield ids[prompt:]


def _grams(tokens: Sequence[int], n: int) -> Iterable[tuple[int, ...]]:
    return zip(*(tokens[i:] for i in range(n)), strict=False)


def _share(found: Sequence[bool]) -> float | None:
    return round(sum(found) / len(found), 4) if found else None
