"""Medusa heads on disk, as ``decoding.medusa.read_medusa`` reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peftlab.checkpoints.io.tensorfiles import read_tensors, write_tensors
from peftlab.decoding.drafters.head_drafter import read_medusa
from peftlab.drafting.vocabulary import reduce_heads
from peftlab.errors import PeftlabError
from peftlab.files import write_json
from peftlab.methods.medusa_heads import MedusaHeads
from peftlab.outputs import staged_directory


def write_medusa(model: Any, out: Path, *, tokens: Tensor | None = None, overwrite: bool = False) -> Path:
    """Write the Medusa heads of an injected model, and check the round trip key for key.

    Keys are ``blocks.i.layers.j.weight`` (and ``.bias``) and ``lm_heads.i.weight``; for a reduced vocabulary also
    ``token_map``, with ``truncated_vocab_size`` in the configuration. A shared W2 is written once, with
    ``original_lm_head`` in the configuration.

    Args:
        tokens: ids of the reduced vocabulary, [V_d]; None for all.

    Raises:
        PeftlabError: the files do not hold what the model does.
    """
    heads: MedusaHeads = model.get_output_embeddings().medusa_heads
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in heads.state_dict().items()}
    count = _count(tensors, "blocks")
    vocab_size, hidden_size = tensors["lm_heads.0.weight"].shape
    if tokens is not None and len(tokens) < vocab_size:
        tensors = reduce_heads(tensors, tokens)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": count,
        "num_hidden_layers": 1,
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "truncated_vocab_size": len(tensors["lm_heads.0.weight"]),
        "medusa_fc_bias": any(name.endswith(".bias") for name in tensors),
        "original_lm_head": _count(tensors, "lm_heads") < count,
    }
    with staged_directory(out, "model", overwrite=overwrite) as staging:
        write_tensors(staging / "model.safetensors", tensors, {"format": "pt"})
        write_json(staging / "config.json", config)
        read_medusa(staging)
        back, _ = read_tensors(staging / "model.safetensors")
        if any(not torch.equal(tensor, back[name]) for name, tensor in tensors.items()):
            raise PeftlabError(f"{out}: what was written is not what was trained; nothing was left behind")
    return out


def _count(tensors: dict[str, Tensor], kind: str) -> int:
    return len({name.split(".")[1] for name in tensors if name.startswith(f"{kind}.")})
