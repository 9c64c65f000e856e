"""Small random models of every architecture, a batch for each, and the methods to put into them."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import peftlab
from peftlab.methods.config import METHODS, MethodConfig, config_class
from peftlab.methods.inject import trainable_parameters

D, LAYERS, LABELS, BATCH, TOKENS = 32, 2, 3, 4, 12

_ENCODER = {
    "hidden_size": D,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 97,
    "max_position_embeddings": 40,
}
_DECODER = {
    **_ENCODER,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}

# name -> (configuration class, its values, model class)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert": ("BertConfig", _ENCODER, "BertForSequenceClassification"),
    "roberta": ("RobertaConfig", _ENCODER, "RobertaForSequenceClassification"),
    "distilbert": (
        "DistilBertConfig",
        {"dim": D, "n_layers": LAYERS, "n_heads": 4, "hidden_dim": 48, "vocab_size": 97},
        "DistilBertForSequenceClassification",
    ),
    "electra": ("ElectraConfig", {**_ENCODER, "embedding_size": 16}, "ElectraForSequenceClassification"),
    "deberta-v2": (
        "DebertaV2Config",
        {**_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
        "DebertaV2ForSequenceClassification",
    ),
    "albert": ("AlbertConfig", {**_ENCODER, "embedding_size": 16}, "AlbertForSequenceClassification"),
    "mpnet": ("MPNetConfig", _ENCODER, "MPNetForSequenceClassification"),
    "modernbert": ("ModernBertConfig", {**_ENCODER, **_SPECIAL}, "ModernBertForSequenceClassification"),
    "gpt2": (
        "GPT2Config",
        {"n_embd": D, "n_layer": LAYERS, "n_head": 4, "vocab_size": 97, "n_positions": 40, **_SPECIAL},
        "GPT2ForSequenceClassification",
    ),
    "gpt_neox": ("GPTNeoXConfig", {**_ENCODER, **_SPECIAL}, "GPTNeoXForSequenceClassification"),
    "opt": (
        "OPTConfig",
        {"hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "ffn_dim": 48,
         "vocab_size": 97, "max_position_embeddings": 40, "word_embed_proj_dim": D, **_SPECIAL},
        "OPTForSequenceClassification",
    ),
    "llama": ("LlamaConfig", _DECODER, "LlamaForSequenceClassification"),
    "mistral": ("MistralConfig", _DECODER, "MistralForSequenceClassification"),
    "qwen2": ("Qwen2Config", _DECODER, "Qwen2ForSequenceClassification"),
    "qwen3": ("Qwen3Config", _DECODER, "Qwen3ForSequenceClassification"),
    "gemma": ("GemmaConfig", _DECODER, "GemmaForSequenceClassification"),
    "phi3": ("Phi3Config", _DECODER, "Phi3ForSequenceClassification"),
    "mixtral": (
        "MixtralConfig",
        {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
        "MixtralForSequenceClassification",
    ),
    "t5": (
        "T5Config",
        {"d_model": D, "d_kv": 8, "d_ff": 48, "num_layers": LAYERS, "num_heads": 4, "vocab_size": 97,
         "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0},
        "T5ForSequenceClassification",
    ),
    "bart": (
        "BartConfig",
        {"d_model": D, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 97,
         "max_position_embeddings": 40, **_SPECIAL},
        "BartForSequenceClassification",
    ),
    "vit": (
        "ViTConfig",
        {**{k: v for k, v in _ENCODER.items() if k not in ("vocab_size", "max_position_embeddings")},
         "image_size": 16, "patch_size": 8},
        "ViTForImageClassification",
    ),
    "dinov2": (
        "Dinov2Config",
        {"hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "mlp_ratio": 2,
         "image_size": 16, "patch_size": 8},
        "Dinov2ForImageClassification",
    ),
    "convnext": (
        "ConvNextConfig",
        {"num_stages": 2, "hidden_sizes": [16, D], "depths": [1, 1], "patch_size": 2},
        "ConvNextForImageClassification",
    ),
}  # fmt: skip

IMAGES = ("vit", "dinov2", "convnext")
NO_BIASES = ("gemma", "llama", "mistral", "mixtral", "modernbert", "phi3", "qwen3", "t5")
COMBINATIONS = [
    (method, architecture)
    for method in METHODS
    for architecture in ARCHITECTURES
    if not (method == "bitfit" and architecture in NO_BIASES)
    and (method, architecture) != ("houlsby", "convnext")  # which has no attention, and is refused
]


@cache
def _base(architecture: str) -> nn.Module:
    config, values, model = ARCHITECTURES[architecture]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(num_labels=LABELS, **values))
    # At the usual starting values (weights of 0.02, biases zero, norms one) a mistake would hardly show.
    for parameter in made.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
        elif parameter.std() < 0.05:
            parameter.data *= 6
    return made.eval()


def base(architecture: str) -> nn.Module:
    """Return a fresh copy of the architecture's model, in eval mode."""
    return copy.deepcopy(_base(architecture))


def batch(architecture: str, n: int = BATCH) -> dict[str, Tensor]:
    """Return inputs and labels."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, LABELS, (n,), generator=generator)
    if architecture in IMAGES:
        return {"pixel_values": torch.randn(n, 3, 16, 16, generator=generator), "labels": labels}
    ids = torch.randint(5, 97, (n, TOKENS), generator=generator)
    ids[:, -1] = 2  # the end token that T5 and BART classify by
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def config_of(method: str) -> MethodConfig:
    """Return the method's configuration at a size that suits the small models."""
    sizes: dict[str, dict[str, Any]] = {"lora": {"r": 4, "lora_alpha": 8}, "houlsby": {"bottleneck": 6}}
    return config_class(method)(**sizes.get(method, {}))


def injected(method: str, architecture: str) -> nn.Module:
    """Return a model with the method's adapter as it starts, in eval mode."""
    torch.manual_seed(2)
    return peftlab.inject(base(architecture), config_of(method))


def logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Return the model's logits in eval mode."""
    model.eval()
    with torch.no_grad():
        return model(**inputs).logits


def train(model: nn.Module, inputs: dict[str, Tensor], steps: int = 2, lr: float = 1e-2) -> list[float]:
    """Train for some steps of AdamW and return the losses."""
    torch.manual_seed(3)
    model.train()
    optimizer = torch.optim.AdamW(trainable_parameters(model).values(), lr=lr, weight_decay=0.0)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


@cache
def _trained(method: str, architecture: str) -> nn.Module:
    model = injected(method, architecture)
    train(model, batch(architecture))
    model.zero_grad()
    return model


def trained(method: str, architecture: str) -> nn.Module:
    """Return a fresh copy of the injected model after two steps of training."""
    return copy.deepcopy(_trained(method, architecture))
