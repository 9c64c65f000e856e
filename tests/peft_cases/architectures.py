"""All linear maps of every architecture that transformers ships and that can be made small, by auto class."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.peft_cases.cases import BATCH, TOKENS, VOCABULARY, Case, randomised, token_ids
from tests.peft_cases.judge import quiet

# auto class -> peft's task type; peft has no all-linear with TOKEN_CLS and QUESTION_ANS.
TASKS = {
    "CAUSAL_LM": "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM": "SEQ_2_SEQ_LM", "MASKED_LM": None,
    "SEQUENCE_CLASSIFICATION": "SEQ_CLS", "TOKEN_CLASSIFICATION": None, "QUESTION_ANSWERING": None,
    "MULTIPLE_CHOICE": None, "IMAGE_CLASSIFICATION": None, "AUDIO_CLASSIFICATION": None, "CTC": None,
    "SPEECH_SEQ_2_SEQ": None, "IMAGE_TEXT_TO_TEXT": None,
}  # fmt: skip
_SMALL: dict[int, tuple[str, ...]] = {
    32: ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "word_embed_proj_dim", "embedding_size", "hidden_dim",
         "n_embed", "rotary_dim", "conv_dim_", "num_features"),
    48: ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size",
         "d_inner", "feed_forward_proj_size", "shared_expert_intermediate_size", "intermediate_size_mlp"),
    4: ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "classifier_proj_size"),
    2: ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "num_blocks",
        "num_key_value_heads", "num_experts_per_tok", "moe_k", "num_decoder_layers", "num_encoder_layers", "top_k_experts",
        "num_kv_heads"),
    8: ("head_dim", "d_kv", "attention_head_size", "patch_size", "num_mel_bins", "head_size"),
    12: ("moe_intermediate_size", "expert_ffn_hidden_size"),
    16: ("image_size", "query_pre_attn_scalar"),
    64: ("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions", "n_ctx", "max_seq_len",
         "context_length"),
    VOCABULARY: ("vocab_size", "src_vocab_size", "tgt_vocab_size"),
    1: ("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"),
}  # fmt: skip
SMALL = {name: size for size, names in _SMALL.items() for name in names}
TOKENS_OF = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
             "decoder_start_token_id": 0}  # fmt: skip


def architectures(only: tuple[str, ...] = ()) -> Iterator[Case]:
    """Yield one case for each auto class and model type (``only`` these, if any are given) that can be made small."""
    for task, peft_task in TASKS.items():
        table = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        for kind, names in table.items():
            name = names if isinstance(names, str) else names[0]
            if only and kind not in only:
                continue
            case = Case(
                "architectures",
                f"{kind}: {task.lower()}",
                partial(build, kind, name),
                partial(inputs, kind, name),
                {"r": 3, "lora_alpha": 5, "target_modules": "all-linear", "task_type": peft_task},
            )
            if runs(case):
                yield case


def build(kind: str, name: str) -> nn.Module:
    """Return a small model of a class; raises whatever its configuration or its class does."""
    torch.manual_seed(0)
    with quiet():
        model = getattr(transformers, name)(copy.deepcopy(config(kind)))
    return randomised(model, 0.1)


def config(kind: str) -> Any:
    """Return the configuration of a model type with small values."""
    default = CONFIG_MAPPING[kind]()
    values = _small(default)
    made = None
    for extra in ({}, {"layer_types": None}, {"num_hidden_layers": 4}):
        with suppress(Exception):
            made = CONFIG_MAPPING[kind](**{**values, **{k: v for k, v in extra.items() if hasattr(default, k)}})
            break
    return made if made is not None else CONFIG_MAPPING[kind](**values)


def _small(default: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in default.to_dict().items():
        if key in SMALL and isinstance(value, int) and not isinstance(value, bool):
            values[key] = min(SMALL[key], value) if value > 0 else value
        elif key in TOKENS_OF and (isinstance(value, int) or key == "pad_token_id"):
            values[key] = TOKENS_OF[key]
        elif isinstance(getattr(default, key, None), transformers.PreTrainedConfig):
            part = getattr(default, key)
            values[key] = {**_small(part), "model_type": part.model_type}
        elif key == "layer_types" and isinstance(value, list):
            kinds = list(dict.fromkeys(value))
            values[key] = (kinds * 2)[:2]
    return values


def inputs(kind: str, name: str) -> dict[str, Any]:
    """Return a small batch for a model of a class."""
    settings, main = config(kind), getattr(transformers, name).main_input_name
    generator = torch.Generator().manual_seed(1)
    batch: dict[str, Any] = {}
    if main == "input_ids":
        batch = token_ids()
        if name.endswith("ForMultipleChoice"):
            batch = {"input_ids": batch["input_ids"].unsqueeze(1).repeat(1, 2, 1)}
            batch["input_ids"][:, 1] += 3
    elif main == "pixel_values":
        size = getattr(settings, "image_size", 16)
        batch["pixel_values"] = torch.randn(
            BATCH, getattr(settings, "num_channels", 3), size, size, generator=generator
        )
    elif main == "input_values":
        batch["input_values"] = torch.randn(BATCH, 4000, generator=generator)
    elif main == "input_features":
        frames = 2 * getattr(settings, "max_source_positions", 32)
        batch["input_features"] = torch.randn(BATCH, getattr(settings, "num_mel_bins", 8), frames, generator=generator)
    if getattr(settings, "is_encoder_decoder", False) and not name.endswith(("Classification", "QuestionAnswering")):
        batch["decoder_input_ids"] = torch.randint(3, VOCABULARY - 8, (BATCH, TOKENS), generator=generator)
    elif main == "input_ids" and name.endswith("ForSequenceClassification"):
        batch["input_ids"][:, -1] = TOKENS_OF["eos_token_id"]
    return batch


def runs(case: Case) -> bool:
    """Whether a small model of the case can be made, is small, and computes."""
    try:
        with quiet(), torch.no_grad():
            model = case.build()
            if sum(p.numel() for p in model.parameters()) > 3_000_000:
                return False
            model(**case.inputs())
    except Exception:
        return False
    return True
