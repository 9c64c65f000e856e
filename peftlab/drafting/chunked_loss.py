"""A draft's objective, computed from hidden states in chunks: two [T, V] tensors never exist at once."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from peftlab.drafting.hidden_states import logits_of
from peftlab.drafting.objectives import OBJECTIVES, TopK
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
        shares = shares / shares.sum()

    width, parameters = hidden.shape[-1], [head_weight]
    if addend is not None:
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
