"""``peftlab validate --show``: examples as the model reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_cli import peftlab, refused

STORIES = Path(__file__).resolve().parents[3] / "shared" / "data" / "weights" / "stories260K-hf"


@pytest.mark.skipif(not STORIES.is_dir(), reason="no shared data beside the checkout")
def test_trained_parts_are_marked(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"Tom has {n} dogs", "completion": " and a cat"} for n in range(4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {STORIES}\ntask: text/completion\ndata: {{path: {file}, validation: 1}}\noutput_dir: {tmp_path}/out\n"
    )
    done = peftlab("validate", str(recipe), "--show", "2")
    assert done.returncode == 0, done.stderr
    shown = done.stdout.partition("example 1")[2]
    assert (
        shown.count("\u00ab") == 2
        and "and a cat" in shown.split("\u00ab")[1]
        and "Tom has" not in shown.split("\u00ab")[1].split("\u00bb")[0]
    )
    assert "kind draft" in refused("validate", "draft/ci", f"target={STORIES}", "--show", "1")


@pytest.mark.skipif(not STORIES.is_dir(), reason="no shared data beside the checkout")
def test_both_answers_of_a_pair_are_shown(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"Tom has {n} dogs", "chosen": " and a cat", "rejected": " or none"} for n in range(4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {STORIES}\ntask: text/preference\ndata: {{path: {file}, validation: 1}}\noutput_dir: {tmp_path}/out\n"
    )
    done = peftlab("validate", str(recipe), "--show", "1")
    assert done.returncode == 0, done.stderr
    assert "beta: 0.1" in done.stdout, "the objective has its default"
    lines = done.stdout.partition("example 1, chosen")[2].splitlines()
    assert lines[2] == "example 1, rejected" and len(lines) == 4
    for line, answer in ((lines[1], "and a cat"), (lines[3], "or none")):
        prompt, _, trained = line.partition("\u00ab")
        assert "dogs" in prompt and answer not in prompt and trained.startswith(f" {answer}".removeprefix(" "))
