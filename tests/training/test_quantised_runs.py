"""Runs on a base in 4 or 8 bits, and what becomes of them when they are merged, in the run and by the command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from peftlab.checkpoints.adapter import load_adapter
from peftlab.checkpoints.merge_plan import MergeOptions
from peftlab.checkpoints.quantised import nf4_values
from peftlab.cli.app import app
from peftlab.errors import PeftlabError
from peftlab.models.config import BaseConfig
from peftlab.models.load import load_base
from peftlab.pipelines.merge import Combining, run_merge
from peftlab.pipelines.recipes import run

pytest.importorskip("bitsandbytes")
STORIES = Path(__file__).resolve().parents[3] / "shared" / "data" / "weights" / "stories260K-hf"
pytestmark = [
    pytest.mark.skipif(not STORIES.is_dir(), reason="no shared data beside the checkout"),
    pytest.mark.filterwarnings("ignore"),
]
NAMES = ["Tom", "Lily", "Max", "Anna", "Ben", "Sue", "Tim", "Mia"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("quantised")
    rows = [{"prompt": f"{name} saw a {thing}.", "completion": " It was red." * (1 + i % 3)}
            for i, name in enumerate(NAMES) for thing in ("dog", "cat", "car", "bird")]  # fmt: skip
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = place / "recipe.yaml"
    file.write_text(
        f"model: {STORIES}\nbase: {{dtype: nf4, double_quant: true}}\ntask: text/completion\n"
        f"data: {{path: {place / 'rows.jsonl'}, validation: 8}}\n"
        "method: {name: lora, r: 4, target_modules: all-linear}\n"
        "train: {max_steps: 8, batch_size: 6, max_length: 64, lr: 5e-3, eval_every: 4}\n"
        f"output_dir: {place / 'run'}\n"
    )
    return file


@pytest.fixture(scope="module")
def finished(recipe: Path) -> Path:
    run(recipe)
    return recipe.parent / "run"


def merged(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["merge", *map(str, arguments)])
    return result.exit_code, f"{result.output}{result.exception or ''}"


def test_a_run_says_what_its_merges_cost(finished: Path) -> None:
    results = json.loads((finished / "results.json").read_text())
    losses = results["merge_losses"]
    assert losses["live"] == pytest.approx(results["score"], rel=1e-4)
    assert losses["dequantised"] == pytest.approx(losses["live"], rel=1e-4), "live and merged are one model in fp32"
    assert abs(losses["original"] - losses["live"]) > 1e-3
    assert results["merge"]["max_logit_difference"] < 1e-3 and results["merge"]["argmax_agreement"] == 1
    assert json.loads((finished / "merged" / "merge.json").read_text())["into"] == "dequantised"
    text = (finished / "report.html").read_text()
    assert "dequantised" in text and "original" in text
    assert not [path.name for path in finished.iterdir() if "other" in path.name], "the other merge was left behind"


def test_weights_are_the_sum_of_what_the_run_computed_with(finished: Path) -> None:
    base = BaseConfig(dtype="nf4", double_quant=True)
    live, _ = load_base(str(STORIES), "AutoModelForCausalLM", quantised=base)
    load_adapter(live, finished / "adapter")
    values = load_file(finished / "merged" / "model.safetensors")
    stored = load_file(STORIES / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    leaf = live.get_submodule(name)
    a, b = (load_file(finished / "adapter" / "adapter_model.safetensors")[
        f"base_model.model.{name}.lora_{factor}.weight"].double() for factor in "AB")  # fmt: skip
    config = json.loads((finished / "adapter" / "adapter_config.json").read_text())
    exact = nf4_values(stored[f"{name}.weight"], double=True, dtype=torch.float32).double()
    exact += config["lora_alpha"] / config["r"] * b @ a
    torch.testing.assert_close(values[f"{name}.weight"].double(), exact, rtol=1e-6, atol=1e-6)
    inputs = torch.eye(leaf.in_features).requires_grad_()
    torch.testing.assert_close(leaf(inputs).t(), exact.float(), rtol=1e-4, atol=1e-5)


def test_the_command_merges_either_way(finished: Path, tmp_path: Path) -> None:
    code, output = merged(finished, "-o", tmp_path / "default")
    assert code == 0 and "trained on a base in nf4 with double quantisation" in output
    assert "max logit difference" in output  # a run is compared, live in 4 bits
    code, output = merged(finished / "adapter", "-o", tmp_path / "original", "--into", "original", "--no-verify")
    assert code == 0 and "added to the original weights" in output
    files = [load_file(place / "model.safetensors") for place in (finished / "merged", tmp_path / "default")]
    assert all(torch.equal(files[0][key], files[1][key]) for key in files[0])
    plain, original = load_file(STORIES / "model.safetensors"), load_file(tmp_path / "original" / "model.safetensors")
    untouched = "model.layers.0.input_layernorm.weight"
    assert torch.equal(plain[untouched], original[untouched])
    assert json.loads((tmp_path / "original" / "merge.json").read_text())["into"] == "original"
    code, output = merged(finished, "-o", tmp_path / "x", "--into", "quantised")
    assert code == 2 and not (tmp_path / "x").exists()
    code, output = merged(finished, "-o", tmp_path / "x", "--dequantize")
    assert code == 2 and "--dequantize" in output


def test_the_command_stores_fp8(finished: Path, tmp_path: Path) -> None:
    code, output = merged(finished, "-o", tmp_path / "fp8", "--dtype", "fp8")
    assert code == 0 and "kept" in output and "fp8 keeps" in output
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    assert tensors["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    report = json.loads((tmp_path / "fp8" / "merge.json").read_text())
    assert 0.5 < report["kept"] < 1.5 and report["into"] == "dequantised"
    code, output = merged(finished, "-o", tmp_path / "x", "--dtype", "fp88")
    assert code and "did you mean 'fp8'" in output and not (tmp_path / "x").exists()


def test_another_base_is_noticed(finished: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(STORIES, other)
    model, _ = load_base(str(other), "AutoModelForCausalLM")
    with torch.no_grad():
        model.get_submodule("model.layers.0.self_attn.q_proj").weight[0] *= -1
    model.save_pretrained(other)
    with pytest.raises(PeftlabError, match="does not have the codes that it had in training"):
        run_merge([str(finished)], str(other), tmp_path / "merged", MergeOptions(), Combining())
    assert not (tmp_path / "merged").exists()


def test_a_recipe_may_ask_for_the_original_and_for_bf16_products(recipe: Path, tmp_path: Path) -> None:
    """The codes are those of the stored weights, whatever precision computes with them."""
    run(recipe, [f"output_dir={tmp_path / 'run'}", "merge.into=original", "train.precision=bf16", "train.max_steps=4"])
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert json.loads((tmp_path / "run" / "merged" / "merge.json").read_text())["into"] == "original"
    losses = results["merge_losses"]
    assert losses["dequantised"] == pytest.approx(losses["live"], abs=0.05)
    assert results["merge"]["max_logit_difference"] > 1e-2


def test_a_run_in_8_bits(recipe: Path, tmp_path: Path) -> None:
    run(recipe, [f"output_dir={tmp_path / 'run'}", "base.dtype=int8", "base.double_quant=false", "train.max_steps=4"])
    losses = json.loads((tmp_path / "run" / "results.json").read_text())["merge_losses"]
    assert losses["dequantised"] == pytest.approx(losses["live"], rel=0.02)  # live, inputs are rounded too
