"""Drafting with Medusa heads, as a chain or as a tree."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from peftlab.decoding.drafters import Draft, Row, Start, Verified
from peftlab.decoding.trees import best_tree, shape_of
from peftlab.errors import PeftlabError


@dataclass
class MedusaDrafter:
    """Candidates from heads on the target's last hidden state; the draft has no cache and runs no model.

    γ counts drafted tokens: a chain takes the first choice of γ heads, a tree the γ most promising nodes over
    the heads' best choices. Candidates are the heads' top tokens, so verification takes them as certain.

    Attributes:
        heads: [b, H] -> [K, b, V]; head i predicts i + 2 positions ahead (``methods.medusa_heads.MedusaHeads``).
        width: choices of a head that a tree may use; 1 is a chain.
        name: for reports.
    """

    heads: nn.Module
    width: int = 1
    name: str = "medusa"
    _hidden: dict[int, Tensor] = field(init=False, repr=False, default_factory=dict)

    def start(self, rows: list[Row], state: Start) -> None:
        held = zip(rows, state.hidden, strict=True)
        self._hidden = {row.place: hidden for row, hidden in held if hidden is not None}
        self._vocab = state.vocab_size

    @torch.inference_mode()
    def propose(self, rows: list[Row], budgets: list[int]) -> Draft:
        device = next(self.heads.parameters()).device
        # A prompt of one token has left no hidden state: nothing is drafted for it in the first step.
        budgets = [b if row.place in self._hidden else 0 for row, b in zip(rows, budgets, strict=True)]
        if not any(budgets):
            return Draft(torch.full((len(rows), 0), -1, device=device))
        blank = torch.zeros_like(next(iter(self._hidden.values())))
        hidden = torch.stack([self._hidden.get(row.place, blank) for row in rows])
        logits = self.heads(hidden)  # [K, b, V]
        if logits.shape[-1] != self._vocab:
            raise PeftlabError(f"medusa: vocabulary of {logits.shape[-1]}, but the target's has {self._vocab}")
        best = logits.topk(self.width, -1).indices  # [K, b, width]
        tree = best_tree(max(budgets), len(logits), self.width)
        tokens = torch.stack([best[len(path) - 1, :, path[-1]] for path in tree], 1)
        allowed = torch.arange(len(tree), device=device) < torch.tensor(budgets, device=device)[:, None]
        return Draft(torch.where(allowed, tokens, -1), shape=shape_of(tree) if self.width > 1 else None)

    def accept(self, rows: list[Row], verified: Verified) -> None:
        # The state that gave a row its newest token: that of the last accepted node, or of the root.
        for i, (row, path) in enumerate(zip(rows, verified.paths, strict=True)):
            self._hidden[row.place] = verified.output.hidden[i, path[-1] + 1 if path else 0]

    def select(self, slots: list[int]) -> None:
        pass
