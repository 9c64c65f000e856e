"""The loss of a draft model: an objective between a frozen target and the draft in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from peftlab.drafting.chunked_loss import chunked_loss
from peftlab.drafting.hidden_states import frozen_hidden, head_weight, last_hidden
from peftlab.drafting.objectives import OBJECTIVES, Objective, TopK, selective_mask
from peftlab.drafting.text.continuations import following

Inputs = dict[str, Tensor]


@dataclass
class PairLoss:
    """The objective between a frozen target and the draft in training, on the continuations alone.

    Attributes:
        objective: what is minimised.
        target: a frozen causal language model; None for objectives that need no logits.
        reference: the draft distilled beforehand, for AdaSPEC's filter; None where all tokens are kept.
        rewrite: exchanges some rows for continuations of the draft's own; None for none.
        others: further targets: of a batch with ``teacher``, each row is compared with the one that wrote it.
    """

    objective: Objective
    target: nn.Module | None = None
    reference: nn.Module | None = None
    rewrite: Callable[[nn.Module, Inputs], Inputs] | None = None
    others: Sequence[nn.Module] = ()

    def __call__(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Return the sum of the objective over the tokens kept; the caller divides by how many there are."""
        if self.rewrite is not None:
            inputs = self.rewrite(model, inputs)
        hidden = last_hidden(model, inputs["input_ids"], inputs["attention_mask"])  # [b, n, H]
        if not self.others:
            return self._loss(model, hidden, inputs)
        total = hidden.new_zeros(())
        for number, target in enumerate((self.target, *self.others)):
            rows = inputs["teacher"] == number
            if rows.any():
                part = {key: value[rows] for key, value in inputs.items()}
                total = total + replace(self, target=target, others=())._loss(model, hidden[rows], part)
        return total

    def _loss(self, model: nn.Module, states: Tensor, inputs: Inputs) -> Tensor:
        """Return the sum over a batch of the one target, whose states by the draft are [b, n, H]."""
        places = inputs["weights"] > 0
        weights, hidden = inputs["weights"][places], states[places]  # [T], [T, H]
        target, head = self._target(inputs, places)
        if self.reference is not None:
            weights = weights * self._filter(hidden.detach(), model, inputs, places, target, head)
        loss = chunked_loss(
            hidden, head_weight(model), target, head, self.objective.name, weights, settings=self.objective.settings
        )
        return loss * weights.sum()

    def _target(self, inputs: Inputs, places: Tensor) -> tuple[Tensor | TopK, Tensor | None]:
        if self.objective.name == "ce":
            return following(inputs["input_ids"])[places], None
        if self.objective.name == "topk_kl":
            return TopK(inputs["top_values"], inputs["top_indices"], inputs["top_rest"]), None
        assert self.target is not None
        hidden = frozen_hidden(self.target, inputs["input_ids"], inputs["attention_mask"])[places]
        return hidden, head_weight(self.target)

    def _filter(
        self,
        hidden: Tensor,
        model: nn.Module,
        inputs: Inputs,
        places: Tensor,
        target: Tensor | TopK,
        head: Tensor | None,
    ) -> Tensor:
        """Return [T] booleans: in each example, the share whose loss is furthest above the reference's."""
        assert self.reference is not None
        other = frozen_hidden(self.reference, inputs["input_ids"], inputs["attention_mask"])[places]
        own = self._token_losses(hidden, head_weight(model), target, head)
        theirs = self._token_losses(other, head_weight(self.reference), target, head)
        row = places.nonzero()[:, 0]
        kept = torch.zeros_like(row, dtype=torch.bool)
        for i in row.unique().tolist():
            kept |= selective_mask(own, theirs, self.objective.share, row == i)
        return kept

    @torch.no_grad()
    def _token_losses(self, hidden: Tensor, weight: Tensor, target: Tensor | TopK, head: Tensor | None) -> Tensor:
        one = torch.arange(len(hidden), device=hidden.device)
        losses = []
        for rows in one.split(128):
            picked: Tensor | TopK
            if isinstance(target, TopK):
                picked = TopK(*(part[rows] for part in target))
            else:
                picked = target[rows] if head is None else target[rows] @ head.T
            losses.append(OBJECTIVES[self.objective.name](picked, hidden[rows] @ weight.T, **self.objective.settings))
        return torch.cat(losses)
