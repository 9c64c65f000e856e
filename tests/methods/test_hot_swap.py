"""An adapter loaded onto an injected model brings its own configuration with its values."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_models import base, batch, logits

import peftlab
from peftlab.methods.inject import injection_of, trainable_parameters

OTHERS = {
    "alpha": {"lora_alpha": 40},
    "rslora": {"use_rslora": True},
    "alpha_pattern": {"alpha_pattern": {"value": 3}},
    "dropout": {"lora_dropout": 0.5},
    "names": {"target_modules": ["attention.self.query", "attention.self.value"]},
}


def stirred(model):
    torch.manual_seed(4)
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("other", OTHERS)
def test_the_new_configuration_computes_and_is_saved(other, tmp_path):
    inputs = batch("bert")
    first = {"r": 4, "lora_alpha": 8}
    stored = stirred(peftlab.inject_lora(base("bert"), **(first | OTHERS[other])))
    peftlab.save_adapter(stored, tmp_path / "stored")
    model = stirred(peftlab.inject_lora(base("bert"), **first))
    before = trainable_parameters(model)
    peftlab.load_adapter(model, tmp_path / "stored")
    assert torch.equal(logits(model, inputs), logits(stored, inputs))
    # The parameters are the same objects, so that an optimiser that holds them continues to train them.
    assert {name: id(p) for name, p in trainable_parameters(model).items()} == {n: id(p) for n, p in before.items()}
    peftlab.save_adapter(model, tmp_path / "again")
    configs = [json.loads((tmp_path / where / "adapter_config.json").read_text()) for where in ("stored", "again")]
    assert configs[0] == configs[1]
    assert torch.equal(logits(peftlab.load_adapter(base("bert"), tmp_path / "again"), inputs), logits(stored, inputs))
    torch.testing.assert_close(logits(peftlab.merge(model), inputs), logits(stored, inputs), rtol=1e-4, atol=1e-5)


def test_houlsby_swaps_its_activation(tmp_path):
    stored = stirred(peftlab.inject_houlsby(base("bert"), 6, non_linearity="relu"))
    peftlab.save_adapter(stored, tmp_path)
    model = peftlab.load_adapter(peftlab.inject_houlsby(base("bert"), 6, non_linearity="tanh"), tmp_path)
    assert torch.equal(logits(model, batch("bert")), logits(stored, batch("bert")))
    assert injection_of(model).config == injection_of(stored).config


def test_an_optimiser_goes_on(tmp_path):
    peftlab.save_adapter(stirred(peftlab.inject_lora(base("bert"), 4, 40)), tmp_path)
    model = peftlab.inject_lora(base("bert"), 4, 8)
    optimizer = torch.optim.SGD(trainable_parameters(model).values(), lr=0.1)
    peftlab.load_adapter(model, tmp_path)
    before = logits(model, batch("bert"))
    model(**batch("bert")).loss.backward()
    optimizer.step()
    assert not torch.equal(logits(model, batch("bert")), before)
