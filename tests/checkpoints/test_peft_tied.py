"""Tied embeddings and modules trained whole: peft trains copies unless told to keep them tied, and so do we."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from models import SMALL, build, load, save_base, stir
from peft_round_trip import randomised
from safetensors.torch import load_file, save_file

import peftlab
from peftlab.checkpoints.merge import merge_checkpoint
from peftlab.errors import PeftlabError
from peftlab.methods.inject import trainable_parameters

IDS = torch.arange(3, 33).view(2, 15)
KIND = transformers.LlamaForCausalLM
CASES: dict[str, dict[str, Any]] = {
    "embedding": {"modules_to_save": ["embed_tokens"]},
    "head": {"modules_to_save": ["lm_head"]},
    "both": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "embedding, kept tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "head, kept tied": {"modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    "both, kept tied": {"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    "lora on the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "lora on the head": {"target_modules": ["q_proj", "lm_head"]},
    "lora on the embedding, kept tied": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    "lora on the head, kept tied": {"target_modules": ["q_proj", "lm_head"], "ensure_weight_tying": True},
}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def saved_by_peft(directory: Path, **fields: Any) -> torch.Tensor:
    torch.manual_seed(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(**{"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **fields})
        model = peft.get_peft_model(build("llama"), config)
        stir(model, 0.1)
        model.save_pretrained(directory)
    return logits(model)


@pytest.mark.parametrize("case", CASES)
def test_memory_and_disk_agree_with_peft(tmp_path: Path, case: str) -> None:
    base = save_base(build("llama"), tmp_path / "base")
    expected = saved_by_peft(tmp_path / "adapter", **CASES[case])
    model = peftlab.load_adapter(load(KIND, base), tmp_path / "adapter")
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)
    merge_checkpoint(tmp_path / "adapter", base, tmp_path / "merged")
    torch.testing.assert_close(logits(load(KIND, tmp_path / "merged")), expected, rtol=1e-4, atol=1e-5)
    peftlab.save_adapter(model, tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(build("llama"), str(tmp_path / "ours"))
    torch.testing.assert_close(logits(again), expected, rtol=1e-5, atol=1e-6)
    ours = peftlab.load_adapter(build("llama"), tmp_path / "ours")
    torch.testing.assert_close(logits(ours), expected, rtol=1e-5, atol=1e-6)
    with peftlab.disabled(model):
        assert torch.equal(logits(model), logits(build("llama")))
    merged = peftlab.merge(ours)
    torch.testing.assert_close(logits(merged), expected, rtol=1e-5, atol=1e-6)
    merged.save_pretrained(tmp_path / "in-memory")
    torch.testing.assert_close(logits(load(KIND, tmp_path / "in-memory")), expected, rtol=1e-4, atol=1e-5)
    plain = peftlab.remove(model)
    assert torch.equal(logits(plain), logits(build("llama")))
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    assert type(plain.lm_head) is torch.nn.Linear and type(plain.model.embed_tokens) is torch.nn.Embedding


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("modules", [["embed_tokens"], ["embed_tokens", "lm_head"]])
def test_what_we_train_peft_reads_alike(tmp_path: Path, modules: list[str], tied: bool) -> None:
    base = save_base(build("llama"), tmp_path / "base")
    model = peftlab.inject_lora(
        build("llama"), target_modules=["q_proj"], modules_to_save=modules, ensure_weight_tying=tied
    )
    stir(model, 0.1)
    expected = logits(model)
    peftlab.save_adapter(model, tmp_path / "adapter")
    names = [name for name in trainable_parameters(model) if "lora" not in name]
    assert len(names) == (1 if tied else len(modules))
    theirs = peft.PeftModel.from_pretrained(build("llama"), str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(theirs), expected, rtol=1e-5, atol=1e-6)
    again = peftlab.load_adapter(build("llama"), tmp_path / "adapter")
    torch.testing.assert_close(logits(again), expected, rtol=1e-5, atol=1e-6)
    merge_checkpoint(tmp_path / "adapter", base, tmp_path / "merged")
    torch.testing.assert_close(logits(load(KIND, tmp_path / "merged")), expected, rtol=1e-5, atol=1e-6)
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["tie_word_embeddings"] is tied


S: dict[str, Any] = {**SMALL, "pad_token_id": 0, "max_position_embeddings": 40}
MASKED: dict[str, dict[str, Any]] = {
    "Bert": S,
    "Roberta": S,
    "DebertaV2": S,
    "Electra": {**S, "embedding_size": 16},
    "ModernBert": S | dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1),
    "DistilBert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "vocab_size": 96},
}
WORDS, HEADS = {"ModernBert": "tok_embeddings"}, {"Roberta": "lm_head", "ModernBert": "decoder"}
HEADS |= {"Electra": "generator_lm_head", "DistilBert": "vocab_projector"}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("trained", ["words", "head", "both", "biases"])
@pytest.mark.parametrize("name", MASKED)
def test_masked_language_models(tmp_path: Path, name: str, trained: str, tied: bool) -> None:
    """Their output layer has a bias of its own beside the embedding's weight: peft expects both where it saves one."""
    words, head = WORDS.get(name, "word_embeddings"), HEADS.get(name, "cls")
    modules = {"words": [words], "head": [head], "both": [head, words], "biases": None}[trained]
    kind = getattr(transformers, f"{name}ForMaskedLM")

    def make() -> Any:
        return randomised(kind(kind.config_class(**MASKED[name])))

    options: dict[str, Any] = {"modules_to_save": modules, "bias": "all" if trained == "biases" else "none"}
    model = peftlab.inject_lora(make(), ensure_weight_tying=tied, **options)
    stir(model, 0.1)
    expected = logits(model)
    peftlab.save_adapter(model, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(make(), str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(theirs), expected, rtol=1e-4, atol=1e-5)
    again = peftlab.load_adapter(make(), tmp_path / "adapter")
    torch.testing.assert_close(logits(again), expected, rtol=1e-4, atol=1e-5)
    assert trainable_parameters(again).keys() == trainable_parameters(model).keys()
    merge_checkpoint(tmp_path / "adapter", save_base(make(), tmp_path / "base"), tmp_path / "merged")
    torch.testing.assert_close(logits(load(kind, tmp_path / "merged")), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(peftlab.merge(again)), expected, rtol=1e-4, atol=1e-5)


def test_a_copy_of_a_tied_weight_trains_with_the_bias_beside_it() -> None:
    model = transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(**MASKED["DistilBert"]))
    peftlab.inject_lora(model, modules_to_save=["vocab_projector"], ensure_weight_tying=False)
    names = {name for name in trainable_parameters(model) if "lora" not in name}
    assert names == {"vocab_projector.own_weight", "vocab_projector.bias"}


def test_unmerge_parts_them_again() -> None:
    model = peftlab.inject_lora(
        build("llama"), target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=False
    )
    stir(model, 0.1)
    expected = logits(model)
    peftlab.merge(model, keep=True)
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(logits(peftlab.unmerge(model)), expected)
    assert torch.equal(logits(peftlab.remove(model)), logits(build("llama")))


def test_ties_inside_a_module_trained_whole_stay(tmp_path: Path) -> None:
    """BERT's language-model head: its decoder's weight is the embedding's, its bias another one of its own."""

    def bert() -> Any:
        torch.manual_seed(0)
        model = transformers.BertForMaskedLM(build("bert").config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        return model.eval()

    base = save_base(bert(), tmp_path / "base")
    theirs = peft.get_peft_model(bert(), peft.LoraConfig(target_modules=["query"], modules_to_save=["cls"]))
    stir(theirs, 0.1)
    theirs.save_pretrained(tmp_path / "adapter")
    expected = logits(peft.PeftModel.from_pretrained(bert(), str(tmp_path / "adapter")))
    model = peftlab.load_adapter(bert(), tmp_path / "adapter")
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)
    merge_checkpoint(tmp_path / "adapter", base, tmp_path / "merged")
    merged = load(transformers.BertForMaskedLM, tmp_path / "merged")
    torch.testing.assert_close(logits(merged), expected, rtol=1e-5, atol=1e-6)
    peftlab.merge(model, keep=True).save_pretrained(tmp_path / "in-memory")
    again = load(transformers.BertForMaskedLM, tmp_path / "in-memory")
    torch.testing.assert_close(logits(again), expected, rtol=1e-5, atol=1e-6)
    plain = peftlab.remove(peftlab.unmerge(model))
    assert plain.cls.predictions.decoder.bias is plain.cls.predictions.bias
    assert torch.equal(logits(plain), logits(bert()))


def test_two_values_of_one_tied_parameter(tmp_path: Path) -> None:
    saved_by_peft(tmp_path, modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.lm_head.weight"] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(PeftlabError, match=r"lm_head\.weight.*tied.*differ"):
        peftlab.load_adapter(build("llama"), tmp_path)


def test_the_file_s_embedding_replaces_another_one(tmp_path: Path) -> None:
    expected = saved_by_peft(tmp_path, target_modules=["q_proj", "embed_tokens"])
    model = build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[5, 5] += 1
    other = logits(model)
    with pytest.warns(UserWarning, match=r"embed_tokens\.weight, and 1 of its 96 rows"):
        peftlab.load_adapter(model, tmp_path)
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(logits(peftlab.remove(model)), other)
