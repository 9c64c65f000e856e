"""Pages about drafting: whole numbers on their axes, drafted tokens in their colours, nothing unescaped."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_directory import write_run

from peftlab.decoding.benchmark import DraftedText, Piece
from peftlab.decoding.measurements import (
    AcceptanceStatistics,
    BenchmarkResult,
    CategoryResult,
    Conditions,
    DrafterResult,
    MeasuredGain,
    TimeShares,
)
from peftlab.environment import Cpu
from peftlab.reporting.drafts import bench_facts, bench_page, bench_tables
from peftlab.reporting.pages import acceptance_plots, write_report

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

PIECES = [Piece(" a", "accepted"), Piece("<b>", "rejected"), Piece(" cat\n", "target")]
EXAMPLE = DraftedText("It was", PIECES)
DECODING = {
    "before": {},
    "after": {
        "block_efficiency": 1.5,
        "tau_without_bonus": 0.5,
        "accepted": 0.4,
        "acceptance_by_position": [0.5, 0.25],
        "accepted_runs": {"0": 6, "1": 3, "2": 1},
        "plain_tokens_per_second": 50.0,
        "tokens_per_second": 60.0,
        "speed_up": 1.2,
        "speed_up_interval": [1.1, 1.3],
        "lossless": True,
        "divergences": [],
        "verdict": "faster than plain decoding (1.20x, 95 % interval 1.10 to 1.30)",
        "beside": {"suffix": 1.1},
        "time": {"target": 0.5, "draft": 0.4, "outside": 0.1},
        "gain": {"best_gamma": 1, "best_gain": 1.3},
        "conditions": {"load": 0.5},
        "example": {"prompt": "It was", "pieces": [vars(piece) for piece in PIECES]},
    },
    "gamma": 2,
}


@pytest.mark.parametrize(
    ("rates", "runs"), [([0.5], {0: 3, 1: 1}), ([0.5] * 4, {0: 9, 4: 2}), ([0.5] * 20, {0: 9, 19: 2})]
)
def test_positions_and_runs_have_ticks_at_whole_numbers(rates: list[float | None], runs: dict[int, int]) -> None:
    for plot in acceptance_plots(rates, runs):
        texts = re.findall(r">([^<>]+)</text>", plot.svg)  # the horizontal axis comes first
        label = next(i for i, text in enumerate(texts) if text.startswith(("position", "drafted")))
        assert label and all(text.isdigit() for text in texts[:label]), texts
        if "target steps" in texts:
            assert all(text.isdigit() for text in texts[label + 1 : texts.index("target steps")]), texts


def test_without_drafted_tokens_there_is_no_plot() -> None:
    assert acceptance_plots([], {0: 5}) == [] and acceptance_plots([None], {0: 5}) == []


def test_a_draft_run_shows_its_decoding(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", metric="acceptance", draft="medusa", decoding=DECODING)
    page = write_report(run).read_text()
    assert "<h2>Acceptance by position</h2>" in page and "<h2>Accepted runs</h2>" in page
    assert (
        '<ins class="accepted"> a</ins><del class="rejected">&lt;b&gt;</del><span class="target"> cat↵\n</span>' in page
    )
    assert "1.20\N{MULTIPLICATION SIGN}</p>" in page and "plain decoding (1.10 to 1.30)" in page
    assert "acceptance: 0.8873 (0.6838 before training)" in page and "60 tokens/s" in page
    assert "<ins" not in write_report(write_run(tmp_path / "other")).read_text()


def statistics(**changes: Any) -> AcceptanceStatistics:
    values = {
        "tau": 1.5,
        "tau_without_bonus": 0.5,
        "acceptance": 0.4,
        "acceptance_by_position": [0.5, 0.25],
        "drafted": 20,
        "accepted": 5,
        "steps": 10,
        "histogram": {"1": 6, "2": 3, "3": 1},
        "accepted_runs": {"0": 6, "1": 3, "2": 1},
    }
    return AcceptanceStatistics(**(values | changes))


def result() -> BenchmarkResult:
    drafter = DrafterResult(
        60.0, (58.0, 62.0), 50.0, (48.0, 52.0), 1.2, (1.1, 1.3), "faster than plain decoding", statistics(), True,
        "comparison", [], TimeShares(0.5, 0.4, 0.1),
    )  # fmt: skip
    categories = {"math": CategoryResult(2, 1.7, 0.55, 61.0, 1.2), "qa": CategoryResult(1, 1.2, 0.2, 50.0, 1.0)}
    conditions = Conditions(0.1, 2, 0.0, 0.01)
    return BenchmarkResult(
        "draft", {"draft": drafter}, 0.1, None, 1, 0.0, 64, 3, "flat", 1, "cpu", Cpu("a processor", [], 1), conditions,
        categories, [],
    )  # fmt: skip


def test_the_benchmarks_page() -> None:
    page = bench_page(result(), ["a & b"], ["draft for TARGET"], EXAMPLE)
    assert ">1.20×</p>" in page and "50.0 tokens/s" in page and "warning: a &amp; b" in page
    assert page.count("<svg") == 2 and "http" not in page.replace("http://www.w3.org", "")
    assert "1.50 tokens per target step, 0.50 without the one that the target adds" in page
    assert re.search(r"math <span class=\"value\">0.55</span>.*?width: 55.00%", page, re.DOTALL)
    published = [row for row in page.split("<tr>") if "arXiv 2411.10666" in row]
    cells = [re.findall(r"<td>([^<]*)</td>", row) for row in published]
    assert [row[1:4] for row in cells] == [["4.36", "draft", "1.50"], ["4.62", "suffix+draft", "-"]]
    assert "other people&#39;s machines" in page
    assert '<del class="rejected">&lt;b&gt;</del>' in page and "<b>" not in page
    assert bench_page(result(), [], [], EXAMPLE) == bench_page(result(), [], [], EXAMPLE), "the same bytes"
    assert "var(--series-1)" in page and "#1f77b4" not in page, "the colours of the page, not matplotlib's"


def test_a_gain_that_was_measured_on_a_busy_machine_is_uncertain() -> None:
    gain = MeasuredGain(2, 1.5, [1.0, 1.05, 1.1], 0.15, 1.2, 1, 1.25)
    quiet, busy = (replace(result(), gain=gain, conditions=Conditions(load, 2, 1.0, 0.01)) for load in (0.1, 9.0))
    assert any(fact.startswith("draft: S = tau /") for fact in bench_facts(quiet, []))
    (line,) = (fact for fact in bench_facts(busy, []) if "best by these rates" in fact)
    assert line.startswith("draft: uncertain, the machine was busy (load average 9.0 on 2 cores): by these times S =")


def test_no_empty_table_of_positions_and_counts_of_one() -> None:
    nothing = result()
    drafter = nothing.drafters["draft"]
    nothing.drafters["draft"] = replace(drafter, statistics=statistics(acceptance_by_position=[], drafted=0))
    tables = {table.title: table.header for table in bench_tables(result())}
    assert tables["decoding"] == ["drafter", "tokens/s", "speed", "tau", "accepted", "lossless"]
    assert tables["acceptance by position"] == ["position", "accepted"] and tables["categories"][3] == "accepted"
    assert "acceptance by position" not in [table.title for table in bench_tables(nothing)]
    facts = bench_facts(replace(nothing, skipped=["3"]), [])
    assert "1 prompt left out: no room for an output in the model's context" in facts
