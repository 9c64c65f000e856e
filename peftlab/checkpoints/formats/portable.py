"""Exports for programs that read LoRA with one rank and one scaling only: vLLM, llama.cpp, LoRAX."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from peftlab.checkpoints.adapter import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from peftlab.checkpoints.formats.peft import PREFIX
from peftlab.checkpoints.io.tensorfiles import write_tensors
from peftlab.errors import PeftlabError
from peftlab.files import write_json
from peftlab.methods.lora.config import LoraConfig
from peftlab.methods.lora.plan import NEEDS_BASE
from peftlab.outputs import staged_directory

Consumer = Literal["vllm", "llamacpp", "lorax"]

# How to serve the result; vLLM's highest rank and module names are its own settings.
_NOTES = {
    "vllm": "serve with --enable-lora --max-lora-rank {rank}",
    "llamacpp": "convert with convert_lora_to_gguf.py, then --lora FILE",
    "lorax": "pass the directory as adapter_id with adapter_source=local",
}


def export_adapter(source: str | Path, out: str | Path, for_: Consumer) -> str:
    """Write a LoRA adapter that programs which know only r and alpha apply exactly; return how to serve it.

    Each B is multiplied by its module's scaling and all factors are padded with zeros to the largest rank, so that
    with ``lora_alpha`` = ``r`` the one scaling is 1: rank and alpha patterns, rsLoRA, PiSSA and parts of fused
    projections become plain LoRA.

    Args:
        source: an adapter directory that peftlab or peft wrote.
        for_: ``"vllm"``, ``"llamacpp"`` or ``"lorax"``.

    Raises:
        PeftlabError: the adapter contains what no such program supports (DoRA, experts, embeddings, a module
            trained whole, biases), named; or ``out`` exists.
    """
    if for_ not in _NOTES:
        raise PeftlabError(f"export_adapter: for_={for_!r}; one of {', '.join(_NOTES)}")
    adapter = read_adapter(source)
    config = adapter.config
    if not isinstance(config, LoraConfig):
        raise PeftlabError(f"{source}: {for_} reads only LoRA, not method {config.name}; merge it instead")
    if config.use_dora:
        raise PeftlabError(f"{source}: {for_} cannot express use_dora; merge the adapter instead")
    if config.start:
        raise PeftlabError(f"{source}: {for_} cannot express init_lora_weights={config.start}: {NEEDS_BASE}")
    foreign = [name for name in adapter.tensors if not name.endswith((".lora_A", ".lora_B"))]
    if foreign:
        raise PeftlabError(f"{source}: {for_} cannot express {foreign[0]}; merge the adapter instead")
    modules = sorted({name.rpartition(".")[0] for name in adapter.tensors})
    rank = max(adapter.tensors[f"{module}.lora_A"].shape[0] for module in modules)
    tensors: dict[str, Tensor] = {}
    for module in modules:
        a, b = adapter.tensors[f"{module}.lora_A"], adapter.tensors[f"{module}.lora_B"]
        missing = rank - a.shape[0]
        scaled = (b.double() * config.scale(module, a.shape[0])).to(torch.float32)
        tensors[f"{PREFIX}{module}.lora_A.weight"] = F.pad(a.float(), (0, 0, 0, missing))
        tensors[f"{PREFIX}{module}.lora_B.weight"] = F.pad(scaled, (0, missing))
    raw: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": adapter.task_type,
        "base_model_name_or_path": adapter.base_reference,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
    }
    with staged_directory(out, "adapter") as staging:
        write_tensors(staging / WEIGHTS_FILE, tensors, {})
        write_json(staging / CONFIG_FILE, json.loads(json.dumps(raw)))
    return _NOTES[for_].format(rank=rank)
