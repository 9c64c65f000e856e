"""Adapters of models of images and text, whose task peft calls CAUSAL_LM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import load
from peft_round_trip import equal, of, randomised, round_trip, saved_by_peft
from safetensors.torch import load_file, save_file

import peftlab
from peftlab.checkpoints.merge import merge_checkpoint

TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IMAGES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}


def llava() -> Any:
    text, vision = transformers.LlamaConfig(**TEXT), transformers.CLIPVisionConfig(**IMAGES)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=95)
    return randomised(transformers.LlavaForConditionalGeneration(config))


def qwen2_vl() -> Any:
    vision = {"embed_dim": 32, "depth": 2, "num_heads": 4, "hidden_size": 32, "patch_size": 8}
    config = transformers.Qwen2VLConfig(
        text_config=TEXT | {"rope_parameters": ROPE}, vision_config=vision, image_token_id=95, video_token_id=94
    )
    return randomised(transformers.Qwen2VLForConditionalGeneration(config))


def gemma3() -> Any:
    text = transformers.Gemma3TextConfig(**TEXT, head_dim=8)
    config = transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config=transformers.SiglipVisionConfig(**IMAGES).to_dict(),
        mm_tokens_per_image=4, image_token_index=95,
    )  # fmt: skip
    return randomised(transformers.Gemma3ForConditionalGeneration(config))


BODY = "base_model.model.model.language_model."
FORMER = {llava: "base_model.model.language_model.model.", qwen2_vl: "base_model.model.model."}


@pytest.mark.parametrize("make", FORMER, ids=lambda make: make.__name__)
def test_names_of_before_transformers_renamed_the_modules(tmp_path: Path, make: Any) -> None:
    logits = of({"input_ids": torch.arange(3, 33).view(2, 15)})
    fields = {
        "target_modules": r".*layers\.\d+\.self_attn\.[qv]_proj",
        "rank_pattern": {"layers.1.self_attn.q_proj": 2},
    }
    expected = saved_by_peft(make(), tmp_path / "a", logits, task_type="CAUSAL_LM", **fields)
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = {key.replace(BODY, FORMER[make]): tensor for key, tensor in load_file(file).items()}
    assert not any(key.startswith(BODY) for key in tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    equal(logits(peftlab.load_adapter(make(), tmp_path / "a")), expected)
    make().save_pretrained(tmp_path / "base")
    merge_checkpoint(tmp_path / "a", tmp_path / "base", tmp_path / "merged")
    equal(logits(load(type(make()), tmp_path / "merged")), expected)


@pytest.mark.filterwarnings("ignore:left out")
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear"], ids=str)
@pytest.mark.parametrize("make", [llava, qwen2_vl, gemma3], ids=lambda make: make.__name__)
def test_there_and_back(tmp_path: Path, make: Any, targets: list[str] | str) -> None:
    inputs = {"input_ids": torch.arange(3, 33).view(2, 15)}
    round_trip(make, of(inputs), tmp_path, task_type="CAUSAL_LM", target_modules=targets)
