"""A language model from a recipe: run, score, merge, resume, one process or two accumulation steps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from launching import run_in_two
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, OPTConfig, OPTForCausalLM

from peftlab.errors import PeftlabError
from peftlab.pipelines.evaluate import evaluate
from peftlab.pipelines.finetune import load_task, sample_inputs, share_rows
from peftlab.pipelines.preview import example_inputs
from peftlab.pipelines.recipes import resume, run
from peftlab.recipe.load import load_recipe
from peftlab.recipe.schema import FinetuneRecipe
from peftlab.tasks.problem import TrainingProblem
from peftlab.training.distributed import make_accelerator
from peftlab.training.state import flat

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


def test_a_merge_compares_on_the_first_held_out_rows(recipe: Path) -> None:
    loaded = load_recipe(recipe)
    assert isinstance(loaded, FinetuneRecipe)
    tiny.assert_same(example_inputs(loaded, 3), sample_inputs(load_task(loaded), 3)[0])
    train, data = loaded.train.model_copy(update={"max_length": 4}), {"too_long": "truncate", "train_on": "all"}
    cut = loaded.model_copy(update={"train": train, "data": loaded.data.model_copy(update=data)})
    assert example_inputs(cut, 16)["input_ids"].shape == (8, 4)


def test_the_results_say_how_many_tokens_of_an_epoch_are_trained(recipe: Path, finished: Path) -> None:
    loaded = load_recipe(recipe)
    assert isinstance(loaded, FinetuneRecipe)
    trained = [sum(flags) for flags in load_task(loaded).train["trained"]]
    assert len(trained) == 24 and min(trained) > 0
    assert json.loads((finished / "results.json").read_text())["trained_tokens"] == sum(trained)


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
    less = ["train.eval_before=false", "merge.verify=false"]  # nor do the parts that can be skipped
    run(recipe, ["train.gradient_accumulation_steps=3", f"output_dir={tmp_path / 'parts'}", *less])
    whole, parts = (json.loads((place / "results.json").read_text()) for place in (finished, tmp_path / "parts"))
    assert parts["score"] == pytest.approx(whole["score"], rel=1e-4)
    assert (parts["baseline_score"], parts["baseline_metrics"]) == (None, {}) and "merge" not in parts
    assert (tmp_path / "parts" / "merged" / "model.safetensors").exists()


def test_label_smoothing_is_trained_and_not_scored(recipe: Path, tmp_path: Path) -> None:
    """Step 1's loss for a share s of smoothing is linear in s; the model before training is scored as ever."""
    firsts, before = [], []
    for share in (0.0, 0.2, 0.4):
        out = tmp_path / str(share)
        run(recipe, [f"train.label_smoothing={share}", "train.max_steps=1", "merge=false", f"output_dir={out}"])
        firsts.append(json.loads((out / "metrics.jsonl").read_text().splitlines()[0])["loss"])
        before.append(json.loads((out / "results.json").read_text())["baseline_score"])
    assert firsts[0] < firsts[1] < firsts[2] and before[0] == before[1] == before[2]
    assert firsts[2] - firsts[1] == pytest.approx(firsts[1] - firsts[0], rel=1e-3)


class TestPacking:
    PACKED = ("train.packing=true", "merge=false")

    @pytest.fixture(scope="class")
    def packed(self, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        place = tmp_path_factory.mktemp("packed") / "run"
        run(recipe, [*self.PACKED, "train.save_every=3", f"output_dir={place}"])
        return place

    def test_it_trains_with_less_padding(self, packed: Path, finished: Path) -> None:
        found, padded = (json.loads((place / "results.json").read_text()) for place in (packed, finished))
        assert found["score"] < 0.7 * found["baseline_score"]
        assert found["steps"] == padded["steps"] and 0 <= found["padding_share"] < 0.3

    def test_a_stopped_run_resumes_bit_for_bit(self, packed: Path, tmp_path: Path) -> None:
        stopped = tmp_path / "run"
        shutil.copytree(packed, stopped)
        for file in sorted((stopped / "checkpoints").glob("*.pt"))[-3:]:
            file.unlink()
        (stopped / "results.json").unlink()
        resume(stopped)
        tiny.assert_same_run(packed, stopped)

    @pytest.mark.parametrize("parts", [1, 3])
    def test_every_loss_is_the_padded_one(self, recipe: Path, tmp_path: Path, parts: int) -> None:
        """The same batches, packed and padded: only how examples are arranged in rows differs."""
        values = load_recipe(str(recipe), [*self.PACKED, f"train.gradient_accumulation_steps={parts}"]).model_dump()
        accelerator = make_accelerator(load_recipe(str(recipe), []).train, tmp_path, "auto")

        def share(problem: TrainingProblem) -> None:
            share_rows(problem, FinetuneRecipe.model_validate(values).train, accelerator)
            assert problem.row_tokens == 64

        def pad(problem: TrainingProblem) -> None:
            share(problem)
            problem.sharing = None

        losses = []
        for name, change in (("packed", share), ("padded", pad)):
            tiny.fit(values, tmp_path / name, change)
            lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
            losses.append([flat(line) for line in lines])
        assert len(losses[0]) == len(losses[1])
        for one, other in zip(*losses, strict=True):
            assert one == pytest.approx(other, rel=2e-4)

    def test_a_model_that_mixes_examples_is_padded(
        self, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        config = OPTConfig(vocab_size=512, hidden_size=16, ffn_dim=24, num_hidden_layers=1, num_attention_heads=2,
                           word_embed_proj_dim=16, max_position_embeddings=128)  # fmt: skip
        OPTForCausalLM(config).save_pretrained(tmp_path / "opt")
        AutoTokenizer.from_pretrained(STORIES).save_pretrained(tmp_path / "opt")
        options = [f"model={tmp_path / 'opt'}", "train.max_steps=3", "merge=false"]
        for packing in ("true", "false"):
            run(recipe, [*options, f"train.packing={packing}", f"output_dir={tmp_path / packing}"])
            said = capsys.readouterr().out
            assert ("train.packing: OPTForCausalLM does not keep the examples of a row apart" in said) == (
                packing == "true"
            )
        lines = [(tmp_path / packing / "metrics.jsonl").read_text() for packing in ("true", "false")]
        assert lines[0] == lines[1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.label=x"], "data.label: task text/completion does not take it"),
        (["task=text/chat", "data.prompt=prompt"], "data.completion: missing"),
        (["data.completion=compleation"], r"no column 'compleation' \(data.completion\) \(did you mean 'completion'"),
        (["train.max_length=3"], "every example is longer than train.max_length, 3 tokens"),
        (["task=text/chat"], "no chat template"),
        (
            ["task=text/classification", "data={path: x, text: [a], label: b}", "train.packing=true"],
            "train.packing: task text/classification does not take it",
        ),
        (
            ["task=text/classification", "data={path: x, text: [a], label: b}", "train.label_smoothing=0.1"],
            "train.label_smoothing: task text/classification does not take it",
        ),
    ],
)
def test_mistakes(recipe: Path, tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(PeftlabError, match=message):
        run(recipe, [*overrides, f"output_dir={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


def test_shipped_chat_recipe_is_valid() -> None:
    checked = load_recipe("chat/quickstart")
    assert checked.kind == "finetune" and checked.task == "text/chat"


@pytest.mark.long  # parts and processes with other losses: test_loop.py, test_distributed.py, test_preference_runs.py
def test_sixteen_at_once_in_four_parts_and_in_two_processes(recipe: Path, tmp_path: Path) -> None:
    """Of uneven lengths, padded and packed, with LoRA on the head: the same losses and the same adapter."""
    layouts = {
        name: [
            "train.batch_size=16", "train.max_steps=6", "train.eps=1e-4", "merge=false", f"train.packing={packing}",
            "method.target_modules=[q_proj, v_proj, down_proj, lm_head]",
        ]
        for name, packing in (("padded", "false"), ("packed", "true"))
    }  # fmt: skip
    files = []
    for name, options in layouts.items():
        for parts in (1, 4):
            out = [f"train.gradient_accumulation_steps={parts}", f"output_dir={tmp_path / f'{name}-{parts}'}"]
            run(recipe, [*options, *out])
        two = load_recipe(
            str(recipe), [*options, "train.gradient_accumulation_steps=2", f"output_dir={tmp_path / f'{name}-two'}"]
        )
        files.append(tiny.write_recipe(two.model_dump(mode="json"), tmp_path / f"{name}.json"))
    run_in_two(*files)
    assert json.loads((tmp_path / "packed-two" / "provenance.json").read_text())["processes"] == 2
    for name in layouts:
        one, *others = (tmp_path / f"{name}-{how}" for how in ("1", "4", "two"))
        for other in others:
            lines = [
                [json.loads(line) for line in (d / "metrics.jsonl").read_text().splitlines()] for d in (one, other)
            ]
            assert len(lines[0]) == len(lines[1]) > 6
            for left, right in zip(*lines, strict=True):
                assert flat(left) == pytest.approx(flat(right), rel=1e-4, abs=1e-5)
            tensors = [load_file(d / "adapter" / "adapter_model.safetensors") for d in (one, other)]
            assert tensors[0].keys() == tensors[1].keys() and any("lm_head" in key for key in tensors[0])
            for key, tensor in tensors[0].items():
                torch.testing.assert_close(tensors[1][key], tensor, rtol=0, atol=2e-5, msg=f"{other.name}: {key}")
