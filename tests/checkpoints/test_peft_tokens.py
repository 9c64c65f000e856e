"""Trained rows of an embedding: ``trainable_token_indices``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import build, stir
from peft_round_trip import of, round_trip, trains_as_in_peft
from test_peft_layers import bart, gemma3

import peftlab
from peftlab.errors import PeftlabError
from peftlab.methods.injection import trainable_parameters

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
