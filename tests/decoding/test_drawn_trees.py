"""Trees drawn from a draft model: their shape, rows that do not depend on each other, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
from typer.testing import CliRunner

from peftlab.cli.app import app
from peftlab.decoding.decode import StoppingCriteria, decode
from peftlab.decoding.draft_length import Fixed
from peftlab.decoding.drafters.drawn_trees import DrawnTrees
from peftlab.decoding.engines.build import build_engine
from peftlab.decoding.verification.sampling import Sampling
from peftlab.drafting.truncation import truncate
from peftlab.errors import PeftlabError


@pytest.fixture(scope="module")
def engines(stories_model):
    return build_engine(stories_model, pack=False), build_engine(truncate(stories_model, range(3)), pack=False)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_branches_differ_and_continue(engines, uneven_prompts, temperature):
    target, draft = engines
    drafts = []

    def observe(rows, verified):
        drafts.append(verified.draft)

    how = {"policy": partial(Fixed, 8), "sampling": Sampling(temperature, seed=2), "observe": observe}
    decode(target, uneven_prompts[:3], StoppingCriteria(10), DrawnTrees(draft, width=3), **how)
    first = drafts[0]
    assert [*first.parents] == [(-1, -1, -1, 0, 1, 2, 3, 4)] * 3 and (first.probs is None) == (temperature == 0)
    for line in first.tokens.tolist():
        assert len({*line[:3]}) == 3, "first tokens are drawn without replacement"
    if temperature:
        for tokens, laws in zip(first.tokens, first.probs, strict=True):
            assert all(laws[later, tokens[earlier]] == 0 for later in range(3) for earlier in range(later))


def test_rows_draw_as_they_would_alone(engines, uneven_prompts):
    """Budgets differ in the last steps, as the context of each row does not: what a row draws is its own."""
    target, draft = engines
    sampling, policy, ending = Sampling(temperature=1.0, seed=9), partial(Fixed, 5), StoppingCriteria(14)
    together = decode(target, uneven_prompts, ending, DrawnTrees(draft, width=2), policy=policy, sampling=sampling)
    for i, prompt in enumerate(uneven_prompts):
        own = replace(sampling, seed=sampling.seed + i)
        alone = decode(target, [prompt], ending, DrawnTrees(draft, width=2), policy=policy, sampling=own)
        assert alone[0].tokens == together[i].tokens


def test_bench_with_branches(stories, tmp_path):
    (tmp_path / "p.txt").write_text("Once upon a time\nTom and Lily\n")
    shared = ["draft", "bench", "--target", str(stories), "--prompts", str(tmp_path / "p.txt"), "--draft", "exit:3"]
    settings = ["--width", "2", "--gamma", "6", "--max-new-tokens", "12", "--repeats", "1", "--drafter", "lookup"]
    shown = CliRunner().invoke(app, [*shared, *settings, "--json", str(tmp_path / "o.json")])
    assert shown.exit_code == 0, shown.output
    found = json.loads((tmp_path / "o.json").read_text())
    assert all(of["lossless"] for of in found["drafters"].values()) and found["gain"] is None
    assert len(found["acceptance_by_position"]) == 3, "six nodes on two branches"
    with pytest.raises(PeftlabError, match="policy goodput: needs a chain from a draft model or from copies"):
        raise CliRunner().invoke(app, [*shared, *settings, "--policy", "goodput"]).exception
