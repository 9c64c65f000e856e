"""Drafting with heads on the target's last hidden state, as a chain or as a tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from peftlab.decoding.drafters.base import Draft, Row, TargetState, Verified
from peftlab.decoding.verification.tree import best_tree, tree_shape
from peftlab.errors import PeftlabError


class Heads(Protocol):
    """What a drafter needs of Medusa heads.

    Attributes:
        vocab_size: V.
    """

    @property
    def vocab_size(self) -> int: ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the weights; their dtype and device are those of the computation."""
        ...

    def best(self, hidden: Tensor, width: int) -> Tensor:
        """Return each head's ``width`` most probable tokens, the best first: [..., H] -> [K, ..., width]."""
        ...


@dataclass
class HeadsDrafter:
    """Candidates from heads on the target's last hidden state; the draft has no cache and runs no model.

    γ counts drafted tokens: a chain takes the first choice of γ heads, a tree the γ most probable nodes over
    the heads' best choices. Candidates are the heads' top tokens, so verification treats them as deterministic.

    Attributes:
        heads: head i predicts i + 2 positions ahead.
        width: choices of a head that a tree may use; 1 is a chain.
        name: for reports.
    """

    heads: Heads
    width: int = 1
    name: str = "heads"
    _hidden: dict[int, Tensor] = field(init=False, repr=False, default_factory=dict)

    def start(self, rows: list[Row], state: TargetState) -> None:
        states = zip(rows, state.hidden, strict=True)
        self._hidden = {row.index: hidden for row, hidden in states if hidden is not None}
        self._vocab = state.vocab_size

    @torch.inference_mode()
    def propose(self, rows: list[Row], budgets: list[int]) -> Draft:
        weight = next(self.heads.parameters())
        device = weight.device
        # A prompt of one token has no hidden state yet: nothing is drafted for it in the first step.
        budgets = [b if row.index in self._hidden else 0 for row, b in zip(rows, budgets, strict=True)]
        if not any(budgets):
            return Draft.empty(len(rows), device)
        blank = torch.zeros_like(next(iter(self._hidden.values())))
        hidden = torch.stack([self._hidden.get(row.index, blank) for row in rows])
        if self.heads.vocab_size != self._vocab:
            raise PeftlabError(f"heads: vocabulary of {self.heads.vocab_size}, but the target's has {self._vocab}")
        best = self.heads.best(hidden.to(weight.dtype), self.width)  # [K, b, width]
        tree = best_tree(max(budgets), len(best), self.width)
        tokens = torch.stack([best[len(path) - 1, :, path[-1]] for path in tree], 1)
        allowed = torch.arange(len(tree), device=device) < torch.tensor(budgets, device=device)[:, None]
        return Draft(torch.where(allowed, tokens, -1), shape=tree_shape(tree) if self.width > 1 else None)

    def accept(self, rows: list[Row], verified: Verified) -> None:
        # The state from which a row's newest token was chosen: that of the last accepted node, or of the root.
        for i, (row, path) in enumerate(zip(rows, verified.paths, strict=True)):
            self._hidden[row.index] = verified.output.hidden[i, path[-1] + 1 if path else 0]

    def select(self, slots: list[int]) -> None:
        pass
