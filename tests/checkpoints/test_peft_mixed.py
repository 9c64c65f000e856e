"""Batches whose rows use adapters of different kinds of layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import stir
from test_peft_layers import IDS, falcon, gemma3

import peftlab

KINDS: dict[str, dict[str, Any]] = {
    "a subclass": {"target_modules": ["query_key_value"]},
    "a bias": {"target_modules": ["query_key_value", "dense"], "lora_bias": True},
    "rows of tokens": {"target_modules": ["dense"], "trainable_token_indices": {"word_embeddings": [5, 9], "lm_head": [4]}},
}  # fmt: skip
GEMMA: dict[str, dict[str, Any]] = {
    "a scaled embedding": {"target_modules": ["embed_tokens"]},
    "rows of tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 9]},
}


@pytest.mark.parametrize(("make", "kinds"), [(falcon, KINDS), (gemma3, GEMMA)], ids=["falcon", "gemma3"])
def test_each_row_is_as_with_its_adapter_alone(tmp_path: Path, make: Any, kinds: dict[str, dict[str, Any]]) -> None:
    alone = {}
    for name, fields in kinds.items():
        model = peftlab.inject_lora(make(), **fields)
        stir(model, 0.1)
        alone[name] = model(IDS).logits.detach()
        peftlab.save_adapter(model, tmp_path / name)
    model = make()
    for name in kinds:
        peftlab.load_adapter(model, tmp_path / name, name=name)
    for first, second in zip(kinds, [*list(kinds)[1:], "__base__"], strict=True):
        with torch.no_grad(), peftlab.adapter_names(model, [first, second]):
            rows = model(IDS).logits
        expected = alone.get(second, make()(IDS).logits.detach())
        torch.testing.assert_close(rows[0], alone[first][0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(rows[1], expected[1], rtol=1e-4, atol=1e-5)
