"""FastMTP layers on disk, in the layout of speculators' type ``mtp``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from peftlab.checkpoints.io.tensorfiles import read_tensors, write_tensors
from peftlab.drafting.kinds.eagle3.eagle_files import FORMAT, WEIGHTS, drafted_tokens, layer_config, sizes, token_maps
from peftlab.drafting.kinds.eagle3.target_identity import read_ranks
from peftlab.drafting.kinds.mtp.mtp_network import Mtp
from peftlab.errors import PeftlabError
from peftlab.files import Json, member, read_object, write_json

_HEAD = "lm_head.weight"  # the target's, not written


def is_mtp(directory: str | Path) -> bool:
    """Whether a directory contains a draft of speculators' type ``mtp``."""
    file = Path(directory) / "config.json"
    return file.is_file() and read_object(file).get("speculators_model_type") == "mtp"


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
    method: dict[str, Json] = {"proposal_type": "greedy", "speculative_tokens": tokens}
    config: dict[str, Json] = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_version": FORMAT,
        "transformer_layer_config": layer,
        "num_nextn_predict_layers": 1,
        "draft_vocab_size": len(network.lm_head.weight),
        "speculators_config": {
            "algorithm": "mtp",
            "default_proposal_method": "greedy",
            "proposal_methods": [method | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": target, "architectures": [architecture]},
        },
    }
    tensors = _tensors(network)
    write_tensors(directory / WEIGHTS, tensors, {"format": "pt"})
    write_json(directory / "config.json", config)
    back = _tensors(read_mtp(directory, network.embedding, network.embedding))
    if back.keys() != tensors.keys() or any(not torch.equal(tensor, back[name]) for name, tensor in tensors.items()):
        raise PeftlabError(f"{directory}: what was written is not what was trained; nothing was left behind")


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
    if tuple(embedding.shape) != (shape.vocab_size, shape.hidden_size):
        raise PeftlabError(
            f"{directory}: for states of {shape.hidden_size} and {shape.vocab_size} tokens, but the target has "
            f"{embedding.shape[1]} and {embedding.shape[0]}"
        )
    tensors, _ = read_tensors(directory / WEIGHTS)
    drafted = config.get("draft_vocab_size", shape.vocab_size)
    tokens = drafted_tokens(tensors, drafted if isinstance(drafted, int) else -1, shape.vocab_size, directory)
    with torch.device("meta"):
        blank = Mtp(shape, torch.empty(0), torch.empty(1, shape.hidden_size))
    wanted = {name: tuple(tensor.shape) for name, tensor in blank.state_dict().items() if name != _HEAD}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wanted != found:
        odd = sorted({name for name, _ in wanted.items() ^ found.items()})
        raise PeftlabError(f"{directory}: tensors that do not fit its configuration: {', '.join(odd[:5])}")
    tokens = None if tokens is None else tokens.to(head.device)
    network = Mtp(shape, embedding, head if tokens is None else head[tokens], tokens)
    network.mtp_layers.load_state_dict(
        {name.removeprefix("mtp_layers."): tensor for name, tensor in tensors.items()}, assign=True
    )
    network.ranks = read_ranks(directory)
    return network.eval()
