"""The reference of ``results.json``: it is up to date and names every key that a run writes."""

from __future__ import annotations

from pathlib import Path

from run_directory import results

from peftlab.reporting.result_keys import COMMON, DRAFT, FINETUNE, reference_markdown

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "results.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference_markdown(), "run python -m peftlab.reporting.result_keys"


def test_keys_are_described_once() -> None:
    assert not COMMON.keys() & FINETUNE.keys() and not COMMON.keys() & DRAFT.keys()
    assert results().keys() <= COMMON.keys() | FINETUNE.keys()
