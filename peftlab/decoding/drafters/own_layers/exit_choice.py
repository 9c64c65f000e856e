"""After which layer to draft, and how many tokens (DEL, Zarch et al. 2025, arXiv 2504.05598)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


def tokens_per_layer(alpha: float, exit_: float, length: int, layers: float, head: float = 0.0) -> float:
    """Return TPL(l, d): expected tokens of a round over the layers that it runs, the LM head among them.

    (1 + α + ... + α^d) / (d (l + head) + L + head): d tokens drafted after l layers each, and one pass of all L.

    Args:
        alpha: acceptance of a drafted token. head: what a step of the LM head costs, in steps of a layer.
    """
    return sum(alpha**i for i in range(length + 1)) / (length * (exit_ + head) + layers + head)


@dataclass
class ExitChoice:
    """The exit and the draft length of the most tokens per layer, by the acceptance that each exit would have had.

    Attributes:
        exits: layers before each exit that may be chosen, rising. layers: L. head: as for ``tokens_per_layer``.
        memory: tokens after which a count weighs 1/e.
    """

    exits: Sequence[int]
    layers: int
    head: float
    memory: int = 64
    _seen: float = field(default=0.0, init=False)
    _accepted: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self._accepted = [0.0] * len(self.exits)

    @property
    def alphas(self) -> list[float]:
        """The acceptance expected of each exit: that of the last tokens and of one accepted token."""
        return [(accepted + 1) / (self._seen + 1) for accepted in self._accepted]

    def best(self, longest: int) -> tuple[int, int]:
        """Return exit and length, at most ``longest``; length 0 where no draft pays. Of equals the cheapest."""
        options = [(exit_, d) for exit_ in self.exits for d in range(longest + 1)]
        alphas = dict(zip(self.exits, self.alphas, strict=True))

        def gain(option: tuple[int, int]) -> float:
            exit_, length = option
            return tokens_per_layer(alphas[exit_], exit_, length, self.layers, self.head)

        return max(options, key=gain)

    def learn(self, accepted: Sequence[float]) -> None:
        """Take what each exit's acceptance was at one more token, from 0 to 1."""
        keep = 1 - 1 / self.memory
        self._seen = keep * self._seen + 1
        self._accepted = [keep * old + new for old, new in zip(self._accepted, accepted, strict=True)]
