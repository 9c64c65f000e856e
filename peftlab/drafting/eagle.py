"""EAGLE-3: one decoder layer over a token's embedding and three of the target's states (arXiv 2503.01840)."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from peftlab.checkpoints.gguf import read_gguf, rotary_order, tokenizer_fields, write_gguf
from peftlab.checkpoints.tensors import read_tensors, write_tensors
from peftlab.decoding.cache import Block, KVCache
from peftlab.decoding.flat import structure_of, without_torch_function
from peftlab.decoding.packed import pack_linears
from peftlab.drafting.acceptance import read_ranks
from peftlab.drafting.base import DraftExporter, Loss, llama_command, speculators_command
from peftlab.drafting.config import Eagle3Draft
from peftlab.drafting.objectives import make_objective
from peftlab.drafting.state_network import (
    CONSUMERS,
    FORMAT,
    WEIGHTS,
    Attend,
    FeatureLoss,
    LayerAttention,
    LayerMLP,
    NetworkShape,
    RMSNorm,
    StateNetwork,
    UnrolledKind,
    UnrolledNetwork,
    check_embedding,
    check_image_tokens,
    check_shapes,
    check_written,
    decoder_step,
    decoder_structure,
    decoding_config,
    drafted_tokens,
    image_tokens_field,
    layer_config,
    read_image_tokens,
    read_sizes,
    shape_for,
    stack_linears,
    token_maps,
)
from peftlab.drafting.table import DRAFTS
from peftlab.drafting.target import IDENTITY_FILE, check_tokenizer, head_weight, input_embedding
from peftlab.errors import PeftlabError
from peftlab.files import Json, read_object, typed_value, write_json
from peftlab.models.load import load_base, load_config, load_tokenizer


class EagleLayer(nn.Module):
    """A decoder layer over [norm(E(x_{t+1})); norm(g_t)]; by ``norm_before_residual`` the residual is the latter."""

    def __init__(self, shape: NetworkShape):
        super().__init__()
        self.norm_before_residual = shape.norm_before_residual
        self.self_attn, self.mlp = LayerAttention(shape, 2 * shape.hidden_size, norms=shape.head_norms), LayerMLP(shape)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            RMSNorm(shape.hidden_size, shape.eps) for _ in range(3)
        )

    def forward(self, embedded: Tensor, states: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        normed = self.hidden_norm(states)
        both = torch.cat((self.input_layernorm(embedded), normed), -1)
        hidden = (normed if self.norm_before_residual else states) + self.self_attn(both, rotation, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3(UnrolledNetwork):
    """g_t = fc[h_a; h_b; h_c] of the target's states, one layer over it and the next token, and rows of the LM head.

    The output, before the final norm, is the next g. Norms before ``fc``, in the residual and after the output are
    EAGLE 3.1's, see ``NetworkShape``. Parameters are named as in the files of speculators' ``eagle3``; the embeddings
    are the target's and no parameter.
    """

    norm: RMSNorm

    def __init__(self, shape: NetworkShape, embedding: Tensor, head: Tensor, tokens: Tensor | None = None):
        super().__init__(shape, embedding, head, tokens)
        width = len(shape.features) * shape.hidden_size
        self.fc = nn.Linear(width, shape.hidden_size, bias=False)
        if shape.norm_before_fc:
            self.input_norm = RMSNorm(width, shape.eps)
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(shape.hidden_size, shape.eps) for _ in shape.features)
        self.layers = nn.ModuleList([EagleLayer(shape)])
        self.norm = RMSNorm(shape.hidden_size, shape.eps)

    def fuse(self, features: Tensor) -> Tensor:
        """Return g, the fused states of the target; see ``StateNetwork``."""
        return self.fc(norm_features(self, features.to(self.fc.weight.dtype)))

    def layer(self, embedded: Tensor, states: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Return the layer's outputs; see ``StateNetwork``."""
        output = self.layers[0](embedded, states, rotation, attend)
        return self.norm(output) if self.shape.norm_output else output

    def read_by_head(self, states: Tensor) -> Tensor:
        """Return the normed outputs; with ``norm_output`` the outputs are normed already."""
        return states if self.shape.norm_output else self.norm(states)


def norm_features(network: Eagle3, features: Tensor) -> Tensor:
    """Return the target's states as ``fc`` reads them: normed together, each alone, or not at all.

    Args:
        network: whose flags decide. features: the target's states, [..., m·H].
    """
    if network.shape.norm_before_fc:
        return network.input_norm(features)
    if network.shape.fc_norm:
        parts = features.chunk(len(network.fc_norm), -1)
        return torch.cat([norm(part) for norm, part in zip(network.fc_norm, parts, strict=True)], -1)
    return features


class EagleStep(nn.Module):
    """Computes ``Eagle3`` row by row with a cache; see ``decoding.state_drafters.FeatureNetwork``.

    The layer runs as one of a decoder's does (``decoding.flat``, compiled where it can be).

    Args:
        network: trained; its weights must not change any more. pack: pack them for the CPU.
    """

    def __init__(self, network: Eagle3, pack: bool = True):
        super().__init__()
        shape, layer = network.shape, network.layers[0]
        assert isinstance(layer, EagleLayer)
        self.features, self.vocab_size, self.ranks = network.features, network.vocab_size, network.ranks
        self.window, self.image_tokens, self.tokens = shape.window, shape.image_tokens, network.tokens
        self._norm_before_residual, self._norm_output = shape.norm_before_residual, shape.norm_output
        self._norm_features = partial(norm_features, network) if shape.norm_before_fc or shape.fc_norm else None
        self._first_norms = torch.stack((layer.input_layernorm.weight, layer.hidden_norm.weight)).detach()
        self._eps, self.fc = shape.eps, stack_linears(network.fc)
        parts = (layer.self_attn, layer.mlp, None, layer.post_attention_layernorm)
        self._layer = decoder_step(decoder_structure(network, [parts]), pack)
        if pack:
            pack_linears(self)

    @property
    def device(self) -> torch.device:
        """The device on which it computes."""
        return self._layer.device

    def fuse(self, features: Tensor) -> Tensor:
        """Return g for the target's states, [..., F] -> [..., H]."""
        features = features.to(self._first_norms.dtype)
        return self.fc(features if self._norm_features is None else self._norm_features(features))

    def advance(self, cache: KVCache, tokens: Tensor, states: Tensor, block: Block) -> Tensor:
        """Return the outputs of rows, [b, n, H], and store their keys and values in the cache."""
        embedded = self._layer.embed(tokens, block)
        both = torch.stack((embedded, states.to(embedded.dtype)), 2)
        both = F.rms_norm(both, both.shape[-1:], eps=self._eps).mul_(self._first_norms)
        residual = both[:, :, 1] if self._norm_before_residual else states
        with without_torch_function():
            output, _ = self._layer.run_layers(cache, residual, block, range(1), given=both.flatten(2))
            return self._layer.normed(output) if self._norm_output else output

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of ``tokens``, [..., H] -> [..., V_d]."""
        with without_torch_function():
            return self._layer.logits(states) if self._norm_output else self._layer.output(states).logits


_SGLANG = ["LlamaForCausalLMEagle3"]
_EMBEDDING = "embed_tokens.weight"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

# In the files of EAGLE's authors and of SpecForge.
_OTHER_NAMES = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # of EAGLE 3.1, see ``NetworkShape``


def tensors_of(network: Eagle3) -> dict[str, Tensor]:
    """Return the network's tensors, by speculators' names, as its file has them.

    Embeddings that are the target's are not written: engines share them.
    """
    tensors = network.state_dict() | ({_EMBEDDING: network.embedding} if network.shape.own_embedding else {})
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()} | token_maps(network)


def norm_flags(shape: NetworkShape) -> dict[str, Json]:
    """Return EAGLE 3.1's flags, each written out, because readers differ in an absent flag's meaning."""
    flags: dict[str, Json] = {name: bool(getattr(shape, name)) for name in FLAGS}
    return flags


def speculators_config(network: Eagle3, *, target: str, architecture: str, tokens: int) -> dict[str, Json]:
    """Return the configuration of a network in speculators' layout.

    Args:
        network: trained. target, architecture, tokens: as for ``write_eagle``.
    """
    shape = network.shape
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": FORMAT,
        # vLLM takes the number of states of a Llama's layer from here, and not from their layers.
        "transformer_layer_config": layer_config(shape, network.fc.weight.dtype)
        | {"num_aux_hidden_states": len(shape.features)},
        "draft_vocab_size": len(network.lm_head.weight),
        "target_hidden_size": shape.hidden_size,
        _LAYER_IDS: list(shape.features),
        **norm_flags(shape),
        **image_tokens_field(shape),
        "embed_requires_grad": shape.own_embedding,
        "tie_word_embeddings": False,
        "speculators_config": decoding_config("eagle3", target=target, architecture=architecture, tokens=tokens),
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


def read_shape(directory: Path, layers: int | None = None) -> tuple[NetworkShape, int]:
    """Return the sizes of the network in a directory, and how many tokens it drafts.

    An absent flag of EAGLE 3.1 is false, as for speculators' own class and for SGLang. (vLLM takes an absent
    ``norm_before_residual`` of speculators' layout for true; speculators' trainer writes all of them.)

    Args:
        directory: of the draft. layers: of the target, which a file without layer numbers counts on.

    Raises:
        PeftlabError: it is of another type, or computes what is not computed here.
    """
    file = directory / "config.json"
    config = read_object(file)
    if not DRAFTS["eagle3"].recognises(directory):
        raise PeftlabError(f"{file}: speculators_model_type is {config.get('speculators_model_type')!r}, not eagle3")
    layer = (
        config
        if config.get("architectures") == _SGLANG
        else typed_value(config, "transformer_layer_config", dict, file)
    )
    flags = _flags(config, file)
    if (kind := layer.get("model_type")) not in ("llama", "qwen3") or layer.get("num_hidden_layers", 1) != 1:
        count = layer.get("num_hidden_layers", 1)
        raise PeftlabError(f"{file}: model_type {kind}, num_hidden_layers {count}; one layer of llama or qwen3 is read")
    shape = replace(
        read_sizes(layer, file),
        features=_features(config, file, layers),
        window=_window(layer, file),
        own_embedding=bool(config.get("embed_requires_grad")),
        image_tokens=read_image_tokens(config, file),
        norm_before_residual=flags["norm_before_residual"],
        norm_before_fc=flags["norm_before_fc"],
        fc_norm=flags["fc_norm"],
        norm_output=flags["norm_output"],
    )
    if (width := config.get("target_hidden_size") or shape.hidden_size) != shape.hidden_size:
        raise PeftlabError(f"{file}: target_hidden_size {width}, but the layer's states have {shape.hidden_size}")
    drafted = config.get("draft_vocab_size")  # null in SGLang's layout: all
    return shape, shape.vocab_size if drafted is None else typed_value(config, "draft_vocab_size", int, file)


def _window(layer: dict[str, Json], file: Path) -> int | None:
    """Return how many tokens a layer sees; speculators writes a null window where it trained without one."""
    if layer.get("layer_types") != ["sliding_attention"] or layer.get("sliding_window") is None:
        return None
    if (window := typed_value(layer, "sliding_window", int, file)) < 1:
        raise PeftlabError(f"{file}: sliding_window must be at least 1")
    return window


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


def _features(config: dict[str, Json], file: Path, layers: int | None) -> tuple[int, ...]:
    """Return the layers whose entering states a configuration names; in ``eagle_config`` by the layer before.

    Without any they are the 2nd, the middle one and the last but two of the target's, as for all readers.
    """
    other = config.get("eagle_config")
    places = [(config.get(_LAYER_IDS), 0), (other.get(_LAYER_IDS) if isinstance(other, dict) else None, 1)]
    named = [(ids, added) for ids, added in places if ids is not None]
    if not named and layers is not None:
        named = [([2, layers // 2, layers - 3], 0)]
    found = []
    for numbers, added in named:
        ids = [layer + added for layer in numbers if type(layer) is int] if isinstance(numbers, list) else []
        if not ids or not isinstance(numbers, list) or len(ids) < len(numbers) or sorted(set(ids)) != ids or ids[0] < 0:
            raise PeftlabError(f"{file}: {_LAYER_IDS} must be layer numbers, rising; it is {numbers}")
        found.append(tuple(ids))
    if len(set(found)) != 1:
        raise PeftlabError(
            f"{file}: {_LAYER_IDS} must be layer numbers, rising, and in eagle_config lower by one; they are "
            f"{', '.join(str(numbers) for numbers, _ in named) or 'missing'}"
        )
    return found[0]


def read_eagle(directory: str | Path, embedding: Tensor, layers: int | None = None) -> Eagle3:
    """Return the network in a directory; every key is used exactly once.

    Embeddings in the file that are not the target's are the network's own.

    Args:
        embedding: the target's, [V, H]. layers: of the target; None: the file must say which it reads.

    Raises:
        PeftlabError: it is for another vocabulary or width, or a key is missing, unknown or of another shape.
    """
    directory = Path(directory)
    shape, drafted = read_shape(directory, layers)
    check_embedding(shape, embedding, directory)
    tensors, _ = read_tensors(directory / WEIGHTS)
    for old, new in _OTHER_NAMES.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    tokens = drafted_tokens(tensors, drafted, shape.vocab_size, directory)
    own = tensors.pop(_EMBEDDING, None)
    if own is not None:
        check_embedding(shape, own, directory)
        if shape.own_embedding or not torch.equal(embedding.to(own.dtype), own.to(embedding.device)):
            shape, embedding = replace(shape, own_embedding=True), own.to(embedding.device)
    elif shape.own_embedding:
        raise PeftlabError(f"{directory}: embed_requires_grad is true, but {WEIGHTS} has no {_EMBEDDING}")
    with torch.device("meta"):
        blank = Eagle3(shape, torch.empty(0), torch.empty(drafted, shape.hidden_size))
    check_shapes(blank.state_dict(), tensors, directory)
    network = Eagle3(shape, embedding, tensors["lm_head.weight"], tokens)
    network.load_state_dict(tensors, assign=True)
    network.lm_head.weight = nn.Parameter(tensors["lm_head.weight"], requires_grad=False)
    network.ranks = read_ranks(directory / IDENTITY_FILE)
    return network.eval()


@dataclass(frozen=True)
class EagleExport:
    """Writes an EAGLE-3 draft for vLLM, SGLang, speculators or llama.cpp; see ``base.DraftExporter``.

    Attributes:
        place: directory of the draft. consumer: ``vllm``, ``sglang``, ``speculators`` or ``llama.cpp``.
    """

    place: Path
    consumer: str

    def write(self, target: str, directory: Path, gamma: int) -> float:
        """Write the draft in the consumer's layout; refuse a target or flags that the engine would not compute."""
        check_tokenizer(self.place, load_tokenizer(target))
        config = load_config(target).get_text_config(decoder=True)
        shape, _ = read_shape(self.place, config.num_hidden_layers)
        check_image_tokens(shape, self.place, self.consumer)
        own, wanted = (config.vocab_size, config.hidden_size), (shape.vocab_size, shape.hidden_size)
        if own != wanted or max(shape.features) >= config.num_hidden_layers:
            raise PeftlabError(
                f"{self.place}: for a target of {wanted[0]} tokens, states of {wanted[1]} and more than "
                f"{max(shape.features)} layers; {target} has {own[0]}, {own[1]} and {config.num_hidden_layers}"
            )
        unread = {
            "norm_before_residual": shape.norm_before_residual,
            "norms of heads (model_type qwen3)": shape.head_norms,
            "embeddings of its own (embed_requires_grad)": shape.own_embedding,
        }
        if self.consumer == "sglang" and any(unread.values()):
            names = " and ".join(name for name, has in unread.items() if has)
            raise PeftlabError(
                f"--for sglang: {self.place} has {names}, which SGLang does not read: it would compute other logits "
                "without a word; vllm loads the draft"
            )
        stored, _ = read_tensors(self.place / WEIGHTS)
        if self.consumer == "speculators" and _EMBEDDING not in stored:
            # Its class, with transformers 5, leaves embeddings that a file lacks uninitialised.
            model, _ = load_base(target, "AutoModelForCausalLM")
            stored[_EMBEDDING] = input_embedding(model).detach()
        embedding = stored.get(_EMBEDDING, torch.ones(1).expand(shape.vocab_size, shape.hidden_size))
        network = read_eagle(self.place, embedding, config.num_hidden_layers)
        if self.consumer == "llama.cpp":
            _write_gguf(network, target, directory)
            return 0.0
        if self.consumer == "sglang":
            values = sglang_config(network)
        else:
            verifier = os.path.abspath(target) if os.path.isdir(target) else target
            architecture = (config.architectures or [""])[0]
            values = speculators_config(network, target=verifier, architecture=architecture, tokens=gamma)
        if self.consumer == "speculators":
            tensors = tensors_of(network) | {_EMBEDDING: stored[_EMBEDDING]}  # by its names, whoever wrote the file
            write_tensors(directory / WEIGHTS, tensors, {"format": "pt"})
        else:
            shutil.copyfile(self.place / WEIGHTS, directory / WEIGHTS)
        write_json(directory / "config.json", values)
        difference = float((_logits(network) - _logits(read_eagle(directory, embedding))).abs().max())
        if difference > 0:
            raise PeftlabError(f"{directory}: computes other logits than {self.place} (by {difference:.2g})")
        return difference

    def command(self, target: str, directory: str, gamma: int) -> str:
        if self.consumer == "llama.cpp":
            return llama_command(target, directory, "draft-eagle3", gamma)
        if self.consumer == "vllm":
            settings = {"method": "eagle3", "model": directory, "num_speculative_tokens": gamma}
            return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(settings))}"
        if self.consumer == "speculators":
            return speculators_command(directory)
        window = read_shape(Path(directory))[0].window  # which SGLang does not read from the file
        return (
            f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm EAGLE3 "
            f"--speculative-draft-model-path {shlex.quote(directory)} --speculative-num-steps {gamma} "
            f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {gamma + 1}"
            + (f" --speculative-draft-window-size {window}" if window is not None else "")
        )


_GGUF_NAMES = {
    "fc": "fc", "norm": "output_norm", "lm_head": "output", "embed_tokens": "token_embd",
    "layers.0.input_layernorm": "blk.0.attn_norm",
    "layers.0.hidden_norm": "blk.0.attn_norm_2", "layers.0.post_attention_layernorm": "blk.0.ffn_norm",
    "layers.0.self_attn.q_proj": "blk.0.attn_q", "layers.0.self_attn.k_proj": "blk.0.attn_k",
    "layers.0.self_attn.v_proj": "blk.0.attn_v", "layers.0.self_attn.o_proj": "blk.0.attn_output",
    "layers.0.mlp.gate_proj": "blk.0.ffn_gate", "layers.0.mlp.up_proj": "blk.0.ffn_up",
    "layers.0.mlp.down_proj": "blk.0.ffn_down",
}  # fmt: skip


def _write_gguf(network: Eagle3, target: str, path: Path) -> None:
    """Write a network as llama.cpp reads it, and check the round trip.

    Embeddings that are the target's are not written: the engine shares them. ``d2t`` has the target's ids.

    Args:
        network: with three of the target's states. target: reference, for the tokenizer. path: the file.

    Raises:
        PeftlabError: it computes what the engine does not, or what was written differs.
    """
    shape = network.shape
    if unread := [name for name in ("norm_before_fc", "fc_norm", "norm_output", "head_norms") if getattr(shape, name)]:
        raise PeftlabError(f"--for llama.cpp: the draft has {', '.join(unread)}; llama.cpp's eagle3 has no such norm")
    if shape.rope is not None:
        raise PeftlabError(
            f"--for llama.cpp: the draft has rope_type {shape.rope['rope_type']}; it reads default alone"
        )
    if len(shape.features) != 3:
        raise PeftlabError(f"--for llama.cpp: the draft reads {len(shape.features)} states; llama.cpp gives three")
    if shape.window is not None:
        raise PeftlabError("--for llama.cpp: the draft was trained with a window, llama.cpp's eagle3 sees all tokens")
    sizes: dict[str, object] = {
        "context_length": shape.limit, "embedding_length": shape.hidden_size, "block_count": 1,
        "feed_forward_length": shape.intermediate_size, "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads, "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim, "attention.layer_norm_rms_epsilon": shape.eps,
        "rope.dimension_count": shape.head_dim, "rope.freq_base": shape.theta, "vocab_size": shape.vocab_size,
        "target_layers": list(shape.features), "target_hidden_size": shape.hidden_size,
        "norm_before_residual": shape.norm_before_residual,
    }  # fmt: skip
    fields: dict[str, object] = {"general.type": "model", "general.name": path.stem}
    fields |= {f"eagle3.{key}": value for key, value in sizes.items()}
    with tempfile.TemporaryDirectory() as directory:
        load_tokenizer(target).save_pretrained(directory)
        load_config(target).save_pretrained(directory)
        fields |= tokenizer_fields(Path(directory), shape.vocab_size).fields
    orders = {
        "blk.0.attn_q.weight": rotary_order(shape.heads, shape.heads * shape.head_dim),
        "blk.0.attn_k.weight": rotary_order(shape.kv_heads, shape.kv_heads * shape.head_dim),
    }
    written = network.state_dict() | ({_EMBEDDING: network.embedding} if shape.own_embedding else {})
    stored = {f"{_GGUF_NAMES[key.removesuffix('.weight')]}.weight": value for key, value in written.items()}
    stored = {name: value[orders[name]] if name in orders else value for name, value in stored.items()}
    # What the engine multiplies rows by is in fp32.
    stored = {name: value.float() if value.dim() == 1 else value for name, value in stored.items()}
    if network.tokens is not None:
        stored["d2t"] = network.tokens.long()
    write_gguf(path, "eagle3", fields, stored)
    found = read_gguf(path)
    if different := [name for name, value in stored.items() if not torch.equal(found[name], value.cpu())]:
        raise PeftlabError(f"{path}: {', '.join(different)} differ from the draft's")


def sglang_config(network: Eagle3) -> dict[str, Json]:
    """Return the configuration that SGLang reads: a Llama's, with the size of the drafted vocabulary."""
    # SGLang numbers layers by the state that leaves them, and without numbers takes 2, L/2 and L - 3 as they enter.
    layers: list[Json] = [layer - 1 for layer in network.features]
    flags = {name: flag for name, flag in norm_flags(network.shape).items() if flag}
    return (
        layer_config(network.shape, network.fc.weight.dtype)
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(network.lm_head.weight),
            "target_hidden_size": network.shape.hidden_size,
            # vLLM reads the first, SGLang the second; both size ``fc`` by the number of states.
            _LAYER_IDS: list(network.features),
            "eagle_config": {_LAYER_IDS: layers, "use_aux_hidden_state": True},
            "num_aux_hidden_states": len(layers),
        }
        | flags
    )


@torch.no_grad()
def _logits(network: Eagle3) -> Tensor:
    """Return logits of the drafted tokens for one text, by the target's ids, computed in float32."""
    network.parts_to(torch.float32)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, 8, len(network.features) * network.shape.hidden_size, generator=generator)
    tokens = torch.arange(8)[None] % network.vocab_size

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    states = network.rows(tokens, network.fuse(features), torch.arange(8)[None], attend)
    logits = network.logits(states).float()
    whole = torch.zeros(1, 8, network.vocab_size)
    return logits if network.tokens is None else whole.index_copy_(-1, network.tokens, logits)


class Eagle3Kind(UnrolledKind[Eagle3Draft]):
    """An EAGLE-3 layer as a draft."""

    name = "eagle3"

    def check(self, target: PretrainedConfig) -> None:
        """Refuse layers that the target does not have, and to continue from a draft of another kind."""
        features, count = self.config.features, target.get_text_config(decoder=True).num_hidden_layers
        if features is not None and features[-1] > count:
            raise PeftlabError(
                f"draft.features: no layer {features[-1]}; the target has 0 to {count - 1}, and {count} is the "
                "state that its LM head reads"
            )
        super().check(target)

    @property
    def _features(self) -> tuple[int, ...] | None:
        return None if self.config.features is None else tuple(self.config.features)

    def new(self, target: PreTrainedModel) -> Eagle3:
        """Return a layer with random weights and the target's final norm."""
        shape = replace(
            shape_for(target.config, self._features),
            norm_before_residual=bool(self.config.norm_before_residual),
            norm_before_fc=bool(self.config.norm_before_fc),
            fc_norm=bool(self.config.fc_norm),
            norm_output=bool(self.config.norm_output),
            image_tokens=self.config.image_tokens,
        )
        network = Eagle3(shape, input_embedding(target), head_weight(target))
        structure = structure_of(target)
        if structure is not None and not structure.norm.centred:  # else the weights start at one
            network.norm.weight = nn.Parameter(structure.norm.weight.detach().clone())
        return network

    def start(self, place: str, target: PreTrainedModel) -> Eagle3:
        """Return the stored layer, which must read the layers that the recipe names, if it names any."""
        network = self.read(place, target)
        if self._features not in (None, network.features):
            raise PeftlabError(
                f"draft.features: {self.config.features}, but {self.config.from_} reads {[*network.features]}"
            )
        for name in (*FLAGS, "image_tokens"):
            if getattr(self.config, name) not in (None, getattr(network.shape, name)):
                stored = str(getattr(network.shape, name)).lower()
                raise PeftlabError(f"draft.{name}: {self.config.from_} was trained with {stored}; leave it out")
        network.shape = replace(network.shape, window=None)  # from here on it trains on all tokens
        return network

    @classmethod
    def read(cls, place: str | Path, target: PreTrainedModel) -> Eagle3:
        """Return the layer in a directory; refuse another trainer's that reads the target's last state unnormed."""
        layers = target.config.get_text_config(decoder=True).num_hidden_layers
        network = read_eagle(place, input_embedding(target), layers)
        if max(network.features) == layers and not (Path(place) / IDENTITY_FILE).exists():
            raise PeftlabError(
                f"{place}: reads the state that leaves the target's last layer, {layers}, before the final norm; here "
                "drafts read it after the norm"
            )
        return network

    def write(self, directory: Path, *, architecture: str, tokens: int) -> None:
        """Write the layer, see ``write_eagle``."""
        network = self.model.network
        assert isinstance(network, Eagle3)
        write_eagle(network, directory, target=self.recipe.target, architecture=architecture, tokens=tokens)

    @classmethod
    def step(cls, network: StateNetwork, pack: bool = True) -> EagleStep:
        """Return the layer as a handful of products."""
        assert isinstance(network, Eagle3)
        return EagleStep(network, pack)

    def loss(self) -> Loss:
        """Return the weighted sum of the steps' losses, and of the regression."""
        config, objective = self.config, make_objective(self.recipe.objective)
        return FeatureLoss(objective, config.steps, config.decay, config.regression, self.known)

    @classmethod
    def export(cls, place: str, consumer: str) -> Path | DraftExporter:
        """Return what writes the draft for vLLM, SGLang, speculators or llama.cpp."""
        if consumer not in CONSUMERS:
            known = ", ".join(CONSUMERS)
            raise PeftlabError(f"--for {consumer}: {place} is an eagle3 draft, which is written for {known}")
        return EagleExport(Path(place), consumer)
