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
from peftlab.checkpoints.merge.run import merge_checkpoint
from peftlab.checkpoints.merge.verify import verify_merge

TEXT = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
QWEN = {**TEXT, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}  # fmt: skip
IMAGE = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
         "num_position_embeddings": 16, "patch_size": 4, "deepstack_visual_indexes": []}  # fmt: skip
LLAMA_IMAGE = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
               "image_size": 8, "patch_size": 4, "vision_output_dim": 16, "projector_input_dim": 16,
               "projector_output_dim": 16}  # fmt: skip
COMPOSITES = {
    "Qwen3_5": {"text_config": QWEN, "vision_config": IMAGE},
    "Qwen3_5Moe": {"text_config": {**QWEN, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                                   "shared_expert_intermediate_size": 16}, "vision_config": IMAGE},
    "Llama4": {"text_config": {**TEXT, "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2,
                               "moe_layers": [1]}, "vision_config": LLAMA_IMAGE},
}  # fmt: skip


def save_composite(name: str, directory: Path) -> Path:
    """Write a random composite model and return its directory."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**COMPOSITES[name])
    getattr(transformers, f"{name}ForConditionalGeneration")(config).save_pretrained(directory)
    return directory


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
