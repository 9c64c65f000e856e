"""What is said about the classes of a run, before training and after."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_directory import results, write_run

from peftlab.reporting.cards import CardInfo, adapter_card
from peftlab.reporting.console import print_results
from peftlab.reporting.facts import baseline_remark, class_rows, class_warnings, data_lines
from peftlab.reporting.pages import write_report

SPELLED = {
    "BAD": {"train": 7, "validation": 2},
    "bad": {"train": 1200, "validation": 3},
    "Très bon": {"train": 4, "validation": 0},
    "TRÈS  BON": {"train": 5, "validation": 1},
    "Tre\u0300s bon": {"train": 6, "validation": 1},
    "ok": {"train": 9, "validation": 1},
}


def test_counts_and_warnings_are_printed_before_training() -> None:
    assert data_lines(SPELLED, {"text or label missing": 3}) == [
        "class      train  validation",
        "BAD            7           2",
        "bad        1,200           3",
        "Très bon       4           0",
        "TRÈS BON       5           1",
        "Tre\u0300s bon      6           1",
        "ok             9           1",
        "left out: 3 rows (text or label missing)",
        "warning: fewer than 5 training rows: Très bon (4)",
        "warning: class names that differ only in case or spaces: 'BAD', 'bad'",
        "warning: class names that differ only in case or spaces: 'Très bon', 'TRÈS  BON', 'Tre\u0300s bon'",
    ]


def test_many_classes_are_not_all_printed() -> None:
    many = {f"class {i}": {"train": 1} for i in range(1000)}
    lines = data_lines(many, {})
    assert len(lines) == 1 + 20 + 1 + 1 and lines[21].startswith("and 980 more")
    assert lines[-1].startswith("warning: fewer than 5 training rows: class 0 (1), ") and "980 more" in lines[-1]


def test_regression_and_sound_classes_need_no_word() -> None:
    assert data_lines({}, {}) == []
    assert class_warnings({"a": {"train": 5, "validation": 0}, "b": {"train": 5, "validation": 0}}) == []
    assert class_rows({"a\nb": {"train": 1}}, 5) == [("class", "train"), ("a b", "1")]


def test_a_score_that_equals_the_baseline_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    equal = results(score=0.6838235, classes={"a": {"train": 9}, "b": {"train": 5}})
    remark = baseline_remark(equal)
    assert remark == "The accuracy equals the majority baseline (one answer for all)."
    print_results(equal, "runs/x")
    assert remark in capsys.readouterr().out
    assert remark in write_report(write_run(tmp_path, **equal)).read_text()
    assert baseline_remark(results(classes={"a": {"train": 9}})) is None
    assert baseline_remark(results(metric="pearson", score=0.0, baseline_score=0.0, classes={})) is not None
    assert baseline_remark(results(metric="acceptance", score=0.5, baseline_score=0.5)) is None


def test_report_and_card_show_the_classes(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path, classes={"a<b": {"train": 1234, "validation": 7}, "A<B": {"train": 8}}))
    text = page.read_text()
    assert '<th scope="row">a&lt;b</th><td>1,234</td><td>7</td>' in text
    assert "Class names that differ only in case or spaces" in text
    info = CardInfo(name="x", base_model="b", recipe="r", results=results(classes=SPELLED))
    assert "| bad | 1,200 | 3 |" in adapter_card(info)


BY_CLASS = {
    "bad": {"precision": 0.5, "recall": 0.25, "f1": 1 / 3, "support": 4},
    "fine": {"precision": 0.7, "recall": 0.875, "f1": 0.7777, "support": 1200},
}
HARD = {"row": 3, "text": "<b>so so</b>", "text_pair": None, "label": "bad", "predicted": "fine", "probability": 0.004}


def test_scores_by_class_and_confusion_are_shown_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    classes = {name: {"validation": row["support"]} for name, row in BY_CLASS.items()}
    more = {"by_class": BY_CLASS, "confusion": [[1, 3], [150, 1050]], "hardest": [HARD | {"loss": 5.5}]}
    scores = {"validation": {"accuracy": 0.8872549, "f1": 0.5}}
    more |= {"task": "text/classification", "classes": classes, "metrics": scores, "baseline_metrics": {"f1": 0.4}}
    print_results(results(**more), tmp_path)
    shown = capsys.readouterr().out
    assert "f1, mean over classes (validation)" in shown and "0.5000 (baseline 0.4000)" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert ["bad", "0.5000", "0.2500", "0.3333", "4"] in rows and ["fine", "150", "1,050"] in rows
    write_run(tmp_path / "run", **more)
    page = write_report(tmp_path / "run").read_text()
    assert "&lt;b&gt;so so&lt;/b&gt;" in page and "0.4 %" in page
    assert '--share: 75.0%">3<' in page and '--share: 87.5%">1,050<' in page


def test_a_regression_is_drawn(tmp_path: Path) -> None:
    points = [[x / 10, x / 10 + 0.2] for x in range(50)]
    write_run(tmp_path / "run", metric="pearson", points=points)
    page = write_report(tmp_path / "run").read_text()
    assert "Predictions over labels of 50 examples" in page
