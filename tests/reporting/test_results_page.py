"""The reference of ``results.json``: it is up to date and describes every key that a run writes, once."""

from __future__ import annotations

import importlib.util
from dataclasses import fields
from pathlib import Path

from run_directory import results

from peftlab.pipelines.draft import DecodingSpeed, DraftResults
from peftlab.pipelines.finetune import FinetuneResults

DOCS = Path(__file__).resolve().parents[2] / "docs"
SPEC = importlib.util.spec_from_file_location("results_page", DOCS / "results_page.py")
results_page = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(results_page)


def test_the_page_is_up_to_date() -> None:
    assert results_page.PAGE.read_text() == results_page.page(), "run python docs/results_page.py"


def test_keys_are_described_once() -> None:
    finetune, draft, decoding = map(results_page.described, (FinetuneResults, DraftResults, DecodingSpeed))
    assert finetune.keys() == {field.name for field in fields(FinetuneResults)}
    assert finetune.keys() | draft.keys() >= {field.name for field in fields(DraftResults)}
    assert not finetune.keys() & draft.keys()
    assert decoding.keys() == {field.name for field in fields(DecodingSpeed)}
    assert results().keys() <= finetune.keys()
