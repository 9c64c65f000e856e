"""``inject`` takes peft's configuration objects, and trains what peft trains."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tiny_models import base, batch, logits

import peftlab
from peftlab.errors import PeftlabError
from peftlab.methods.inject import injection_of, trainable_parameters

peft = pytest.importorskip("peft")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "classifier": ("bert", {"task_type": "SEQ_CLS", "target_modules": ["query", "value"], "lora_dropout": 0.1}),
    "an enumeration": ("roberta", {"task_type": peft.TaskType.SEQ_CLS, "target_modules": ["query"]}),
    "no task type": ("bert", {"target_modules": ["query"], "bias": "lora_only"}),
    "all linear maps": ("llama", {"task_type": "SEQ_CLS", "target_modules": "all-linear", "use_dora": True}),
    "patterns": ("gpt2", {"target_modules": ["c_attn"], "rank_pattern": {"c_attn": 2}, "fan_in_fan_out": True}),
    "modules_to_save": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["model.norm"], "use_rslora": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_as_many_parameters_train_as_in_peft(case: str) -> None:
    architecture, fields = CASES[case]
    config = peft.LoraConfig(**fields)
    model = peftlab.inject(base(architecture), config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.get_peft_model(base(architecture), peft.LoraConfig(**fields))
    assert sum(p.numel() for p in trainable_parameters(model).values()) == theirs.get_nb_trainable_parameters()[0]
    assert injection_of(model).config.lora_alpha == 8  # peft's default, not ours
    torch.testing.assert_close(logits(model, batch(architecture)), logits(base(architecture), batch(architecture)))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (peft.IA3Config(), "peft_type IA3"),
        (peft.LoraConfig(init_lora_weights="orthogonal"), "init_lora_weights='orthogonal' is not computed here"),
        (peft.LoraConfig(init_lora_weights=False), "init_lora_weights=False is not computed here"),
        (peft.LoraConfig(use_qalora=True), "use_qalora=True is not supported"),
        (peft.LoraConfig(target_modules=["nowhere"]), "'nowhere' matches no module"),
        ({"r": 8}, "a dict is no configuration"),
        (None, "a NoneType is no configuration"),
    ],
    ids=["IA3", "orthogonal", "random", "QALoRA", "no such module", "dict", "None"],
)
def test_what_is_not_supported_is_refused_by_name(config: Any, reason: str) -> None:
    model = base("bert")
    with pytest.raises(PeftlabError, match=reason):
        peftlab.inject(model, config)
    assert not trainable_parameters(model).keys() - dict(model.named_parameters()).keys()
    assert torch.equal(logits(model, batch("bert")), logits(base("bert"), batch("bert")))
