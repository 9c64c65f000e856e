"""A torchao int8 base: its own forward runs, and only the low-rank part is added."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import peftlab

torchao = pytest.importorskip("torchao.quantization")
IDS = torch.arange(20).view(2, 10)


def quantised() -> nn.Module:
    torch.manual_seed(0)
    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    model = LlamaForCausalLM(LlamaConfig(**size, vocab_size=50, bos_token_id=0, eos_token_id=0, pad_token_id=0)).eval()
    wanted = lambda module, name: isinstance(module, nn.Linear) and "lm_head" not in name  # noqa: E731
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig(), filter_fn=wanted)
    return model


def test_lora_on_int8_weights() -> None:
    model = quantised()
    base = model(IDS).logits.detach()
    frozen = model.model.layers[0].self_attn.q_proj.weight
    peftlab.inject_lora(model, r=4, target_modules="all-linear")
    assert torch.equal(model(IDS).logits, base)
    assert model.model.layers[0].self_attn.q_proj.weight is frozen
    with torch.no_grad():
        for parameter in peftlab.trainable_parameters(model).values():
            assert parameter.dtype == torch.float32
            parameter += torch.randn_like(parameter) * 0.05
    leaf = model.model.layers[0].self_attn.q_proj
    x = torch.randn(3, 64)
    expected = nn.Linear.forward(leaf, x) + x @ leaf.lora_A.T @ leaf.lora_B.T * leaf.scale
    assert torch.allclose(leaf(x), expected, atol=1e-6)
    model(IDS).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in peftlab.trainable_parameters(model).values())
    with peftlab.disabled(model):
        assert torch.equal(model(IDS).logits, base)
    with pytest.raises(peftlab.PeftlabError, match="quantised"):
        peftlab.merge(model)
    assert torch.equal(peftlab.remove(model)(IDS).logits, base)


def test_dora_on_int8_weights_is_refused() -> None:
    with pytest.raises(peftlab.PeftlabError, match="quantised"):
        peftlab.inject_lora(quantised(), use_dora=True)
