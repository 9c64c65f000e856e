"""The loss and the acceptance of an early exit, both against the model as it was."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from datasets import Dataset
from torch import Tensor, nn

from peftlab.drafting.acceptance import Acceptance, add_rates, batches
from peftlab.drafting.chunked_loss import chunked_loss
from peftlab.drafting.hidden_states import forward_hidden, frozen_hidden, head_weight, unwrapped
from peftlab.drafting.kinds.early_exit.exits import Exit
from peftlab.drafting.objectives import Objective
from peftlab.drafting.text.continuations import following
from peftlab.methods.injection import disabled
from peftlab.methods.modes import eval_mode


@dataclass
class EarlyExitLoss:
    """LayerSkip's loss on one exit: KL(base ‖ exit) + preserve·KL(base ‖ the trained model), shared LM head.

    Elhoushi et al. 2024 (arXiv 2404.16710), with the base model's own distribution as the teacher. The exit
    computes head(norm(h_l)), h_l the state after l layers: what a draft of the first layers computes.

    Attributes:
        objective: what the exit minimises against the base model's distribution.
        exit: where the exit is. preserve: of the last layer's KL.
    """

    objective: Objective
    exit: Exit
    preserve: float = 1.0

    def __call__(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """Return the sum over tokens."""
        ids, mask, places = inputs["input_ids"], inputs["attention_mask"], inputs["weights"] > 0
        bare = unwrapped(model)
        with disabled(bare):
            base = frozen_hidden(bare, ids, mask)[places]
        states = forward_hidden(model, ids, mask)
        head = head_weight(model)
        early = self.exit.states(bare, states, places)
        frozen = head.detach()
        if self.objective.name == "ce":
            target, target_head = following(ids)[places], None
        else:
            target, target_head = base, frozen
        loss = chunked_loss(early, head, target, target_head, self.objective.name, settings=self.objective.settings)
        kept = chunked_loss(states[-1][places], head, base, frozen, "kl")
        return (loss + self.preserve * kept) * places.sum()


@torch.no_grad()
def measure_exit(model: nn.Module, exit_: Exit, data: Dataset, batch_size: int = 16) -> tuple[Acceptance, Acceptance]:
    """Return the acceptance of an early exit, and of the whole model as trained.

    Both by the base model, which is what ``model`` computes with its injection switched off.
    """
    sums = torch.zeros(2, 4, len(data), dtype=torch.float64)
    head = head_weight(model)
    for rows, places, ids, mask in batches(data, batch_size, head.device):
        with eval_mode(model):
            states = forward_hidden(model, ids, mask)
            early = exit_.states(model, states, places)
        with disabled(model):
            base = frozen_hidden(model, ids, mask)[places]
        for total, mine in zip(sums, (early, states[-1][places]), strict=True):
            add_rates(total, rows[places.nonzero()[:, 0].cpu()], base, mine, head, head)
    return Acceptance(*sums[0]), Acceptance(*sums[1])
