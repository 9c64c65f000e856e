"""The templates of clusters' jobs: what each job runs, what its jobs give together, and what the clusters' tools say."""

from __future__ import annotations

import csv
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

from peftlab.cli.app import app
from peftlab.errors import PeftlabError
from peftlab.files import read_object
from peftlab.pipelines.table import Shard
from peftlab.recipe import library
from peftlab.recipe.load import Cell, load_recipe, table_cells
from peftlab.recipe.schema import TableRecipe
from tests.training.tiny import write_recipe

TEMPLATES = library.templates()
Script = Callable[..., list[str]]


def read(name: str) -> Any:
    return YAML(typ="safe").load(TEMPLATES[name])


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Run a script with variables where ``peftlab`` only notes its arguments, and return those."""
    programs, noted = tmp_path / "programs", tmp_path / "noted"
    programs.mkdir()
    (programs / "peftlab").write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" > '{noted}'\n")
    (programs / "peftlab").chmod(0o755)

    def arguments(*command: object, **variables: str) -> list[str]:
        noted.unlink(missing_ok=True)
        path = os.pathsep.join([str(programs), os.environ["PATH"]])
        subprocess.run([*map(str, command)], env={**os.environ, **variables, "PATH": path}, check=True)
        return noted.read_text().split("\0")[:-1]

    return arguments


def slurm(script: Script, index: int, count: int, *arguments: str) -> list[str]:
    """Return the arguments of peftlab in a job of a Slurm array."""
    variables = {"SLURM_ARRAY_TASK_ID": str(index), "SLURM_ARRAY_TASK_COUNT": str(count), "SLURM_CPUS_PER_TASK": "1"}
    return script("bash", TEMPLATES["launch/slurm.sbatch"], *arguments, **variables)


def skypilot(script: Script, index: int, count: int) -> list[str]:
    task = read("launch/skypilot.yaml")
    variables = {"SKYPILOT_NODE_RANK": str(index), "SKYPILOT_NUM_NODES": str(count), **task["envs"]}
    return script("bash", "-c", task["run"], **variables)


def kubernetes(index: int) -> list[str]:
    """Return the arguments in a pod of the Job: ``$(NAME)`` is a variable's value, as Kubernetes replaces it."""
    (container,) = read("launch/kubernetes.yaml")["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["peftlab"]
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    return [expanded(text, {**variables, "JOB_COMPLETION_INDEX": str(index)}) for text in container["args"]]


def expanded(text: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], text)


def jobs(name: str, script: Script) -> list[list[str]]:
    """Return peftlab's arguments in each job of a template as it is shipped."""
    if name == "launch/slurm.sbatch":
        (last,) = re.findall(r"^#SBATCH --array=0-(\d+)$", TEMPLATES[name].read_text(), re.M)
        return [slurm(script, i, int(last) + 1) for i in range(int(last) + 1)]
    if name == "launch/skypilot.yaml":
        nodes = read(name)["num_nodes"]
        return [skypilot(script, i, nodes) for i in range(nodes)]
    return [kubernetes(i) for i in range(read(name)["spec"]["completions"])]


@pytest.fixture(scope="module")
def shipped() -> list[Cell]:
    """The cells of the table that the templates run."""
    recipe = load_recipe("glue/table")
    assert isinstance(recipe, TableRecipe)
    return table_cells(recipe)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_jobs_of_a_template_run_each_cell_once(name: str, script: Script, shipped: list[Cell]) -> None:
    run: list[Cell] = []
    for verb, recipe, *overrides, option, shard in jobs(name, script):
        assert (verb, recipe, option) == ("run", "glue/table", "--shard")
        assert {override.partition("=")[0] for override in overrides} <= {"output_dir"}
        run += Shard.read(shard).part(shipped)
    assert set(run) == set(shipped) and len(run) == len(shipped)


def outcome(directory: Path) -> dict[str, object]:
    """Return what parts and one run must agree on: adapters byte for byte, all scores, the table's means."""
    cells = sorted((directory / "cells").glob("*/results.json"))
    results = {cell.parent.name: read_object(cell) for cell in cells}
    lines = csv.DictReader((directory / "table.csv").read_text().splitlines())
    return {
        "scores": {name: (found["score"], found["metrics"], found["last_metrics"]) for name, found in results.items()},
        "adapters": {
            cell.parent.name: (cell.parent / "adapter/adapter_model.safetensors").read_bytes() for cell in cells
        },
        "table": [(line["task"], line["row"], line["n"], line["best_mean"], line["last_mean"]) for line in lines],
    }


@pytest.mark.long  # parts of a table as such: test_table_run.py
@pytest.mark.parametrize("sweep", [False, True], ids=["table", "sweep"])
def test_two_jobs_of_an_array_give_what_one_run_gives(
    sweep: bool, script: Script, values: dict[str, Any], tmp_path: Path
) -> None:
    if sweep:
        run = {**values, "kind": "finetune", "task": "glue/cola", "method": {"name": "lora", "r": 2}}
        values = {key: value for key, value in run.items() if key not in ("tasks", "rows")}
    recipe, axes = str(write_recipe(values, tmp_path / "my.yaml")), ["sweep.lr=[0.05, 0.02]", "sweep.r=[2]"] * sweep

    def run_in(place: str, *arguments: str) -> None:
        done = CliRunner().invoke(app, list(arguments))
        assert done.exit_code == 0, f"{place}: {done.output}"

    for index in range(2):
        run_in("parts", *slurm(script, index, 2, recipe, f"output_dir={tmp_path / 'parts'}", *axes))
        lines = (tmp_path / f"parts{'-sweep' * sweep}" / "table.csv").read_text().splitlines()
        assert len(lines) > 1, "each part writes the table"
    run_in("one", "run", recipe, f"output_dir={tmp_path / 'one'}", *axes)
    one, parts = (outcome(tmp_path / f"{name}{'-sweep' * sweep}") for name in ("one", "parts"))
    assert one == parts and len(one["adapters"]) == (2 if sweep else 4)  # type: ignore[arg-type]


def test_a_part_that_an_array_does_not_have_is_refused(script: Script) -> None:
    """An array that does not begin with 0, or one of its jobs submitted alone."""
    arguments = slurm(script, 4, 4)
    with pytest.raises(PeftlabError, match="write I/N, part I of N, with I from 0"):
        Shard.read(arguments[-1])


def test_slurm_is_told_what_bash_can_read() -> None:
    file = TEMPLATES["launch/slurm.sbatch"]
    subprocess.run(["bash", "-n", str(file)], check=True)
    lines = file.read_text().splitlines()
    commands = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not [line for line in lines[commands:] if line.startswith("#SBATCH")], "Slurm reads none after a command"


def test_kubernetes_accepts_the_job() -> None:
    validator = pytest.importorskip("kubernetes_validate")
    job = read("launch/kubernetes.yaml")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    shards = next(entry["value"] for entry in container["env"] if entry["name"] == "SHARDS")
    assert shards == str(job["spec"]["completions"]) and job["spec"]["completionMode"] == "Indexed"
    validator.validate(job, validator.latest_version(), strict=True)
    job["spec"]["completion"] = 3
    with pytest.raises(validator.ValidationError):
        validator.validate(job, validator.latest_version(), strict=True)


def test_skypilot_accepts_the_task() -> None:
    """All of it by SkyPilot's schemas, and as a task but for the accelerator, whose names it fetches."""
    sky = pytest.importorskip("sky")
    schemas, check = pytest.importorskip("sky.utils.schemas"), pytest.importorskip("jsonschema").validate
    config = read("launch/skypilot.yaml")
    check(config, schemas.get_task_schema())
    check(config["resources"], schemas.get_resources_schema())
    del config["resources"]["accelerators"]
    task = sky.Task.from_yaml_config(config)
    task.validate()
    assert task.num_nodes == 4 and task.volumes == {"/results": "peftlab"}


def test_templates_are_no_recipes_and_can_be_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert set(TEMPLATES) == {"launch/kubernetes.yaml", "launch/skypilot.yaml", "launch/slurm.sbatch"}
    assert not [name for name in library.files() if name.startswith("launch")]
    with pytest.raises(PeftlabError, match="no shipped recipe of that name"):
        load_recipe("launch/kubernetes")
    for name, file in TEMPLATES.items():
        done = CliRunner().invoke(app, ["recipes", "copy", name])
        assert done.output.strip() == file.name and Path(file.name).read_bytes() == file.read_bytes()
    done = CliRunner().invoke(app, ["recipes", "copy", "launch/slurm"])
    assert "did you mean 'launch/slurm.sbatch'" in str(done.exception)
