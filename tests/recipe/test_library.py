"""The shipped recipes: each is valid, introduces itself, and the paper's settings are the paper's."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from peftlab.errors import PeftlabError
from peftlab.recipe import library
from peftlab.recipe.load import load_recipe, override, read_source
from peftlab.tasks.table import TASKS

NAMES = list(library.files())


def test_there_is_one_for_every_glue_task_that_trains() -> None:
    tasks = {name for name, task in TASKS.items() if task.glue and task.trainable}
    assert {f"glue/{name.removeprefix('glue/')}-lora" for name in tasks} <= set(NAMES)
    assert {"quickstart", "text-classification"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_recipe_and_the_commands_in_its_header(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.output_dir.startswith("runs/")
    lines = library.find(name).read_text(encoding="utf-8").splitlines()
    assert re.fullmatch(r"# [A-Z].*\.", lines[0])
    commands = [line.split("peftlab run ")[1] for line in lines if line.startswith("#   peftlab run ")]
    assert any(" " in command for command in commands), "an example with an override"
    for command in commands:
        target, *overrides = shlex.split(command)
        assert target == name
        load_recipe(name, overrides)


def test_glue_settings_are_the_papers(shared: Path) -> None:
    settings = json.loads((shared / "reference" / "glue_settings.json").read_text())
    paper = settings["lora_paper_table9"]["roberta-base"]
    for task in [*paper["lr"], "wnli"]:
        recipe = load_recipe(f"glue/{task}-lora")
        row = "rte" if task == "wnli" else task
        train, method = recipe.train, recipe.method
        assert recipe.task == f"glue/{task}"
        assert (train.epochs, train.batch_size) == (paper["epochs"][row], paper["bs"][row])
        assert (train.lr, train.warmup) == (paper["lr"][row], paper["warmup_ratio"])
        assert (train.max_length, train.scheduler) == (paper["max_len"], paper["sched"])
        assert (method.r, method.lora_alpha, method.target_modules) == (
            paper["r"],
            paper["alpha"],
            paper["targets"],
        )


def test_find_and_shipped() -> None:
    assert library.find("glue/cola-lora.yaml") == library.find("glue/cola-lora")
    assert dict(library.shipped())["glue/cola-lora"].startswith("LoRA on RoBERTa-base for GLUE CoLA")
    with pytest.raises(PeftlabError, match=r"no shipped recipe 'glue/cola' \(did you mean 'glue/cola-lora'\?\)"):
        library.find("glue/cola")
    with pytest.raises(PeftlabError, match="no shipped recipe"):
        library.find("../pyproject")


def test_copy_never_overwrites(tmp_path: Path) -> None:
    copied = library.copy("quickstart", tmp_path)
    assert copied == tmp_path / "quickstart.yaml"
    assert copied.read_bytes() == library.find("quickstart").read_bytes()
    copied.write_text("mine")
    with pytest.raises(PeftlabError, match="exists already"):
        library.copy("quickstart", copied)
    assert copied.read_text() == "mine"
    assert library.copy("quickstart", f"{tmp_path}/made/") == tmp_path / "made" / copied.name
    assert load_recipe(library.copy("glue/rte-lora", tmp_path / "new" / "a.yaml")) == load_recipe("glue/rte-lora")


def test_a_file_here_wins_over_a_shipped_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    library.copy("glue/rte-lora", "quickstart.yaml")
    assert load_recipe("quickstart.yaml").task == "glue/rte"
    assert load_recipe("quickstart").task == "text/classification"


def test_listing_imports_nothing_heavy() -> None:
    code = "import sys; from peftlab.recipe.library import shipped; assert shipped();"
    code += "print(sorted({'torch', 'pydantic', 'ruamel.yaml', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", NAMES)
def test_every_key_can_be_removed_by_an_override(name: str) -> None:
    source = read_source(library.find(name))
    for key in list(source.data):
        override(source, f"~{key}")
    assert source.data == {} and source.problems == []
