"""Files of block drafts: speculators' layout, the flat one of z-lab, SpecForge and DeepSpec, and GGUF.

======  =======================================================================================================
layout  layers' ids
======  =======================================================================================================
here    i: the state that enters layer i of the target, as in speculators' ``aux_hidden_state_layer_ids`` and in GGUF
flat    i: the state that leaves it, in ``dflash_config.target_layer_ids``; speculators' number less one
======  =======================================================================================================
"""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from peftlab.checkpoints.gguf import read_gguf, tokenizer_fields, write_gguf
from peftlab.checkpoints.tensors import read_tensors, write_tensors
from peftlab.drafting.base import llama_command, speculators_command
from peftlab.drafting.state_network import (
    FORMAT,
    WEIGHTS,
    NetworkShape,
    check_image_tokens,
    check_written,
    decoding_config,
    drafted_tokens,
    image_tokens_field,
    layer_config,
    read_image_tokens,
    read_sizes,
)
from peftlab.drafting.table import DRAFTS
from peftlab.drafting.target import check_tokenizer
from peftlab.errors import PeftlabError
from peftlab.files import Json, read_object, typed_value, write_json
from peftlab.models.load import load_config, load_tokenizer


@dataclass(frozen=True)
class BlockShape(NetworkShape):
    """The sizes of a network that drafts blocks.

    Attributes:
        layers: of the network. block_size: B, rows of a block. mask_token: whose embedding the masks read.
        window: a row sees as many tokens, itself the last of them, and no later row of its block; None: it sees all
            tokens before the block, and the whole block.
        from_anchor: the first row, a known token, drafts the one after it; else the first mask does, and the last row
            drafts one token less far ahead.
        markov_rank: of a Markov head, 0: there is none. markov_head: its kind.
        confidence: there is a confidence head. confidence_sees_token: it reads the token before, too.
    """

    layers: int = 1
    block_size: int = 8
    mask_token: int = 0
    from_anchor: bool = False
    markov_rank: int = 0
    markov_head: str = "vanilla"
    confidence: bool = False
    confidence_sees_token: bool = True

    @property
    def length(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size if self.from_anchor else self.block_size - 1

    @property
    def type(self) -> str:
        """speculators' type: a DFlash that drafts from its anchor is a DSpark without heads."""
        return "dspark" if self.markov_rank or self.confidence or self.from_anchor else "dflash"


MARKOV_HEADS = ("vanilla", "gated", "rnn")
_OTHER_NAMES = {"midlayer.": "layers.0.", "encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


def speculators_layout(
    shape: BlockShape, drafted: int, dtype: torch.dtype, *, target: str, architecture: str
) -> dict[str, Json]:
    """Return the configuration of a network in speculators' layout.

    Args:
        shape: its sizes. drafted: how many tokens it drafts. dtype: of the weights.
        target: reference of the model it drafts for, of class ``architecture``.
    """
    return _heads(shape) | {
        "architectures": ["DSparkDraftModel" if shape.type == "dspark" else "DFlashDraftModel"],
        "speculators_model_type": shape.type,
        "speculators_version": FORMAT,
        "transformer_layer_config": _layers(shape, dtype),
        "draft_vocab_size": drafted,
        "target_hidden_size": shape.hidden_size,
        "block_size": shape.block_size,
        "aux_hidden_state_layer_ids": list(shape.features),
        "mask_token_id": shape.mask_token,
        "sample_from_anchor": shape.from_anchor,
        # vLLM gives all layers the attention that this key says: both directions within a block where it is true.
        "sliding_window_non_causal": shape.window is None,
        "tie_word_embeddings": False,
        "speculators_config": decoding_config(
            shape.type, target=target, architecture=architecture, tokens=shape.length
        ),
        **image_tokens_field(shape),
    }


def _heads(shape: BlockShape) -> dict[str, Json]:
    """Return what a configuration says about DSpark's heads; nothing of a DFlash."""
    heads: dict[str, Json] = {
        "markov_rank": shape.markov_rank,
        "markov_head_type": shape.markov_head,
        "enable_confidence_head": shape.confidence,
        "confidence_head_with_markov": shape.confidence_sees_token,
    }
    return heads if shape.type == "dspark" else {}


def flat_layout(shape: BlockShape, drafted: int, dtype: torch.dtype, layers: int) -> dict[str, Json]:
    """Return the configuration of a network in the flat layout, which vLLM and SGLang both read.

    Neither ``is_causal`` nor ``dflash_config.causal`` is written: without them both engines let rows see later ones of
    their block where a layer's attention is full, and not where it slides, as the network was trained.

    Args:
        shape, drafted, dtype: as for ``speculators_layout``. layers: of the target.
    """
    nested: dict[str, Json] = {
        "mask_token_id": shape.mask_token,
        "target_layer_ids": [layer - 1 for layer in shape.features],
        "sample_from_anchor": shape.from_anchor,
    }
    if shape.type == "dspark":  # vLLM reads its keys at the top level, SGLang there or in dflash_config
        nested |= _heads(shape)
        nested |= {"projector_type": "dspark", "block_size": shape.block_size}
    return (_layers(shape, dtype) | (nested if shape.type == "dspark" else {})) | {
        "architectures": ["Qwen3DSparkModel" if shape.type == "dspark" else "DFlashDraftModel"],
        "num_target_layers": layers,
        "draft_vocab_size": drafted,
        "target_hidden_size": shape.hidden_size,
        "block_size": shape.block_size,
        "dflash_config": nested,
    }


def _layers(shape: BlockShape, dtype: torch.dtype) -> dict[str, Json]:
    """Return the configuration of a network's layers, those of a Qwen3."""
    sliding = shape.window is not None
    types: list[Json] = ["sliding_attention" if sliding else "full_attention"] * shape.layers
    layer = layer_config(shape, dtype) | {"model_type": "qwen3", "num_hidden_layers": shape.layers}
    return layer | {"layer_types": types, "use_sliding_window": sliding, "sliding_window": shape.window}


def read_block_shape(directory: Path) -> tuple[BlockShape, int]:
    """Return the sizes of the network in a directory of either layout, and how many tokens it drafts.

    Raises:
        PeftlabError: it is of another type, or computes what is not computed here.
    """
    file = directory / "config.json"
    config = read_object(file)
    kind, key = config.get("speculators_model_type", "dflash"), "aux_hidden_state_layer_ids"
    if not DRAFTS["dflash"].recognises(directory) or kind not in ("dflash", "dspark"):
        raise PeftlabError(f"{file}: speculators_model_type is {kind!r}, not dflash or dspark")
    if "speculators_model_type" not in config:
        config, key = _from_flat(config, file), "target_layer_ids plus one"
    spark = config["speculators_model_type"] == "dspark"
    layer = typed_value(config, "transformer_layer_config", dict, file)
    if layer.get("model_type") != "qwen3" or layer.get("attention_bias"):
        raise PeftlabError(f"{file}: its layers must be a qwen3's without attention_bias")
    count = typed_value(layer, "num_hidden_layers", int, file)
    size, mask = (typed_value(config, key, int, file) for key in ("block_size", "mask_token_id"))
    flags = {"sample_from_anchor": spark}  # speculators' own values where a key is missing
    flags |= {"enable_confidence_head": spark, "confidence_head_with_markov": True}
    flags = {key: typed_value(config, key, bool, file) if key in config else usual for key, usual in flags.items()}
    rank = typed_value(config, "markov_rank", int, file) if spark and "markov_rank" in config else 256 * spark
    head = config.get("markov_head_type", "vanilla")
    if rank < 0 or not isinstance(head, str) or head not in MARKOV_HEADS:
        raise PeftlabError(
            f"{file}: markov_rank {rank} must be 0 or more, markov_head_type {head!r} one of vanilla, gated and rnn"
        )
    if flags["sample_from_anchor"] and not spark:
        raise PeftlabError(f"{file}: sample_from_anchor is true, which a dflash draft is not trained with")
    if rank and head == "rnn" and not flags["sample_from_anchor"]:
        raise PeftlabError(
            f"{file}: sample_from_anchor is false: the memory of an rnn Markov head begins at the anchor's row, which "
            "then drafts nothing; this is read with sample_from_anchor true alone"
        )
    ids = config.get("aux_hidden_state_layer_ids")
    found = [each for each in ids if type(each) is int and each >= 0] if isinstance(ids, list) else []
    if not isinstance(ids, list) or not found or len(found) < len(ids) or found != sorted(set(found)):
        raise PeftlabError(f"{file}: {key} must be layer numbers from 0, rising; they are {ids}")
    sizes = read_sizes(layer, file)
    if count < 1 or size < 2 or not 0 <= mask < sizes.vocab_size:
        raise PeftlabError(
            f"{file}: num_hidden_layers {count}, block_size {size} and mask_token_id {mask} must be at least 1, at "
            f"least 2 and one of the {sizes.vocab_size} tokens"
        )
    if (width := config.get("target_hidden_size") or sizes.hidden_size) != sizes.hidden_size:
        raise PeftlabError(f"{file}: target_hidden_size {width}, but the layers' states have {sizes.hidden_size}")
    elsewhere = ("features", "window", "rope", "image_tokens")
    own = {field: value for field, value in asdict(sizes).items() if field not in elsewhere}
    shape = BlockShape(
        **own, image_tokens=read_image_tokens(config, file), rope=sizes.rope, features=tuple(found),
        window=_window(config, layer, count, file), layers=count,
        block_size=size, mask_token=mask, from_anchor=flags["sample_from_anchor"], markov_rank=rank, markov_head=head,
        confidence=flags["enable_confidence_head"] and spark,
        confidence_sees_token=flags["confidence_head_with_markov"],
    )  # fmt: skip
    return shape, typed_value(config, "draft_vocab_size", int, file)


def read_block_tensors(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of the network in a directory, by speculators' names."""
    tensors, _ = read_tensors(directory / WEIGHTS)
    for old, new in _OTHER_NAMES.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    return tensors


def _from_flat(config: dict[str, Json], file: Path) -> dict[str, Json]:
    """Return a configuration of the flat layout in speculators' terms; newer files nest its keys in dflash_config."""
    nested = config.get("dflash_config")
    places = [config, nested] if isinstance(nested, dict) else [config]

    def either(key: str) -> Json:
        values = [place[key] for place in places if place.get(key) is not None]
        if any(value != values[0] for value in values):
            raise PeftlabError(f"{file}: {key} is {values[0]}, but {values[1]} in dflash_config")
        return values[0] if values else None

    ids, entering = either("target_layer_ids"), either("eagle_aux_hidden_state_layer_ids")
    if isinstance(ids, list):
        ids = [layer + 1 if type(layer) is int else layer for layer in ids]
    if None not in (ids, entering) and ids != entering:
        raise PeftlabError(
            f"{file}: eagle_aux_hidden_state_layer_ids {entering} are not target_layer_ids plus one, {ids}"
        )
    # Where both are named, is_causal comes first; without either, layers that slide are causal.
    causal = config.get("is_causal") if config.get("is_causal") is not None else either("causal")
    types = config.get("layer_types")
    sliding = isinstance(types, list) and "sliding_attention" in types
    if causal and not sliding:
        raise PeftlabError(f"{file}: its layers see all tokens but no later row of their block, which is not supported")
    drafted = config.get("draft_vocab_size")
    spark = config.get("architectures") != ["DFlashDraftModel"] or either("projector_type") == "dspark"
    anchor = either("sample_from_anchor")
    heads: dict[str, Json] = {
        "markov_rank": either("markov_rank") or 0,
        "markov_head_type": either("markov_head_type") or "vanilla",
        # In this layout both heads' keys are false where they are missing, and a DSpark drafts from its anchor.
        "enable_confidence_head": either("enable_confidence_head") or False,
        "confidence_head_with_markov": either("confidence_head_with_markov") or False,
    }
    return (heads if spark else {}) | {
        "speculators_model_type": "dspark" if spark else "dflash",
        "transformer_layer_config": config,
        "draft_vocab_size": config.get("vocab_size") if drafted is None else drafted,
        "target_hidden_size": config.get("target_hidden_size"),
        "block_size": either("block_size"),
        "aux_hidden_state_layer_ids": entering if ids is None else ids,
        "mask_token_id": either("mask_token_id"),
        "sample_from_anchor": spark if anchor is None else anchor,
        "sliding_window_non_causal": not (sliding if causal is None else causal),
    }


def _window(config: dict[str, Json], layer: dict[str, Json], count: int, file: Path) -> int | None:
    """Return the window of all layers of a stored network; None where they see everything."""
    types = layer.get("layer_types") or ["full_attention"] * count
    if types == ["full_attention"] * count:
        return None
    if types != ["sliding_attention"] * count:
        raise PeftlabError(
            f"{file}: layer_types must be {count} times full_attention or {count} times sliding_attention"
        )
    if config.get("sliding_window_non_causal"):
        raise PeftlabError(f"{file}: its layers slide and see later rows of their block; such layers are not supported")
    return None if layer.get("sliding_window") is None else typed_value(layer, "sliding_window", int, file)


@dataclass(frozen=True)
class BlockExport:
    """Writes a block draft for vLLM, SGLang, speculators or llama.cpp; see ``base.DraftExporter``.

    Attributes:
        place: directory of the draft. consumer: ``vllm``, ``sglang``, ``speculators`` or ``llama.cpp``.
    """

    place: Path
    consumer: str

    def write(self, target: str, directory: Path, gamma: int) -> float:
        """Write the draft in the consumer's layout; refuse what the engine would not compute."""
        shape, drafted = read_block_shape(self.place)
        check_image_tokens(shape, self.place, self.consumer)
        tokenizer = load_tokenizer(target)
        check_tokenizer(self.place, tokenizer)
        config = load_config(target).get_text_config(decoder=True)
        own, wanted = (config.vocab_size, config.hidden_size), (shape.vocab_size, shape.hidden_size)
        if own != wanted or max(shape.features) >= config.num_hidden_layers:
            raise PeftlabError(
                f"{self.place}: for a target of {wanted[0]} tokens, states of {wanted[1]} and more than "
                f"{max(shape.features)} layers; {target} has {own[0]}, {own[1]} and {config.num_hidden_layers}"
            )
        if self.consumer == "sglang" and drafted != shape.vocab_size:
            raise PeftlabError(
                f"--for sglang: {self.place} drafts {drafted} of {shape.vocab_size} tokens; SGLang drafts all, by the "
                "target's LM head. Train with draft.vocabulary: null; vllm and llama.cpp load the draft as it is"
            )
        if self.consumer == "sglang" and tokenizer.mask_token_id not in (None, shape.mask_token):
            raise PeftlabError(
                f"--for sglang: {self.place} masks with token {shape.mask_token}; SGLang takes the tokenizer's mask, "
                f"{tokenizer.mask_token_id}, and refuses another: train with draft.mask_token {tokenizer.mask_token_id}"
            )
        if reason := self._refused_heads(shape):
            raise PeftlabError(f"--for {self.consumer}: {self.place} {reason}")
        tensors = read_block_tensors(self.place)
        if self.consumer == "llama.cpp":
            _write_gguf(shape, drafted, tensors, target, directory)
            return 0.0
        dtype = tensors["fc.weight"].dtype
        if self.consumer == "speculators":
            verifier = os.path.abspath(target) if os.path.isdir(target) else target
            architecture = (config.architectures or [""])[0]
            layout = speculators_layout(shape, drafted, dtype, target=verifier, architecture=architecture)
        else:
            layout = flat_layout(shape, drafted, dtype, config.num_hidden_layers)
        write_tensors(directory / WEIGHTS, tensors, {"format": "pt"})
        write_json(directory / "config.json", layout)
        check_written(tensors, read_tensors(directory / WEIGHTS)[0], directory)
        if read_block_shape(directory) != (shape, drafted):
            raise PeftlabError(f"{directory}: is read as another network than {self.place}; nothing was left behind")
        return 0.0

    def _refused_heads(self, shape: BlockShape) -> str:
        """Return why the engine would not compute the heads of a DSpark; empty where it does."""
        if shape.type == "dflash" or self.consumer == "speculators":
            return ""
        if not shape.markov_rank:
            return "drafts from the anchor or has a confidence head, but no Markov head, which the engine needs"
        if self.consumer in ("vllm", "llama.cpp") and shape.markov_head != "vanilla":
            return f"has a Markov head of the kind {shape.markov_head}; the engine computes vanilla alone"
        if self.consumer == "sglang" and not shape.from_anchor:
            return "does not draft from its anchor, as SGLang's DSPARK does"
        if self.consumer == "llama.cpp" and shape.confidence and not shape.confidence_sees_token:
            return "has a confidence head that does not read the token before, which llama.cpp's does"
        return ""

    def command(self, target: str, directory: str, gamma: int) -> str:
        """Return the command; a block whose rows see later ones is drafted whole, as it was trained."""
        shape, _ = read_block_shape(self.place)
        count = shape.length if shape.window is None else min(gamma, shape.length)
        if self.consumer == "llama.cpp":
            return llama_command(target, directory, f"draft-{shape.type}", count)
        if self.consumer == "vllm":
            settings = {"method": shape.type, "model": directory, "num_speculative_tokens": count}
            return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(settings))}"
        if self.consumer == "speculators":
            return speculators_command(directory)
        algorithm = shape.type.upper()
        return (
            f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm {algorithm} "
            f"--speculative-draft-model-path {shlex.quote(directory)}"
        )


_GGUF_NAMES = {
    "fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm", "lm_head": "output",
    "embed_tokens": "token_embd",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2", "confidence_head.proj": "conf_proj",
}  # fmt: skip


def _write_gguf(shape: BlockShape, drafted: int, tensors: dict[str, Tensor], target: str, path: Path) -> None:
    """Write a network as llama.cpp reads it, and check the round trip.

    Embeddings, and the LM head of a network that drafts all tokens, are the target's, which the engine shares.

    Args:
        shape: its sizes. drafted: how many tokens it drafts. tensors: of its file, by name.
        target: reference, for the tokenizer. path: the file.

    Raises:
        PeftlabError: it computes what the engine does not, or what was written differs.
    """
    if shape.rope is not None:
        raise PeftlabError(f"--for llama.cpp: rope_type {shape.rope['rope_type']}; such drafts are not written")
    sizes: dict[str, object] = {
        "context_length": shape.limit, "embedding_length": shape.hidden_size, "block_count": shape.layers,
        "feed_forward_length": shape.intermediate_size, "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads, "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim, "attention.layer_norm_rms_epsilon": shape.eps,
        "rope.dimension_count": shape.head_dim, "rope.freq_base": shape.theta, "vocab_size": shape.vocab_size,
        "target_layers": list(shape.features), "block_size": shape.block_size, "sample_from_anchor": shape.from_anchor,
        "attention.causal": shape.window is not None,
    }  # fmt: skip
    if shape.type == "dspark":
        sizes |= {"has_confidence_head": shape.confidence}
    if shape.window is not None:
        sizes |= {"attention.sliding_window": shape.window}
        sizes |= {"attention.sliding_window_pattern": [True] * shape.layers}
    fields: dict[str, object] = {"general.type": "model", "general.name": path.stem}
    fields |= {f"dflash.{key}": value for key, value in sizes.items()}
    with tempfile.TemporaryDirectory() as directory:
        load_tokenizer(target).save_pretrained(directory)
        load_config(target).save_pretrained(directory)
        fields |= tokenizer_fields(Path(directory), shape.vocab_size).fields
    fields["tokenizer.ggml.mask_token_id"] = shape.mask_token
    tensors = dict(tensors)
    tokens = drafted_tokens(tensors, drafted, shape.vocab_size, path)
    stored = {}
    for name, value in tensors.items():
        part, _, kind = name.rpartition(".")
        block = ""
        if part.startswith("layers."):
            _, layer, part = part.split(".", 2)
            block = f"blk.{layer}."
        # What the engine multiplies rows by is in fp32.
        stored[f"{block}{_GGUF_NAMES[part]}.{kind}"] = value.float() if value.dim() == 1 else value
    if tokens is not None:
        stored["d2t"] = tokens.long()  # the target's ids, not differences
    write_gguf(path, "dflash", fields, stored)
    found = read_gguf(path)
    if different := [name for name, value in stored.items() if not torch.equal(found[name], value)]:
        raise PeftlabError(f"{path}: {', '.join(different)} differ from the draft's")
