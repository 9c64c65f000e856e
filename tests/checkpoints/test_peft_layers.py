"""LoRA on all kinds of layers that peft adapts."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import LLAMA, SMALL
from peft_round_trip import of, randomised, round_trip, trains_as_in_peft
from torch import nn

import peftlab
from peftlab.errors import PeftlabError

IDS = torch.arange(3, 33).view(2, 15)
TEXT = {"input_ids": IDS}


def gemma3() -> Any:
    config = transformers.Gemma3TextConfig(**LLAMA | {"head_dim": 8, "pad_token_id": 0})
    return randomised(transformers.Gemma3ForCausalLM(config))


def bart() -> Any:
    config = transformers.BartConfig(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=96, max_position_embeddings=40, scale_embedding=True,
    )  # fmt: skip
    return randomised(transformers.BartForConditionalGeneration(config))


def falcon() -> Any:
    config = transformers.FalconConfig(**SMALL, alibi=False, bias=True, tie_word_embeddings=False)
    return randomised(transformers.FalconForCausalLM(config))


def siglip() -> Any:
    config = transformers.SiglipVisionConfig(**SMALL | {"image_size": 16, "patch_size": 8})
    return randomised(transformers.SiglipVisionModel(config))


SUBCLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "scaled embedding of Gemma 3": (gemma3, {"target_modules": ["embed_tokens", "q_proj"]}),
    "scaled embedding with DoRA": (gemma3, {"target_modules": ["embed_tokens"], "use_dora": True}),
    "FalconLinear": (falcon, {"target_modules": ["query_key_value", "dense"]}),
    "FalconLinear with DoRA": (falcon, {"target_modules": ["query_key_value"], "use_dora": True}),
    "FalconLinear, all-linear": (falcon, {"target_modules": "all-linear", "use_rslora": True}),
}


@pytest.mark.parametrize("case", SUBCLASSES)
def test_subclasses_of_linear_maps_and_embeddings(tmp_path: Path, case: str) -> None:
    make, fields = SUBCLASSES[case]
    model = round_trip(make, of(TEXT), tmp_path, task_type="CAUSAL_LM", **fields)
    trains_as_in_peft(make, TEXT | {"labels": IDS}, tmp_path / "adapter", lambda out: out.loss)
    again = pickle.loads(pickle.dumps(model))
    for other in (copy.deepcopy(model), again):
        assert torch.equal(of(TEXT)(other), of(TEXT)(model))
        assert {type(m) for m in other.modules()} == {type(m) for m in model.modules()}


def test_embeddings_of_an_encoder_and_a_decoder(tmp_path: Path) -> None:
    round_trip(bart, of(TEXT), tmp_path, task_type="SEQ_2_SEQ_LM", target_modules=["embed_tokens", "fc1"])


def test_positions_are_looked_up_where_the_subclass_looks() -> None:
    """BART's embedding of positions adds 2 to each; peft looks up the tokens' numbers instead."""
    model = peftlab.inject_lora(bart(), target_modules=["embed_positions"])
    for name, parameter in model.named_parameters():
        if "lora_embedding_A" in name:
            nn.init.normal_(parameter)
    expected = of(TEXT)(model)
    assert (expected - of(TEXT)(bart())).abs().max() > 1e-3
    torch.testing.assert_close(of(TEXT)(peftlab.merge(model)), expected, rtol=1e-4, atol=1e-5)


def test_a_projection_that_attention_never_calls(tmp_path: Path) -> None:
    """peft adapts the output projection of nn.MultiheadAttention, without effect; a merge must not change it."""
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))}
    with pytest.warns(UserWarning, match=r"head\.attention\.out_proj.*no effect"):
        model = round_trip(siglip, of(inputs), tmp_path, target_modules="all-linear")
    assert type(model.head.attention.out_proj) is type(siglip().head.attention.out_proj)
    with pytest.raises(PeftlabError, match=r"attention\.out_proj"):
        peftlab.inject_lora(siglip(), target_modules=["attention.out_proj"])


class Router(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x).topk(2)


class Causal(nn.Conv1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.pad(x, (2, 0)))


class Normed(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(8, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(ids))


@pytest.mark.parametrize(
    ("leaf", "reason"),
    [
        (Router(4, 4), "something other than W·x"),
        (Causal(4, 4, 3), "not that of a plain convolution"),
        (Normed(), "uses other parameters too"),
        (nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 3)), "computed of other parameters"),
    ],
)
def test_subclasses_that_compute_something_else(leaf: nn.Module, reason: str) -> None:
    with pytest.raises(PeftlabError, match=reason):
        peftlab.inject_lora(nn.Sequential(leaf), target_modules=["0"])
    model = nn.Sequential(leaf, nn.Linear(4, 4))
    peftlab.inject_lora(model, r=2, target_modules="all-linear")
    assert model[0] is leaf
