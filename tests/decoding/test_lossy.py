"""Lossy rules: the tokens that they accept, their distance from the target (by enumeration), and their refusals."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from peftlab.decoding.decode import Fixed, StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.measurements import DistanceMeter, differing_share, emitted_distribution
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.decoding.model_free import TokenRecycling
from peftlab.decoding.sampling import (
    LossyRule,
    RandomSource,
    Sampling,
    accept_k,
    one_hot,
    probabilities,
    typical,
    verify_lossy,
)
from peftlab.decoding.table import LOSSY, lossy
from peftlab.drafting.target import truncate
from peftlab.errors import PeftlabError
from tests.command_line import invoke


def test_typical_acceptance_is_a_threshold_on_p():
    sure = torch.tensor([0.95, 0.05, 0.0, 0.0])  # H = 0.199: threshold min(0.09, 0.246) = 0.09
    flat = torch.tensor([0.25, 0.25, 0.25, 0.25])  # H = ln 4: threshold min(0.09, 0.075) = 0.075
    assert typical(torch.stack((sure, flat)), 0.09).tolist() == [[True, False, False, False], [True] * 4]


def test_the_greedy_token_is_always_accepted():
    p = probabilities(torch.randn(500, 20, generator=torch.Generator().manual_seed(0)) * 3)
    for allowed in (typical(p, 0.09), typical(p, 0.9), accept_k(p, 2)):
        assert allowed.gather(-1, p.argmax(-1, keepdim=True)).all()


def test_accept_k_counts_possible_tokens_only():
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0], [1.0, 0.0, 0.0, 0.0]])
    assert accept_k(p, 2).tolist() == [[True, True, False, False], [True, False, False, False]]
    assert accept_k(p, 9).sum(-1).tolist() == [3, 1]


@pytest.mark.parametrize("rule", [partial(typical, epsilon=0.2), partial(accept_k, k=2)], ids=["typical", "accept_k"])
def test_the_law_of_the_emitted_token_is_that_of_the_code(enumerate_law, model, rule):
    """For a drawn token alone, for a certain one, and for a certain one after a drawn one, as in a joined tree."""
    for seed in range(6):
        p, q = model(4, seed)(), model(4, 50 + seed)()
        allowed, copy = rule(p), torch.tensor(seed % 4)
        after = torch.full((2, 4), 0.25, dtype=torch.float64)

        def step(random, drawn, copied, p=p, q=q, allowed=allowed, copy=copy, after=after):
            tokens = ([random.draw(q)] if drawn else []) + ([copy] if copied else [])
            laws, masks = torch.stack((p, *after[: len(tokens)])), torch.stack((allowed, *[allowed] * len(tokens)))
            path, token = verify_lossy(laws, masks, torch.stack(tokens), [-1] * len(tokens), random)
            return int(tokens[path[0]]) if path else token

        for drawn, copied in ((True, False), (False, True), (True, True)):
            law = enumerate_law(partial(step, drawn=drawn, copied=copied))
            rows = [q] * drawn + [one_hot(copy, p)] * copied
            expected = emitted_distribution(p, allowed, rows)
            assert [law.get(x, 0.0) for x in range(4)] == pytest.approx(expected.tolist(), abs=1e-12)
            assert float(expected.sum()) == pytest.approx(1)


def test_a_walk_through_a_tree_takes_the_first_child_allowed():
    p = torch.eye(5)[[4, 4, 4, 4, 4]]
    allowed = torch.zeros(5, 5, dtype=torch.bool)
    allowed[0, [1, 2]] = allowed[2, 3] = allowed[3, 0] = True
    # children of the root: 0, 1, 2; of node 1: token 3. Node 1 is the first that is allowed; node 2 is then not tried.
    path, token = verify_lossy(p, allowed, torch.tensor([0, 1, 2, 3]), [-1, -1, -1, 1], RandomSource())
    assert (path, token) == ([1, 3], 4)
    assert verify_lossy(p, allowed, torch.tensor([-1, 0, 0, 0]), [-1, -1, -1, 0], RandomSource()) == ([], 4)


@pytest.fixture(scope="module")
def target(stories_model):
    return build_engine(stories_model, pack=False)


def decoded(target, prompts, drafter, rule, sampling, new=24):
    departure = DistanceMeter(rule, sampling)
    outputs = decode(
        target, prompts, StoppingCriteria(new), drafter, policy=partial(Fixed, 4), sampling=sampling, lossy=rule,
        observe=departure,
    )  # fmt: skip
    return [output.tokens for output in outputs], departure.result()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("drafter", ["model", "tree"])
@pytest.mark.parametrize("name", ["typical:0.3", "accept_k:3"])
def test_more_is_accepted_and_the_distance_says_at_what_price(
    stories_model, target, uneven_prompts, name, drafter, temperature
):
    made = (
        TokenRecycling()
        if drafter == "tree"
        else ModelDrafter(build_engine(truncate(stories_model, [0, 1]), pack=False))
    )
    sampling = Sampling(temperature, seed=5)
    tokens, found = decoded(target, uneven_prompts[:3], made, LossyRule.of(lossy(name)), sampling)
    assert found.rule == name and 0 < found.distance < 1
    assert all(len(output) == 24 for output in tokens)
    if not temperature and drafter == "model":
        exact = [o.tokens for o in decode(target, uneven_prompts[:3], StoppingCriteria(24))]
        assert differing_share(exact, tokens) > 0
        # At temperature 0 the distance is the share of tokens that are not the target's choice after the same text.
        ids = [torch.tensor([[*prompt, *output]]) for prompt, output in zip(uneven_prompts, tokens, strict=False)]
        with torch.inference_mode():
            other = [int((stories_model(row).logits[0, -25:-1].argmax(-1) != row[0, -24:]).sum()) for row in ids]
        assert 0 < sum(other) / 72 == pytest.approx(found.distance, abs=0.06)  # what was cut at the end is counted too


def test_a_draft_equal_to_the_target_costs_nothing_when_greedy(stories_model, target, uneven_prompts):
    drafter = ModelDrafter(build_engine(stories_model, pack=False))
    tokens, found = decoded(target, uneven_prompts[:2], drafter, LossyRule.of(lossy("accept_k:2")), Sampling())
    assert found.distance == 0.0
    assert tokens == [o.tokens for o in decode(target, uneven_prompts[:2], StoppingCriteria(24))]


def test_differing_places():
    assert differing_share([[1, 2, 3]], [[1, 5, 3]]) == pytest.approx(1 / 3)
    assert differing_share([[1, 2]], [[1, 2, 3, 4]]) == 0.5 and differing_share([[]], [[]]) == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_bench_never_calls_it_lossless(stories, tmp_path, temperature):
    (tmp_path / "p.txt").write_text("Once upon a time\nTom and Lily\n")
    shown = invoke(
        "draft", "bench", "--target", stories, "--draft", "exit:2", "--prompts", tmp_path / "p.txt", "--repeats", 1,
        "--max-new-tokens", 16, "--lossy", "typical", "--temperature", temperature, "--json", tmp_path / "o.json",
    )  # fmt: skip
    result = json.loads((tmp_path / "o.json").read_text())
    assert result["lossy"]["rule"] == "typical" and result["drafters"]["draft"]["lossy"]["distance"] > 0
    for of in result["drafters"].values():
        assert of["lossless"] is False and of["lossless_by"] == "lossy" and of["lossy"]["rule"] == "typical"
        assert (of["lossy"]["differing"] is None) == bool(temperature)
    assert "draft: lossy: typical, total variation from the target's distribution" in shown.stdout.replace("\n", " ")
    assert ("% of the tokens differ from the exact output" in shown.stdout) == (not temperature)


def test_generate_says_it_with_every_text(stories, tmp_path):
    shown = invoke(
        "generate", "--target", stories, "--prompt", "Once upon a time", "--draft", "exit:2", "--max-new-tokens", 24, "--lossy", "accept_k:4", "--temperature", 1, "--json", tmp_path / "o.json",
    )  # fmt: skip
    found = json.loads((tmp_path / "o.json").read_text())["lossy"]
    assert found["rule"] == "accept_k:4" and 0 < found["distance"] <= 1
    assert "lossy: accept_k:4, total variation from the target's distribution" in shown.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--lossy", "typical"], "lossy typical: nothing is drafted"),
        (
            ["--lossy", "tipical", "--draft", "exit:2"],
            r"one of typical\[:E\], accept_k:K, .*\(did you mean 'typical'\?\)",
        ),
        (["--lossy", "accept_k", "--draft", "exit:2"], "needs a value, accept_k:K; a whole number from 2"),
        (["--lossy", "accept_k:1", "--draft", "exit:2"], "K is a whole number from 2"),
        (["--lossy", "typical:1", "--draft", "exit:2"], "E is a number between 0 and 1"),
    ],
)
def test_generate_refuses(stories, arguments, reason):
    with pytest.raises(PeftlabError, match=reason):
        invoke("generate", "--target", stories, "--prompt", "x", *arguments)


def test_a_recipe_knows_no_lossy_rule(stories, tmp_path):
    """What a draft run reports is lossless or says how many outputs differ."""
    from peftlab.recipe.load import load_recipe

    assert set(LOSSY) == {"typical", "accept_k", "lantern", "lantern++", "gsd"}
    with pytest.raises(PeftlabError, match="lossy: unknown key"):
        load_recipe("draft/ci", [f"target={stories}", "lossy=typical", f"output_dir={tmp_path / 'out'}"])
