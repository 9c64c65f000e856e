"""The plan: arithmetic on step times that a test chooses, and a measurement that hangs together."""

from __future__ import annotations

import json
import math

import pytest
from typer.testing import CliRunner

from peftlab.cli.app import app
from peftlab.decoding import theory
from peftlab.decoding.advice import DraftCost
from peftlab.decoding.engines import build_engine
from peftlab.decoding.planning import ALPHAS, best_gamma_at, compare_kinds, plan, plan_from_times
from peftlab.drafting.states import truncate
from peftlab.errors import PeftlabError
from peftlab.reporting.drafts import page, plan_facts, plan_plots, plan_tables, published_theory


@pytest.mark.parametrize("c", [0.01, 0.05, 0.1, 0.3, 0.596])
def test_flat_verification_is_the_textbook(c):
    result = plan_from_times([2.0] * 11, 2.0 * c)
    assert result.c == pytest.approx(c)
    for row in result.gammas:
        assert row.cap == pytest.approx(theory.cap(row.gamma, c))
        assert row.break_even == pytest.approx(theory.break_even_alpha(row.gamma, c), abs=1e-8)
    for row in result.alphas:
        assert row.gamma == theory.best_gamma(row.alpha, c, 10)
        assert row.gain == pytest.approx(theory.speedup(row.alpha, row.gamma, c))
    assert [row.alpha for row in result.alphas] == list(ALPHAS)


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
        (["--theory", "--target", "m"], "--theory: measures nothing; leave m out"),
        ([], "--target: missing; give the model to measure, or --theory"),
        (["--target", "m", "--batch", "1;4"], "--batch 1;4: whole numbers separated by commas"),
        (["--target", "m", "--batch", "0,4"], "batch 0,4: different whole numbers from 1"),
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
