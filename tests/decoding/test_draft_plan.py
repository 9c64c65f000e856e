"""The plan: arithmetic on step times that a test chooses, and a measurement that hangs together."""

from __future__ import annotations

import math

import pytest

from peftlab.decoding.analysis import theory
from peftlab.decoding.analysis.planning import ALPHAS, plan, plan_from_times
from peftlab.decoding.engines.build import build_engine
from peftlab.drafting.truncation import truncate
from peftlab.errors import PeftlabError
from peftlab.reporting.draft_pages import page, plan_drawings, plan_facts, plan_tables


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
    html = page("Plan", plan_tables(result), plan_facts(result, ["a & b"], 0.5), plan_drawings(result))
    assert html.count("<svg") == 2 and "a &amp; b" in html and "http" not in html.replace("http://www.w3.org", "")
    assert math.isfinite(result.draft_seconds)


def test_refuses(stories_model):
    engine = build_engine(stories_model)
    with pytest.raises(PeftlabError, match="max_gamma: 0 drafts nothing"):
        plan(engine, engine, max_gamma=0)
    with pytest.raises(PeftlabError, match="context: 510 and 9 more tokens exceed target's 512"):
        plan(engine, engine, context=510)
