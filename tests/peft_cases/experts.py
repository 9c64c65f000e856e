"""Cases of our own: experts' weights, routers, and the dense and shared MLPs beside them."""

from __future__ import annotations

from functools import partial
from typing import Any

import transformers
from torch import nn

from tests.peft_cases.cases import VOCABULARY, Case, randomised, token_ids

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 40,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "head_dim": 4,
}  # fmt: skip
ROUTED: dict[str, Any] = {
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 8, "layer_types": ["full_attention", "full_attention"],
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {},
    "Qwen2Moe": {"shared_expert_intermediate_size": 8, "mlp_only_layers": [0]},
    "Qwen3Moe": {"mlp_only_layers": [0]},
    "Olmoe": {},
    "DeepseekV3": {**LATENT, **ROUTED},
    "Glm4Moe": ROUTED,
    "GptOss": {"layer_types": ["full_attention"] * 2},
    "Qwen3Next": LINEAR,
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
    "Llama4Text": {"intermediate_size_mlp": 24, "moe_layers": [1], "layer_types": ["full_attention"] * 2},
    "GraniteMoe": {},
}
ROUTERS = {"GptOss": "router.weight", "Llama4Text": "feed_forward.router.weight", "GraniteMoe": "router.layer.weight"}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
COMMON: dict[str, Any] = {"r": 3, "lora_alpha": 5, "task_type": "CAUSAL_LM"}
FIELDS: dict[str, dict[str, Any]] = {
    "experts": {"target_modules": ["q_proj"], "target_parameters": EXPERTS},
    "experts alone": {"target_modules": [], "target_parameters": EXPERTS},
    "experts without target_modules": {"target_parameters": EXPERTS},
    "down_proj": {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]},
    "bare names": {"target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj"]},
    "as modules": {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]},
    "as modules, with the router": {"target_modules": ["q_proj", "gate", "gate_proj", "up_proj", "down_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "patterns": {
        "target_modules": ["q_proj"],
        "target_parameters": EXPERTS,
        "rank_pattern": {"experts.down_proj": 2},
        "alpha_pattern": {"experts.gate_up_proj": 3},
        "use_rslora": True,
    },
}
MIXTRAL: dict[str, dict[str, Any]] = {
    "as modules": {"target_modules": ["q_proj", "w1", "w2", "w3"]},
    "as modules, with the router": {"target_modules": ["q_proj", "gate", "w1", "w2", "w3"]},
    "all-linear": {"target_modules": "all-linear"},
}


def build(name: str) -> nn.Module:
    """Return a small mixture of experts."""
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **MODELS[name]})
    return randomised(getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config))


def experts() -> list[Case]:
    """Return every way to name experts, in every family."""
    return [
        Case("experts", f"{name}: {title}", partial(build, name), token_ids, {**COMMON, **fields})
        for name in MODELS
        for title, fields in {**FIELDS, **_routers(name), **(MIXTRAL if name == "Mixtral" else {})}.items()
    ]


def _routers(name: str) -> dict[str, dict[str, Any]]:
    router = ROUTERS.get(name, "mlp.gate.weight")
    return {
        "router": {"target_modules": ["v_proj"], "target_parameters": [router]},
        "experts and router": {"target_modules": ["v_proj"], "target_parameters": [*EXPERTS, router]},
    }
