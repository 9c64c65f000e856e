"""peft's adapter format: its configuration and its key names, to and from ours."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import nn
from transformers.pytorch_utils import Conv1D

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.methods.injection import Injection
from peftlab.methods.lora import LoraConfig
from peftlab.methods.targets import has_suffix, trained_whole

PREFIX = "base_model.model."
_FACTOR = re.compile(r"\.(lora_A|lora_B)\.weight$")

# What peft's configuration may say that changes nothing about the weights, or that we do not need to know.
_IGNORED = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out", "inference_mode",
    "init_lora_weights", "layers_pattern", "loftq_config", "megatron_core", "peft_type", "peft_version", "revision",
    "runtime_config", "task_type", "arrow_config", "ensure_weight_tying", "qalora_group_size", "ephemeral_gpu_offload",
}  # fmt: skip


def to_peft_key(name: str) -> str:
    """Return peft's key for a parameter of ours: ``base_model.model.<module>.lora_A.weight``, heads as they are."""
    return PREFIX + (f"{name}.weight" if name.endswith((".lora_A", ".lora_B")) else name)


def from_peft_key(key: str, path: Path) -> str:
    """Return our parameter name for a key of peft's; an unknown form raises ``PeftlabError``."""
    if not key.startswith(PREFIX):
        raise PeftlabError(f"{path}: key {key!r} does not start with {PREFIX!r}")
    return _FACTOR.sub(r".\1", key.removeprefix(PREFIX))


def to_peft_config(model: nn.Module, held: Injection, reference: str | None) -> dict[str, Any]:
    """Return ``adapter_config.json`` for an injected LoRA; defaults are left out where peft allows it."""
    config = held.config
    assert isinstance(config, LoraConfig)
    whole = trained_whole(model, config.modules_to_save)
    conv1d = any(isinstance(model.get_submodule(name), Conv1D) for name in held.replaced)
    raw: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if type(model).__name__.endswith("ForSequenceClassification") else None,
        "base_model_name_or_path": reference,
        "inference_mode": True,
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "bias": config.bias,
        "fan_in_fan_out": conv1d,
        "target_modules": short_names(model, held.replaced),
        "modules_to_save": whole or None,
    }
    optional = {
        "use_rslora": config.use_rslora,
        "rank_pattern": config.rank_pattern,
        "alpha_pattern": config.alpha_pattern,
    }
    return raw | {key: value for key, value in optional.items() if value}


def short_names(model: nn.Module, replaced: list[str]) -> list[str]:
    """Return the last name components if they pick exactly ``replaced`` among all modules, else full names."""
    tails = sorted({name.rpartition(".")[2] for name in replaced})
    picked = {name for name, _ in model.named_modules() if any(has_suffix(name, tail) for tail in tails)}
    return tails if picked == set(replaced) else list(replaced)


def from_peft_config(raw: dict[str, Any], names: Iterable[str], path: Path) -> LoraConfig:
    """Return our configuration for a peft ``adapter_config.json`` and the tensors (by our names) beside it.

    Raises:
        PeftlabError: another peft type, or an active option that this reader does not know.
    """
    if raw["peft_type"] != "LORA":
        raise PeftlabError(f"{path}: peft_type {raw['peft_type']!r} is not supported; LORA is")
    known = {key: raw[key] for key in LoraConfig.model_fields if key in raw and key not in _IGNORED}
    unknown = [key for key, value in raw.items() if key not in known and key not in _IGNORED and value]
    if unknown:
        raise PeftlabError(
            f"{path}: {unknown[0]}={raw[unknown[0]]!r} is not supported{did_you_mean(unknown[0], LoraConfig.model_fields)}"
        )
    known |= {key: {} for key in ("rank_pattern", "alpha_pattern") if known.get(key) is None}
    # peft lists every name a task head might have; those that were there have tensors.
    owners = {name.rpartition(".")[0] for name in names if not name.endswith((".lora_A", ".lora_B"))}
    listed = known.get("modules_to_save") or []
    known["modules_to_save"] = [m for m in listed if any(m in owner.split(".") for owner in owners)] or None
    try:
        return LoraConfig(**known)
    except ValidationError as error:
        first = error.errors()[0]
        raise PeftlabError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


