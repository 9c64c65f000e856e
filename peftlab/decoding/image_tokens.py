"""Speculative decoding of images: tokens that stand for one another, and tokens that are vectors of numbers.

Models of images write tokens of a codebook, or grey levels, and many of them look alike: p spreads over them, and exact
verification rejects most drafts. LANTERN and GSD accept a drafted token by the probability of its neighbours as well.
They are LOSSY: the output no longer follows p. How far it departs is computed exactly (``RelaxedRule.law``).

Other models write continuous tokens, drawn from a Gaussian or by a diffusion head. Continuous speculative decoding
(CSpD) accepts and rejects those by densities, and its output follows the target's law exactly.

p is the target's distribution, q the draft's, V the vocabulary, H the width of the embeddings, d that of a continuous
token, γ the number of drafted tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from peftlab.decoding.sampling import RandomSource, residual
from peftlab.errors import PeftlabError

_ROWS = 1024  # tokens whose distances to all others are computed together


class RelaxedRule(ABC):
    """A lossy rule with a probability of acceptance, and a distribution after a rejection: a ``sampling.Relaxed``."""

    @abstractmethod
    def allowed(self, p: Tensor) -> Tensor:
        """Return which tokens are accepted at temperature 0, p that at temperature 1: [..., V] -> [..., V]."""

    @abstractmethod
    def acceptance(self, p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
        """Return the probability with which each token is accepted, [n].

        Args:
            p, q: [V]. tokens: [n], of q > 0.
        """

    @abstractmethod
    def after_rejection(self, p: Tensor, q: Tensor, tokens: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of the distributions that follow a rejection of each token, times its weight, [V].

        Args:
            p, q: [V]. tokens: [n], of an acceptance below 1. weights: [n].
        """

    def verify(
        self, target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, random: RandomSource
    ) -> tuple[int | None, int]:
        """Verify the drafts for one position in turn, LOSSY; arguments and result are those of ``verify_drafts``."""
        p = target_probs
        for i, (x, q) in enumerate(zip(tokens[:, None], draft_probs, strict=True)):
            if q[x] == 0:
                continue  # the draft could not have drawn it: as exact verification, this never accepts it
            if random.bernoulli(self.acceptance(p, q, x)[0]):
                return i, int(x)
            p = self.after_rejection(p, q, x, torch.ones_like(p[:1]))
        return None, int(random.draw(p))

    def law(self, p: Tensor, drawn_from: Sequence[Tensor]) -> Tensor:
        """Return the distribution of the token that ``verify`` emits, [V].

        Args:
            p: [V]. drawn_from: of each draft in turn, the distribution [V] that it was drawn from given its elder
                siblings. What follows a drawn token that is not the last draft is computed for each of its values.
        """
        if not drawn_from:
            return p
        q, *rest = drawn_from
        tokens = q.nonzero()[:, 0]
        accepted = q[tokens] * self.acceptance(p, q, tokens)
        rejected = q[tokens] - accepted
        law = torch.zeros_like(p).index_add(0, tokens, accepted)
        tokens, rejected = tokens[rejected > 0], rejected[rejected > 0]
        if not rest:
            return law + self.after_rejection(p, q, tokens, rejected)
        for x, weight in zip(tokens[:, None], rejected, strict=True):
            law = law + weight * self.law(self.after_rejection(p, q, x, torch.ones_like(p[:1])), rest)
        return law


class Neighbourhoods(RelaxedRule):
    """LANTERN's rule: accept x with min(1, p(A) / q(x)), A the token and as many of its neighbours as a bound allows.

    The neighbours of x are the K tokens whose embeddings are nearest (Euclidean). A takes them in the order of their
    distance while their probability together stays within a bound. That is D, and then the distribution p_A, which is p
    with the mass of A moved onto x, is at most D from p in total variation (LANTERN, Jang et al. 2024, arXiv
    2410.03355); or it is (L - 1)·p(x), so that p(A) is at most L·p(x) (LANTERN++, Park et al. 2025, arXiv 2502.06352).
    Each x has an A of its own, so that the law of the emitted token may be further from p than D: ``law`` computes it.
    After a rejection of x a token is drawn from norm(max(0, p_A - q)), which has neither x nor the others of A. At
    temperature 0 the tokens are accepted whose p(A) reaches the largest p.

    Args:
        embedding: of the tokens, [V, H]. neighbours: K. bound: D, or L where it is ``relative``.
        relative: whether the bound is in units of p(x).
    """

    def __init__(self, embedding: Tensor, neighbours: float, bound: float, *, relative: bool) -> None:
        k = int(neighbours)
        if k >= len(embedding):
            raise PeftlabError(f"lossy: {k} neighbours of each token, but there are {len(embedding)} tokens")
        embedding, nearest = embedding.float(), list[Tensor]()
        for first in range(0, len(embedding), _ROWS):
            distances = torch.cdist(embedding[first : first + _ROWS], embedding)
            distances[torch.arange(len(distances)), first + torch.arange(len(distances))] = math.inf  # not itself
            nearest.append(distances.topk(k, largest=False).indices)
        self._nearest, self._bound, self._relative = torch.cat(nearest), bound, relative

    def _neighbourhood(self, p: Tensor, tokens: Tensor) -> Tensor:
        """Return which neighbours of each token are in A: p [..., V], tokens [n] -> [..., n, K]."""
        mass = p[..., self._nearest[tokens]].cumsum(-1)
        limit = (self._bound - 1) * p[..., tokens, None] if self._relative else self._bound
        return mass <= limit

    def _mass(self, p: Tensor, tokens: Tensor) -> Tensor:
        """Return p(A) of each token: p [..., V], tokens [n] -> [..., n]."""
        near = p[..., self._nearest[tokens]]  # [..., n, K]
        return p[..., tokens] + (near * self._neighbourhood(p, tokens)).sum(-1)

    def allowed(self, p: Tensor) -> Tensor:
        """Return which tokens are accepted at temperature 0; see ``RelaxedRule.allowed``."""
        return self._mass(p, torch.arange(p.shape[-1], device=p.device)) >= p.amax(-1, keepdim=True)

    def acceptance(self, p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
        """Return min(1, p(A) / q(x)) of each token; see ``RelaxedRule.acceptance``."""
        return (self._mass(p, tokens) / q[tokens]).clamp_max(1)

    def after_rejection(self, p: Tensor, q: Tensor, tokens: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of norm(max(0, p_A - q)); see ``RelaxedRule.after_rejection``."""
        # p_A - q is p - q outside of A, and not positive within: a token that is rejected has p_A(x) = p(A) < q(x).
        excess = (p.double() - q.double()).clamp_min(0)
        near, inside = self._nearest[tokens], self._neighbourhood(p, tokens)  # [n, K]
        left = excess.sum() - (excess[near] * inside).sum(-1)  # the mass of max(0, p_A - q), [n]
        share = torch.where(left > 0, weights / left, 0)
        taken = torch.zeros_like(excess).index_add(0, near.flatten(), (share[:, None] * inside).flatten())
        found = excess * (share.sum() - taken).clamp_min(0)
        return (found + weights[left <= 0].sum() * p).to(p.dtype)  # without mass a rejection is a matter of rounding


def lantern(embedding: Tensor, neighbours: float, bound: float) -> Neighbourhoods:
    """Return LANTERN's rule.

    Args:
        embedding: of the tokens, [V, H]. neighbours: K. bound: D.
    """
    return Neighbourhoods(embedding, neighbours, bound, relative=False)


def lantern_plus(embedding: Tensor, neighbours: float, bound: float) -> Neighbourhoods:
    """Return LANTERN++'s rule; its static trees are those of any draft.

    Args:
        embedding: of the tokens, [V, H]. neighbours: K. bound: L.
    """
    return Neighbourhoods(embedding, neighbours, bound, relative=True)


class GroupedTokens(RelaxedRule):
    """GSD's rule: accept x with min(1, p(C) / q(C)), C the group of the tokens that are like x at this place.

    Grouped speculative decoding with dynamic groups (So et al. 2025, arXiv 2508.07747, and the authors' code): of the
    tokens in the order of p, C has x and those at most W ranks from it, if their p differs from p(x) by less than 0.15
    and their embeddings by a cosine distance of less than D. After a rejection a token is drawn from
    norm(max(0, p - q)), as in exact verification. At temperature 0 a token is accepted whose group has the target's
    choice.

    Args:
        embedding: of the tokens, [V, H]. ranks: W. distance: D.
    """

    LIKE = 0.15  # the paper's bound on the difference of two probabilities

    def __init__(self, embedding: Tensor, ranks: float, distance: float) -> None:
        self._direction, self._ranks, self._distance = F.normalize(embedding.float(), dim=-1), int(ranks), distance

    def _group(self, p: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the candidates of each token's group, [n, 2W+1], and which of them are in it."""
        order = p.argsort(descending=True, stable=True)
        places = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=p.device))[tokens]
        window = places[:, None] + torch.arange(-self._ranks, self._ranks + 1, device=p.device)
        inside = (window >= 0) & (window < len(order))
        members = order[window.clamp(0, len(order) - 1)]
        like = (p[members] - p[tokens, None]).abs() < self.LIKE
        cosine = (self._direction[members] * self._direction[tokens, None]).sum(-1)
        near = (1 - cosine < self._distance) | (members == tokens[:, None])  # a token is in its group, however rounded
        return members, inside & like & near

    def allowed(self, p: Tensor) -> Tensor:
        """Return which tokens are accepted at temperature 0; see ``RelaxedRule.allowed``."""
        tokens, rows = torch.arange(p.shape[-1], device=p.device), list[Tensor]()
        for row in p.reshape(-1, p.shape[-1]):
            members, inside = self._group(row, tokens)
            rows.append((inside & (members == row.argmax())).any(-1))
        return torch.stack(rows).reshape(p.shape)

    def acceptance(self, p: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
        """Return min(1, p(C) / q(C)) of each token; see ``RelaxedRule.acceptance``."""
        members, inside = self._group(p, tokens)
        return ((p[members] * inside).sum(-1) / (q[members] * inside).sum(-1)).clamp_max(1)

    def after_rejection(self, p: Tensor, q: Tensor, tokens: Tensor, weights: Tensor) -> Tensor:
        """Return norm(max(0, p - q)) times all weights; see ``RelaxedRule.after_rejection``."""
        return residual(p, q) * weights.sum()


# CONTINUOUS tokens. A token is a vector of d numbers, and a model's head gives its law as an object that draws from it
# and knows the density of what was drawn.


class ContinuousLaw(Protocol):
    """The law of a continuous token, in the form in which it is drawn and has a density."""

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Return that many independent draws, [count, ...]."""
        ...

    def log_density(self, draws: Tensor) -> Tensor:
        """Return the logarithm of the density of each draw: [count, ...] -> [count]."""
        ...

    def token(self, draw: Tensor) -> Tensor:
        """Return the token of one draw: [...] -> [d]."""
        ...


def _log_normal(values: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return the log density of independent normal numbers, summed over the last dimension: [..., d] -> [...].

    Args:
        values, mean: [..., d]. std: [d] or [].
    """
    return (-0.5 * ((values - mean) / std).square() - std.log() - 0.5 * math.log(2 * math.pi)).sum(-1)


@dataclass(frozen=True)
class GaussianLaw:
    """A normal distribution with independent components, as a Gaussian head gives it.

    Attributes:
        mean, std: [d].
    """

    mean: Tensor
    std: Tensor

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Return tokens, [count, d]."""
        noise = torch.randn(count, len(self.mean), generator=generator, dtype=self.mean.dtype)
        return self.mean + self.std * noise

    def log_density(self, draws: Tensor) -> Tensor:
        """Return log N(x; mean, std²) of each token: [count, d] -> [count]."""
        return _log_normal(draws, self.mean, self.std)

    def token(self, draw: Tensor) -> Tensor:
        """Return the draw, which is the token."""
        return draw


@dataclass(frozen=True)
class DiffusionLaw:
    """The law of a denoising trajectory, whose end is the token, as a diffusion head gives it.

    x_T is standard normal, and x_{t-1} is normal around a mean that depends on x_t: so the trajectory has a density,
    the product of T + 1 normal ones, which the law of its end alone has not. What is exact for trajectories is exact
    for their ends. Target and draft begin with the same x_T, whose density cancels between them.

    Attributes:
        step: (x_t [count, d], t) -> the mean of x_{t-1} [count, d]. std: of x_{t-1} for t = 1, ..., T, above 0, [T].
        d: width.
    """

    step: Callable[[Tensor, int], Tensor]
    std: Tensor
    d: int

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Return trajectories x_T, ..., x_0, [count, T+1, d]."""
        path = [torch.randn(count, self.d, generator=generator)]
        for t in range(len(self.std), 0, -1):
            noise = torch.randn(count, self.d, generator=generator)
            path.append(self.step(path[-1], t) + self.std[t - 1] * noise)
        return torch.stack(path, 1)

    def log_density(self, draws: Tensor) -> Tensor:
        """Return log p(x_T, ..., x_0) of each trajectory: [count, T+1, d] -> [count]."""
        total = _log_normal(draws[:, 0], torch.zeros(self.d), torch.ones(()))
        for i, t in enumerate(range(len(self.std), 0, -1)):
            total = total + _log_normal(draws[:, i + 1], self.step(draws[:, i], t), self.std[t - 1])
        return total

    def token(self, draw: Tensor) -> Tensor:
        """Return the end x_0 of a trajectory: [T+1, d] -> [d]."""
        return draw[-1]


_MOST_DRAWS = 4096  # of the target's law at a time


def verify_continuous(
    target: ContinuousLaw, draft: ContinuousLaw, drawn: Tensor, generator: torch.Generator
) -> tuple[bool, Tensor]:
    """Accept a draw of the draft with min(1, p(x)/q(x)), else draw from norm(max(0, p - q)).

    Continuous speculative decoding (CSpD, Wang et al. 2024, arXiv 2411.11925). Nothing draws from the residual at once:
    x' is drawn from p and kept with max(0, 1 - q(x')/p(x')), until one is kept. Its law is the residual, and on average
    one such draw is needed for each verified token. What is returned follows p exactly, if x was drawn from q.

    Args:
        target: p. draft: q. drawn: one draw of ``draft``. generator: decides and draws.

    Returns:
        Whether the draw was accepted, and it or the one that takes its place.
    """
    ratio = float((target.log_density(drawn[None]) - draft.log_density(drawn[None])).exp())
    if float(torch.rand((), generator=generator)) < ratio:
        return True, drawn
    count = 1
    while True:
        again = target.draw(count, generator)
        excess = 1 - (draft.log_density(again) - target.log_density(again)).exp()  # not positive: never kept
        kept = (torch.rand(count, generator=generator) < excess).nonzero()
        if len(kept):
            return False, again[int(kept[0])]
        count = min(2 * count, _MOST_DRAWS)


ContinuousModel = Callable[[Tensor, int], Sequence[ContinuousLaw]]
"""(tokens [n, d], first) -> the laws of the tokens number first, first + 1, ..., n, each given those before it."""


@dataclass
class ContinuousOutput:
    """What ``decode_continuous`` wrote.

    Attributes:
        tokens: [n, d]. emitted: tokens of each target step. tested, accepted: drafted tokens.
        tau: tokens per target step.
    """

    tokens: Tensor
    emitted: list[int] = field(default_factory=list)
    tested: int = 0
    accepted: int = 0

    @property
    def tau(self) -> float:
        return sum(self.emitted) / len(self.emitted)


def decode_continuous(
    target: ContinuousModel,
    length: int,
    d: int,
    generator: torch.Generator,
    draft: ContinuousModel | None = None,
    gamma: int = 4,
) -> ContinuousOutput:
    """Write continuous tokens by a target, whose law they follow with a draft as without.

    Args:
        target: the model whose output it is. length: tokens to write. d: numbers of a token.
        generator: of all draws. draft: proposes γ tokens for each target step; None: plain decoding. gamma: γ.

    Raises:
        PeftlabError: nothing to write, or a negative γ.
    """
    if length < 1 or gamma < 0:
        raise PeftlabError(f"length {length}, gamma {gamma}: give a length from 1 and a gamma from 0")
    output = ContinuousOutput(torch.empty(0, d))
    while (n := len(output.tokens)) < length:
        # One fewer than what is left: a target step writes a token of its own after the drafted ones.
        draws, laws, drafted = list[Tensor](), list[ContinuousLaw](), output.tokens
        for i in range(0 if draft is None else min(gamma, length - n - 1)):
            assert draft is not None
            laws.append(draft(drafted, n + i)[0])
            draws.append(laws[-1].draw(1, generator)[0])
            drafted = torch.cat((drafted, laws[-1].token(draws[-1])[None]))
        wanted = target(drafted, n)
        for p, q, drawn in zip(wanted[:-1], laws, draws, strict=True):
            accepted, found = verify_continuous(p, q, drawn, generator)
            output.tokens = torch.cat((output.tokens, p.token(found)[None]))
            output.tested, output.accepted = output.tested + 1, output.accepted + accepted
            if not accepted:
                break
        else:
            own = wanted[-1]
            output.tokens = torch.cat((output.tokens, own.token(own.draw(1, generator)[0])[None]))
        output.emitted.append(len(output.tokens) - n)
    return output
