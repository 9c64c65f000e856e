"""Heads on disk: written, checked and read back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from peftlab.checkpoints.tensors import read_tensors, write_tensors
from peftlab.decoding.trees import RankRates
from peftlab.drafting.hidden_states import head_weight
from peftlab.drafting.kinds.medusa.head_stack import HeadStack, ReducedHeads
from peftlab.drafting.kinds.medusa.medusa_heads import MedusaHeads
from peftlab.drafting.rank_rates import KEY, rates_on_disk, read_rates
from peftlab.drafting.vocabulary import reduce_heads
from peftlab.errors import PeftlabError
from peftlab.files import Json, member, read_object, staged_directory, write_json

_SIZES = ("truncated_vocab_size", "hidden_size", "num_heads", "vocab_size")

Read = Callable[[Path], HeadStack | ReducedHeads]
Make = Callable[[dict[str, Json], Tensor, int, bool, int], HeadStack]
"""(configuration, blank W2 [V_d, H], K, whether W2 is shared, V) -> heads of these sizes."""


def write_medusa(heads: HeadStack, out: Path, *, tokens: Tensor | None = None, overwrite: bool = False) -> Path:
    """Write Medusa heads as ``write_heads`` does.

    A Markov bias is ``markov_head.markov_w1.weight`` [V, r] and ``markov_head.markov_w2.weight`` [V_d, r], with
    ``markov_rank`` in the configuration.
    """
    assert isinstance(heads, MedusaHeads)
    config: dict[str, Json] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_fc_bias": any(name.endswith(".bias") for name in heads.state_dict()),
        "markov_rank": None if heads.markov_head is None else heads.markov_head.markov_w1.embedding_dim,
    }
    return write_heads(heads, config, out, read_medusa, tokens=tokens, overwrite=overwrite)


def write_heads(
    heads: HeadStack,
    config: dict[str, Json],
    out: Path,
    read: Read,
    *,
    tokens: Tensor | None = None,
    overwrite: bool = False,
) -> Path:
    """Write heads, and check the round trip key for key.

    Keys are those of the heads' parameters; for a reduced vocabulary also ``token_map``, with ``truncated_vocab_size``
    in the configuration. A shared W2 is written once, with ``original_lm_head`` in the configuration.

    Args:
        config: what their configuration has beside sizes. read: reads the directory back.
        tokens: ids of the reduced vocabulary, [V_d]; None for all.

    Raises:
        PeftlabError: the files differ from the heads.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in heads.state_dict().items()}
    vocab_size, hidden_size = tensors["lm_heads.0.weight"].shape
    if tokens is not None and len(tokens) < vocab_size:
        tensors = reduce_heads(tensors, tokens)
    sizes: dict[str, Json] = {
        "num_heads": heads.depth,
        "num_hidden_layers": 1,
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "truncated_vocab_size": len(tensors["lm_heads.0.weight"]),
        "original_lm_head": len(heads.lm_heads) < heads.depth,
    }
    with staged_directory(out, "model", overwrite=overwrite) as staging:
        write_tensors(staging / "model.safetensors", tensors, {"format": "pt"})
        write_json(staging / "config.json", config | sizes)
        read(staging)
        back, _ = read_tensors(staging / "model.safetensors")
        if any(not torch.equal(tensor, back[name]) for name, tensor in tensors.items()):
            raise PeftlabError(f"{out}: what was written is not what was trained; nothing was left behind")
    return out


def read_medusa(directory: str | Path) -> HeadStack | ReducedHeads:
    """Return the heads in a directory that ``write_medusa`` wrote; see ``read_heads``."""
    file = Path(directory) / "config.json"

    def make(config: dict[str, Json], blank: Tensor, count: int, shared: bool, vocabulary: int) -> HeadStack:
        rank = None if config.get("markov_rank") is None else member(config, "markov_rank", int, file)
        if rank is not None and not 1 <= rank < 2**31:
            raise PeftlabError(f"{file}: markov_rank is {rank}, not that of the heads beside it")
        return MedusaHeads(blank, count, bool(config.get("medusa_fc_bias", False)), shared, rank, vocabulary)

    return read_heads(directory, "medusa", make)


def read_heads(directory: str | Path, model_type: str, make: Make) -> HeadStack | ReducedHeads:
    """Return the heads in a directory; every key is used exactly once.

    Raises:
        PeftlabError: the configuration is of another type, or a key is missing or unknown.
    """
    directory = Path(directory)
    file = directory / "config.json"
    config = read_object(file)
    if config.get("model_type") != model_type:
        raise PeftlabError(f"{directory}: model_type is {config.get('model_type')!r}, not {model_type}")
    tensors, _ = read_tensors(directory / "model.safetensors")
    rows, width, count, vocabulary = (member(config, key, int, file) for key in _SIZES)
    if min(rows, width) < 1 or max(rows, width) >= 2**31 or not 1 <= count <= len(tensors):
        raise PeftlabError(f"{file}: {', '.join(_SIZES[:3])} are not those of the heads beside it")
    with torch.device("meta"):
        blank = nn.Parameter(torch.empty(rows, width))
        heads = make(config, blank, count, bool(config.get("original_lm_head", False)), vocabulary)
    reduced = rows < vocabulary
    expected = set(heads.state_dict()) | ({"token_map"} if reduced else set())
    if expected != set(tensors):
        odd = sorted(expected ^ set(tensors))
        raise PeftlabError(f"{directory}: keys that do not fit its configuration: {', '.join(odd[:5])}")
    tokens = tensors.pop("token_map", None)
    for name, parameter in heads.state_dict().items():
        if tensors[name].shape != parameter.shape:
            shapes = f"{tuple(tensors[name].shape)}, its configuration says {tuple(parameter.shape)}"
            raise PeftlabError(f"{directory}: {name} has shape {shapes}")
    heads.load_state_dict(tensors, assign=True)
    heads.ranks = read_rates(config.get(KEY), file)
    return heads.eval() if tokens is None else ReducedHeads(heads, tokens, vocabulary).eval()


def write_ranks(directory: Path, ranks: RankRates) -> None:
    """Store with the heads in ``directory`` how often their choices are right, as ``rank_acceptance``."""
    config = read_object(directory / "config.json")
    write_json(directory / "config.json", {**config, KEY: rates_on_disk(ranks)})


def check_heads(directory: str | Path, target: PreTrainedModel) -> None:
    """Raise ``PeftlabError`` for heads of another vocabulary or width than the target's."""
    config, (rows, width) = read_object(Path(directory) / "config.json"), head_weight(target).shape
    tokens, states = config.get("vocab_size"), config.get("hidden_size")
    if (tokens, states) != (rows, width):
        raise PeftlabError(
            f"{directory}: heads for states of {states} and {tokens} tokens, but the target has {width} and {rows}"
        )
