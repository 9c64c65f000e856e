"""Drafting with the target's first layers, as many as pay at the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from peftlab.decoding.drafters.base import PossibleDraft, Proposal, Row, Verified
from peftlab.decoding.drafters.model_drafter import ModelDrafter
from peftlab.decoding.drafters.own_layers.exit_choice import ExitChoice
from peftlab.decoding.drafters.own_layers.parts import Exit
from peftlab.decoding.sampling import largest


@dataclass(kw_only=True)
class ChosenExit(ModelDrafter):
    """An early exit whose layer and draft length are chosen in every round, the same for all sequences.

    DEL (Zarch et al. 2025, arXiv 2504.05598). After a verification the state after every possible exit is known at each
    token up to the first rejection, from drafting or from verification. The LM head turns it into what the exit would
    have drafted there (a shadow token). Greedily its acceptance is whether that is the target's token, otherwise
    Σ min(p, q). The target's engine must report the states that enter the layers ``choice.exits``.

    Attributes:
        exit: the target's first layers; ``engine``, which may be one around it, runs it.
        choice: what the acceptance of each exit was; may be shared by drafters one after the other.
    """

    exit: Exit
    choice: ExitChoice
    name: str = "del"
    shares_cache: bool = field(default=True, init=False)

    def possible(self, acceptance: Sequence[float], verification: Sequence[float]) -> list[PossibleDraft]:
        """Return none: its lengths are its own choice."""
        return []

    def propose(self, rows: list[Row], budgets: list[int]) -> Proposal:
        self.exit.first, length = self.choice.best(max(budgets))
        if length == 0:
            return Proposal.empty(len(rows), self.engine.device)
        return super().propose(rows, [min(budget, length) for budget in budgets])

    def accept(self, rows: list[Row], verified: Verified) -> None:
        super().accept(rows, verified)
        features = verified.output.features
        assert features is not None
        for i, path in enumerate(verified.paths):
            read = [0, *(node + 1 for node in path)]
            states = features[i, read].unflatten(-1, (len(self.choice.exits), -1))  # [m, exits, H]
            for accepted in self._accepted(self.exit.logits(states), verified.output.logits[i, read]):
                self.choice.learn(accepted)

    def _accepted(self, shadows: Tensor, logits: Tensor) -> list[list[float]]:
        """Return the acceptance of each exit's logits [m, exits, V] by the target's [m, V]."""
        if self._sampling.greedy:
            return (largest(shadows) == largest(logits)[:, None]).float().tolist()
        p, q = self._sampling.probabilities(logits), self._sampling.probabilities(shadows)
        return torch.minimum(p[:, None], q).sum(-1).tolist()
