"""A language model from a recipe: run, score, merge, resume, one process or two accumulation steps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from peftlab.errors import PeftlabError
from peftlab.pipelines import resume, run
from peftlab.pipelines.evaluate import evaluate
from peftlab.recipe.loading import load_recipe

STORIES = Path(__file__).resolve().parents[3] / "shared" / "data" / "weights" / "stories260K-hf"
pytestmark = pytest.mark.skipif(not STORIES.is_dir(), reason="no shared data beside the checkout")
NAMES = ["Tom", "Lily", "Max", "Anna", "Ben", "Sue", "Tim", "Mia"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("language")
    rows = [{"prompt": f"{name} saw a {thing}.", "completion": " It was red." * (1 + i % 3)}
            for i, name in enumerate(NAMES) for thing in ("dog", "cat", "car", "bird")]  # fmt: skip
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = place / "recipe.yaml"
    file.write_text(
        f"model: {STORIES}\ntask: text/completion\ndata: {{path: {place / 'rows.jsonl'}, validation: 8}}\n"
        "method: {name: lora, r: 4, target_modules: all-linear}\n"
        "train: {max_steps: 12, batch_size: 6, max_length: 64, lr: 5e-3, eval_every: 4, keep_checkpoints: 5}\n"
        f"output_dir: {place / 'run'}\n"
    )
    return file


@pytest.fixture(scope="module")
def finished(recipe: Path) -> Path:
    run(recipe)
    return recipe.parent / "run"


def test_the_loss_falls_and_is_scored_again_from_disk(finished: Path) -> None:
    results = json.loads((finished / "results.json").read_text())
    assert (results["task"], results["metric"]) == ("text/completion", "loss")
    assert results["score"] < 0.7 * results["baseline_score"], "training on one sentence"
    assert results["metrics"]["validation"].keys() == {"loss", "perplexity", "bits_per_byte"}
    assert results["sample"]["before"] != results["sample"]["after"]
    for place in (finished, finished / "merged"):
        assert evaluate(place)["validation"]["loss"] == pytest.approx(results["score"], rel=1e-4)
    assert results["merge"]["max_logit_difference"] < 1e-3
    assert "AutoModelForCausalLM" in (finished / "adapter" / "README.md").read_text()
    AutoModelForCausalLM.from_pretrained(finished / "merged")


def test_a_stopped_run_resumes_bit_for_bit(finished: Path, tmp_path: Path) -> None:
    stopped = tmp_path / "run"
    shutil.copytree(finished, stopped)
    max((stopped / "checkpoints").glob("*.pt")).unlink()
    (stopped / "results.json").unlink()
    resume(stopped)
    one, other = (load_file(place / "adapter" / "adapter_model.safetensors") for place in (finished, stopped))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_accumulation_changes_nothing(recipe: Path, finished: Path, tmp_path: Path) -> None:
    """The loss is divided by the trained tokens of the global batch, of which the parts have different numbers."""
    run(recipe, ["train.gradient_accumulation_steps=3", f"output_dir={tmp_path / 'parts'}", "merge=false"])
    scores = [json.loads((place / "results.json").read_text())["score"] for place in (finished, tmp_path / "parts")]
    assert scores[1] == pytest.approx(scores[0], rel=1e-4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.label=x"], "data.label: task text/completion does not take it"),
        (["task=text/chat", "data.prompt=prompt"], "data.completion: missing"),
        (["data.completion=compleation"], r"no column 'compleation' \(data.completion\) \(did you mean 'completion'"),
        (["train.max_length=3"], "every example is longer than train.max_length, 3 tokens"),
        (["task=text/chat"], "no chat template"),
    ],
)
def test_mistakes(recipe: Path, tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(PeftlabError, match=message):
        run(recipe, [*overrides, f"output_dir={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


def test_shipped_chat_recipe_is_valid() -> None:
    checked = load_recipe("chat/quickstart")
    assert checked.kind == "finetune" and checked.task == "text/chat"
