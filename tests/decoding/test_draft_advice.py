"""Advice before training by the weights that drafting reads, and after it by what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations, product

import pytest
from typer.testing import CliRunner

from peftlab.cli.app import app
from peftlab.decoding.advice import (
    DraftCost,
    TargetWeights,
    advise,
    best_draft,
    rank_rates,
    recommendation,
)
from peftlab.decoding.benchmark import measured_gain
from peftlab.decoding.engines import build_engine
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.decoding.model_free import PromptLookup
from peftlab.decoding.planning import plan_from_times
from peftlab.decoding.state_drafters import FeatureDrafter, HeadsDrafter
from peftlab.decoding.statistics import MeasuredGain
from peftlab.decoding.theory import block_efficiency
from peftlab.decoding.trees import RankRates, best_tree, reach_probabilities
from peftlab.drafting.base import target_weights
from peftlab.drafting.eagle import EagleStep
from peftlab.drafting.heads import MedusaHeads
from peftlab.drafting.load import draft_costs
from peftlab.drafting.states import truncate
from peftlab.errors import PeftlabError
from tests.eagle_models import eagle

CHAIN = DraftCost("model", "", "kind: model", 0.0, 0.11)
STEEP = [1.0, 1.1, 1.2, 1.3, 1.7, 1.8]


def test_a_chain_is_the_plan_of_its_step_time():
    """The same formula, read off the plan for a draft model whose step takes D."""
    plan = plan_from_times(STEEP, 0.11)
    for row in plan.alphas[:-1]:
        choice = best_draft(CHAIN, STEEP, row.alpha)
        assert (choice.nodes, choice.tree) == (row.gamma, False)
        assert choice.gain == pytest.approx(row.gain)
    found = advise([CHAIN], STEEP, 0.5)[0]
    assert found.break_even == pytest.approx(min(row.break_even for row in plan.gammas), abs=2e-3)
    assert found.stated.gain == pytest.approx(
        max(block_efficiency(0.5, g) / (STEEP[g] + 0.11 * g) for g in range(1, 6))
    )


def test_a_tree_is_the_best_of_all_trees():
    cost = DraftCost("medusa", "", "kind: medusa", 0.05, 0.02, depth=2, tree=True)
    rates = rank_rates(0.6)
    paths = [p for d in (1, 2) for p in product(range(3), repeat=d)]
    best = 1.0
    for n in range(1, 6):
        for tree in combinations(paths, n):
            if all(len(p) == 1 or p[:-1] in tree for p in tree):
                tokens = 1 + sum(rates(0, p[0]) * (rates(1, p[1]) if len(p) > 1 else 1) for p in tree)
                best = max(best, tokens / (STEEP[n] + cost.of(max(map(len, tree)))))
    choice = best_draft(cost, STEEP, 0.6)
    assert choice.gain == pytest.approx(best) and choice.tree


def test_nothing_is_recommended_where_nothing_pays():
    dear = DraftCost("model", "", "kind: model", 0.0, 3.0)
    found = advise([dear], STEEP, 0.5)
    assert found[0].break_even is None and found[0].stated.nodes == 0
    assert "no kind of draft pays here" in recommendation(found)
    assert "draft={kind: model}, a chain of" in recommendation(advise([dear, CHAIN], STEEP, 0.5))
    layer = DraftCost("eagle3", "", "kind: eagle3", 0.01, 0.02, tree=True, width=4)
    words = recommendation(advise([layer], [1.0, *[1.01] * 8], 0.5))
    assert "draft={kind: eagle3}, a tree of 8 (--gamma 8 --width 4)" in words
    with pytest.raises(PeftlabError, match=r"alpha: 1\.5 is not a probability"):
        best_draft(CHAIN, STEEP, 1.5)


def test_masks_cost_a_step_of_the_target_or_rows_of_its_verification():
    c = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8]
    two = DraftCost("gated_lora", "two passes", "kind: gated_lora", 0.0, 0.0, 8, passes=2)
    one = DraftCost("gated_lora", "one pass", "kind: gated_lora", 0.0, 0.0, 3, passes=1)
    assert two.step(c, 4, 4) == pytest.approx(1.4 + 1.3), "five rows are verified, four drafted"
    assert one.step(c, 2, 2) == 1.8 and one.step(c, 3, 3) is None, "nine rows; sixteen were not measured"
    best = best_draft(two, c, 0.6)  # the first drafted token is the target's own
    gains = [(2 + sum(0.6**i for i in range(1, n))) / (c[n] + c[n - 1]) for n in range(1, 9)]
    assert best.gain == pytest.approx(max(gains)) and best.nodes == 1 + gains.index(max(gains)) and not best.tree
    best = best_draft(one, c, 0.6)
    assert best.gain == pytest.approx(max(1.6 / 1.3, 1.96 / 1.8)) and best.nodes == 1
    found = advise([two, one], c, 0.6)
    assert [kind.drafting for kind in found] == pytest.approx([1.0, 1.3 - 1.1]), "a pass; two rows more"
    assert "(--gamma 1 --drafter one_pass)" in recommendation(found[1:])
    kinds = {(cost.kind, cost.size): cost for cost in draft_costs(TargetWeights(3.54e6, 30, 49152, 576))}
    assert kinds["gated_lora", "two passes"].passes == 2 and kinds["gated_lora", "one pass"].passes == 1


def test_costs_are_shares_of_the_weights(stories_model):
    weights = target_weights(stories_model)
    counted = sum(p.numel() for p in stories_model.parameters())
    tied = stories_model.get_input_embeddings().weight is stories_model.lm_head.weight
    assert weights.total == counted - (0 if tied else 512 * 64) and (weights.vocabulary, weights.hidden) == (512, 64)
    large = TargetWeights(3.54e6, 30, 49152, 576)
    costs = {(cost.kind, cost.size): cost for cost in draft_costs(large)}
    assert costs["model", "3 layers"].of(2) == pytest.approx(2 * (3 * 3.54e6 + 49152 * 576) / large.total)
    new = costs["model", "new, 3 layers of 288, 8192"]
    assert new.recipe == "kind: model, new: {layers: 3, width: 288}, vocabulary: 8192"
    assert new.of(1) == pytest.approx((3 * 3.54e6 / 4 + 8192 * 288) / large.total)
    assert costs["medusa", "4 heads"].of(4) == pytest.approx(0.045, abs=5e-3)
    layer = costs["eagle3", "1 layer"]
    assert layer.tree and layer.of(3) == pytest.approx(
        (3 * 576**2 + 3 * (3.54e6 + 2 * 576**2 + 8192 * 576)) / large.total
    )
    assert costs["medusa", "4 heads, Markov"].of(1) > costs["medusa", "4 heads"].of(1)


def test_after_training_the_parts_make_the_gain(stories_model):
    target = build_engine(stories_model, pack=False)
    drafter = ModelDrafter(build_engine(truncate(stories_model, [0]), pack=False))
    acceptance = [0.5, 0.4, 1.0, 1.0]
    drafts = drafter.candidates(acceptance, STEEP)
    assert [draft.tokens for draft in drafts] == pytest.approx([1.5, 1.7, 1.9, 2.1])
    assert [draft.effort for draft in drafts] == [1, 2, 3, 4]
    found = measured_gain(target, drafter, acceptance, gamma=4, tau=2.1, drafting=1e-9)
    assert found.gain == pytest.approx(2.1 / (found.verification[4] + found.drafting))
    expected = [1.0, *(t / found.verification[n] for n, t in enumerate((1.5, 1.7, 1.9, 2.1), start=1))]
    assert found.best_gain == pytest.approx(max(expected), rel=1e-3) and found.best_gamma == expected.index(
        max(expected)
    )
    slow = measured_gain(target, drafter, acceptance, gamma=4, tau=2.1, drafting=1e3)
    assert slow.best_gamma == 0 and "no draft pays" in slow.line()
    assert [draft.tokens for draft in PromptLookup().candidates([0.0, 0.0], STEEP)] == [1.0, 1.0]


def test_measured_ranks_decide_the_size_of_a_tree(stories_model):
    heads = MedusaHeads(stories_model.lm_head.weight, 2)
    heads.ranks = RankRates(((0.5, 0.2), (0.4, 0.1)))
    drafts = HeadsDrafter(heads).candidates([0.0, 0.0], STEEP)
    assert [draft.tokens for draft in drafts] == pytest.approx([1.5, 1.7, 1.9, 1.98, 2.03])
    assert {(draft.width, draft.effort) for draft in drafts} == {(None, 1.0)}


def test_chains_and_trees_of_a_layer_are_compared_by_measured_ranks(stories_model):
    """A level of a tree reads four nodes where a chain reads one, and costs what verification says of four."""
    network = EagleStep(eagle(stories_model))
    network.ranks = RankRates(((0.5, 0.3), (0.4, 0.1)))
    drafts = FeatureDrafter(network).candidates([0.0, 0.0], STEEP)
    chains, trees = ([d for d in drafts if d.width == width] for width in (1, 4))
    assert [d.tokens for d in chains] == pytest.approx([1.5, 1.7, 1.78, 1.812, 1.8248])
    assert [d.effort for d in chains] == pytest.approx([1, 1 + 1, 3, 4, 5])
    assert [d.tokens for d in trees] == pytest.approx([1.5, 1.8, 2.0, 2.12, 2.2])  # (0), (1), (0, 0), (1, 0), (0, 0, 0)
    assert [d.effort for d in trees] == pytest.approx([1, 1, 1 + STEEP[3], 1 + STEEP[3], 1 + 2 * STEEP[3]])
    target = build_engine(stories_model, pack=False)
    drafter = FeatureDrafter(network)
    found = measured_gain(target, drafter, [0.0, None], gamma=2, tau=1.6, drafting=1e-9)
    drafts = drafter.candidates([0.0, 0.0], found.verification)
    best = max([1.0, *(draft.tokens / found.verification[draft.gamma] for draft in drafts)])
    assert found.best_gain == pytest.approx(best, rel=1e-3)
    assert "--gamma 7 --width 4, 1.50x" in replace(found, best_gamma=7, best_width=4, best_gain=1.5).line()


def test_a_level_of_a_tree_that_reads_its_nodes_costs_more():
    layer = DraftCost("eagle3", "", "kind: eagle3", 0.1, 0.2, tree=True, width=4)
    assert (layer.of(3), layer.of(3, 1.5)) == pytest.approx((0.7, 0.9))
    rates = rank_rates(0.4)
    choice = best_draft(layer, [1.0, *[1.01] * 8], 0.4)
    tree = best_tree(8, 8, 4, rates)
    gains = [
        (1 + sum(reach_probabilities(tree, rates)[:n])) / (1.01 + layer.of(max(map(len, tree[:n])), 1.01))
        for n in range(1, 9)
    ]
    assert choice.tree and choice.gain == pytest.approx(max(gains))


def test_the_sentence_names_the_parts():
    line = MeasuredGain(2, 1.5, [1.0, 1.05, 1.1], 0.15, 1.2, 1, 1.25).line()
    assert line == "S = tau / (C(3) + D) = 1.50 / (1.10 + 0.15) = 1.20; best by these rates: --gamma 1, 1.25x"


def test_plan_without_a_draft_compares_the_kinds_in_eighty_columns(stories, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out, html = tmp_path / "plan.json", tmp_path / "plan.html"
    arguments = ["draft", "plan", "--target", str(stories), "--repeats", "1", "--context", "8", "--max-gamma", "3"]
    run = CliRunner().invoke(app, [*arguments, "--alpha", "0.6", "--json", str(out), "--html", str(html)])
    assert run.exit_code == 0, run.output
    result = json.loads(out.read_text())
    assert {kind["cost"]["kind"] for kind in result["kinds"]} >= {"model", "early_exit", "medusa"}
    assert all(len(kind["choices"]) == 3 for kind in result["kinds"])
    assert result["alpha"] == 0.6 and result["draft"] is None and result["verdict"] in run.stdout
    table = run.stdout[run.stdout.index("kinds of drafts") :].split("D (of one token)")[0].splitlines()
    assert all(len(line) <= 80 for line in table)
    assert sum(line.strip().startswith("medusa") for line in table) == 2, "a line a size"
    assert html.read_text().count("<svg") == 1
    with pytest.raises(PeftlabError, match=r"alpha: 2\.0 is not a probability"):
        CliRunner().invoke(app, [*arguments, "--alpha", "2"], catch_exceptions=False)
