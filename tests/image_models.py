"""Tiny random models of images with their processors, and scikit-learn's digits as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from sklearn.datasets import load_digits

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
