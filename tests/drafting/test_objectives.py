from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peftlab.decoding.theory import acceptance_floor_from_kl, acceptance_range_from_jsd, acceptance_rate
from peftlab.drafting.objectives import (
    OBJECTIVES,
    TopK,
    ce,
    jsd,
    kl,
    lk,
    lk_hybrid,
    reverse_kl,
    selective_mask,
    topk_kl,
    topk_targets,
    tvd,
)
from peftlab.errors import PeftlabError

DIVERGENCES = {name: f for name, f in OBJECTIVES.items() if name not in ("ce", "topk_kl")}


def logits(tokens: int = 6, vocab: int = 9, seed: int = 0, scale: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, tokens, vocab, dtype=torch.float64, generator=generator) * scale)


def test_each_is_its_formula():
    target, draft = logits()
    p, q = target.softmax(-1), draft.softmax(-1)
    alpha = torch.minimum(p, q).sum(-1)
    m = 0.3 * p + 0.7 * q
    weight = torch.exp(-3 * alpha)
    forward = (p * (p / q).log()).sum(-1)
    expected = {
        kl: forward,
        reverse_kl: (q * (q / p).log()).sum(-1),
        tvd: 1 - alpha,
        lk: -alpha.log(),
        lk_hybrid: weight * forward + (1 - weight) * (1 - alpha),
    }
    for objective, values in expected.items():
        torch.testing.assert_close(objective(target, draft), values, rtol=0, atol=1e-13)
    values = 0.3 * (p * (p / m).log()).sum(-1) + 0.7 * (q * (q / m).log()).sum(-1)
    torch.testing.assert_close(jsd(target, draft, beta=0.3), values, rtol=0, atol=1e-13)
    ids = torch.arange(6)
    torch.testing.assert_close(ce(ids, draft), -q[ids, ids].log(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_equal_distributions_cost_nothing_and_pull_nowhere(name):
    target, _ = logits()
    draft = target.clone().requires_grad_()
    losses = DIVERGENCES[name](target, draft)
    torch.testing.assert_close(losses, torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-14)
    losses.sum().backward()
    torch.testing.assert_close(draft.grad, torch.zeros_like(draft), rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_gradients_are_those_of_the_value(name):
    target, draft = logits(3, 5, seed=4)
    draft.requires_grad_()
    settings_ = {"eta": 0.0} if name == "lk_hybrid" else {}  # λ is constant only in the gradient
    assert torch.autograd.gradcheck(lambda d: DIVERGENCES[name](target, d, **settings_), draft)


def test_gradients_of_ce_and_of_topk():
    target, draft = logits(3, 5, seed=4)
    draft.requires_grad_()
    assert torch.autograd.gradcheck(lambda d: ce(torch.tensor([0, 4, 2]), d), draft)
    for k in (1, 3, 5):
        assert torch.autograd.gradcheck(lambda d, k=k: topk_kl(topk_targets(target, k), d), draft)


def gradient(objective, target, draft, **settings_):
    draft = draft.detach().requires_grad_()
    return torch.autograd.grad(objective(target, draft, **settings_).sum(), draft)[0]


def test_the_gradient_of_log_acceptance_is_that_of_tv_over_alpha():
    target, draft = logits(50, 12)
    alpha = 1 - tvd(target, draft)
    torch.testing.assert_close(
        gradient(lk, target, draft), gradient(tvd, target, draft) / alpha[:, None], rtol=1e-10, atol=1e-14
    )


def test_the_hybrid_moves_from_kl_to_tv_as_acceptance_grows():
    target, far = logits(40, 12, scale=0.5)
    far = far + 40 * torch.eye(12, dtype=torch.float64)[target.argmin(-1)]
    near = target + 0.001 * far.sign()
    torch.testing.assert_close(
        gradient(lk_hybrid, target, far, eta=0.1), gradient(kl, target, far), rtol=0.02, atol=1e-3
    )
    torch.testing.assert_close(
        gradient(lk_hybrid, target, near, eta=50.0), gradient(tvd, target, near), rtol=1e-3, atol=1e-9
    )
    target, between = logits(40, 12)
    weight = torch.exp(-3 * (1 - tvd(target, between)))[:, None]
    mixed = weight * gradient(kl, target, between) + (1 - weight) * gradient(tvd, target, between)
    torch.testing.assert_close(gradient(lk_hybrid, target, between), mixed, rtol=1e-10, atol=1e-14)


@given(st.integers(0, 10_000), st.integers(2, 20), st.floats(0.01, 8))
def test_identities_and_bounds(seed, vocab, scale):
    target, draft = logits(4, vocab, seed, scale)
    p, q = target.softmax(-1), draft.softmax(-1)
    alpha, tv = acceptance_rate(p, q), tvd(target, draft)
    torch.testing.assert_close(alpha, 1 - tv, rtol=0, atol=1e-13)
    # 1 - tv, which is what alpha is, cancels where it is small.
    torch.testing.assert_close(lk(target, draft), -torch.minimum(p, q).sum(-1).log(), rtol=1e-9, atol=1e-12)
    for divergence in (kl(target, draft), reverse_kl(target, draft)):
        assert (tv <= (divergence / 2).sqrt() + 1e-9).all()
        floors = [acceptance_floor_from_kl(max(0.0, d)) for d in divergence.tolist()]
        assert all(a >= floor - 1e-9 for a, floor in zip(alpha.tolist(), floors, strict=True))
    halves = jsd(target, draft)
    assert (tv**2 / 2 <= halves + 1e-12).all() and (halves <= math.log(2) * tv + 1e-12).all()
    for a, j in zip(alpha.tolist(), halves.tolist(), strict=True):
        low, high = acceptance_range_from_jsd(max(0.0, j))
        assert low - 1e-7 <= a <= high + 1e-7
    torch.testing.assert_close(halves, jsd(draft, target), rtol=0, atol=1e-12)


def test_generalised_jsd_tends_to_both_divergences():
    target, draft = logits(scale=1.0)
    torch.testing.assert_close(jsd(target, draft, 1e-7) / 1e-7, kl(target, draft), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(jsd(target, draft, 1 - 1e-7) / 1e-7, reverse_kl(target, draft), rtol=1e-4, atol=1e-5)
    for beta in (0.0, 1.0, -1.0):
        with pytest.raises(PeftlabError, match="beta"):
            jsd(target, draft, beta)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_token_masked_on_both_sides_is_as_if_absent(name):
    target, draft = logits(4, 6)
    masked = [torch.cat([x, torch.full((4, 2), -torch.inf, dtype=x.dtype)], -1) for x in (target, draft)]
    torch.testing.assert_close(DIVERGENCES[name](*masked), DIVERGENCES[name](target, draft), rtol=0, atol=1e-13)
    slope = gradient(DIVERGENCES[name], *masked)
    torch.testing.assert_close(slope[:, :6], gradient(DIVERGENCES[name], target, draft), rtol=0, atol=1e-13)
    assert (slope[:, 6:] == 0).all()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_far_apart_in_half_precision_all_stays_finite(name):
    target = torch.tensor([[200.0, 0.0, -200.0], [-torch.inf, 3.0, 3.0]], dtype=torch.bfloat16)
    draft = torch.tensor([[-200.0, 0.0, 200.0], [3.0, -torch.inf, -3.0]], dtype=torch.bfloat16).requires_grad_()
    losses = DIVERGENCES[name](target, draft)
    assert losses.dtype == torch.float32 and torch.isfinite(losses).all() and (losses > 0).all()
    losses.sum().backward()
    assert torch.isfinite(draft.grad).all()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_target_receives_no_gradient(name):
    target, draft = (x.requires_grad_() for x in logits())
    DIVERGENCES[name](target, draft).sum().backward()
    assert target.grad is None and draft.grad is not None


def test_vocabularies_of_different_size_are_told():
    target, draft = logits()
    with pytest.raises(PeftlabError, match="vocabulary"):
        kl(target, draft[:, :-1])


def test_topk_is_a_lower_bound_that_grows_to_kl():
    target, draft = logits(20, 9)
    bounds = torch.stack([topk_kl(topk_targets(target, k), draft) for k in range(1, 10)])
    exact = kl(target, draft)
    assert (bounds.diff(dim=0) >= -1e-13).all()
    assert (bounds[0] < exact).all()
    torch.testing.assert_close(bounds[-1], exact, rtol=0, atol=1e-13)
    torch.testing.assert_close(
        gradient(lambda t, d: topk_kl(topk_targets(t, 9), d), target, draft),
        gradient(kl, target, draft),
        rtol=0,
        atol=1e-13,
    )


def test_topk_and_cross_entropy_on_its_buckets_have_the_same_gradient():
    target, draft = logits(5, 9)
    stored = topk_targets(target, 3)

    def bucket_ce(stored: TopK, draft: torch.Tensor) -> torch.Tensor:
        q = draft.softmax(-1).gather(-1, stored.indices)
        return -(stored.values.exp() * q.log()).sum(-1) - stored.rest.exp() * (1 - q.sum(-1)).log()

    torch.testing.assert_close(gradient(topk_kl, stored, draft), gradient(bucket_ce, stored, draft), rtol=0, atol=1e-13)


def test_the_rest_mass_is_exact_even_when_tiny():
    row = torch.tensor([[40.0, 3.0, 1.0, -2.0]])
    values, indices, rest = topk_targets(row, 1)
    assert indices.tolist() == [[0]] and values.item() == 0.0
    expected = row.double().log_softmax(-1)[0, 1:].logsumexp(-1).item()  # 1 - Σ would be 0 in float32
    assert rest.item() == pytest.approx(expected, rel=1e-6)
    assert topk_targets(row, 4).rest.exp().item() == 0
    for k in (0, 5):
        with pytest.raises(PeftlabError, match="topk_targets"):
            topk_targets(row, k)


def test_topk_targets_hold_the_largest_in_order():
    target, _ = logits(7, 9)
    stored = topk_targets(target, 4)
    p = target.softmax(-1)
    torch.testing.assert_close(stored.values.exp(), p.sort(descending=True).values[:, :4])
    torch.testing.assert_close(p.gather(-1, stored.indices), stored.values.exp())
    torch.testing.assert_close(stored.values.exp().sum(-1) + stored.rest.exp(), torch.ones(7, dtype=p.dtype))


def test_selection_keeps_the_largest_gaps_among_valid_tokens():
    draft, reference = torch.tensor([5.0, 1.0, 9.0, 2.0, 7.0]), torch.tensor([1.0, 1.0, 8.5, 0.0, 9.0])
    gap_order = [0, 3, 2, 1, 4]
    for share, kept in ((0.2, 1), (0.4, 2), (0.6, 3), (1.0, 5), (0.01, 1)):
        mask = selective_mask(draft, reference, share)
        assert set(mask.nonzero().flatten().tolist()) == set(gap_order[:kept])
    valid = torch.tensor([False, True, True, True, True])
    assert selective_mask(draft, reference, 0.5, valid).tolist() == [False, False, True, True, False]
    assert not selective_mask(draft, reference, 0.5, torch.zeros(5, dtype=torch.bool)).any()


def test_selection_breaks_ties_by_position_and_counts_without_rounding_up():
    assert selective_mask(torch.ones(10), torch.zeros(10), 0.3).nonzero().flatten().tolist() == [0, 1, 2]
    assert int(selective_mask(torch.rand(100), torch.zeros(100), 0.07).sum()) == 7  # 0.07 · 100 > 7 in floats
    for share in (0.0, 1.1, -0.5):
        with pytest.raises(PeftlabError, match="share"):
            selective_mask(torch.ones(3), torch.ones(3), share)
