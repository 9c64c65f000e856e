"""Cases of our own: every field of ``peft.LoraConfig`` on small models, and every ``init_lora_weights``."""

from __future__ import annotations

from functools import partial
from typing import Any

import peft
import torch
import transformers
from torch import nn

from tests.peft_cases.cases import INVOCATION, VOCABULARY, Case, randomised, token_ids

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "vocab_size": VOCABULARY, "max_position_embeddings": 40, "pad_token_id": 0,
}  # fmt: skip
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 40}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SIZES, "num_key_value_heads": 2, "attention_bias": True}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "bert": ("BertForSequenceClassification", "BertConfig", {**SIZES, "num_labels": 3}),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", {**SIZES, "num_labels": 3}),
}
TARGETS = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "bert": ["query", "value"],
    "roberta": ["query", "value"],
}
TASK = {"llama": "CAUSAL_LM", "gpt2": "CAUSAL_LM", "bert": "SEQ_CLS", "roberta": "SEQ_CLS"}
FIRST = {"llama": "q_proj", "gpt2": "c_attn", "bert": "query", "roberta": "query"}
LAYER = {
    "llama": "model.layers.0.self_attn.q_proj",
    "gpt2": "transformer.h.0.attn.c_attn",
    "bert": "bert.encoder.layer.0.attention.self.query",
    "roberta": "roberta.encoder.layer.0.attention.self.query",
}
NORM = {"llama": "input_layernorm", "gpt2": "ln_1", "bert": "LayerNorm", "roberta": "LayerNorm"}
LAYERS = {"llama": "layers", "gpt2": "h", "bert": "layer", "roberta": "layer"}


def build(kind: str, **changes: Any) -> nn.Module:
    """Return a small model of a family."""
    model, config, values = MODELS[kind]
    return randomised(getattr(transformers, model)(getattr(transformers, config)(**{**values, **changes})))


def variants() -> list[Case]:
    """Return every field of the configuration on every family."""
    return [
        Case(
            "variants",
            f"{kind}: {name}",
            partial(build, kind),
            token_ids,
            _fields(kind, fields),
            other="QALoRA" if "use_qalora" in fields else "",
        )
        for kind in MODELS
        for name, fields in _variants(kind).items()
    ]


def _fields(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    defaults = {"r": 4, "lora_alpha": 6, "target_modules": TARGETS[kind], "task_type": TASK[kind]}
    return {**defaults, "fan_in_fan_out": kind == "gpt2", **fields}


def _variants(kind: str) -> dict[str, dict[str, Any]]:
    first, layer, norm = FIRST[kind], LAYER[kind], NORM[kind]
    regex = rf".*\.({'|'.join(TARGETS[kind])})"
    return {
        "plain": {},
        "dropout": {"lora_dropout": 0.1},
        "rslora": {"use_rslora": True},
        "dora": {"use_dora": True},
        "rslora and dora": {"use_rslora": True, "use_dora": True},
        "bias all": {"bias": "all"},
        "bias lora_only": {"bias": "lora_only"},
        "rank_pattern": {"rank_pattern": {first: 2}},
        "rank_pattern by layer": {"rank_pattern": {layer: 6}},
        "rank_pattern by regex": {"rank_pattern": {rf"^.*\.0\..*{first}": 2}},
        "alpha_pattern": {"alpha_pattern": {first: 5}},
        "both patterns and rslora": {"rank_pattern": {first: 2}, "alpha_pattern": {layer: 3}, "use_rslora": True},
        "patterns that match nothing": {"rank_pattern": {"nothing": 2}, "alpha_pattern": {"nothing": 3}},
        "layers_to_transform": {"layers_to_transform": [0, 2]},
        "layers_to_transform, one": {"layers_to_transform": 1},
        "layers_pattern": {"layers_to_transform": [1], "layers_pattern": LAYERS[kind]},
        "layers_pattern, list": {"layers_to_transform": [0, 1], "layers_pattern": [LAYERS[kind]]},
        "modules_to_save": {"modules_to_save": [norm]},
        "modules_to_save, by a longer name": {"modules_to_save": [f"0.{norm}" if kind in ("llama", "gpt2") else f"output.{norm}"]},
        "modules_to_save, one absent": {"modules_to_save": [norm, "nothing"]},
        "exclude_modules": {"exclude_modules": [layer]},
        "exclude_modules by regex": {"exclude_modules": r".*\.1\..*"},
        "exclude_modules that match nothing": {"exclude_modules": ["nothing"]},
        "one target absent": {"target_modules": [*TARGETS[kind], "nothing"]},
        "regex": {"target_modules": regex},
        "all-linear": {"target_modules": "all-linear"},
        "all-linear, without a task type": {"target_modules": "all-linear", "task_type": None},
        "without a task type": {"task_type": None},
        "default targets": {"target_modules": None},
        "rank above the smaller side": {"r": 64},
        "embeddings": {"target_modules": [*TARGETS[kind], _embedding(kind)]},
        "embeddings and dora": {"target_modules": [*TARGETS[kind], _embedding(kind)], "use_dora": True},
        "lora_bias": {"lora_bias": True, "target_modules": [first]},
        "trainable_token_indices": {"trainable_token_indices": {_embedding(kind): [3, 7, 20]}},
        "layer_replication": {"layer_replication": [[0, 2], [1, 3]]},
        "alora": {"alora_invocation_tokens": list(INVOCATION)},
        "qalora": {"use_qalora": True, "qalora_group_size": 8},
    }  # fmt: skip


def _embedding(kind: str) -> str:
    return {"llama": "embed_tokens", "gpt2": "wte"}.get(kind, "word_embeddings")


def pickles() -> list[Case]:
    """Return adapters whose weights are an ``adapter_model.bin``."""
    return [
        Case("variants", f"{kind}: adapter_model.bin", partial(build, kind), token_ids, _fields(kind, {}), pickled=True)
        for kind in MODELS
    ]


STARTS: dict[str, Any] = {
    "True": True, "False": False, "gaussian": "gaussian", "olora": "olora", "pissa": "pissa",
    "pissa_niter": "pissa_niter_16", "orthogonal": "orthogonal", "mica": "mica", "eva": "eva", "loftq": "loftq",
    "corda": "corda", "lora_ga": "lora_ga",
}  # fmt: skip


def starts() -> list[Case]:
    """Return every value of ``init_lora_weights``."""
    cases = []
    for name, value in STARTS.items():
        fields = _fields("llama", {"init_lora_weights": value})
        prepare = None
        if name == "eva":
            fields["eva_config"] = peft.EvaConfig()
        if name == "loftq":
            fields["loftq_config"] = peft.LoftQConfig(loftq_bits=4)
        if name == "corda":
            fields["corda_config"], prepare = peft.tuners.lora.config.CordaConfig(), _corda
        if name == "lora_ga":
            fields["lora_ga_config"], prepare = peft.tuners.lora.config.LoraGAConfig(), _lora_ga
        steep = partial(_steep, "llama")
        cases.append(Case("init_lora_weights", name, steep, token_ids, fields, prepare=prepare))
    return cases


def _steep(kind: str) -> nn.Module:
    """A model whose matrices have singular values that fall fast, as a randomised SVD needs them to be exact."""
    model = build(kind)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                u, s, vh = torch.linalg.svd(module.weight, full_matrices=False)
                module.weight.copy_(u * (s[0] * 0.3 ** torch.arange(len(s))) @ vh)
    return model


def _corda(model: nn.Module, config: Any) -> None:
    from peft.tuners.lora.corda import preprocess_corda

    preprocess_corda(model, config, run_model=lambda: model(**token_ids()))


def _lora_ga(model: nn.Module, config: Any) -> None:
    from peft.tuners.lora.loraga import preprocess_loraga

    def step() -> None:
        model(**token_ids()).logits.square().mean().backward()

    preprocess_loraga(model, config, step)
