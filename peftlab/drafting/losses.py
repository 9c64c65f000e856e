"""Draft losses from hidden states in chunks, and the loss of a draft model beside its target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from peftlab.drafting.objectives import OBJECTIVES, Objective, TopK, selective_mask
from peftlab.drafting.states import frozen_hidden, head_weight, last_hidden, logits_of
from peftlab.drafting.text import following
from peftlab.errors import PeftlabError, did_you_mean
from peftlab.models.chunked_sum import chunked_sum


def chunked_loss(
    hidden: Tensor,
    head_weight: Tensor,
    target: Tensor | TopK,
    target_head: Tensor | None = None,
    objective: str = "kl",
    weights: Tensor | None = None,
    chunk: int = 128,
    settings: Mapping[str, float] = MappingProxyType({}),
    addend: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return ``weighted_mean(OBJECTIVES[objective](target, hidden @ head_weightᵀ), weights)`` in chunks.

    Logits of ``chunk`` tokens exist at a time, the target's among them (see ``chunked_sum``). The gradient flows to
    ``hidden``, ``head_weight`` and ``addend``; the target receives none.

    Args:
        hidden: [T, H], the draft's last hidden states, after its final norm.
        head_weight: [V, H].
        target: [T, Ht], the target's last hidden states after its final norm, if ``target_head`` is given;
            else what the objective itself takes: ids [T], a ``TopK``, or logits [T, V].
        target_head: [V, Ht]; as the draft's, over the same vocabulary.
        objective: a key of ``OBJECTIVES``.
        weights: [T], not negative; None weighs all tokens alike. A token of weight 0 is never computed with.
        chunk: tokens at a time; each costs some 5·V numbers.
        settings: of the objective: ``beta`` of jsd, ``eta`` of lk_hybrid.
        addend: [T, r] and [V, r], whose product is added to the logits; None: nothing.

    Raises:
        PeftlabError: an unknown objective, a chunk below 1, or heads over different vocabularies.
    """
    _check(objective, chunk, head_weight, target_head)
    divergence = OBJECTIVES[objective]

    wide = torch.promote_types(hidden.dtype, torch.float32)
    if weights is None:
        kept = torch.arange(len(hidden), device=hidden.device)
        shares = torch.full((len(hidden),), 1 / max(1, len(hidden)), dtype=wide, device=hidden.device)
    else:
        kept, shares = weights.nonzero().squeeze(-1), weights.to(wide)
        shares = shares / shares.sum()  # over the whole batch, before it is split into chunks

    width, parameters = hidden.shape[-1], [head_weight]
    if addend is not None:
        # ``chunked_sum`` gives gradients to one tensor of rows: the addend's factor travels behind the states.
        hidden, parameters = torch.cat((hidden, addend[0]), -1), [head_weight, addend[1]]

    def loss(rows: Tensor, states: Tensor) -> Tensor:
        logits = logits_of(states[:, :width], head_weight)
        if addend is not None:
            logits = logits + logits_of(states[:, width:], addend[1])
        if isinstance(target, TopK):
            losses = divergence(TopK(*(part[rows] for part in target)), logits, **settings)
        else:
            picked = target[rows] if target_head is None else logits_of(target[rows], target_head)
            losses = divergence(picked.detach(), logits, **settings)
        return (shares[rows] * losses).sum()

    return chunked_sum(loss, hidden, kept, chunk, parameters)


def _check(objective: str, chunk: int, head_weight: Tensor, target_head: Tensor | None) -> None:
    if objective not in OBJECTIVES:
        raise PeftlabError(f"objective {objective!r} is unknown{did_you_mean(objective, OBJECTIVES)}")
    if chunk < 1:
        raise PeftlabError(f"chunk: {chunk} contains no token; give 1 or more")
    if target_head is not None and len(target_head) != len(head_weight):
        raise PeftlabError(
            f"target_head: vocabulary of {len(target_head)}, but the draft's head has {len(head_weight)}; "
            "cut the padding rows of the larger head"
        )


Inputs = dict[str, Tensor]


@dataclass
class PairLoss:
    """Compute the objective between a frozen target and the draft in training, on the continuations alone.

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
        """Return the loss summed over a batch of one target's text, given the draft's states [b, n, H]."""
        places = inputs["weights"] > 0
        weights, hidden = inputs["weights"][places], states[places]  # [T], [T, H]
        target, head = self._target(inputs, places)
        if self.reference is not None:
            weights = weights * self._filter(hidden.detach(), model, inputs, places, target, head)
        loss = chunked_loss(
            hidden, head_weight(model), target, head, self.objective.name, weights, settings=self.objective.settings
        )
        return loss * weights.sum()  # ``chunked_loss`` is a weighted mean, and the caller wants the sum

    def _target(self, inputs: Inputs, places: Tensor) -> tuple[Tensor | TopK, Tensor | None]:
        """Return the target of ``chunked_loss`` at ``places`` [b, n], and the head it goes with."""
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
        for i in row.unique().tolist():  # a share of each example, so that no text drops out of training
            kept |= selective_mask(own, theirs, self.objective.share, row == i)
        return kept

    @torch.no_grad()
    def _token_losses(self, hidden: Tensor, weight: Tensor, target: Tensor | TopK, head: Tensor | None) -> Tensor:
        """Return the loss of each token, [T, H], [V, H] -> [T], without a graph and in chunks."""
        every = torch.arange(len(hidden), device=hidden.device)
        losses = []
        for rows in every.split(128):
            picked: Tensor | TopK
            if isinstance(target, TopK):
                picked = TopK(*(part[rows] for part in target))
            else:
                picked = target[rows] if head is None else target[rows] @ head.T
            losses.append(OBJECTIVES[self.objective.name](picked, hidden[rows] @ weight.T, **self.objective.settings))
        return torch.cat(losses)
