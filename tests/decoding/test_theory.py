"""The formulas of speculative decoding: published values, bounds, edges, and PEARL's schedule step by step."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peftlab.decoding import theory
from peftlab.decoding.theory import pearl_speedup, pearl_tokens_per_phase, speedup
from peftlab.errors import PeftlabError

ALPHA = st.floats(0, 1)
GAMMA = st.integers(0, 20)

LEVIATHAN = [  # α, γ, operations, speed at c = ĉ = 0
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]


@pytest.mark.parametrize("alpha, gamma, operations, speed", LEVIATHAN)
def test_the_published_table(alpha, gamma, operations, speed):
    assert round(theory.operations_growth(alpha, gamma, 0), 2) == operations
    assert round(theory.speedup(alpha, gamma, 0), 2) == speed


@pytest.mark.parametrize("c, gamma", [(0.01, 7), (0.02, 6), (0.05, 4), (0.1, 3)])
def test_the_best_gamma_at_alpha_0_6(c, gamma):
    assert theory.best_gamma(0.6, c, 20) == gamma


def break_even_alpha(gamma: int, c: float) -> float | None:
    return theory.break_even(lambda alpha: theory.speedup(alpha, gamma, c) >= 1)


def test_a_slow_draft_has_a_low_cap_and_a_high_break_even():
    assert round(break_even_alpha(5, 0.596), 3) == 0.832
    assert theory.cap(5, 0.596) == pytest.approx(1.5075, abs=5e-4)


@given(ALPHA, GAMMA)
def test_block_efficiency_is_its_closed_form(alpha, gamma):
    tau = theory.block_efficiency(alpha, gamma)
    assert 1 <= tau <= gamma + 1
    if alpha < 0.999:
        assert tau == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha), rel=1e-11)
    chain = [(0,) * depth for depth in range(1, gamma + 1)]
    assert tau == pytest.approx([1, *theory.expected_tokens(chain, lambda depth, rank: alpha)][-1], rel=1e-12)


def test_block_efficiency_at_its_ends():
    assert theory.block_efficiency(1.0, 7) == 8
    assert theory.block_efficiency(0.0, 7) == 1
    assert theory.expected_tokens([], lambda depth, rank: 0.5) == []
    assert (
        theory.expected_tokens([(0,) * n for n in (1, 2, 3, 4)], lambda depth, _: [0.5, 0.5, 0, 1][depth])[-1] == 1.75
    )


@given(st.floats(0, 1), st.floats(0, 2))
def test_a_gain_at_gamma_one_needs_alpha_above_c(alpha, c):
    assert (theory.speedup(alpha, 1, c) > 1) == ((1 + alpha) / (1 + c) > 1)
    if alpha > c + 1e-9:
        assert theory.speedup(alpha, 1, c) > 1
    if alpha < c - 1e-9:
        assert theory.speedup(alpha, 1, c) < 1
        assert theory.best_gamma(alpha, c, 10) == 0  # and then no longer draft pays either


@given(st.integers(1, 12), st.floats(0, 0.99))
def test_break_even_is_where_the_gain_is_one(gamma, c):
    alpha = break_even_alpha(gamma, c)
    assert theory.speedup(alpha, gamma, c) == pytest.approx(1, abs=1e-12)
    assert theory.cap(gamma, c) >= 1


def test_break_even_at_its_ends():
    assert break_even_alpha(1, 0.37) == pytest.approx(0.37, abs=1e-12)
    assert break_even_alpha(4, 1.0) == 1.0
    assert break_even_alpha(4, 1.01) is None
    assert break_even_alpha(4, 0.0) == 0.0
    assert theory.break_even(lambda alpha: alpha >= 0.1) == 0.1, "the least float, not one near it"
    assert 0.1 <= theory.break_even(lambda alpha: alpha >= 0.1, tolerance=1e-3) <= 0.101


@given(ALPHA, GAMMA, st.floats(0, 3))
def test_no_gain_beats_the_cap_and_growth_is_work_over_tokens(alpha, gamma, c):
    assert theory.speedup(alpha, gamma, c) <= theory.cap(gamma, c) + 1e-12
    tau = theory.block_efficiency(alpha, gamma)
    assert theory.operations_growth(alpha, gamma, c) == pytest.approx((gamma * c + gamma + 1) / tau)
    assert theory.operations_growth(alpha, gamma, c) >= 1 - 1e-12


def random_pair(seed: int, vocab: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(2, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2
    p, q = logits.softmax(-1)
    return p, q


@pytest.mark.parametrize("seed", range(50))
def test_acceptance_and_its_bounds(seed):
    p, q = random_pair(seed)
    alpha = float(theory.acceptance_rate(p, q))
    assert alpha == pytest.approx(1 - float((p - q).abs().sum() / 2), abs=1e-14)
    assert alpha == pytest.approx(float((q * (p / q).clamp_max(1)).sum()), abs=1e-14)
    for a, b in ((p, q), (q, p)):
        assert alpha >= theory.acceptance_floor_from_kl(float((a * (a / b).log()).sum()))
    m = (p + q) / 2
    jsd = float((p * (p / m).log() + q * (q / m).log()).sum() / 2)
    low, high = theory.acceptance_range_from_jsd(jsd)
    assert low <= alpha <= high


def test_bounds_at_their_ends():
    assert theory.acceptance_floor_from_kl(0.0) == 1.0
    assert theory.acceptance_floor_from_kl(10.0) == pytest.approx(math.exp(-10) / 2)
    assert theory.acceptance_range_from_jsd(0.0) == (1.0, 1.0)
    assert theory.acceptance_range_from_jsd(math.log(2)) == (0.0, 0.0)


def test_equal_distributions_accept_everything_and_disjoint_ones_nothing():
    p = torch.tensor([[0.25, 0.75, 0.0, 0.0]])
    assert theory.acceptance_rate(p, p).tolist() == [1.0]
    assert theory.acceptance_rate(p, p.flip(-1)).tolist() == [0.0]


def test_a_reduced_vocabulary_caps_acceptance():
    p, q = random_pair(0)
    ids = torch.tensor([1, 4, 5])
    best = torch.zeros_like(p)
    best[ids] = p[ids] / p[ids].sum()
    limit = theory.vocabulary_cap(p, ids)
    torch.testing.assert_close(theory.acceptance_rate(p, best), limit)
    reduced = torch.zeros_like(q)
    reduced[ids] = q[ids] / q[ids].sum()
    assert theory.acceptance_rate(p, reduced) <= limit


def test_goodput_is_the_speedup_where_costs_are_constant():
    base = theory.goodput(0.7, 0, 4, lambda b, n: 2.0, lambda b, n: 0.2 * n)
    assert base == 2.0
    gain = theory.goodput(0.7, 3, 4, lambda b, n: 2.0, lambda b, n: 0.2 * n) / base
    assert gain == pytest.approx(theory.speedup(0.7, 3, 0.1))


def test_the_best_gamma_shrinks_as_the_batch_fills_the_machine():
    def target_time(batch: int, tokens: int) -> float:
        return max(1.0, batch * tokens / 64)

    def draft_time(batch: int, tokens: int) -> float:
        return 0.02 * tokens * max(1.0, batch / 64)

    best = [theory.best_goodput_gamma(0.7, b, target_time, draft_time, 8) for b in (1, 8, 16, 32, 64, 128)]
    assert best == sorted(best, reverse=True)
    assert best[0] >= 5 and best[-1] == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda: theory.block_efficiency(1.1, 2),
        lambda: theory.block_efficiency(0.5, -1),
        lambda: theory.speedup(0.5, 2, -1),
        lambda: theory.best_draft(theory.DraftCost("model", "", "", 0.0, 0.1), [1.0, 1.0], 1.5),
        lambda: theory.speedup(float("nan"), 2, 0.1),
    ],
)
def test_impossible_values_are_told(call):
    with pytest.raises(PeftlabError):
        call()


def pearl_schedule(accepted: Iterable[bool], gamma: int) -> Iterator[tuple[str, int]]:
    """Yield ("pre" | "post", tokens emitted) for each phase, until ``accepted`` runs out.

    Args:
        accepted: whether each verified token is accepted, in the order of verification.
        gamma: tokens drafted per phase, at least 1.
    """
    coins = iter(accepted)
    mode = "pre"
    while True:
        window = 1 if mode == "pre" else gamma
        accepted_now = 0
        for coin in coins:
            if not coin:
                break
            accepted_now += 1
            if accepted_now == window:
                break
        else:
            return
        all_accepted = accepted_now == window
        yield mode, accepted_now if all_accepted else accepted_now + 1
        mode = "post" if all_accepted else "pre"


def test_the_schedule_step_by_step():
    # one coin in pre, one in pre, three in post (γ = 3), two in post, one in pre
    coins = [0, 1, 1, 1, 1, 1, 0, 1]
    phases = [("pre", 1), ("pre", 1), ("post", 3), ("post", 2), ("pre", 1)]
    assert list(pearl_schedule(map(bool, coins), 3)) == phases


@pytest.mark.parametrize("gamma", [1, 2, 5])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 0.8, 0.95])
def test_the_closed_form_is_the_mean_of_the_schedule(alpha, gamma):
    rng = random.Random(0)
    phases = list(pearl_schedule((rng.random() < alpha for _ in range(200_000)), gamma))
    mean = sum(tokens for _, tokens in phases) / len(phases)
    assert mean == pytest.approx(pearl_tokens_per_phase(alpha, gamma), rel=0.01)


def test_a_perfect_draft_gains_the_ratio_of_the_speeds():
    assert pearl_speedup(1.0, 4, 0.25) == 4
    assert pearl_speedup(1.0, 8, 0.25) == 4
    assert pearl_speedup(1.0, 2, 0.25) == 2
    assert {t for _, t in itertools.islice(pearl_schedule(itertools.repeat(True), 4), 1, 9)} == {4}


def test_a_useless_draft_costs_nothing_while_it_fits_in_a_target_step():
    assert pearl_speedup(0.0, 4, 0.25) == 1
    assert pearl_speedup(0.0, 8, 0.25) == 0.5


def test_overlap_beats_taking_turns_when_drafting_fills_the_target_step():
    for alpha in (0.5, 0.7, 0.9):
        assert pearl_speedup(alpha, 5, 0.2) > speedup(alpha, 5, 0.2)


def test_impossible_values_of_pearl_are_told():
    with pytest.raises(PeftlabError, match="gamma"):
        pearl_tokens_per_phase(0.5, 0)
    with pytest.raises(PeftlabError, match="c:"):
        pearl_speedup(0.5, 2, -1)
