"""loralib's adapters: a pickled state dict with ``<module>.lora_A`` and ``<module>.lora_B``, and no configuration."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from peftlab.checkpoints.pickles import read_pickle
from peftlab.errors import PeftlabError, about
from peftlab.methods.config import MethodConfig
from peftlab.methods.injection import make_config


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
