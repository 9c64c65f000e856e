"""A draft's objective, computed from hidden states in chunks: two [T, V] tensors never exist at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from peftlab.drafting.objectives import OBJECTIVES, TopK
from peftlab.errors import PeftlabError, did_you_mean
from peftlab.untyped import AutogradContext

Losses = Callable[[Tensor, Tensor], Tensor]  # row indices [t] and their draft logits [t, V] -> losses [t]


def chunked_loss(
    hidden: Tensor,
    head_weight: Tensor,
    target: Tensor | TopK,
    target_head: Tensor | None = None,
    objective: str = "kl",
    weights: Tensor | None = None,
    chunk: int = 128,
    settings: Mapping[str, float] = MappingProxyType({}),
) -> Tensor:
    """Return ``weighted_mean(OBJECTIVES[objective](target, hidden @ head_weightᵀ), weights)`` in chunks.

    Logits of ``chunk`` tokens live at a time, the target's among them. The gradient of each chunk is taken as
    soon as its loss is known and multiplied by the incoming gradient in the backward pass, so nothing is
    computed twice. It flows to ``hidden`` and ``head_weight`` (once: there is no second derivative); the
    target receives none.

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

    Raises:
        PeftlabError: an unknown objective, a chunk below 1, or heads over different vocabularies.
    """
    if objective not in OBJECTIVES:
        raise PeftlabError(f"objective {objective!r} is unknown{did_you_mean(objective, OBJECTIVES)}")
    if chunk < 1:
        raise PeftlabError(f"chunk: {chunk} contains no token; give 1 or more")
    if target_head is not None and len(target_head) != len(head_weight):
        raise PeftlabError(
            f"target_head: vocabulary of {len(target_head)}, but the draft's head has {len(head_weight)}; "
            "cut the padding rows of the larger head"
        )
    divergence = OBJECTIVES[objective]

    def losses(rows: Tensor, draft_logits: Tensor) -> Tensor:
        if isinstance(target, TopK):
            return divergence(TopK(*(part[rows] for part in target)), draft_logits, **settings)
        picked = target[rows] if target_head is None else F.linear(target[rows], target_head)
        return divergence(picked, draft_logits, **settings)

    # Inside an autograd function the gradient mode is always off, so what the caller wants is read here.
    return _ChunkedMean.apply(hidden, head_weight, weights, losses, chunk, torch.is_grad_enabled())


class _ChunkedMean(torch.autograd.Function):
    """Weighted mean of ``losses``; the forward pass takes the gradients that the backward pass returns."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        hidden: Tensor,
        head_weight: Tensor,
        weights: Tensor | None,
        losses: Losses,
        chunk: int,
        with_gradient: bool,
    ) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        if weights is None:
            kept = torch.arange(len(hidden), device=hidden.device)
            shares = torch.full_like(kept, 1 / max(1, len(kept)), dtype=wide)
        else:
            kept = weights.nonzero().squeeze(-1)
            shares = weights[kept].to(wide)
            shares = shares / shares.sum()
        for_hidden, for_head = (with_gradient and needed for needed in ctx.needs_input_grad[:2])
        d_hidden = torch.zeros_like(hidden) if for_hidden else None
        # A half-precision sum over many chunks would lose the small ones.
        d_head = torch.zeros_like(head_weight, dtype=wide) if for_head else None
        total = torch.zeros((), dtype=wide, device=hidden.device)
        for rows, share in zip(kept.split(chunk), shares.split(chunk), strict=True):
            h = hidden[rows]  # [t, H]
            loss, d_logits = _value_and_gradient(F.linear(h, head_weight), rows, share, losses, for_hidden or for_head)
            total += loss
            if d_hidden is not None:
                d_hidden[rows] = (d_logits @ head_weight).to(hidden.dtype)
            if d_head is not None:
                d_head.addmm_(d_logits.T.to(wide), h.to(wide))
        ctx.save_for_backward(d_hidden, None if d_head is None else d_head.to(head_weight.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, d_total: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_head = (None if d is None else d * d_total.to(d.dtype) for d in ctx.saved_tensors)
        return d_hidden, d_head, None, None, None, None


def _value_and_gradient(
    logits: Tensor, rows: Tensor, share: Tensor, losses: Losses, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return Σ share·loss over one chunk, and its gradient to the logits [t, V] if it is wanted."""
    with torch.set_grad_enabled(with_gradient):
        logits.requires_grad_(with_gradient)
        loss = (share * losses(rows, logits)).sum()
    gradient = torch.autograd.grad(loss, logits)[0] if with_gradient else logits
    return loss.detach(), gradient
