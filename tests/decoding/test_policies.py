"""Draft length policies: their names, the choices of goodput, and the drafters that each can be used with."""

from __future__ import annotations

import json
import time
from functools import partial

import pytest
import torch

from peftlab.decoding.decode import Drafter, Fixed, Proposal
from peftlab.decoding.engines import build_engine
from peftlab.decoding.measurements import MeasuredStepTimes, drafting_times, target_times
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.decoding.model_free import PromptLookup, TokenRecycling, with_copies
from peftlab.decoding.policies import Confidence, Goodput
from peftlab.decoding.state_drafters import BlockDrafter, FeatureDrafter
from peftlab.decoding.table import CHAIN, DRAWN, POLICIES, policy
from peftlab.drafting.acceptance import AcceptancePredictor, save_acceptance_head
from peftlab.drafting.state_network import default_features
from peftlab.drafting.target import truncate
from peftlab.errors import PeftlabError
from peftlab.pipelines.benchmark import HEAD_FILE, draft_lengths
from peftlab.recipe.load import load_recipe
from tests.command_line import invoke
from tests.eagle_models import trained_eagle

FLAT = MeasuredStepTimes(
    {1: [1.0] * 9, 16: [4.0 * n for n in range(1, 10)]}, {1: {1: 0.1, 8: 0.8}, 16: {1: 0.4, 8: 3.2}}
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("fixd", r"one of fixed\[:N\], confidence\[:T\], .* \(did you mean 'fixed'\?\)"),
        ("confident:0.4", "did you mean 'confidence'"),
        ("fixed:0", "N is a whole number from 1"),
        ("fixed:2.5", "N is a whole number from 1"),
        ("confidence:1.5", "T is a probability from 0 to 1"),
        ("confidence:nan", "T is a probability from 0 to 1"),
        ("head:", "H is a probability from 0 to 1"),
        ("heuristic:3", "heuristic takes no value"),
        ("goodput:2", "goodput takes no value"),
        ("", "one of fixed"),
    ],
)
def test_what_is_not_a_policy(text, reason):
    with pytest.raises(PeftlabError, match=f"policy {text}.*{reason}"):
        policy(text)


def test_a_fixed_length_above_gamma_is_refused(stories):
    assert policy("fixed:4", 4).value == 4
    with pytest.raises(PeftlabError, match="policy fixed:5: drafts more than gamma 4; give gamma 5"):
        policy("fixed:5", 4)
    with pytest.raises(PeftlabError, match="policy fixed:8: drafts more than gamma 4; give gamma 8"):
        invoke("generate", "--target", stories, "--draft", "exit:2", "--prompt", "x", "--policy", "fixed:8")
    with pytest.raises(PeftlabError, match="policy: fixed:8: drafts more than gamma 4; give gamma 8"):
        load_recipe("draft/quickstart", ["policy=fixed:8"])


def test_a_drafter_that_cannot_follow_has_the_name_that_users_give_it():
    for make, name in (
        (lambda: FeatureDrafter(None, width=3), "eagle3 or mtp of width 3"),
        (lambda: BlockDrafter(None, width=2), "dflash of width 2"),
    ):
        with pytest.raises(PeftlabError, match=f"confidence:0.5: stops a chain that is .*, and {name} draws none"):
            draft_lengths(policy("confidence:0.5"), 4, None, {"draft": make})


def test_values_and_defaults():
    assert [policy(text).value for text in ("fixed:6", "confidence:0.25", "head:0.5")] == [6, 0.25, 0.5]
    assert {name: policy(name).value for name in POLICIES} == {
        "fixed": None, "confidence": 0.4, "heuristic": None, "head": 0.7, "goodput": None,
    }  # fmt: skip


def test_goodput_drafts_less_where_less_is_accepted_and_where_the_batch_is_large():
    of = Goodput(FLAT, 8)
    assert of.alpha == 1.0 and of.budget(1) == 8, "it begins by expecting everything"
    assert of.budget(16) == 0, "each token costs a whole step of one token there"
    assert of.budget(16) <= of.budget(4) <= of.budget(1)
    for _ in range(40):
        of.update(4, 1)
    assert of.alpha == pytest.approx(0.5, abs=0.03)
    assert 1 <= of.budget(1) <= 4  # (1 + .5 + .25 + ...) / (1 + .1 n)
    for _ in range(200):
        of.update(4, 0)
    assert of.budget(1) == 0, "at an acceptance below c no draft pays"
    for _ in range(300):
        of.update(0, 0)
    assert of.budget(1) > 0, "it tries again after steps without a draft"


def test_goodput_never_drafts_where_a_perfect_draft_loses():
    dear = Goodput(MeasuredStepTimes({1: [1.0, 2.0, 3.0]}, {1: {1: 0.5, 2: 1.0}}), 2)
    assert dear.alpha == 1.0 and dear.budget(1) == 0


def test_goodput_drafts_a_whole_block_or_nothing_where_one_pass_writes_it():
    block = MeasuredStepTimes({1: [1.0] * 9}, {1: {1: 0.5, 8: 0.5}})
    assert Goodput(block, 8).budget(1) == 8
    seldom = Goodput(block, 8)
    for accepted in (1, 0, 1, 0, 1, 0, 0) * 60:  # 3 of the 10 that were tried
        seldom.update(8, accepted)
    assert seldom.alpha == pytest.approx(0.3, abs=0.05)
    assert seldom.budget(1) == 0, "1 + .3 + .09 + ... < 1.5"


def test_times_between_two_batch_sizes():
    assert FLAT.target(1, 9) == FLAT.target(0, 1) == 1.0
    assert FLAT.target(6, 2) == pytest.approx(1 + 7 * 5 / 15)
    assert FLAT.target(40, 2) == 8.0 and FLAT.draft(40, 1) == 0.4
    assert FLAT.draft(1, 5) == pytest.approx(0.5) and FLAT.draft(6, 1) == pytest.approx(0.2)


def test_times_are_measured_at_every_power_of_two(stories_model):
    target, draft = build_engine(stories_model, pack=False), build_engine(truncate(stories_model, [0]), pack=False)
    targets = target_times(target, 6, 2, context=8, repeats=1)
    assert [*targets] == [1, 2, 4, 6]
    assert all(len(of) == 3 and min(of) > 0 for of in targets.values())
    assert [*target_times(target, 1, 1, context=10_000, repeats=1)] == [1], "as much context as fits"
    drafts = drafting_times(target, lambda: ModelDrafter(draft), targets, 9, repeats=2)
    assert [*drafts] == [1, 2, 4, 6]
    assert all([*of] == [1, 9] and min(of.values()) > 0 for of in drafts.values())


def test_the_time_of_drafting_is_that_of_a_step(stories_model):
    class Sleeping(Drafter):
        name, provides = "sleeping", frozenset({CHAIN})

        def propose(self, rows, budgets):
            time.sleep(0.004 * max(budgets))
            return Proposal(torch.zeros(len(rows), max(budgets), dtype=torch.long))

    target = build_engine(stories_model, pack=False)
    times = drafting_times(target, Sleeping, [1, 3], 5, repeats=1)
    assert all(of[5] >= 0.02 and of[1] >= 0.004 for of in times.values()), "a sleep may be longer, and is not shorter"
    assert [*drafting_times(target, Sleeping, [1], 1)[1]] == [1]


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in ("fixed", "heuristic")])
def test_drafters_that_cannot_follow_draft_gamma_tokens(stories_model, name):
    target = build_engine(stories_model, pack=False)
    model = ModelDrafter(build_engine(truncate(stories_model, [0, 1]), pack=False))
    drafters = {"draft": lambda: model, "suffix+draft": lambda: with_copies(model), "recycling": TokenRecycling}
    found = draft_lengths(policy(name), 3, target, drafters, head=lambda: lambda hidden: 0.5)
    assert isinstance(found.policies["recycling"](), Fixed) and found.policies["recycling"]().budget(1) == 3
    assert "recycling draft 3 tokens instead" in found.notes[0]
    assert type(found.policies["draft"]()) is type(found.policies["suffix+draft"]()) is not Fixed
    with pytest.raises(PeftlabError, match=f"policy {name}: .*recycling"):
        draft_lengths(policy(name), 3, target, {"recycling": TokenRecycling})


def test_a_drafter_says_which_policies_it_follows(stories_model):
    class Mine(Drafter):
        name, provides = "mine", frozenset({DRAWN})

    target = build_engine(stories_model, pack=False)
    found = draft_lengths(policy("confidence"), 3, target, {"mine": Mine})
    assert isinstance(found.policies["mine"](), Confidence)
    with pytest.raises(
        PeftlabError,
        match="policy goodput: needs a chain whose length it can choose by measured times, and mine drafts none",
    ):
        draft_lengths(policy("goodput"), 3, target, {"mine": Mine})


def test_goodput_measures_what_each_drafter_takes(stories_model):
    target = build_engine(stories_model, pack=False, features=default_features(5))
    layer = trained_eagle(stories_model)
    drafters = {"draft": partial(FeatureDrafter, layer), "lookup": PromptLookup}
    found = draft_lengths(policy("goodput"), 2, target, drafters)
    draft, lookup = (found.policies[name]() for name in drafters)
    assert draft is found.policies["draft"](), "one for all sequences"
    assert draft.times.targets == lookup.times.targets
    assert all(times.draft(1, n) > 0 for times in (draft.times, lookup.times) for n in (1, 2))
    with pytest.raises(
        PeftlabError,
        match="policy goodput: needs a chain whose length it can choose by measured times, and eagle3 or mtp of "
        "width 3 drafts none",
    ):
        draft_lengths(policy("goodput"), 2, target, {"draft": partial(FeatureDrafter, layer, width=3)})


@pytest.fixture(scope="module")
def draft_run(stories_model, stories_tokenizer, tmp_path_factory):
    """A draft with an acceptance head beside it that expects rejections."""
    path = tmp_path_factory.mktemp("draft")
    truncate(stories_model, range(4)).save_pretrained(path)
    stories_tokenizer.save_pretrained(path)
    head = AcceptancePredictor(stories_model.config.hidden_size)
    with torch.no_grad():
        head.outer.bias.fill_(-20.0)
    save_acceptance_head(head, path / HEAD_FILE)
    return path


@pytest.mark.parametrize("name", ["fixed:2", "confidence:0.3", "heuristic", "head:0.6", "goodput"])
def test_generate_and_bench_follow_every_policy(
    stories, draft_run, stories_model, stories_tokenizer, generate_greedy, tmp_path, name
):
    shown = invoke(
        "generate", "--target", stories, "--draft", draft_run, "--prompt", "Once upon a time", "--max-new-tokens", 20,
        "--policy", name, "--no-pack",
    )  # fmt: skip
    ids = generate_greedy(stories_model, stories_tokenizer("Once upon a time").input_ids, 20)
    assert shown.stdout == stories_tokenizer.decode(ids) + "\n"
    (tmp_path / "p.txt").write_text("Once upon a time\nTom and Lily\n")
    shown = invoke(
        "draft", "bench", "--target", stories, "--draft", draft_run, "--prompts", tmp_path / "p.txt", "--gamma", 3,
        "--max-new-tokens", 12, "--repeats", 1, "--policy", name, "--json", tmp_path / "out.json",
    )  # fmt: skip
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["policy"] == name and all(of["lossless"] for of in result["drafters"].values())
    positions = len(result["acceptance_by_position"])
    assert positions == {"fixed:2": 2, "head:0.6": 1}.get(name, positions)
    assert positions > 0 or name == "goodput"  # by the times that it measures, a draft of so small a model may not pay
    assert bool(result["warnings"]) == (name not in ("fixed:2", "heuristic"))
    assert (result["gain"] is None) == (name != "fixed:2"), "lengths that vary have no single gain"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--policy", "goodput"], "policy goodput: nothing is drafted"),
        (
            ["--policy", "head", "--drafter", "lookup"],
            "policy head: reads the states of a draft model that drafts a chain, and lookup is none",
        ),
        (["--policy", "confidence", "--drafter", "suffix"], "confidence: stops a chain that is drawn .* and suffix"),
        (["--policy", "head", "--draft", "exit:2"], "exit:2 has no acceptance_head.safetensors; a draft recipe"),
    ],
)
def test_generate_refuses(stories, arguments, reason):
    with pytest.raises(PeftlabError, match=reason):
        invoke("generate", "--target", stories, "--prompt", "x", *arguments)


@pytest.mark.parametrize("draft", ["del", "swift"])
def test_drafts_that_choose_for_themselves_do_not_follow_goodput(stories, tmp_path, draft):
    """What they have learned of their layers is kept between drafters: steps on random text must not teach it."""
    (tmp_path / "p.txt").write_text("Once upon a time\n")
    reason = f"policy goodput: needs a chain whose length it can choose by measured times, and {draft} drafts none"
    with pytest.raises(PeftlabError, match=reason):
        invoke(
            "draft",
            "bench",
            "--target",
            stories,
            "--draft",
            draft,
            "--prompts",
            tmp_path / "p.txt",
            "--policy",
            "goodput",
        )
