"""The page of Spec-Bench: what ``draft bench`` wrote becomes its rows."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.benchmarks.compare_spec_bench import DRAFTS, PAGE, Figures, filled
from tests.benchmarks.measure_systems import rows_of_part

NAME = next(iter(DRAFTS))


def result(speed: float, prompts: int = 10) -> dict[str, Any]:
    def of(tau: float, speed: float) -> dict[str, Any]:
        ends = [speed / 1.1, speed * 1.1]
        return {
            "tau": tau, "steps": 100, "tokens_per_second": 50 * speed, "baseline_tokens_per_second": 50.0, "speedup": speed, "speedup_interval": ends, "divergences": [],
        }  # fmt: skip

    drafters = {"draft": of(2.0, speed), "suffix+draft": of(2.5, 2 * speed), "suffix": of(1.25, 1.2)}
    cpu = {"name": "AMD EPYC", "features": ["avx2"], "threads": 2}
    return {
        "drafter": "draft", "drafters": drafters, "prompts": [{}] * prompts, "cpu": cpu, "threads": 2, "kernel": "flat", "measured": "2026-11-28",
    }  # fmt: skip


def test_the_page_has_all_drafts() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page, {}) == page, "run python -m tests.benchmarks.compare_spec_bench --write-only"


def test_times_of_kinds_are_added() -> None:
    fast, slow = (Figures.read(result(speed), "draft") for speed in (2.0, 0.5))
    assert fast.seconds == pytest.approx(2.0) and slow.seconds == pytest.approx(8.0), "200 tokens each"
    both = Figures.together([fast, slow])
    assert both.plain == pytest.approx(4 + 4) and both.speed == pytest.approx(0.8) and both.prompts == 20
    alone = Figures.together([fast])
    assert alone.ends == pytest.approx((2 / 1.1, 2 * 1.1))
    assert both.deviation == pytest.approx(alone.deviation * math.hypot(0.2, 0.8))


def test_kinds_that_are_not_measured_keep_their_figures() -> None:
    page = filled(PAGE.read_text(encoding="utf-8"), {NAME: {"writing": result(1.5), "math": result(1.0)}})
    rows = {row[0]: row[1:] for row in rows_of_part(page, NAME)}
    assert rows["writing"] == [
        "10",
        "2.00",
        "1.50 (1.36 to 1.65)",
        "2.50",
        "3.00 (2.73 to 3.30)",
        "1.20 (1.09 to 1.32)",
    ]
    assert [*rows][-1] == "all" and rows["all"][0] == "20"
    again = filled(page, {NAME: {"writing": result(1.6), "math": result(1.0)}})
    assert {row[0]: row[3] for row in rows_of_part(again, NAME)}["writing"].startswith("1.60")
    assert rows_of_part(again, [*DRAFTS][1]) == rows_of_part(PAGE.read_text(encoding="utf-8"), [*DRAFTS][1])


def test_a_draft_in_an_engine_stands_beside_peftlab() -> None:
    measured = result(1.5, prompts=130)
    unlike = [{"near_tie": True}, {"near_tie": False}, {"near_tie": True}]
    measured["engine"] = {
        "tau": 1.75, "baseline_tokens_per_second": 32.4, "speedup": 1.25, "speedup_interval": [1.0, 1.5], "accepted_share": 0.375,
        "accepted_share_interval": [0.25, 0.5], "divergences": unlike, "version": "0.32.0",
    }  # fmt: skip
    name = "SQL requests, block"
    page = filled(PAGE.read_text(encoding="utf-8"), {}, {name: {"vllm": measured}})
    rows = {tuple(row[:2]): row[2:] for row in rows_of_part(page, "engines")}
    own = ["2.00", "1.50 (1.36 to 1.65)", "3, 2", "0.32.0, AMD EPYC, 2 threads, 2026-11-28"]
    assert rows[name, "vllm"] == ["130", "32, 50", "1.75", "1.25 (1.00 to 1.50)", "0.38 (0.25 to 0.50)", *own]
    assert filled(page, {}) == page, "an engine that is not measured again keeps its row"
