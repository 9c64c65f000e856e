"""peft's adapter format: its configuration and its key names, to and from ours."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.methods.heads import trained_whole
from peftlab.methods.injection import Injection, trainable_parameters
from peftlab.methods.lora import LoraConfig
from peftlab.methods.lora_experts import LoraExperts
from peftlab.methods.lora_layers import LowRank
from peftlab.methods.targets import has_suffix

PREFIX = "base_model.model."
_EXPERT = re.compile(r"(.+)_(lora_A|lora_B)")
_FACTOR = re.compile(r"\.(lora_A|lora_B)\.weight$")

# What peft's configuration may say that changes nothing about the weights, or that we do not need to know.
_IGNORED = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "fan_in_fan_out", "inference_mode",
    "init_lora_weights", "layers_pattern", "loftq_config", "megatron_core", "peft_type", "peft_version", "revision",
    "runtime_config", "task_type", "arrow_config", "ensure_weight_tying", "qalora_group_size", "ephemeral_gpu_offload",
}  # fmt: skip


def to_peft_key(name: str, model: nn.Module) -> str:
    """Return peft's key for a parameter of ours; heads and other plain parameters keep their names.

    ``<module>.lora_A`` becomes ``<module>.lora_A.weight``; the bias of an adapted leaf lies in its
    ``base_layer``; of several parameters of one experts module, the last one's factors lie outermost and each
    earlier one's a ``base_layer`` deeper.
    """
    module_name, _, last = name.rpartition(".")
    module = model.get_submodule(module_name)
    expert = _EXPERT.fullmatch(last)
    if expert and isinstance(module, LoraExperts):
        parameters = list(module.adapted)
        depth = len(parameters) - 1 - parameters.index(expert[1])
        return f"{PREFIX}{module_name}{'.base_layer' * depth}.{expert[2]}.weight"
    if last in ("lora_A", "lora_B"):
        return f"{PREFIX}{name}.weight"
    if isinstance(module, LowRank) and last == "bias":
        return f"{PREFIX}{module_name}.base_layer.bias"
    return PREFIX + name


def from_peft_keys(tensors: Mapping[str, Tensor], raw: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """Return an adapter's tensors by our parameter names: the inverse of ``to_peft_key``.

    Raises:
        PeftlabError: a key of an unknown form, or two keys that mean one parameter and differ.
    """
    named: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if not key.startswith(PREFIX):
            raise PeftlabError(f"{path}: key {key!r} does not start with {PREFIX!r}")
        if ".original_module." in key:
            continue  # with bias="all" peft also writes the untrained twin of a module trained whole
        name = _FACTOR.sub(r".\1", key.removeprefix(PREFIX)).replace(".modules_to_save.", ".")
        name = _expert_name(name, list(raw.get("target_parameters") or []), path)
        name = name.replace(".base_layer.bias", ".bias")
        if name in named and not torch.equal(named[name], tensor):
            raise PeftlabError(f"{path}: two keys hold different values for {name}")
        named[name] = tensor
    return named


def _expert_name(name: str, targets: list[str], path: Path) -> str:
    module, _, factor = name.rpartition(".")
    outer = module.removesuffix(".base_layer")
    while outer.endswith(".base_layer"):
        outer = outer.removesuffix(".base_layer")
    # peft nests in the order of the model's parameters; in every experts module "down" comes last.
    mine = sorted(
        {t.rpartition(".")[2] for t in targets if has_suffix(outer, t.rpartition(".")[0])},
        key=lambda t: "down" in t,
    )
    if factor not in ("lora_A", "lora_B") or not mine:
        return name
    depth = module.count(".base_layer")
    if depth >= len(mine):
        raise PeftlabError(f"{path}: {name} has no parameter in target_parameters")
    return f"{outer}.{mine[len(mine) - 1 - depth]}_{factor}"


def to_peft_config(model: nn.Module, held: Injection, reference: str | None) -> dict[str, Any]:
    """Return ``adapter_config.json`` for an injected LoRA; defaults are left out where peft allows it."""
    config = held.config
    assert isinstance(config, LoraConfig)
    modules = {name for name, _ in model.named_modules()}
    # peft names modules there; it reads a single parameter of a head by its key alone.
    whole = [name for name in trained_whole(model, config.modules_to_save) if name in modules]
    conv1d = any(isinstance(model.get_submodule(name), Conv1D) for name in held.replaced)
    ranks, alphas = _effective(model, held)
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
        "target_modules": short_names(model, [name for name in held.replaced if not _experts(model, name)]),
        "modules_to_save": whole or None,
    }
    optional = {
        "use_rslora": config.use_rslora,
        "use_dora": config.use_dora,
        "rank_pattern": ranks | config.rank_pattern,
        "alpha_pattern": alphas | config.alpha_pattern,
        "target_parameters": [
            f"{name}.{parameter}"
            for name in held.replaced
            if _experts(model, name)
            for parameter in vars(model.get_submodule(name))["adapted"]
        ],
    }
    return raw | {key: value for key, value in optional.items() if value}


def adapter_tensors(model: nn.Module, held: Injection) -> dict[str, Tensor]:
    """Return the trained tensors of an injected LoRA by peft's keys.

    A leaf whose update is B·A − B0·A0 (PiSSA, OLoRA), or acts on parts of its rows, is written as the plain LoRA
    of greater rank that it equals.
    """
    tensors = {name: parameter.detach() for name, parameter in trainable_parameters(model).items()}
    for name in held.replaced:
        leaf = model.get_submodule(name)
        if _grown(leaf):
            factors = [factor.detach() for factor in leaf.factors()]
            tensors |= {f"{name}.{kind}": factor for kind, factor in zip(leaf.names, factors, strict=True)}
    return {to_peft_key(name, model): tensor for name, tensor in tensors.items()}


def _effective(model: nn.Module, held: Injection) -> tuple[dict[str, int], dict[str, float]]:
    """Return rank and alpha, by module, of leaves written at a greater rank than the configuration's."""
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for name in held.replaced:
        leaf = model.get_submodule(name)
        if _grown(leaf):
            ranks[name] = leaf.factors()[0].shape[0]
            alphas[name] = leaf.scale * (
                ranks[name] ** 0.5 if getattr(held.config, "use_rslora", False) else ranks[name]
            )
    return ranks, alphas


def _grown(leaf: nn.Module) -> TypeGuard[LowRank]:
    return isinstance(leaf, LowRank) and (leaf.rows is not None or leaf.frozen_A is not None)


def _experts(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name), LoraExperts)


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
        hint = did_you_mean(unknown[0], LoraConfig.model_fields)
        raise PeftlabError(f"{path}: {unknown[0]}={raw[unknown[0]]!r} is not supported{hint}")
    known |= {key: {} for key in ("rank_pattern", "alpha_pattern") if known.get(key) is None}
    # peft lists every name a task head might have; those that were there have tensors.
    owners = {name.rpartition(".")[0] for name in names if "lora_" not in name.rpartition(".")[2]}
    listed = known.get("modules_to_save") or []
    known["target_modules"] = known.get("target_modules") or None
    known["modules_to_save"] = [m for m in listed if any(f".{m}." in f".{owner}." for owner in owners)] or None
    try:
        return LoraConfig(**known)
    except ValidationError as error:
        first = error.errors()[0]
        raise PeftlabError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
