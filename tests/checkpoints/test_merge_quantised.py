"""Merging adapters that were trained beside weights in 4 or 8 bits, and storing the result in fp8."""

from __future__ import annotations

import json
import os
import resource
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
import transformers
from models import adapt, assert_rounded_once, build, load, save_base, stir, weight_files
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from peftlab.checkpoints.adapter import Adapter, load_model, read_adapter, save_adapter
from peftlab.checkpoints.combine import combine
from peftlab.checkpoints.merge import merge_checkpoint, unmerge_checkpoint
from peftlab.checkpoints.merge_plan import MergeOptions
from peftlab.checkpoints.quantised import compress, decompress, nf4_values
from peftlab.errors import PeftlabError
from peftlab.methods.inject import inject, make_config
from peftlab.models.load import describe
from peftlab.models.quantised import BaseFormat, dequantised

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {"hidden_size": 64, "intermediate_size": 128}  # rows of whole blocks
IDS = torch.arange(3, 33).view(2, 15)
QUERY, DOWN = (f"model.layers.0.{name}" for name in ("self_attn.q_proj", "mlp.down_proj"))


def quantised(base: Path, bits: int, compute: torch.dtype, *, double: bool) -> transformers.PreTrainedModel:
    """Load a base as bitsandbytes stores it; in training mode, in which int8 does not round its inputs."""
    how = transformers.BitsAndBytesConfig(
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=compute,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        base, quantization_config=how, dtype=compute, device_map="cpu"
    )
    return model.train()


def trained(model: transformers.PreTrainedModel, directory: Path, targets: list[str]) -> tuple[Adapter, torch.Tensor]:
    """Adapt a quantised model with peft; return the adapter as peftlab would have saved it, and the live logits."""
    how = describe(model)
    torch.manual_seed(2)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.05)
    wrapped.save_pretrained(directory)
    logits = wrapped(IDS).logits.detach()
    return replace(read_adapter(directory), base=json.loads(json.dumps(how, default=str))), logits


def delta(adapter: Adapter, name: str) -> torch.Tensor:
    a, b = (adapter.tensors[f"{name}.lora_{factor}"].double() for factor in "AB")
    return adapter.config.lora_alpha / adapter.config.r * b @ a


@pytest.mark.parametrize(
    ("bits", "double", "family"), [(4, False, "llama"), (4, True, "llama"), (8, False, "llama"), (4, True, "gpt2")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_merged_model_is_the_live_one(
    tmp_path: Path, bits: int, double: bool, family: str, dtype: torch.dtype
) -> None:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_embd": 64, "n_head": 4, **dropout} if family == "gpt2" else SIZES
    base = save_base(build(family, **sizes).to(dtype), tmp_path / "base", max_shard_size="40KB")
    live = quantised(base, bits, dtype, double=double)
    targets = ["c_attn"] if family == "gpt2" else ["q_proj", "down_proj"]
    adapter, expected = trained(live, tmp_path / "adapter", targets)
    report = merge_checkpoint(adapter, base, tmp_path / "merged")
    assert report.into == "dequantised" and any("trained on a base in" in note for note in report.notes)
    got = load(transformers.AutoModelForCausalLM, tmp_path / "merged", dtype)(IDS).logits
    original = merge_checkpoint(adapter, base, tmp_path / "original", MergeOptions(into="original"))
    other = load(transformers.AutoModelForCausalLM, tmp_path / "original", dtype)(IDS).logits
    assert original.into == "original" and (other - expected).abs().max() > 1e-3
    if dtype == torch.float32:
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    else:
        assert (got - expected).float().norm() < 0.5 * (other - expected).float().norm()


def test_each_weight_is_rounded_once(tmp_path: Path) -> None:
    """The weights that were quantised change, with an adapter or without; all others are the base's bytes."""
    base = save_base(build("llama", **SIZES).to(torch.bfloat16), tmp_path / "base")
    adapter, _ = trained(quantised(base, 4, torch.bfloat16, double=True), tmp_path / "adapter", ["q_proj"])
    how = {"dtype": "nf4", "double_quant": True, "block": 64, "compute": "bf16", "left": ["lm_head"], "first": QUERY}
    assert {key: value for key, value in adapter.base["format"].items() if key != "digest"} == how
    report = merge_checkpoint(adapter, base, tmp_path / "merged")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    exact = nf4_values(before[f"{QUERY}.weight"], double=True, dtype=torch.bfloat16).double() + delta(adapter, QUERY)
    assert_rounded_once(after[f"{QUERY}.weight"], exact, slack=1e-6)
    alone = nf4_values(before[f"{DOWN}.weight"], double=True, dtype=torch.bfloat16)
    assert torch.equal(after[f"{DOWN}.weight"].float(), alone)
    kinds = {row.name: row.kind for row in report.tensors}
    assert kinds[f"{QUERY}.weight"] == "folded" and kinds[f"{DOWN}.weight"] == "dequantised"
    assert len(kinds) == 14
    for name in before.keys() - kinds.keys():
        assert torch.equal(before[name], after[name]), name
    again = merge_checkpoint(adapter, base, tmp_path / "again")
    assert weight_files(tmp_path / "again") == weight_files(tmp_path / "merged") and again.tensors == report.tensors
    unmerge_checkpoint(tmp_path / "merged", tmp_path / "unmerged", base=base)
    assert weight_files(tmp_path / "unmerged") == weight_files(base)


def test_adapters_that_do_not_say_how_their_base_was_loaded(tmp_path: Path) -> None:
    base = save_base(build("llama", **SIZES), tmp_path / "base")
    adapter, _ = trained(quantised(base, 4, torch.float32, double=False), tmp_path / "adapter", ["q_proj"])
    with pytest.raises(PeftlabError, match=r"does not say how its base was loaded.*save_adapter.*--into original"):
        merge_checkpoint(tmp_path / "adapter", base, tmp_path / "merged", MergeOptions(into="dequantised"))
    report = merge_checkpoint(tmp_path / "adapter", base, tmp_path / "merged")
    assert report.into is None
    merge_checkpoint(adapter, base, tmp_path / "original", MergeOptions(into="original"))
    assert weight_files(tmp_path / "merged") == weight_files(tmp_path / "original")
    how = {**adapter.base["format"], "dtype": "fp4"}
    with pytest.raises(PeftlabError, match=r"quantised to fp4.*--into original"):
        merge_checkpoint(replace(adapter, base={**adapter.base, "format": how}), base, tmp_path / "fp4")
    plain = adapt(load(transformers.LlamaForCausalLM, base), tmp_path / "plain", target_modules=["q_proj"])
    assert merge_checkpoint(plain, base, tmp_path / "said", MergeOptions(into="dequantised")).into is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_fp8_holds_what_the_merge_would_store(tmp_path: Path, dtype: torch.dtype) -> None:
    base = save_base(build("llama", **SIZES).to(dtype), tmp_path / "base", max_shard_size="40KB")
    adapter = adapt(load(transformers.LlamaForCausalLM, base), tmp_path / "adapter", target_modules=["q_proj"])
    options = MergeOptions(dtype=torch.float8_e4m3fn)
    report = merge_checkpoint(adapter, base, tmp_path / "fp8", options)
    merge_checkpoint(adapter, base, tmp_path / "merged", MergeOptions(dtype=torch.float32))
    stored, exact = (
        {
            key: tensor
            for file in sorted((tmp_path / name).glob("*.safetensors"))
            for key, tensor in load_file(file).items()
        }
        for name in ("fp8", "merged")
    )
    codes = {key for key, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn}
    assert len(codes) == 14 and stored.keys() == exact.keys() | {f"{key}_scale" for key in codes}
    for key, tensor in exact.items():
        if key not in codes:
            assert stored[key].dtype == dtype and torch.equal(stored[key].float(), tensor), key
            continue
        scale = stored[f"{key}_scale"]
        torch.testing.assert_close(scale * 448, tensor.abs().amax(1, keepdim=True))
        error = (decompress(stored[key], scale) - tensor).abs()
        assert (error <= (tensor.abs() / 16).clamp_min(scale * 2**-10) * 1.0001).all(), key  # half a step of e4m3

    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    rows = [row for row in report.tensors if row.kind == "folded"]
    assert len(rows) == 2 and all(row.kept is not None and row.dtype == "float8_e4m3fn" for row in rows)
    before = load(transformers.LlamaForCausalLM, base).state_dict()[f"{QUERY}.weight"]
    update = exact[f"{QUERY}.weight"] - before
    moved = decompress(stored[f"{QUERY}.weight"], stored[f"{QUERY}.weight_scale"]) - decompress(*compress(before))
    row = next(row for row in rows if row.name == f"{QUERY}.weight")
    assert row.kept == pytest.approx(float((moved * update).sum() / update.square().sum()), rel=1e-3)
    assert row.survived == pytest.approx(max(0.0, 1 - float((moved - update).square().sum() / update.square().sum())))
    assert min(r.kept for r in rows) <= report.kept <= max(r.kept for r in rows)
    assert any("fp8 keeps" in note for note in report.notes) and not report.warnings
    index = json.loads((tmp_path / "fp8" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == stored.keys()
    assert index["metadata"]["total_parameters"] == sum(tensor.numel() for tensor in exact.values())
    unmerge_checkpoint(tmp_path / "fp8", tmp_path / "unmerged", base=base)
    assert weight_files(tmp_path / "unmerged") == weight_files(base)


def test_fp8_of_a_run_in_4_bits(tmp_path: Path) -> None:
    base = save_base(build("llama", **SIZES).to(torch.bfloat16), tmp_path / "base")
    adapter, _ = trained(quantised(base, 4, torch.bfloat16, double=True), tmp_path / "adapter", ["q_proj"])
    report = merge_checkpoint(adapter, base, tmp_path / "fp8", MergeOptions(dtype=torch.float8_e4m3fn))
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    source = load_file(base / "model.safetensors")[f"{DOWN}.weight"]
    levels = nf4_values(source, double=True, dtype=torch.bfloat16)
    kept = decompress(stored[f"{DOWN}.weight"], stored[f"{DOWN}.weight_scale"])
    torch.testing.assert_close(kept, levels, rtol=1 / 16, atol=1e-3)
    assert {row.kind for row in report.tensors} == {"folded", "dequantised"} and report.into == "dequantised"


@pytest.mark.parametrize(("family", "words"), [("mixtral", "several experts"), ("gpt2", "no linear maps but its head")])
def test_models_that_fp8_cannot_hold(tmp_path: Path, family: str, words: str) -> None:
    base = save_base(build(family), tmp_path / "base")
    targets = ["c_attn"] if family == "gpt2" else ["q_proj"]
    adapter = adapt(load(type(build(family)), base), tmp_path / "adapter", target_modules=targets)
    with pytest.raises(PeftlabError, match=f"cannot be stored in fp8: .*{words}"):
        merge_checkpoint(adapter, base, tmp_path / "fp8", MergeOptions(dtype=torch.float8_e4m3fn))
    assert not (tmp_path / "fp8").exists()


def test_compressed_tensors_reads_fp8(tmp_path: Path) -> None:
    """transformers with compressed-tensors decompresses the directory to the weights that were stored."""
    pytest.importorskip("compressed_tensors")
    base = save_base(build("llama", **SIZES).to(torch.bfloat16), tmp_path / "base")
    adapter = adapt(load(transformers.LlamaForCausalLM, base), tmp_path / "adapter", target_modules=["q_proj"])
    merge_checkpoint(adapter, base, tmp_path / "fp8", MergeOptions(dtype=torch.float8_e4m3fn))
    merge_checkpoint(adapter, base, tmp_path / "merged")
    expected = load(transformers.LlamaForCausalLM, tmp_path / "merged")(IDS).logits
    how = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "fp8", dtype=torch.float32, quantization_config=how
    ).eval()
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    weight = decompress(stored[f"{QUERY}.weight"], stored[f"{QUERY}.weight_scale"])
    torch.testing.assert_close(model.get_submodule(QUERY).weight, weight, rtol=1e-6, atol=0)
    got = model(IDS).logits
    assert (got - expected).norm() < 0.1 * expected.norm()


def test_adapters_of_several_formats_are_added_to_the_original(tmp_path: Path) -> None:
    base = save_base(build("llama", **SIZES), tmp_path / "base")
    one, _ = trained(quantised(base, 4, torch.float32, double=False), tmp_path / "one", ["q_proj"])
    two, _ = trained(quantised(base, 8, torch.float32, double=False), tmp_path / "two", ["q_proj"])
    alike = merge_checkpoint(combine([one, one], [0.5, 0.5]), base, tmp_path / "alike")
    assert alike.into == "dequantised"
    report = merge_checkpoint(combine([one, two], [0.5, 0.5]), base, tmp_path / "mixed")
    assert report.into is None and any("stored in different ways" in note for note in report.notes)


def test_an_adapter_of_an_adapter_is_added_to_what_it_was_trained_on(tmp_path: Path) -> None:
    """Loading a base that is an adapter folds it into plain weights, though that was trained beside 4 bits."""
    base = save_base(build("llama", **SIZES), tmp_path / "base")
    inject(live := quantised(base, 4, torch.float32, double=False), make_config("lora", target_modules=["q_proj"]))
    stir(live)
    inner = save_adapter(live, tmp_path / "inner", base=str(base))
    model, _ = load_model(str(inner), "AutoModelForCausalLM")
    adapter = adapt(model, tmp_path / "outer", target_modules=["v_proj"])
    report = merge_checkpoint(adapter, str(inner), tmp_path / "merged")
    assert report.into is None and any("folded into its own base model" in note for note in report.notes)
    got = load(transformers.AutoModelForCausalLM, tmp_path / "merged")(IDS).logits
    torch.testing.assert_close(got, model(IDS).logits, rtol=1e-4, atol=1e-4)


def test_a_merge_needs_memory_for_a_few_tensors(tmp_path: Path) -> None:
    """Measured in children, whose highest memory counts from their start; the weights are 45 MiB, the largest 0.5."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 20, "num_attention_heads": 4}
    base = save_base(build("llama", **sizes), tmp_path / "base")
    plain = adapt(load(transformers.LlamaForCausalLM, base), tmp_path / "adapter", target_modules=["q_proj"])
    adapter = read_adapter(plain)
    how = BaseFormat("nf4", True, 64, "fp32", ("lm_head",), QUERY, "")
    beside = replace(adapter, base={**adapter.base, "format": how.to_dict()})
    merge_checkpoint(beside, base, tmp_path / "warm")
    grown = []
    for one, dtype in ((adapter, None), (beside, None), (beside, torch.float8_e4m3fn)):
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            merge_checkpoint(one, base, tmp_path / "out", MergeOptions(dtype=dtype, overwrite=True))
            after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            os._exit(min((after - before) >> 10, 255))
        _, status = os.waitpid(child, 0)
        grown.append(os.WEXITSTATUS(status))
    assert max(grown[1:]) < grown[0] + 24, f"MiB for a plain merge, one in 4 bits, one from there to fp8: {grown}"
    weights = tmp_path / "warm" / "model.safetensors"
    assert weights.stat().st_size > 45 << 20


@pytest.mark.parametrize("bits", [4, 8])
def test_the_dtype_that_was_quantised_is_recognised(tmp_path: Path, bits: int) -> None:
    """from_pretrained(dtype=bf16) quantises rounded weights, which have other codes than the stored ones."""
    base = save_base(build("llama", **SIZES), tmp_path / "base")
    live = quantised(base, bits, torch.bfloat16, double=False)
    expected = dequantised(live.get_submodule(DOWN), torch.bfloat16).float()
    adapter, _ = trained(live, tmp_path / "adapter", ["q_proj"])
    merge_checkpoint(adapter, base, tmp_path / "merged")
    assert torch.equal(load_file(tmp_path / "merged" / "model.safetensors")[f"{DOWN}.weight"], expected)
    exact = dequantised(quantised(base, bits, torch.float32, double=False).get_submodule(DOWN), torch.bfloat16)
    assert not torch.equal(exact.float(), expected)


def test_a_quantised_base_keeps_what_its_class_does_not_read(tmp_path: Path) -> None:
    """Layers for further tokens, also under the body's name, and stray counters; codes that nothing can read refuse."""
    stored = quantised(save_base(build("llama", **SIZES), tmp_path / "plain"), 4, torch.float32, double=False)
    stored.save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    extra = {
        "mtp.fc.weight": torch.randn(4, 8),
        "model.layers.9.eh_proj.weight": torch.randn(8, 4).bfloat16(),
        "model.visual.counter": torch.arange(5),
    }
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    save_file(load_file(file) | extra, file, metadata=metadata)
    (tmp_path / "base" / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    for name in ("LICENSE", "preprocessor_config.json"):
        (tmp_path / "base" / name).write_text("{}")
    adapter = adapt(build("llama", **SIZES), tmp_path / "adapter")
    report = merge_checkpoint(adapter, tmp_path / "base", tmp_path / "merged")
    assert {"LICENSE", "preprocessor_config.json"} <= {file.name for file in (tmp_path / "merged").iterdir()}
    assert "license: apache-2.0" in (tmp_path / "merged" / "README.md").read_text().replace('"', "")
    merged: dict[str, torch.Tensor] = {}
    for part in (tmp_path / "merged").glob("*.safetensors"):
        merged |= load_file(part)
    for key, tensor in extra.items():
        assert merged[key].dtype == tensor.dtype and torch.equal(merged[key], tensor)
    assert set(report.ignored) == set(extra) and not any("absmax" in key or "quant" in key for key in merged)
    save_file(load_file(file) | {"mtp.fc.weight": torch.ones(4, 8, dtype=torch.uint8)}, file, metadata=metadata)
    with pytest.raises(PeftlabError, match=r"mtp\.fc\.weight is stored as U8.*--base"):
        merge_checkpoint(adapter, tmp_path / "base", tmp_path / "again")
