"""The loss and the acceptance of heads, both against the model as it was."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from datasets import Dataset
from torch import Tensor, nn

from peftlab.drafting.acceptance import Acceptance, add_rates, batches
from peftlab.drafting.chunked_loss import chunked_loss
from peftlab.drafting.hidden_states import frozen_hidden, head_weight, last_hidden, unwrapped
from peftlab.drafting.kinds.medusa.head_stack import HeadedModel
from peftlab.drafting.objectives import Objective
from peftlab.drafting.text.continuations import continued, following
from peftlab.methods.injection import disabled, is_injected
from peftlab.methods.modes import eval_mode


@dataclass
class HeadsLoss:
    """The loss of heads: Σ_i decay^i · D(p at t+1+i ‖ head i at t), one head's logits at a time.

    ``chunked_loss`` takes each head's gradient to its states before the next head's logits are made; the
    trunk's backward pass runs once, with the heads' sum.

    Head i reads the state at t, and where it reads tokens the text's t+1 to t+1+i, and predicts token t+2+i. The target
    of its objective is what the frozen base model predicts at t+1+i, or for ``ce`` the token itself. With a trained
    trunk (Medusa-2) ``preserve``·KL(base's next-token distribution ‖ the trunk's) keeps the model what it was.

    Attributes:
        objective: what each head minimises. decay: λ of the weights λ^i.
        preserve: weight of the KL of a trunk that has a method injected.
    """

    objective: Objective
    decay: float = 0.8
    preserve: float = 5.0

    def __call__(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """Return the sum over tokens and heads."""
        ids, mask, weights = inputs["input_ids"], inputs["attention_mask"], inputs["weights"]
        headed = unwrapped(model)
        base_weight, trained = head_weight(headed).detach(), is_injected(headed.trunk)
        if trained:
            hidden = last_hidden(model, ids, mask)
            with disabled(headed.trunk):
                base = frozen_hidden(headed.trunk, ids, mask)
        else:
            # The heads alone train: no graph goes into the trunk, which is read as it will decode. The gradient mode
            # stays on, because DDP prepares to gather gradients only then.
            with eval_mode(model):
                hidden = base = last_hidden(model, ids, mask).detach()
        total, drafted = hidden.new_zeros(()), continued(inputs)
        n = ids.shape[1]
        for i, (_, weight) in enumerate(headed.heads):
            ahead = i + 1
            if n - ahead < 2:
                continue
            # Place t counts if its prediction, that of place t+1+i, does and the prompt has been read.
            places = drafted[:, : n - ahead] & (weights[:, ahead:] > 0)
            if not places.any():
                continue
            before = known_tokens(ids, ahead)[places]
            states = headed.heads.states(i, hidden[:, : n - ahead][places], before)
            if self.objective.name == "ce":
                target, target_head = following(ids)[:, ahead:][places], None
            else:
                target, target_head = base[:, ahead:][places], base_weight
            mean = chunked_loss(
                states,
                weight,
                target,
                target_head,
                self.objective.name,
                settings=self.objective.settings,
                addend=headed.heads.addend(before),
            )
            total = total + self.decay**i * mean * len(states)
        if not total.requires_grad:  # every continuation is too short to look ahead: nothing to learn, but a graph
            total = total + 0 * sum(p.sum() for p in headed.heads.parameters())
        if trained:
            places = weights > 0
            kept = chunked_loss(hidden[places], base_weight, base[places], base_weight, "kl")
            total = total + self.preserve * kept * places.sum()
        return total


def known_tokens(ids: Tensor, ahead: int) -> Tensor:
    """Return the ``ahead`` tokens after each place of texts [b, n] that has them, [b, n - ahead, ahead]."""
    return ids[:, 1:].unfold(1, ahead, 1)


@torch.no_grad()
def measure_heads(model: HeadedModel, data: Dataset, batch_size: int = 16) -> tuple[list[Acceptance], Acceptance]:
    """Return the acceptance of each head by the base model, and of the model as trained by the base model.

    Head i's prediction at place t, of token t+2+i, is compared with the base model's at t+1+i; examples too
    short for a head have no predictions of it. The second is exactly 1 everywhere with a frozen trunk; with a
    trained one it measures how much of the model is preserved: the tokens of a collapsed trunk are easy to predict.
    """
    head, count = head_weight(model), model.heads.depth
    sums = torch.zeros(count + 1, 4, len(data), dtype=torch.float64)
    for rows, places, ids, mask in batches(data, batch_size, head.device):
        hidden = frozen_hidden(model, ids, mask)
        base = hidden
        if is_injected(model.trunk):
            with disabled(model.trunk):
                base = frozen_hidden(model, ids, mask)
        for i in range(count):
            both = places[:, : -(i + 1)] & places[:, i + 1 :]
            late = base[:, i + 1 :][both]
            early, weight = model.heads.product(i, hidden[:, : -(i + 1)][both], known_tokens(ids, i + 1)[both])
            add_rates(sums[i], rows[both.nonzero()[:, 0].cpu()], late, early, head, weight)
        kept = rows[places.nonzero()[:, 0].cpu()]
        add_rates(sums[-1], kept, base[places], hidden[places], head, head)
    *heads, trunk = (Acceptance(*part) for part in sums)
    return heads, trunk
