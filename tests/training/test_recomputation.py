"""Activations computed again in backward: the same gradients from fewer bytes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import peftlab
from peftlab import PeftlabError
from peftlab.methods.inject import trainable_parameters
from peftlab.methods.lora import functional
from peftlab.training.recomputation import _contexts, _costly, recompute_activations

IDS = torch.randint(0, 97, (3, 20), generator=torch.Generator().manual_seed(0))
HOW = (None, False, True)  # not at all, all of a layer, selective


def llama(selective: bool | None, dropout: float = 0.0, **options: object) -> LlamaForCausalLM:
    """Return a small model with LoRA on all linear maps, whose B is not zero."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=dropout,
    )  # fmt: skip
    model = peftlab.inject_lora(LlamaForCausalLM(config), **{"r": 2, "target_modules": "all-linear", **options})
    for name, parameter in trainable_parameters(model).items():
        nn.init.normal_(parameter, std=0.1) if name.endswith("lora_B") else None
    if selective is not None:
        recompute_activations(model, selective=selective)
    return model.train()


def loss(model: LlamaForCausalLM, bf16: bool = False) -> Tensor:
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        return model(input_ids=IDS, labels=IDS, use_cache=False).loss


@pytest.mark.parametrize(
    ("dropout", "options"), [(0.0, {}), (0.3, {"lora_dropout": 0.2}), (0.0, {"use_dora": True, "lora_dropout": 0.2})]
)
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("block", [functional.MASK_BLOCK, 1 << 10])
def test_gradients_are_the_same_bit_for_bit(dropout, options, bf16, block, monkeypatch):
    """Also where LoRA's inputs are masked in several blocks."""
    monkeypatch.setattr(functional, "MASK_BLOCK", block)
    found = []
    for selective in HOW:
        model = llama(selective, dropout, **options)
        loss(model, bf16).backward()
        found.append({name: parameter.grad for name, parameter in trainable_parameters(model).items()})
        found[-1]["the generator afterwards"] = torch.rand(1)
    assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in found[0])


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"]])
def test_backward_twice(targets):
    """The second time nothing is left of what was kept, not even products that the first time did not need."""
    model = llama(True, target_modules=targets)
    value = loss(model)
    parameters = list(trainable_parameters(model).values())
    once, twice = (torch.autograd.grad(value, parameters, retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(once, twice, strict=True))


def test_selective_keeps_less_than_a_plain_step_and_more_than_the_inputs():
    kept = []
    for selective in HOW:
        model = llama(selective)
        loss(model)
        with profile(profile_memory=True) as recorded:
            value = loss(model)
        kept.append(sum(event.self_cpu_memory_usage for event in recorded.events()))
        del value
    plain, inputs, selected = kept
    assert inputs < selected < 0.75 * plain


def test_attention_that_drops_is_computed_again():
    attention = torch.ops.aten._scaled_dot_product_efficient_attention.default  # (q, k, v, bias, log_sum, dropout_p)
    given = (*[torch.empty(1, 1, 4, 2)] * 3, None, True)
    assert _costly(attention, given, {}, set()) and _costly(attention, (*given, 0.0), {}, set())
    assert not _costly(attention, (*given, 0.1), {}, set()) and not _costly(attention, given, {"dropout_p": 0.1}, set())


def test_what_cannot_be_repeated_is_refused():
    linear, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)

    def in_place(x: Tensor) -> Tensor:
        return linear(x).mul_(2).sigmoid()

    def changing(x: Tensor, seen: list[int]) -> Tensor:
        seen.append(1)
        return (linear(x) if len(seen) == 1 else x.mm(linear.weight)).sigmoid()

    run = partial(checkpoint, use_reentrant=False, context_fn=_contexts)
    with pytest.raises(PeftlabError, match=r"in place \(aten.mul_.Tensor\), which selective cannot repeat"):
        run(in_place, x)
    with pytest.raises(PeftlabError, match="something else in backward"):
        run(changing, x, []).sum().backward()
