"""Starting from another run's result: the body is its, the head is fresh, and what does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from peftlab.checkpoints.adapter import save_adapter
from peftlab.errors import PeftlabError
from peftlab.methods.inject import inject, make_config, trainable_parameters
from peftlab.pipelines.finetune import start_from


def made(model: Path, labels: int, name: str, seed: int, **fields: Any) -> torch.nn.Module:
    torch.manual_seed(seed)
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=labels, ignore_mismatched_sizes=True)
    inject(base, make_config(name, **fields))
    with torch.no_grad():
        for parameter in trainable_parameters(base).values():
            parameter.add_(torch.randn_like(parameter))
    return base


@pytest.mark.parametrize("name", ["lora", "houlsby", "bitfit", "full", "head"])
def test_the_body_is_taken_and_the_head_is_fresh(model: Path, tmp_path: Path, name: str) -> None:
    three, one = made(model, 3, name, 1), made(model, 1, name, 2)
    save_adapter(three, tmp_path / "adapter")
    there = trainable_parameters(three)
    before = {key: value.detach().clone() for key, value in trainable_parameters(one).items()}
    start_from(one, str(tmp_path))
    for key, value in trainable_parameters(one).items():
        assert torch.equal(value, before[key] if key.startswith("classifier") else there[key]), key


def test_what_does_not_fit_is_refused(model: Path, tmp_path: Path) -> None:
    save_adapter(made(model, 3, "lora", 1, r=2, lora_alpha=4), tmp_path / "adapter")
    for fields, reason in (
        ({"name": "bitfit"}, "its method has name lora, this run's bitfit"),
        ({"name": "lora", "r": 2, "lora_alpha": 8}, "its method has lora_alpha 4.0, this run's 8.0"),
        ({"name": "lora", "r": 4, "lora_alpha": 4}, "has shape"),
        ({"name": "lora", "r": 2, "lora_alpha": 4, "target_modules": ["query"]}, "does not fit this model"),
    ):
        other = made(model, 2, seed=2, **fields)
        before = {key: value.detach().clone() for key, value in trainable_parameters(other).items()}
        with pytest.raises(PeftlabError, match=reason):
            start_from(other, str(tmp_path))
        assert all(torch.equal(value, before[key]) for key, value in trainable_parameters(other).items())
    with pytest.raises(PeftlabError, match="not an adapter"):
        start_from(other, str(tmp_path / "nothing"))
