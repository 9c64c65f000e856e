"""FastMTP: one layer for every drafted token; training is what drafting computes, and files are speculators'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_models import VOCAB, requests, tiny
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from peftlab.decoding.cache import KVCache
from peftlab.drafting.mtp import Mtp, MtpStep, new_layer, read_mtp, write_mtp
from peftlab.drafting.objectives import Objective, kl
from peftlab.drafting.state_network import FeatureLoss, TargetWithNetwork, predictions, unroll
from peftlab.drafting.target import forward_hidden, head_weight, input_embedding
from peftlab.drafting.text import Collate, make_dataset
from peftlab.errors import PeftlabError
from peftlab.methods.inject import inject, make_config, trainable_parameters
from peftlab.methods.merging import merge

TOKENS = torch.tensor([0, 1, 2, 5, 7, 8, 11, 20, 21, 33, 39])


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny(3, layers=4).requires_grad_(False)


@pytest.fixture
def network(target: Any) -> Mtp:
    """A layer away from its start."""
    made = new_layer(target)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in made.mtp_layers.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, std=0.3)
    return made.eval()


def states_of(target: Any, ids: torch.Tensor) -> torch.Tensor:
    return forward_hidden(target, ids, torch.ones_like(ids))[-1]


def test_at_the_start_it_gives_the_targets_own_next_token(target: Any) -> None:
    ids = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    hidden = states_of(target, ids)
    made, own = new_layer(target), target.lm_head(hidden).argmax(-1)
    with torch.no_grad():
        for k, states in enumerate(unroll(made, hidden, ids, 3)):
            assert torch.equal(made.logits(states).argmax(-1), own), k
        torch.testing.assert_close(states.norm(dim=-1), hidden.norm(dim=-1), rtol=0.5, atol=0)


def test_one_token_is_the_first_of_several(target: Any, network: Mtp) -> None:
    ids = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(2))
    hidden = states_of(target, ids)
    with torch.no_grad():
        (one,), several = unroll(network, hidden, ids, 1), list(unroll(network, hidden, ids, 3))
    assert torch.equal(one, several[0]) and not torch.allclose(several[1][:, :-1], one[:, 1:], atol=1e-2)
    rows = make_dataset(requests())
    inputs, model = Collate(pad=2)([rows[i] for i in range(len(rows))]), TargetWithNetwork(target, network)
    first, both = (FeatureLoss(Objective("kl"), steps, 0.6)(model, inputs) for steps in (1, 2))
    ids, places = inputs["input_ids"], predictions(inputs["weights"], 2)
    hidden = forward_hidden(target, ids, inputs["attention_mask"])[-1]
    second = list(unroll(network, hidden, ids, 2))[1]
    p, q = (F.linear(x, head_weight(target)) for x in (hidden[:, 2:][places], second[:, :-2][places]))
    torch.testing.assert_close(both, first + 0.6 * kl(p, q).sum())


def test_a_step_of_training_is_a_drafted_token(target: Any, network: Mtp) -> None:
    """Step k at row t: the logits of the k + 1st token drafted after t + 2 tokens, with a cache."""
    ids = torch.randint(3, VOCAB, (1, 12), generator=torch.Generator().manual_seed(1))
    hidden = states_of(target, ids)
    step = MtpStep(network, pack=False)
    with torch.no_grad():
        trained = list(unroll(network, hidden, ids, 3))
        for row in (0, 3, 7):
            cache, state = KVCache(1, 1, 64), hidden[:, : row + 1]
            block = cache.block([0], [0], row + 1)
            for k in range(3):
                tokens = ids[:, 1 : row + 2] if k == 0 else ids[:, row + 1 + k : row + 2 + k]
                state = step.advance(cache, tokens, state, block)[:, -1:]
                torch.testing.assert_close(trained[k][:, row], state[:, 0], atol=1e-5, rtol=1e-4)
                block = cache.block([0], [row + 1 + k], 1)


def test_lora_tunes_the_layer_and_folds_into_it(target: Any, network: Mtp) -> None:
    ids = torch.randint(3, VOCAB, (1, 9), generator=torch.Generator().manual_seed(4))
    hidden = states_of(target, ids)
    inject(network, make_config("lora", r=2, target_modules="all-linear"))
    assert not any("lm_head" in name for name in trainable_parameters(network))
    with torch.no_grad():
        for parameter in trainable_parameters(network).values():
            parameter.normal_(std=0.2)
        tuned = list(unroll(network, hidden, ids, 2))
        merge(network)
        for mine, theirs in zip(tuned, unroll(network, hidden, ids, 2), strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("tokens", [None, TOKENS])
def test_files_are_those_of_speculators(tmp_path: Path, target: Any, network: Mtp, tokens: torch.Tensor | None) -> None:
    head, embedding = head_weight(target), input_embedding(target)
    network.draft_only(head if tokens is None else head[tokens], tokens)
    write_mtp(network, tmp_path, target="mine", architecture="LlamaForCausalLM", tokens=3)
    h, d, between = 16, 8, 32
    one = "mtp_layers.0."
    expected = {
        **{f"{one}{name}_layernorm.weight": (h,) for name in ("hidden", "token", "final", "input", "post_attention")},
        f"{one}input_proj.weight": (h, 2 * h),
        **{f"{one}self_attn.{name}_proj.weight": (h, h) for name in "qkvo"},
        **{f"{one}self_attn.{name}_norm.weight": (d,) for name in "qk"},
        **{f"{one}mlp.{name}_proj.weight": (between, h) for name in ("gate", "up")},
        f"{one}mlp.down_proj.weight": (h, between),
        **({} if tokens is None else {"d2t": (len(tokens),), "t2d": (VOCAB,)}),
    }
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    assert (config["speculators_model_type"], config["num_nextn_predict_layers"]) == ("mtp", 1)
    assert config["transformer_layer_config"]["model_type"] == "qwen3"
    back = read_mtp(tmp_path, embedding, head)
    ids = torch.randint(3, VOCAB, (1, 9), generator=torch.Generator().manual_seed(4))
    hidden = states_of(target, ids)
    with torch.no_grad():
        for mine, theirs in zip(unroll(network, hidden, ids, 2), unroll(back, hidden, ids, 2), strict=True):
            assert torch.equal(network.logits(mine), back.logits(theirs))
    with pytest.raises(PeftlabError, match="for states of 16 and 40 tokens, but the target has 12 and 40"):
        read_mtp(tmp_path, torch.zeros(40, 12), torch.zeros(40, 12))
    save_file(tensors | {"strange": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(PeftlabError, match="strange"):
        read_mtp(tmp_path, embedding, head)
