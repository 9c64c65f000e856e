"""How many tokens to draft: one small object per sequence, called before, during and after each step.

A policy may stop after a drafted token, but never withdraws one: to withdraw a token because of its own q(x) would
bias the output, which would no longer follow p.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from peftlab.errors import PeftlabError


class Policy(Protocol):
    """Draft length for one sequence.

    Attributes:
        needs_confidence: whether ``should_continue`` is called after each drafted token (it costs a softmax).
    """

    needs_confidence: bool

    def budget(self) -> int:
        """Return how many tokens to draft at most in the coming step."""
        ...

    def should_continue(self, confidence: float, hidden: Tensor) -> bool:
        """Return whether to draft another token after one of probability q(x) = ``confidence``.

        ``hidden`` [H] is the draft's last hidden state, from which x was drawn.
        """
        ...

    def update(self, drafted: int, accepted: int) -> None:
        """Learn how many of the drafted tokens were accepted."""
        ...


@dataclass
class Fixed:
    """γ tokens in every step."""

    gamma: int
    needs_confidence = False

    def __post_init__(self) -> None:
        _check_gamma(self.gamma)

    def budget(self) -> int:
        return self.gamma

    def should_continue(self, confidence: float, hidden: Tensor) -> bool:
        return True

    def update(self, drafted: int, accepted: int) -> None:
        pass


@dataclass
class Confidence(Fixed):
    """Up to γ tokens; stop after one whose q(x) is below ``threshold``. That token is still verified."""

    threshold: float = 0.4
    needs_confidence = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_share("threshold", self.threshold)

    def should_continue(self, confidence: float, hidden: Tensor) -> bool:
        return confidence >= self.threshold


@dataclass
class Heuristic(Fixed):
    """Start at γ; 2 more after a step in which all were accepted, 1 fewer (down to 1) after any other."""

    def update(self, drafted: int, accepted: int) -> None:
        if drafted:
            self.gamma = self.gamma + 2 if accepted == drafted else max(1, self.gamma - 1)


@dataclass
class AcceptanceHead(Fixed):
    """Up to γ tokens; stop once 1 - Π p̂_i > h, with p̂ a head's estimate that a token will be accepted.

    SpecDec++ (Huang et al. 2024, arXiv 2405.19715).

    Attributes:
        head: the draft's hidden state [H] -> p̂, a number in [0, 1].
        h: probability of a rejection above which drafting stops.
    """

    head: Callable[[Tensor], float] = lambda _: 1.0
    h: float = 0.7
    needs_confidence = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_share("h", self.h)
        self._all_accepted = 1.0

    def budget(self) -> int:
        self._all_accepted = 1.0
        return self.gamma

    def should_continue(self, confidence: float, hidden: Tensor) -> bool:
        self._all_accepted *= float(self.head(hidden))
        return 1 - self._all_accepted <= self.h


def _check_gamma(gamma: int) -> None:
    if gamma < 1:
        raise PeftlabError(f"gamma: {gamma} drafts nothing; give 1 or more, or leave the draft out")


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise PeftlabError(f"{name}: {value} is outside [0, 1]")
