"""Trees drawn from a draft model, level by level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from peftlab.decoding.drafters.base import PossibleDraft, Proposal, Row, TargetState
from peftlab.decoding.drafters.model_drafter import ModelDrafter, room
from peftlab.decoding.engines.recurrent.state_cache import StateCache
from peftlab.decoding.verification.drawing import GrowTree, rsd_c
from peftlab.decoding.verification.sampling import RowRandomSource
from peftlab.decoding.verification.tree import shape_of
from peftlab.errors import PeftlabError


@dataclass
class DrawnTrees(ModelDrafter):
    """Trees of γ nodes, of the levels that ``grow`` makes; greedily, of the most probable tokens.

    The target verifies each node against what it was drawn from, its elder siblings removed where they were, so that
    the output is exact. Every level reads the tree above it in one pass.

    Attributes:
        grow: makes what a tree grows by.
    """

    grow: GrowTree = field(default_factory=lambda: rsd_c(2))
    gives = frozenset[str]()
    has_logits = False

    def possible(self, acceptance: Sequence[float], verification: Sequence[float]) -> list[PossibleDraft]:
        """Return none: how often the nodes of its trees are accepted was not measured."""
        return []

    def start(self, rows: list[Row], state: TargetState) -> None:
        super().start(rows, state)
        if isinstance(self._cache, StateCache):
            raise PeftlabError("draft: a state-space model drafts chains only, no trees; give width 1")

    def propose(self, rows: list[Row], budgets: list[int]) -> Proposal:
        budgets = [room(self.engine, row, budget) for row, budget in zip(rows, budgets, strict=True)]
        nodes, device, greedy = max(budgets), self.engine.device, self._sampling.greedy
        if nodes == 0:
            return Proposal.empty(len(rows), device)
        random = None if greedy else RowRandomSource([row.generator for row in rows])
        growth, logits = self.grow(), self._catch_up(rows).logits[:, -1:]
        # What lies past these tokens is a tree: the next step reads the accepted ones again.
        self._read |= {row.index: len(row.tokens) for row in rows}
        tokens, drawn_from = torch.empty(len(rows), 0, dtype=torch.long, device=device), list[Tensor]()
        nodes_above = torch.full((len(rows), 1), -1, device=device)  # the last level, as nodes
        parents = tokens
        while True:
            level = growth.level(logits.float().softmax(-1) if greedy else self._sampling.probabilities(logits), random)
            parents = torch.cat((parents, nodes_above.gather(1, level.above)), 1)
            nodes_above = torch.arange(tokens.shape[1], tokens.shape[1] + level.tokens.shape[1], device=device)
            nodes_above = nodes_above.expand(len(rows), -1)
            tokens = torch.cat((tokens, level.tokens), 1)
            drawn_from.append(level.drawn_from)
            if tokens.shape[1] >= nodes:
                break
            logits = self._leaves(rows, tokens, parents, level.tokens.shape[1])
        drafted = torch.arange(nodes, device=device) < torch.tensor(budgets, device=device)[:, None]
        tokens = tokens[:, :nodes].where(drafted, -1)
        probs = None if greedy else torch.cat(drawn_from, 1)[:, :nodes].where(drafted[..., None], 0)
        return Proposal(tokens, probs, parents=[tuple(line) for line in parents[:, :nodes].tolist()])

    def _leaves(self, rows: list[Row], tokens: Tensor, parents: Tensor, width: int) -> Tensor:
        """Read each row's last token and the tree [b, n] below it; return the logits of its last ``width`` nodes."""
        n = tokens.shape[1]
        last = torch.tensor([[row.tokens[-1]] for row in rows], device=tokens.device)
        tree = shape_of([tuple(line) for line in parents.tolist()])
        starts = [len(row.tokens) - 1 for row in rows]
        block = self._cache.block([row.slot for row in rows], starts, n + 1, tree)
        keep = list(range(n + 1 - width, n + 1))
        return self.engine.forward(self._cache, torch.cat((last, tokens.clamp_min(0)), 1), block, keep).logits
