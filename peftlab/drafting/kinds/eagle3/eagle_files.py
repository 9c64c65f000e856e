"""EAGLE-3 drafts on disk: written in the layout of speculators' type ``eagle3``, read from that and from SGLang's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from peftlab.checkpoints.tensors import read_tensors, write_tensors
from peftlab.drafting.kinds.eagle3.eagle_network import Eagle3, EagleShape, StateNetwork
from peftlab.drafting.kinds.eagle3.target_identity import read_ranks
from peftlab.drafting.kinds.stored_drafts import says
from peftlab.errors import PeftlabError
from peftlab.files import Json, member, read_object, write_json

WEIGHTS = "model.safetensors"
FORMAT = "0.9.0"  # of speculators, whose names these are
_SGLANG = ["LlamaForCausalLMEagle3"]
# In the files of EAGLE's authors and of SpecForge.
_OTHER_NAMES = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # of EAGLE 3.1, see ``EagleShape``


def is_eagle(directory: str | Path) -> bool:
    """Whether a directory contains a draft of speculators' type ``eagle3``, or one for SGLang."""
    return says(directory, "speculators_model_type", "eagle3") or says(directory, "architectures", _SGLANG)


def tensors_of(network: Eagle3) -> dict[str, Tensor]:
    """Return the tensors of the file by speculators' names.

    The embeddings are the target's and not written: engines share them.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    return tensors | token_maps(network)


def token_maps(network: StateNetwork) -> dict[str, Tensor]:
    """Return which tokens a network drafts, as it is written; nothing where it drafts all.

    ``d2t`` is the target's id of each drafted token less its place, ``t2d`` which of the target's tokens are drafted.
    """
    if network.tokens is None:
        return {}
    tokens = network.tokens.cpu()
    drafted = torch.zeros(network.vocab_size, dtype=torch.bool)
    drafted[tokens] = True
    return {"d2t": tokens - torch.arange(len(tokens)), "t2d": drafted}


def drafted_tokens(tensors: dict[str, Tensor], drafted: int, vocabulary: int, directory: Path) -> Tensor | None:
    """Take ``token_maps`` out of a file's tensors; return the tokens [V_d], None for all.

    Raises:
        PeftlabError: they are not a map of ``drafted`` tokens.
    """
    offsets, mask = tensors.pop("d2t", None), tensors.pop("t2d", None)
    tokens = None if offsets is None else offsets + torch.arange(len(offsets))
    if (tokens is None) != (drafted == vocabulary) or (tokens is not None and len(tokens) != drafted):
        raise PeftlabError(f"{directory}: d2t is not the map of {drafted} drafted tokens")
    if tokens is not None:
        rising = bool((tokens.diff() > 0).all()) and 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary
        if not rising or (mask is not None and mask.nonzero().flatten().tolist() != tokens.tolist()):
            raise PeftlabError(f"{directory}: d2t and t2d are not the same rising token ids below {vocabulary}")
    return tokens


def layer_config(shape: EagleShape, dtype: torch.dtype) -> dict[str, Json]:
    """Return a network's layer as the configuration of a Llama."""
    layer: dict[str, Json] = {
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
        "max_position_embeddings": shape.limit,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if shape.window is not None:
        layer |= {"layer_types": ["sliding_attention"], "sliding_window": shape.window}
    return layer


def norm_flags(shape: EagleShape) -> dict[str, Json]:
    """Return EAGLE 3.1's flags, each written out: readers differ in what they take an absent one for."""
    flags: dict[str, Json] = {name: bool(getattr(shape, name)) for name in FLAGS}
    return flags


def speculators_config(network: Eagle3, *, target: str, architecture: str, tokens: int) -> dict[str, Json]:
    """Return the configuration of a network in speculators' layout; arguments as for ``write_eagle``."""
    shape = network.shape
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": FORMAT,
        "transformer_layer_config": layer_config(shape, network.fc.weight.dtype),
        "draft_vocab_size": len(network.lm_head.weight),
        "target_hidden_size": shape.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(shape.features),
        **norm_flags(shape),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "speculators_config": decoding_config("eagle3", target=target, architecture=architecture, tokens=tokens),
    }


def decoding_config(algorithm: str, *, target: str, architecture: str, tokens: int) -> dict[str, Json]:
    """Return how a draft decodes, in speculators' layout; arguments as for ``write_eagle``."""
    method: dict[str, Json] = {"proposal_type": "greedy", "speculative_tokens": tokens}
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [method | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
        "verifier": {"name_or_path": target, "architectures": [architecture]},
    }


def write_eagle(network: Eagle3, directory: Path, *, target: str, architecture: str, tokens: int) -> None:
    """Write a network into an existing directory, and check the round trip.

    Args:
        target: reference of the model it drafts for, of class ``architecture``.
        tokens: how many tokens a server is to draft per step unless told otherwise.

    Raises:
        PeftlabError: the files differ from the network.
    """
    tensors = tensors_of(network)
    config = speculators_config(network, target=target, architecture=architecture, tokens=tokens)
    write_tensors(directory / WEIGHTS, tensors, {"format": "pt"})
    write_json(directory / "config.json", config)
    check_written(tensors, tensors_of(read_eagle(directory, network.embedding)), directory)


def check_written(tensors: dict[str, Tensor], back: dict[str, Tensor], directory: Path) -> None:
    """Raise ``PeftlabError`` where the tensors that were read back are not those that were written."""
    if back.keys() != tensors.keys() or any(not torch.equal(tensor, back[name]) for name, tensor in tensors.items()):
        raise PeftlabError(f"{directory}: what was written is not what was trained; nothing was left behind")


def read_shape(directory: Path) -> tuple[EagleShape, int]:
    """Return the sizes of the network in a directory, and how many tokens it drafts.

    An absent flag of EAGLE 3.1 is false, as for speculators' own class and for SGLang. (vLLM takes an absent
    ``norm_before_residual`` of speculators' layout for true; speculators' trainer writes all of them.)

    Raises:
        PeftlabError: it is of another type, or computes what is not computed here.
    """
    file = directory / "config.json"
    config = read_object(file)
    if not is_eagle(directory):
        raise PeftlabError(f"{file}: speculators_model_type is {config.get('speculators_model_type')!r}, not eagle3")
    layer = config if config.get("architectures") == _SGLANG else member(config, "transformer_layer_config", dict, file)
    if config.get("embed_requires_grad"):
        raise PeftlabError(f"{file}: embed_requires_grad is true, and embeddings of the draft's own are not supported")
    flags = _flags(config, file)
    if (layer.get("model_type"), layer.get("num_hidden_layers", 1)) != ("llama", 1):
        raise PeftlabError(f"{file}: not one layer of a Llama")
    window = member(layer, "sliding_window", int, file) if layer.get("layer_types") == ["sliding_attention"] else None
    shape = replace(sizes(layer, file), features=_features(config, file), window=window, **flags)
    return shape, member(config, "draft_vocab_size", int, file)


def sizes(layer: dict[str, Json], file: Path) -> EagleShape:
    """Return the sizes of a network by the configuration of its layer; it names no features.

    Raises:
        PeftlabError: they are not those of a layer.
    """
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    v, width, between, heads, kv_heads, dim = (member(layer, name, int, file) for name in names)
    if (
        min(v, width, between, heads, kv_heads, dim) < 1
        or max(v, width, between) >= 2**31
        or heads % kv_heads
        or dim % 2
    ):
        raise PeftlabError(f"{file}: {', '.join(names)} are not those of a layer")
    rope = layer.get("rope_parameters")
    theta = (rope if isinstance(rope, dict) else layer).get("rope_theta", 10000.0)
    eps, limit = layer.get("rms_norm_eps", 1e-6), layer.get("max_position_embeddings", 2048)
    if not isinstance(theta, float | int) or not isinstance(eps, float | int) or not isinstance(limit, int):
        raise PeftlabError(f"{file}: rope_theta, rms_norm_eps and max_position_embeddings must be numbers")
    return EagleShape(v, width, between, heads, kv_heads, dim, float(eps), float(theta), limit, features=())


def _flags(config: dict[str, Json], file: Path) -> dict[str, bool]:
    """Return EAGLE 3.1's flags, some of which may be in ``eagle_config``; ``use_aux_norm`` is SGLang's ``fc_norm``."""
    nested = config.get("eagle_config")
    places = [config, nested] if isinstance(nested, dict) else [config]
    flags = {}
    for name in FLAGS:
        keys = (name, "use_aux_norm") if name == "fc_norm" else (name,)
        values = [place[key] for place in places for key in keys if place.get(key) is not None]
        if any(type(value) is not bool for value in values) or len(set(map(str, values))) > 1:
            raise PeftlabError(f"{file}: {' or '.join(keys)} must be one of true and false")
        flags[name] = bool(values and values[0])
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise PeftlabError(f"{file}: norm_before_fc and fc_norm exclude each other")
    return flags


def _features(config: dict[str, Json], file: Path) -> tuple[int, ...]:
    """Return the layers whose entering states a configuration names; SGLang numbers them by the state before."""
    other = config.get("eagle_config")
    key = "eagle_aux_hidden_state_layer_ids"
    before = isinstance(other, dict) and key in other
    layers = other[key] if isinstance(other, dict) and before else config.get(key)
    ids = [layer + before for layer in layers if type(layer) is int] if isinstance(layers, list) else []
    if not ids or not isinstance(layers, list) or len(ids) < len(layers) or min(ids) < 0 or ids != sorted(set(ids)):
        raise PeftlabError(f"{file}: {key} must be layer numbers, rising")
    return tuple(ids)


def check_embedding(shape: EagleShape, embedding: Tensor, directory: Path) -> None:
    """Raise ``PeftlabError`` where a target's embeddings [V, H] are not those that a network reads."""
    if tuple(embedding.shape) != (shape.vocab_size, shape.hidden_size):
        raise PeftlabError(
            f"{directory}: for states of {shape.hidden_size} and {shape.vocab_size} tokens, but the target has "
            f"{embedding.shape[1]} and {embedding.shape[0]}"
        )


def check_shapes(blank: dict[str, Tensor], tensors: dict[str, Tensor], directory: Path) -> None:
    """Raise ``PeftlabError`` where tensors have other names or shapes than those of an empty network."""
    wanted, found = ({(name, tuple(tensor.shape)) for name, tensor in of.items()} for of in (blank, tensors))
    if wanted != found:
        odd = sorted({name for name, _ in wanted ^ found})
        raise PeftlabError(f"{directory}: tensors that do not fit its configuration: {', '.join(odd[:5])}")


def read_eagle(directory: str | Path, embedding: Tensor) -> Eagle3:
    """Return the network in a directory; every key is used exactly once.

    Args:
        embedding: the target's, [V, H].

    Raises:
        PeftlabError: it is for another vocabulary or width, or a key is missing, unknown or of another shape.
    """
    directory = Path(directory)
    shape, drafted = read_shape(directory)
    check_embedding(shape, embedding, directory)
    tensors, _ = read_tensors(directory / WEIGHTS)
    for old, new in _OTHER_NAMES.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    tokens = drafted_tokens(tensors, drafted, shape.vocab_size, directory)
    tensors.pop("embed_tokens.weight", None)  # others write the target's own
    with torch.device("meta"):
        blank = Eagle3(shape, torch.empty(0), torch.empty(drafted, shape.hidden_size))
    check_shapes(blank.state_dict(), tensors, directory)
    network = Eagle3(shape, embedding, tensors["lm_head.weight"], tokens)
    network.load_state_dict(tensors, assign=True)
    network.lm_head.weight = nn.Parameter(tensors["lm_head.weight"], requires_grad=False)
    network.ranks = read_ranks(directory)
    return network.eval()
