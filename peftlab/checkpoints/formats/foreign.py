"""Adapters written by others than peft: AdapterHub's directories and loralib's state dicts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from peftlab.checkpoints.io.pickles import read_pickle
from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import member
from peftlab.methods.architectures import SITES
from peftlab.methods.config import MethodConfig
from peftlab.methods.injection import make_config

HEAD_FILES = ("model_head.safetensors", "pytorch_model_head.bin")

# What AdapterHub's bottleneck configuration must say for its adapter to be y = h + up(f(down(h))) on a sub-layer's
# output h, before residual and LayerNorm. Another value is another architecture.
_BOTTLENECK = {
    "original_ln_before": False, "original_ln_after": True, "residual_before_ln": True, "ln_before": False,
    "ln_after": False, "adapter_residual_before_ln": False, "use_gating": False, "is_parallel": False,
    "scaling": 1.0, "phm_layer": False, "inv_adapter": None, "cross_adapter": False, "dropout": 0.0,
    "output_adapter": True, "stochastic_depth": 0.0,
}  # fmt: skip
_LORA = {
    "selfattn_lora": True, "intermediate_lora": False, "output_lora": False, "use_gating": False,
    "composition_mode": "add", "use_dora": False, "leave_out": [], "vera_d": None, "vera_b": None,
}  # fmt: skip
_ATTENTION = {"q": "query", "k": "key", "v": "value"}


def is_adapterhub(raw: dict[str, Any]) -> bool:
    """Whether an ``adapter_config.json`` was written by AdapterHub's library (peft's names a ``peft_type``)."""
    return "peft_type" not in raw and isinstance(raw.get("config"), dict) and "model_type" in raw


def read_adapterhub(
    directory: Path, raw: dict[str, Any], read: Callable[[Path], dict[str, Tensor]]
) -> tuple[MethodConfig, dict[str, Tensor]]:
    """Return method and tensors, by our names, of an AdapterHub bottleneck or LoRA adapter.

    Args:
        raw: its ``adapter_config.json``. read: reads a safetensors file.

    Raises:
        PeftlabError: an architecture variant that is not supported, named by its key.
    """
    path = directory / "adapter_config.json"
    weights = directory / "adapter.safetensors"
    tensors = read(weights) if weights.exists() else read_pickle(directory / "pytorch_adapter.bin")
    head = next((directory / name for name in HEAD_FILES if (directory / name).exists()), None)
    if head is not None:
        tensors |= read(head) if head.suffix == ".safetensors" else read_pickle(head)
    settings = raw["config"]
    if settings.get("architecture") == "lora":
        _require(settings, _LORA, path)
        matrices = settings.get("attn_matrices", ["q", "v"])
        if not isinstance(matrices, list) or not all(matrix in list(_ATTENTION) for matrix in matrices):
            raise PeftlabError(f"{path}: attn_matrices={matrices!r} is not supported; q, k and v are")
        config = _config(
            path, "lora", r=member(settings, "r", int, path), lora_alpha=settings.get("alpha"),
            target_modules=[_ATTENTION[matrix] for matrix in matrices], lora_dropout=settings.get("dropout", 0.0),
        )  # fmt: skip
        return config, {re.sub(r"\.loras\.[^.]+\.", ".", key): tensor for key, tensor in tensors.items()}
    _require(settings, _BOTTLENECK, path)
    downs = [t for key, t in tensors.items() if key.endswith("adapter_down.0.weight") and t.ndim == 2]
    if not downs:
        raise PeftlabError(f"{path}: the adapter's file has no matrix adapter_down.0.weight")
    config = _config(
        path,
        "houlsby",
        bottleneck=downs[0].shape[0],
        non_linearity=member(settings, "non_linearity", str, path).lower(),
        placement="houlsby" if member(settings, "mh_adapter", bool, path) else "pfeiffer",
        skip_layers=settings.get("leave_out") or None,
        train_layer_norms=False,
        train_head=head is not None,
    )
    model_type = member(raw, "model_type", str, path)
    return config, {_bottleneck_name(key, model_type, path): tensor for key, tensor in tensors.items()}


def read_loralib(path: Path, lora_alpha: float | None) -> tuple[MethodConfig, dict[str, Tensor]]:
    """Return method and tensors of a loralib state dict, which does not say its α.

    Raises:
        PeftlabError: ``lora_alpha`` is None, or the file holds no ``lora_A``.
    """
    tensors = read_pickle(path)
    modules = sorted({key.removesuffix(".lora_A") for key in tensors if key.endswith(".lora_A")})
    if not modules:
        raise PeftlabError(f"{path}: no key ends in .lora_A; this is no loralib adapter")
    if lora_alpha is None:
        raise PeftlabError(f"{path}: a loralib file does not say its alpha; pass lora_alpha (--lora-alpha)")
    first = tensors[f"{modules[0]}.lora_A"]
    if first.ndim < 2:
        raise PeftlabError(f"{path}: {modules[0]}.lora_A has shape {tuple(first.shape)} and is no matrix")
    return _config(path, "lora", r=first.shape[0], lora_alpha=lora_alpha, target_modules=modules), tensors


def _config(path: Path, method: str, **fields: Any) -> MethodConfig:
    try:
        return make_config(method, **fields)
    except PeftlabError as error:
        raise PeftlabError(f"{path}: {error}") from None


def _require(settings: dict[str, Any], wanted: dict[str, Any], path: Path) -> None:
    for key, value in wanted.items():
        if settings.get(key, value) != value:
            raise PeftlabError(f"{path}: {key}={settings[key]!r} is not supported; {value!r} is")


def _bottleneck_name(key: str, model_type: str, path: Path) -> str:
    """Return our name: the bottleneck lies on the leaf that ends the sub-layer, not on the block around it."""
    match = re.fullmatch(r"(.+)\.adapters\.[^.]+\.adapter_(?:(down)\.0|(up))\.(weight|bias)", key)
    if match is None:
        if ".adapters." in key:
            raise PeftlabError(f"{path}: key {key!r} is of an unknown form")
        return key
    if model_type not in SITES:
        raise PeftlabError(f"{path}: model_type {model_type!r} is not known{did_you_mean(model_type, SITES)}")
    block, down, up, last = match[1], match[2], match[3], match[4]
    ends = (*SITES[model_type].attention, *SITES[model_type].ffn)
    numbered = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", block)
    for end in sorted(ends, key=len, reverse=True):
        parent, _, leaf = end.rpartition(".")
        if numbered.endswith(parent):
            return f"{block}.{leaf}.adapter_{down or up}.{last}"
    raise PeftlabError(f"{path}: {block} is no sub-layer of {model_type} that peftlab knows")
