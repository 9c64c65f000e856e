"""The shipped tables: the LoRA row has the settings of the paper and of its authors' scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peftlab.recipe.loading import load_recipe
from peftlab.recipe.schema import FinetuneRecipe, TableRecipe
from peftlab.recipe.table_cells import table_cells


def lora_cells(name: str) -> dict[str, FinetuneRecipe]:
    recipe = load_recipe(name)
    assert isinstance(recipe, TableRecipe) and len(recipe.seeds) == 5
    cells = [cell for cell in table_cells(recipe) if (cell.row, cell.seed) == ("lora", 0)]
    return {cell.task.removeprefix("glue/"): cell.recipe for cell in cells}


@pytest.mark.parametrize("name", ["glue/table", "glue/table-scripts"])
def test_settings(name: str, shared: Path) -> None:
    settings: dict[str, Any] = json.loads((shared / "reference" / "glue_settings.json").read_text())
    scripts = settings["lora_repo_scripts_c4593f0"]["roberta-base"]
    paper = settings["lora_paper_table9"]["roberta-base"]
    theirs = paper if name == "glue/table" else scripts
    batch = paper["bs"]
    if theirs is scripts:
        batch = {task: n * scripts["num_gpus"][task] for task, n in scripts["per_device_bs"].items()}
    cells = lora_cells(name)
    assert set(cells) == set(theirs["lr"])
    for task, recipe in cells.items():
        train = recipe.train
        assert (train.lr, train.epochs, train.batch_size) == (theirs["lr"][task], theirs["epochs"][task], batch[task])
        assert (train.max_length, train.weight_decay) == (theirs["max_len"], theirs.get("weight_decay", 0))
        assert (train.warmup, train.scheduler) == (paper["warmup_ratio"], paper["sched"])
        method = recipe.method.model_dump()
        assert (method["r"], method["lora_alpha"]) == (theirs["r"], theirs["alpha"])
        assert method["target_modules"] == paper["targets"]
        starts = recipe.init_from is not None and recipe.init_from.endswith("cells/mnli-lora-seed0")
        assert starts == (task in scripts["mnli_init"])


def test_the_small_table() -> None:
    recipe = load_recipe("glue/table-minilm", ["data.path=somewhere"])
    assert isinstance(recipe, TableRecipe)
    cells = table_cells(recipe)
    assert len(cells) == 4 * 5 * 3
    assert {cell.recipe.data.path for cell in cells} == {"somewhere"}
    assert {cell.recipe.data.max_train_examples for cell in cells if cell.task == "glue/sst2"} == {4000}
