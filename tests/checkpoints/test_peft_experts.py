"""Mixtures of experts with dense or shared MLPs: peft reads what we save as meant, and we what it saves.

peft takes modules called ``gate_proj``, ``up_proj`` and ``down_proj`` for the experts' weights in these models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from models import load, save_base, stir

import peftlab
from peftlab.checkpoints.merge import merge_checkpoint

IDS = torch.arange(3, 33).view(2, 15)
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 8, "layer_types": ["full_attention", "full_attention"],
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("DeepseekV3", {**LATENT, **ROUTED}),
    "glm4_moe": ("Glm4Moe", ROUTED),
    "ernie4_5_moe": ("Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1}),
    "exaone_moe": ("ExaoneMoe", {"num_shared_experts": 1, "is_moe_layer": [False, True], "layer_types": None}),
    "afmoe": ("Afmoe", {"num_shared_experts": 1, "num_dense_layers": 1, "layer_types": ["full_attention"] * 2}),
    "qwen3_next": ("Qwen3Next", LINEAR),
    "qwen3_moe": ("Qwen3Moe", {"mlp_only_layers": [0]}),
    "qwen2_moe": ("Qwen2Moe", {"shared_expert_intermediate_size": 8, "mlp_only_layers": [0]}),
}
MLP = ["q_proj", "gate_proj", "up_proj", "down_proj"]


def build(kind: str) -> Any:
    name, changes = MODELS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def targets(kind: str) -> list[str]:
    return ["q_b_proj", *MLP[1:]] if kind == "deepseek_v3" else MLP


FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "patterns": {"rank_pattern": {"up_proj": 2}, "alpha_pattern": {r"layers.0.mlp.(shared_expert.)?down_proj": 3}},
    "rslora, dropout": {"use_rslora": True, "lora_dropout": 0.1},
    "pissa": {"init_lora_weights": "pissa", "rank_pattern": {r"layers.0.mlp.(shared_expert.)?down_proj": 3}},
}


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("kind", MODELS)
def test_peft_reads_the_dense_and_shared_mlps_that_we_save(tmp_path: Path, kind: str, fields: str) -> None:
    model = peftlab.inject_lora(build(kind), 4, 8, target_modules=targets(kind), **FIELDS[fields])
    stir(model, 0.1)
    peftlab.save_adapter(model, tmp_path)
    expected = logits(model)
    assert (expected - logits(build(kind))).abs().max() > 1e-2
    theirs = peft.PeftModel.from_pretrained(build(kind), str(tmp_path))
    torch.testing.assert_close(logits(theirs), expected, rtol=1e-4, atol=1e-5)
    ours = peftlab.load_adapter(build(kind), tmp_path)
    torch.testing.assert_close(logits(ours), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", MODELS)
def test_experts_beside_them(tmp_path: Path, kind: str) -> None:
    names = [name for name, parameter in build(kind).named_parameters() if parameter.ndim == 3 and "experts" in name]
    fields = {"target_modules": targets(kind), "target_parameters": sorted({n.split("mlp.")[1] for n in names})}
    model = peftlab.inject_lora(build(kind), 2, 8, **fields)
    stir(model, 0.1)
    peftlab.save_adapter(model, tmp_path)
    expected = logits(model)
    theirs = peft.PeftModel.from_pretrained(build(kind), str(tmp_path))
    torch.testing.assert_close(logits(theirs), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(peftlab.load_adapter(build(kind), tmp_path)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", MODELS)
def test_what_peft_makes_of_those_names_is_read_alike(tmp_path: Path, kind: str) -> None:
    """peft's own adapter on ``gate_proj`` and its like: expert weights in most of these, linear maps in qwen2_moe."""
    base = save_base(build(kind), tmp_path / "base")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=targets(kind), task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(build(kind), config)
    stir(theirs, 0.1)
    theirs.save_pretrained(tmp_path / "adapter")
    expected = logits(theirs)
    assert (expected - logits(build(kind))).abs().max() > 1e-2
    ours = peftlab.load_adapter(build(kind), tmp_path / "adapter")
    torch.testing.assert_close(logits(ours), expected, rtol=1e-4, atol=1e-5)
    merge_checkpoint(tmp_path / "adapter", base, tmp_path / "merged")
    torch.testing.assert_close(logits(load(type(ours), tmp_path / "merged")), expected, rtol=1e-4, atol=1e-5)


def test_matrices_that_peft_adapts_as_parameters(tmp_path: Path) -> None:
    """``target_parameters`` may name the matrix of a linear map: LoRA as on the map itself."""
    fields = {"target_modules": ["v_proj"], "target_parameters": ["q_proj.weight", "layers.1.mlp.up_proj.weight"]}
    patterns = {"rank_pattern": {"q_proj.weight": 4}, "alpha_pattern": {"up_proj.weight": 3}}
    config = transformers.LlamaConfig(**{**SIZES, "num_experts": None})
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    base = save_base(model, tmp_path / "base")
    theirs = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=8, **fields, **patterns))
    stir(theirs, 0.2)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = peftlab.load_adapter(load(transformers.LlamaForCausalLM, base), tmp_path / "adapter")
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-5, atol=1e-6)
    merge_checkpoint(tmp_path / "adapter", base, tmp_path / "merged")
    merged = load(transformers.LlamaForCausalLM, tmp_path / "merged")
    torch.testing.assert_close(logits(merged), logits(theirs), rtol=1e-5, atol=1e-6)


def test_with_dora_peft_refuses_rather_than_adapting_the_experts(tmp_path: Path) -> None:
    model = peftlab.inject_lora(build("qwen3_moe"), 2, 8, target_modules=MLP, use_dora=True)
    stir(model, 0.1)
    peftlab.save_adapter(model, tmp_path)
    with pytest.raises(ValueError, match="dora"):
        peft.PeftModel.from_pretrained(build("qwen3_moe"), str(tmp_path))
    ours = peftlab.load_adapter(build("qwen3_moe"), tmp_path)
    torch.testing.assert_close(logits(ours), logits(model), rtol=1e-5, atol=1e-6)


def test_other_models_keep_their_names(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**{**SIZES, "num_experts": None})
    model = peftlab.inject_lora(transformers.LlamaForCausalLM(config), 2, 8, target_modules=MLP, lora_dropout=0.1)
    raw = json.loads((peftlab.save_adapter(model, tmp_path) / "adapter_config.json").read_text())
    assert raw["target_modules"] == sorted(MLP) and "target_parameters" not in raw and raw["lora_dropout"] == 0.1
