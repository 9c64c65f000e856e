"""Cases of our own: models of images, of sound, and of an encoder and a decoder, by the fields that are common there."""

from __future__ import annotations

import functools
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from tests.peft_cases.cases import BATCH, TOKENS, VOCABULARY, Case, randomised, token_ids
from tests.peft_cases.judge import quiet

IMAGE, VIDEO = VOCABULARY - 1, VOCABULARY - 2  # tokens that stand for a part of an image
TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 8,
    "max_position_embeddings": 64,
}  # fmt: skip
IMAGES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
STACKS: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip
ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}


def _idefics3(kind: str) -> Any:
    text, vision = {"model_type": "llama", **TEXT}, {"model_type": f"{kind.lower()}_vision", **IMAGES}
    return getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=vision, image_token_id=IMAGE, scale_factor=2, pad_token_id=0
    )


def _config(name: str) -> Any:
    """Return a small configuration of a class."""
    t = transformers
    makers = {
        "LlavaForConditionalGeneration": lambda: t.LlavaConfig(
            vision_config=t.CLIPVisionConfig(**IMAGES), text_config=t.LlamaConfig(**TEXT), image_token_index=IMAGE
        ),
        "Gemma3ForConditionalGeneration": lambda: t.Gemma3Config(
            text_config=t.Gemma3TextConfig(**TEXT).to_dict(), vision_config=t.SiglipVisionConfig(**IMAGES).to_dict(),
            mm_tokens_per_image=4, image_token_index=IMAGE,
        ),
        "Qwen2_5_VLForConditionalGeneration": lambda: t.Qwen2_5_VLConfig(
            text_config={**TEXT, "rope_parameters": ROPE}, image_token_id=IMAGE, video_token_id=VIDEO,
            vision_config={"depth": 2, "num_heads": 4, "hidden_size": 32, "out_hidden_size": 32, "patch_size": 8,
                           "intermediate_size": 48, "window_size": 16, "fullatt_block_indexes": [1]},
        ),
        "Idefics3ForConditionalGeneration": lambda: _idefics3("Idefics3"),
        "SmolVLMForConditionalGeneration": lambda: _idefics3("SmolVLM"),
        "WhisperForConditionalGeneration": lambda: t.WhisperConfig(
            **STACKS, num_mel_bins=8, max_source_positions=16, max_target_positions=32, suppress_tokens=None
        ),
        "Wav2Vec2ForCTC": lambda: t.Wav2Vec2Config(
            **{k: v for k, v in IMAGES.items() if k not in ("image_size", "patch_size")}, vocab_size=VOCABULARY,
            conv_dim=(16, 16), conv_kernel=(10, 3), conv_stride=(5, 2), num_feat_extract_layers=2,
            num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_length=2,
        ),
        "MarianMTModel": lambda: t.MarianConfig(**STACKS, max_position_embeddings=32),
        "MT5ForConditionalGeneration": lambda: t.MT5Config(
            d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=VOCABULARY, decoder_start_token_id=0
        ),
    }  # fmt: skip
    return makers[name]()


def build(name: str) -> nn.Module:
    """Return a small model of a class."""
    with quiet():
        torch.manual_seed(0)
        return randomised(getattr(transformers, name)(_config(name)), 0.1)


@functools.cache
def _stored(name: str) -> tuple[tempfile.TemporaryDirectory[str], Path]:
    directory = tempfile.TemporaryDirectory(prefix="peft-case-base-")
    with quiet():
        build(name).save_pretrained(directory.name)
    return directory, Path(directory.name)


def resized(name: str) -> nn.Module:
    """Return the model as it was loaded from a checkpoint, with eight tokens more."""
    model: Any = getattr(transformers, name).from_pretrained(_stored(name)[1])
    torch.manual_seed(5)
    model.resize_token_embeddings(VOCABULARY + 8, mean_resizing=False)
    return model.eval()


def inputs(name: str, tokens: int = VOCABULARY) -> dict[str, Any]:
    """Return a batch for a class: an image in each text, sound, or two texts, with the last of ``tokens`` in them."""
    generator = torch.Generator().manual_seed(1)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    decoded = torch.randint(3, VOCABULARY - 8, (BATCH, TOKENS), generator=generator)
    if tokens > VOCABULARY:
        decoded[:, -2:] = torch.tensor([VOCABULARY + 1, tokens - 1])
    if name == "Wav2Vec2ForCTC":
        return {"input_values": values(BATCH, 400)}
    if name == "WhisperForConditionalGeneration":
        return {"input_features": values(BATCH, 8, 32), "decoder_input_ids": decoded}
    if name in ("MarianMTModel", "MT5ForConditionalGeneration"):
        return {**token_ids(), "decoder_input_ids": decoded}
    parts = 4 if name.startswith(("Llava", "Gemma3")) else 1
    batch: dict[str, Any] = {"input_ids": decoded}
    batch["input_ids"][:, 1 : 1 + parts] = IMAGE
    if name.startswith("Qwen"):
        batch["image_grid_thw"] = torch.tensor([[1, 2, 2]] * BATCH)
        batch["pixel_values"] = values(4 * BATCH, 3 * 2 * 8 * 8)
    elif parts == 4:
        batch["pixel_values"] = values(BATCH, 3, 16, 16)
    else:
        batch["pixel_values"] = values(BATCH, 1, 3, 16, 16)
    return batch


VISION = ("LlavaForConditionalGeneration", "Gemma3ForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
          "Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")  # fmt: skip
SHARED = ("MarianMTModel", "MT5ForConditionalGeneration")
CLASSES = (*VISION, "WhisperForConditionalGeneration", "Wav2Vec2ForCTC", *SHARED)


def _fields(name: str) -> dict[str, dict[str, Any]]:
    words = {"MarianMTModel": "shared", "MT5ForConditionalGeneration": "shared"}.get(name, "embed_tokens")
    query = {"MT5ForConditionalGeneration": "q", "Qwen2_5_VLForConditionalGeneration": "qkv"}.get(name, "q_proj")
    found: dict[str, dict[str, Any]] = {
        "all-linear": {"target_modules": "all-linear"},
        "queries": {"target_modules": [query]},
        "queries, dora, all biases": {"target_modules": [query], "use_dora": True, "bias": "all"},
        "one layer": {"target_modules": [query], "layers_to_transform": [1]},
    }
    if name in VISION:
        found["the language model alone"] = {"target_modules": r".*(text_model|language_model).*\.(q_proj|down_proj)"}
        found["the vision model alone"] = {"target_modules": r".*(vision|visual).*\.(q_proj|qkv|fc1|up_proj)"}
    if name != "Wav2Vec2ForCTC":
        found["head whole"] = {"target_modules": [query], "modules_to_save": ["lm_head"]}
        found["embedding whole"] = {"target_modules": [query], "modules_to_save": [words]}
        found["embedding whole, kept tied"] = {**found["embedding whole"], "ensure_weight_tying": True}
        found["embedding by LoRA"] = {"target_modules": [query, words]}
        found["rows of tokens"] = {"target_modules": [query], "trainable_token_indices": {words: [3, 7, 20]}}
    return found


def towers() -> list[Case]:
    """Return the common fields of every class, and those of a resized vocabulary."""
    cases = []
    for name in CLASSES:
        for title, fields in _fields(name).items():
            fields = {"r": 3, "lora_alpha": 5, **fields}
            cases.append(Case("towers", f"{name}: {title}", partial(build, name), partial(inputs, name), fields))
            if "embedding" in title or (title in ("queries", "rows of tokens") and name != "Wav2Vec2ForCTC"):
                if "trainable_token_indices" in fields:
                    words = next(iter(fields["trainable_token_indices"]))
                    fields = {**fields, "trainable_token_indices": {words: [3, VOCABULARY + 1, VOCABULARY + 7]}}
                longer = partial(inputs, name, VOCABULARY + 8)
                cases.append(Case("towers", f"{name}: {title}, resized", partial(resized, name), longer, fields))
    return cases
