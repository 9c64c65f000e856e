"""A run's report: complete, offline, escaped, bounded; and what is said of classes there and elsewhere."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from run_directory import PROVENANCE, RECIPE, metric_lines, results, write_run

from peftlab.errors import PeftlabError
from peftlab.reporting.facts import (
    CardInfo,
    adapter_card,
    baseline_remark,
    class_rows,
    class_warnings,
    data_lines,
    print_results,
)
from peftlab.reporting.pages import MAX_POINTS, write_report

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

VOID = {"meta", "link", "br", "hr", "img", "input"}
LOADING = {"src", "href", "xlink:href", "srcset", "action", "data", "poster"}


class Page(HTMLParser):
    """Checks nesting while parsing and keeps tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    @property
    def text(self) -> str:
        """All text but the style sheet's."""
        return " ".join(" ".join(part) for tag, part in self.texts.items() if tag != "style")


def report(run: Path) -> tuple[str, Page]:
    path = write_report(run)
    assert path == run / "report.html"
    text = path.read_text(encoding="utf-8")
    return text, Page(text)


def test_it_shows_the_run(tmp_path: Path) -> None:
    _, page = report(write_run(tmp_path))
    assert page.open == []
    for shown in (
        "glue/mrpc",
        "FacebookAI/roberta-base",
        "0.8873",
        "majority baseline",
        "0.6838",
        "+0.2034",
        "887,042 of 125,534,212 trained (0.707 %)",
        "3 min 14 s, 6,043 tokens/s",
        "2.4 GB of memory",
        "logits within 2.9e-06",
        PROVENANCE["git"]["sha"],
        "3 left out",
    ):
        assert shown in page.text, shown
    assert RECIPE.strip() in "".join(page.texts["pre"])


def test_score_and_baseline_are_bars_on_one_scale(tmp_path: Path) -> None:
    _, page = report(write_run(tmp_path))
    widths = {
        attrs["class"]: re.search(r"width: ([\d.]+)%", attrs["style"] or "")[1]
        for tag, attrs in page.elements
        if tag == "span" and "fill" in (attrs.get("class") or "")
    }
    assert widths == {"fill-score": "88.73", "fill-baseline": "68.38"}


def test_nothing_is_loaded_from_outside(tmp_path: Path) -> None:
    text, page = report(write_run(tmp_path))
    loaded = [attrs[name] for _, attrs in page.elements for name in LOADING & attrs.keys()]
    assert loaded and all((reference or "").startswith("#") for reference in loaded)
    assert {tag for tag, _ in page.elements}.isdisjoint({"script", "link", "iframe", "object", "img"})
    assert "@import" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))


def test_plots_are_named_and_their_ids_unique(tmp_path: Path) -> None:
    _, page = report(write_run(tmp_path))
    plots = [attrs for tag, attrs in page.elements if tag == "svg"]
    assert [attrs["role"] for attrs in plots] == ["img"] * 3
    labels = [attrs["aria-label"] or "" for attrs in plots]
    assert labels[0].startswith("Loss: training loss from 0.7")
    assert "majority baseline 0.6838" in labels[1]
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    references = {attrs["xlink:href"] for _, attrs in page.elements if "xlink:href" in attrs}
    assert references <= {f"#{name}" for name in ids}


def test_what_people_wrote_is_escaped(tmp_path: Path) -> None:
    attack = '<script>alert("x")</script>'
    recipe = RECIPE.replace("FacebookAI/roberta-base", f"'{attack}'") + f"# {attack}</pre>\n"
    lines = [json.dumps({"step": 1, "split": attack, "eval": {'"><b onload=x>': 0.5}})]
    text, page = report(write_run(tmp_path, recipe=recipe, lines=lines, task=attack, metrics={attack: 0.5}))
    assert "script" not in {tag for tag, _ in page.elements}
    assert not any("onload" in attrs for _, attrs in page.elements)
    assert attack not in text
    assert attack in "".join(page.texts["h1"])


def test_a_long_run_is_thinned_and_its_damage_told(tmp_path: Path) -> None:
    lines = metric_lines(200_000, every=1, eval_every=100)
    lines[-1] = lines[-1][:25]
    text, page = report(write_run(tmp_path, lines=lines))
    for path in re.findall(r'<path d="([^"]*)"', text):
        assert len(re.findall("[MLC]", path)) <= 2 * MAX_POINTS + 3
    assert len(text) < 400_000
    assert f"1 of {len(lines):,}" in page.text
    assert "means of up to 512 points" in page.text


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    first, _ = report(write_run(tmp_path / "a"))
    second, _ = report(write_run(tmp_path / "b"))
    assert first == second


@pytest.mark.parametrize("score", [-0.2, 0.0, float("nan"), 3.5])
def test_any_score_is_drawn_inside_its_track(tmp_path: Path, score: float) -> None:
    text, _ = report(write_run(tmp_path, metric="matthews_correlation", score=score, baseline_score=0.0))
    for left, width in re.findall(r"left: ([\d.]+)%; width: ([\d.]+)%", text):
        assert float(left) + float(width) <= 100.01


def test_absent_parts_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path, lines=[""], merge=None, baseline_score=None, best_step=None, metrics={})
    _, page = report(run)
    assert "svg" not in {tag for tag, _ in page.elements}
    for absent in ("Merge verification", "baseline", "best step", "could not be read", "none"):
        assert absent not in page.text


@pytest.mark.parametrize("name", ["recipe.yaml", "provenance.json", "results.json", "metrics.jsonl"])
def test_a_missing_file_is_named_and_nothing_written(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path)
    (run / name).unlink()
    with pytest.raises(PeftlabError, match=f"{re.escape(name)}: no such file"):
        write_report(run)
    assert not (run / "report.html").exists()


def test_results_without_a_score_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    (run / "results.json").write_text('{"task": "glue/mrpc", "method": "lora"}')
    with pytest.raises(PeftlabError, match=r"results\.json: no metric, score"):
        write_report(run)


@pytest.mark.parametrize("module", ["jinja2", "matplotlib"])
def test_without_the_extra_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(PeftlabError, match=rf"{module}: pip install peftlab\[report\]"):
        write_report(write_run(tmp_path))


# The classes of a run, before training and after

SPELLED = {
    "BAD": {"train": 7, "validation": 2},
    "bad": {"train": 1200, "validation": 3},
    "Très bon": {"train": 4, "validation": 0},
    "TRÈS  BON": {"train": 5, "validation": 1},
    "Tre\u0300s bon": {"train": 6, "validation": 1},
    "ok": {"train": 9, "validation": 1},
}


def test_counts_and_warnings_are_printed_before_training() -> None:
    assert data_lines(SPELLED, {"text or label missing": 3}, {}, {}, 128) == [
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
    lines = data_lines(many, {}, {}, {}, 128)
    assert len(lines) == 1 + 20 + 1 + 1 and lines[21].startswith("and 980 more")
    assert lines[-1].startswith("warning: fewer than 5 training rows: class 0 (1), ") and "980 more" in lines[-1]


def test_regression_and_sound_classes_need_no_word() -> None:
    assert data_lines({}, {}, {}, {}, 128) == []
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
    classes = {name: {"validation": row["support"]} for name, row in [*BY_CLASS.items(), ("odd", BY_CLASS["bad"])]}
    more = {"by_class": BY_CLASS | {"odd": BY_CLASS["bad"]}, "hardest": [HARD | {"loss": 5.5}]}
    more |= {"confusion": [[1, 3, 0], [150, 1050, 0], [4, 0, 0]]}
    scores = {"validation": {"accuracy": 0.8872549, "f1": 0.5}}
    more |= {"task": "text/classification", "classes": classes, "metrics": scores, "baseline_metrics": {"f1": 0.4}}
    print_results(results(**more), tmp_path)
    shown = capsys.readouterr().out
    assert "f1 0.5000" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert ["bad", "0.5000", "0.2500", "0.3333", "4"] in rows and ["fine", "150", "1,050", "0"] in rows
    write_run(tmp_path / "run", **more)
    page = write_report(tmp_path / "run").read_text()
    assert "&lt;b&gt;so so&lt;/b&gt;" in page and "0.4 %" in page
    assert (
        '<tr><th scope="row">f1, mean over classes (validation)</th><td>0.5000</td><td></td><td>0.4000</td></tr>'
        in page
    )
    assert '--share: 75.0%">3<' in page and '--share: 87.5%">1,050<' in page


def test_a_regression_is_drawn(tmp_path: Path) -> None:
    points = [[x / 10, x / 10 + 0.2] for x in range(50)]
    write_run(tmp_path / "run", metric="pearson", points=points)
    page = write_report(tmp_path / "run").read_text()
    assert "Predictions over labels of 50 examples" in page
