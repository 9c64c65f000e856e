"""Trained rows of an embedding: ``trainable_token_indices``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from models import build, load, stir
from peft_round_trip import equal, of, round_trip, saved_by_peft, trains_as_in_peft
from test_peft_layers import bart, gemma3

import peftlab
from peftlab.checkpoints.merge import merge_checkpoint
from peftlab.errors import PeftlabError
from peftlab.methods.inject import trainable_parameters

IDS = torch.arange(3, 33).view(2, 15)
TEXT = {"input_ids": IDS}
logits = of(TEXT)


def llama(tied: bool = True) -> Any:
    return build("llama", tie_word_embeddings=tied)


def untied() -> Any:
    return llama(False)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "a list": (llama, {"trainable_token_indices": [5, 3, 31]}),
    "untied": (untied, {"trainable_token_indices": [5, 3, 31]}),
    "by name": (untied, {"trainable_token_indices": {"embed_tokens": [5, 7], "lm_head": [8]}}),
    "the head alone": (untied, {"trainable_token_indices": {"lm_head": [8, 2]}}),
    "tied, equal": (llama, {"trainable_token_indices": {"embed_tokens": [5, 7], "lm_head": [5, 7]}}),
    "tied, different": (llama, {"trainable_token_indices": {"embed_tokens": [5, 7], "lm_head": [8]}}),
    "scaled": (gemma3, {"trainable_token_indices": [5, 3, 31]}),
    "four that are tied": (bart, {"trainable_token_indices": {"shared": [5, 3, 31]}}),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_of_tokens(tmp_path: Path, case: str) -> None:
    make, fields = CASES[case]
    fields = {"target_modules": ["q_proj"], "task_type": "SEQ_2_SEQ_LM" if make is bart else "CAUSAL_LM"} | fields
    model = round_trip(make, logits, tmp_path, **fields)
    trains_as_in_peft(make, TEXT | {"labels": IDS}, tmp_path / "adapter", lambda out: out.loss)
    one = fields["trainable_token_indices"]
    named = [name for name in trainable_parameters(model) if name.endswith("token_rows")]
    assert len(named) == (2 if case in ("by name", "tied, different") else 1), one


def test_a_merge_keeps_what_is_tied() -> None:
    model = peftlab.inject_lora(llama(), target_modules=["q_proj"], trainable_token_indices=[5, 9])
    stir(model, 0.1)
    expected = logits(model)
    peftlab.merge(model)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.config.tie_word_embeddings
    different = (model.lm_head.weight != llama().lm_head.weight).any(1).nonzero().flatten()
    assert different.tolist() == [5, 9]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"trainable_token_indices": [96]}, "has 96 tokens, none with the number 96"),
        ({"trainable_token_indices": [3, 3]}, "occurs twice"),
        ({"trainable_token_indices": {"embed": [3]}}, "'embed' matches no module; nearest: .*embed_tokens"),
        ({"trainable_token_indices": [3], "modules_to_save": ["embed_tokens"]}, "embed_tokens is adapted or trained"),
        ({"trainable_token_indices": [3], "target_modules": ["embed_tokens"]}, "embed_tokens is adapted or trained"),
        ({"trainable_token_indices": {"embed_tokens": []}}, "trainable_token_indices"),
        ({"trainable_token_indices": [-1]}, "trainable_token_indices"),
    ],
)
def test_tokens_that_cannot_train(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PeftlabError, match=message):
        peftlab.inject_lora(llama(), **{"target_modules": ["q_proj"]} | fields)


RESIZED: dict[str, dict[str, Any]] = {
    "neither": {},
    "rows": {"trainable_token_indices": [97, 99, 3]},
    "rows of both": {"trainable_token_indices": {"embed_tokens": [97, 99], "lm_head": [97]}},
    "by LoRA": {"target_modules": ["q_proj", "embed_tokens"]},
    "whole": {"modules_to_save": ["embed_tokens"]},
}


def resized(base: Path) -> Any:
    """Return the model at ``base`` with eight tokens more."""
    model: Any = load(transformers.LlamaForCausalLM, base)
    torch.manual_seed(5)
    with torch.no_grad():
        model.resize_token_embeddings(104, mean_resizing=False)
    return model


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("case", RESIZED)
def test_a_resized_vocabulary(tmp_path: Path, case: str, tied: bool) -> None:
    """What peft saves of new rows loads, trains, is saved and merged; what peftlab saves loads in peft."""
    fields = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | RESIZED[case]
    build("llama", tie_word_embeddings=tied).save_pretrained(tmp_path / "base")
    ids = torch.arange(74, 104).view(2, 15)
    new_tokens = of({"input_ids": ids})
    expected = saved_by_peft(resized(tmp_path / "base"), tmp_path / "adapter", new_tokens, **fields)
    model = peftlab.load_adapter(resized(tmp_path / "base"), tmp_path / "adapter")
    equal(new_tokens(model), expected)
    trains_as_in_peft(
        lambda: resized(tmp_path / "base"),
        {"input_ids": ids, "labels": ids},
        tmp_path / "adapter",
        lambda out: out.loss,
    )
    with pytest.warns(UserWarning, match="has 96: .* saved with the adapter"):
        peftlab.save_adapter(model, tmp_path / "ours")
    equal(new_tokens(peft.PeftModel.from_pretrained(resized(tmp_path / "base"), str(tmp_path / "ours"))), expected)
    # With LoRA on the input embedding alone peft (0.21) does not save the new rows of an untied head.
    for adapter in ("ours",) if case == "by LoRA" and not tied else ("adapter", "ours"):
        base = load(transformers.LlamaForCausalLM, tmp_path / "base")
        base.resize_token_embeddings(104)  # new rows of other values
        equal(new_tokens(peftlab.load_adapter(base, tmp_path / adapter)), expected)
        merge_checkpoint(tmp_path / adapter, tmp_path / "base", tmp_path / f"merged-{adapter}")
        equal(new_tokens(load(transformers.LlamaForCausalLM, tmp_path / f"merged-{adapter}")), expected)
    equal(new_tokens(peftlab.merge(model)), expected)


def test_other_methods_save_a_resized_vocabulary(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "base")
    model = peftlab.inject_houlsby(resized(tmp_path / "base"), bottleneck=4)
    stir(model, 0.1)
    new_tokens = of({"input_ids": torch.arange(90, 104)[None]})
    with pytest.warns(UserWarning, match="104 tokens"):
        peftlab.save_adapter(model, tmp_path / "ours")
    base = load(transformers.LlamaForCausalLM, tmp_path / "base")
    base.resize_token_embeddings(104)
    equal(new_tokens(peftlab.load_adapter(base, tmp_path / "ours")), new_tokens(model))


LOST: dict[str, dict[str, Any]] = {
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "output layer": {"target_modules": ["q_proj", "lm_head"]},
    "rows": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 9]},
    "whole": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
}


@pytest.mark.parametrize("stored", [False, True], ids=["active", "stored"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("case", LOST)
def test_a_resized_vocabulary_would_lose_an_adapter_of_its_layers(case: str, tied: bool, stored: bool) -> None:
    model: Any = peftlab.inject_lora(build("llama", tie_word_embeddings=tied), **LOST[case])
    stir(model, 0.1)
    if stored:
        peftlab.inject(model, peftlab.LoraConfig(target_modules=["q_proj"]), name="another")
    ids = of({"input_ids": torch.arange(3, 33).view(2, 15)})
    for copied in (model, copy.deepcopy(model)):
        before, expected = list(peftlab.trainable_parameters(copied)), ids(copied)
        for size in ((104,), (90,), (None, 64), (96, 64)):
            with pytest.raises(PeftlabError, match=r"the adapter default changes .*(embed_tokens|lm_head)"):
                copied.resize_token_embeddings(*size)
        for size in ((), (96,), (None, 32), (90, 8)):
            assert copied.resize_token_embeddings(*size) is copied.get_input_embeddings()
        assert list(peftlab.trainable_parameters(copied)) == before
        equal(ids(copied), expected)
    plain = peftlab.remove(model)
    plain.resize_token_embeddings(104)
    assert len(plain.get_input_embeddings().weight) == 104


def test_without_an_adapter_in_its_layers_a_vocabulary_is_resized() -> None:
    model: Any = peftlab.inject_lora(build("llama"), target_modules=["q_proj"])
    before = list(peftlab.trainable_parameters(model))
    embedding = model.resize_token_embeddings(104, mean_resizing=False)
    assert embedding is model.get_input_embeddings() and len(embedding.weight) == model.config.vocab_size == 104
    assert list(peftlab.trainable_parameters(model)) == before
    assert "resize_token_embeddings" not in vars(peftlab.remove(model))
