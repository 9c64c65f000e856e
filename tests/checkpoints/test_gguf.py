"""Merging into GGUF files, read back by the ``gguf`` package; ``tests/engines`` runs them in llama.cpp."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import peftlab
from peftlab.checkpoints import gguf as writer
from peftlab.checkpoints import gguf_tokenizer
from peftlab.checkpoints.gguf import load_values
from peftlab.checkpoints.merge import merge_checkpoint
from peftlab.checkpoints.merge_plan import MergeOptions
from peftlab.checkpoints.tensors import OutputFile
from peftlab.errors import PeftlabError
from peftlab.models.architectures import decoder_config, plain_model
from peftlab.pipelines.merge import run_merge
from tests.command_line import invoke
from tests.gguf_models import MODELS, tokenizer, write_adapter, write_model
from tests.tiny_gguf import write_gguf

gguf = pytest.importorskip("gguf")
IDS = torch.arange(5, 45).view(2, 20)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny Llama in bf16 (``base``) and an adapter of all its linear maps (``adapter``)."""
    place = tmp_path_factory.mktemp("llama")
    write_model("llama", place / "base", dtype=torch.bfloat16)
    write_adapter(place / "base", place / "adapter")
    return place


def merge(place: Path, out: Path, kind: str | None = None, **options: object) -> peftlab.checkpoints.merge.MergeReport:
    return merge_checkpoint(place / "adapter", None, out, MergeOptions(gguf_type=kind, **options))


def command(*arguments: object) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def values(path: Path) -> dict[str, np.ndarray]:
    """Return a file's tensors as the engine reads them, by name."""
    return {
        each.name: gguf.dequantize(each.data, each.tensor_type).reshape([int(n) for n in reversed(each.shape)])
        for each in gguf.GGUFReader(path).tensors
    }


def types(path: Path) -> dict[str, str]:
    return {each.name: each.tensor_type.name for each in gguf.GGUFReader(path).tensors}


def fields(path: Path) -> dict[str, object]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_file_has_the_values_of_base_and_adapter(name: str, tmp_path: Path) -> None:
    write_model(name, tmp_path / "base")
    write_adapter(tmp_path / "base", tmp_path / "adapter")
    report = merge(tmp_path, tmp_path / "x.gguf", "f32")
    assert report.accounts.left_out == 0 and report.accounts.changed > 0
    merge_checkpoint(tmp_path / "adapter", None, tmp_path / "merged")
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    load_values(read, tmp_path / "x.gguf")
    exact = not name.startswith("gemma")  # whose norms are rounded with the 1 that is added to them
    for (key, one), other in zip(expected.named_parameters(), read.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0 if exact else 1e-6, msg=key)
    names = set(values(tmp_path / "x.gguf"))
    extra = {"rope_freqs.weight"} if name == "llama3" else set()
    assert len(names) == len(list(expected.named_parameters())) + len(extra) and extra <= names
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "merged", "x.gguf"]


# Its loader ignores fields of the others: the width of Qwen3's heads, GPT-2's positions, and Gemma's scale of attention,
# which is no field.
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_transformers_reads_the_same_model(name: str, tmp_path: Path) -> None:
    base = write_model(name, tmp_path / "base")
    write_adapter(base, tmp_path / "adapter")
    merge(tmp_path, tmp_path / "x.gguf", "f32")
    model = peftlab.load_adapter(transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(read(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", writer.TYPES)
def test_matrices_have_the_type_asked_for(kind: str, place: Path, tmp_path: Path) -> None:
    merge(place, tmp_path / "f32.gguf", "f32")
    report = merge(place, tmp_path / "x.gguf", kind)
    exact, stored = values(tmp_path / "f32.gguf"), gguf.GGUFReader(tmp_path / "x.gguf").tensors
    wanted = gguf.GGMLQuantizationType[kind.upper()]
    for each in stored:
        head = kind.startswith(("q4", "q5")) and each.name == "output.weight"
        of_type = gguf.GGMLQuantizationType.Q8_0 if head else wanted
        of_type = of_type if len(each.shape) == 2 else gguf.GGMLQuantizationType.F32
        assert each.tensor_type == of_type and each.data_offset % 32 == 0
        once = gguf.quantize(exact[each.name], of_type)  # rounded or quantised once, from the sum in fp32
        assert each.data.tobytes() == once.tobytes(), each.name
    assert report.dtype == kind and report.total_bytes == sum(each.n_bytes for each in stored)
    assert (
        fields(tmp_path / "x.gguf")["general.file_type"]
        == gguf.LlamaFileType["ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"]
    )


@pytest.mark.parametrize(("name", "head"), [("llama", "output.weight"), ("qwen2", "token_embd.weight")])
def test_the_head_is_in_eight_bits_as_llama_quantize_writes_it(name: str, head: str, tmp_path: Path) -> None:
    write_model(name, tmp_path / "base")
    write_adapter(tmp_path / "base", tmp_path / "adapter")
    assert merge(tmp_path, tmp_path / "x.gguf", "q4_0").dtype == "q4_0"
    found = types(tmp_path / "x.gguf")
    assert {key for key, kind in found.items() if kind == "Q8_0"} == {head} and "Q4_0" in found.values()
    assert fields(tmp_path / "x.gguf")["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q4_0


@pytest.mark.parametrize("kind", [None, "keep"])
def test_without_a_type_each_matrix_keeps_its_own(kind: str | None, place: Path, tmp_path: Path) -> None:
    assert merge(place, tmp_path / "x.gguf", kind).dtype == "bf16"
    assert set(types(tmp_path / "x.gguf").values()) == {"BF16", "F32"}  # norms are F32


def test_fields_are_those_of_configuration_and_tokenizer(place: Path, tmp_path: Path) -> None:
    merge(place, tmp_path / "x.gguf")
    found, tokens = fields(tmp_path / "x.gguf"), tokenizer("spm")
    assert found["general.architecture"] == "llama" and found["general.name"] == "x"
    assert found["llama.attention.head_count_kv"] == 2 and found["llama.rope.dimension_count"] == 16
    assert found["llama.vocab_size"] == len(tokens) == len(found["tokenizer.ggml.tokens"])
    assert found["tokenizer.ggml.model"] == "llama" and found["tokenizer.ggml.add_space_prefix"] is True
    assert found["tokenizer.ggml.add_bos_token"] is True and found["tokenizer.ggml.add_eos_token"] is False
    kinds = found["tokenizer.ggml.token_type"]
    assert kinds[:4] == [2, 3, 3, 6] and kinds[-1] == 1
    scored = zip(found["tokenizer.ggml.tokens"], found["tokenizer.ggml.scores"], strict=True)
    scores = [score for text, score in scored if len(text) > 1 and not text.startswith("<")]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) > 200  # as SentencePiece learnt them
    assert found["tokenizer.chat_template"] == tokens.chat_template


@pytest.mark.parametrize("name", ["qwen2", "llama3", "gpt2", "granite"])
def test_byte_level_tokenizers_are_named_by_how_they_split(name: str, tmp_path: Path) -> None:
    write_model(name, tmp_path / "base")
    write_adapter(tmp_path / "base", tmp_path / "adapter")
    merge(tmp_path, tmp_path / "x.gguf")
    found = fields(tmp_path / "x.gguf")
    named = {"qwen2": "qwen2", "llama3": "llama-bpe", "gpt2": "gpt-2", "granite": "smollm"}
    assert found["tokenizer.ggml.model"] == "gpt2" and found["tokenizer.ggml.pre"] == named[name]
    assert found["tokenizer.ggml.add_bos_token"] is (name == "llama3")
    if name == "qwen2":  # rows without a token
        assert found["tokenizer.ggml.token_type"][-13:] == [5] * 13


@pytest.mark.parametrize(
    ("model_type", "kind", "settings", "read"),
    [
        ("llama", "spm", {"tokenizer_class": "LlamaTokenizer"}, True),
        ("llama", "spm", {"tokenizer_class": "LlamaTokenizerFast", "pad_token": "</s>"}, True),
        ("llama", "spm", {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": None}, True),
        ("llama", "spm", {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False}, False),
        ("llama", "spm", {"tokenizer_class": None}, False),
        ("llama", "spm", {"pad_token": "<pad>"}, False),
        ("llama", "spm", {"extra_special_tokens": ["</s>"], "chat_template": "other"}, True),
        ("llama", "spm", {"extra_special_tokens": ["<more>"]}, False),
        ("llama", "llama-bpe", {"tokenizer_class": "LlamaTokenizer"}, True),
        ("llama", "smollm", {"tokenizer_class": "GPT2Tokenizer"}, True),
        ("llama", "spm", {"tokenizer_class": "GemmaTokenizer"}, False),
        ("mistral", "spm", {"tokenizer_class": "LlamaTokenizer"}, True),
        ("qwen2", "qwen2", {"tokenizer_class": "PreTrainedTokenizerFast"}, True),
        ("qwen3", "qwen2", {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "unk_token": None}, True),
        ("qwen3", "qwen2", {"tokenizer_class": "TokenizersBackend"}, True),
        ("gemma", "spm", {}, False),
    ],
)
@pytest.mark.parametrize("stated", [False, True])
def test_tokenizers_are_read_as_transformers_loads_them(
    model_type: str, kind: str, settings: dict[str, object], read: bool, stated: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    """The fields are the same with and without transformers; ``stated``: added tokens in the configuration too."""
    tokenizer(kind).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    file = tmp_path / "tokenizer_config.json"
    values = json.loads(file.read_text()) | settings
    if stated:
        added = json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]
        values["added_tokens_decoder"] = {str(each.pop("id")): each for each in added}
        values["add_bos_token"] = False  # which tokenizer.json overrides
    file.write_text(json.dumps({key: value for key, value in values.items() if key != "tokenizer_class" or value}))
    assert (gguf_tokenizer._read(tmp_path) is not None) == read
    found = gguf_tokenizer.tokenizer_fields(tmp_path, 600)
    monkeypatch.setattr(gguf_tokenizer, "_read", lambda directory: None)
    assert found == gguf_tokenizer.tokenizer_fields(tmp_path, 600)


OLD = {"rope_parameters": None, "rope_theta": 50_000}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("name", "settings", "read"),
    [
        ("llama", OLD, True),
        ("llama", OLD | {"rope_scaling": {"type": "linear", "factor": 2.0}, "head_dim": None}, True),
        ("llama", OLD | {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, True),
        ("llama", OLD | {"rope_scaling": {"type": "yarn", "factor": 4.0}}, True),
        ("llama", {"rms_norm_eps": None}, False),
        ("llama", {"rope_parameters": None}, False),
        ("mistral", {"sliding_window": 100}, True),
        ("mistral", {"sliding_window": None}, False),
        ("qwen2", {"sliding_window": 100}, True),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 100}, True),
        ("qwen3", {}, True),
    ],
)
def test_configurations_are_read_as_transformers_reads_them(
    name: str, settings: dict[str, object], read: bool, tmp_path: Path
) -> None:
    write_model(name, tmp_path)  # None: left out
    file = tmp_path / "config.json"
    values = json.loads(file.read_text()) | settings
    values = {key: value for key, value in values.items() if key not in settings or value is not None}
    file.write_text(json.dumps(values))
    model = plain_model(values)
    config = decoder_config(model)
    assert model is not None and (config is not None) == read
    if config is not None:
        made, by_class = (
            writer.GgufModel(each, type(model).__name__) for each in (config, AutoConfig.from_pretrained(tmp_path))
        )
        assert (made.fields, made.notes) == (by_class.fields, by_class.notes)
        assert made.extra.keys() == by_class.extra.keys()
    if "low_freq_factor" in str(settings):
        exact, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(tmp_path), torch.device("cpu"))
        plain = 1.0 / 50_000.0 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16)
        assert torch.equal(made.extra["rope_freqs.weight"], plain / exact)


def test_a_gguf_base_keeps_its_types_and_its_bytes(tmp_path: Path) -> None:
    base = write_gguf(tmp_path / "base.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="base.gguf", dtype=torch.float32)
    peftlab.inject_lora(model, r=2, target_modules=["q_proj", "down_proj"])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.1)
    peftlab.save_adapter(model, tmp_path / "adapter", base=str(base))
    report = merge(tmp_path, tmp_path / "x.gguf", "keep")
    before, after = gguf.GGUFReader(base), gguf.GGUFReader(tmp_path / "x.gguf")
    assert list(after.fields) == list(before.fields) and len(before.tensors) == len(after.tensors)
    assert all(after.fields[key].contents() == field.contents() for key, field in before.fields.items())
    changed = {old.name for old, new in zip(before.tensors, after.tensors, strict=True) if (old.data != new.data).any()}
    assert changed == {f"blk.{layer}.{name}.weight" for layer in (0, 1) for name in ("attn_q", "ffn_down")}
    assert [t.tensor_type for t in before.tensors] == [t.tensor_type for t in after.tensors]
    assert (report.accounts.changed, report.accounts.left_out, report.copied) == (4, 0, len(before.tensors) - 4)
    merge(tmp_path, tmp_path / "f16.gguf", "f16")
    assert set(types(tmp_path / "f16.gguf").values()) == {"F16", "F32"}
    exact, kept = values(tmp_path / "f16.gguf"), values(tmp_path / "x.gguf")
    assert all(np.abs(exact[name] - kept[name]).max() < 0.05 for name in exact)


def test_a_merge_is_compared_with_base_and_adapter(place: Path, tmp_path: Path) -> None:
    for kind, most in (("f32", 1e-4), ("q8_0", 2.0)):
        options = MergeOptions(gguf_type=kind)
        check = run_merge(place / "adapter", None, tmp_path / f"{kind}.gguf", options, verify=True).check
        assert check is not None and check.max_logit_difference < most


def test_a_model_of_images_and_text_gives_its_text_model(tmp_path: Path) -> None:
    tokens = tokenizer("spm")
    text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 2, "vocab_size": len(tokens), "head_dim": 32, "query_pre_attn_scalar": 32}
    image = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text | {"sliding_window": 16}, vision_config=image | {"image_size": 8, "patch_size": 4}
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    model.save_pretrained(tmp_path / "base")
    tokens.save_pretrained(tmp_path / "base")
    peftlab.inject_lora(model, r=2, target_modules=r".*language_model.*q_proj")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.1)
    peftlab.save_adapter(model, tmp_path / "adapter", base=str(tmp_path / "base"))
    done = run_merge(tmp_path / "adapter", None, tmp_path / "x.gguf", MergeOptions(gguf_type="f32"), verify=True)
    found = fields(tmp_path / "x.gguf")
    assert found["general.architecture"] == "gemma3" and found["gemma3.attention.sliding_window"] == 16
    assert all(name.startswith(("token_embd", "blk.", "output_norm")) for name in types(tmp_path / "x.gguf"))
    accounts = done.report.accounts
    assert accounts.left_out > 0 and accounts.changed == 6
    assert accounts.tensors == accounts.changed + accounts.copied + accounts.left_out
    assert any("are not in the GGUF file" in note for note in done.report.notes)
    assert done.check is not None and done.check.max_logit_difference < 1e-4


def test_the_command_writes_a_file(place: Path, tmp_path: Path) -> None:
    out = command("merge", place / "adapter", "-o", tmp_path / "x.gguf", "--dtype", "q8_0", "--json", tmp_path / "j")
    assert "21 of 21 base tensors accounted for: 14 changed" in out
    assert json.loads((tmp_path / "j").read_text())["report"]["dtype"] == "q8_0"
    with pytest.raises(PeftlabError, match="exists; choose another name"):
        command("merge", place / "adapter", "-o", tmp_path / "x.gguf")
    command("merge", place / "adapter", "-o", tmp_path / "x.gguf", "--overwrite")
    command("merge", place / "adapter", "-o", tmp_path / "directory", "--dtype", "bf16")  # of both kinds
    assert json.loads((tmp_path / "directory" / "config.json").read_text())["dtype"] == "bfloat16"
    for out_name, dtype, wrong in (
        ("y.gguf", "fp32", "write f32"),
        ("y.gguf", "q4_k", "one of f32"),
        ("y", "q8_0", "name one to write"),
    ):
        with pytest.raises(PeftlabError, match=wrong):
            command("merge", place / "adapter", "-o", tmp_path / out_name, "--dtype", dtype)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["directory", "j", "x.gguf"]


def refused(tmp_path: Path, match: str, kind: str | None = None) -> None:
    with pytest.raises(PeftlabError, match=match):
        merge(tmp_path, tmp_path / "x.gguf", kind)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


@pytest.mark.parametrize(
    ("name", "fields", "match"),
    [
        ("llama", {"hidden_act": "gelu"}, "activation 'gelu'"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "type 'dynamic'"),
        ("gemma2", {"query_pre_attn_scalar": 7}, "query_pre_attn_scalar=7: llama.cpp scales attention by 32"),
        ("gemma3", {"layer_types": ["sliding_attention"] * 7}, r"all positions in every 6\. layer"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("phi3", {"num_attention_heads": 3}, "hidden_size"),
        ("smollm3", {"no_rope_layers": [1] * 5}, "every fourth layer"),
    ],
)
def test_settings_that_the_engine_has_not(name: str, fields: dict[str, object], match: str, tmp_path: Path) -> None:
    write_model(name, tmp_path / "base", **fields)
    write_adapter(tmp_path / "base", tmp_path / "adapter")
    refused(tmp_path, match)


def test_tokenizers_that_the_engine_has_not(tmp_path: Path) -> None:
    write_model("llama", tmp_path / "base")
    write_adapter(tmp_path / "base", tmp_path / "adapter")
    tokens = tmp_path / "base" / "tokenizer.json"
    raw = json.loads(tokens.read_text())
    tokens.write_text(json.dumps(raw | {"normalizer": {"type": "Lowercase"}}))
    refused(tmp_path, "Lowercase")
    tokens.write_text(json.dumps(raw | {"model": raw["model"] | {"byte_fallback": False}}))
    refused(tmp_path, "splits text by null")
    tokens.unlink()
    refused(tmp_path, "contains its tokenizer")


def test_an_unknown_class_is_named(tmp_path: Path) -> None:
    config = transformers.OPTConfig(
        hidden_size=32, word_embed_proj_dim=32, ffn_dim=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    transformers.OPTForCausalLM(config).save_pretrained(tmp_path / "base")
    write_adapter(tmp_path / "base", tmp_path / "adapter")
    refused(tmp_path, "OPTForCausalLM cannot be written as a GGUF file: known are LlamaForCausalLM")


def test_rows_that_are_no_whole_number_of_blocks(stories: Path, tmp_path: Path) -> None:
    write_adapter(stories, tmp_path / "adapter", target_modules=["q_proj"])
    with pytest.raises(
        PeftlabError, match=r"blk\.0\.ffn_down\.weight: rows of 172 .* blocks of 32; choose --dtype f16"
    ):
        merge(tmp_path, tmp_path / "x.gguf", "q4_0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]
    with pytest.raises(PeftlabError, match="Q4_K, to which the gguf package does not quantise"):
        writer._checked("blk.0.ffn_down.weight", (4, 256), "Q4_K")


def test_a_failed_write_leaves_nothing(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: OutputFile, view: memoryview, offset: int) -> None:
        if offset > 4096:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(OutputFile, "_write", fail)
    with pytest.raises(PeftlabError, match="No space left on device"):
        merge(place, tmp_path / "x.gguf", "q8_0")
    assert not list(tmp_path.iterdir())


def test_a_killed_merge_leaves_no_torn_file(place: Path, tmp_path: Path) -> None:
    code = (
        "import os, sys; from peftlab.checkpoints.gguf import GgufFile; from peftlab.checkpoints.merge import *\n"
        "GgufFile.steps = lambda self, steps: os.kill(os.getpid(), 9)\n"
        "merge_checkpoint(sys.argv[1], None, sys.argv[2])"
    )
    out = tmp_path / "x.gguf"
    done = subprocess.run([sys.executable, "-c", code, place / "adapter", out], env=os.environ, check=False)
    assert done.returncode == -9 and not out.exists()
    merge(place, out)
    assert [path.name for path in tmp_path.iterdir() if "lock" not in path.name] == ["x.gguf"]


def test_a_merge_to_a_file_needs_memory_for_two_tensors_more_and_a_quantised_one(tmp_path: Path) -> None:
    """Measured in children, whose highest memory counts from their start. Embedding and head are 35 MiB each; the head
    is folded, for a directory in the one tensor that is read, for a file into fp32; the embedding is only quantised."""
    base = write_model("llama", tmp_path / "base", dtype=torch.bfloat16, hidden_size=512)
    weights = load_file(base / "model.safetensors")
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[key] = weights[key].repeat(64, 1)
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"vocab_size": 64 * config["vocab_size"]}))
    largest = weights["lm_head.weight"].nbytes / 2**20
    write_adapter(tmp_path / "base", tmp_path / "adapter", target_modules=["q_proj", "lm_head"])
    merge(tmp_path, tmp_path / "warm.gguf", "q8_0")
    grown = {}
    for out, kind in {"merged": None, "q8_0.gguf": "q8_0", "f32.gguf": "f32"}.items():
        child = os.fork()
        if child == 0:
            torch.set_num_threads(2)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            merge(tmp_path, tmp_path / out, kind)
            os._exit(min((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10, 255))
        grown[out] = os.WEXITSTATUS(os.waitpid(child, 0)[1])
    quantised = largest / 2 * 34 / 32  # 34 bytes for 32 weights
    assert grown["merged"] > largest, f"MiB: {grown}"
    assert max(grown.values()) < grown["merged"] + 2 * largest + quantised, f"MiB: {grown}"


def test_an_adapter_becomes_a_file_of_its_own(place: Path, tmp_path: Path) -> None:
    adapter = write_adapter(place / "base", tmp_path / "adapter", rank_pattern={"q_proj": 2}, use_rslora=True)
    out = command("adapter", "convert", adapter, "--to", "llama.cpp", "-o", tmp_path / "x.gguf")
    assert "rank 4, 14 modules" in out and "--lora" in out
    found, written = fields(tmp_path / "x.gguf"), values(tmp_path / "x.gguf")
    assert (found["general.type"], found["general.architecture"], found["adapter.type"]) == ("adapter", "llama", "lora")
    model = peftlab.load_adapter(transformers.AutoModelForCausalLM.from_pretrained(place / "base"), adapter)
    config = model.config
    for layer, name, ours, heads in ((0, "attn_q", "self_attn.q_proj", 4), (1, "attn_k", "self_attn.k_proj", 2)):
        a, b = (torch.tensor(written[f"blk.{layer}.{name}.weight.lora_{side}"]) for side in "ab")
        leaf = model.get_submodule(f"model.layers.{layer}.{ours}")
        expected = _delta(leaf)
        update = found["adapter.lora.alpha"] / b.shape[1] * b @ a
        halves = update.view(heads, config.head_dim // 2, 2, -1).transpose(1, 2).reshape(expected.shape)
        torch.testing.assert_close(halves, expected, rtol=1e-5, atol=1e-5)
    assert len(written) == 28 and sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "x.gguf"]


def _delta(leaf: torch.nn.Module) -> torch.Tensor:
    """Return the update of an adapted linear map: what it adds to the outputs for the unit vectors."""
    with torch.no_grad():
        units = torch.eye(leaf.in_features, dtype=torch.float32)
        return (leaf.float()(units) - units @ leaf.weight.t()).t()


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("llama", {"use_dora": True}, "use_dora"),
        ("llama", {"lora_bias": True}, "cannot express"),
        ("qwen2", {"bias": "all"}, "cannot express"),
        ("llama", {"modules_to_save": ["lm_head"]}, "cannot express"),
        ("qwen2", {"target_modules": ["embed_tokens"]}, "is the head as well"),
        ("gemma", {"target_modules": ["lm_head"]}, "lm_head"),
    ],
)
def test_what_an_adapter_file_cannot_contain(name: str, options: dict[str, object], match: str, tmp_path: Path) -> None:
    write_model(name, tmp_path / "base")
    write_adapter(tmp_path / "base", tmp_path / "adapter", **options)
    with pytest.raises(PeftlabError, match=match):
        peftlab.convert_adapter(tmp_path / "adapter", tmp_path / "x.gguf", "llama.cpp")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]
    with pytest.raises(PeftlabError, match="vllm reads adapters from directories"):
        peftlab.convert_adapter(place_of(tmp_path), tmp_path / "x.gguf", "vllm")


def test_an_adapter_file_does_not_replace_its_base(place: Path, tmp_path: Path) -> None:
    base = tmp_path / "base.gguf"
    merge(place, base)
    before = base.read_bytes()
    with pytest.raises(PeftlabError, match=r"base\.gguf is the base model; choose another name"):
        peftlab.convert_adapter(place / "adapter", base, "llama.cpp", base=str(base), overwrite=True)
    assert base.read_bytes() == before


def place_of(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "base", tmp_path / "plain", target_modules=["q_proj"])
