"""``peftlab report A B C``: several runs on one page, in JSON and in the terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from run_directory import PROVENANCE, RECIPE, metric_lines, write_run
from test_pages import Page
from typer.testing import CliRunner

import peftlab
from peftlab.cli.app import app
from peftlab.errors import PeftlabError
from peftlab.reporting.pages import line_plot, usage

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

BITFIT = RECIPE.replace("lora\n  r: 8\n  alpha: 16\n  target_modules: [query, value]", "bitfit").replace("4e-4", "1e-3")


def scores(accuracy: float, loss: float) -> dict[str, Any]:
    found = {"accuracy": accuracy, "loss": loss, "chosen_reward": loss}
    return {"metrics": {"validation": found}, "score": accuracy}


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two runs of one task: the first has the higher accuracy, the second the lower loss."""
    first = write_run(tmp_path / "a" / "lora", last_metrics={"validation": {"accuracy": 0.5}}, **scores(0.9, 0.4))
    second = write_run(tmp_path / "b" / "bitfit", recipe=BITFIT, lines=metric_lines(300), method="bitfit",
                       train_seconds=61.0, **scores(0.8, 0.3))  # fmt: skip
    return [first, second]


def test_the_best_is_marked_by_the_direction_of_each_metric(runs: list[Path], tmp_path: Path) -> None:
    found = peftlab.report(runs, tmp_path / "page.html").comparison
    assert found is not None and [run.name for run in found.runs] == ["lora", "bitfit"]
    assert {figure.name: figure.best for figure in found.scores} == {
        "accuracy (validation)": [0], "loss (validation)": [1], "chosen reward (validation)": [],
    }  # fmt: skip
    changed = {row.key: row.values for row in found.differences}
    assert changed["method.name"] == ["lora", "bitfit"] and changed["train.lr"] == ["0.0004", "0.001"]
    assert "output_dir" not in changed and "task" not in changed and found.notes == []
    page = Page((tmp_path / "page.html").read_text())
    assert page.open == [] and "1 min 1 s" in page.text
    assert [attrs.get("class") for tag, attrs in page.elements if tag == "td"].count("best") == 2
    plots = [attrs["aria-label"] or "" for tag, attrs in page.elements if tag == "svg"]
    assert [label.partition(":")[0] for label in plots] == [
        "Training loss", "Accuracy (validation)", "F1 (validation)", "Loss (validation)", "Learning rate",
    ]  # fmt: skip
    assert all("lora from" in label and "bitfit from" in label for label in plots)


def test_scores_of_different_tasks_have_no_best(runs: list[Path], tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", task="text/choice", **scores(0.7, 0.5))
    found = peftlab.report([*runs, other], tmp_path / "page.html").comparison
    assert found is not None and [figure.best for figure in found.scores] == [[], [], []]
    assert found.notes[0] == "The runs are of different tasks: their scores do not compare."


def test_scores_of_generated_answers_are_compared_too(tmp_path: Path) -> None:
    answers = {"gsm8k": 0.2, "gsm8k_low": 0.1, "gsm8k_high": 0.3, "ended": 1.0, "contexts": 9}
    runs = [
        write_run(tmp_path / "a", generate=answers, **scores(0.9, 0.4)),
        write_run(tmp_path / "b", generate=answers | {"gsm8k": 0.25, "ended": 0.5}, **scores(0.9, 0.4)),
    ]
    found = peftlab.report(runs, tmp_path / "page.html").comparison
    assert found is not None
    figures = {figure.name: (figure.values, figure.best) for figure in found.scores[-2:]}
    assert [*figures.values()] == [([0.2, 0.25], [1]), ([1.0, 0.5], [])]
    assert all(name.endswith(" (generated answers)") for name in figures)


def test_the_verb_prints_tables_and_its_json_is_the_comparison(runs: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "runs.json"
    done = CliRunner().invoke(app, ["report", *map(str, runs), "-o", str(out), "--as", "json"], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.exception
    assert re.search(r"accuracy \(validation\) +0.9000 \* +0.8000", done.stdout)
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if "report:" not in line)
    again = CliRunner().invoke(app, ["report", *map(str, runs), "-o", str(out), "--as", "json", "--json", "-"])
    assert json.loads(again.stdout)["comparison"] == json.loads(out.read_text())


def test_why_scores_may_not_compare_is_said(runs: list[Path], tmp_path: Path) -> None:
    (runs[1] / "provenance.json").write_text(json.dumps({**PROVENANCE, "data_fingerprint": "other", "device": "cpu"}))
    found = peftlab.report(runs, tmp_path / "page.html").comparison
    assert found is not None
    assert [note.partition(":")[0] for note in found.notes] == [
        "The runs were trained or scored on different rows", "The runs were not all on one machine",
    ]  # fmt: skip


def test_drafts_on_the_same_text_are_compared_in_pairs(tmp_path: Path) -> None:
    def run(name: str, rates: list[float], text: str = "a") -> Path:
        held_out = {"text": text, "tokens": [10, 30, 20, 20], "acceptance": rates}
        return write_run(tmp_path / name, held_out=held_out, **scores(0.9, 0.4))

    even, better, mixed = (
        run("kl", [0.5, 0.1, 0.9, 0.4]),
        run("tvd", [0.6, 0.2, 1.0, 0.5]),
        run("ce", [0.9, 0, 0.8, 0.4]),
    )
    found = peftlab.report([even, better, mixed, run("other", [1, 1, 1, 1], "b")], tmp_path / "page.html").comparison
    assert found is not None and len(found.notes) == 2, "none about other text"
    exact = "Acceptance of tvd minus that of kl: +0.100 (+0.100 to +0.100), in pairs on the same 4 held-out texts."
    assert found.notes[0] == exact and exact in Page((tmp_path / "page.html").read_text()).text
    gain, low, high = map(float, re.findall(r"[+-]\d\.\d{3}", found.notes[1]))
    assert gain == pytest.approx((10 * 0.4 - 30 * 0.1 - 20 * 0.1) / 80, abs=1e-3) and low < 0 < high


def test_runs_that_cannot_be_compared_are_refused(runs: list[Path], tmp_path: Path) -> None:
    for given, form, said in (
        ([runs[0], runs[0]], "html", "named twice"),
        ([runs[0], tmp_path], "html", "no finished run here"),
        (runs, "peft", "the format of one run"),
    ):
        with pytest.raises(PeftlabError, match=said):
            peftlab.report(given, tmp_path / "x", form)
    assert not (tmp_path / "x").exists()


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / seed / "run") for seed in ("seed-0", "seed-1")]
    found = peftlab.report(runs, tmp_path / "page.html").comparison
    assert found is not None and [run.name for run in found.runs] == ["seed-0/run", "seed-1/run"]
    assert all(figure.best == [] for figure in found.scores), "of equal scores none is the best"


def test_curves_that_coincide_are_both_seen() -> None:
    from peftlab.reporting.pages import Curve, Line

    curve = Curve()
    for step in range(100):
        curve.add(step, 0.5)
    (plot,) = line_plot("Both", [Line("a", curve), Line("b", curve)], salt="x")
    drawn = [path for path in re.findall(r"<path [^>]*>", plot.svg) if "--series-" in path]
    assert ["stroke-dasharray" in path for path in drawn] == [False, True]


def test_a_metric_beyond_one_has_a_plot_of_its_own(tmp_path: Path) -> None:
    lines = [
        json.dumps({"step": step, "split": "validation", "eval": {"perplexity": 40.0 - step, "bits_per_byte": 0.9}})
        for step in (1, 2)
    ]
    path = peftlab.report(write_run(tmp_path / "run", lines=lines), tmp_path / "page.html").out
    labels = [attrs["aria-label"] or "" for tag, attrs in Page(path.read_text()).elements if tag == "svg"]
    assert [label.partition(":")[0] for label in labels] == ["Evaluation", "Perplexity"]


@pytest.mark.parametrize(
    ("recipe", "shell", "python"),
    [
        ({"task": "text/classification", "data": {"text": ["body"]}}, "predict 'a run' new.csv", '["a text"]'),
        ({"task": "glue/mrpc", "data": {"text": None}}, "predict 'a run' new.csv", '[("a text", "its pair")]'),
        ({"task": "text/choice"}, "predict 'a run' new.csv", '["an answer", "another"]'),
        ({"task": "text/chat"}, "generate --target 'a run' --chat", "chat=True"),
        ({"task": "text/plain"}, "generate --target 'a run' --prompt", 'generate("a run", "Once upon a time")'),
        ({"kind": "draft", "target": "T"}, "generate --target T --draft 'a run'", '"Once upon a time", "a run")'),
    ],
    ids=lambda value: str(value.get("task", "draft")) if isinstance(value, dict) else "",
)
def test_the_lines_that_use_a_run_are_its_tasks(recipe: dict[str, Any], shell: str, python: str) -> None:
    lines = usage({"output_dir": "a run", **recipe})
    assert shell in lines["sh"] and python in lines["python"]
    compile(lines["python"], "usage", "exec")


def test_the_page_says_how_the_run_is_used_and_names_scores_once(tmp_path: Path) -> None:
    values = {"last_metrics": {"validation": {"accuracy": 0.5}}, "total_seconds": 200.0, **scores(0.9, 0.4)}
    values["cpu"] = {"name": "A chip", "features": ["avx2"], "threads": 2}
    page = Page(peftlab.report(write_run(tmp_path / "run", **values), tmp_path / "page.html").out.read_text())
    assert "peftlab predict runs/mrpc-lora new.csv -o labelled.csv" in "".join(page.texts["pre"])
    assert 'peftlab.predict("runs/mrpc-lora", [("a text", "its pair")])' in "".join(page.texts["pre"])
    for shown in ("3 min 20 s", "A chip, 2 threads", "accuracy (validation)"):
        assert shown in page.text
    assert "last metrics" not in page.text and " / " not in page.text.partition("Provenance")[0]
