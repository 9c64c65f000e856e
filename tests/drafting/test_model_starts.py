"""Draft models that are new, pruned or chosen by gates: from recipe to benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from peftlab.errors import PeftlabError
from peftlab.pipelines import run_recipe
from peftlab.pipelines.drafts.draft_results import DraftResults
from peftlab.recipe.loading import load_recipe
from tests.command_line import invoke

SMALL = ["data.samples=2", "data.max_new_tokens=16", "train.epochs=3", "train.max_length=64", "train.eval_every=3"]
NEW = ["draft={kind: model, new: {layers: 1, width: 32}}", "method=full", "train.lr=1e-2", "train.epochs=12"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("starts")


def go(stories: Path, out: Path, *overrides: str, **options: Any) -> DraftResults:
    recipe = load_recipe("draft/ci", [f"target={stories}", *SMALL, f"output_dir={out}", *overrides])
    return run_recipe(recipe, **options)


def bench(stories: Path, run: Path, prompts: Path) -> dict[str, Any]:
    """Decode with the draft of a run by the command line."""
    prompts.write_text("Once upon a time\n")
    settings = ["--max-new-tokens", 12, "--gamma", 2, "--repeats", 1, "--json", run / "bench.json", "--quiet"]
    result = invoke("draft", "bench", "--target", stories, "--draft", run, "--prompts", prompts, *settings)
    assert result.exit_code == 0, result.output
    return json.loads((run / "bench.json").read_text())


def cut(run: Path) -> None:
    """Leave a run as it is after an interruption: its last checkpoint and its results are not there yet."""
    sorted((run / "checkpoints").glob("step-*.pt"))[-1].unlink()
    (run / "results.json").unlink()


def test_a_new_model_learns_from_the_target(stories: Path, place: Path) -> None:
    out = place / "new"
    results = go(stories, out, *NEW)
    assert results.score > results.baseline_score + 0.02 and results.decoding.after.lossless
    draft = AutoModelForCausalLM.from_pretrained(out / "merged")
    config = draft.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (32, 1, 4)
    assert (config.vocab_size, config.num_key_value_heads, config.tie_word_embeddings) == (512, 2, True)
    assert results.total_parameters == draft.num_parameters() == results.trainable_parameters
    assert bench(stories, out, place / "prompts.txt")["lossless"] is True
    whole = load_file(out / "merged" / "model.safetensors")
    cut(out)
    go(stories, out, *NEW, resume=True)
    again = load_file(out / "merged" / "model.safetensors")
    assert all(again[key].equal(whole[key]) for key in whole), "resumed equals uninterrupted"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([NEW[0]], "method: lora leaves random weights as they are, and a new draft has no others; write method: full"),
        (["draft={kind: model, new: {layers: 1, width: 30}}", "method=full"], "draft.new.width: 30 is no multiple"),
        (["draft={kind: model, new: {layers: 1}}", "method=full"], "draft.new.width"),
        (["draft={kind: model, new: {layers: 1, width: 32}, from: x}"], "needs exactly one of from: REF"),
    ],
)
def test_refused(stories: Path, tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(PeftlabError) as caught:
        go(stories, tmp_path / "out", *overrides)
    assert message in str(caught.value) and not (tmp_path / "out").exists()
