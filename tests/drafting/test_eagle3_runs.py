"""EAGLE-3 drafts from recipe to export on a real, small model, and which targets are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_models import tiny
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, Gemma2ForCausalLM, LlamaConfig
from typer.testing import CliRunner

from peftlab.cli.app import app
from peftlab.decoding.decode import StoppingCriteria, decode
from peftlab.drafting.base import load_pair, make_drafter
from peftlab.drafting.eagle import read_eagle, tensors_of
from peftlab.drafting.table import DRAFTS
from peftlab.drafting.target import input_embedding
from peftlab.errors import PeftlabError
from peftlab.models.load import load_base
from peftlab.pipelines.draft import DraftResults
from peftlab.pipelines.recipes import run_recipe
from peftlab.pipelines.update import update_draft
from peftlab.recipe.load import load_recipe

SMALL = ["data.samples=4", "data.held_out=1", "data.max_new_tokens=16"]
SMALL += ["train.max_length=64", "train.epochs=10", "train.eval_every=20"]
EAGLE = ["~method", "draft={kind: eagle3, vocabulary: 256}", "train.lr=6e-3"]


def go(stories: Path, out: Path, *overrides: str, **options: Any) -> DraftResults:
    recipe = load_recipe("draft/ci", [f"target={stories}", *SMALL, *EAGLE, f"output_dir={out}", *overrides])
    return run_recipe(recipe, **options)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("eagle3")


@pytest.fixture(scope="module")
def run(stories: Path, place: Path) -> Path:
    go(stories, place / "whole")
    return place / "whole"


def peftlab(*arguments: object, status: int = 0) -> str:
    """Run the command line and return what it said."""
    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exit_code == status, done.output
    return " ".join(done.output.split())


def test_a_run_raises_acceptance_and_decodes_the_target(run: Path) -> None:
    results = json.loads((run / "results.json").read_text())
    assert (results["draft"], results["method"]) == ("eagle3", None)
    scores = results["metrics"]["prompts"]
    assert {f"acceptance_{k}" for k in (1, 2, 3)} < scores.keys()
    assert scores["acceptance"] > results["baseline_score"] + 0.1
    assert results["vocabulary"]["tokens"] == 256 and scores["acceptance_1"] <= results["vocabulary"]["ceiling"] < 1
    after = results["decoding"]["after"]
    assert after["lossless"] is True and after["block_efficiency"] > 1.2
    assert 0 < after["tau_without_bonus"] < after["block_efficiency"]
    assert {piece["kind"] for piece in after["example"]["pieces"]} == {"accepted", "rejected", "target"}
    page = (run / "report.html").read_text()
    assert "Acceptance by position" in page and "<del" in page
    rates = json.loads((run / "eagle3" / "target.json").read_text())["rank_acceptance"]
    assert len(rates) == 6 and {len(each) for each in rates} == {8} and rates[0][0] > 0.1
    assert after["gain"]["best_width"] in ((1, 4) if after["gain"]["best_gamma"] else (None,))
    assert not (run / "merged").exists() and not (run / "adapter").exists()


def test_lora_tunes_a_trained_layer(run: Path, stories: Path, place: Path) -> None:
    lora = "method={name: lora, r: 4, lora_alpha: 8, target_modules: all-linear}"
    go(stories, place / "lora", f"draft={{kind: eagle3, vocabulary: 256, from: {run}}}", lora, "train.max_steps=8")
    results = json.loads((place / "lora" / "results.json").read_text())
    before, after = (load_file(each / "eagle3" / "model.safetensors") for each in (run, place / "lora"))
    adapter = load_file(place / "lora" / "adapter" / "adapter_model.safetensors")
    assert results["trainable_parameters"] == sum(map(torch.Tensor.numel, adapter.values()))
    linear = {name.removesuffix(".lora_A.weight").removeprefix("base_model.model.") for name in adapter}
    linear = {name for name in linear if not name.endswith("lora_B.weight")}
    assert linear == {n.removesuffix(".weight") for n in before if n.startswith("fc") or "_proj" in n}
    for name, old in before.items():
        fold = name.removesuffix(".weight")
        change = torch.zeros(())
        if fold in linear:
            a, b = (adapter[f"base_model.model.{fold}.lora_{side}.weight"] for side in "AB")
            change = 2 * b @ a
            assert change.abs().max() > 0
        assert torch.allclose(after[name].float(), old.float() + change, rtol=2**-8, atol=1e-6), name  # in bfloat16
    whole = json.loads((run / "results.json").read_text())
    assert results["score"] >= results["baseline_score"] == pytest.approx(whole["score"], abs=1e-3)
    assert results["decoding"]["after"]["lossless"] is True


def test_resumed_equals_uninterrupted(run: Path, stories: Path, place: Path) -> None:
    cut = place / "cut"
    shutil.copytree(run, cut)
    sorted((cut / "checkpoints").glob("step-*.pt"))[-1].unlink()
    (cut / "results.json").unlink()
    go(stories, cut, resume=True)
    assert (cut / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    one, other = (load_file(each / "eagle3" / "model.safetensors") for each in (run, cut))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_states_stored_once_resume_exactly(stories: Path, place: Path) -> None:
    short = ["draft.store_gb=0.1", "train.max_steps=4", "train.eval_every=2", f"data.cache={place / 'kept'}"]
    runs = place / "stored", place / "stored again"
    go(stories, runs[0], *short)
    files = {path: path.stat().st_mtime_ns for path in (place / "kept").glob("states-*/*")}
    assert files
    go(stories, runs[1], *short)
    sorted((runs[1] / "checkpoints").glob("step-*.pt"))[-1].unlink()
    (runs[1] / "results.json").unlink()
    go(stories, runs[1], *short, resume=True)
    assert (runs[0] / "metrics.jsonl").read_bytes() == (runs[1] / "metrics.jsonl").read_bytes()
    one, other = (load_file(each / "eagle3" / "model.safetensors") for each in runs)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert {path: path.stat().st_mtime_ns for path in (place / "kept").glob("states-*/*")} == files


def test_the_files_are_those_of_speculators(run: Path, stories: Path) -> None:
    """Names and shapes as its registered type ``eagle3`` has them; the map of tokens as its readers compute it."""
    config = json.loads((run / "eagle3" / "config.json").read_text())
    assert (config["speculators_model_type"], config["architectures"]) == ("eagle3", ["Eagle3Speculator"])
    assert config["norm_before_residual"] is False and config["draft_vocab_size"] == 256
    settings = config["speculators_config"]
    assert (settings["algorithm"], settings["default_proposal_method"]) == ("eagle3", "greedy")
    assert settings["proposal_methods"] == [
        {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    ]
    assert settings["verifier"] == {"name_or_path": str(stories), "architectures": ["LlamaForCausalLM"]}
    layer = LlamaConfig(**config["transformer_layer_config"])
    h, heads, kv, d = layer.hidden_size, layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim
    assert layer.rope_parameters["rope_theta"] == 10000.0 and (h, heads, kv, d) == (64, 8, 4, 8)
    expected = {
        "fc.weight": (h, 3 * h),
        "norm.weight": (h,),
        "lm_head.weight": (256, h),
        "d2t": (256,),
        "t2d": (512,),
        **{f"layers.0.{n}.weight": (h,) for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        "layers.0.self_attn.q_proj.weight": (heads * d, 2 * h),
        "layers.0.self_attn.k_proj.weight": (kv * d, 2 * h),
        "layers.0.self_attn.v_proj.weight": (kv * d, 2 * h),
        "layers.0.self_attn.o_proj.weight": (h, heads * d),
        "layers.0.mlp.gate_proj.weight": (layer.intermediate_size, h),
        "layers.0.mlp.up_proj.weight": (layer.intermediate_size, h),
        "layers.0.mlp.down_proj.weight": (h, layer.intermediate_size),
    }
    tensors = load_file(run / "eagle3" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    trained = {tensor.dtype for name, tensor in tensors.items() if name not in ("d2t", "t2d", "lm_head.weight")}
    assert (trained, layer.dtype) == ({torch.bfloat16}, torch.bfloat16)
    tokens = torch.arange(256) + tensors["d2t"]
    assert torch.equal(tokens, tensors["t2d"].nonzero().flatten())
    head = AutoModelForCausalLM.from_pretrained(stories).get_output_embeddings().weight
    assert torch.equal(tensors["lm_head.weight"], head[tokens]), "frozen rows of the target's head"


@pytest.mark.parametrize(
    ("width", "dtype"),
    [(1, "fp32"), (3, "bf16"), *(pytest.param(*how, marks=pytest.mark.long) for how in ((1, "bf16"), (3, "fp32")))],
)
def test_bench(run: Path, stories: Path, tmp_path: Path, width: int, dtype: str) -> None:
    (tmp_path / "p.txt").write_text("Once upon a time\nThe sun\n")
    peftlab(
        "draft", "bench", "--target", stories, "--draft", run, "--prompts", tmp_path / "p.txt", "--max-new-tokens", 20,
        "--gamma", 5, "--width", width, "--draft-dtype", dtype, "--repeats", 1, "--json", tmp_path / "b.json",
    )  # fmt: skip
    found = json.loads((tmp_path / "b.json").read_text())
    assert found["lossless"] is True and found["tau"] > 1
    shown = peftlab("generate", "--target", stories, "--draft", run, "--prompt", "Once upon", "--max-new-tokens", 20)
    plain = peftlab("generate", "--target", stories, "--prompt", "Once upon", "--max-new-tokens", 20)
    assert shown.split(" [")[0] == plain.split(" [")[0]


def test_an_update_continues_from_the_newest(run: Path, stories: Path, tmp_path: Path) -> None:
    tokenizer, pair = AutoTokenizer.from_pretrained(stories), load_pair(str(stories))
    prompts = [tokenizer(text)["input_ids"] for text in ("A frog", "The moon", "Sam ran", "Her hat", "Big red bus")]
    served = decode(pair.target, prompts, StoppingCriteria(24))
    rows = [{"prompt_ids": p, "response_ids": g.tokens} for p, g in zip(prompts, served, strict=True)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first = update_draft(run, tmp_path / "log.jsonl", overrides=("train.max_steps=2", "train.eval_every=2"))
    before = json.loads((run / "results.json").read_text())["last_metrics"]["prompts"]
    assert first.baseline_metrics["prompts"]["acceptance_1"] == pytest.approx(before["acceptance_1"], abs=0.02)
    assert DRAFTS["eagle3"].recognises(run / "updates" / "0001" / "eagle3")


@pytest.mark.parametrize("consumer", ["vllm", "sglang"])
def test_exports_are_loaded_back(run: Path, stories: Path, tmp_path: Path, consumer: str) -> None:
    out = tmp_path / "draft"
    said = peftlab("draft", "export", run, "--for", consumer, "--out", out, "--target", stories, "--gamma", 5)
    config = json.loads((out / "config.json").read_text())
    if consumer == "vllm":
        assert '"method": "eagle3"' in said and '"num_speculative_tokens": 5' in said
        assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    else:
        assert "--speculative-algorithm EAGLE3" in said and "--speculative-num-draft-tokens 6" in said
        assert config["architectures"] == ["LlamaForCausalLMEagle3"] and "norm_before_residual" not in config
        # SGLang adds one to each: there a layer's number is that of the state that leaves it.
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3]
        assert LlamaConfig(**config).num_hidden_layers == 1
    embedding = input_embedding(load_base(str(stories), "AutoModelForCausalLM")[0])
    trained, written = read_eagle(run / "eagle3", embedding), read_eagle(out, embedding)
    assert trained.shape == written.shape
    assert all(torch.equal(tensor, tensors_of(written)[name]) for name, tensor in tensors_of(trained).items())


def test_files_of_others_are_read(run: Path, stories: Path, tmp_path: Path) -> None:
    """With the layer called midlayer, the target's embeddings in the file, and no target beside it."""
    tensors = load_file(run / "eagle3" / "model.safetensors")
    embedding = input_embedding(load_base(str(stories), "AutoModelForCausalLM")[0])
    other = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    save_file(other | {"embed_tokens.weight": embedding.detach().clone()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((run / "eagle3" / "config.json").read_text())
    network = read_eagle(tmp_path, embedding)
    assert all(torch.equal(tensor, tensors_of(network)[name]) for name, tensor in tensors.items())
    pair = load_pair(str(stories), str(tmp_path))
    plain, drafted = (
        decode(pair.target, [[1, 403]], StoppingCriteria(20), drafter)[0].tokens
        for drafter in (None, make_drafter("draft", pair))
    )
    assert plain == drafted and not pair.warnings
    out = tmp_path / "out"
    peftlab("draft", "export", tmp_path, "--for", "speculators", "--out", out, "--target", stories, "--gamma", 3)
    exported = load_file(out / "model.safetensors")
    assert exported.keys() == {*tensors, "embed_tokens.weight"}, "by speculators' names"


class TestTargets:
    """Another target than the one that a draft was trained for."""

    def test_the_same_target_in_another_precision_is_the_same(self, run: Path, stories: Path) -> None:
        assert load_pair(str(stories), str(run), dtype=torch.bfloat16).warnings == ()
        assert load_pair(str(stories), str(run)).warnings == ()

    def test_other_weights_are_a_warning_and_decoding_stays_exact(
        self, run: Path, stories: Path, tmp_path: Path
    ) -> None:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(stories), AutoTokenizer.from_pretrained(stories)
        with torch.no_grad():
            model.model.layers[3].mlp.down_proj.weight.mul_(1.1)
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        pair = load_pair(str(tmp_path), str(run))
        (warning,) = pair.warnings
        assert f"trained for {stories}" in warning and "1 of 47 tensors (model.layers.3.mlp.down_proj.weight" in warning
        plain, drafted = (
            decode(pair.target, [[1, 403]], StoppingCriteria(20), drafter)[0].tokens
            for drafter in (None, make_drafter("draft", pair))
        )
        assert plain == drafted

    def test_other_tokens_are_refused(self, run: Path, stories: Path, tmp_path: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(stories)
        tokenizer.add_tokens(["<new>"])
        AutoModelForCausalLM.from_pretrained(stories).save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        with pytest.raises(PeftlabError, match="whose tokenizer is not this target's"):
            load_pair(str(tmp_path), str(run))

    def test_other_sizes_are_refused(self, run: Path, stories: Path, tmp_path: Path) -> None:
        tiny(0, vocab=512).save_pretrained(tmp_path)
        AutoTokenizer.from_pretrained(stories).save_pretrained(tmp_path)
        with pytest.raises(PeftlabError, match="for states of 64 and 512 tokens, but the target has 16 and 512"):
            load_pair(str(tmp_path), str(run))
        with pytest.raises(PeftlabError, match="for a target of 512 tokens, states of 64"):
            peftlab_raises("draft", "export", run, "--for", "vllm", "--out", tmp_path / "x", "--target", tmp_path)

    def test_capped_logits_are_refused_by_name(self, stories: Path, tmp_path: Path) -> None:
        config = Gemma2Config(
            vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, final_logit_softcapping=2.0,
        )  # fmt: skip
        torch.manual_seed(0)
        Gemma2ForCausalLM(config).save_pretrained(tmp_path / "gemma")
        AutoTokenizer.from_pretrained(stories).save_pretrained(tmp_path / "gemma")
        with pytest.raises(PeftlabError, match=r"Gemma2ForCausalLM computes other logits.*caps or scales"):
            go(tmp_path / "gemma", tmp_path / "out")
        assert not (tmp_path / "out").exists()


def peftlab_raises(*arguments: object) -> None:
    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exception is not None
    raise done.exception


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["draft={kind: eagle3, features: [2, 6]}"], "no layer 6; the target has 0 to 4, and 5 is the state"),
        (["draft={kind: eagle3, features: [2, 1]}"], "must be layer numbers from 0, rising"),
        (["draft={kind: eagle3, from: nowhere}"], "nowhere is no eagle3 draft"),
        (["method={name: lora}"], "a new eagle3 layer trains whole; write method: null, or tune a trained layer"),
        (["method={name: houlsby}", "draft={kind: eagle3, from: any}"], "houlsby has no linear fold"),
        (["merge=true"], "there is nothing to merge"),
        (["objective.name=topk_kl", "data.top_k=4"], "eagle3 trains without topk_kl"),
        (["acceptance_head=true"], "eagle3 is not a model of its own"),
    ],
)
def test_mistakes_in_a_recipe(stories: Path, tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(PeftlabError) as caught:
        go(stories, tmp_path / "out", *overrides)
    assert message in str(caught.value) and not (tmp_path / "out").exists()


def test_damaged_files(run: Path, stories: Path, tmp_path: Path) -> None:
    embedding = input_embedding(load_base(str(stories), "AutoModelForCausalLM")[0])
    config = json.loads((run / "eagle3" / "config.json").read_text())
    tensors = load_file(run / "eagle3" / "model.safetensors")

    def refused(change: dict[str, Any], files: dict[str, torch.Tensor] | None = None) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        save_file(files or tensors, tmp_path / "model.safetensors")
        with pytest.raises(PeftlabError) as caught:
            read_eagle(tmp_path, embedding)
        return str(caught.value)

    assert "fc_norm.0.weight" in refused({"fc_norm": True})
    assert "speculators_model_type is 'dflash', not eagle3" in refused({"speculators_model_type": "dflash"})
    assert "d2t is not the map of 100" in refused({"draft_vocab_size": 100})
    assert "must be layer numbers" in refused({"eagle_aux_hidden_state_layer_ids": [2, 1]})
    assert "fc.weight" in refused({}, {name: t for name, t in tensors.items() if name != "fc.weight"})
    assert "strange" in refused({}, tensors | {"strange": torch.zeros(1)})
    assert "not the same rising token ids" in refused({}, tensors | {"t2d": ~tensors["t2d"]})
