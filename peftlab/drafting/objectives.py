"""What a draft is trained to minimise: divergences between the target p and the draft q, and losses made of them.

Each divergence takes the target first and draft logits [T, V] second, and returns losses [T]. No gradient flows
to the target. Softmaxes run in float32 at least. A log-probability is floored at -10⁴, whose exponential is 0
in float32 and float64: a masked logit (-inf) is probability 0, and costs a large but finite amount where the
other side has mass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peftlab.drafting.config import DraftObjective
from peftlab.drafting.target import frozen_hidden, head_weight, last_hidden, logits_of
from peftlab.errors import PeftlabError, did_you_mean
from peftlab.models.chunked_sum import chunked_sum
from peftlab.untyped import Function

_LOG_ZERO = -1e4


class TopK(NamedTuple):
    """Target distributions stored as their k largest entries and the exact mass of the others.

    Attributes:
        values: [T, k], log-probabilities, largest first.
        indices: [T, k], their token ids.
        rest: [T], log of the remaining mass; -10⁴ if there is none.
    """

    values: Tensor
    indices: Tensor
    rest: Tensor


def ce(token_ids: Tensor, draft_logits: Tensor) -> Tensor:
    """Return the cross-entropy -log q(x) on token ids, [T]; on the target's text it estimates KL(p‖q) + H(p).

    Args:
        token_ids: x, [T]. draft_logits: [T, V], of q.
    """
    return -_floored_log_softmax(draft_logits).gather(-1, token_ids[:, None]).squeeze(-1)


def kl(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Return the forward divergence KL(p‖q) = Σ p·log(p/q), [T]: q is to cover all of p.

    Args:
        target_logits: [T, V], of p. draft_logits: [T, V], of q.
    """
    return _kl(*_log_probs(target_logits, draft_logits))


def reverse_kl(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Return the reverse divergence KL(q‖p) = Σ q·log(q/p), [T]: q is to stay where p is.

    Args:
        target_logits: [T, V], of p. draft_logits: [T, V], of q.
    """
    log_p, log_q = _log_probs(target_logits, draft_logits)
    return _kl(log_q, log_p)


def jsd(target_logits: Tensor, draft_logits: Tensor, beta: float = 0.5) -> Tensor:
    """Return the generalised Jensen-Shannon divergence β·KL(p‖m) + (1-β)·KL(q‖m), m = βp + (1-β)q, [T].

    GKD (Agarwal et al. 2023, arXiv 2306.13649). Divided by β it tends to KL(p‖q) as β → 0, divided by 1-β to
    KL(q‖p) as β → 1.

    Args:
        target_logits: [T, V], of p. draft_logits: [T, V], of q.
        beta: β.

    Raises:
        PeftlabError: β outside (0, 1).
    """
    if not 0 < beta < 1:
        raise PeftlabError(f"jsd: beta {beta} is outside (0, 1); its ends are the objectives 'kl' and 'reverse_kl'")
    log_p, log_q = _log_probs(target_logits, draft_logits)
    # log m = log(β·p + (1-β)·q) without leaving log space.
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    return beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)


def tvd(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Return the total variation ½·Σ|p - q| = 1 - α, [T]: the rejection rate itself, whose gradient fades at small α.

    Args:
        target_logits: [T, V], of p. draft_logits: [T, V], of q.
    """
    log_p, log_q = _log_probs(target_logits, draft_logits)
    return (log_p.exp() - log_q.exp()).abs().sum(-1) / 2


def lk(target_logits: Tensor, draft_logits: Tensor) -> Tensor:
    """Return -log α = -log Σ min(p, q), [T] (LK losses, arXiv 2602.23881), whose gradient, ∇TV/α, does not fade.

    Args:
        target_logits: [T, V], of p. draft_logits: [T, V], of q.
    """
    log_p, log_q = _log_probs(target_logits, draft_logits)
    # In log space: α of a bad draft underflows where its logarithm is still exact.
    return -torch.minimum(log_p, log_q).logsumexp(-1)


def lk_hybrid(target_logits: Tensor, draft_logits: Tensor, eta: float = 3.0) -> Tensor:
    """Return λ·KL(p‖q) + (1-λ)·TV(p, q), [T], with λ = exp(-η·α) constant in the gradient (arXiv 2602.23881).

    KL while the draft is far off (λ = 1 at α = 0), mostly TV once it is near (λ = 0.05 at α = 1 and η = 3).

    Args:
        target_logits: [T, V], of p. draft_logits: [T, V], of q.
        eta: η.
    """
    log_p, log_q = _log_probs(target_logits, draft_logits)
    variation = (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
    weight = torch.exp(-eta * (1 - variation.detach()))
    return weight * _kl(log_p, log_q) + (1 - weight) * variation


def topk_kl(target: TopK, draft_logits: Tensor) -> Tensor:
    """Return KL(p‖q) over k tokens and one bucket for all others, Σ_k p·log(p/q) + r·log(r/q_rest), [T].

    A lower bound of KL(p‖q) (merging outcomes cannot raise a divergence), equal to it at k = V; no gradient
    shapes q within the bucket. Cross-entropy on the same buckets has the same gradient.

    Args:
        target: p, its k largest entries and r. draft_logits: [T, V], of q.
    """
    log_q = _floored_log_softmax(draft_logits)
    # The bucket's mass is a log-sum over the other tokens: 1 - Σ_k q would cancel where it is small.
    outside = log_q.scatter(-1, target.indices, -math.inf)
    log_q_rest = outside.logsumexp(-1).clamp_min(_LOG_ZERO)
    log_p = torch.cat([target.values, target.rest[:, None]], -1).to(log_q.dtype)
    return _kl(log_p.detach(), torch.cat([log_q.gather(-1, target.indices), log_q_rest[:, None]], -1))


OBJECTIVES: dict[str, Function[Tensor]] = {
    "ce": ce,
    "kl": kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "tvd": tvd,
    "lk": lk,
    "lk_hybrid": lk_hybrid,
    "topk_kl": topk_kl,
}
"""Key in a recipe -> function (target, draft logits [T, V]) -> losses [T].

The target is token ids [T] for ``ce``, a ``TopK`` for ``topk_kl`` and logits [T, V] for all others.
"""


def topk_targets(logits: Tensor, k: int) -> TopK:
    """Return the k largest log-probabilities of each row, and the exact mass of the rest.

    The rest is summed over the remaining tokens, not taken as 1 - Σ, which would cancel when it is small.

    Args:
        logits: [T, V].
        k: 1..V.

    Raises:
        PeftlabError: k outside 1..V.
    """
    if not 1 <= k <= logits.shape[-1]:
        raise PeftlabError(f"topk_targets: k {k} is outside 1..{logits.shape[-1]}, the vocabulary")
    log_p = _floored_log_softmax(logits)
    values, indices = log_p.topk(k, dim=-1)
    rest = log_p.scatter(-1, indices, -math.inf).logsumexp(-1).clamp_min(_LOG_ZERO)
    return TopK(values, indices, rest)


def selective_mask(
    draft_losses: Tensor, reference_losses: Tensor, share: float = 0.4, valid: Tensor | None = None
) -> Tensor:
    """Return which tokens AdaSPEC trains on: the ``share`` with the largest L_draft - L_reference.

    Hu et al. 2025 (arXiv 2510.19779): the reference is the draft distilled beforehand, so a large gap marks a
    token that can be learned and is not yet. Give the mask to ``chunked_loss`` as weights: it divides by the tokens
    kept.

    Args:
        draft_losses: [T].
        reference_losses: [T].
        share: of the valid tokens, rounded, at least one; the first among equals are kept.
        valid: [T] booleans; None means all.

    Returns:
        [T] booleans.

    Raises:
        PeftlabError: a share outside (0, 1].
    """
    if not 0 < share <= 1:
        raise PeftlabError(f"selective_mask: share {share} is outside (0, 1]")
    gap = (draft_losses - reference_losses).detach()
    valid = torch.ones_like(gap, dtype=torch.bool) if valid is None else valid
    count = int(valid.sum())
    kept = max(1, round(share * count)) if count else 0
    # Stable, so that the first among equals are kept and the mask is the same on every machine.
    order = gap.masked_fill(~valid, -math.inf).argsort(descending=True, stable=True)
    return torch.zeros_like(valid).scatter_(0, order[:kept], True)


def _log_probs(target_logits: Tensor, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p, without a gradient, and log q, [..., V] each."""
    if target_logits.shape != draft_logits.shape:
        raise PeftlabError(
            f"draft logits {tuple(draft_logits.shape)} against target logits {tuple(target_logits.shape)}: "
            "tokens and vocabulary must be the same; cut the padding rows of the larger head"
        )
    return _floored_log_softmax(target_logits.detach()), _floored_log_softmax(draft_logits)


def _floored_log_softmax(logits: Tensor) -> Tensor:
    """Return log-probabilities, [..., V] -> [..., V], in float32 at least and -10⁴ at least."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.log_softmax(logits, dim=-1, dtype=wide).clamp_min(_LOG_ZERO)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Return KL(a‖b), [..., V] and [..., V] -> [...]."""
    return (log_a.exp() * (log_a - log_b)).sum(-1)


@dataclass(frozen=True)
class Objective:
    """An objective of draft training, with its settings and the share of tokens that it trains on.

    Attributes:
        name: a key of ``OBJECTIVES``. settings: its ``beta`` or ``eta``.
        share: of each example's tokens that are trained on (AdaSPEC); 1 is all.
    """

    name: str
    settings: Mapping[str, float] = field(default_factory=dict)
    share: float = 1.0

    def kept(self, tokens: int) -> int:
        """Return how many of an example's tokens are trained on."""
        return max(1, round(self.share * tokens))


def make_objective(section: DraftObjective) -> Objective:
    """Return the objective of a recipe with the settings that it knows."""
    settings = {"jsd": {"beta": section.beta}, "lk_hybrid": {"eta": section.eta}}.get(section.name, {})
    return Objective(section.name, settings, section.selective or 1.0)


def following(input_ids: Tensor) -> Tensor:
    """Return the token after each one, [b, n]; the last place is filled with 0."""
    return torch.cat([input_ids[:, 1:], torch.zeros_like(input_ids[:, :1])], 1)


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
    """Return Σ w·l / Σ w over the tokens in chunks, with l = ``OBJECTIVES[objective](target, hidden @ head_weightᵀ)``.

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
    shared, head_weight = target_head is head_weight, _in_autocast(head_weight)
    if target_head is not None:
        target_head = head_weight if shared else _in_autocast(target_head)

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


def _in_autocast(head: Tensor) -> Tensor:
    """Return a frozen head as autocast multiplies it: it would convert it for every chunk."""
    device = head.device.type
    autocast = torch.is_autocast_enabled(device) and not head.requires_grad
    return head.to(torch.get_autocast_dtype(device)) if autocast else head


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
