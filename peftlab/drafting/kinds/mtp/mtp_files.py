"""FastMTP layers on disk, in the layout of speculators' type ``mtp``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from peftlab.checkpoints.tensors import read_tensors, write_tensors
from peftlab.drafting.kinds.eagle3.eagle_files import (
    FORMAT,
    WEIGHTS,
    check_embedding,
    check_shapes,
    check_written,
    decoding_config,
    drafted_tokens,
    layer_config,
    sizes,
    token_maps,
)
from peftlab.drafting.kinds.eagle3.target_identity import read_ranks
from peftlab.drafting.kinds.mtp.mtp_network import Mtp
from peftlab.drafting.kinds.stored_drafts import says
from peftlab.errors import PeftlabError
from peftlab.files import Json, member, read_object, write_json

_HEAD = "lm_head.weight"  # the target's, not written


def is_mtp(directory: str | Path) -> bool:
    """Whether a directory contains a draft of speculators' type ``mtp``."""
    return says(directory, "speculators_model_type", "mtp")


def write_mtp(network: Mtp, directory: Path, *, target: str, architecture: str, tokens: int) -> None:
    """Write a layer into an existing directory, and check the round trip.

    Neither embeddings nor LM head are written: they are the target's. Of a reduced vocabulary there are ``d2t`` and
    ``t2d``, as in eagle3's files, which speculators does not know in this type.

    Args:
        target: reference of the model it drafts for, of class ``architecture``. tokens: drafted per step.

    Raises:
        PeftlabError: the files differ from the layer.
    """
    shape, dtype = network.shape, network.mtp_layers[0].get_parameter("input_proj.weight").dtype
    layer = layer_config(shape, dtype) | {"model_type": "qwen3", "num_hidden_layers": shape.features[0]}
    config: dict[str, Json] = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_version": FORMAT,
        "transformer_layer_config": layer,
        "num_nextn_predict_layers": 1,
        "draft_vocab_size": len(network.lm_head.weight),
        "speculators_config": decoding_config("mtp", target=target, architecture=architecture, tokens=tokens),
    }
    tensors = _tensors(network)
    write_tensors(directory / WEIGHTS, tensors, {"format": "pt"})
    write_json(directory / "config.json", config)
    check_written(tensors, _tensors(read_mtp(directory, network.embedding, network.embedding)), directory)


def _tensors(network: Mtp) -> dict[str, Tensor]:
    tensors = {name: t.detach().cpu().contiguous() for name, t in network.state_dict().items() if name != _HEAD}
    return tensors | token_maps(network)


def read_mtp(directory: str | Path, embedding: Tensor, head: Tensor) -> Mtp:
    """Return the layer in a directory; every key is used exactly once.

    Args:
        embedding, head: the target's, [V, H] each.

    Raises:
        PeftlabError: it is for another vocabulary or width, or a key is missing, unknown or of another shape.
    """
    directory = Path(directory)
    file = directory / "config.json"
    config = read_object(file)
    layer = member(config, "transformer_layer_config", dict, file)
    if not is_mtp(directory) or layer.get("model_type") != "qwen3" or config.get("num_nextn_predict_layers", 1) != 1:
        raise PeftlabError(f"{file}: not one layer of a Qwen3 of speculators' type mtp")
    shape = replace(sizes(layer, file), features=(member(layer, "num_hidden_layers", int, file),))
    check_embedding(shape, embedding, directory)
    tensors, _ = read_tensors(directory / WEIGHTS)
    drafted = config.get("draft_vocab_size", shape.vocab_size)
    tokens = drafted_tokens(tensors, drafted if isinstance(drafted, int) else -1, shape.vocab_size, directory)
    with torch.device("meta"):
        blank = Mtp(shape, torch.empty(0), torch.empty(1, shape.hidden_size))
    check_shapes({name: t for name, t in blank.state_dict().items() if name != _HEAD}, tensors, directory)
    tokens = None if tokens is None else tokens.to(head.device)
    network = Mtp(shape, embedding, head if tokens is None else head[tokens], tokens)
    network.mtp_layers.load_state_dict(
        {name.removeprefix("mtp_layers."): tensor for name, tensor in tensors.items()}, assign=True
    )
    network.ranks = read_ranks(directory)
    return network.eval()
