"""Plans: their arithmetic on given step times, and the consistency of a measured plan."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from typer.testing import CliRunner

from peftlab.cli.app import app
from peftlab.decoding import benchmark, theory
from peftlab.decoding.benchmark import measured_gain
from peftlab.decoding.engines import build_engine
from peftlab.decoding.measurements import MeasuredGain
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.decoding.model_free import PromptLookup
from peftlab.decoding.planning import (
    ALPHAS,
    best_gamma_at,
    compare_kinds,
    plan,
    plan_from_engine,
    plan_from_times,
)
from peftlab.decoding.state_drafters import FeatureDrafter, HeadsDrafter
from peftlab.decoding.theory import (
    DraftCost,
    RankRates,
    TargetWeights,
    advise,
    best_draft,
    best_tree,
    block_efficiency,
    rank_rates,
    reach_probabilities,
    recommendation,
)
from peftlab.drafting.base import draft_costs, target_weights
from peftlab.drafting.eagle import EagleStep
from peftlab.drafting.heads import MedusaHeads
from peftlab.drafting.target import truncate
from peftlab.errors import PeftlabError
from peftlab.reporting.drafts import page, plan_facts, plan_plots, plan_tables, published_theory
from tests.eagle_models import eagle


@pytest.mark.parametrize("c", [0.01, 0.05, 0.1, 0.3, 0.596])
def test_flat_verification_is_the_textbook(c):
    result = plan_from_times([2.0] * 11, 2.0 * c)
    assert result.c == pytest.approx(c)
    for row in result.gammas:
        assert row.cap == pytest.approx(theory.cap(row.gamma, c))
        assert theory.speedup(row.break_even, row.gamma, c) == pytest.approx(1, abs=1e-12)
    for row in result.alphas:
        assert row.gamma == theory.best_gamma(row.alpha, c, 10)
        assert row.gain == pytest.approx(theory.speedup(row.alpha, row.gamma, c))
    assert [row.alpha for row in result.alphas] == list(ALPHAS)


def test_the_break_even_at_its_ends():
    """A draft that costs nothing pays from an acceptance of 0; one whose best gain is exactly 1 never does."""
    assert [row.break_even for row in plan_from_times([2.0] * 4, 0.0).gammas] == [0.0] * 3
    even = plan_from_times([2.0] * 4, 2.0)
    assert [(row.cap, row.break_even) for row in even.gammas] == [(1.0, None)] * 3 and not even.pays


def test_pearl_drafts_while_the_target_verifies():
    """At the same time a draft costs nothing up to c = 1/gamma; the larger of both times counts."""
    flat = plan_from_times([2.0] * 6, 0.4)  # c = .2
    perfect = flat.pearl[-1]
    assert (perfect.alpha, perfect.gamma, perfect.gain) == (1.0, 5, pytest.approx(5.0))
    assert all(both.gain >= 1 for both in flat.pearl), "with one drafted token the target is never slowed down"
    steep = plan_from_times([2.0, 4.0, 6.0, 8.0, 10.0, 12.0], 0.4)
    assert steep.pearl[-1].gain == pytest.approx(1.0), "five tokens at the price of five steps"


def test_each_batch_size_has_its_own_best_length(stories_model):
    target, draft = build_engine(stories_model), build_engine(truncate(stories_model, [0]))
    found = plan(target, draft, max_gamma=2, context=8, repeats=1, batches=(2, 1))
    assert found.batch == 2 and [of.batch for of in found.batches] == [2, 1]
    for of in found.batches:
        assert of.verification[0] == 1 and len(of.target_seconds) == 3 and of.verdict is None
        alone = plan_from_times(of.target_seconds, of.c * of.target_seconds[0])
        assert of.alphas == [best_gamma_at(alone, best.alpha) for best in of.alphas]
    assert found.target_seconds == found.batches[0].target_seconds
    titles = [title for title, _, _ in plan_tables(found)]
    assert titles[-2:] == ["one target step of a batch", "gain of the best draft length of a batch (gamma)"]
    kinds = compare_kinds(target, [DraftCost("model", "any", "from: x", 0.0, 0.1)], 0.5, max_gamma=2, context=8,
                          repeats=1, batches=(1, 2))  # fmt: skip
    assert [of.c for of in kinds.batches] == [None, None] and all(
        "acceptance of 0.50" in of.verdict for of in kinds.batches
    )
    assert any(fact.startswith("2 sequences: ") for fact in plan_facts(kinds, [], 0.5))


def test_an_engines_steps_contain_drafting():
    """Each length is compared with the plain steps beside it; a gain is tau by the cost of a step."""
    steps = [([0.010, 0.012, 0.010], [0.015, 0.015, 0.018]), ([0.020, 0.020, 0.020], [0.032, 0.032, 0.032])]
    plan = plan_from_engine("llama.cpp (1)", steps, context=16)
    assert plan.verification == pytest.approx([1, 1.5, 1.6])
    assert [row.cap for row in plan.gammas] == pytest.approx([2 / 1.5, 3 / 1.6])
    assert plan.gammas[0].break_even == pytest.approx(0.5, abs=0.01)
    found = best_gamma_at(plan, 0.8)
    assert (found.gamma, found.gain) == (2, pytest.approx(2.44 / 1.6))
    assert best_gamma_at(plan, 0.1).gamma == 0
    assert plan.target_seconds == pytest.approx([0.016, 0.015, 0.032]) and plan.target_range[0] == (0.010, 0.020)
    assert [row[0] for row in plan_tables(plan)[0].rows] == ["0", "1", "2"]
    assert "pays from an acceptance of 0.4" in plan_facts(plan, [], 0.8)[-1]


@pytest.mark.parametrize("batches", [(), (0,), (1, 1)])
def test_impossible_batches(stories_model, batches):
    engine = build_engine(stories_model)
    with pytest.raises(PeftlabError, match="different whole numbers from 1"):
        plan(engine, engine, batches=batches)


def test_theory_is_the_papers_table(tmp_path):
    """All twelve cells, and the tokens that they follow from."""
    shown = CliRunner().invoke(app, ["draft", "plan", "--theory", "--json", str(tmp_path / "t.json")])
    assert shown.exit_code == 0, shown.output
    found = json.loads((tmp_path / "t.json").read_text())
    cells = {(of["alpha"], of["gamma"]): of for of in found["rows"]}
    paper = published_theory().cells
    assert len(paper) == 6
    for key, (operations, speed) in paper.items():
        assert cells[key]["operations"] == pytest.approx(operations, abs=0.006)
        assert cells[key]["speedup"][0] == cells[key]["tokens"] == pytest.approx(speed, abs=0.006)
        assert shown.stdout.count(f"{operations:.2f}x") >= 2 and shown.stdout.count(f"{speed:.2f}x") >= 2
    assert "as published: Leviathan et al. 2023" in shown.stdout
    assert found["costs"][3] == 0.1 and cells[0.8, 5]["speedup"][3] == pytest.approx(cells[0.8, 5]["tokens"] / 1.5)
    bounds = {of["nats"]: of for of in found["bounds"]}
    assert bounds[0.02]["floor"] == pytest.approx(0.9) and bounds[0.02]["low"] == pytest.approx(0.8)
    assert bounds[0.5]["high"] == pytest.approx(1 - 0.5 / math.log(2)) and "0.971" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--theory", "--target", "m"], "--theory: measures nothing; leave --target out, or --theory"),
        (
            ["--theory", "--alpha", "0.3", "--max-gamma", "3", "--no-pack"],
            "--theory: measures nothing; leave --alpha, --max-gamma, --no-pack out, or --theory",
        ),
        ([], "--target: missing; give the model to measure, or --theory"),
        (["--target", "m", "--batch", "1;4"], "--batch 1;4: whole numbers separated by commas"),
        (["--target", "m", "--batch", "0,4"], "batch 0,4: different whole numbers from 1"),
        (
            ["--target", "m", "--draft", "d", "--engine", "http://host:1"],
            "draft plan starts vllm or llama.cpp for each",
        ),
        (["--target", "m", "--engine", "vllm", "--batch", "1,4"], "--engine vllm: one sequence at a time"),
        (["--target", "m", "--draft", "d", "--engine", "vlm"], "did you mean .vllm."),
    ],
)
def test_plan_refuses(arguments, reason):
    with pytest.raises(PeftlabError, match=reason):
        raise CliRunner().invoke(app, ["draft", "plan", *arguments]).exception


def test_known_figures():
    five = plan_from_times([1.0] * 6, 0.596).gammas[4]
    assert five.break_even == pytest.approx(0.832, abs=1e-3) and five.cap == pytest.approx(1.507, abs=1e-3)


def test_costly_verification_raises_the_bar():
    flat, steep = plan_from_times([1.0] * 5, 0.1), plan_from_times([1.0, 1.9, 1.9, 2.0, 2.0], 0.1)
    for one, other in zip(flat.gammas, steep.gammas, strict=True):
        assert other.cap < one.cap
    # γ = 1 cannot win at 1.9 + 0.1 for two tokens; γ = 4 yields five for 2.4.
    assert steep.gammas[0].break_even is None
    assert steep.gammas[3].cap == pytest.approx(5 / 2.4)
    alpha = steep.gammas[3].break_even
    assert theory.block_efficiency(alpha, 4) == pytest.approx(2.4)


def test_says_so_where_no_draft_can_pay():
    result = plan_from_times([1.0, 1.5, 2.0, 2.5], 1.0)
    assert not result.pays
    assert result.verdict == "cannot pay here: even a perfect draft reaches 0.80x (gamma 1)"
    assert {row.gamma for row in result.alphas} == {0}
    assert all(row.break_even is None for row in result.gammas)


def test_verdict_names_the_least_acceptance():
    result = plan_from_times([1.0] * 9, 0.2)
    assert result.verdict == ("pays from an acceptance of 0.20 (gamma 1); a perfect draft reaches 3.46x (gamma 8)")


def test_measures(stories_model):
    result = plan(
        build_engine(stories_model), build_engine(truncate(stories_model, [0])), max_gamma=3, context=16, repeats=3
    )
    assert len(result.target_seconds) == 4 and all(t > 0 for t in result.target_seconds)
    assert result.c > 0 and result.c_interval[0] <= result.c <= result.c_interval[1]
    assert result.verification[0] == 1 and len(result.gammas) == 3
    html = page("Plan", plan_tables(result), plan_facts(result, ["a & b"], 0.5), plan_plots(result))
    assert html.count("<svg") == 2 and "a &amp; b" in html and "http" not in html.replace("http://www.w3.org", "")
    assert math.isfinite(result.draft_seconds)


def test_refuses(stories_model):
    engine = build_engine(stories_model)
    with pytest.raises(PeftlabError, match="max_gamma: 0 drafts nothing"):
        plan(engine, engine, max_gamma=0)
    with pytest.raises(PeftlabError, match="context: 510 and 9 more tokens exceed target's 512"):
        plan(engine, engine, context=510)


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
                best = max(best, tokens / (STEEP[n] + cost.drafting_time(max(map(len, tree)))))
    choice = best_draft(cost, STEEP, 0.6)
    assert choice.gain == pytest.approx(best) and choice.tree


STEPS = [1.0, *(1 + 0.05 * n for n in range(1, 9))]  # C(n) of which a level costs a third of a step


def test_what_is_best_can_be_run_and_levels_are_counted():
    """Fewer nodes, fewer choices and chains count, too: the largest tree of the most tokens may be too deep."""
    hydra = DraftCost("hydra", "", "kind: hydra", 0.0, 0.33, depth=4, tree=True)
    rates = rank_rates(0.5)
    assert best_tree(2, 4, 8, rates) == ((0,), (1,)), "as likely as (0), (0, 0), with a level less"
    assert best_draft(hydra, STEPS, 0.5).gain == pytest.approx(1.75 / (1.1 + 0.33))
    for alpha in ALPHAS:
        runnable = [1.0]
        for width, nodes in product(range(1, 9), range(1, 9)):
            tree = best_tree(nodes, 4, width, rank_rates(alpha))
            drafting = hydra.drafting_time(max(map(len, tree)))
            tokens = 1 + sum(reach_probabilities(tree, rank_rates(alpha)))
            runnable.append(tokens / (STEPS[len(tree)] + drafting))
        assert best_draft(hydra, STEPS, alpha).gain == pytest.approx(max(runnable))
    layer = DraftCost("eagle3", "", "kind: eagle3", 0.0, 0.15, tree=True, width=4)
    tree, chain = best_draft(layer, STEPS, 0.5), best_draft(layer, STEPS, 0.9)
    assert (tree.nodes, tree.tree, tree.width) == (6, True, 3) and (chain.tree, chain.width) == (False, None)
    assert "a tree of 6 (--gamma 6 --width 3)" in recommendation(advise([layer], STEPS, 0.5))


@pytest.mark.parametrize("each", [0.02, 0.33])
def test_a_higher_acceptance_never_makes_a_chain_worse(each):
    chain = DraftCost("model", "", "kind: model", 0.0, each)
    gains = [best_draft(chain, STEPS, alpha / 50).gain for alpha in range(51)]
    assert gains == sorted(gains)
    once = DraftCost("medusa", "", "kind: medusa", 0.1, 0.0, depth=4, tree=True)  # levels cost nothing
    gains = [best_draft(once, STEPS, alpha / 50).gain for alpha in range(51)]
    assert all(after >= before - 1e-9 for before, after in pairwise(gains))


def test_nothing_is_recommended_where_nothing_pays():
    dear = DraftCost("model", "", "kind: model", 0.0, 3.0)
    found = advise([dear], STEEP, 0.5)
    assert found[0].break_even is None and found[0].stated.nodes == 0
    assert "no kind of draft pays here" in recommendation(found)
    assert "draft={kind: model}, a chain of" in recommendation(advise([dear, CHAIN], STEEP, 0.5))
    layer = DraftCost("eagle3", "", "kind: eagle3", 0.01, 0.02, tree=True, width=4)
    words = recommendation(advise([layer], [1.0, *[1.01] * 8], 0.5))
    assert "draft={kind: eagle3}, a tree of 8 (--gamma 8 --width 3)" in words
    with pytest.raises(PeftlabError, match=r"alpha: 1\.5 is not a probability"):
        best_draft(CHAIN, STEEP, 1.5)


def test_masks_cost_a_step_of_the_target_or_rows_of_its_verification():
    c = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8]
    two = DraftCost("gated_lora", "two passes", "kind: gated_lora", 0.0, 0.0, 8, passes=2)
    one = DraftCost("gated_lora", "one pass", "kind: gated_lora", 0.0, 0.0, 3, passes=1)
    assert two.step_time(c, 4, 4) == pytest.approx(1.4 + 1.3), "five rows are verified, four drafted"
    assert one.step_time(c, 2, 2) == 1.8 and one.step_time(c, 3, 3) is None, "nine rows; sixteen were not measured"
    best = best_draft(two, c, 0.6)  # the first drafted token is the target's own
    gains = [(2 + sum(0.6**i for i in range(1, n))) / (c[n] + c[n - 1]) for n in range(1, 9)]
    assert best.gain == pytest.approx(max(gains)) and best.nodes == 1 + gains.index(max(gains)) and not best.tree
    best = best_draft(one, c, 0.6)
    assert best.gain == pytest.approx(max(1.6 / 1.3, 1.96 / 1.8)) and best.nodes == 1
    found = advise([two, one], c, 0.6)
    assert [kind.drafting for kind in found] == pytest.approx([1.0, 1.3 - 1.1]), "a pass; two rows more"
    assert "(--gamma 1 --drafter one_pass)" in recommendation(found[1:])
    assert advise([one], [1.0, 1.3, 1.25, 1.2], 0.6)[0].drafting == 0, "four rows measured below two"
    kinds = {(cost.kind, cost.size): cost for cost in draft_costs(TargetWeights(3.54e6, 30, 49152, 576))}
    assert kinds["gated_lora", "two passes"].passes == 2 and kinds["gated_lora", "one pass"].passes == 1


def test_costs_are_shares_of_the_weights(stories_model):
    weights = target_weights(stories_model)
    counted = sum(p.numel() for p in stories_model.parameters())
    tied = stories_model.get_input_embeddings().weight is stories_model.lm_head.weight
    assert weights.total == counted - (0 if tied else 512 * 64) and (weights.vocabulary, weights.hidden) == (512, 64)
    large = TargetWeights(3.54e6, 30, 49152, 576)
    costs = {(cost.kind, cost.size): cost for cost in draft_costs(large)}
    assert costs["model", "3 layers"].drafting_time(2) == pytest.approx(2 * (3 * 3.54e6 + 49152 * 576) / large.total)
    new = costs["model", "new, 3 layers of 288, 8192"]
    assert new.recipe == "kind: model, new: {layers: 3, width: 288}, vocabulary: 8192"
    assert new.drafting_time(1) == pytest.approx((3 * 3.54e6 / 4 + 8192 * 288) / large.total)
    assert costs["medusa", "4 heads"].drafting_time(4) == pytest.approx(0.045, abs=5e-3)
    layer = costs["eagle3", "1 layer"]
    assert layer.tree and layer.drafting_time(3) == pytest.approx(
        (3 * 576**2 + 3 * (3.54e6 + 2 * 576**2 + 8192 * 576)) / large.total
    )
    assert costs["medusa", "4 heads, Markov"].drafting_time(1) > costs["medusa", "4 heads"].drafting_time(1)


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
    assert [draft.tokens for draft in PromptLookup().candidates([0.5, 0.5, 0.0, 1.0], STEEP)] == [1.5, 1.75, 1.75, 1.75]


def test_a_disturbed_step_makes_no_gain(stories_model, monkeypatch):
    """A longer step costs no less than a shorter one, whichever of them was disturbed; a gain is then at most τ."""
    slow = {1: 5.8, 2: 1.0, 3: 1.2}
    times = {("target", n): [slow.get(n, 1.3 * 5.8 if n > 6 else 1.0)] for n in range(1, 14)}
    monkeypatch.setattr(benchmark, "step_seconds", lambda *_, **__: times)
    target = build_engine(stories_model, pack=False)
    found = measured_gain(target, PromptLookup(), [0.14, 0.0], gamma=4, tau=1.14, drafting=1e-9)
    assert found.verification == pytest.approx([1.0] * 6 + [1.3] * 7)
    assert found.best_gamma == 1 and found.best_gain == pytest.approx(1.14)


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
    kept = (1.6 - 1) / (1.7 - 1)  # a chain of two gives 1.6 tokens where the ranks expect 1.7
    best = max([1.0, *((1 + kept * (draft.tokens - 1)) / found.verification[draft.gamma] for draft in drafts)])
    assert found.best_gain == pytest.approx(best, rel=1e-3)
    elsewhere = measured_gain(target, drafter, [0.0, None], gamma=2, tau=1.0, drafting=1e-9)
    most = max([1.0, *(1 / elsewhere.verification[draft.gamma] for draft in drafts)])
    assert elsewhere.best_gain == pytest.approx(most, rel=1e-3), (
        "where nothing is accepted, no draft gives a token more"
    )
    assert "--gamma 7 --width 4, 1.50x" in replace(found, best_gamma=7, best_width=4, best_gain=1.5).line()


def test_a_level_of_a_tree_that_reads_its_nodes_costs_more():
    layer = DraftCost("eagle3", "", "kind: eagle3", 0.1, 0.2, tree=True, width=4)
    assert (layer.drafting_time(3), layer.drafting_time(3, 1.5)) == pytest.approx((0.7, 0.9))
    rates = rank_rates(0.4)
    choice = best_draft(layer, [1.0, *[1.01] * 8], 0.4)
    tree = best_tree(8, 8, 4, rates)
    gains = [
        (1 + sum(reach_probabilities(tree, rates)[:n])) / (1.01 + layer.drafting_time(max(map(len, tree[:n])), 1.01))
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
