"""Trees drawn from a draft model: several first tokens that all differ, each continued as a chain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peftlab.decoding.drafters.base import PossibleDraft, Proposal, Row
from peftlab.decoding.drafters.model_drafter import ModelDrafter
from peftlab.decoding.verification.multidraft import draw_drafts
from peftlab.decoding.verification.sampling import RandomSource, RowRandomSource, forked
from peftlab.decoding.verification.tree import shape_of


@dataclass
class DrawnTrees(ModelDrafter):
    """Recursive rejection sampling with constant branching (RSD-C, Jeon et al. 2024, arXiv 2402.14160).

    ``width`` tokens are drawn without replacement after the last one, and one after each of these and of their
    successors, level by level up to γ nodes in all. Greedily they are the most probable ones. The target verifies each
    node against what it was drawn from, its elder siblings removed, so that the output is exact. Every level reads the
    tree above it in one pass.

    Attributes:
        width: branches.
    """

    width: int = 2
    gives = frozenset[str]()

    def possible(self, acceptance: Sequence[float], verification: Sequence[float]) -> list[PossibleDraft]:
        """Return none: how often the nodes of its trees are accepted was not measured."""
        return []

    def propose(self, rows: list[Row], budgets: list[int]) -> Proposal:
        budgets = [min(budget, max(0, self._room(row))) for row, budget in zip(rows, budgets, strict=True)]
        nodes, device = max(budgets), self.engine.device
        if nodes == 0:
            return Proposal.empty(len(rows), device)
        generators = forked(row.generator for row in rows)
        tokens, probs = self._first(self._catch_up(rows).logits[:, -1], generators)
        # What lies past these tokens is a tree: the next step reads the accepted ones again.
        self._read |= {row.index: len(row.tokens) for row in rows}
        width = tokens.shape[1]
        parents = tuple(max(-1, node - width) for node in range(-(-nodes // width) * width))
        random = RowRandomSource(generators)
        while tokens.shape[1] < nodes:
            logits = self._leaves(rows, tokens, parents, width)
            q = logits if self._sampling.greedy else self._sampling.probabilities(logits)
            following = q.argmax(-1) if self._sampling.greedy else random.draw(q)
            tokens, probs = torch.cat((tokens, following), 1), torch.cat((probs, q), 1)
        drafted = torch.arange(nodes, device=device) < torch.tensor(budgets, device=device)[:, None]
        tokens = tokens[:, :nodes].where(drafted, -1)
        drawn_from = None if self._sampling.greedy else probs[:, :nodes].where(drafted[..., None], 0)
        return Proposal(tokens, drawn_from, parents=[parents[:nodes]] * len(rows))

    def _first(self, logits: Tensor, generators: list[torch.Generator]) -> tuple[Tensor, Tensor]:
        """Return the first tokens of the branches [b, width], and what each was drawn from [b, width, V]."""
        width = min(self.width, logits.shape[-1])
        if self._sampling.greedy:
            return logits.topk(width, -1).indices, logits[:, None].expand(-1, width, -1)
        rows = zip(self._sampling.probabilities(logits), generators, strict=True)
        drawn = [draw_drafts(q, width, RandomSource(generator), replacement=False) for q, generator in rows]
        tokens, probs = zip(*drawn, strict=True)
        return torch.stack(tokens), torch.stack(probs)

    def _leaves(self, rows: list[Row], tokens: Tensor, parents: tuple[int, ...], width: int) -> Tensor:
        """Read each row's last token and the tree [b, n] below it; return the logits of its last level."""
        n = tokens.shape[1]
        last = torch.tensor([[row.tokens[-1]] for row in rows], device=tokens.device)
        tree = shape_of([parents[:n]] * len(rows))
        starts = [len(row.tokens) - 1 for row in rows]
        block = self._cache.block([row.slot for row in rows], starts, n + 1, tree)
        keep = list(range(n + 1 - width, n + 1))
        return self.engine.forward(self._cache, torch.cat((last, tokens), 1), block, keep).logits
