"""An adapter of the text model in a composite checkpoint, of images and text, merged into the whole of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import peftlab
from peftlab.checkpoints.adapter import read_adapter
from peftlab.checkpoints.merge import merge_checkpoint
from peftlab.pipelines.merge import verify_merge
from tests.composite_models import COMPOSITES, save_composite


@pytest.mark.parametrize("name", COMPOSITES)
@pytest.mark.parametrize("whole", [None, ["lm_head"]])
def test_a_text_adapter_is_merged_into_the_whole_checkpoint(name: str, whole: list[str] | None, tmp_path: Path) -> None:
    base = save_composite(name, tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    assert model.config.model_type != json.loads((base / "config.json").read_text())["model_type"]
    peftlab.inject_lora(model, r=2, target_modules=["q_proj", "o_proj"], modules_to_save=whole)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    peftlab.save_adapter(model, tmp_path / "adapter", base=str(base))
    report = merge_checkpoint(tmp_path / "adapter", None, tmp_path / "merged")

    changed = {row.name for row in report.tensors}
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    assert before.keys() == after.keys() and not report.dropped
    assert changed == {key for key in before if not torch.equal(before[key], after[key])} and len(changed) >= 2
    configs = [json.loads((place / "config.json").read_text()) for place in (base, tmp_path / "merged")]
    assert configs[0]["architectures"] == configs[1]["architectures"] == [f"{name}ForConditionalGeneration"]
    assert configs[0]["vision_config"] == configs[1]["vision_config"]

    ids = torch.arange(3, 19)[None]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(merged(ids).logits, peftlab.merge(model)(ids).logits)
    complete = getattr(transformers, f"{name}ForConditionalGeneration")
    _, info = complete.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    check = verify_merge(tmp_path / "adapter", str(base), tmp_path / "merged", [{"input_ids": ids}])
    assert check.max_logit_difference < 1e-4 and check.argmax_agreement == 1


def test_an_adapter_of_another_library_keeps_the_whole_checkpoint(tmp_path: Path) -> None:
    base = save_composite("Qwen3_5", tmp_path / "base")
    model = peftlab.inject_lora(AutoModelForCausalLM.from_pretrained(base), r=2, target_modules=["q_proj"])
    peftlab.save_adapter(model, tmp_path / "adapter")
    foreign = replace(read_adapter(tmp_path / "adapter"), base={}, task_type="CAUSAL_LM")
    report = merge_checkpoint(foreign, base, tmp_path / "merged")
    assert load_file(base / "model.safetensors").keys() == load_file(tmp_path / "merged" / "model.safetensors").keys()
    assert not report.dropped
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["model_type"] == "qwen3_5" and config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
