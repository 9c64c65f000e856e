"""Drafting with heads on the target's last hidden state, as a chain or as a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from peftlab.decoding.drafters.base import Drafter, PossibleDraft, Proposal, Row, TargetState, Verified
from peftlab.decoding.trees import (
    Path,
    RankRates,
    best_tree,
    expected_tokens,
    parents_of,
    rank_probability,
)
from peftlab.errors import PeftlabError


class Heads(Protocol):
    """What a drafter needs of Medusa heads.

    Attributes:
        vocab_size: V.
        depth: K.
        ranks: how often each head's choices are right, as measured; None: not measured.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def depth(self) -> int: ...

    @property
    def ranks(self) -> RankRates | None: ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the weights; their dtype and device are those of the computation."""
        ...

    def tokens(self, hidden: Tensor, last: Tensor, tree: Sequence[Path]) -> Tensor:
        """Return the tokens of a tree's nodes: (.., r) is the choice of rank r after its parent's token.

        Args:
            hidden: [b, H], the states from which the last tokens were chosen. last: [b], these tokens.
            tree: N paths, a parent before its children, at most K deep.

        Returns:
            [b, N].
        """
        ...


def tree_tokens(
    logits: Tensor,
    last: Tensor,
    tree: Sequence[Path],
    bias: Callable[[Tensor], Tensor] | None = None,
    ids: Tensor | None = None,
) -> Tensor:
    """Return the tokens of a tree's nodes, level by level; arguments as for ``Heads.tokens``.

    Args:
        logits: [K, b, V] of the heads.
        bias: tokens [b, n] -> [b, n, V], added to the logits of what follows them: children of different parents then
            have different choices. None: a head's choices are the same after every parent.
        ids: [V], the token of each logit; None: its own number.
    """

    def following(level: int, before: Tensor) -> Tensor:
        scores = logits[level][:, None]  # [b, 1, V]: one for all parents
        return scores if bias is None else scores + bias(before[..., -1])

    return grown_tokens(following, last, tree, ids)


def grown_tokens(
    following: Callable[[int, Tensor], Tensor], last: Tensor, tree: Sequence[Path], ids: Tensor | None = None
) -> Tensor:
    """Return the tokens of a tree's nodes, where what follows depends on the tokens above.

    Args:
        following: (level from 0, the last token and the drafted ones up to each of n parents [b, n, level + 1]) ->
            logits of their children, [b, n or 1, V].
        last, tree: as for ``Heads.tokens``. ids: [V], the token of each logit; None: its own number.
    """
    tokens: dict[Path, Tensor] = {(): last}
    for level in range(max(map(len, tree))):
        here = [path for path in tree if len(path) == level + 1]
        parents = list(dict.fromkeys(path[:-1] for path in here))
        lines = [torch.stack([tokens[parent[:k]] for k in range(level + 1)], -1) for parent in parents]
        scores = following(level, torch.stack(lines, 1))
        best = scores.topk(1 + max(path[-1] for path in here), -1).indices
        best = (best if ids is None else ids[best]).expand(-1, len(parents), -1)
        for path in here:
            tokens[path] = best[:, parents.index(path[:-1]), path[-1]]
    return torch.stack([tokens[path] for path in tree], 1)


@dataclass
class HeadsDrafter(Drafter):
    """Candidates from heads on the target's last hidden state; the draft has no cache and runs no model.

    γ counts drafted tokens: a chain takes the first choice of γ heads, a tree the γ nodes most likely to be reached.
    Candidates are the heads' top tokens, so verification treats them as deterministic.

    Attributes:
        heads: head i predicts i + 2 positions ahead.
        width: choices of a head that a tree may use; 1 is a chain. None: all that were measured for the heads, a chain
            where nothing was.
        name: for reports.
    """

    heads: Heads
    width: int | None = None
    name: str = "heads"
    _hidden: dict[int, Tensor] = field(init=False, repr=False, default_factory=dict)

    def start(self, rows: list[Row], state: TargetState) -> None:
        self._hidden, self._vocab = {}, state.vocab_size
        self.join(rows, state)

    def join(self, rows: list[Row], state: TargetState) -> None:
        states = zip(rows, state.hidden, strict=True)
        self._hidden |= {row.index: hidden for row, hidden in states if hidden is not None}

    @torch.inference_mode()
    def propose(self, rows: list[Row], budgets: list[int]) -> Proposal:
        weight = next(self.heads.parameters())
        device = weight.device
        # A prompt of one token has no hidden state yet: nothing is drafted for it in the first step.
        budgets = [b if row.index in self._hidden else 0 for row, b in zip(rows, budgets, strict=True)]
        if not any(budgets):
            return Proposal.empty(len(rows), device)
        blank = torch.zeros_like(next(iter(self._hidden.values())))
        hidden = torch.stack([self._hidden.get(row.index, blank) for row in rows])
        if self.heads.vocab_size != self._vocab:
            raise PeftlabError(f"heads: vocabulary of {self.heads.vocab_size}, but the target's has {self._vocab}")
        tree = self.tree(max(budgets))
        last = torch.tensor([row.tokens[-1] for row in rows], device=device)
        tokens = self.heads.tokens(hidden.to(weight.dtype), last, tree)
        allowed = torch.arange(len(tree), device=device) < torch.tensor(budgets, device=device)[:, None]
        chain = all(set(path) == {0} for path in tree)
        parents = None if chain else [parents_of(tree)] * len(rows)
        return Proposal(torch.where(allowed, tokens, -1), parents=parents)

    def tree(self, size: int) -> tuple[Path, ...]:
        """Return the best tree of at most ``size`` nodes."""
        ranks = self.heads.ranks
        width = self.width or (1 if ranks is None else ranks.width)
        return best_tree(size, self.heads.depth, width, ranks or rank_probability)

    def accept(self, rows: list[Row], verified: Verified) -> None:
        # The state from which a row's newest token was chosen: that of the last accepted node, or of the root.
        for i, (row, path) in enumerate(zip(rows, verified.paths, strict=True)):
            self._hidden[row.index] = verified.output.hidden[i, path[-1] + 1 if path else 0]

    def possible(self, acceptance: Sequence[float], verification: Sequence[float]) -> list[PossibleDraft]:
        """See ``Drafter.possible``: a tree by the measured ranks, else a chain, each drafted at the same effort."""
        if self.heads.ranks is None:
            return [replace(draft, effort=1.0) for draft in super().possible(acceptance, verification)]
        return [
            PossibleDraft(n, tokens, 1.0)
            for n, tokens in enumerate(expected_tokens(self.tree(len(verification) - 1), self.heads.ranks), start=1)
        ]
