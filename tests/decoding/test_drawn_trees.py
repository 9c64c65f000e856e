"""Trees drawn from a draft model: their shape, rows that do not depend on each other, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest

from peftlab.decoding.decode import StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.model_free import with_copies
from peftlab.decoding.policies import Fixed
from peftlab.decoding.sampled_trees import KSEQ, DrawnTrees, rsd_c, rsd_s, specinfer
from peftlab.decoding.sampling import Sampling
from peftlab.decoding.verify import TOKENS, TRAVERSAL
from peftlab.drafting.states import truncate
from peftlab.errors import PeftlabError
from tests.command_line import invoke

TREES = {"rsd_c": rsd_c, "rsd_s": rsd_s, "specinfer": specinfer}


@pytest.fixture(scope="module")
def engines(stories_model):
    return build_engine(stories_model, pack=False), build_engine(truncate(stories_model, range(3)), pack=False)


def first_drafts(engines, prompts, grow, sampling, gamma=8):
    target, draft = engines
    drafts = []

    def observe(rows, verified):
        drafts.append(verified.draft)

    how = {"policy": partial(Fixed, gamma), "sampling": sampling, "observe": observe}
    decode(target, prompts, StoppingCriteria(10), DrawnTrees(draft, grow=grow), **how)
    return drafts[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", TREES)
def test_levels_branch_and_continue(engines, uneven_prompts, name, temperature):
    first = first_drafts(engines, uneven_prompts[:3], TREES[name](3), Sampling(temperature, seed=2))
    assert (first.probs is None) == (temperature == 0)
    for i, (tokens, parents) in enumerate(zip(first.tokens.tolist(), first.parents, strict=True)):
        assert parents[:3] == (-1, -1, -1) and all(0 <= parent < 3 for parent in parents[3:6])
        if name == "rsd_c":
            assert parents == (-1, -1, -1, 0, 1, 2, 3, 4)
        siblings = [*zip(parents, tokens, strict=True)]
        if name != "specinfer" or not temperature:
            assert len({*siblings}) == len(tokens), "children of a node differ"
        for node, place in enumerate(siblings):
            elder = siblings.index(place)
            assert elder == node or node not in parents, "a token that is drawn again is not read on"
            if temperature:
                assert first.probs[i, node, tokens[node]] > 0
                for other in range(node):
                    if siblings[other][0] == place[0]:
                        again = bool(first.probs[i, node, tokens[other]] > 0)
                        assert again == (name == "specinfer"), "drawn from what the elder siblings have left"


def test_a_stochastic_beam_follows_the_probabilities(engines, uneven_prompts):
    """Where one token is nearly certain the beam stays below it; constant branching gives each branch its share."""
    sharp = Sampling(temperature=0.05, seed=2)
    beam, chains = (first_drafts(engines, uneven_prompts[2:3] * 8, grow, sharp) for grow in (rsd_s(3), rsd_c(3)))
    below = [sum(parents[3:6].count(i) == 1 for i in range(3)) for parents in beam.parents]
    assert min(below) < 3 and all(parents[3:6] == (0, 1, 2) for parents in chains.parents)


def test_cuts_that_leave_fewer_tokens_than_branches(engines, uneven_prompts):
    for grow in (rsd_c(3), rsd_s(3)):
        draft = first_drafts(engines, uneven_prompts[:2], grow, Sampling(1.0, top_k=2, seed=1), gamma=5)
        assert (draft.tokens[:, :3] < 0).tolist() == [[False, False, True]] * 2
        assert not draft.probs[draft.tokens < 0].any() and not draft.probs.isnan().any()


@pytest.mark.parametrize(
    ("name", "verifier"),
    [*((name, verifier) for name in [*TREES, "suffix+rsd_s"] for verifier in (TRAVERSAL, TOKENS)), ("specinfer", KSEQ)],
)
def test_rows_draw_as_they_would_alone(engines, uneven_prompts, name, verifier):
    """Budgets differ in the last steps, as the context of each row does not: what a row draws is its own."""
    target, draft = engines
    sampling, policy, ending = Sampling(temperature=1.0, seed=9), partial(Fixed, 5), StoppingCriteria(9)
    drafter = DrawnTrees(draft, grow=TREES[name.removeprefix("suffix+")](2))
    how = {"drafter": with_copies(drafter) if "+" in name else drafter, "policy": policy, "verifier": verifier}
    together = decode(target, uneven_prompts[1:4], ending, sampling=sampling, **how)
    for i, prompt in enumerate(uneven_prompts[1:4]):
        alone = decode(target, [prompt], ending, sampling=replace(sampling, seed=sampling.seed + i), **how)
        assert alone[0].tokens == together[i].tokens


@pytest.mark.parametrize(("tree", "how"), [("rsd_c:2", {}), ("specinfer:2", {"temperature": 0.8, "verify": "kseq"})])
def test_bench_draws_trees(stories, tmp_path, tree, how):
    (tmp_path / "p.txt").write_text("Once upon a time\nTom and Lily\n")
    given = [text for name, value in how.items() for text in (f"--{name}", value)]
    invoke(
        "draft", "bench", "--target", stories, "--draft", "exit:3", "--tree", tree, "--gamma", 6, *given,
        "--prompts", tmp_path / "p.txt", "--max-new-tokens", 8, "--repeats", 1, "--drafter", "lookup",
        "--json", tmp_path / "o.json",
    )  # fmt: skip
    found = json.loads((tmp_path / "o.json").read_text())
    assert (found["tree"], found["verify"], found["gain"], found["width"]) == (tree, how.get("verify"), None, None)
    for drafter in found["drafters"].values():
        assert drafter["lossless"] and drafter["lossless_by"] == ("construction" if how else "comparison")
    assert len(found["acceptance_by_position"]) >= 2, "six nodes on at least two levels"
    assert found["drafters"]["draft"]["tau"] > 1


def test_generate_draws_trees(stories):
    pair = ["--target", stories, "--draft", "exit:3", "--prompt", "Once upon a time", "--max-new-tokens", 8]
    drawn = invoke("generate", *pair, "--temperature", 0.8, "--tree", "rsd_s:3", "--verify", "tokens", "--seed", 4)
    assert (
        drawn.stdout
        and drawn.stdout
        == invoke(
            "generate", *pair, "--temperature", 0.8, "--tree", "rsd_s:3", "--verify", "tokens", "--seed", 4
        ).stdout
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--tree", "rsd_c"], "tree rsd_c: needs a value, rsd_c:W; a whole number from 2"),
        (["--tree", "rsd:2"], r"tree rsd:2: one of rsd_c:W, rsd_s:W, specinfer:W \(did you mean"),
        (["--tree", "rsd_s:1"], "tree rsd_s:1: W is a whole number from 2"),
        (
            ["--width", 3],
            "width 3: of heads, eagle3, mtp, pard and gated_lora; a draft model's trees have names, as tree rsd_c:3",
        ),
        (
            ["--tree", "rsd_c:2", "--policy", "goodput"],
            "policy goodput: needs a chain from a draft model or from copies",
        ),
        (["--verify", "tokens"], "verify tokens: temperature 0 is greedy, where all verify alike"),
        (["--verify", "block", "--temperature", 1], "verify block: one of traversal, tokens, kseq"),
        (["--verify", "kseq", "--temperature", 1], "verify kseq: verifies independent drafts; give tree specinfer:W"),
        (["--verify", "kseq", "--temperature", 1, "--tree", "rsd_c:2"], "give tree specinfer:W"),
        (
            ["--verify", "tokens", "--temperature", 1, "--lossy", "typical"],
            "verify tokens: lossy typical takes its place",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(stories, arguments, reason):
    with pytest.raises(PeftlabError, match=reason):
        invoke("generate", "--target", stories, "--draft", "exit:2", "--prompt", "Once", *arguments)


def test_trees_need_a_draft_model(stories):
    with pytest.raises(PeftlabError, match="tree: is drawn from a draft model; give one as draft"):
        invoke("generate", "--target", stories, "--drafter", "lookup", "--prompt", "Once", "--tree", "rsd_c:2")
    with pytest.raises(PeftlabError, match="verify tokens: nothing is drafted"):
        invoke("generate", "--target", stories, "--prompt", "Once", "--verify", "tokens", "--temperature", 1)
