"""Pruned drafts: a plain checkpoint that computes what the masked target does, and a search that finds what is useless."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_models import requests, tiny
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from peftlab.drafting.config import Pruning
from peftlab.drafting.objectives import Objective
from peftlab.drafting.pruning import (
    Search,
    choose_units,
    distance,
    kept_units,
    largest,
    parts,
    pruned,
    pruned_draft,
    scaled,
)
from peftlab.drafting.target import layer_stack
from peftlab.drafting.text import make_dataset
from peftlab.errors import PeftlabError

IDS = torch.arange(3, 15)[None]
SIZES = {
    "vocab_size": 48,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
OWN = {
    "gpt2": {"vocab_size": 48, "n_embd": 24, "n_layer": 3, "n_head": 3, "n_positions": 64},
    "gpt_neox": SIZES | {"num_attention_heads": 3, "head_dim": 8},
    "llama": SIZES | {"attention_bias": True, "mlp_bias": True},
}
FAMILIES = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "olmo2",
    "qwen2",
    "qwen3",
    "smollm3",
)


def model_of(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **OWN.get(family, SIZES))).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)  # zero at first: a bias in the wrong place would not be seen
        elif parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def some_units(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return other units in every layer: more than half of each part."""
    layers = len(layer_stack(model))
    return {
        name: torch.stack([torch.randperm(part.units)[: part.units // 2 + 1].sort().values for _ in range(layers)])
        for name, part in parts(model.config).items()
    }


def masks_of(model: PreTrainedModel, units: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: torch.zeros(len(kept), parts(model.config)[name].units).scatter_(1, kept, 1.0)
        for name, kept in units.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_pruned_model_is_the_masked_one_as_a_plain_checkpoint(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    units = some_units(model)
    assert ("kv_groups" in units) == (family not in ("gpt2", "gpt_neox", "olmo2"))
    small = pruned(model, units)
    small.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with scaled(model, masks_of(model, units)):
        masked = model(input_ids=IDS).logits
    whole = model(input_ids=IDS).logits
    torch.testing.assert_close(again(input_ids=IDS).logits, masked, rtol=1e-4, atol=1e-4)
    assert (whole - masked).abs().max() > 1e-2, "what was masked mattered"
    assert small.num_parameters() == again.num_parameters() < model.num_parameters(), "tied weights are one"
    # With a cache, whose width the configuration says.
    out = again.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert out[0, -1] == again(input_ids=out[:, :-1]).logits[0, -1].argmax()


@torch.inference_mode()
def test_scales_are_folded() -> None:
    for family in ("llama", "gpt2"):
        model = model_of(family)
        units = some_units(model)
        scales = {name: torch.rand(mask.shape) for name, mask in masks_of(model, units).items()}
        both = {name: scale * masks_of(model, units)[name] for name, scale in scales.items()}
        with scaled(model, both):
            expected = model(input_ids=IDS).logits
        torch.testing.assert_close(pruned(model, units, scales)(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-4)


def search(model: Any, seed: int = 0) -> Search:
    return Search(model, model, Objective("kl"), make_dataset(requests(16)), batch_size=8, seed=seed)


@pytest.fixture
def half_useless() -> tuple[Any, Tensor]:
    """A model in which half of the units of each layer reach nothing, and the numbers of the others."""
    model = tiny(0).requires_grad_(False)
    torch.manual_seed(1)
    useful = torch.stack([torch.randperm(32)[:16].sort().values for _ in range(2)])
    for layer, kept in zip(model.model.layers, useful, strict=True):
        torch.nn.init.normal_(layer.mlp.gate_proj.weight)
        torch.nn.init.normal_(layer.mlp.up_proj.weight)
        weight = torch.zeros(16, 32)
        weight[:, kept] = torch.randn(16, 16)
        layer.mlp.down_proj.weight.data = weight
    return model, useful


def test_the_search_prunes_what_is_useless_and_ends_early(half_useless: tuple[Any, Tensor]) -> None:
    model, useful = half_useless
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = choose_units(search(model), Pruning(ffn=0.5))
    assert torch.equal(found.tensors["ffn"], useful)
    (only,) = found.report["rounds"]
    assert only["stable"] and 40 <= only["steps"] < 200 and only["distances"][-1] < 0.1
    assert found.report["kept"] == {"ffn": 16} and found.report["of"] == {"ffn": 32}
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()), (
        "the target is as it was"
    )
    draft = pruned_draft(model, found.tensors)
    torch.testing.assert_close(draft(input_ids=IDS).logits, model(input_ids=IDS).logits, rtol=1e-4, atol=1e-4)


def test_rounds_prune_step_by_step_and_weights_are_rewound_or_not(half_useless: tuple[Any, Tensor]) -> None:
    model, _ = half_useless
    wanted = {rewind: Pruning(ffn=0.75, rounds=2, rewind=rewind, steps=8) for rewind in (True, False)}
    found = {rewind: choose_units(search(model), config) for rewind, config in wanted.items()}
    assert [round_["kept"] for round_ in found[True].report["rounds"]] == [{"ffn": 16}, {"ffn": 8}]
    assert set(found[True].tensors) == {"ffn"}
    rewound = pruned_draft(model, found[True].tensors).state_dict()
    expected = pruned(model, {"ffn": found[True].tensors["ffn"]}).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in rewound.items())
    trained = pruned_draft(model, found[False].tensors).state_dict()
    own = pruned(model, {"ffn": found[False].tensors["ffn"]}).state_dict()
    assert trained.keys() == own.keys() and not torch.equal(
        trained["model.layers.0.mlp.down_proj.weight"], own["model.layers.0.mlp.down_proj.weight"]
    )
    assert torch.equal(trained["model.embed_tokens.weight"], own["model.embed_tokens.weight"])


def test_masks_and_their_distance() -> None:
    scores = torch.tensor([[3.0, 1.0, 1.0, 2.0], [1.0, 1.0, 1.0, 9.0]])
    alive = torch.tensor([[True] * 4, [True, True, True, False]])
    mask = largest(scores, alive, 2)
    assert mask.tolist() == [[True, False, False, True], [True, True, False, False]]
    other = torch.tensor([[True, True, False, False], [True, True, False, False]])
    assert distance({"ffn": mask}, {"ffn": other}) == 2 / 8
    assert distance({"ffn": mask, "kv_groups": mask}, {"ffn": other, "kv_groups": mask}) == 2 / 16


@pytest.mark.parametrize(
    ("family", "shares", "message"),
    [
        (
            "gpt2",
            {"kv_groups": 0.5},
            r"draft\.prune\.kv_groups: gpt2 \(its number of heads follows .*\) is not among gemma",
        ),
        ("bloom", {"ffn": 0.5}, r"draft\.prune\.ffn: bloom \(unknown\) is not among gemma, .*smollm3"),
        ("llama", {"kv_groups": 0.1}, r"draft\.prune\.kv_groups: 0\.1 of 3 is none of them"),
        ("llama", {"kv_groups": 0.9}, r"draft\.prune\.kv_groups: 0\.9 of 3 is all of them"),
    ],
)
def test_refused(family: str, shares: dict[str, float], message: str) -> None:
    with pytest.raises(PeftlabError, match=message):
        kept_units(AutoConfig.for_model(family, **OWN.get(family, SIZES)), shares)
