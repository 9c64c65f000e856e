"""FastMTP: one transformer layer over the target's last state and the next token (arXiv 2509.18362)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from peftlab.checkpoints.tensors import read_tensors, write_tensors
from peftlab.decoding.cache import Block, KVCache
from peftlab.decoding.flat import structure_of
from peftlab.decoding.packed import pack_linears
from peftlab.decoding.theory import RankRates
from peftlab.drafting.acceptance import read_ranks
from peftlab.drafting.base import DraftExporter
from peftlab.drafting.config import MtpDraft
from peftlab.drafting.state_network import (
    FORMAT,
    WEIGHTS,
    Attend,
    LayerAttention,
    LayerMLP,
    NetworkShape,
    RMSNorm,
    StateKind,
    StateNetwork,
    check_embedding,
    check_shapes,
    check_written,
    decoding_config,
    drafted_tokens,
    layer_config,
    read_sizes,
    shape_for,
    token_maps,
)
from peftlab.drafting.table import DRAFTS
from peftlab.drafting.target import IDENTITY_FILE, head_weight, input_embedding
from peftlab.errors import PeftlabError
from peftlab.files import Json, read_object, typed_value, write_json


class MtpLayer(nn.Module):
    """Computes norm(layer(W [norm(E); norm(h)])), the layer that of a Qwen3, with normed queries and keys.

    At the start W is the map to the state, and attention and MLP add 0: the layer repeats the state's direction.
    """

    def __init__(self, shape: NetworkShape):
        super().__init__()
        width = shape.hidden_size
        self.self_attn, self.mlp = LayerAttention(shape, width, norms=True), LayerMLP(shape)
        self.input_proj = nn.Linear(2 * width, width, bias=False)
        self.hidden_layernorm, self.token_layernorm, self.final_layernorm = (
            RMSNorm(width, shape.eps) for _ in range(3)
        )
        self.input_layernorm, self.post_attention_layernorm = (RMSNorm(width, shape.eps) for _ in range(2))
        for added in (self.self_attn.o_proj, self.mlp.down_proj):
            nn.init.zeros_(added.weight)
        with torch.no_grad():
            self.input_proj.weight.copy_(torch.eye(width).repeat(1, 2))
            self.input_proj.weight[:, :width] = 0

    def forward(self, embedded: Tensor, states: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        both = torch.cat((self.token_layernorm(embedded), self.hidden_layernorm(states)), -1)
        hidden = self.input_proj(both)
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, attend)
        return self.final_layernorm(hidden + self.mlp(self.post_attention_layernorm(hidden)))


class Mtp(StateNetwork):
    """One layer over the state that the LM head reads, used for every drafted token; its output is the next such state.

    Parameters are named as in the files of speculators' ``mtp``; the LM head's rows are the target's and not written.
    """

    def __init__(self, shape: NetworkShape, embedding: Tensor, head: Tensor, tokens: Tensor | None = None):
        super().__init__(shape, embedding, head, tokens)
        self.mtp_layers = nn.ModuleList([MtpLayer(shape)])
        self.norm = nn.Identity()  # the layer ends with its own

    def fuse(self, features: Tensor) -> Tensor:
        """Return the states as they are, in the layer's dtype; see ``StateNetwork``."""
        return features.to(self.mtp_layers[0].get_parameter("input_proj.weight").dtype)

    def layer(self, embedded: Tensor, states: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Return the layer's outputs; see ``StateNetwork``."""
        return self.mtp_layers[0](embedded, states, rotation, attend)


class MtpStep(nn.Module):
    """Computes ``Mtp`` row by row with a cache; see ``decoding.state_drafters.FeatureNetwork``.

    Args:
        network: trained; its weights must not change any more. pack: pack them for the CPU.
    """

    def __init__(self, network: Mtp, pack: bool = True):
        super().__init__()
        self.network = network
        self.features, self.vocab_size = network.features, network.vocab_size
        self.ranks: RankRates | None = network.ranks
        self.window: int | None = None
        if pack:
            pack_linears(network)

    @property
    def tokens(self) -> Tensor | None:
        """The ids of the tokens that it can draft, rising, [V_d]; None for all."""
        return self.network.tokens

    @property
    def device(self) -> torch.device:
        """The device on which it computes."""
        return self.network.device

    def fuse(self, features: Tensor) -> Tensor:
        """Return the states as they are, in the layer's dtype."""
        return self.network.fuse(features)

    def advance(
        self, cache: KVCache, tokens: Tensor, states: Tensor, block: Block, positions: Tensor, visible: Tensor | None
    ) -> Tensor:
        """Return the outputs of rows, [b, n, H], and store their keys and values in the cache."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.write(0, torch.cat((k, v), 1), block)
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=visible, enable_gqa=True)

        return self.network.rows(tokens, states, positions, attend)

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of ``tokens``, [..., H] -> [..., V_d]."""
        return self.network.logits(states)


_HEAD = "lm_head.weight"  # the target's, not written


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
    layer = typed_value(config, "transformer_layer_config", dict, file)
    if (
        not DRAFTS["mtp"].recognises(directory)
        or layer.get("model_type") != "qwen3"
        or config.get("num_nextn_predict_layers", 1) != 1
    ):
        raise PeftlabError(f"{file}: not one layer of a Qwen3 of speculators' type mtp")
    shape = replace(read_sizes(layer, file), features=(typed_value(layer, "num_hidden_layers", int, file),))
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
    network.ranks = read_ranks(directory / IDENTITY_FILE)
    return network.eval()


def new_layer(target: PreTrainedModel) -> Mtp:
    """Return an untrained layer, which gives the target's own next token: it repeats the state that it reads."""
    last = target.config.get_text_config(decoder=True).num_hidden_layers
    network = Mtp(shape_for(target.config, (last,)), input_embedding(target), head_weight(target))
    structure, layer = structure_of(target), network.mtp_layers[0]
    assert isinstance(layer, MtpLayer)
    if structure is not None and not structure.norm.centred:  # of the size of the target's states, else one
        nn.init.constant_(layer.final_layernorm.weight, float(structure.norm.weight.float().square().mean().sqrt()))
    return network


class MtpKind(StateKind[MtpDraft]):
    """A FastMTP layer as a draft."""

    name = "mtp"

    def new(self, target: PreTrainedModel) -> Mtp:
        """Return an untrained layer, which gives the target's own next token; see ``new_layer``."""
        return new_layer(target)

    @classmethod
    def read(cls, place: str | Path, target: PreTrainedModel) -> Mtp:
        """Return the layer in a directory, with the target's rows of the LM head."""
        return read_mtp(place, input_embedding(target), head_weight(target))

    def write(self, directory: Path, *, architecture: str, tokens: int) -> None:
        """Write the layer, see ``write_mtp``."""
        network = self.model.network
        assert isinstance(network, Mtp)
        write_mtp(network, directory, target=self.recipe.target, architecture=architecture, tokens=tokens)

    @classmethod
    def step(cls, network: StateNetwork, pack: bool = True) -> MtpStep:
        """Return the layer with a cache."""
        assert isinstance(network, Mtp)
        return MtpStep(network, pack)

    @classmethod
    def check_layers(cls, place: str, network: StateNetwork, layers: int) -> None:
        """Refuse a target of another depth: the layer reads its last state."""
        if network.features != (layers,):
            raise PeftlabError(f"{place}: for a target of {network.features[0]} layers; this one has {layers}")

    @classmethod
    def export(cls, place: str, consumer: str) -> Path | DraftExporter:
        """Refuse to export: engines serve this method only for families that come with such layers."""
        raise PeftlabError(
            f"--for {consumer}: {place} is an mtp draft; engines serve such layers only for targets that come with "
            "them (DeepSeek-V3, Qwen3-Next, MiMo and others). For this target train draft: {kind: eagle3}, which vllm "
            "and sglang load"
        )
