"""Draft length policies that change from step to step; ``decoding.table.POLICIES`` names them and ``decode.Fixed``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from peftlab.decoding.decode import Fixed, Policy, PolicyFactory, PolicyInputs, StepTimes
from peftlab.decoding.table import MOST_DRAFTED
from peftlab.decoding.theory import best_goodput_gamma
from peftlab.errors import PeftlabError


@dataclass
class Confidence(Fixed):
    """A policy that stops after a token whose q(x) is below ``threshold``, or γ; that token is still verified."""

    threshold: float = 0.4
    needs_confidence = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_share("threshold", self.threshold)

    def should_continue(self, confidence: float, hidden: Tensor) -> bool:
        return confidence >= self.threshold


@dataclass
class Heuristic(Fixed):
    """A policy that starts at γ: 2 more after a step in which all were accepted, 1 fewer after others, from 1 to 64."""

    def update(self, drafted: int, accepted: int) -> None:
        if drafted:
            self.gamma = min(self.gamma + 2, MOST_DRAFTED) if accepted == drafted else max(1, self.gamma - 1)


@dataclass
class AcceptanceHead(Fixed):
    """A policy that stops once 1 - Π p̂_i > h, or at γ, with p̂ a head's estimate that a token is accepted.

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

    def budget(self, batch: int) -> int:
        self._all_accepted = 1.0
        return self.gamma

    def should_continue(self, confidence: float, hidden: Tensor) -> bool:
        self._all_accepted *= float(self.head(hidden))
        return 1 - self._all_accepted <= self.h


@dataclass
class Goodput(Policy):
    """A policy that maximises expected goodput, the tokens per second of all sequences decoded together.

    SmartSpec (Liu et al. 2024, arXiv 2406.14066). One object serves all sequences: it counts what is accepted in the
    last steps and chooses the best length for that acceptance, the step times, and the number of sequences. It begins
    by expecting that everything is accepted, and expects more again with each step in which nothing was drafted, so
    that it never stops trying where some draft could pay.

    Attributes:
        times: of a step. longest: tokens at most. memory: steps of single sequences after which a count weighs 1/e.
    """

    times: StepTimes
    longest: int
    memory: int = 64
    _tested: float = field(default=0.0, init=False)
    _accepted: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        Fixed(self.longest)  # refuses a number outside 1..64

    @property
    def alpha(self) -> float:
        """Return the expected acceptance: over the last steps and one more token that counts as accepted."""
        return (self._accepted + 1) / (self._tested + 1)

    def budget(self, batch: int) -> int:
        return best_goodput_gamma(self.alpha, batch, self.times.target, self.times.draft, self.longest)

    def update(self, drafted: int, accepted: int) -> None:
        keep = 1 - 1 / self.memory
        self._tested = keep * self._tested + min(drafted, accepted + 1)
        self._accepted = keep * self._accepted + accepted


def confidence(parts: PolicyInputs, threshold: float) -> PolicyFactory:
    """Return a factory of ``Confidence`` policies.

    Args:
        parts: shared inputs. threshold: the least q(x) that continues.
    """
    return partial(Confidence, parts.gamma, threshold)


def heuristic(parts: PolicyInputs, _: None) -> PolicyFactory:
    """Return a factory of ``Heuristic`` policies from shared inputs; the second argument is unused."""
    return partial(Heuristic, parts.gamma)


def head(parts: PolicyInputs, h: float) -> PolicyFactory:
    """Return a factory of ``AcceptanceHead`` policies.

    Args:
        parts: shared inputs, with a head. h: probability of a rejection above which drafting stops.
    """
    assert parts.head is not None
    return partial(AcceptanceHead, parts.gamma, parts.head, h)


def goodput(parts: PolicyInputs, _: None) -> PolicyFactory:
    """Return a factory that gives all sequences one ``Goodput``; the second argument is unused."""
    assert parts.times is not None
    shared = Goodput(parts.times, parts.gamma)
    return lambda: shared


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise PeftlabError(f"{name}: {value} is outside [0, 1]")
