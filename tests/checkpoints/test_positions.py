"""The number of tokens a model takes, compared with what it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from peftlab.models.load import position_limit

ENCODER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SEQ2SEQ = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "eos_token_id": 2,
}  # fmt: skip


def made(name: str, **config: Any) -> Any:
    torch.manual_seed(0)
    sizes = SEQ2SEQ if name == "Bart" else ENCODER
    configuration = getattr(transformers, f"{name}Config")(**{"vocab_size": 60, **sizes, **config})
    return getattr(transformers, f"{name}ForSequenceClassification")(configuration).eval()


def takes(model: Any, n: int) -> bool:
    ids = torch.full((1, n), 9)
    ids[0, -1] = 2
    try:
        with torch.no_grad():
            model(input_ids=ids)
    except (IndexError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize(
    ("name", "config", "limit"),
    [
        ("Bert", {"max_position_embeddings": 34}, 34),
        ("Roberta", {"max_position_embeddings": 34}, 32),
        ("Roberta", {"max_position_embeddings": 34, "pad_token_id": 3}, 30),
        ("XLMRoberta", {"max_position_embeddings": 34}, 32),
        ("Camembert", {"max_position_embeddings": 34}, 32),
        ("MPNet", {"max_position_embeddings": 34}, 32),
        ("Longformer", {"max_position_embeddings": 34, "attention_window": [4]}, 32),
        ("Electra", {"max_position_embeddings": 32, "embedding_size": 8}, 32),
        ("Bart", {"max_position_embeddings": 32}, 32),
        ("GPT2", {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "pad_token_id": 0}, 32),
    ],
)
def test_the_limit_is_what_the_model_takes(name: str, config: dict[str, Any], limit: int) -> None:
    model = made(name, **config)
    before = torch.get_rng_state()
    assert position_limit(model) == limit
    assert torch.equal(torch.get_rng_state(), before)
    assert takes(model, limit) and not takes(model, limit + 1)


def test_without_a_table_the_configuration_holds() -> None:
    rotary = made("Llama", max_position_embeddings=32, pad_token_id=0)
    assert position_limit(rotary) == 32
    relative = made("T5", d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    assert position_limit(relative) is None
    endless = made("XLNet", d_model=16, n_layer=1, n_head=2, d_inner=16)  # its configuration says -1
    assert position_limit(endless) is None
