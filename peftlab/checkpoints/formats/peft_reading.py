"""Reading peft's adapter format: its configuration and keys become ours, or an error names what is not supported."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from peftlab.checkpoints.formats.peft import PREFIX
from peftlab.errors import PeftlabError, did_you_mean
from peftlab.methods.lora.config import LoraConfig
from peftlab.methods.targets import ALL_LINEAR, has_suffix
from peftlab.patterns import matching

_FACTOR = re.compile(r"\.(lora_A|lora_B)\.weight$")
_ADDED = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")

# Keys of peft's configuration that do not change the weights, or that are not needed here.
_IGNORED = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ephemeral_gpu_offload", "eva_config",
    "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "loftq_config", "lora_ga_config",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
}  # fmt: skip

# Values of init_lora_weights that leave the base as it is: the factors in the file are the whole update.
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
_LOST_STARTS = {
    "corda": "CorDA subtracts a part of the base by covariances that are not in the file",
    "loftq": "LoftQ replaces the base by a quantised one that is not in the file",
    "lora_ga": "LoRA-GA subtracts a part of the base by gradients that are not in the file",
}
_CONVERT = (
    "save it with peft's path_initial_model_for_weight_conversion where it was trained, which makes it plain LoRA"
)


@dataclass(frozen=True)
class PeftAdapter:
    """A LoRA adapter that peft wrote.

    Attributes:
        config: in our terms. tensors: by our parameter names. notes: what its user should know.
    """

    config: LoraConfig
    tensors: dict[str, Tensor]
    notes: tuple[str, ...] = ()


def read_peft(raw: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path) -> PeftAdapter:
    """Return a peft adapter as ours.

    Args:
        raw: its ``adapter_config.json``, which was read from ``path``. tensors: by peft's keys.

    Raises:
        PeftlabError: another peft type; an active option or a start that this reader does not know; a value of a
            wrong type; a key of an unknown form, or two keys that mean one parameter and differ.
    """
    config, notes = _config(raw, path)
    weights = path.with_name("adapter_model.safetensors")
    plain = {_plain_name(key, weights): tensor for key, tensor in tensors.items() if ".original_module." not in key}
    matrices: set[str] = set()
    named: dict[str, Tensor] = {}
    for name, tensor in plain.items():
        new = _parameter_name(name, plain, config, matrices, weights)
        if new in named and not torch.equal(named[new], tensor):
            raise PeftlabError(f"{weights}: two keys have different values for {new}")
        named[new] = tensor
    config = _fitted(config, named, matrices)
    return PeftAdapter(config, named, notes)


def _config(raw: Mapping[str, Any], path: Path) -> tuple[LoraConfig, tuple[str, ...]]:
    """Return the configuration as it is written, and notes."""
    if raw["peft_type"] != "LORA":
        raise PeftlabError(f"{path}: peft_type {raw['peft_type']!r} is not supported; LORA is")
    fields = [key for key in LoraConfig.model_fields if key not in ("name", "loraplus_lr_ratio")]
    known = {key: raw[key] for key in fields if key in raw and key not in _IGNORED}
    unknown = [key for key, value in raw.items() if key not in known and key not in _IGNORED and value]
    if unknown:
        hint = did_you_mean(unknown[0], fields)
        raise PeftlabError(f"{path}: {unknown[0]}={_shown(raw[unknown[0]])} is not supported{hint}")
    start, notes = _start(raw.get("init_lora_weights", True), path)
    absent = {key for key in ("rank_pattern", "alpha_pattern", "ensure_weight_tying") if known.get(key) is None}
    absent |= {key for key in ("target_modules", "exclude_modules", "target_parameters") if known.get(key) in ([], "")}
    values = {key: value for key, value in known.items() if key not in absent}
    # peft's defaults where they differ from ours.
    values = {"lora_alpha": 8, "ensure_weight_tying": False, "init_lora_weights": start} | values
    try:
        return LoraConfig.model_validate(values, strict=True), notes
    except ValidationError as error:
        first = error.errors()[0]
        raise PeftlabError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _start(value: Any, path: Path) -> tuple[Any, tuple[str, ...]]:
    """Return our value of ``init_lora_weights``, which names the part of the base to subtract, if any, and notes."""
    name = value.lower() if isinstance(value, str) else value
    if isinstance(name, str | bool | None) and name in _PLAIN_STARTS:
        return True, ()
    if name in ("olora", "pissa"):
        return name, ()
    if isinstance(name, str) and re.fullmatch(r"pissa_niter_[0-9]{1,9}", name):
        note = (
            f"{path}: init_lora_weights={value} subtracts a part of the base by a randomised SVD, which peft computes "
            f"again, with slightly different results each time; peftlab uses the exact SVD. To be exact, {_CONVERT}"
        )
        return "pissa", (note,)
    lost = next((reason for kind, reason in _LOST_STARTS.items() if str(name).startswith(kind)), None)
    if lost is not None:
        raise PeftlabError(f"{path}: init_lora_weights={_shown(value)}: {lost}; {_CONVERT}")
    known = [*(start for start in _PLAIN_STARTS if isinstance(start, str)), "olora", "pissa", *_LOST_STARTS]
    raise PeftlabError(f"{path}: init_lora_weights={_shown(value)} is not known{did_you_mean(str(name), known)}")


def _plain_name(key: str, path: Path) -> str:
    """Return a key without peft's additions; ``base_layer`` is left where experts are nested."""
    if not key.startswith(PREFIX):
        raise PeftlabError(f"{path}: key {key!r} does not start with {PREFIX!r}")
    name = _FACTOR.sub(r".\1", key.removeprefix(PREFIX)).replace(".modules_to_save.", ".")
    return name.replace(".base_layer.bias", ".bias")


def _parameter_name(
    name: str, tensors: Mapping[str, Tensor], config: LoraConfig, matrices: set[str], path: Path
) -> str:
    """Return our name of a parameter; the name of an expert weight's factor includes that weight's.

    peft nests the wrappers of one module's parameters in the order these have in the model. A parameter that is
    the one matrix of a linear map is adapted like any linear map; its module is added to ``matrices``.
    """
    module, _, factor = name.rpartition(".")
    outer = module
    while outer.endswith(".base_layer"):
        outer = outer.removesuffix(".base_layer")
    if factor not in ("lora_A", "lora_B"):
        return name
    targets = [target.rpartition(".") for target in config.target_parameters or []]
    # In every experts module "down" comes last.
    mine = sorted(
        {last for parent, _, last in targets if (has_suffix(outer, parent) if parent else _experts(outer, config))},
        key=lambda last: "down" in last,
    )
    if not mine:
        return name
    a = tensors.get(f"{module}.lora_A")
    if mine == ["weight"] and a is not None and a.shape[:1] == (config.rank(f"{outer}.weight"),):
        matrices.add(outer)
        return name
    depth = module.count(".base_layer")
    if depth >= len(mine):
        raise PeftlabError(f"{path}: {name} has no parameter in target_parameters")
    return f"{outer}.{mine[len(mine) - 1 - depth]}_{factor}"


def _experts(module: str, config: LoraConfig) -> bool:
    """Whether a module with factors is one that target_parameters names by the parameter alone."""
    targets = config.target_modules
    if targets is None:
        return True
    if targets == ALL_LINEAR:
        return has_suffix(module, "experts")
    if isinstance(targets, str):
        return not matching(targets, [module], what="target_modules")
    return not any(has_suffix(module, target) for target in targets)


def _fitted(config: LoraConfig, tensors: Mapping[str, Tensor], matrices: set[str]) -> LoraConfig:
    """Return the configuration in our terms.

    peft lists every name that a task head might have, and patterns that match nothing; only those that match
    something are kept. Matrices that target_parameters names, and modules that share their adapter with a
    tied one, become target modules by their full names, with rank and alpha of their own; so do all modules where
    peft chose them itself.
    """
    owners = {name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] not in _ADDED}
    whole = [m for m in config.modules_to_save or [] if any(f".{m}." in f".{owner}." for owner in owners)]
    modules = {name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] in _ADDED}
    experts = {name.rpartition("_lora_")[0] for name in tensors if re.search(r"_lora_[AB]$", name)}
    adapted = [*modules, *(e for e in experts if e), *(f"{module}.weight" for module in matrices)]
    changes: dict[str, Any] = {
        "modules_to_save": whole or None,
        "rank_pattern": _matched(config.rank_pattern, adapted),
        "alpha_pattern": _matched(config.alpha_pattern, adapted),
    }
    if matrices or config.ensure_weight_tying or (config.target_modules is None and modules):
        keys = {module: f"{module}.weight" if module in matrices else module for module in sorted(modules)}
        keys |= {name: name for name in sorted(experts) if name}
        changes |= {
            "target_modules": sorted(modules) or None,
            "target_parameters": sorted(name for name in experts if name) or None,
            "rank_pattern": {name: config.rank(key) for name, key in keys.items() if config.rank(key) != config.r},
            "alpha_pattern": {
                name: config.alpha(key) for name, key in keys.items() if config.alpha(key) != config.lora_alpha
            },
        }
    return config.model_copy(update=changes)


def _matched(patterns: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    names = list(names)
    return {
        pattern: value
        for pattern, value in patterns.items()
        if matching(rf"(.*\.)?({pattern})", names, what="rank_pattern/alpha_pattern")
    }


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
