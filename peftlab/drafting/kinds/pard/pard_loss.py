"""The loss and the acceptance of a draft that writes several tokens in one pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from datasets import Dataset
from torch import Tensor, nn

from peftlab.drafting.acceptance import Acceptance, add_rates, batches
from peftlab.drafting.chunked_loss import chunked_loss
from peftlab.drafting.hidden_states import frozen_hidden, head_weight
from peftlab.drafting.kinds.model.pair_loss import Inputs
from peftlab.drafting.kinds.pard.mask_rows import MaskRows, parallel_states
from peftlab.drafting.objectives import Objective
from peftlab.drafting.text.continuations import continued, following
from peftlab.methods.modes import eval_mode


@dataclass
class PardLoss:
    """The objective at every token of the continuations and at rows of masks, against the target's own at its place.

    Row (i, t) is behind i masks (``mask_rows.MaskRows``), and i = 0 is the text: with K = 1 it is ``PairLoss``. All
    rows count alike, however many were dropped.

    Attributes:
        objective: what is minimised. target: a frozen causal language model.
        length: K. retain, least: see ``mask_rows.drawn_places``. mask: gives the token that rows read; it is known
            when the training text is.
        rewrite: exchanges some rows for continuations of the draft's own; None for none.
    """

    objective: Objective
    target: nn.Module
    length: int
    retain: float
    least: float
    mask: Callable[[], int]
    rewrite: Callable[[nn.Module, Inputs], Inputs] | None = None

    def __call__(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Return the sum over tokens and rows."""
        if self.rewrite is not None:
            inputs = self.rewrite(model, inputs)
        ids, weights = inputs["input_ids"], inputs["weights"]
        rows = MaskRows.drawn(continued(inputs), self.length, self.retain, self.least)
        states = parallel_states(model, ids, rows, self.mask())
        places, masked = weights > 0, rows.depth > 0

        def each(values: Tensor) -> Tensor:
            """Return the values [b, n, ...] at the places of tokens and rows, [T, ...]."""
            which = torch.arange(len(values), device=values.device)[:, None].expand_as(rows.place)
            return torch.cat((values[places], values[which[masked], rows.place[masked]]))

        mine = torch.cat((states[:, : ids.shape[1]][places], states[:, ids.shape[1] :][masked]))
        if self.objective.name == "ce":
            target, head = each(following(ids)), None
        else:
            target, head = each(frozen_hidden(self.target, ids, inputs["attention_mask"])), head_weight(self.target)
        shares = each(weights)
        loss = chunked_loss(
            mine, head_weight(model), target, head, self.objective.name, shares, settings=self.objective.settings
        )
        return loss * shares.sum()


@torch.no_grad()
def measure_depths(
    target: nn.Module, draft: nn.Module, data: Dataset, length: int, mask: int, batch_size: int = 16
) -> list[Acceptance]:
    """Return the acceptance of the tokens behind 0, 1, ..., ``length`` - 1 masks on the continuations of ``data``."""
    sums = torch.zeros(length, 4, len(data), dtype=torch.float64)
    heads = head_weight(target), head_weight(draft)
    for numbers, places, ids, attention in batches(data, batch_size, heads[0].device):
        state = torch.random.get_rng_state()
        rows = MaskRows.drawn(places.float(), length, 1.0, 1.0)
        torch.random.set_rng_state(state)  # nothing is dropped: what training draws must not change
        with eval_mode(draft):
            states = parallel_states(draft, ids, rows, mask)
        own, n = frozen_hidden(target, ids, attention), ids.shape[1]
        add_rates(sums[0], numbers[places.nonzero()[:, 0].cpu()], own[places], states[:, :n][places], *heads)
        for i in range(1, length):
            here = rows.depth == i
            which = here.nonzero()[:, 0]
            add_rates(sums[i], numbers[which.cpu()], own[which, rows.place[here]], states[:, n:][here], *heads)
    return [Acceptance(*part) for part in sums]
