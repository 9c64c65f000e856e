from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peftlab.decoding.sampling import RandomSource, RowRandomSource, argmax, probabilities, sample
from peftlab.errors import PeftlabError

ROWS = st.lists(st.floats(-30, 30), min_size=1, max_size=8)


def test_temperature_one_is_softmax():
    logits = torch.randn(3, 4, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(probabilities(logits), logits.softmax(-1), rtol=0, atol=1e-15)
    torch.testing.assert_close(probabilities(logits, 0.7), (logits / 0.7).softmax(-1), rtol=0, atol=1e-15)


def test_temperature_zero_is_one_hot_and_the_lowest_index_wins_a_tie():
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0], [2.0, 2.0, 2.0, 2.0], [-1.0, -3.0, -2.0, -1.0]])
    expected = torch.tensor([[0, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]], dtype=torch.float32)
    assert torch.equal(probabilities(logits, temperature=0), expected)
    assert torch.equal(probabilities(logits, temperature=0.0), expected)


@given(st.lists(ROWS.map(lambda row: (row * 8)[:8]), min_size=1, max_size=3))
def test_the_largest_score_is_the_first_of_its_row(rows):
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        scores = torch.tensor([[*row, -torch.inf] for row in rows], dtype=dtype)
        expected = [row.index(max(row)) for row in scores.tolist()]
        assert argmax(scores).tolist() == expected
        assert argmax(scores[0]).item() == expected[0] and argmax(scores[:, None]).shape == (len(rows), 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_widened_first(dtype):
    probs = probabilities(torch.tensor([1.0, 2.0, 3.0], dtype=dtype))
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs, torch.tensor([1.0, 2.0, 3.0]).softmax(-1))


@given(ROWS, st.floats(1e-6, 1e6))
def test_any_temperature_gives_a_distribution_in_logit_order(row, temperature):
    logits = torch.tensor(row, dtype=torch.float64)
    probs = probabilities(logits, temperature)
    assert abs(float(probs.sum()) - 1) < 1e-12
    assert torch.equal(probs[logits.argsort(stable=True)], probs.sort().values)


@given(ROWS, st.integers(1, 9))
def test_top_k_keeps_exactly_k_the_lowest_indices_first(row, k):
    row = [round(x) for x in row]  # ties are likely
    probs = probabilities(torch.tensor(row, dtype=torch.float64), top_k=k)
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    assert set(probs.nonzero().flatten().tolist()) == set(order[:k])
    assert abs(float(probs.sum()) - 1) < 1e-12


def test_ties_among_many_tokens_go_to_the_lowest_indices():
    logits = torch.arange(20_000).remainder(2).float()
    assert probabilities(logits, top_k=4).nonzero().flatten().tolist() == [1, 3, 5, 7]
    assert probabilities(torch.zeros(10_000), top_p=2.5e-4).nonzero().flatten().tolist() == [0, 1, 2]


@settings(deadline=None)
@given(ROWS, st.integers(1, 8), st.floats(0.01, 0.99))
def test_top_p_keeps_the_fewest_tokens_that_reach_it_within_top_k(row, k, top_p):
    logits = torch.tensor(row, dtype=torch.float64)
    cut = probabilities(logits, top_k=k)
    probs = probabilities(logits, top_k=k, top_p=top_p)
    kept = probs > 0
    mass = float(cut[kept].sum())
    assert mass >= top_p - 1e-12
    assert mass - float(cut[kept].min()) < top_p + 1e-12
    torch.testing.assert_close(probs[kept], cut[kept] / mass, rtol=1e-12, atol=0)


@settings(deadline=None)
@given(st.lists(ROWS.map(lambda row: [round(x / 8) for x in row * 8][:8]), min_size=1, max_size=3),
       st.integers(1, 9) | st.none(), st.floats(0.01, 1))  # fmt: skip
def test_of_equal_tokens_at_the_cut_the_first_are_kept(rows, k, top_p):
    logits = torch.tensor(rows, dtype=torch.float64)
    for row, probs, cut in zip(rows, probabilities(logits), probabilities(logits, top_k=k, top_p=top_p), strict=True):
        order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
        masses = probs[order].cumsum(0) / probs[order].sum()
        kept = {i for i, after in zip(order, [0, *masses.tolist()], strict=False) if after < top_p - 1e-9}
        near = {i for i, after in zip(order, [0, *masses.tolist()], strict=False) if after < top_p + 1e-9}
        assert kept <= set(cut.nonzero().flatten().tolist()) <= near


def test_top_p_of_one_and_top_k_of_all_change_nothing():
    logits = torch.randn(50_000, generator=torch.Generator().manual_seed(0)) * 6
    whole = probabilities(logits)
    assert torch.equal(probabilities(logits, top_p=1.0), whole)
    torch.testing.assert_close(probabilities(logits, top_k=50_000), whole, rtol=1e-5, atol=0)
    assert int((probabilities(logits, top_k=50_000) > 0).sum()) == int((whole > 0).sum())


def test_a_masked_token_has_probability_zero():
    logits = torch.tensor([0.0, -torch.inf, 1.0])
    for probs in (
        probabilities(logits),
        probabilities(logits, top_k=3),
        probabilities(logits, 0.01, top_p=0.9),
    ):
        assert probs[1] == 0 and torch.isfinite(probs).all()


@pytest.mark.parametrize(
    "settings_, names",
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"temperature": 0, "top_k": 5}, "temperature"),
        ({"temperature": 0, "top_p": 0.9}, "temperature"),
    ],
)
def test_settings_that_make_no_sense_are_named(settings_, names):
    with pytest.raises(PeftlabError, match=names):
        probabilities(torch.zeros(4), **settings_)


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    expected = probs * counts.sum()
    return float(((counts - expected)[probs > 0] ** 2 / expected[probs > 0]).sum())


def test_sample_follows_the_distribution_and_never_draws_the_impossible():
    probs = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05, 0.0])
    drawn = sample(probs.expand(200_000, -1), torch.Generator().manual_seed(1))
    counts = drawn.bincount(minlength=6)
    assert counts[1] == counts[5] == 0
    assert chi_square(counts, probs) < 16.3  # 0.999 quantile, 3 degrees of freedom
    assert torch.equal(sample(probs.expand(9, -1) * 40, torch.Generator().manual_seed(2)),
                       sample(probs.expand(9, -1), torch.Generator().manual_seed(2)))  # fmt: skip


def test_the_numbers_behind_a_draw_follow_the_exponential_law_down_to_the_smallest():
    n = 400_000
    drawn = RandomSource(torch.Generator().manual_seed(3)).exponentials(torch.zeros(n)).sort().values.double()
    assert float((1 - (-drawn).exp() - (torch.arange(n) + 0.5) / n).abs().max()) < 1.95 / n**0.5  # Kolmogorov, 0.999
    # Numbers of 24 bits would be multiples of 2⁻²⁴ here: too coarse for tokens of small probability.
    small = drawn[drawn < 2**-10] * 2**24
    assert len(small) > 300 and (small != small.round()).double().mean() > 0.9


def test_sample_is_repeatable_and_keeps_the_leading_shape():
    probs = torch.full((2, 3, 7), 1 / 7)
    a, b = (sample(probs, torch.Generator().manual_seed(5)) for _ in range(2))
    assert a.shape == (2, 3) and torch.equal(a, b)
    assert (sample(torch.tensor([0.0, 0.0, 1.0]).expand(1000, -1)) == 2).all()


def test_a_coin_never_falls_at_zero_and_always_at_one():
    random = RandomSource(torch.Generator().manual_seed(0))
    half = torch.zeros(100_000, dtype=torch.float16)  # so coarse that its uniforms are often exactly 0
    assert not random.bernoulli(half).any()
    assert random.bernoulli(half + 1).all()
    assert abs(float(random.bernoulli(torch.full((100_000,), 0.3)).float().mean()) - 0.3) < 0.006


def test_padding_does_not_change_what_is_drawn_next():
    """A row's luck is its own, whatever the length of its neighbours' drafts."""
    after = set()
    for padding in range(4):
        random = RowRandomSource([torch.Generator().manual_seed(4)])
        decided = random.bernoulli(torch.tensor([[0.3, 0.6, *[0.0] * padding]]))[0].tolist()
        assert not any(decided[2:])
        after.add((*decided[:2], int(random.draw(torch.full((1, 50), 0.02)))))
    assert len(after) == 1
