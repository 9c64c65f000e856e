"""The loss and the acceptance of early exits, both against the model as it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from datasets import Dataset
from torch import Tensor, nn

from peftlab.drafting.acceptance import Acceptance, add_rates, batches
from peftlab.drafting.chunked_loss import chunked_loss
from peftlab.drafting.hidden_states import forward_hidden, frozen_hidden, head_weight, unwrapped
from peftlab.drafting.kinds.early_exit.exits import Exit
from peftlab.drafting.kinds.early_exit.layerskip import LayerDropout, dropout_growth, enabled, shares
from peftlab.drafting.objectives import Objective
from peftlab.drafting.text.continuations import following
from peftlab.methods.injection import disabled
from peftlab.methods.modes import eval_mode
from peftlab.training.faults import STEPS


@dataclass
class EarlyExitLoss:
    """LayerSkip's loss: Σ ẽ_k·objective(exit k) + ẽ_L·KL(base ‖ the trained model), shared LM head.

    Elhoushi et al. 2024 (arXiv 2404.16710), with the base model's own distribution as the teacher. An exit
    computes head(norm(h_k)), h_k the state after k layers: what a draft of the first layers computes.

    Attributes:
        objective: what the exits minimise against the base model's distribution.
        exits: where they are. weights: e of each, and of the last layer behind them.
        curriculum, every: see ``layerskip.enabled``.
        dropout: leaves layers out, in all but the first steps, in which every parameter must learn; None: none.
        schedule: of the dropout, see ``layerskip.dropout_growth``.
    """

    objective: Objective
    exits: Sequence[Exit]
    weights: Sequence[float]
    curriculum: str | None = None
    every: int = 1
    dropout: LayerDropout | None = None
    schedule: str = "constant"
    _shares: list[float] = field(init=False)
    _growth: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._shares = shares(self.weights, [True] * len(self.exits))

    def at_step(self, step: int, steps: int) -> str:
        """Choose the exits and the dropout of a step; return the exits where a curriculum chooses them."""
        active = enabled(self.curriculum, len(self.exits), step, steps, self.every)
        self._shares = shares(self.weights, active)
        self._growth = dropout_growth(self.schedule, step, steps) if step >= STEPS else 0.0
        trained = [str(exit_.layers) for exit_, on in zip(self.exits, active, strict=True) if on]
        return "" if self.curriculum is None else f" exits {','.join(trained)}"

    def __call__(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """Return the sum over tokens."""
        ids, mask, places = inputs["input_ids"], inputs["attention_mask"], inputs["weights"] > 0
        bare = unwrapped(model)
        with disabled(bare):
            base = frozen_hidden(bare, ids, mask)[places]
        if self.dropout is not None:
            self.dropout.draw(len(ids), self._growth, ids.device)
        states = forward_hidden(model, ids, mask)
        head = head_weight(model)
        frozen = head.detach()
        if self.objective.name == "ce":
            target, target_head = following(ids)[places], None
        else:
            target, target_head = base, frozen
        name, settings = self.objective.name, self.objective.settings
        *early, last = self._shares
        loss = last * chunked_loss(states[-1][places], head, base, frozen, "kl")
        for exit_, share in zip(self.exits, early, strict=True):
            if share:
                exited = exit_.states(bare, states, places)
                loss = loss + share * chunked_loss(exited, head, target, target_head, name, settings=settings)
        return loss * places.sum()


@torch.no_grad()
def measure_exits(model: nn.Module, exits: Sequence[Exit], data: Dataset, batch_size: int = 16) -> list[Acceptance]:
    """Return the acceptance of each early exit, and of the whole model as trained behind them.

    All by the base model, which is what ``model`` computes with its injection switched off.
    """
    sums = torch.zeros(len(exits) + 1, 4, len(data), dtype=torch.float64)
    head = head_weight(model)
    for rows, places, ids, mask in batches(data, batch_size, head.device):
        with eval_mode(model):
            states = forward_hidden(model, ids, mask)
            each = [*(exit_.states(model, states, places) for exit_ in exits), states[-1][places]]
        with disabled(model):
            base = frozen_hidden(model, ids, mask)[places]
        for total, mine in zip(sums, each, strict=True):
            add_rates(total, rows[places.nonzero()[:, 0].cpu()], base, mine, head, head)
    return [Acceptance(*total) for total in sums]
