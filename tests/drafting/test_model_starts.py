"""Draft models that are new, pruned or chosen by gates: from recipe to benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from peftlab.drafting.pruning import Search
from peftlab.errors import PeftlabError
from peftlab.pipelines.draft import DraftResults
from peftlab.pipelines.recipes import run_recipe
from peftlab.recipe.load import load_recipe
from tests.command_line import invoke

SMALL = ["data.samples=2", "data.held_out=1", "data.max_new_tokens=16"]
SMALL += ["train.epochs=3", "train.max_length=64", "train.eval_every=3"]
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


PRUNED = ["draft={kind: model, prune: {ffn: 0.4, kv_groups: 0.5, steps: 8, rewind: false}}", "train.lr=2e-3"]
GATED = ["draft={kind: model, truncate: {keep: 3, by: gates, steps: 12}}", "train.lr=2e-3"]


def test_a_pruned_target_learns_and_is_a_plain_model(stories: Path, place: Path) -> None:
    out = place / "pruned"
    results = go(stories, out, *PRUNED)
    assert results.score > results.baseline_score and results.decoding.after.lossless
    assert results.merged_metrics["prompts"]["acceptance"] == pytest.approx(results.score, abs=1e-4)
    assert results.chosen["kept"] == {"ffn": 103, "kv_groups": 2}
    assert results.chosen["of"] == {"ffn": 172, "kv_groups": 4}
    (search,) = results.chosen["rounds"]
    assert (search["steps"], search["stable"]) == (8, False)
    for part in ("base", "merged"):
        config = AutoModelForCausalLM.from_pretrained(out / part).config
        assert (config.intermediate_size, config.num_attention_heads, config.num_key_value_heads) == (103, 4, 2)
        assert (config.num_hidden_layers, config.head_dim) == (5, 8)
    assert bench(stories, out, place / "prompts.txt")["lossless"] is True
    # Interrupted before its last checkpoint, where the search cannot be repeated.
    whole = load_file(out / "merged" / "model.safetensors")
    sorted((out / "checkpoints").glob("step-*.pt"))[-1].unlink()
    (out / "results.json").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Search, "batches", lambda *_: pytest.fail("searched again"))
        resumed = go(stories, out, *PRUNED, resume=True)
    again = load_file(out / "merged" / "model.safetensors")
    assert all(again[key].equal(whole[key]) for key in whole), "resumed equals uninterrupted"
    assert resumed.chosen == results.chosen


def test_gates_choose_layers_and_the_results_say_which(stories: Path, place: Path) -> None:
    out = place / "gated"
    results = go(stories, out, *GATED)
    assert results.score > results.baseline_score and results.decoding.after.lossless
    layers, probabilities = results.chosen["layers"], results.chosen["probabilities"]
    assert len(layers) == 3 and layers == sorted(sorted(range(5), key=lambda i: (-probabilities[i], i))[:3])
    target, base = (AutoModelForCausalLM.from_pretrained(place) for place in (stories, out / "base"))
    for number, layer in enumerate(layers):
        own, other = base.model.layers[number].state_dict(), target.model.layers[layer].state_dict()
        assert all(own[key].equal(other[key]) for key in own)
    assert bench(stories, out, place / "prompts.txt")["lossless"] is True


def test_token_ids_that_the_target_does_not_have(stories: Path, tmp_path: Path) -> None:
    rows = [{"prompt_ids": [1, 400], "response_ids": ids} for ids in ([5, 6], [5, 99999])]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(
        PeftlabError, match=r"log.jsonl: row 2 has token id 99999; the target's vocabulary has 512 tokens"
    ):
        go(stories, tmp_path / "out", f"data.replay={tmp_path / 'log.jsonl'}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([NEW[0]], "method: lora leaves random weights as they are, and a new draft has no others; write method: full"),
        (["draft={kind: model, new: {layers: 1, width: 30}}", "method=full"], "draft.new.width: 30 is no multiple"),
        (["draft={kind: model, new: {layers: 1}}", "method=full"], "draft.new.width"),
        (["draft={kind: model, new: {layers: 1, width: 32}, from: x}"], "needs exactly one of from: REF"),
        (["draft={kind: model, truncate: {keep: 2}}"], "keep needs a way to choose the layers: by: gates"),
        (
            ["draft={kind: model, truncate: {keep: 5, by: gates}}"],
            "draft.truncate.keep: 5, and the target has 5 layers",
        ),
        (["draft={kind: model, truncate: {keep: 2, layers: [0]}}"], "give either layers, a list, or keep"),
        (["draft={kind: model, truncate: {layers: [0], steps: 3}}"], "by and steps are for keep"),
        (["draft={kind: model, prune: {rounds: 2}}"], "removes nothing; give ffn, kv_groups or both"),
        (["draft={kind: model, prune: {kv_groups: 0.1}}"], "draft.prune.kv_groups: 0.1 of 4 is none of them"),
    ],
)
def test_refused(stories: Path, tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(PeftlabError) as caught:
        go(stories, tmp_path / "out", *overrides)
    assert message in str(caught.value) and not (tmp_path / "out").exists()
