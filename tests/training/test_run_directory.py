"""The directory of a run: what --overwrite spares, one process at a time, and which directory is resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny

from peftlab.cli import app as cli
from peftlab.errors import PeftlabError
from peftlab.files import claimed
from peftlab.pipelines import recipes as pipelines
from peftlab.pipelines.directory import RUN
from peftlab.pipelines.finetune import FinetuneResults
from peftlab.pipelines.recipes import run_recipe
from peftlab.recipe.schema import FinetuneRecipe


def tree(path: Path) -> dict[str, bytes]:
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("where", ["model", "data", "home", "current", "notes", "above"])
def test_overwriting_spares_what_is_no_run(where, model, rows, tmp_path, monkeypatch):
    """Each of these was deleted."""
    home = tmp_path / "home"
    base = tiny.save_model(home / "models" / "bert", layers=1)
    data = tiny.save_rows(home / "rows.csv")
    (home / "work").mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "work")
    if where == "notes":
        tiny.run(tiny.recipe(base, data, home / "run", max_steps=1))
        (home / "run" / "notes.txt").write_text("mine")
    outputs = {"model": base, "data": data.parent, "home": "~", "current": ".", "notes": home / "run", "above": home}
    words = {
        "model": "is or contains the model",
        "data": "is or contains the current directory",
        "home": "is or contains",
        "current": "exists already|is or contains the current directory",
        "notes": r"run contains notes\.txt, which peftlab did not write",
        "above": "is or contains the current directory",
    }
    if where == "current":
        (home / "work" / "thesis.tex").write_text("three years")
    if where == "home":
        outputs["home"] = os.path.expanduser("~")
        monkeypatch.chdir(tmp_path)
    before = tree(home)
    with pytest.raises(PeftlabError, match=words[where]):
        tiny.run(tiny.recipe(base, data, Path(outputs[where])), overwrite=True)
    assert tree(home) == before


def test_a_run_is_overwritten_only_once_the_new_one_fits(model, rows, tmp_path):
    values = tiny.recipe(model, rows, tmp_path / "run", max_steps=1)
    tiny.run(values)
    before = tree(tmp_path / "run")
    with pytest.raises(PeftlabError, match=r"train.max_length is 600"):
        tiny.run({**values, "train": {**values["train"], "max_length": 600}}, overwrite=True)
    assert tree(tmp_path / "run") == before
    tiny.run({**values, "train": {**values["train"], "seed": 4}}, overwrite=True)
    assert tree(tmp_path / "run").keys() == before.keys()
    adapter = "adapter/adapter_model.safetensors"
    assert tree(tmp_path / "run")[adapter] != before[adapter]


@pytest.mark.parametrize("name", ["a #1", "a: b", "[a]", "a \U0001f600"])
def test_the_directory_named_is_the_one_resumed(name, model, rows, tmp_path, monkeypatch):
    """Read as YAML, "a #1" is "a", and the run in it was overwritten."""
    monkeypatch.chdir(tmp_path)
    tiny.run(tiny.recipe(model, rows, Path("a"), max_steps=1))
    tiny.run(tiny.recipe(model, rows, Path(name), max_steps=1, seed=4))
    before = tree(tmp_path / "a")
    (tmp_path / name / "results.json").unlink()
    cli.resume(Path(name))
    assert (tmp_path / name / "results.json").exists()
    assert tree(tmp_path / "a") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["a", name])


def test_a_tilde_is_the_home_directory_in_a_recipe_and_a_name_in_a_command(model, rows, tmp_path, monkeypatch):
    """``peftlab resume '~'`` of a directory of that name trained on and then looked for its model in the home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    tiny.run({**tiny.recipe(model, rows, "~/run", max_steps=1), "merge": True})
    Path("home/run").rename("~")
    results = pipelines.resume("~")
    assert results.merge is not None and Path(tmp_path, "~", "report.html").exists()


def test_a_run_that_is_under_way_is_left_alone(model, rows, tmp_path):
    values = tiny.recipe(model, rows, tmp_path / "run", max_steps=1)
    tiny.run(values)
    before = tree(tmp_path / "run")
    with claimed(tmp_path / "run", RUN, resume=True):
        for options in ({}, {"overwrite": True}, {"resume": True}):
            with pytest.raises(PeftlabError, match="run: another process is writing it"):
                tiny.run(values, **options)
    assert tree(tmp_path / "run") == before


@pytest.mark.slow
def test_of_two_processes_one_works_and_one_is_refused(model, rows, tmp_path):
    values = tiny.recipe(model, rows, tmp_path / "run", max_steps=20, eval_every=20)
    file = tiny.write_recipe(values, tmp_path / "recipe.yaml")
    first = subprocess.Popen(
        [sys.executable, "-m", "peftlab", "run", file], env=tiny.environment(), stdout=subprocess.DEVNULL
    )
    until = time.monotonic() + 120
    while not (tmp_path / "run" / "recipe.yaml").exists() and first.poll() is None and time.monotonic() < until:
        first.send_signal(signal.SIGCONT)
        time.sleep(0.01)
        first.send_signal(signal.SIGSTOP)  # the second comes while the first is alive, however fast it is
    for options in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(PeftlabError, match="run: another process is writing it"):
            tiny.run(values, **options)
    first.send_signal(signal.SIGCONT)
    assert first.wait(300) == 0
    tiny.run({**values, "output_dir": str(tmp_path / "whole")})
    tiny.assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_run_killed_before_its_first_checkpoint(model, rows, tmp_path):
    values = tiny.recipe(model, rows, tmp_path / "run", max_steps=1)
    with claimed(tmp_path / "run", RUN) as claim:
        claim.begin()
        tiny.write_recipe(values, tmp_path / "run" / "recipe.yaml")
    words = r"stopped before its first checkpoint\); `peftlab run .*/run/recipe.yaml --overwrite` starts again"
    with pytest.raises(PeftlabError, match=words):
        cli.resume(tmp_path / "run")
    cli.run(str(tmp_path / "run" / "recipe.yaml"), overwrite=True)
    assert (tmp_path / "run" / "results.json").exists()


def test_results_are_there_before_what_is_only_measured(model, rows, tmp_path, monkeypatch):
    from peftlab.pipelines import finetune

    def fails(*given: object, **named: object) -> None:
        raise MemoryError("two models at once")

    monkeypatch.setattr(finetune, "verify_merge", fails)
    values = tiny.recipe(model, rows, tmp_path / "run", max_steps=1)
    with pytest.raises(MemoryError):
        tiny.run({**values, "merge": True})
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["steps"] == 1 and (tmp_path / "run" / "report.html").exists()
    assert (tmp_path / "run" / "merged" / "config.json").exists()
    monkeypatch.undo()
    tiny.run({**values, "merge": True}, resume=True)
    assert "merge" in json.loads((tmp_path / "run" / "results.json").read_text())


def test_the_file_of_results_contains_the_typed_results(model, rows, tmp_path):
    values = tiny.recipe(model, rows, tmp_path / "run", max_steps=1)
    results = run_recipe(FinetuneRecipe.model_validate({**values, "merge": True}))
    assert isinstance(results, FinetuneResults) and results.merge is not None
    assert json.loads((tmp_path / "run" / "results.json").read_text()) == results.as_json()
    assert "merge" not in tiny.run(values, overwrite=True)
