"""A finetuned run, or its adapter, wherever a model is named: targets, bases of further runs, drafts, merges."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import peftlab
from peftlab.checkpoints.adapter import load_model
from peftlab.cli.app import app
from peftlab.drafting.text import model_digest
from peftlab.errors import PeftlabError
from peftlab.models.config import BaseConfig, find_model
from peftlab.models.load import load_config, load_tokenizer
from peftlab.pipelines.evaluate import evaluate

SAID = " It was red and it was very big and it was very good."
DRAFT = ["data.samples=2", "data.max_new_tokens=12", "train.max_steps=2", "train.max_length=64", "train.eval_every=2"]


def command(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def run(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language run that learns to say one sentence, merged."""
    place = tmp_path_factory.mktemp("finetuned")
    rows = [{"prompt": f"Tom saw a {thing}.", "completion": SAID} for thing in ("dog", "cat", "car", "bird") * 4]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "recipe.yaml").write_text(
        f"model: {stories}\ntask: text/completion\ndata: {{path: {place / 'rows.jsonl'}, validation: 4}}\n"
        "method: {name: lora, r: 8, target_modules: all-linear}\n"
        "train: {max_steps: 30, batch_size: 4, max_length: 64, lr: 1e-2, eval_every: 30}\n"
        f"output_dir: {place / 'run'}\n"
    )
    command("run", str(place / "recipe.yaml"))
    return place / "run"


@pytest.fixture(scope="module")
def unmerged(run: Path) -> Path:
    """The same run without its merged directory."""
    place = run.parent / "unmerged"
    shutil.copytree(run, place, ignore=shutil.ignore_patterns("merged"))
    return place


def test_run_adapter_and_merged_directory_are_one_model(run: Path, unmerged: Path) -> None:
    merged = AutoModelForCausalLM.from_pretrained(run / "merged")
    for place in (run, run / "merged", run / "adapter", unmerged, unmerged / "adapter"):
        model, fresh = load_model(str(place), "AutoModelForCausalLM")
        assert type(model) is type(merged) and not fresh and model.config._name_or_path == str(place)
        found, wanted = model.state_dict(), merged.state_dict()
        assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
        assert all(p.requires_grad for p in model.parameters())
        assert load_config(str(place)).model_type == "llama"
        assert len(load_tokenizer(str(place))) == len(AutoTokenizer.from_pretrained(run / "merged"))
    assert find_model(str(run)).adapters == () and find_model(str(unmerged)).adapters == (unmerged / "adapter",)


@pytest.mark.parametrize("merged", [True, False])
def test_a_run_is_the_target_of_a_draft_recipe(run: Path, unmerged: Path, merged: bool, tmp_path: Path) -> None:
    target, out = run if merged else unmerged, tmp_path / "draft"
    command("run", "draft/ci", f"target={target}", *DRAFT, f"output_dir={out}")
    origin = json.loads((out / "provenance.json").read_text())["target"]
    digest = model_digest(AutoModelForCausalLM.from_pretrained(run / "merged"))
    assert origin == {"reference": str(target), "weights": digest}
    bench = tmp_path / "bench.json"
    (tmp_path / "prompts.txt").write_text("Tom saw a dog.\n")
    options = ["--target", str(target), "--draft", str(out)]
    command("draft", "bench", *options, "--prompts", str(tmp_path / "prompts.txt"), "--repeats", "1",
            "--max-new-tokens", "8", "--json", str(bench))  # fmt: skip
    assert json.loads(bench.read_text())["target"] == str(target)
    command("draft", "plan", *options, "--repeats", "1", "--max-gamma", "1", "--context", "8")
    said = command("generate", *options, "--prompt", "Tom saw a cat.", "--max-new-tokens", "30")
    assert SAID[1:20] in said


def test_heads_on_a_run_belong_to_it(unmerged: Path, tmp_path: Path) -> None:
    out = tmp_path / "heads"
    command("run", "draft/ci", f"target={unmerged}", "method=null", "draft={kind: medusa, heads: 1}", *DRAFT,
            f"output_dir={out}")  # fmt: skip
    said = command("generate", "--target", str(unmerged), "--draft", str(out), "--prompt", "Tom saw a cat.")
    assert SAID[1:20] in said


def test_a_run_is_the_base_of_another(run: Path, unmerged: Path, tmp_path: Path) -> None:
    recipe, losses = run.parent / "recipe.yaml", []
    for name, base in (("one", run), ("two", unmerged)):
        out = tmp_path / name
        command("run", str(recipe), f"model={base}", "train.max_steps=2", "train.eval_every=2", f"output_dir={out}")
        results = json.loads((out / "results.json").read_text())
        first = json.loads((run / "results.json").read_text())
        assert results["baseline_score"] == pytest.approx(first["score"], rel=1e-4), "it begins where the run ended"
        assert results["merge"]["max_logit_difference"] < 1e-3
        losses.append(evaluate(out)["validation"]["loss"])
        shutil.rmtree(out / "merged")
        assert len(find_model(str(out)).adapters) == (1 if base is run else 2)
        again = load_model(str(out), "AutoModelForCausalLM")[0]
        adapter = json.loads((out / "adapter" / "adapter_config.json").read_text())
        assert adapter["base_model_name_or_path"] == str(base)
        peftlab.merge_checkpoint(out / "adapter", None, tmp_path / f"{name}-merged")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}-merged")
        assert all(torch.equal(again.state_dict()[key], value) for key, value in merged.state_dict().items())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_any_model_is_scored(run: Path, stories: Path, tmp_path: Path) -> None:
    score = json.loads((run / "results.json").read_text())["score"]
    for place in (run, run / "adapter", run / "merged"):
        assert evaluate(place)["validation"]["loss"] == pytest.approx(score, rel=1e-4)
    alone = tmp_path / "alone"
    shutil.copytree(run, alone, ignore=shutil.ignore_patterns("adapter"))
    assert evaluate(alone)["validation"]["loss"] == pytest.approx(score, rel=1e-4)
    assert "validation (4 examples): loss" in command("eval", str(stories), "--recipe", str(run / "recipe.yaml"))
    with pytest.raises(PeftlabError, match="neither a run, an adapter nor a model"):
        evaluate(run.parent, run / "recipe.yaml")
    with pytest.raises(PeftlabError, match="needs --recipe"):
        evaluate("package:some/model")


def test_what_is_no_model(run: Path, unmerged: Path, stories: Path, tmp_path: Path) -> None:
    (tmp_path / "stopped").mkdir()
    (tmp_path / "stopped" / "recipe.yaml").write_text("")
    with pytest.raises(PeftlabError, match=r"without merged/ or adapter/.* did it end"):
        find_model(str(tmp_path / "stopped"))
    shutil.copytree(run / "adapter", tmp_path / "moved")
    file = tmp_path / "moved" / "adapter_config.json"
    for base, said in (
        (None, "names no base model"), (str(tmp_path / "moved"), "its base model is itself"),
        (str(tmp_path / "movd"), r"its base model is not there.*did you mean 'moved'"),
    ):  # fmt: skip
        file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": base}))
        with pytest.raises(PeftlabError, match=said):
            load_model(str(tmp_path / "moved"), "AutoModelForCausalLM")
    with pytest.raises(PeftlabError, match=r"base\.dtype: nf4 needs a stored model.*peftlab merge"):
        load_model(str(unmerged), "AutoModelForCausalLM", quantised=BaseConfig(dtype="nf4"))
    with pytest.raises(PeftlabError, match=r"a plain model directory is needed here.*peftlab merge"):
        peftlab.export_draft(run, tmp_path / "out", "vllm", str(unmerged))
    model = AutoModelForCausalLM.from_pretrained(stories)
    peftlab.inject_houlsby(model)
    peftlab.save_adapter(model, tmp_path / "houlsby", base=str(stories))
    with pytest.raises(PeftlabError, match="method houlsby has no linear fold"):
        load_model(str(tmp_path / "houlsby"), "AutoModelForCausalLM")
