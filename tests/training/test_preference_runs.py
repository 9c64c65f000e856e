"""Preference tuning from a recipe: run, resume, score from disk, start from another run, one or two processes."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from launching import run_in_two
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from peftlab.errors import PeftlabError
from peftlab.pipelines.evaluate import evaluate
from peftlab.pipelines.recipes import resume, run
from peftlab.recipe.load import load_recipe

CHATML = (
    "{% for m in messages %}<u>{{ m.role }}\n{{ m.content }}</u>\n{% endfor %}"
    "{% if add_generation_prompt %}<u>assistant\n{% endif %}"
)
METRICS = ["loss", "reward_accuracy", "reward_margin", "chosen_reward", "rejected_reward"]


def save_chat_model(place: Path) -> Path:
    """Write a random Llama with a token per character and a chat template."""
    letters = {chr(i): i - 32 + 4 for i in range(32, 127)} | {"\n": 99}
    own = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "<u>": 2, "</u>": 3} | letters, unk_token="?"))
    own.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    own.add_special_tokens(["<s>", "</s>", "<u>", "</u>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=own, bos_token="<s>", eos_token="</s>", additional_special_tokens=["<u>", "</u>"]
    )
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(place)
    torch.manual_seed(3)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            attention_dropout=0.1,
        )
    ).save_pretrained(place)  # fmt: skip
    return place


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs whose better answer is always lower case: 24 to learn from, 8 held out."""
    place = tmp_path_factory.mktemp("preference")
    save_chat_model(place / "model")
    words = ["red", "green", "blue", "yellow", "a pale grey", "black", "white", "brown"]
    rows = [{"prompt": f"{thing}?", "chosen": word, "rejected": word.upper() + "!" * (i % 3)}
            for i, word in enumerate(words) for thing in ("Sky", "Sea", "The car", "Dog")]  # fmt: skip
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = place / "recipe.yaml"
    file.write_text(
        f"model: {place / 'model'}\ntask: text/preference\ndata: {{path: {place / 'rows.jsonl'}, validation: 8}}\n"
        "method: {name: lora, r: 4, target_modules: all-linear, lora_dropout: 0.1}\n"
        "train: {max_steps: 12, batch_size: 6, max_length: 64, lr: 1e-2, eval_every: 4, keep_checkpoints: 5}\n"
        f"output_dir: {place / 'run'}\n"
    )
    return file


@pytest.fixture(scope="module")
def finished(recipe: Path) -> Path:
    run(recipe)
    return recipe.parent / "run"


def results(place: Path) -> dict:
    return json.loads((place / "results.json").read_text())


def same_adapters(one: Path, other: Path) -> bool:
    tensors = [load_file(place / "adapter" / "adapter_model.safetensors") for place in (one, other)]
    return tensors[0].keys() == tensors[1].keys() and all(torch.equal(v, tensors[1][k]) for k, v in tensors[0].items())


def test_held_out_accuracy_rises_from_log_two(finished: Path) -> None:
    found = results(finished)
    assert (found["task"], found["metric"]) == ("text/preference", "loss")
    assert found["baseline_score"] == pytest.approx(math.log(2), abs=1e-9)
    assert found["baseline_metrics"]["reward_margin"] == 0
    best = found["metrics"]["validation"]
    assert list(best) == METRICS
    assert best["reward_accuracy"] >= 0.75 and best["loss"] < 0.66 and best["reward_margin"] > 0.08
    assert best["reward_margin"] == pytest.approx(best["chosen_reward"] - best["rejected_reward"])
    assert found["sample"].keys() == {"before", "after"}


def test_it_is_scored_again_from_disk(finished: Path) -> None:
    for place in (finished, finished / "adapter", finished / "merged"):
        again = evaluate(place)["validation"]
        assert again == pytest.approx(results(finished)["metrics"]["validation"], rel=1e-3, abs=1e-4)


def test_a_stopped_run_resumes_bit_for_bit(finished: Path, tmp_path: Path) -> None:
    stopped = tmp_path / "run"
    shutil.copytree(finished, stopped)
    for last in sorted((stopped / "checkpoints").glob("*.pt"))[1:]:
        last.unlink()
    (stopped / "results.json").unlink()
    resume(stopped)
    assert same_adapters(finished, stopped)
    assert results(stopped)["metrics"] == results(finished)["metrics"]


def test_parts_and_processes_change_nothing(recipe: Path, tmp_path: Path) -> None:
    """Dropout is drawn anew by each part, so it is off here. Nine rows, in evaluation batches of two, are uneven."""
    text = recipe.read_text().replace(", lora_dropout: 0.1", "").replace("validation: 8", "validation: 9")
    config = json.loads((recipe.parent / "model" / "config.json").read_text())
    plain = tmp_path / "model"
    shutil.copytree(recipe.parent / "model", plain)
    (plain / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.0}))
    own = tmp_path / "recipe.yaml"
    text = text.replace(f"model: {recipe.parent / 'model'}", f"model: {plain}").replace(
        "eval_every: 4", "eval_every: 4, eval_batch_size: 2, eps: 1e-4, gradient_accumulation_steps: 1"
    )
    own.write_text(text.replace(str(recipe.parent / "run"), str(tmp_path / "whole")))
    run(own)
    run(own, ["train.gradient_accumulation_steps=4", f"output_dir={tmp_path / 'parts'}", "merge=false"])
    two = tmp_path / "two.yaml"
    two.write_text(own.read_text().replace(str(tmp_path / "whole"), str(tmp_path / "two")))
    run_in_two(two)
    whole, parts, processes = (results(tmp_path / name)["metrics"]["validation"] for name in ("whole", "parts", "two"))
    assert parts == pytest.approx(whole, rel=1e-3, abs=1e-5)
    assert processes == pytest.approx(whole, rel=1e-3, abs=1e-5)


def test_a_run_that_starts_from_another_has_that_as_its_reference(recipe: Path, tmp_path: Path) -> None:
    """Supervised finetuning first: its adapter is far from the base model, and z is still 0 at the start."""
    chats = tmp_path / "chats.jsonl"
    rows = [json.loads(line) for line in (recipe.parent / "rows.jsonl").read_text().splitlines()]
    chats.write_text("".join(json.dumps({"prompt": r["prompt"], "completion": r["chosen"]}) + "\n" for r in rows))
    first, second = tmp_path / "sft", tmp_path / "dpo"
    run(recipe, ["task=text/chat", f"data.path={chats}", f"output_dir={first}", "merge=false"])
    run(recipe, [f"init_from={first}", f"output_dir={second}", "train.lr=2e-3"])
    found = results(second)
    assert found["baseline_score"] == pytest.approx(math.log(2), abs=1e-9)
    assert found["sample"]["before"] == results(first)["sample"]["after"], "the model that this run starts from"
    assert found["score"] < math.log(2)
    assert evaluate(second)["validation"]["loss"] == pytest.approx(found["score"], rel=1e-3)
    stopped = tmp_path / "stopped"
    shutil.copytree(second, stopped)
    max((stopped / "checkpoints").glob("*.pt")).unlink()
    resume(stopped)
    assert same_adapters(second, stopped)
    assert results(stopped)["baseline_metrics"] == found["baseline_metrics"]


@pytest.mark.parametrize("changes", [["method=full", "train.lr=1e-3"], ["train.precision=bf16"], ["base.dtype=nf4"]])
def test_other_ways_to_train_begin_at_log_two_too(recipe: Path, tmp_path: Path, changes: list[str]) -> None:
    if "base.dtype=nf4" in changes:
        pytest.importorskip("bitsandbytes")
    run(recipe, [*changes, f"output_dir={tmp_path / 'run'}", "merge=false"])
    found = results(tmp_path / "run")
    assert found["baseline_score"] == pytest.approx(math.log(2), abs=1e-9)
    assert found["score"] < 0.66 and found["metrics"]["validation"]["reward_accuracy"] >= 0.75


def test_a_stronger_beta_is_another_loss(recipe: Path, finished: Path, tmp_path: Path) -> None:
    run(recipe, ["objective.beta=1.5", f"output_dir={tmp_path / 'run'}", "merge=false"])
    assert results(tmp_path / "run")["score"] < 0.5 * results(finished)["score"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task=text/chat", "objective.name=dpo"], "task text/chat has a loss of its own; objective dpo is for text/pref"),
        (["objective.beta=0"], "objective.beta: expected number above 0, got 0"),
        (["objective.beta=-0.1"], "objective.beta: expected number above 0"),
        (["objective.beta=.nan"], "objective.beta"),
        (["objective=null"], "objective: missing; task text/preference needs one of dpo"),
        (["objective.name=dop"], "did you mean 'dpo'"),
        (["data.completion=chosen"], "data.completion: task text/preference does not take it"),
        (["data.train_on=all"], "data.train_on: task text/preference does not take it"),
        (["train.packing=true"], "train.packing: task text/preference does not take it"),
        (["train.label_smoothing=0.1"], "train.label_smoothing: task text/preference does not take it"),
        (["data.prompt=promt"], "no column 'promt'"),
        (["train.max_length=4"], "every example is longer than train.max_length, 4 tokens"),
        (["init_from=nowhere"], "nowhere"),
    ],
)  # fmt: skip
def test_mistakes(recipe: Path, tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(PeftlabError, match=message):
        run(recipe, [*overrides, f"output_dir={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


def test_a_sweep_keeps_the_objective(recipe: Path) -> None:
    table = load_recipe(recipe, ["objective.beta=0.2", "sweep.lr=[1e-3, 1e-2]"])
    assert [row["objective"] for row in table.rows.values()] == [{"beta": 0.2}] * 2
    table = load_recipe(recipe, ["sweep.beta=[0.1, 0.5]"])
    assert [row["objective"] for row in table.rows.values()] == [{"beta": 0.1}, {"beta": 0.5}]


def test_shipped_recipe_is_valid() -> None:
    checked = load_recipe("chat/preference")
    assert checked.task == "text/preference" and checked.objective.beta == 0.1
