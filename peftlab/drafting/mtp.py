"""FastMTP: one transformer layer over the target's last state and the next token (arXiv 2509.18362).

The layer is a new one, a Qwen3's, or the target's own: Qwen3-Next, Qwen3.5, GLM-4.5 and DeepSeek-V3 checkpoints carry
a layer for multi-token prediction, which transformers leaves out when it loads the model (``OwnLayer``).
"""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from peftlab.checkpoints.tensors import DTYPES, PickleShard, Shard, open_shards, read_tensors, write_tensors
from peftlab.decoding.cache import Block, KVCache
from peftlab.decoding.flat import structure_of
from peftlab.decoding.packed import pack_linears
from peftlab.decoding.state_drafters import FeatureDrafter
from peftlab.decoding.theory import RankRates
from peftlab.drafting.acceptance import read_ranks
from peftlab.drafting.base import DraftExporter, SavedDraft, ServedDraft
from peftlab.drafting.config import OWN_LAYER, STITCHED, MtpDraft
from peftlab.drafting.state_network import (
    FORMAT,
    WEIGHTS,
    Attend,
    LayerAttention,
    LayerMLP,
    NetworkShape,
    RMSNorm,
    StateNetwork,
    UnrolledKind,
    UnrolledNetwork,
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
from peftlab.drafting.target import IDENTITY_FILE, check_tokenizer, head_weight, input_embedding
from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import MARK, Json, read_object, typed_value, write_json
from peftlab.models.config import find_model, model_place
from peftlab.models.load import load_config, load_tokenizer
from peftlab.untyped import KnownModel, Unwrapped


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


class Mtp(UnrolledNetwork):
    """One layer over the state that the LM head reads, used for every drafted token; its output is the next such state.

    Parameters are named as in the files of speculators' ``mtp``; the LM head's rows are the target's and not written.
    """

    layer_values: Mapping[str, Json] | None = None
    """The target's configuration, where the layer is of its class; None: a Qwen3's layer of ``shape``."""

    def __init__(
        self,
        shape: NetworkShape,
        embedding: Tensor,
        head: Tensor,
        tokens: Tensor | None = None,
        layer: nn.Module | None = None,
    ):
        super().__init__(shape, embedding, head, tokens)
        self.mtp_layers = nn.ModuleList([MtpLayer(shape) if layer is None else layer])
        self.norm = nn.Identity()  # the layer ends with its own

    def fuse(self, features: Tensor) -> Tensor:
        """Return the states as they are, in the layer's dtype; see ``StateNetwork``."""
        return features.to(self.mtp_layers[0].get_parameter("input_proj.weight").dtype)

    def layer(self, embedded: Tensor, states: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Return the layer's outputs; see ``StateNetwork``."""
        return self.mtp_layers[0](embedded, states, rotation, attend)


@dataclass(frozen=True)
class Family:
    """How the checkpoints of a family name their MTP layer, and how engines compute it.

    Attributes:
        start: of its keys; ``{layers}`` stands for the number of the target's layers.
        block: start of the keys of its decoder layer, after ``start``.
        names: of the map and the norms around the decoder layer, as here -> in the checkpoint.
        copies: keys under ``start`` that repeat the target's embeddings and LM head.
        pre_norm: the next step reads the output before the final norm; else the normed output, as the LM head does.
        blank_first: at position 0 the layer reads zeros in place of the token's embedding.
    """

    start: str
    block: str
    names: Mapping[str, str]
    copies: tuple[str, ...] = ()
    pre_norm: bool = False
    blank_first: bool = False


_QWEN = Family(
    "mtp.", "layers.0.", {"input_proj": "fc", "token_layernorm": "pre_fc_norm_embedding",
                          "hidden_layernorm": "pre_fc_norm_hidden", "final_layernorm": "norm"},
)  # fmt: skip
_DEEPSEEK = Family(
    "layers.{layers}.", "", {"input_proj": "eh_proj", "token_layernorm": "enorm", "hidden_layernorm": "hnorm",
                             "final_layernorm": "shared_head.norm"},
    copies=("embed_tokens.weight", "shared_head.head.weight"), blank_first=True,
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _QWEN),
    "deepseek_v3": _DEEPSEEK,
    # vLLM passes GLM's output on before the final norm; SGLang and transformers after it, which vLLM does for DeepSeek.
    "glm4_moe": replace(_DEEPSEEK, pre_norm=True),
}
"""``model_type`` of the text model -> its family."""

_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True)
class OwnLayer:
    """The MTP layer in a checkpoint, as it is stored.

    Attributes:
        directory: of the checkpoint. family: of the target. start: of the layer's keys.
        shards: key -> the weight file that has it, for these keys alone.
    """

    directory: Path
    family: Family
    start: str
    shards: Mapping[str, Shard]

    def parts(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield each key of the checkpoint with what it stores of these tensors, as a view.

        Checkpoints have a tensor for each map of each expert, where transformers has one for all experts.

        Args:
            tensors: of the layer, by their names here.
        """
        for name, tensor in tensors.items():
            module, _, rest = name.partition(".")
            other = self.family.names.get(module)
            key = self.start + (self.family.block + name if other is None else f"{other}.{rest}")
            stacked = _EXPERTS.fullmatch(key)
            if key in self.shards or stacked is None:
                yield key, tensor
                continue
            for i, expert in enumerate(tensor):
                maps = ("down_proj",) if stacked[2] == "down_proj" else ("gate_proj", "up_proj")
                for part, view in zip(maps, expert.chunk(len(maps)), strict=True):
                    yield f"{stacked[1]}.{i}.{part}.weight", view

    def matched(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``parts`` by key, each key of the layer exactly once.

        Raises:
            PeftlabError: the checkpoint lacks a key, has others, or one of another shape or kind of number.
        """
        parts = dict(self.parts(tensors))
        if missing := sorted(parts.keys() - self.shards.keys()):
            raise PeftlabError(f"{self.directory}: its MTP layer lacks {', '.join(missing[:5])}")
        copies = {self.start + name for name in self.family.copies}
        if unread := sorted(self.shards.keys() - parts.keys() - copies):
            raise PeftlabError(
                f"{self.directory}: {', '.join(unread[:5])} are not of one MTP layer in plain numbers; a checkpoint "
                "that stores it quantised, or has several such layers, is not read"
            )
        for key, tensor in parts.items():
            entry = self.shards[key].entries[key]
            if entry.shape != tuple(tensor.shape):
                raise PeftlabError(
                    f"{self.directory}: {key} has shape {entry.shape}, and {tuple(tensor.shape)} fits this target"
                )
            if DTYPES[entry.dtype] not in (torch.float32, torch.bfloat16, torch.float16):
                raise PeftlabError(f"{self.directory}: {key} is stored as {entry.dtype}; F32, BF16 or F16 is read")
        return parts

    def close(self) -> None:
        """Close the files."""
        for shard in self.shards.values():
            shard.close()


def find_own_layer(reference: str, config: PretrainedConfig, key: str, revision: str | None = None) -> OwnLayer:
    """Return the MTP layer in the checkpoint of a target; no values are read.

    Args:
        reference: of the target; of an adapter it is the base's. config: of the target.
        key: what asks for it, for messages. revision: of a hub model.

    Raises:
        PeftlabError: the target's family has no such layer, or its checkpoint lacks it.
    """
    text = config.get_text_config(decoder=True)
    family = FAMILIES.get(text.model_type)
    if family is None:
        raise PeftlabError(
            f"{key}: {reference} is a {text.model_type}, which has no MTP layers of its own; {', '.join(FAMILIES)} "
            "have. draft: {kind: mtp} without from trains a new layer for it"
        )
    parts = find_model(reference, revision=revision)
    place = model_place(parts.base, "target", revision=parts.revision)
    if place.is_file():
        raise PeftlabError(f"{key}: {place} is a GGUF file; MTP layers are read from a checkpoint in safetensors")
    where = family.start.format(layers=text.num_hidden_layers)
    first = f"{where}{family.names['input_proj']}.weight"
    owners = {name: shard for shard in open_shards(place) for name in shard.entries}
    starts = [name.removesuffix(first) + where for name in owners if name == first or name.endswith(f".{first}")]
    if len(starts) != 1:
        raise PeftlabError(
            f"{key}: {place} has no MTP layer: no tensor is called {first}. What transformers saves lacks it: name "
            "the released checkpoint, or what peftlab merged. draft: {kind: mtp} without from trains a new layer"
        )
    (start,) = starts
    return OwnLayer(place, family, start, {name: shard for name, shard in owners.items() if name.startswith(start)})


_ATTENTION = "peftlab_attend"


def _attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, *, scaling: float, attend: Attend, **_: object
) -> tuple[Tensor, None]:
    """Attend as ``Attend`` does, for transformers' layers: its products are scaled by 1/√D, theirs by ``scaling``."""
    return attend(q * (scaling * q.shape[-1] ** 0.5), k, v).transpose(1, 2), None


AttentionInterface.register(_ATTENTION, _attention)


def blank_own_layer(target: PreTrainedModel) -> nn.Module:
    """Return a decoder layer of the target's class with the map and the norms of an MTP layer, on the meta device."""
    decoder: KnownModel = target.get_decoder()
    config: Unwrapped = copy.deepcopy(target.config.get_text_config(decoder=True))
    # What depends on the number of a layer: this one has full attention, and experts where the family has them.
    settings = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_layer_types": ["sparse"]}
    settings |= {"first_k_dense_replace": 0, "mlp_only_layers": [], "decoder_sparse_step": 1}
    for name, value in settings.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    config._attn_implementation = _ATTENTION
    width, norm = config.hidden_size, type(decoder.norm)
    with torch.device("meta"):
        layer: nn.Module = type(decoder.layers[0])(config, 0)
        layer.add_module("input_proj", nn.Linear(2 * width, width, bias=False))
        for name in ("hidden_layernorm", "token_layernorm", "final_layernorm"):
            layer.add_module(name, norm(width, eps=config.rms_norm_eps))
    return layer


class OwnMtp(Mtp):
    """The target's own MTP layer, computed by the modules of transformers.

    Args:
        target: the model. layer: as ``blank_own_layer`` makes it, with values.
    """

    def __init__(self, target: PreTrainedModel, layer: nn.Module):
        text = target.config.get_text_config(decoder=True)
        shape = shape_for(target.config, (text.num_hidden_layers,))
        super().__init__(shape, input_embedding(target), head_weight(target), layer=layer)
        decoder: KnownModel = target.get_decoder()
        self.angles_of = decoder.rotary_emb.forward  # no part of this module: its numbers stay in float32
        self.family = FAMILIES[text.model_type]
        self.layer_values = json.loads(text.to_json_string(use_diff=False))
        self._stored = {name: tensor.dtype for name, tensor in layer.state_dict().items()}

    def rows(self, tokens: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the outputs of rows; see ``StateNetwork``."""
        layer: Unwrapped = self.mtp_layers[0]
        embedded = F.embedding(tokens, self.embedding).to(states.dtype)
        if self.family.blank_first:
            embedded = embedded.masked_fill((positions == 0)[..., None], 0)
        both = torch.cat((layer.token_layernorm(embedded), layer.hidden_layernorm(states)), -1)
        angles = self.angles_of(states, positions)
        hidden = layer(layer.input_proj(both), position_embeddings=angles, attend=attend)
        return hidden if self.family.pre_norm else layer.final_layernorm(hidden)

    def read_by_head(self, states: Tensor) -> Tensor:
        """Return what the LM head reads for these outputs, [..., H] -> [..., H]."""
        layer: Unwrapped = self.mtp_layers[0]
        return layer.final_layernorm(states) if self.family.pre_norm else states

    def round(self) -> None:
        """Convert each tensor to the dtype in which the checkpoint has it."""
        layer: Unwrapped = self.mtp_layers[0]
        for name, tensor in layer.state_dict(keep_vars=True).items():
            tensor.data = tensor.data.to(self._stored[name])


def read_own_layer(own: OwnLayer, target: PreTrainedModel) -> tuple[OwnMtp, tuple[str, ...]]:
    """Return the MTP layer of a target with the checkpoint's values, and warnings.

    Args:
        own: where it is. target: the model.

    Raises:
        PeftlabError: see ``OwnLayer.matched``.
    """
    layer = blank_own_layer(target)
    own.matched(layer.state_dict())
    whole: dict[str, Tensor] = {}
    for name, tensor in layer.state_dict().items():
        first = next(key for key, _ in own.parts({name: tensor}))
        whole[name] = torch.empty(tensor.shape, dtype=DTYPES[own.shards[first].entries[first].dtype])
    for key, part in own.parts(whole):
        part.copy_(own.shards[key].read(key))
    layer.load_state_dict(whole, assign=True)
    warnings = []
    for name, mine in zip(own.family.copies, (input_embedding(target), head_weight(target)), strict=False):
        if (key := own.start + name) in own.shards:
            stored = own.shards[key].read(key)
            if stored.shape != mine.shape or not torch.equal(stored.to(mine.dtype), mine.detach().cpu()):
                warnings.append(f"{own.directory}: {key} is not the target's own, which is used here")
    own.close()
    return OwnMtp(target, layer).eval(), tuple(warnings)


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
        self.image_tokens: int | None = None
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

    def advance(self, cache: KVCache, tokens: Tensor, states: Tensor, block: Block) -> Tensor:
        """Return the outputs of rows, [b, n, H], and store their keys and values in the cache."""
        visible = block.visible(self.window, self.device)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = cache.update(0, k, v, block)
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=visible, enable_gqa=True)

        return self.network.rows(tokens, states, block.positions(self.device), attend)

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of ``tokens``, [..., H] -> [..., V_d]."""
        return self.network.logits(states)


_HEAD = "lm_head.weight"  # the target's, not written


def write_mtp(network: Mtp, directory: Path, *, target: str, architecture: str, tokens: int) -> None:
    """Write a layer into an existing directory, and check what it contains.

    Neither embeddings nor LM head are written: they are the target's. Of a reduced vocabulary there are ``d2t`` and
    ``t2d``, as in eagle3's files, which speculators does not know in this type.

    Args:
        target: reference of the model it drafts for, of class ``architecture``. tokens: drafted per step.

    Raises:
        PeftlabError: the files differ from the layer.
    """
    shape, dtype = network.shape, network.mtp_layers[0].get_parameter("input_proj.weight").dtype
    layer = layer_config(shape, dtype) | {"model_type": "qwen3", "num_hidden_layers": shape.features[0]}
    if network.layer_values is not None:
        layer = dict(network.layer_values)
    config: dict[str, Json] = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_version": FORMAT,
        "transformer_layer_config": layer,
        "num_nextn_predict_layers": 1,
        "speculators_config": decoding_config("mtp", target=target, architecture=architecture, tokens=tokens),
    }
    if network.tokens is not None:  # speculators has no such key in this type, and refuses it
        config["draft_vocab_size"] = len(network.tokens)
    tensors = _tensors(network)
    write_tensors(directory / WEIGHTS, tensors, {"format": "pt"})
    write_json(directory / "config.json", config)
    if network.layer_values is not None:
        back, _ = read_tensors(directory / WEIGHTS)
    else:
        back = _tensors(read_mtp(directory, network.embedding, network.embedding))
    check_written(tensors, back, directory)


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
        raise PeftlabError(f"{file}: not one layer of a Qwen3, or of {', '.join(FAMILIES)}, of speculators' type mtp")
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


def _layer_values(directory: Path) -> dict[str, Json]:
    """Return the configuration of the layer in a directory."""
    file = directory / "config.json"
    return typed_value(read_object(file), "transformer_layer_config", dict, file)


def _layer_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a file's tensors by their names within the layer."""
    return {name.removeprefix("mtp_layers.0."): tensor for name, tensor in tensors.items()}


def read_tuned_layer(directory: Path, target: PreTrainedModel) -> OwnMtp:
    """Return the layer of a target that was tuned; every key is used exactly once.

    Args:
        directory: of the layer. target: the model.

    Raises:
        PeftlabError: the target is of another family or other sizes, or a key is missing, unknown or of another shape.
    """
    text, values = target.config.get_text_config(decoder=True), _layer_values(directory)
    for name in ("model_type", "hidden_size", "vocab_size", "num_hidden_layers"):
        if values.get(name) != getattr(text, name):
            raise PeftlabError(
                f"{directory}: the MTP layer of a target with {name} {values.get(name)}, and this one has "
                f"{getattr(text, name)}"
            )
    tensors, _ = read_tensors(directory / WEIGHTS)
    drafted = read_object(directory / "config.json").get("draft_vocab_size", text.vocab_size)
    tokens = drafted_tokens(tensors, drafted if isinstance(drafted, int) else -1, text.vocab_size, directory)
    layer = blank_own_layer(target)
    check_shapes({f"mtp_layers.0.{name}": tensor for name, tensor in layer.state_dict().items()}, tensors, directory)
    layer.load_state_dict(_layer_tensors(tensors), assign=True)
    network = OwnMtp(target, layer)
    if tokens is not None:
        tokens = tokens.to(network.device)
        network.draft_only(network.lm_head.weight[tokens], tokens)
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


@dataclass(frozen=True)
class OwnLayerExport:
    """Writes a target's own layer, tuned: a copy of the target with it, or a draft of speculators' type ``mtp``.

    See ``base.DraftExporter``.

    Attributes:
        place: directory of the draft. consumer: ``stitched`` or ``speculators``.
    """

    place: Path
    consumer: str

    def write(self, target: str, directory: Path, gamma: int) -> float:
        """Write what the consumer reads, and read it back; refuse a target that the layer is not of."""
        what, config = f"--for {self.consumer}", load_config(target)
        family, text = _layer_values(self.place).get("model_type"), config.get_text_config(decoder=True)
        if text.model_type != family:
            raise PeftlabError(f"{self.place}: the MTP layer of a {family}, and {target} is a {text.model_type}")
        check_tokenizer(self.place, load_tokenizer(target))
        own = find_own_layer(target, config, what)
        stored, _ = read_tensors(self.place / WEIGHTS)
        tensors = {name: t for name, t in stored.items() if name not in ("d2t", "t2d")}
        parts = own.matched(_layer_tensors(tensors))
        for key, part in parts.items():
            if DTYPES[dtype := own.shards[key].entries[key].dtype] != part.dtype:
                raise PeftlabError(
                    f"{what}: {self.place} has {key} in {part.dtype}, {target} in {dtype}; name the checkpoint from "
                    "which it was tuned"
                )
        if self.consumer == STITCHED:
            self._stitch(own, parts, directory)
            written = find_own_layer(str(directory), config, what)
            back = {key: written.shards[key].read(key) for key in parts}
            written.close()
        else:
            if FAMILIES[text.model_type] is not _QWEN or tensors.keys() != stored.keys():
                qwen = ", ".join(name for name, row in FAMILIES.items() if row is _QWEN)
                raise PeftlabError(
                    f"{what}: knows such layers of {qwen}, with the whole vocabulary alone; {self.place} is of a "
                    f"{family} and drafts {'all' if tensors.keys() == stored.keys() else 'some'} tokens. --for "
                    f"{STITCHED} puts it back into the target here"
                )
            verifier = os.path.abspath(target) if os.path.isdir(target) else target
            architecture = (config.architectures or [""])[0]
            decoding = decoding_config("mtp", target=verifier, architecture=architecture, tokens=gamma)
            values = read_object(self.place / "config.json") | {"speculators_config": decoding}
            shutil.copyfile(self.place / WEIGHTS, directory / WEIGHTS)
            write_json(directory / "config.json", values)
            back = dict(own.parts(_layer_tensors(read_tensors(directory / WEIGHTS)[0])))
        if odd := [key for key, part in parts.items() if not torch.equal(back[key], part)]:
            raise PeftlabError(f"{directory}: {', '.join(odd[:5])} were written with other values")
        return 0.0

    def _stitch(self, own: OwnLayer, parts: Mapping[str, Tensor], directory: Path) -> None:
        """Copy the target's files, and write the layer over its own: no other byte of any file changes."""
        if any(isinstance(shard, PickleShard) for shard in own.shards.values()):
            raise PeftlabError(f"--for {STITCHED}: {own.directory} has pickled weights; save it as safetensors")
        for file in sorted(own.directory.rglob("*")):
            if file.is_file() and file.name != MARK:
                copied = directory / file.relative_to(own.directory)
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copied)
        for key, part in parts.items():  # of the same shape and dtype: in the same place
            shard = own.shards[key]
            with open(directory / shard.path.name, "r+b") as opened:
                opened.seek(shard.entries[key].offset)
                opened.write(part.contiguous().flatten().view(torch.uint8).numpy().data)

    def command(self, target: str, directory: str, gamma: int) -> str:
        if self.consumer != STITCHED:
            return f"speculators stitch-mtp {shlex.quote(directory)} {shlex.quote(target)}"
        settings = json.dumps({"method": "mtp", "num_speculative_tokens": gamma})
        return f"vllm serve {shlex.quote(directory)} --speculative-config {shlex.quote(settings)}"


class MtpKind(UnrolledKind[MtpDraft]):
    """A FastMTP layer as a draft: a new one, or the target's own."""

    name = "mtp"

    def check(self, target: PretrainedConfig) -> None:
        """Refuse a target without MTP layers, and to continue from a draft of another kind."""
        start = self.config.from_
        if start == OWN_LAYER:
            find_own_layer(self.recipe.target, target, f"draft.from: {start}", self.recipe.revision)
        elif start is not None and self.row().find(start) is None and (hint := did_you_mean(start, [OWN_LAYER])):
            raise PeftlabError(f"draft.from: {start} is no draft{hint}: target is the layer in its own checkpoint")
        else:
            super().check(target)

    @property
    def start_directory(self) -> str | None:
        """The stored draft from which training continues; None: from a new layer, or the target's own."""
        return None if self.config.from_ == OWN_LAYER else super().start_directory

    def new(self, target: PreTrainedModel) -> Mtp:
        """Return the target's own layer, or an untrained one, which gives the target's own next token."""
        if self.config.from_ != OWN_LAYER:
            return new_layer(target)
        own = find_own_layer(self.recipe.target, target.config, f"draft.from: {OWN_LAYER}", self.recipe.revision)
        network, warnings = read_own_layer(own, target)
        for warning in warnings:
            print(warning)
        return network

    def drafter(self, saved: SavedDraft | None) -> ServedDraft | None:
        """Return the target with the network read from disk; before training its own layer drafts, a new one not."""
        if saved is not None or self.config.from_ != OWN_LAYER:
            return super().drafter(saved)
        network = self.new(self.target).to(self.target.device)
        network.parts_to(self.computing)
        return ServedDraft(self.target, partial(FeatureDrafter, self.step(network)), network.features)

    @classmethod
    def read(cls, place: str | Path, target: PreTrainedModel) -> Mtp:
        """Return the layer in a directory, with the target's rows of the LM head."""
        if _layer_values(Path(place)).get("model_type") in FAMILIES:
            return read_tuned_layer(Path(place), target)
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
        """Return what puts a target's own layer back into it; a new layer is refused, which no engine serves."""
        own = _layer_values(Path(place)).get("model_type") in FAMILIES
        if own and consumer in (STITCHED, "speculators"):
            return OwnLayerExport(Path(place), consumer)
        if own:
            raise PeftlabError(
                f"--for {consumer}: {place} is the target's own MTP layer, tuned; --for {STITCHED} writes a copy of "
                "the target with it, which vllm (method mtp) and sglang (NEXTN) serve"
            )
        raise PeftlabError(
            f"--for {consumer}: {place} is an mtp draft; engines serve such layers only for targets that come with "
            "them (DeepSeek-V3, Qwen3-Next, MiMo and others). For this target train draft: {kind: eagle3}, which vllm "
            "and sglang load"
        )
