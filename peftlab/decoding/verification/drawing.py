"""How trees are drawn from a draft's distributions, level by level, with what each node was drawn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from peftlab.decoding.verification.multidraft import draw_drafts
from peftlab.decoding.verification.sampling import RandomSource, largest


@dataclass(frozen=True)
class Level:
    """The next level of b trees, siblings in the order in which they are verified.

    Attributes:
        tokens: [b, w]; -1 where nothing was left to draw.
        above: [b, w], the place of each one's parent in the level above.
        drawn_from: [b, w, V], what each was drawn from given its elder siblings; zeros at -1.
    """

    tokens: Tensor
    above: Tensor
    drawn_from: Tensor


class Growth(Protocol):
    """How trees grow; an object for each draft."""

    def level(self, q: Tensor, random: RandomSource | None) -> Level:
        """Return the level below the last one.

        Args:
            q: [b, k, V], the draft's distributions after each node of the last level, after the root at first.
            random: the draws, of generators of their own for the rows; None takes the most probable tokens.
        """
        ...


@dataclass
class Chains:
    """``width`` first tokens, each continued as a chain.

    Without replacement they all differ: recursive rejection sampling with constant branching (RSD-C, Jeon et al. 2024,
    arXiv 2402.14160). With replacement the chains are independent drafts (SpecInfer, Miao et al. 2023, arXiv
    2305.09781; SpecTr, Sun et al. 2023, arXiv 2310.15141): equal beginnings share their nodes, and a sibling that
    repeats an elder one has no children of its own. Without randomness the first tokens differ either way.
    """

    width: int
    replacement: bool
    _eldest: Tensor | None = field(default=None, init=False)  # [b, w], the first place with the same tokens so far

    def level(self, q: Tensor, random: RandomSource | None) -> Level:
        if self._eldest is None:
            tokens, drawn_from = self._first(q[:, 0], random)
            above = torch.zeros_like(tokens)
        else:
            above = self._eldest
            drawn_from = q.gather(1, above[..., None].expand_as(q))
            tokens = largest(drawn_from) if random is None else random.draw(drawn_from)
        tokens = tokens.where(drawn_from.sum(-1) > 0, -1)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        alike = (above[:, :, None] == above[:, None]) & (tokens[:, :, None] == tokens[:, None])
        self._eldest = alike.long().argmax(-1) if self.replacement else places.expand_as(tokens)
        return Level(tokens, above, drawn_from)

    def _first(self, q: Tensor, random: RandomSource | None) -> tuple[Tensor, Tensor]:
        width = min(self.width, q.shape[-1])
        if random is None:
            return q.topk(width, -1).indices, q[:, None].expand(-1, width, -1)
        return draw_drafts(q, width, random, self.replacement)


@dataclass
class StochasticBeam:
    """The ``width`` sequences of each length that are first in an order drawn without replacement.

    Recursive rejection sampling with stochastic beam search (RSD-S, Jeon et al. 2024, arXiv 2402.14160). With φ the
    log-probability of a path and G_c ~ Gumbel(φ_c) of the children of a node, Z the largest of them, a child has
    G̃_c = -log(exp(-G̃_parent) - exp(-Z) + exp(-G_c)), at most its parent's; the largest G̃ of a level are kept, in their
    order. So the children of a node are drawn without replacement, and their number follows the draft's probabilities.
    Without randomness it is a beam search.
    """

    width: int
    _path: Tensor | None = field(default=None, init=False)  # [b, k], φ of the last level, and its G̃
    _value: Tensor | None = field(default=None, init=False)

    def level(self, q: Tensor, random: RandomSource | None) -> Level:
        b, k, v = q.shape
        if self._path is None or self._value is None:
            self._path = self._value = q.new_zeros(b, 1)
        paths = self._path[..., None] + q.log()
        values = paths if random is None else _below(self._value[..., None], paths, random)
        self._value, best = values.flatten(1).topk(min(self.width, k * v), -1)
        self._path = paths.flatten(1).gather(1, best)
        above, tokens = best // v, best % v
        drawn_from = _without_elders(q, above, tokens)
        drawn = self._value > -torch.inf
        return Level(tokens.where(drawn, -1), above, drawn_from.where(drawn[..., None], 0))


def _below(bound: Tensor, paths: Tensor, random: RandomSource) -> Tensor:
    """Return Gumbels located at ``paths`` [b, k, V], given that the largest of each node is ``bound`` [b, k, 1]."""
    free = paths - random.exponentials(paths).log()
    # -log(exp(-bound) - exp(-Z) + exp(-G)) = bound - softplus(d), d = bound - G + log(1 - exp(G - Z)), which does not
    # overflow; d is -inf where G = Z, and the result then the bound itself.
    shift = bound - free + torch.log1p(-(free - free.amax(-1, keepdim=True)).exp())
    return (bound - torch.nn.functional.softplus(shift)).where(paths > -torch.inf, -torch.inf)


def _without_elders(q: Tensor, above: Tensor, tokens: Tensor) -> Tensor:
    """Return what each node of a level was drawn from [b, w, V]: its parent's q without the elder siblings.

    Args:
        q: [b, k, V] of the level above. above, tokens: [b, w], as in ``Level``.
    """
    rows = q.gather(1, above[..., None].expand(-1, -1, q.shape[-1]))
    for elder in range(tokens.shape[1] - 1):
        younger = rows[:, elder + 1 :]
        place = tokens[:, elder, None, None].expand(-1, younger.shape[1], 1)
        sibling = (above[:, elder + 1 :] == above[:, elder, None])[..., None]
        younger.scatter_(2, place, younger.gather(2, place).where(~sibling, 0))
    return rows / rows.sum(-1, keepdim=True)


GrowTree = Callable[[], Growth]
"""Makes what a new tree grows by."""


def rsd_c(width: float) -> GrowTree:
    """Return what makes ``Chains`` without replacement."""
    return lambda: Chains(int(width), replacement=False)


def rsd_s(width: float) -> GrowTree:
    """Return what makes a ``StochasticBeam``."""
    return lambda: StochasticBeam(int(width))


def specinfer(width: float) -> GrowTree:
    """Return what makes ``Chains`` with replacement."""
    return lambda: Chains(int(width), replacement=True)
