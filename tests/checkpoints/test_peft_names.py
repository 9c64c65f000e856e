"""Names in adapter_config.json that peft understands as they are meant."""

from __future__ import annotations

import dataclasses
import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from models import build, stir
from peft_round_trip import equal, of, randomised, saved_by_peft
from torch import Tensor, nn

import peftlab
from tests.peft_cases import architectures

IDS = torch.arange(3, 33).view(2, 15)


def read_by_peft(model: Any, directory: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(model, str(directory))


def written(model: nn.Module, directory: Path) -> dict[str, Any]:
    """Save the adapter of ``model`` and return its configuration."""
    return json.loads((peftlab.save_adapter(model, directory) / "adapter_config.json").read_text())


def test_a_head_whose_name_ends_another_module_s(tmp_path: Path) -> None:
    """ModernVBERT: its task head is called ``head``, as a part of the vision model is."""
    name = "ModernVBertForSequenceClassification"
    make = partial(architectures.build, "modernvbert", name)
    logits = of(architectures.inputs("modernvbert", name))
    model = peftlab.inject_lora(make(), target_modules="all-linear")
    stir(model, 0.1)
    assert written(model, tmp_path)["modules_to_save"] == ["head.dense", "head.norm", "classifier"]
    equal(logits(peftlab.load_adapter(make(), tmp_path)), logits(model))
    theirs = read_by_peft(make(), tmp_path)
    equal(logits(theirs), logits(model))
    assert not [name for name, _ in theirs.named_modules() if "vision_model.head.modules_to_save" in name]


class Ambiguous(nn.Module):
    """``fc`` is the end of ``block.fc``, ``head`` of ``lm_head`` and of ``block.head``; with a dict for a configuration."""

    def __init__(self, config: object) -> None:
        super().__init__()
        self.config = config
        self.fc, self.head, self.lm_head = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6)), nn.Linear(6, 4)
        self.block = nn.ModuleDict({"fc": nn.Linear(6, 6), "head": nn.Linear(6, 6)})

    def forward(self, x: Tensor) -> Tensor:
        y = self.block["head"](self.block["fc"](self.fc(x).tanh()).tanh())
        return self.lm_head(self.head(y.tanh()))


@dataclasses.dataclass
class Settings:
    model_type: str = "own"


@pytest.mark.parametrize(
    "config", [{"model_type": "own", "vocab_size": 7}, Settings(), None], ids=["dict", "dataclass", "none"]
)
def test_full_names_that_end_others(tmp_path: Path, config: object) -> None:
    def make() -> Any:
        return randomised(Ambiguous(config))

    logits = of({"x": torch.randn(3, 6, generator=torch.Generator().manual_seed(0))})
    model = peftlab.inject_lora(make(), target_modules=r"fc", modules_to_save=["head.0"])
    stir(model, 0.3)
    raw = written(model, tmp_path)
    assert raw["target_modules"] == "fc" and raw["modules_to_save"] == ["head.0"]
    equal(logits(peftlab.load_adapter(make(), tmp_path)), logits(model))
    theirs = read_by_peft(make(), tmp_path)
    equal(logits(theirs.base_model), logits(model))
    assert [name for name, _ in theirs.named_modules() if name.endswith("lora_A.default")] == [
        "base_model.model.fc.lora_A.default"
    ]


@pytest.mark.parametrize(
    ("kind", "name"),
    [("mt5", "MT5ForConditionalGeneration"), ("t5", "T5ForConditionalGeneration"), ("bart", "BartForConditionalGeneration"),
     ("marian", "MarianMTModel")],
)  # fmt: skip
def test_a_shared_embedding_trained_whole(tmp_path: Path, kind: str, name: str) -> None:
    """What peft cannot tie (it makes linear maps of tied embeddings) is written as modules of their own."""
    make, logits = partial(architectures.build, kind, name), of(architectures.inputs(kind, name))
    target = "q" if "t5" in kind else "q_proj"
    model = peftlab.inject_lora(make(), target_modules=[target], modules_to_save=["shared"])
    stir(model, 0.1)
    raw = written(model, tmp_path / "ours")
    assert "ensure_weight_tying" not in raw and len(raw["modules_to_save"]) >= 3
    again = peftlab.load_adapter(make(), tmp_path / "ours")
    equal(logits(again), logits(model))
    assert {n for n, p in again.named_parameters() if p.requires_grad} == {
        n for n, p in model.named_parameters() if p.requires_grad
    }
    equal(logits(read_by_peft(make(), tmp_path / "ours")), logits(model))
    for ensure in (False, True):  # which changes nothing in peft (0.21), as "shared" is no name that it knows
        fields: dict[str, Any] = {
            "target_modules": [target],
            "modules_to_save": ["shared"],
            "ensure_weight_tying": ensure,
        }
        expected = saved_by_peft(make(), tmp_path / f"theirs-{ensure}", logits, **fields)
        equal(logits(peftlab.load_adapter(make(), tmp_path / f"theirs-{ensure}")), expected)


def test_all_linear_says_what_is_no_linear_map() -> None:
    with pytest.warns(
        UserWarning, match=r"all-linear means linear maps, and experts.down_proj, experts.gate_up_proj, .*gate.weight"
    ):
        peftlab.inject_lora(build("mixtral"), target_modules="all-linear")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        peftlab.inject_lora(build("llama"), target_modules="all-linear")
        peftlab.inject_lora(build("mixtral"), target_modules="all-linear", target_parameters=["experts.down_proj"])
