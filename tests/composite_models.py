"""Random composite models, of images and text, of which transformers' auto class for text loads the text model."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

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
