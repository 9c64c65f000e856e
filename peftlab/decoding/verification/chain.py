"""Verification of a chain of drafted tokens: how many are accepted, and which token follows.

p is the target's distribution, q the draft's, γ the number of drafted tokens, V the vocabulary. Leading
dimensions are free: each row has its own number of accepted tokens. A step emits the accepted tokens and then
the next token, so n_accepted + 1 in all; cutting at an end-of-sequence token is left to the caller.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from peftlab.decoding.verification.sampling import RandomSource, certain
from peftlab.errors import PeftlabError


def acceptance_probability(p_x: Tensor, q_x: Tensor) -> Tensor:
    """Return min(1, p(x) / q(x)), and 0 where q(x) = 0.

    A token that the draft could not have drawn is rejected. So a row of zeros in q means "nothing was drafted
    here": it is always rejected, its residual is p, and ragged drafts can be padded with it.

    Args:
        p_x: [...], target probability of the drafted token.
        q_x: [...], draft probability of the same token.
    """
    return torch.where(q_x > 0, (p_x / q_x).clamp_max(1), 0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Return norm(max(0, p - q)), the distribution after a rejection; p itself where that has no mass.

    It has no mass when p and q agree to rounding, and then a rejection has probability 0 to rounding as well.

    Args:
        p: [..., V].
        q: [..., V].
    """
    excess = (p - q).clamp_min(0)
    mass = excess.sum(-1, keepdim=True)
    return torch.where(mass > 0, excess / mass, p)


def verify_chain(
    target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, random: RandomSource
) -> tuple[Tensor, Tensor]:
    """Accept drafted tokens in turn with min(1, p/q); after a rejection sample the residual, else sample p.

    Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318). Lossless if each token was
    drawn from its row of ``draft_probs``.

    Args:
        target_probs: [..., γ+1, V]; row i follows the first i drafted tokens.
        draft_probs: [..., γ, V]; row i is what token i was drawn from. A row of zeros ends a shorter draft.
        tokens: [..., γ].
        random: what decides and what draws.

    Returns:
        n_accepted [...] in 0..γ and next_token [...].

    Raises:
        PeftlabError: shapes that do not fit together, as when the vocabularies differ in size.
    """
    _check_shapes(target_probs, draft_probs, tokens)
    accept = acceptance_probability(_at(target_probs[..., :-1, :], tokens), _at(draft_probs, tokens))
    n_accepted = _leading(random.bernoulli(accept))
    # Nothing was drafted after the last token, so there the residual against a row of zeros is p.
    p = _row(target_probs, n_accepted)
    q = _row(F.pad(draft_probs, (0, 0, 0, 1)), n_accepted)
    return n_accepted, random.draw(residual(p, q))


def verify_block(
    target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, random: RandomSource
) -> tuple[Tensor, Tensor]:
    """Verify a drafted chain as a whole: accepts at least as many tokens as ``verify_chain``, in expectation.

    Block verification (Sun et al. 2024, arXiv 2403.10444). With P_0 = 1, P_i = min(1, P_{i-1}·p(x_i)/q(x_i)) and
    S_i = Σ_x max(0, P_i·p(x) - q(x)) over the distributions after i tokens, token i passes with
    h_i = S_i / (S_i + 1 - P_i), on its own; the chain is accepted up to the last token that passes, and
    norm(max(0, P_i·p - q)) is drawn there. Lossless as ``verify_chain``, with the same arguments and results. After the
    last drafted token q is a row of zeros, which makes h = P and the draw one from p.
    """
    _check_shapes(target_probs, draft_probs, tokens)
    drafted = F.pad(draft_probs, (0, 0, 0, 1))  # [..., γ+1, V]
    p_x, q_x = _at(target_probs[..., :-1, :], tokens), _at(draft_probs, tokens)
    ratios = torch.where(q_x > 0, p_x / q_x, 0)
    path = [torch.ones_like(ratios[..., 0])] if ratios.shape[-1] else []
    for ratio in ratios.unbind(-1):
        path.append((path[-1] * ratio).clamp_max(1))
    kept = torch.stack(path, -1) if path else target_probs.new_ones(target_probs.shape[:-1])  # P, [..., γ+1]
    surplus = (kept[..., None] * target_probs - drafted).clamp_min(0).sum(-1)  # S, [..., γ+1]
    room = surplus + (1 - kept)  # in this order: exactly S where P = 1, and so h = 1
    passed = random.bernoulli(torch.where(room > 0, surplus / room, 1)[..., 1:])
    places = torch.arange(1, tokens.shape[-1] + 1, device=tokens.device)
    n_accepted = F.pad(passed * places, (1, 0)).amax(-1)
    p = _row(kept[..., None] * target_probs, n_accepted)
    return n_accepted, random.draw(residual(p, _row(drafted, n_accepted)))


def verify_onehot(target_probs: Tensor, tokens: Tensor, random: RandomSource) -> tuple[Tensor, Tensor]:
    """Verify a deterministic draft (greedy, n-gram): accept x with p(x), else sample p without x.

    This is ``verify_chain`` with q one-hot at each token; a token of -1 ends a shorter draft.

    Args:
        target_probs: [..., γ+1, V].
        tokens: [..., γ].
        random: what decides and what draws.

    Returns:
        n_accepted [...] and next_token [...].
    """
    return verify_chain(target_probs, certain(tokens, target_probs), tokens.clamp_min(0), random)


def verify_greedy(target_argmax: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Accept tokens while they are the target's own greedy choice; then emit that choice.

    Args:
        target_argmax: [..., γ+1]; entry i follows the first i drafted tokens.
        tokens: [..., γ]; a token of -1 ends a shorter draft.

    Returns:
        n_accepted [...] and next_token [...].
    """
    if target_argmax.shape[-1] != tokens.shape[-1] + 1:
        raise PeftlabError(f"target_argmax {tuple(target_argmax.shape)}: must be one longer than {tuple(tokens.shape)}")
    n_accepted = _leading(tokens == target_argmax[..., :-1])
    return n_accepted, _at(target_argmax, n_accepted)


def _check_shapes(target_probs: Tensor, draft_probs: Tensor, tokens: Tensor) -> None:
    *lead, gamma, vocab = draft_probs.shape
    if target_probs.shape[-1] != vocab:
        raise PeftlabError(
            f"draft_probs: vocabulary of {vocab}, but the target's has {target_probs.shape[-1]}; "
            "cut both to the tokenizer's size before the softmax"
        )
    if tuple(tokens.shape) != (*lead, gamma) or tuple(target_probs.shape) != (*lead, gamma + 1, vocab):
        raise PeftlabError(
            f"shapes do not fit: target_probs {tuple(target_probs.shape)} must be [..., γ+1, V], "
            f"draft_probs {tuple(draft_probs.shape)} [..., γ, V], tokens {tuple(tokens.shape)} [..., γ]"
        )


def _at(values: Tensor, index: Tensor) -> Tensor:
    """values[..., index]: [..., V], [...] -> [...]."""
    return values.gather(-1, index[..., None]).squeeze(-1)


def _row(values: Tensor, index: Tensor) -> Tensor:
    """values[..., index, :]: [..., N, V], [...] -> [..., V]."""
    return values.take_along_dim(index[..., None, None], dim=-2).squeeze(-2)


def _leading(accepted: Tensor) -> Tensor:
    """Number of leading True along the last dimension: [..., γ] -> [...]."""
    return accepted.long().cumprod(-1).sum(-1)
