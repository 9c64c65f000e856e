"""Verification of chains by exact enumeration of the output's distribution, and the sampling that it rests on."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peftlab.decoding import sampled_trees, sampling
from peftlab.decoding.sampling import (
    RandomSource,
    RowRandomSource,
    acceptance_probability,
    argmax,
    index_at,
    probabilities,
    residual,
    sample,
    verify_block,
    verify_chain,
    verify_greedy,
    verify_onehot,
)
from peftlab.decoding.theory import acceptance_rate, block_efficiency
from peftlab.errors import PeftlabError


def chain_step(target, draft, gamma, random, scheme=verify_chain, stop=None):
    """Draft γ tokens, or fewer where ``stop`` ends the draft after a token; verify them, and return what is emitted."""
    prefix: tuple[int, ...] = ()
    while len(prefix) < gamma and (not prefix or prefix[-1] != stop):
        prefix = (*prefix, int(random.draw(draft(prefix))))
    length, padded = len(prefix), (*prefix, *[0] * (gamma - len(prefix)))
    p = torch.stack([target(padded[:i]) for i in range(gamma + 1)])
    q = torch.stack([draft(prefix[:i]) if i < length else torch.zeros_like(p[0]) for i in range(gamma)])
    n, token = scheme(p, q, torch.tensor(padded), random)
    assert n <= length
    return (*prefix[: int(n)], int(token))


@pytest.mark.parametrize("zeros", [False, True], ids=["dense", "zeros"])
@pytest.mark.parametrize("vocab, gamma, seeds", [(2, 1, 20), (5, 1, 20), (2, 3, 6), (4, 2, 6), (3, 3, 2), (5, 3, 1)])
def test_a_chain_follows_the_target_exactly(enumerate_law, model, assert_follows, vocab, gamma, seeds, zeros):
    for seed in range(seeds):
        target, draft = model(vocab, 2 * seed, zeros), model(vocab, 2 * seed + 1, zeros)
        law = enumerate_law(lambda random, t=target, d=draft: chain_step(t, d, gamma, random))
        assert_follows(law, target, 1)
        assert_follows(law, target, gamma + 1)


@pytest.mark.parametrize("zeros", [False, True], ids=["dense", "zeros"])
@pytest.mark.parametrize("vocab, gamma, seeds", [(2, 1, 20), (3, 1, 20), (3, 2, 12), (3, 3, 4)])
def test_a_block_follows_the_target_exactly_and_accepts_no_less(
    enumerate_law, model, assert_follows, vocab, gamma, seeds, zeros
):
    more = 0
    for seed in range(seeds):
        target, draft = model(vocab, 2 * seed, zeros), model(vocab, 2 * seed + 1, zeros)
        block, single = (
            enumerate_law(lambda random, t=target, d=draft, s=scheme: chain_step(t, d, gamma, random, s))
            for scheme in (verify_block, verify_chain)
        )
        assert_follows(block, target, gamma + 1)
        lengths = [math.fsum(weight * len(emitted) for emitted, weight in law.items()) for law in (block, single)]
        assert lengths[0] >= lengths[1] - 1e-12
        more += lengths[0] > lengths[1] + 1e-3
    assert (more > 0) == (gamma > 1), "alike for one token, better for several"


def test_a_block_whose_draft_ended_early_follows_the_target_exactly(enumerate_law, model, assert_follows):
    for seed in range(4):
        target, draft = model(3, 2 * seed), model(3, 2 * seed + 1)
        law = enumerate_law(lambda random, t=target, d=draft: chain_step(t, d, 3, random, verify_block, stop=0))
        assert_follows(law, target, 4)


def test_a_block_by_hand(enumerate_law):
    """The example of the paper: 10/9 tokens one by one, 11/9 as a block."""
    p, q = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64), torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)
    for scheme, expected in ((verify_chain, 10 / 9), (verify_block, 11 / 9)):
        law = enumerate_law(lambda random, s=scheme: chain_step(lambda _: p, lambda _: q, 2, random, s))
        accepted = math.fsum(weight * (len(emitted) - 1) for emitted, weight in law.items())
        assert accepted == pytest.approx(expected, abs=1e-12)


def test_the_expected_length_is_the_block_efficiency(enumerate_law, model):
    p, q = model(4, 0)(), model(4, 1)()
    law = enumerate_law(lambda random: chain_step(lambda _: p, lambda _: q, 2, random))
    mean = math.fsum(weight * len(emitted) for emitted, weight in law.items())
    assert mean == pytest.approx(block_efficiency(float(acceptance_rate(p, q)), 2), abs=1e-12)


def test_a_draft_equal_to_the_target_is_always_accepted(enumerate_law, model):
    target = model(4, 3, True)
    law = enumerate_law(lambda random: len(chain_step(target, target, 2, random)))
    assert law == {3: pytest.approx(1, abs=1e-12)}
    probs = probabilities(torch.randn(64, 5, 4000, generator=torch.Generator().manual_seed(0)))
    random = RandomSource(torch.Generator().manual_seed(1))
    for scheme in (verify_chain, verify_block):
        n, _ = scheme(probs, probs[:, :4], sample(probs[:, :4], random.generator), random)
        assert (n == 4).all()


def test_at_temperature_zero_a_chain_is_the_greedy_comparison():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 3, (200, 4, 5), generator=generator).float()  # many exact ties
    p = probabilities(logits, 0)
    q = probabilities(torch.randint(0, 3, (200, 3, 5), generator=generator).float(), 0)
    tokens = q.argmax(-1)
    chain = verify_chain(p, q, tokens, RandomSource(generator))
    greedy = verify_greedy(logits.argmax(-1), tokens)
    assert torch.equal(chain[0], greedy[0]) and torch.equal(chain[1], greedy[1])
    assert {0, 1, 2, 3} == set(greedy[0].tolist())


def test_greedy_counts_the_leading_matches():
    argmax = torch.tensor([[4, 5, 6, 7], [4, 5, 6, 7], [4, 5, 6, 7], [4, 5, 6, 7]])
    tokens = torch.tensor([[4, 5, 6], [4, 0, 6], [0, 5, 6], [4, 5, -1]])
    n, following = verify_greedy(argmax, tokens)
    assert n.tolist() == [3, 1, 0, 2] and following.tolist() == [7, 5, 4, 6]
    n, following = verify_greedy(argmax[0], tokens[1])
    assert (int(n), int(following)) == (1, 5)
    with pytest.raises(PeftlabError, match="target_argmax"):
        verify_greedy(argmax[:, :3], tokens)


@pytest.mark.parametrize("zeros", [False, True], ids=["dense", "zeros"])
def test_a_deterministic_draft_follows_the_target_exactly(enumerate_law, model, assert_follows, zeros):
    for seed in range(8):
        target = model(4, seed, zeros)
        tokens = (seed % 4, (seed * 3) % 4)
        p = torch.stack([target(tokens[:i]) for i in range(3)])

        def step(random, p=p, tokens=tokens):
            n, token = verify_onehot(p, torch.tensor(tokens), random)
            return (*tokens[: int(n)], int(token))

        law = enumerate_law(step)
        assert_follows(law, target, 3)
        accepted = math.fsum(w for emitted, w in law.items() if len(emitted) > 1)
        assert accepted == pytest.approx(float(p[0, tokens[0]]), abs=1e-12)


def test_onehot_stops_where_nothing_was_drafted(enumerate_law, model):
    p = torch.stack([model(3, i)() for i in range(3)])
    law = enumerate_law(lambda c: tuple(int(x) for x in verify_onehot(p, torch.tensor([1, -1]), c)))
    assert max(n for n, _ in law) == 1
    for token in range(3):
        assert law[1, token] == pytest.approx(float(p[0, 1] * p[1, token]), abs=1e-12)


def test_a_row_of_zeros_ends_a_shorter_draft(enumerate_law, model):
    p, q = torch.stack([model(3, i)() for i in range(3)]), torch.stack([model(3, 9)(), torch.zeros(3)])
    short = enumerate_law(lambda c: tuple(int(x) for x in verify_chain(p[:2], q[:1], torch.tensor([1]), c)))
    padded = enumerate_law(lambda c: tuple(int(x) for x in verify_chain(p, q, torch.tensor([1, 0]), c)))
    assert padded == pytest.approx(short, abs=1e-15)


def test_no_draft_at_all_is_a_plain_draw(enumerate_law, model):
    p = model(4, 0)()
    nothing = torch.zeros(0, dtype=torch.long)
    law, block = (
        enumerate_law(lambda c, s=scheme: tuple(int(x) for x in s(p[None], p.new_zeros(0, 4), nothing, c)))
        for scheme in (verify_chain, verify_block)
    )
    assert law == block
    assert law == pytest.approx({(0, x): float(p[x]) for x in range(4)}, abs=1e-15)


def test_rows_of_a_batch_are_independent(enumerate_law, model):
    p = torch.stack([torch.stack([model(2, 10 * b + i)() for i in range(3)]) for b in range(2)])
    q = torch.stack([torch.stack([model(2, 50 + 10 * b + i)() for i in range(2)]) for b in range(2)])
    tokens = torch.tensor([[0, 1], [1, 0]])

    def outcome(result):
        return tuple(zip(result[0].flatten().tolist(), result[1].flatten().tolist(), strict=True))

    joint = enumerate_law(lambda c: outcome(verify_chain(p, q, tokens, c)))
    first, second = (enumerate_law(lambda c, b=b: outcome(verify_chain(p[b], q[b], tokens[b], c))[0]) for b in range(2))
    assert joint == pytest.approx({(a, b): first[a] * second[b] for a in first for b in second}, abs=1e-14)


def test_the_sampler_itself_follows_the_target():
    generator = torch.Generator().manual_seed(3)
    rows = 200_000
    p = torch.tensor([[0.5, 0.2, 0.3, 0.0], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64).expand(rows, -1, -1)
    q = torch.tensor([[0.2, 0.5, 0.1, 0.2]], dtype=torch.float64).expand(rows, -1, -1)
    tokens = sample(q, generator)
    n, following = verify_chain(p, q, tokens, RandomSource(generator))
    first = torch.where(n == 1, tokens[:, 0], following).bincount(minlength=4)
    bonus = following[n == 1].bincount(minlength=4)
    alpha = float(acceptance_rate(p[0, 0], q[0, 0]))
    assert abs(float((n == 1).double().mean()) - alpha) < 0.005
    for counts, probs in ((first, p[0, 0]), (bonus, p[0, 1])):
        expected = probs * counts.sum()
        live = probs > 0
        assert counts[~live].sum() == 0
        assert float(((counts - expected)[live] ** 2 / expected[live]).sum()) < 16.3  # 0.999 quantile at 3


def test_acceptance_and_residual_at_their_edges():
    p_x, q_x = torch.tensor([0.5, 0.2, 0.0, 0.3, 0.0]), torch.tensor([0.25, 0.4, 0.5, 0.0, 0.0])
    assert acceptance_probability(p_x, q_x).tolist() == [1.0, 0.5, 0.0, 0.0, 0.0]
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    assert torch.equal(residual(p, p), p)
    assert torch.equal(residual(p, torch.zeros_like(p)), p)
    assert torch.equal(residual(p, p * 1.0000001), p)  # no mass by rounding: p, not NaN
    assert residual(torch.tensor([0.6, 0.4]), torch.tensor([0.2, 0.8])).tolist() == [1.0, 0.0]


def test_shapes_that_do_not_fit_are_told():
    p, q, random = torch.full((3, 5), 0.2), torch.full((2, 5), 0.2), RandomSource()
    with pytest.raises(PeftlabError, match="vocabulary of 4"):
        verify_chain(p, q[:, :4], torch.tensor([0, 1]), random)
    with pytest.raises(PeftlabError, match="shapes"):
        verify_chain(p[:2], q, torch.tensor([0, 1]), random)
    with pytest.raises(PeftlabError, match="shapes"):
        verify_chain(p, q, torch.tensor([0]), random)


def test_the_lossy_scheme_says_so():
    schemes = {n: getattr(m, n) for m in (sampling, sampled_trees) for n in dir(m) if n.startswith("verify_")}
    assert [name for name, scheme in schemes.items() if "LOSSY" in scheme.__doc__] == ["verify_lossy"]


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


@given(
    weights=st.lists(st.sampled_from([0, 0, 0, 1, 2, 5]), min_size=1, max_size=400).filter(any),
    share=st.integers(0, 2**20 - 1),
    scale=st.sampled_from([1.0, 2.0**-30, 2.0**40]),
)
def test_an_index_is_where_the_running_sum_exceeds_the_share(weights: list[int], share: int, scale: float) -> None:
    exceeds = [sum(weights[: i + 1]) * 2**20 > share * sum(weights) for i in range(len(weights))]
    probs = torch.tensor(weights, dtype=torch.float32) * scale
    assert index_at(probs, torch.tensor(share / 2**20, dtype=torch.float64)) == exceeds.index(True)
    last = max(i for i, weight in enumerate(weights) if weight)
    assert index_at(probs, torch.tensor(1 - 2**-53, dtype=torch.float64)) == last


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
