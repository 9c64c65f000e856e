"""Image tokens: relaxed acceptance by enumeration, continuous tokens against closed forms and samples."""

from __future__ import annotations

import json
import math
from functools import partial

import numpy
import pytest
import torch

from peftlab.decoding.image_tokens import (
    DiffusionLaw,
    GaussianLaw,
    GroupedTokens,
    decode_continuous,
    lantern,
    lantern_plus,
    verify_continuous,
)
from peftlab.decoding.sampling import LossyRule, one_hot
from peftlab.decoding.table import lossy
from peftlab.errors import PeftlabError
from tests.command_line import invoke

GREYS = torch.tensor([[0.0], [1.0], [2.1], [3.3], [4.6], [6.0]])  # of two neighbours the darker one is the nearer
RULES = {
    "lantern": lantern(GREYS, 2, 0.3), "lantern++": lantern_plus(GREYS, 3, 2.0), "gsd": GroupedTokens(torch.eye(6), 1, 1.5),
}  # fmt: skip


@pytest.fixture(params=RULES)
def rule(request):
    return RULES[request.param]


def two(model, seed):
    return model(6, seed)(), model(6, 50 + seed)()


def test_the_neighbourhood_grows_by_distance_up_to_the_bound():
    p, q = torch.tensor([0.1, 0.2, 0.1, 0.3, 0.2, 0.1]), torch.full((6,), 1.0)
    every = torch.arange(6)
    # The nearest of 0 are 1 and 2; of 1: 0 and 2; of 5: 4 and 3. A grows while the neighbours have at most 0.3.
    found = lantern(GREYS, 2, 0.301).acceptance(p, q, every)
    assert found[[0, 1, 5]].tolist() == pytest.approx([0.4, 0.4, 0.3])
    found = lantern_plus(GREYS, 2, 2.001).acceptance(p, q, every)  # and here, as much as the token itself
    assert found[[0, 1, 5]].tolist() == pytest.approx([0.1, 0.4, 0.1])


def test_a_group_has_the_tokens_of_like_probability_and_direction():
    p = torch.tensor([0.5, 0.2, 0.16, 0.14, 0.0, 0.0])
    q = torch.tensor([0.1, 0.4, 0.2, 0.3, 0.0, 0.0])
    like = torch.tensor([[1.0, 0], [1, 0], [1, 0], [0, 1], [1, 0], [1, 0]])  # token 3 is unlike the others
    # 0 is more than 0.15 from 1; 1 and 2 are a group; 3 is alone.
    found = GroupedTokens(like, 1, 0.5).acceptance(p, q, torch.arange(4))
    assert found.tolist() == pytest.approx([1.0, 0.36 / 0.6, 0.36 / 0.6, 0.14 / 0.3])
    assert GroupedTokens(like, 1, 0.5).allowed(p).tolist() == [True, False, False, False, False, False]
    near = torch.tensor([0.35, 0.3, 0.2, 0.15, 0.0, 0.0])
    assert GroupedTokens(like, 1, 0.5).allowed(near[None]).tolist() == [[True, True, False, False, False, False]]


def test_the_law_of_the_emitted_token_is_that_of_the_code(enumerate_law, model, rule):
    """For a drawn token alone, a certain one, two certain ones, and a certain one after a drawn one, as in a joined tree."""
    for seed in range(4):
        (p, q), copies = two(model, seed), [seed, (seed + 2) % 6]

        def step(random, drawn, copied, p=p, q=q, copies=copies):
            tokens = torch.tensor(([int(random.draw(q))] if drawn else []) + copies[:copied])
            rows = torch.stack([q] * drawn + [one_hot(x, p) for x in tokens[drawn:]])
            index, token = rule.verify(p, rows, tokens, random)
            assert index is None or token == int(tokens[index])
            return token

        for drawn, copied in ((1, 0), (0, 1), (0, 2), (1, 1)):
            law = enumerate_law(partial(step, drawn=drawn, copied=copied))
            expected = rule.law(p, [q] * drawn + [one_hot(torch.tensor(x), p) for x in copies[:copied]])
            assert [law.get(x, 0.0) for x in range(6)] == pytest.approx(expected.tolist(), abs=1e-9)
            assert float(expected.sum()) == pytest.approx(1)


def test_relaxed_acceptance_accepts_more_than_exact_acceptance_and_no_token_gains_more_than_the_bound(model):
    """Each token gains at most D over p; the law may be further from p, as tokens gain together. A bound of 0 is exact."""
    tokens, gained = torch.arange(6), dict.fromkeys(RULES, 0.0)
    for seed in range(20):
        p, q = two(model, seed)
        for name, rule in RULES.items():
            more = rule.acceptance(p, q, tokens) - (p / q).clamp_max(1)
            assert name == "gsd" or float(more.min()) >= 0  # groups overlap: a token may lose by those of its group
            gained[name] += float((q * more).sum())
        near, far = lantern(GREYS, 2, 1e-9), lantern(GREYS, 5, 0.4)
        assert near.law(p, [q]).tolist() == pytest.approx(p.tolist(), abs=1e-6)
        assert float((q * far.acceptance(p, q, tokens) - p).max()) <= 0.4 + 1e-9
    assert min(gained.values()) > 0


def test_at_temperature_0_a_neighbour_of_the_targets_choice_is_accepted():
    p = torch.tensor([0.06, 0.3, 0.34, 0.2, 0.05, 0.05])
    assert lantern(GREYS, 2, 0.36).allowed(p[None]).tolist() == [[True, True, True, True, False, False]]
    assert lantern_plus(GREYS, 2, 1.5).allowed(p).tolist() == [False, True, True, False, False, False]


def test_a_rule_that_compares_embeddings_needs_them():
    with pytest.raises(PeftlabError, match=r"lossy lantern:2:0.1: needs the target's token embeddings"):
        LossyRule.of(lossy("lantern:2:0.1"))
    with pytest.raises(PeftlabError, match="6 neighbours of each token, but there are 6 tokens"):
        LossyRule.of(lossy("lantern:6:0.1"), GREYS)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("lantern", "needs a value, lantern:K:D; a whole number from 1 and a number between 0 and 1"),
        ("lantern:4", "K:D is a whole number from 1 and a number between 0 and 1"),
        ("lantern:4:1.5", "K:D is a whole number"),
        ("lantern++:4:1", "K:L is a whole number from 1 and a number above 1"),
        ("gsd:0:1", "W:D is a whole number from 1 and a number above 0"),
    ],
)
def test_refused(text, reason):
    with pytest.raises(PeftlabError, match=reason.replace("+", r"\+")):
        lossy(text)
    assert lossy("gsd").value == (7, 0.5) and lossy("lantern:4:0.5").value == (4, 0.5)


@pytest.mark.parametrize("name", ["lantern:8:0.2", "gsd:3:2"])
def test_bench_measures_them(stories, tmp_path, name):
    (tmp_path / "p.txt").write_text("Once upon a time\n")
    invoke(
        "draft", "bench", "--target", stories, "--draft", "exit:2", "--drafter", "suffix", "--prompts", tmp_path / "p.txt",
        "--repeats", 1, "--max-new-tokens", 12, "--lossy", name, "--temperature", 1, "--json", tmp_path / "o.json",
    )  # fmt: skip
    result = json.loads((tmp_path / "o.json").read_text())
    for drafter in ("draft", "suffix", "suffix+draft"):
        found = result["drafters"][drafter]
        assert found["lossless_by"] == "lossy" and found["lossy"]["rule"] == name
        assert 0 <= found["lossy"]["distance"] < 1


def test_generate_says_it_with_the_text(stories):
    shown = invoke(
        "generate", "--target", stories, "--prompt", "Once", "--draft", "exit:2", "--max-new-tokens", 8,
        "--lossy", "lantern++:8:3",
    )  # fmt: skip
    assert "lossy: lantern++:8:3, total variation" in shown.stderr


def gaussian(mean, std):
    return GaussianLaw(torch.tensor([mean]), torch.tensor([std]))


def normal(x):
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def verified(target, draft, count, seed=0):
    """Return how often a draw of the draft is accepted, and the tokens that are emitted, [count, d]."""
    generator = torch.Generator().manual_seed(seed)
    found = [verify_continuous(target, draft, drawn, generator) for drawn in draft.draw(count, generator)]
    return sum(accepted for accepted, _ in found) / count, torch.stack([target.token(value) for _, value in found])


@pytest.mark.parametrize(("mean", "std"), [(0.8, 1.0), (0.0, 2.0), (-0.5, 0.6)])
def test_gaussian_tokens_follow_the_target_and_are_accepted_by_the_overlap(mean, std):
    """Acceptance is the integral of min(p, q), in closed form; the emitted numbers have the target's distribution."""
    from scipy.integrate import quad
    from scipy.stats import kstest, norm

    rate, tokens = verified(gaussian(0.0, 1.0), gaussian(mean, std), 2000)
    overlap = quad(lambda x: min(norm.pdf(x), norm.pdf(x, mean, std)), -12, 12, points=[-3, 0, 3])[0]
    if std == 1:
        assert overlap == pytest.approx(2 * normal(-abs(mean) / 2), abs=1e-6)
    assert rate == pytest.approx(overlap, abs=4 * math.sqrt(overlap * (1 - overlap) / 2000))
    assert kstest(tokens[:, 0].numpy(), "norm").pvalue > 1e-3


def test_what_takes_the_place_of_a_rejected_token_follows_the_residual():
    """norm(max(0, p - q)) of two unit Gaussians is p - q left of the middle, whose distribution function is known."""
    from scipy.stats import kstest

    target, draft, generator = gaussian(0.0, 1.0), gaussian(1.0, 1.0), torch.Generator().manual_seed(1)
    far = torch.tensor([40.0])  # always rejected
    found = torch.cat([verify_continuous(target, draft, far, generator)[1] for _ in range(1000)])
    mass = normal(0.5) - normal(-0.5)

    def law(values):
        return numpy.array([(normal(v) - normal(v - 1)) / mass if v < 0.5 else 1.0 for v in values])

    assert float(found.max()) <= 0.5
    assert kstest(found.numpy(), law).pvalue > 1e-3


def test_the_end_of_a_trajectory_follows_the_target():
    """With means linear in x_t the end of a trajectory is normal, with a known mean and variance."""
    from scipy.stats import kstest, norm

    def head(slope, shift):
        return DiffusionLaw(lambda x, t: slope * x + shift * t, torch.tensor([0.3, 0.5, 0.7]), 1)

    mean, variance = 0.0, 1.0
    for t, std in zip((3, 2, 1), (0.7, 0.5, 0.3), strict=True):
        mean, variance = 0.8 * mean + 0.1 * t, 0.64 * variance + std**2
    rate, tokens = verified(head(0.8, 0.1), head(0.7, 0.15), 1200)
    assert 0.5 < rate < 0.95
    assert kstest(tokens[:, 0].numpy(), norm(mean, math.sqrt(variance)).cdf).pvalue > 1e-3


def walk(pull):
    """A target of two-dimensional tokens: each is normal around a part of the one before."""

    def laws(tokens, first):
        before = torch.cat((torch.ones(1, 2), tokens))
        return [GaussianLaw(pull * before[i], torch.full((2,), 0.5)) for i in range(first, len(tokens) + 1)]

    return laws


def test_a_drafted_sequence_follows_the_target():
    """The fourth token of a Gaussian walk is normal: mean 0.9^4, variance 0.25·(1 + 0.9² + 0.9⁴ + 0.9⁶)."""
    from scipy.stats import kstest, norm

    generator = torch.Generator().manual_seed(3)
    outputs = [decode_continuous(walk(0.9), 4, 2, generator, walk(0.6), gamma=2) for _ in range(500)]
    last = torch.stack([output.tokens[3] for output in outputs])
    scale = math.sqrt(0.25 * sum(0.9 ** (2 * i) for i in range(4)))
    for component in last.T:
        assert kstest(component.numpy(), norm(0.9**4, scale).cdf).pvalue > 1e-3
    assert all(sum(output.emitted) == len(output.tokens) == 4 for output in outputs)
    assert 1.5 < sum(output.tau for output in outputs) / len(outputs) < 3
    plain = decode_continuous(walk(0.9), 3, 2, generator)
    assert plain.emitted == [1, 1, 1] and plain.tested == 0 and plain.tau == 1
    equal = decode_continuous(walk(0.9), 6, 2, generator, walk(0.9), gamma=2)
    assert equal.emitted == [3, 3] and equal.accepted == equal.tested == 4
    with pytest.raises(PeftlabError, match="length 0"):
        decode_continuous(walk(0.9), 0, 2, generator)
