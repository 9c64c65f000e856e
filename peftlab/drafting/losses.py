"""The losses of draft training, as the training loop takes them: (model, inputs) to a sum over tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from peftlab.drafting.chunked_loss import chunked_loss
from peftlab.drafting.exits import Exit
from peftlab.drafting.hidden_states import forward_hidden, frozen_hidden, head_weight, last_hidden
from peftlab.drafting.objectives import OBJECTIVES, TopK, selective_mask
from peftlab.methods.injection import disabled
from peftlab.methods.modes import eval_mode

Inputs = dict[str, Tensor]
NO_LOGITS = ("ce", "topk_kl")
"""Objectives that need no target while training."""


@dataclass(frozen=True)
class Objective:
    """What is minimised.

    Attributes:
        name: a key of ``objectives.OBJECTIVES``. settings: its ``beta`` or ``eta``.
        share: of each example's tokens that are trained on (AdaSPEC); 1 is all.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    share: float = 1.0

    def kept(self, tokens: int) -> int:
        """Return how many of an example's tokens are trained on."""
        return max(1, round(self.share * tokens))


@dataclass
class PairLoss:
    """The objective between a frozen target and the draft in training, on the continuations alone.

    Attributes:
        objective: what is minimised.
        target: a frozen causal language model; None for objectives that need no logits.
        reference: the draft distilled beforehand, for AdaSPEC's filter; None where all tokens are kept.
        rewrite: exchanges some rows for continuations of the draft's own; None for none.
    """

    objective: Objective
    target: nn.Module | None = None
    reference: nn.Module | None = None
    rewrite: Callable[[nn.Module, Inputs], Inputs] | None = None

    def __call__(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Return the sum of the objective over the tokens kept; the caller divides by how many there are."""
        if self.rewrite is not None:
            inputs = self.rewrite(model, inputs)
        places = inputs["weights"] > 0
        weights = inputs["weights"][places]
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        hidden = last_hidden(model, ids, mask)[places]  # [T, H]
        target, head = self._target(inputs, places)
        if self.reference is not None:
            weights = weights * self._filter(hidden.detach(), model, inputs, places, target, head)
        loss = chunked_loss(
            hidden, head_weight(model), target, head, self.objective.name, weights, **self.objective.settings
        )
        return loss * weights.sum()

    def _target(self, inputs: Inputs, places: Tensor) -> tuple[Any, Tensor | None]:
        if self.objective.name == "ce":
            return _following(inputs["input_ids"])[places], None
        if self.objective.name == "topk_kl":
            return TopK(inputs["top_values"], inputs["top_indices"], inputs["top_rest"]), None
        assert self.target is not None
        hidden = frozen_hidden(self.target, inputs["input_ids"], inputs["attention_mask"])[places]
        return hidden, head_weight(self.target)

    def _filter(
        self, hidden: Tensor, model: nn.Module, inputs: Inputs, places: Tensor, target: Any, head: Tensor | None
    ) -> Tensor:
        """Return [T] booleans: in each example, the share whose loss lies most above the reference's."""
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
    def _token_losses(self, hidden: Tensor, weight: Tensor, target: Any, head: Tensor | None) -> Tensor:
        one = torch.arange(len(hidden), device=hidden.device)
        losses = []
        for rows in one.split(128):
            part: Any = TopK(*(p[rows] for p in target)) if isinstance(target, TopK) else target[rows]
            picked = part if head is None else part @ head.T
            losses.append(OBJECTIVES[self.objective.name](picked, hidden[rows] @ weight.T, **self.objective.settings))
        return torch.cat(losses)


def _following(input_ids: Tensor) -> Tensor:
    """Return the token after each one, [b, n]; the last place is filled with 0."""
    return torch.cat([input_ids[:, 1:], torch.zeros_like(input_ids[:, :1])], 1)


@dataclass
class HeadsLoss:
    """Medusa heads' loss: Σ_i decay^i · D(p at t+1+i ‖ head i at t), one head's logits at a time.

    ``chunked_loss`` takes each head's gradient to its states before the next head's logits are made; the
    trunk's backward pass runs once, with the heads' sum.

    Head i reads the state at t and predicts token t+2+i. The target of its objective is what the frozen base
    model says at t+1+i, or for ``ce`` the token itself. With a trained trunk (Medusa-2) ``preserve``·KL(base's
    next-token distribution ‖ the trunk's) keeps the model what it was.

    Attributes:
        objective: what each head minimises. decay: λ of the weights λ^i. preserve: of the trunk's KL.
        trunk: whether the trunk trains too.
    """

    objective: Objective
    decay: float = 0.8
    preserve: float = 5.0
    trunk: bool = False

    def __call__(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Return the sum over tokens and heads."""
        ids, mask, weights = inputs["input_ids"], inputs["attention_mask"], inputs["weights"]
        bare: Any = getattr(model, "module", model)
        head = bare.get_output_embeddings()
        base_weight = head.weight.detach()
        if self.trunk:
            hidden = last_hidden(model, ids, mask)
            with disabled(bare):
                base = frozen_hidden(bare, ids, mask)
        else:
            # The heads alone train: no graph goes into the trunk, which is read as it will decode. The gradient mode
            # stays on, because DDP prepares to gather gradients only then.
            with eval_mode(model):
                hidden = base = last_hidden(model, ids, mask).detach()
        total = hidden.new_zeros(())
        n = ids.shape[1]
        for i, (block, weight) in enumerate(head.medusa_heads):
            ahead = i + 1
            if n - ahead < 2:
                continue
            # Place t counts if its prediction, that of place t+1+i, is one of the continuation.
            places = (weights[:, : n - ahead] > 0) & (weights[:, ahead:] > 0)
            states = block(hidden[:, : n - ahead][places])
            if not len(states):
                continue
            if self.objective.name == "ce":
                target, target_head = _following(ids)[:, ahead:][places], None
            else:
                target, target_head = base[:, ahead:][places], base_weight
            mean = chunked_loss(states, weight, target, target_head, self.objective.name, **self.objective.settings)
            total = total + self.decay**i * mean * len(states)
        if not total.requires_grad:  # every continuation is too short to look ahead: nothing to learn, but a graph
            total = total + 0 * sum(p.sum() for p in head.medusa_heads.parameters())
        if self.trunk:
            places = weights > 0
            kept = chunked_loss(hidden[places], base_weight, base[places], base_weight, "kl")
            total = total + self.preserve * kept * places.sum()
        return total


@dataclass
class EarlyExitLoss:
    """LayerSkip's loss on one exit: KL(base ‖ exit) + preserve·KL(base ‖ the trained model), shared LM head.

    Elhoushi et al. 2024 (arXiv 2404.16710), with the base model's own distribution as the teacher. The exit
    answers head(norm(h_l)), h_l the state after l layers: what a draft of the first layers computes.

    Attributes:
        objective: what the exit minimises against the base model's distribution.
        exit: where the exit is. preserve: of the last layer's KL.
    """

    objective: Objective
    exit: Exit
    preserve: float = 1.0

    def __call__(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Return the sum over tokens."""
        ids, mask, places = inputs["input_ids"], inputs["attention_mask"], inputs["weights"] > 0
        bare: Any = getattr(model, "module", model)
        with disabled(bare):
            base = frozen_hidden(bare, ids, mask)[places]
        states = forward_hidden(model, ids, mask)
        head = head_weight(model)
        early = self.exit.states(bare, states, places)
        frozen = head.detach()
        if self.objective.name == "ce":
            target, target_head = _following(ids)[places], None
        else:
            target, target_head = base, frozen
        loss = chunked_loss(early, head, target, target_head, self.objective.name, **self.objective.settings)
        kept = chunked_loss(states[-1][places], head, base, frozen, "kl")
        return (loss + self.preserve * kept) * places.sum()
