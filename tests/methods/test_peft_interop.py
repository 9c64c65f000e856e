"""LoRA directories exchanged with peft, and training beside it."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from tiny_models import base, batch, logits, train

import peftlab

peft = pytest.importorskip("peft")

TARGETS = {
    "bert": ["query", "value"],
    "gpt2": ["c_attn", "c_proj"],
    "llama": ["q_proj", "v_proj", "down_proj"],
}
OPTIONS = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"FIRST": 2}, "alpha_pattern": {"FIRST": 5}},
    "biases": {"bias": "all"},
    "all-linear": {"target_modules": "all-linear"},
}


def fields(architecture, option):
    first = TARGETS[architecture][0]
    chosen = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS[architecture], **OPTIONS[option]}
    for key in ("rank_pattern", "alpha_pattern"):
        if key in chosen:
            chosen[key] = {first: chosen[key]["FIRST"]}
    return chosen


def randomised(model):
    generator = torch.Generator().manual_seed(6)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data + 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


@cache
def head(architecture):
    return [name for name, _ in base(architecture).named_children()][-1]


def peft_model(architecture, option, **more):
    config = peft.LoraConfig(
        **fields(architecture, option),
        fan_in_fan_out=architecture == "gpt2",
        task_type="SEQ_CLS",
        modules_to_save=[head(architecture)],
        **more,
    )
    return peft.get_peft_model(base(architecture), config)


cases = pytest.mark.parametrize(
    ("architecture", "option"), [(a, o) for a in TARGETS for o in OPTIONS if (a, o) != ("llama", "biases")]
)


@cases
def test_peft_reads_what_we_save(architecture, option, tmp_path):
    model = randomised(peftlab.inject_lora(base(architecture), **fields(architecture, option)))
    peftlab.save_adapter(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(base(architecture), str(tmp_path))
    inputs = batch(architecture)
    torch.testing.assert_close(logits(theirs, inputs), logits(model, inputs), rtol=1e-5, atol=1e-6)
    assert (logits(model, inputs) - logits(base(architecture), inputs)).abs().max() > 1e-3


@cases
def test_we_read_what_peft_saves(architecture, option, tmp_path):
    theirs = randomised(peft_model(architecture, option))
    theirs.save_pretrained(str(tmp_path))
    inputs = batch(architecture)
    model = peftlab.load_adapter(base(architecture), tmp_path)
    torch.testing.assert_close(logits(model, inputs), logits(theirs, inputs), rtol=1e-5, atol=1e-6)
    assert (logits(model, inputs) - logits(base(architecture), inputs)).abs().max() > 1e-3


def test_a_named_adapter_in_a_sub_folder(tmp_path):
    theirs = randomised(peft_model("bert", "plain"))
    theirs.save_pretrained(str(tmp_path))
    again = peft.PeftModel.from_pretrained(base("bert"), str(tmp_path), adapter_name="mine")
    again.save_pretrained(str(tmp_path / "named"))
    model = peftlab.load_adapter(base("bert"), tmp_path / "named" / "mine")
    torch.testing.assert_close(logits(model, batch("bert")), logits(theirs, batch("bert")), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("architecture", TARGETS)
def test_twenty_steps_beside_peft(architecture, tmp_path):
    torch.manual_seed(7)
    model = peftlab.inject_lora(base(architecture), **fields(architecture, "plain"))
    peftlab.save_adapter(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(base(architecture), str(tmp_path), is_trainable=True)
    inputs = batch(architecture, n=8)
    ours, peers = train(model, inputs, 20, lr=3e-3), train(theirs, inputs, 20, lr=3e-3)
    assert ours[-1] < ours[0] - 0.05
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(peers), rtol=0, atol=1e-5)


def test_copies_of_the_start_train_alike():
    one = peftlab.inject_lora(base("bert"), 4, 8)
    assert train(copy.deepcopy(one), batch("bert"), 5) == train(one, batch("bert"), 5)
