"""Tiny random models of images, and of images and text, with their processors; scikit-learn's digits as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from sklearn.datasets import load_digits

from tests.byte_tokens import byte_tokenizer

_ATTENTION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}
SQUARE = {"height": 16, "width": 16}
# name -> (configuration class and values, model class, image processor)
CLASSIFIERS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "vit": (
        "ViTConfig", {**_ATTENTION, "intermediate_size": 48}, "ViTModel",
        {"image_processor_type": "ViTImageProcessor", "size": SQUARE},
    ),
    "dinov2": (
        "Dinov2Config", {**_ATTENTION, "mlp_ratio": 2}, "Dinov2Model",
        {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 16}, "crop_size": SQUARE},
    ),
    "convnext": (
        "ConvNextConfig", {"num_stages": 2, "hidden_sizes": [16, 32], "depths": [1, 1], "patch_size": 2}, "ConvNextModel",
        {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 16}},
    ),
}  # fmt: skip


def save_classifier(name: str, directory: Path) -> Path:
    """Write a random model without a head, with its image processor, and return its directory."""
    config, values, model, processor = CLASSIFIERS[name]
    torch.manual_seed(1)
    getattr(transformers, model)(getattr(transformers, config)(**values)).save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return directory


def save_digits(directory: Path, digits: tuple[int, ...] = (0, 1, 4), each: int = 40) -> Path:
    """Write images of scikit-learn's digits, a folder for each, and return the directory."""
    data = load_digits()
    for digit in digits:
        (directory / str(digit)).mkdir(parents=True)
        for number, pixels in enumerate(data.images[data.target == digit][:each]):
            image = Image.fromarray((pixels * 255 / 16).astype("uint8"))
            image.save(directory / str(digit) / f"{number:03}.png")
    return directory


# --- Vision-language models: how each writes an image, and what its processor and its class are called.
_TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
}  # fmt: skip
_VISION = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
_QWEN = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4}
_ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
_TURNS = ("<|im_start|>", "<|im_end|>")
_SPLIT = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
VISION_LANGUAGE: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "model": "Qwen2_5_VL", "image": "<|image_pad|>", "written": "<|vision_start|><|image_pad|><|vision_end|>",
        "specials": ["<|vision_start|>", "<|vision_end|>", "<|video_pad|>"], "processor": "Qwen2_5_VLProcessor",
        "images": ("Qwen2VLImageProcessorPil", {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1024}}),
        "text": {"rope_parameters": _ROPE}, "vision": {**_QWEN, "fullatt_block_indexes": [1], "window_size": 16},
    },
    "qwen3_vl": {
        "model": "Qwen3VL", "image": "<|image_pad|>", "written": "<|vision_start|><|image_pad|><|vision_end|>",
        "specials": ["<|vision_start|>", "<|vision_end|>", "<|video_pad|>"], "processor": "Qwen3VLProcessor",
        "images": ("Qwen2VLImageProcessorPil", {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1024}}),
        "text": {"rope_parameters": _ROPE},
        "vision": {**_QWEN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    },
    "idefics3": {
        "model": "Idefics3", "image": "<image>", "written": "<image>", "specials": _SPLIT, "processor": "Idefics3Processor",
        "options": {"image_seq_len": 4},
        "images": ("Idefics3ImageProcessorPil", {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}),
        "text": {"model_type": "llama"}, "vision": _VISION, "config": {"scale_factor": 2},
    },
    "smolvlm": {
        "model": "SmolVLM", "image": "<image>", "written": "<image>", "specials": _SPLIT, "processor": "Idefics3Processor",
        "options": {"image_seq_len": 4},
        "images": ("Idefics3ImageProcessorPil", {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}),
        "text": {"model_type": "llama"}, "vision": _VISION, "config": {"scale_factor": 2},
    },
    "gemma3": {
        "model": "Gemma3", "image": "<image_soft_token>", "written": "<start_of_image>", "processor": "Gemma3Processor",
        "specials": ["<start_of_image>", "<end_of_image>"], "options": {"image_seq_length": 4},
        "images": ("Gemma3ImageProcessorPil", {"size": {"height": 16, "width": 16}}),
        "text": {"sliding_window": 16}, "vision": {**_VISION, "model_type": "siglip_vision_model"},
        "config": {"mm_tokens_per_image": 4},
    },
    "llava": {
        "model": "Llava", "image": "<image>", "written": "<image>", "specials": [], "processor": "LlavaProcessor",
        "options": {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        "images": ("CLIPImageProcessorPil", {"size": {"shortest_edge": 16}, "crop_size": SQUARE}),
        "text": {"model_type": "llama"}, "vision": {**_VISION, "model_type": "clip_vision_model"},
    },
}  # fmt: skip


def save_vision_language(name: str, directory: Path, text: dict[str, Any] | None = None) -> Path:
    """Write a random model of images and text, with its processor, and return its directory.

    Args:
        text: values of the language part's configuration beside the usual ones.
    """
    row = VISION_LANGUAGE[name]
    content = (
        "{% for p in m.content %}{% if p.type == 'image' %}"
        + row["written"]
        + "{% else %}{{ p.text }}{% endif %}{% endfor %}"
    )
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
        + content + "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )  # fmt: skip
    specials = [*_TURNS, row["image"], *row["specials"]]
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": row["image"]}
    tokenizer = byte_tokenizer(
        template, specials, bos="<s>", eos="<|im_end|>", named=named if name == "gemma3" else None
    )
    images, values = row["images"]
    getattr(transformers, images)(**values).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    written = {"processor_class": row["processor"], **row.get("options", {})}
    (directory / "processor_config.json").write_text(json.dumps(written))
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in {
        "image_token_id": row["image"], "video_token_id": "<|video_pad|>", "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>", "boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>",
    }.items()}  # fmt: skip
    known = {key: value for key, value in ids.items() if value is not None}
    common = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": 0,
        "eos_token_id": tokenizer.eos_token_id,
    }
    torch.manual_seed(2)
    config = getattr(transformers, f"{row['model']}Config")(
        text_config={**_TEXT, **common, **row["text"], **(text or {})}, vision_config=row["vision"], **known,
        **row.get("config", {}), **({"image_token_index": known["image_token_id"]} if name in ("gemma3", "llava") else {}),
    )  # fmt: skip
    model = getattr(transformers, f"{row['model']}ForConditionalGeneration")(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= 3
    model.save_pretrained(directory)
    return directory
