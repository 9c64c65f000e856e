"""Adapters written by others than peft: AdapterHub's directories and loralib's state dicts."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.methods import make_config
from peftlab.methods.config import MethodConfig
from peftlab.methods.sites import SITES

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
        targets = [_ATTENTION[key] for key in settings.get("attn_matrices", ["q", "v"])]
        config = make_config(
            "lora", r=settings["r"], lora_alpha=settings["alpha"], target_modules=targets,
            lora_dropout=settings.get("dropout", 0.0),
        )  # fmt: skip
        return config, {re.sub(r"\.loras\.[^.]+\.", ".", key): tensor for key, tensor in tensors.items()}
    _require(settings, _BOTTLENECK, path)
    config = make_config(
        "houlsby",
        bottleneck=next(t.shape[0] for key, t in tensors.items() if key.endswith("adapter_down.0.weight")),
        non_linearity=settings["non_linearity"].lower(),
        placement="houlsby" if settings["mh_adapter"] else "pfeiffer",
        skip_layers=sorted(settings.get("leave_out") or []) or None,
        train_layer_norms=False,
        train_head=head is not None,
    )
    return config, {_bottleneck_name(key, raw["model_type"], path): tensor for key, tensor in tensors.items()}


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
    rank = tensors[f"{modules[0]}.lora_A"].shape[0]
    return make_config("lora", r=rank, lora_alpha=lora_alpha, target_modules=modules), tensors


def read_pickle(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a pickled state dict; code in a pickle never runs (``weights_only``)."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise PeftlabError(f"{path}: no such file") from None
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError, KeyError, ValueError) as error:
        raise PeftlabError(f"{path}: not a plain file of tensors ({str(error).splitlines()[0]})") from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise PeftlabError(f"{path}: not a flat dictionary of tensors")
    return state


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
