"""Tiny random checkpoints of the families that carry MTP layers, with such a layer in their files, for the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.byte_tokens import byte_tokenizer

VOCAB, WIDTH = 264, 32
_PLAIN = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False,
          "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}  # fmt: skip
_LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
           "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16}  # fmt: skip
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
           "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}  # fmt: skip
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3Next", _PLAIN | _LINEAR | _EXPERTS),
    "qwen3_5": ("Qwen3_5", _PLAIN | _LINEAR),
    "qwen3_5_moe": ("Qwen3_5Moe", _PLAIN | _LINEAR | _EXPERTS),
    "glm4_moe": ("Glm4Moe", _PLAIN | _ROUTED | {"use_qk_norm": True, "num_nextn_predict_layers": 1}),
    "deepseek_v3": (
        "DeepseekV3",
        {k: v for k, v in _PLAIN.items() if k != "head_dim"}
        | _ROUTED
        | {"num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
           "qk_nope_head_dim": 8, "v_head_dim": 12},
    ),
}  # fmt: skip
_IMAGE = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": WIDTH,
          "num_position_embeddings": 16, "patch_size": 4, "deepstack_visual_indexes": []}  # fmt: skip


def save_target(name: str, directory: Path, *, mtp: bool = True, dtype: torch.dtype = torch.float32) -> Path:
    """Write a random checkpoint in several shards, with an MTP layer under the names of its family.

    Qwen3.5 is a composite model, as released: a text model in one of images and text.

    Args:
        name: key of ``TARGETS``. directory: to write. mtp: whether it has the layer. dtype: of its weights.
    """
    torch.manual_seed(0)
    family, values = TARGETS[name]
    composite = name.startswith("qwen3_5")
    config = getattr(transformers, f"{family}Config")(
        **({"text_config": values, "vision_config": _IMAGE, "tie_word_embeddings": False} if composite else values)
    )
    kind = "ForConditionalGeneration" if composite else "ForCausalLM"
    model = getattr(transformers, f"{family}{kind}")(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
        model.lm_head.weight.mul_(10)
    model.save_pretrained(directory, max_shard_size="60KB")
    byte_tokenizer(None, [], bos="<s>", eos="</s>").save_pretrained(directory)
    if mtp:
        _add_layer(name, directory)
    return directory


def layer_tensors(name: str, stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return an MTP layer by the names of its family: the target's last layer with noise, and random norms and map.

    Args:
        name: key of ``TARGETS``. stored: the checkpoint's tensors.
    """
    generator = torch.Generator().manual_seed(1)
    first = next(key for key in stored if ".layers.1." in key).partition(".layers.1.")[0] + ".layers.1."
    block = {key.removeprefix(first): t for key, t in stored.items() if key.startswith(first)}
    for key in [key for key in block if key.endswith(("gate_up_proj", "down_proj")) and block[key].dim() == 3]:
        experts = block.pop(key)  # released checkpoints have one tensor for each map of each expert
        for i, expert in enumerate(experts):
            maps = ["gate_proj", "up_proj"] if key.endswith("gate_up_proj") else ["down_proj"]
            for part, value in zip(maps, expert.chunk(len(maps)), strict=True):
                block[f"{key.rpartition('.')[0]}.{i}.{part}.weight"] = value.clone()
    dtype = next(iter(block.values())).dtype
    block = {key: t + torch.randn(t.shape, generator=generator).to(t.dtype) * 0.05 for key, t in block.items()}
    norms = {part: torch.randn(WIDTH, generator=generator).to(dtype) * 0.3 for part in ("e", "h", "out")}
    around = torch.randn(WIDTH, 2 * WIDTH, generator=generator).to(dtype) * 0.3
    if name.startswith("qwen"):
        named = {"fc.weight": around, "pre_fc_norm_embedding.weight": norms["e"],
                 "pre_fc_norm_hidden.weight": norms["h"], "norm.weight": norms["out"]}  # fmt: skip
        return {f"mtp.{key}": t for key, t in named.items()} | {f"mtp.layers.0.{key}": t for key, t in block.items()}
    named = {"eh_proj.weight": around, "enorm.weight": 1 + norms["e"], "hnorm.weight": 1 + norms["h"],
             "shared_head.norm.weight": 1 + norms["out"],
             "embed_tokens.weight": stored["model.embed_tokens.weight"].clone(),
             "shared_head.head.weight": stored["lm_head.weight"].clone()}  # fmt: skip
    return {f"model.layers.2.{key}": t for key, t in (named | block).items()}


def stored_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint."""
    return {key: t for file in sorted(directory.glob("*.safetensors")) for key, t in load_file(file).items()}


def _add_layer(name: str, directory: Path) -> None:
    """Write the layer, a part of it into a shard with other tensors and the rest into one of its own."""
    added = layer_tensors(name, stored_tensors(directory))
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    shared = sorted(set(index["weight_map"].values()))[-1]
    places = {key: shared if ".self_attn." in key else "model-mtp.safetensors" for key in added}
    for file in set(places.values()):
        old = load_file(directory / file) if (directory / file).exists() else {}
        new = {key: t.contiguous() for key, t in added.items() if places[key] == file}
        save_file(old | new, directory / file, metadata={"format": "pt"})
    index["weight_map"] |= places
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
