"""Adapters of AdapterHub and loralib."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from peftlab.checkpoints.pickles import read_pickle
from peftlab.checkpoints.tensors import read_tensors
from peftlab.errors import PeftlabError, about, did_you_mean
from peftlab.files import Json, member
from peftlab.methods.config import MethodConfig
from peftlab.methods.injection import make_config
from peftlab.models.architectures import SITES

HEAD_FILES = ("model_head.safetensors", "pytorch_model_head.bin")

# The settings with which AdapterHub's bottleneck adapter is y = h + up(f(down(h))) on a sub-layer's output h, before
# residual and LayerNorm. Any other value is another architecture.
_BOTTLENECK_SETTINGS = {
    "original_ln_before": False, "original_ln_after": True, "residual_before_ln": True, "ln_before": False,
    "ln_after": False, "adapter_residual_before_ln": False, "use_gating": False, "is_parallel": False,
    "scaling": 1.0, "phm_layer": False, "inv_adapter": None, "cross_adapter": False, "dropout": 0.0,
    "output_adapter": True, "stochastic_depth": 0.0,
}  # fmt: skip
_LORA_SETTINGS = {
    "selfattn_lora": True, "intermediate_lora": False, "output_lora": False, "use_gating": False,
    "composition_mode": "add", "use_dora": False, "leave_out": [], "vera_d": None, "vera_b": None,
}  # fmt: skip
_ATTENTION: dict[object, str] = {"q": "query", "k": "key", "v": "value"}


def is_adapterhub(raw: Mapping[str, Json]) -> bool:
    """Return whether an ``adapter_config.json`` was written by AdapterHub's library (peft's has a ``peft_type``)."""
    return "peft_type" not in raw and isinstance(raw.get("config"), dict) and "model_type" in raw


def read_adapterhub(directory: Path, raw: Mapping[str, Json]) -> tuple[MethodConfig, dict[str, Tensor]]:
    """Return method and tensors, by our names, of an AdapterHub bottleneck or LoRA adapter.

    Args:
        raw: its ``adapter_config.json``.

    Raises:
        PeftlabError: an architecture variant that is not supported, named by its key.
    """
    path = directory / "adapter_config.json"
    tensors = _state_dict(directory, "adapter.safetensors", "pytorch_adapter.bin")
    head = next((directory / name for name in HEAD_FILES if (directory / name).exists()), None)
    if head is not None:
        tensors |= _state_dict(directory, head.name)
    settings = member(raw, "config", dict, path)
    with about(path):
        if settings.get("architecture") == "lora":
            return _lora(settings), {re.sub(r"\.loras\.[^.]+\.", ".", key): tensor for key, tensor in tensors.items()}
        model_type = member(raw, "model_type", str, "the base model")
        config = _bottleneck(settings, tensors, train_head=head is not None)
        return config, {_bottleneck_name(key, model_type): tensor for key, tensor in tensors.items()}


def _lora(settings: Mapping[str, Json]) -> MethodConfig:
    _require(settings, _LORA_SETTINGS)
    matrices = settings.get("attn_matrices", ["q", "v"])
    if not isinstance(matrices, list) or not all(matrix in list(_ATTENTION) for matrix in matrices):
        raise PeftlabError(f"attn_matrices={matrices!r} is not supported; q, k and v are")
    return make_config(
        "lora",
        r=member(settings, "r", int, "config"),
        lora_alpha=settings.get("alpha"),
        target_modules=[_ATTENTION[matrix] for matrix in matrices],
        lora_dropout=settings.get("dropout", 0.0),
    )


def _bottleneck(settings: Mapping[str, Json], tensors: Mapping[str, Tensor], train_head: bool) -> MethodConfig:
    _require(settings, _BOTTLENECK_SETTINGS)
    downs = [t for key, t in tensors.items() if key.endswith("adapter_down.0.weight") and t.ndim == 2]
    if not downs:
        raise PeftlabError("the adapter's file has no matrix adapter_down.0.weight")
    return make_config(
        "houlsby",
        bottleneck=downs[0].shape[0],
        non_linearity=member(settings, "non_linearity", str, "config").lower(),
        placement="houlsby" if member(settings, "mh_adapter", bool, "config") else "pfeiffer",
        skip_layers=settings.get("leave_out") or None,
        train_layer_norms=False,
        train_head=train_head,
    )


def _require(settings: Mapping[str, Json], wanted: Mapping[str, object]) -> None:
    for key, value in wanted.items():
        if settings.get(key, value) != value:
            raise PeftlabError(f"{key}={settings[key]!r} is not supported; {value!r} is")


def _bottleneck_name(key: str, model_type: str) -> str:
    """Return our name of a parameter: AdapterHub's bottleneck is on a block, ours on the sub-layer's last leaf."""
    match = re.fullmatch(r"(.+)\.adapters\.[^.]+\.adapter_(?:(down)\.0|(up))\.(weight|bias)", key)
    if match is None:
        if ".adapters." in key:
            raise PeftlabError(f"key {key!r} is of an unknown form")
        return key
    if model_type not in SITES:
        raise PeftlabError(f"model_type {model_type!r} is not known{did_you_mean(model_type, SITES)}")
    block, down, up, last = match[1], match[2], match[3], match[4]
    ends = (*SITES[model_type].attention, *SITES[model_type].ffn)
    numbered = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", block)
    for end in sorted(ends, key=len, reverse=True):
        parent, _, leaf = end.rpartition(".")
        if numbered.endswith(parent):
            return f"{block}.{leaf}.adapter_{down or up}.{last}"
    raise PeftlabError(f"{block} is not a sub-layer of {model_type} that peftlab knows")


def _state_dict(directory: Path, *names: str) -> dict[str, Tensor]:
    """Read the first of the files that exists, or the last."""
    path = next((directory / name for name in names if (directory / name).exists()), directory / names[-1])
    return read_tensors(path)[0] if path.suffix == ".safetensors" else read_pickle(path)


def read_loralib(path: Path, lora_alpha: float | None) -> tuple[MethodConfig, dict[str, Tensor]]:
    """Return method and tensors of a loralib state dict, whose α is not in the file.

    Raises:
        PeftlabError: ``lora_alpha`` is None, or the file contains no ``lora_A``.
    """
    tensors = read_pickle(path)
    modules = sorted({key.removesuffix(".lora_A") for key in tensors if key.endswith(".lora_A")})
    if not modules:
        raise PeftlabError(f"{path}: no key ends in .lora_A; this is not a loralib adapter")
    if lora_alpha is None:
        raise PeftlabError(f"{path}: a loralib file does not contain its alpha; pass lora_alpha (--lora-alpha)")
    first = tensors[f"{modules[0]}.lora_A"]
    if first.ndim < 2:
        raise PeftlabError(f"{path}: {modules[0]}.lora_A has shape {tuple(first.shape)} and is not a matrix")
    with about(path):
        config = make_config("lora", r=first.shape[0], lora_alpha=lora_alpha, target_modules=modules)
    return config, tensors
