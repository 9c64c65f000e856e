"""Runs whose held-out prompts are answered: before and after, by either decoder, and again from disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import peftlab
from peftlab.decoding.generation import answering
from peftlab.errors import PeftlabError
from peftlab.pipelines.evaluate import evaluate
from peftlab.pipelines.recipes import run
from peftlab.recipe.load import load_recipe
from peftlab.tasks.table import GenerateConfig

NAMES = ["Tom", "Lily", "Max", "Anna", "Ben", "Sue", "Tim", "Mia"]
THINGS = ("dog", "cat", "car", "bird")


@pytest.fixture(scope="module")
def recipe(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("answered")
    rows = [{"prompt": f"{name} saw a {thing}.", "completion": "It was red."} for name in NAMES for thing in THINGS]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = place / "recipe.yaml"
    file.write_text(
        f"model: {stories}\ntask: text/completion\n"
        f"data: {{path: {place / 'rows.jsonl'}, separator: ' ', validation: 8}}\n"
        # the head too: this model's row of the end token is zero, whatever the states are
        "method: {name: lora, r: 4, target_modules: [q_proj, v_proj, up_proj, down_proj, lm_head]}\n"
        "train: {max_steps: 60, batch_size: 8, max_length: 64, lr: 5e-3, eval_every: 30}\n"
        "generate: {metrics: [exact_match], max_new_tokens: 24}\n"
        f"output_dir: {place / 'run'}\n"
    )
    return file


@pytest.fixture(scope="module")
def finished(recipe: Path) -> Path:
    run(recipe)
    return recipe.parent / "run"


def test_answers_are_learnt_and_end(finished: Path) -> None:
    results = json.loads((finished / "results.json").read_text())
    assert results["generate_before"]["exact_match"] == 0
    after = results["generate"]
    assert [after[f"exact_match{end}"] for end in ("", "_low", "_high")] == [1, 1, 1]
    assert after["ended"] == 1, "a model that learnt its end token stops before max_new_tokens"
    assert after["contexts"] == 8
    page = (finished / "report.html").read_text()
    assert "Generated answers" in page and "1.0000 (95 % 1.0000 to 1.0000); before training 0.0000" in page


@pytest.mark.parametrize("overrides", [[], ["generate.beams=2", "generate.no_repeat_ngram=3"]])
def test_adapter_and_merged_model_are_scored_again(finished: Path, overrides: list[str]) -> None:
    for place in (finished, finished / "merged"):
        assert evaluate(place, None, overrides)["generate"]["exact_match"] == 1


def test_no_section_means_no_answers(finished: Path) -> None:
    assert evaluate(finished, None, ["generate=null"]).keys() == {"validation"}


def test_both_decoders_give_the_same_answers(stories: Path) -> None:
    """Greedy and sampled answers on our decoder, which pads as it likes; beams on the library's."""
    model = AutoModelForCausalLM.from_pretrained(stories).eval()
    tokenizer = AutoTokenizer.from_pretrained(stories)
    prompts = [tokenizer(text).input_ids for text in ("Once upon a time", "Tom had a red ball. One day, Tom", "The")]
    greedy = GenerateConfig(metrics=["bleu"], max_new_tokens=20)
    ends = frozenset([tokenizer.eos_token_id])
    own = answering(model, greedy, ends, 0)(prompts)
    # A ban on repeated 64-grams bans nothing here, and runs on the library's decoder.
    assert own == answering(model, greedy.model_copy(update={"no_repeat_ngram": 64}), ends, 0)(prompts)
    state = torch.get_rng_state()
    sampled = greedy.model_copy(update={"temperature": 1.0, "top_p": 0.9})
    for settings in (sampled, sampled.model_copy(update={"no_repeat_ngram": 64})):
        once, again, other = (
            answering(model, settings.model_copy(update={"seed": seed}), ends, 0)(prompts) for seed in (0, 0, 1)
        )
        assert once == again != other
    assert torch.equal(state, torch.get_rng_state()), "the training that follows draws the same numbers"


def test_answering_leaves_the_adapter_as_it_was(recipe: Path, finished: Path, tmp_path: Path) -> None:
    """The adapter is folded in while answers are generated: the training that follows is the same."""
    run(recipe, ["generate=null", f"output_dir={tmp_path / 'silent'}", "merge=false"])
    one, other = (
        peftlab.checkpoints.adapter.read_adapter(place / "adapter").tensors for place in (finished, tmp_path / "silent")
    )
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task=text/plain", "data={path: x.txt}"], "generate: task text/plain has no prompts to answer"),
        (["generate.metrics=[bleuu]"], "unknown metric 'bleuu' .did you mean 'bleu'"),
    ],
)
def test_mistakes_in_the_recipe(recipe: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(PeftlabError, match=message):
        load_recipe(recipe, overrides)


def test_a_missing_package_stops_the_run_before_training(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peftlab.tasks.generated.find_spec", lambda name: None)
    with pytest.raises(PeftlabError, match=r"generate.metrics: bleu needs sacrebleu: pip install 'peftlab\[metrics\]'"):
        run(recipe, ["generate.metrics=[bleu]", f"output_dir={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()
