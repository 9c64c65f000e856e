"""LOSSY verification: a drafted token is accepted if the target finds it plausible, whatever it was drawn from.

The output no longer follows the target's distribution p. How far it departs is known exactly at every position: the law
of the emitted token follows from p, the tokens that a rule accepts, and what the drafted tokens were drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor

from peftlab.decoding.drafter import Row, Verified
from peftlab.decoding.sampling import RandomSource, Sampling, argmax, one_hot
from peftlab.decoding.table import NamedRule
from peftlab.registry import resolve


@dataclass(frozen=True)
class LossyRule:
    """A rule that decides which drafted tokens are accepted.

    Attributes:
        name: for reports. allowed: p [..., V] -> whether each token is accepted if it is drafted.
    """

    name: str
    allowed: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, chosen: NamedRule) -> LossyRule:
        """Return the rule that a user named."""
        rule, x = resolve(chosen.row.make), chosen.value
        return cls(chosen.text, lambda p: rule(p, x))

    def laws(self, logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """Return p, from which tokens are drawn, and the mask of tokens that are accepted, [..., V] each.

        At temperature 0, p is 1 at the largest logit, and the rule judges by the distribution at temperature 1.

        Args:
            logits: [..., V]. sampling: how tokens are chosen.
        """
        if not sampling.greedy:
            p = sampling.probabilities(logits)
            return p, self.allowed(p)
        whole = logits.softmax(-1)
        return one_hot(argmax(logits), whole), self.allowed(whole)


def typical(p: Tensor, epsilon: float) -> Tensor:
    """Return where p(x) > min(ε, √ε·exp(-H(p))), H the entropy in nats: [..., V] -> [..., V].

    Medusa's typical acceptance (Cai et al. 2024, arXiv 2401.10774). The most probable token is always accepted.

    Args:
        p: [..., V]. epsilon: ε in (0, 1).
    """
    threshold = (epsilon**0.5 * torch.exp(-torch.special.entr(p).sum(-1, keepdim=True))).clamp_max(epsilon)
    return p > threshold


def accept_k(p: Tensor, k: float) -> Tensor:
    """Return where a token is among the k most probable ones and has p > 0: [..., V] -> [..., V].

    ``verifier_accept_k`` of vLLM's library speculators.

    Args:
        p: [..., V]. k: a whole number.
    """
    best = p.topk(min(int(k), p.shape[-1]), -1).indices
    return torch.zeros_like(p, dtype=torch.bool).scatter(-1, best, True) & (p > 0)


def verify_lossy(
    target_probs: Tensor, allowed: Tensor, tokens: Tensor, parents: Sequence[int], random: RandomSource
) -> tuple[list[int], int]:
    """LOSSY: walk down a tree by the first child that is allowed; then draw from p.

    Args:
        target_probs: [N+1, V]; row 0 follows the root, row i+1 follows node i. allowed: [N+1, V].
        tokens: [N], -1 where nothing was drafted. parents: N parent nodes, -1 for the root; a chain is -1, 0, 1, ...
        random: the draw; acceptance is deterministic.

    Returns:
        The accepted path as node indices from the root down, and the next token after it.
    """
    drafted, path = tokens.tolist(), list[int]()
    for node, (parent, token) in enumerate(zip(parents, drafted, strict=True)):
        # A parent comes before its children, and a younger child is not looked at once the path has left its parent.
        if parent == (path[-1] if path else -1) and token >= 0 and bool(allowed[parent + 1, token]):
            path.append(node)
    return path, int(random.draw(target_probs[(path[-1] if path else -1) + 1]))


def accept_lossy(
    rule: LossyRule,
    logits: Tensor,
    tokens: Tensor,
    parents: Sequence[Sequence[int]],
    sampling: Sampling,
    generators: Sequence[torch.Generator],
) -> tuple[list[list[int]], list[int]]:
    """Accept one path of each row's draft by a lossy rule.

    Args:
        rule: decides. logits, tokens, sampling, generators: as for ``verify.accept``. parents: of each row's nodes.

    Returns:
        The accepted nodes of each row, and the token after them.
    """
    p, allowed = rule.laws(logits, sampling)
    rows = zip(p, allowed, tokens, parents, map(RandomSource, generators), strict=True)
    walks = [verify_lossy(*row) for row in rows]
    return [path for path, _ in walks], [token for _, token in walks]


def emitted_law(p: Tensor, allowed: Tensor, drawn_from: Sequence[Tensor]) -> Tensor:
    """Return the distribution of the token that a rule emits after a prefix for which children were drafted, [V].

    Args:
        p, allowed: [V]. drawn_from: of each child in turn, the distribution [V] that it was drawn from
            given its elder siblings.
    """
    law, left = torch.zeros_like(p), p.new_ones(())
    for q in drawn_from:
        accepted = q * allowed
        law, left = law + left * accepted, left * (1 - accepted.sum())
    return law + left * p


@dataclass(frozen=True)
class LossyResult:
    """The effect of a lossy rule on an output.

    Attributes:
        rule: its name.
        distance: mean over the output's tokens of the total variation between the law of the token and the target's p
            after the same text; in the best pairing with an exact token, the probability that the two differ. At
            temperature 0, the share of tokens that are not the target's choice there. None where nothing was output.
        differing: share of tokens that differ from the exact greedy output, place by place; None when sampling.
    """

    rule: str
    distance: float | None
    differing: float | None = None

    def line(self) -> str:
        """Return the result as one line of text."""
        text = f"lossy: {self.rule}"
        if self.distance is not None:
            text += f", total variation from the target's distribution {self.distance:.3f} per token"
        if self.differing is not None:
            text += f", {100 * self.differing:.1f} % of the tokens differ from the exact output"
        return text


@dataclass
class DistanceMeter:
    """An ``observe`` for ``decode.decode`` that measures ``LossyResult.distance``.

    Attributes:
        rule, sampling: as given to ``decode``. tokens: measured so far.
    """

    rule: LossyRule
    sampling: Sampling
    tokens: int = field(default=0, init=False)
    _total: float = field(default=0.0, init=False)

    def __call__(self, rows: list[Row], verified: Verified) -> None:
        draft = verified.draft
        laws, allowed = self.rule.laws(verified.output.logits, self.sampling)
        for i, path in enumerate(verified.paths):
            tokens = draft.tokens[i].tolist()
            drawn = one_hot(draft.tokens[i], laws) if draft.probs is None else draft.probs[i]
            for node in (-1, *path):
                below = [
                    child for child, parent in enumerate(draft.parents_of(i)) if parent == node and tokens[child] >= 0
                ]
                p = laws[i, node + 1]
                law = emitted_law(p, allowed[i, node + 1], [drawn[child] for child in below])
                self._total += float((law - p).abs().sum()) / 2
                self.tokens += 1

    def result(self, differing: float | None = None) -> LossyResult:
        """Return the measured distance, and the share of differing tokens if it is known.

        Args:
            differing: see ``LossyResult``.
        """
        return LossyResult(self.rule.name, self._total / self.tokens if self.tokens else None, differing)


def differing_share(exact: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> float:
    """Return the share of places at which two lists of outputs differ; a missing token differs from any.

    Args:
        exact, other: token ids of each output.
    """
    places = [pair for both in zip(exact, other, strict=True) for pair in zip_longest(*both)]
    return sum(one != two for one, two in places) / max(1, len(places))
