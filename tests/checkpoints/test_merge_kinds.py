"""Merging other people's adapters and checkpoints: peft's, tied and grown embeddings, encoders without a head,
pickles, GGUF, other dtypes; and what the report says of it."""

from __future__ import annotations

import gc
import json
import math
import weakref
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from models import adapt, assert_rounded_once, build, load, reference, save_base, weight_files
from safetensors.torch import load_file, save_file

import peftlab
from peftlab.checkpoints.adapter import load_adapter, load_model, read_adapter
from peftlab.checkpoints.merge import merge_checkpoint
from peftlab.checkpoints.merge_plan import MergeOptions
from peftlab.errors import PeftlabError
from peftlab.pipelines import merge
from peftlab.pipelines.merge import verify_merge
from peftlab.references import locate
from tests.tiny_gguf import write_gguf

IDS = torch.arange(3, 33).view(2, 15)


def peft_adapter(model, directory: Path, **fields) -> torch.Tensor:
    """Adapt a model with peft, stir it, save it, and return the logits it gives."""
    torch.manual_seed(2)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**fields)).eval()
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        wrapped.save_pretrained(directory)
        return wrapped(IDS).logits


def logits(directory: Path, kind: type = transformers.AutoModelForCausalLM) -> torch.Tensor:
    """Return the logits of a directory that must load without a missing or unexpected key."""
    with torch.no_grad():
        return load(kind, directory)(IDS).logits


@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2", "llama", "phi3", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_pefts_adapter_merges_alike_from_either_side(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    kind = type(build(family))
    base = save_base(build(family).to(dtype), tmp_path / "base")
    task = "SEQ_CLS" if family in ("bert", "roberta") else "CAUSAL_LM"
    fields = {"target_modules": ["query", "value"] if family == "roberta" else "all-linear"}
    if family == "mixtral":
        experts = ["experts.gate_up_proj", "experts.down_proj"]
        fields = {"target_modules": ["q_proj"], "target_parameters": experts}
    expected = peft_adapter(load(kind, base), tmp_path / "adapter", task_type=task, **fields)
    merge_checkpoint(tmp_path / "adapter", base, tmp_path / "merged")
    if dtype == torch.float32:
        torch.testing.assert_close(logits(tmp_path / "merged", kind), expected, rtol=1e-4, atol=1e-5)
    reference(load_adapter(load(kind, base, dtype), tmp_path / "adapter"), tmp_path / "in-memory")
    assert weight_files(tmp_path / "merged") == weight_files(tmp_path / "in-memory")


@pytest.mark.parametrize("classes", [2, 3])
def test_head_sizes_of_a_foreign_adapter(tmp_path: Path, classes: int) -> None:
    """An encoder checkpoint without head and without the body's prefix; peft says the task, its tensors how many."""
    body = build("bert").bert
    base = save_base(body, tmp_path / "base")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=classes).eval()
    expected = peft_adapter(model, tmp_path / "adapter", task_type="SEQ_CLS", target_modules=["query", "value"])
    report = merge_checkpoint(tmp_path / "adapter", base, tmp_path / "merged")
    merged = logits(tmp_path / "merged", transformers.AutoModelForSequenceClassification)
    torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-6)
    assert {row.name for row in report.tensors if row.kind == "added"} == {"classifier.weight", "classifier.bias"}
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["architectures"] == [
        "BertForSequenceClassification"
    ]


def test_keys_the_task_has_no_place_for(tmp_path: Path) -> None:
    """A masked-language-model checkpoint as the base of a classifier: its head is dropped, and that is said."""
    config = build("bert").config
    torch.manual_seed(0)
    base = save_base(transformers.BertForMaskedLM(config), tmp_path / "base")
    kind = transformers.BertForSequenceClassification
    model = kind.from_pretrained(base, num_labels=2)
    merge_checkpoint(adapt(model, tmp_path / "adapter", modules_to_save=["pooler"]), base, tmp_path / "merged")
    report = json.loads((tmp_path / "merged" / "merge.json").read_text())
    assert report["dropped"] and all(key.startswith("cls.predictions") for key in report["dropped"])
    with torch.no_grad():
        torch.testing.assert_close(logits(tmp_path / "merged", kind), model.eval()(IDS).logits, rtol=1e-5, atol=1e-6)


def test_parameters_in_neither(tmp_path: Path) -> None:
    base = save_base(transformers.BertForMaskedLM(build("bert").config), tmp_path / "base")
    model = transformers.BertForSequenceClassification.from_pretrained(base)
    adapter = adapt(model, tmp_path / "adapter")
    with pytest.raises(PeftlabError, match=r"lack 2 tensors.*bert\.pooler\.dense\.weight"):
        merge_checkpoint(adapter, base, tmp_path / "merged")


CASES = {
    "untouched": ({"target_modules": ["q_proj"]}, 0, True),
    "lora on the embedding": ({"target_modules": ["q_proj", "embed_tokens"]}, 0, False),
    "lora on the head": ({"target_modules": ["q_proj", "lm_head"]}, 0, False),
    "embedding trained whole": ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, 0, False),
    "head trained whole": ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, 0, False),
    "both trained whole": ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}, 0, False),
    "grown": ({"target_modules": ["q_proj"]}, 8, True),
    "grown, and lora on it": ({"target_modules": ["q_proj", "embed_tokens"]}, 8, False),
    "grown, and both trained": (
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        8,
        False,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_tied_and_grown_embeddings(tmp_path: Path, case: str) -> None:
    """Tied embeddings stay tied unless the adapter makes them differ; then config.json says so."""
    fields, growth, tied = CASES[case]
    base = save_base(build("llama"), tmp_path / "base", max_shard_size="20KB")
    model = load(transformers.LlamaForCausalLM, base)
    if growth:
        torch.manual_seed(4)
        model.resize_token_embeddings(96 + growth, mean_resizing=False)
    expected = peft_adapter(model, tmp_path / "adapter", task_type="CAUSAL_LM", **fields)
    merge_checkpoint(tmp_path / "adapter", base, tmp_path / "merged")
    torch.testing.assert_close(logits(tmp_path / "merged"), expected, rtol=1e-4, atol=1e-5)
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["vocab_size"]) == (tied, 96 + growth)
    keys = {key for file in (tmp_path / "merged").glob("*.safetensors") for key in load_file(file)}
    assert ("lm_head.weight" in keys) is not tied


def test_checkpoints_that_hold_both_twins(tmp_path: Path) -> None:
    """Pickles, and some safetensors files, hold the tied head, too: equal it is dropped, different it stays."""
    model = build("llama")
    (tmp_path / "equal").mkdir()
    model.config.save_pretrained(tmp_path / "equal")
    state = model.state_dict()
    assert "lm_head.weight" in state
    torch.save(state, tmp_path / "equal" / "pytorch_model.bin")
    adapter = adapt(load(type(model), tmp_path / "equal"), tmp_path / "adapter")
    report = merge_checkpoint(adapter, tmp_path / "equal", tmp_path / "merged")
    assert report.dropped == {"lm_head.weight": "tied to model.embed_tokens.weight"}
    assert "lm_head.weight" not in load_file(tmp_path / "merged" / "model.safetensors")
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    torch.save(state, tmp_path / "equal" / "pytorch_model.bin")
    report = merge_checkpoint(adapter, tmp_path / "equal", tmp_path / "untied")
    assert "differ" in report.notes[0]
    assert torch.equal(load_file(tmp_path / "untied" / "model.safetensors")["lm_head.weight"], state["lm_head.weight"])


def test_pickled_shards(tmp_path: Path) -> None:
    """``.bin`` shards become safetensors shards with the same bytes as from a safetensors base."""
    model = build("gpt2").to(torch.bfloat16)
    base = save_base(model, tmp_path / "base", max_shard_size="20KB")
    adapter = adapt(load(type(model), base, torch.bfloat16), tmp_path / "adapter")
    merge_checkpoint(adapter, base, tmp_path / "from-safetensors")
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    model.config.save_pretrained(pickled)
    weight_map = {}
    for shard in sorted(base.glob("*.safetensors")):
        name = shard.name.replace("model", "pytorch_model").replace("safetensors", "bin")
        tensors = load_file(shard)
        torch.save(
            {key: tensor.t().contiguous().t() if tensor.ndim == 2 else tensor for key, tensor in tensors.items()},
            pickled / name,
        )
        weight_map |= dict.fromkeys(tensors, name)
    (pickled / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    merge_checkpoint(adapter, pickled, tmp_path / "from-pickle")
    assert weight_files(tmp_path / "from-pickle") == weight_files(tmp_path / "from-safetensors")


def test_pickles_that_are_more_than_weights(tmp_path: Path) -> None:
    model = build("gpt2")
    base = save_base(model, tmp_path / "base")
    adapter = adapt(model, tmp_path / "adapter")
    (base / "model.safetensors").unlink()
    for harm in ({"x": Path}, [1, 2], {"x": 3}):
        torch.save(harm, base / "pytorch_model.bin")
        with pytest.raises(PeftlabError, match=r"pytorch_model\.bin"):
            merge_checkpoint(adapter, base, tmp_path / "out")
    (base / "pytorch_model.bin").write_bytes(b"junk")
    with pytest.raises(PeftlabError, match=r"pytorch_model\.bin"):
        merge_checkpoint(adapter, base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
def test_other_dtypes_round_once(tmp_path: Path, target: torch.dtype) -> None:
    """--dtype: the fp32 sum goes straight to the target; --fp64 computes the sum in fp64."""
    for source in (torch.float32, torch.bfloat16):
        base = save_base(build("llama").to(source), tmp_path / str(source) / "base")
        model = load(transformers.LlamaForCausalLM, base, source)
        adapter = adapt(model, tmp_path / str(source) / "adapter", r=4, lora_alpha=4)
        weights, factors = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
        for fp64 in (False, True):
            out = tmp_path / str(source) / f"merged{fp64}"
            merge_checkpoint(adapter, base, out, MergeOptions(dtype=target, fp64=fp64))
            merged = load_file(out / "model.safetensors")
            assert {tensor.dtype for tensor in merged.values()} == {target}
            assert json.loads((out / "config.json").read_text())["dtype"] == str(target)[6:]
            for name, tensor in merged.items():
                a = factors.get(f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight")
                if a is None:
                    assert torch.equal(tensor, weights[name].to(target))
                else:
                    b = factors[f"base_model.model.{name.removesuffix('.weight')}.lora_B.weight"]
                    exact = weights[name].double() + b.double() @ a.double()
                    assert_rounded_once(tensor, exact, slack=1e-14 if fp64 else 5e-7)


def test_report_figures(tmp_path: Path) -> None:
    base = save_base(build("bert").to(torch.bfloat16), tmp_path / "base")
    model = load(transformers.BertForSequenceClassification, base, torch.bfloat16)
    adapter = adapt(model, tmp_path / "adapter", r=4, lora_alpha=4)
    report = merge_checkpoint(adapter, base, tmp_path / "merged")
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    factors = load_file(adapter / "adapter_model.safetensors")
    folded = [row for row in report.tensors if row.kind == "folded"]
    assert len(folded) == 4 and {row.kind for row in report.tensors} == {"folded", "replaced"}
    for row in folded:
        name = f"base_model.model.{row.name.removesuffix('.weight')}"
        delta = factors[f"{name}.lora_B.weight"] @ factors[f"{name}.lora_A.weight"]
        moved = after[row.name].float() - before[row.name].float()
        assert math.isclose(row.ratio, delta.norm() / before[row.name].float().norm(), rel_tol=1e-3)
        assert math.isclose(row.changed, (moved != 0).float().mean(), rel_tol=1e-6)
        assert math.isclose(row.survived, 1 - ((moved - delta).norm() / delta.norm()) ** 2, rel_tol=1e-3)
        assert 0 <= row.survived <= 1 and row.nonfinite == 0
    assert json.loads((tmp_path / "merged" / "merge.json").read_text())["tensors"][0]["name"] == report.tensors[0].name


def test_rounding_that_eats_the_update_is_warned_of(tmp_path: Path) -> None:
    base = save_base(build("bert").to(torch.bfloat16), tmp_path / "base")
    model = load(transformers.BertForSequenceClassification, base, torch.bfloat16)
    peftlab.inject_lora(model, r=4, lora_alpha=4)
    with torch.no_grad():
        for name, parameter in peftlab.trainable_parameters(model).items():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.01)
    peftlab.save_adapter(model, tmp_path / "adapter")
    report = merge_checkpoint(tmp_path / "adapter", base, tmp_path / "merged")
    assert "--dtype fp32" in report.warnings[0]
    folded = [row for row in report.tensors if row.kind == "folded"]
    assert max(row.changed for row in folded) < 0.9 and min(row.survived for row in folded) < 0.9
    exact = merge_checkpoint(tmp_path / "adapter", base, tmp_path / "exact", MergeOptions(dtype=torch.float32))
    assert not exact.warnings and min(row.survived for row in exact.tensors) > 0.999


def test_complete_directory(tmp_path: Path) -> None:
    """Tokenizer, templates, generation settings, code and licence come along; the card embeds the recipe."""
    base = save_base(build("llama"), tmp_path / "base")
    extras = {
        "tokenizer.json": "{}", "tokenizer_config.json": "{}", "chat_template.jinja": "{{ x }}", "LICENSE": "mine",
        "modeling_own.py": "x = 1", "README.md": "---\nlicense: mit\n---\n# Base\n", "optimizer.pt": "no", "notes.h5": "no",
    }  # fmt: skip
    for name, text in extras.items():
        (base / name).write_text(text)
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool.jinja").write_text("{{ y }}")
    (base / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    adapter = adapt(load(transformers.LlamaForCausalLM, base), tmp_path / "adapter")
    merge_checkpoint(adapter, base, tmp_path / "merged", MergeOptions(recipe="kind: finetune\n"))
    there = {str(p.relative_to(tmp_path / "merged")) for p in (tmp_path / "merged").rglob("*") if p.is_file()}
    assert there == {
        "model.safetensors", "config.json", "merge.json", "peftlab.json", "README.md", "generation_config.json", "tokenizer.json",
        "tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/tool.jinja", "LICENSE", "modeling_own.py",
    }  # fmt: skip
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "license: mit" in card and "licensed under `mit`" in card and "```yaml\nkind: finetune\n```" in card
    assert json.loads((tmp_path / "merged" / "generation_config.json").read_text()) == {"temperature": 0.5}
    (adapter / "tokenizer_config.json").write_text('{"grown": true}')
    merge_checkpoint(adapter, base, tmp_path / "grown")
    assert "grown" in (tmp_path / "grown" / "tokenizer_config.json").read_text()
    assert "AutoTokenizer.from_pretrained" in (tmp_path / "grown" / "README.md").read_text()


def test_loads_without_peftlab(tmp_path: Path, stories: Path) -> None:
    """A real model: a plain directory, which a pipeline takes."""
    model = load(transformers.LlamaForCausalLM, stories)
    adapter = adapt(model, tmp_path / "adapter")
    merge_checkpoint(adapter, stories, tmp_path / "merged")
    pipe = transformers.pipeline("text-generation", str(tmp_path / "merged"))
    text = pipe("Once upon a time", max_new_tokens=8, do_sample=False)[0]["generated_text"]
    assert text.startswith("Once upon a time") and len(text) > 16


def test_verify(tmp_path: Path) -> None:
    base = save_base(build("llama"), tmp_path / "base")
    adapter = adapt(load(transformers.LlamaForCausalLM, base), tmp_path / "adapter")
    merge_checkpoint(adapter, base, tmp_path / "merged")
    batch = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    figures = verify_merge(adapter, str(base), tmp_path / "merged", [batch])
    assert figures.max_logit_difference < 1e-5 and figures.argmax_agreement == 1 and figures.examples == 2
    plain = load(transformers.LlamaForCausalLM, base)
    plain.save_pretrained(tmp_path / "plain")
    assert verify_merge(adapter, str(base), tmp_path / "plain", [batch]).max_logit_difference > 1e-4


def test_verify_has_one_model_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of the first model are free before the second is loaded, without a collection of garbage."""
    base = save_base(build("llama"), tmp_path / "base")
    adapter = adapt(load(transformers.LlamaForCausalLM, base), tmp_path / "adapter")
    merge_checkpoint(adapter, base, tmp_path / "merged")
    loaded: list[weakref.ref[torch.nn.Parameter]] = []

    def load_one(*args: Any, **options: Any) -> Any:
        assert all(parameter() is None for parameter in loaded)
        model, fresh = load_model(*args, **options)
        loaded.extend(weakref.ref(parameter) for parameter in model.parameters())
        return model, fresh

    monkeypatch.setattr(merge, "load_model", load_one)
    gc.disable()
    try:
        verify_merge(adapter, str(base), tmp_path / "merged", [{"input_ids": IDS}])
    finally:
        gc.enable()
    assert loaded


@pytest.mark.parametrize("packaged", [False, pytest.param(True, marks=[pytest.mark.model, pytest.mark.long])])
def test_gguf_is_dequantised_and_said_to_be(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, packaged: bool
) -> None:
    gguf = pytest.importorskip("gguf")
    if packaged:
        base = request.getfixturevalue("smollm2")
    else:
        base = str(write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf"))
    (stored,) = (t for t in gguf.GGUFReader(locate(base)).tensors if t.name == "blk.0.ffn_down.weight")
    weight = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type).copy())
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    a, b = torch.randn(2, weight.shape[1]) * 0.1, torch.randn(weight.shape[0], 2) * 0.1
    key = "base_model.model.model.layers.0.mlp.down_proj"
    save_file({f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}, adapter / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 2,
        "lora_alpha": 2,
        "base_model_name_or_path": base,
    }
    target = {"target_modules": ["layers.0.mlp.down_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config | target))
    report = merge_checkpoint(adapter, None, tmp_path / "merged", MergeOptions(dtype=torch.bfloat16))
    assert "GGUF" in report.notes[0] and sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "merged"]
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert_rounded_once(
        merged["model.layers.0.mlp.down_proj.weight"], weight.double() + b.double() @ a.double(), slack=1e-6
    )
    assert {path.name for path in (tmp_path / "merged").iterdir()} >= {"tokenizer.json", "config.json"}
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bits", [4, 8])
def test_a_base_stored_by_bitsandbytes_is_dequantised(tmp_path: Path, bits: int) -> None:
    pytest.importorskip("bitsandbytes")
    plain = build("llama").to(torch.bfloat16)
    base = save_base(plain, tmp_path / "plain")
    adapter = adapt(load(type(plain), base, torch.float32), tmp_path / "adapter", "lora", target_modules="all-linear")
    how = transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True, "bnb_4bit_quant_type": "nf4"})
    quantised = transformers.AutoModelForCausalLM.from_pretrained(base, quantization_config=how, device_map="cpu")
    quantised.save_pretrained(tmp_path / "quantised")
    with pytest.raises(PeftlabError, match=r"stored quantised \(bitsandbytes\).*--into dequantised"):
        merge_checkpoint(adapter, tmp_path / "quantised", tmp_path / "merged", MergeOptions(into="original"))
    report = merge_checkpoint(adapter, tmp_path / "quantised", tmp_path / "merged")
    assert (
        report.into == "dequantised"
        and "dequantised to float32 first" in report.notes[0]
        and not list(tmp_path.glob("*base-merged*"))
    )

    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert getattr(merged.config, "quantization_config", None) is None
    again = load(type(plain), tmp_path / "quantised", torch.float32)
    for module in again.modules():  # else bitsandbytes rounds them to the dtype of the weights before
        if getattr(getattr(module, "weight", None), "quant_state", None) is not None:
            module.weight.quant_state.dtype = torch.float32
    again = again.dequantize()
    name = "model.layers.0.mlp.down_proj"
    levels = again.get_submodule(name).weight.float()
    assert not torch.equal(levels, plain.get_submodule(name).weight.float())
    a, b = (read_adapter(adapter).tensors[f"{name}.lora_{factor}"] for factor in "AB")
    scale = read_adapter(adapter).config.lora_alpha / read_adapter(adapter).config.r
    torch.testing.assert_close(merged.get_submodule(name).weight, levels + scale * b @ a)


def test_positions_that_the_class_computes_need_not_be_stored(tmp_path: Path) -> None:
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "vocab_size": 40}
    sizes |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "pad_token_id": 0}
    config = transformers.MarianConfig(**sizes, max_position_embeddings=24, decoder_start_token_id=0)
    torch.manual_seed(0)
    model = transformers.MarianMTModel(config).eval()
    base = save_base(model, tmp_path / "base")
    adapt(model, tmp_path / "adapter", target_modules=["q_proj"])
    ids = torch.arange(3, 13).view(1, 10)
    expected = model(input_ids=ids, decoder_input_ids=ids).logits
    merge_checkpoint(tmp_path / "adapter", base, tmp_path / "merged")
    merged = transformers.MarianMTModel.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(input_ids=ids, decoder_input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
