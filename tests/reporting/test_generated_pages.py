"""The pages that docs/ makes of what is stored elsewhere: the reference of ``results.json``, and the figures."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
from run_directory import results

from peftlab.pipelines.draft import DecodingSpeed, DraftResults
from peftlab.pipelines.finetune import FinetuneResults
from tests.benchmarks import figures
from tests.benchmarks.figures import Figure, ranged

DOCS = Path(__file__).resolve().parents[2] / "docs"


def script(name: str) -> ModuleType:
    """Return a script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


results_page, figures_page = script("results_page"), script("figures_page")


@pytest.mark.parametrize("page", [results_page, figures_page], ids=lambda page: page.__name__)
def test_the_page_is_up_to_date(page: ModuleType) -> None:
    assert page.PAGE.read_text() == page.page(), f"run python docs/{page.__name__}.py"


def test_keys_are_described_once() -> None:
    finetune, draft, decoding = map(results_page.described, (FinetuneResults, DraftResults, DecodingSpeed))
    assert finetune.keys() == {field.name for field in fields(FinetuneResults)}
    assert finetune.keys() | draft.keys() >= {field.name for field in fields(DraftResults)}
    assert not finetune.keys() & draft.keys()
    assert decoding.keys() == {field.name for field in fields(DecodingSpeed)}
    assert results().keys() <= finetune.keys()


def test_figures_begin_with_one_table_and_each_has_its_command() -> None:
    parts = {file.stem: json.loads(file.read_text()) for file in (DOCS / "benchmarks").glob("*.json")}
    text = figures_page.page()
    top = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("| ")][2:]
    assert len(text.splitlines()) < 150 and len(top) == len(parts)
    for name, part in parts.items():
        assert sum(line.startswith(f"| {part['rows'][0]['work']} |") for line in top) == 1
        benchmark = (DOCS.parent / "tests" / "benchmarks" / f"bench_{name}.py").read_text()
        assert f'TITLE = "{part["title"]}"' in benchmark
        for row in part["rows"]:
            assert re.search(rf"python -m tests\.benchmarks {name}( --[\w=-]+)*$", row["command"])
            assert f"`{row['command']}`" in text
            assert row["date"] and row["cpu"] and row["versions"] and row["ratio"] > 0 and row["of"] in figures_page.OF


def test_a_run_replaces_its_own_rows_and_keeps_those_of_another_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    monkeypatch.setattr(figures_page, "FOLDER", tmp_path)
    for name in ("OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["benchmarks"])
    slow, fast = Figure("a merge", "peft", 2.0), Figure("a merge", "peft", 3.0, interval=(2.5, 3.5))
    for cpu, rows in (
        ("A", [slow, Figure("gone", "peft", 1.0)]),
        ("B", [slow]),
        ("A", [fast, ranged("all", "cp", [1.0, 4.0, 2.0], "time")]),
    ):
        monkeypatch.setattr(figures, "short_name", lambda _, cpu=cpu: cpu)
        file = figures.record("merge", "Merging", "A condition.", rows)
    stored = json.loads(file.read_text())["rows"]
    assert [(row["work"], row["cpu"], row["ratio"]) for row in stored] == [
        ("a merge", "A", 3.0),
        ("all", "A", 2.0),
        ("a merge", "B", 2.0),
    ]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    figures.record("merge", "Merging", "A condition.", [Figure("a merge", "copy", 1.5, "time")])
    text = figures_page.page()
    assert (
        "| a merge | peft | 3.00 × as fast (2.50 to 3.50) | 2.00 × as fast | `python -m tests.benchmarks merge` |"
        in text
    )
    assert "| all | cp | 2.00 of the time (1.00 to 4.00) |  | `python -m tests.benchmarks merge` |" in text
    assert "`OMP_NUM_THREADS=1 python -m tests.benchmarks merge` |" in text
