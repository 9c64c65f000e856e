"""The page of learning rates and ranks, and the recipe behind it."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

import peftlab
from peftlab.environment import Cpu
from peftlab.methods.inject import count_parameters
from peftlab.models.load import empty_model
from peftlab.recipe.load import load_recipe, table_cells
from peftlab.recipe.schema import TableRecipe
from tests.benchmarks.compare_rates import DATA, FULL, PAGE, RECIPE, Cell, best_rows, draw, filled, grid
from tests.benchmarks.measure_systems import rows_of_part

recipe = load_recipe(RECIPE)
assert isinstance(recipe, TableRecipe)
RATES = grid(recipe)


def cell(row: str, loss: float, seed: int = 0, seconds: float = 1800.0) -> Cell:
    cpu = Cpu("AMD EPYC", ["avx2"], 2)
    return Cell(row, seed, loss, seconds - 60, seconds, 1500.0, 3_801_600, cpu, "2026-11-27", "torch 2")


def losses(page: str, name: str = "gsm8k") -> dict[str, list[str]]:
    return {row[0].split("`")[1]: row[1:] for row in rows_of_part(page, f"{name} loss")}


def test_attention_and_mlps_train_as_many_parameters() -> None:
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    counts = {}
    for of in table_cells(recipe):
        group = of.row.partition("-")[0]
        if group not in counts:
            model = peftlab.inject(empty_model("LlamaForCausalLM", config), of.recipe.method)
            counts[group] = count_parameters(model)[0]
    assert counts["attention"] == counts["mlp"] == 3_801_600
    assert counts["r256"] == 256 * counts["r1"] and list(counts) == list(RATES)


def test_full_finetuning_has_a_tenth_of_the_rates() -> None:
    ranks = {group: [float(rate) for rate in rates] for group, rates in RATES.items()}
    assert all(rates == ranks["r16"] for group, rates in ranks.items() if group != FULL)
    assert ranks[FULL] == pytest.approx([rate / 10 for rate in ranks["r16"]])
    for of in table_cells(recipe):
        assert of.recipe.train.lr == float(of.row.partition("-")[2])
        assert of.recipe.method.name == FULL or of.recipe.method.lora_alpha == 32


@pytest.mark.parametrize("name", DATA)
def test_the_page_has_all_rows(name: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page, name, RATES, []) == page, "run python -m tests.benchmarks.compare_rates --write-only"


def test_cells_that_are_not_measured_keep_their_figures() -> None:
    page = filled(
        PAGE.read_text(), "gsm8k", RATES, [cell("r16-1e-3", 0.9), cell("r16-3e-3", 0.8), cell("full-1e-4", 0.7)]
    )
    before = losses(page)
    assert before["r16"][1:3] == ["0.900", "0.800"]
    again = [cell("r16-3e-3", loss, seed) for seed, loss in enumerate((0.8, 0.7, 0.9))]
    page = filled(page, "gsm8k", RATES, [*again, cell("r1-3e-3", 0.85)])
    after = losses(page)
    assert after["r16"][1:3] == ["0.900", "0.800 ± 0.100"] and after[FULL] == before[FULL]
    best = {row[0]: row[1:] for row in rows_of_part(page, "gsm8k best")}
    assert best["`full`"][:3] == ["1e-4", "1 ×", "0.700"], "as it was measured the first time"
    assert best["`r16`"] == ["3e-3", "30 ×", "0.800 ± 0.100", "3.80 M", "1740", "1,500"]
    assert dict(rows_of_part(page, "gsm8k differences"))["`r1` minus `r16`"] == "+0.050 (one seed)"
    assert ["GSM8K", "AMD EPYC", "2026-11-27, 2 threads a cell, avx2, torch 2", "4", "4.0"] in rows_of_part(
        page, "where"
    )
    assert losses(page, "alpaca") == losses(PAGE.read_text(), "alpaca")


def test_the_best_rate_has_the_most_seeds() -> None:
    cells = [
        cell("r4-3e-4", 0.5),
        cell("r4-1e-3", 0.6),
        cell("r4-3e-3", 0.7),
        cell("r16-3e-4", 0.1),
        cell("r4-1e-3", 0.4, 1),
    ]
    assert best_rows(cells, "r4", RATES["r4"], 0) == ["r4-3e-4", "r4-1e-3", "r4-3e-3"]
    page = filled(PAGE.read_text(), "alpaca", RATES, cells)
    best = {row[0]: row[1:] for row in rows_of_part(page, "alpaca best")}
    assert best["`r4`"][0] == "1e-3" and best["`r16`"][0] == "3e-4, the end of the grid"
    pairs = [
        cell(f"{group}-1e-3", loss + seed / 10, seed)
        for seed in (0, 1)
        for group, loss in (("attention", 1.5), ("mlp", 1.25))
    ]
    page = filled(PAGE.read_text(), "alpaca", RATES, pairs)
    assert dict(rows_of_part(page, "alpaca differences"))["`attention` minus `mlp`"] == "+0.250 (+0.250 to +0.250)"


def test_the_figure_has_a_curve_for_each_row(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = filled(
        PAGE.read_text(), "gsm8k", RATES, [cell("r16-1e-3", 0.9), cell("r16-3e-3", 0.8), cell("full-1e-4", 0.7)]
    )
    draw(page, RATES, tmp_path / "rates.svg")
    drawn = (tmp_path / "rates.svg").read_text()
    assert all(f">{text}</text>" in drawn for text in ("r16", "full", DATA["gsm8k"], "learning rate"))
