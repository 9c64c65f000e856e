"""Models and LoRA adapters as GGUF files, which llama.cpp loads.

A GGUF file is a header, fields (what a configuration and a tokenizer say elsewhere), the names, shapes and types of
its tensors, and their data. ``ARCHITECTURES`` says by class of transformers what llama.cpp calls the model and how it
wants its weights; ``GgufModel`` makes the fields of a model's configuration, ``gguf_tokenizer`` those of its tokenizer;
``GgufFile`` takes the tensors of a merge in any order, as ``OutputFile`` does, and stores each in its type by the
quantisers of the ``gguf`` package. Formulas and names are llama.cpp's; a test runs each row of the table in the engine.
"""

from __future__ import annotations

import math
import os
import struct
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peftlab.checkpoints.gguf_tokenizer import Fields, tokenizer_fields
from peftlab.checkpoints.tensors import DTYPES, NAMES, Copy, Entry, Job, OutputFile, Shard, open_binary
from peftlab.errors import PeftlabError, did_you_mean, reason

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
KEEP = "keep"
_PLAIN = {"F32": "F32", "F16": "F16", "BF16": "BF16"}  # types of the format that are dtypes of torch
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "BF16": 32}
_ALIGNMENT = 32  # of each tensor's data; the format's default
_STEP = 1 << 18  # weights quantised at a time
_BYTES_OF_BASE = "U8"  # the dtype of a tensor that is copied from a GGUF base, whatever its type


def gguf_type(name: str) -> str:
    """Return ``name`` if it is a type that a GGUF file's tensors can be asked to have.

    Raises:
        PeftlabError: it is none; the nearest is in the message.
    """
    known = (*TYPES, KEEP)
    if name not in known:
        long = {"fp32": "f32", "fp16": "f16"}
        hint = f"; write {long[name]}" if name in long else did_you_mean(name, known)
        raise PeftlabError(f"dtype {name} of a GGUF file: one of {', '.join(known)}{hint}")
    return name


def package() -> ModuleType:
    """Return the ``gguf`` package.

    Raises:
        PeftlabError: it is not installed.
    """
    if find_spec("gguf") is None:
        raise PeftlabError("GGUF files are written by the gguf package: pip install 'peftlab[gguf]'")
    import gguf

    return gguf


# What llama.cpp calls a model, and what it computes otherwise than transformers unless it is told.


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp calls and stores the models of a class.

    Attributes:
        name: the name that the ``gguf`` package gives it.
        permuted: rows of the query and key projections are stored as (heads, head_dim / 2, 2) and not as (heads, 2,
            head_dim / 2): rotary positions turn neighbours there, halves in transformers.
        offset_norms: norms are stored with the 1 that transformers adds to them.
        transposed: linear maps are stored transposed (GPT-2's ``Conv1D``).
        composite: the class contains a text model, which is what the file has, and others beside it.
        activations: what the engine computes, by transformers' names.
        extra: the fields beside those of every decoder, from the configuration.
    """

    name: str
    permuted: bool = False
    offset_norms: bool = False
    transposed: bool = False
    composite: bool = False
    activations: tuple[str, ...] = ("silu", "swish")
    extra: Callable[[PretrainedConfig], Fields] = field(default=lambda config: {})


def _gemma2(config: PretrainedConfig) -> Fields:
    _require_scale(config, 46)
    _require_windows(config, 2)
    return {
        "attention.sliding_window": config.sliding_window,
        "attn_logit_softcapping": _needed(config, "attn_logit_softcapping"),
        "final_logit_softcapping": _needed(config, "final_logit_softcapping"),
    }


def _gemma3(config: PretrainedConfig) -> Fields:
    _require_scale(config, 62)
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        _require(config, name, (None, False))
    _require_windows(config, 6)
    local = config.rope_parameters.get("sliding_attention") or {}
    if local.get("rope_type", "default") != "default" or local.get("rope_theta", 10_000.0) != 10_000.0:
        raise PeftlabError(f"llama.cpp has no field for the rotary positions {local} of Gemma 3's local layers")
    return {"attention.sliding_window": config.sliding_window}


def _phi3(config: PretrainedConfig) -> Fields:
    if _head_dim(config) * config.num_attention_heads != config.hidden_size:
        raise PeftlabError("llama.cpp's phi3 needs heads whose widths add up to hidden_size")
    original = config.rope_parameters.get("original_max_position_embeddings") or config.max_position_embeddings
    return {"rope.scaling.original_context_length": original, "attention.sliding_window": 0}


def _gpt2(config: PretrainedConfig) -> Fields:
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        _require(config, name, (None, False))
    _require(config, "scale_attn_weights", (None, True))
    return {
        "feed_forward_length": config.n_inner or 4 * config.n_embd,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
    }


def _granite(config: PretrainedConfig) -> Fields:
    return {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


def _smollm3(config: PretrainedConfig) -> Fields:
    if list(config.no_rope_layers) != [int((layer + 1) % 4 != 0) for layer in range(config.num_hidden_layers)]:
        raise PeftlabError(
            "llama.cpp's smollm3 leaves rotary positions out in every fourth layer, this model in others"
        )
    return {}


def _starcoder2(config: PretrainedConfig) -> Fields:
    return {"attention.layer_norm_epsilon": config.norm_epsilon}


_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture("LLAMA", permuted=True),
    "MistralForCausalLM": Architecture("LLAMA", permuted=True),
    "Qwen2ForCausalLM": Architecture("QWEN2"),
    "Qwen3ForCausalLM": Architecture("QWEN3"),
    "GemmaForCausalLM": Architecture("GEMMA", offset_norms=True, activations=_GELU),
    "Gemma2ForCausalLM": Architecture("GEMMA2", offset_norms=True, activations=_GELU, extra=_gemma2),
    "Gemma3ForCausalLM": Architecture("GEMMA3", offset_norms=True, activations=_GELU, extra=_gemma3),
    "Gemma3ForConditionalGeneration": Architecture(
        "GEMMA3", offset_norms=True, composite=True, activations=_GELU, extra=_gemma3
    ),
    "Phi3ForCausalLM": Architecture("PHI3", extra=_phi3),
    "GPT2LMHeadModel": Architecture("GPT2", transposed=True, activations=_GELU, extra=_gpt2),
    "Olmo2ForCausalLM": Architecture("OLMO2"),
    "GraniteForCausalLM": Architecture("GRANITE", permuted=True, extra=_granite),
    "SmolLM3ForCausalLM": Architecture("SMOLLM3", permuted=True, extra=_smollm3),
    "Starcoder2ForCausalLM": Architecture("STARCODER2", activations=_GELU, extra=_starcoder2),
}


def architecture_of(class_name: str) -> Architecture:
    """Return the row of a class of transformers.

    Raises:
        PeftlabError: it has none.
    """
    if class_name not in ARCHITECTURES:
        raise PeftlabError(
            f"{class_name} cannot be written as a GGUF file: known are {', '.join(ARCHITECTURES)}; write a directory "
            "(-o DIR) and use llama.cpp's own converter"
        )
    return ARCHITECTURES[class_name]


def _head_dim(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _needed(config: PretrainedConfig, name: str) -> float:
    value = getattr(config, name, None)
    if value is None:
        raise PeftlabError(f"{name}: llama.cpp needs a number for this architecture, the configuration has none")
    return float(value)


def _require(config: PretrainedConfig, name: str, values: tuple[object, ...]) -> None:
    value = getattr(config, name, None)
    if value not in values:
        raise PeftlabError(f"{name}={value!r} of {type(config).__name__} cannot be expressed in a GGUF file")


def _require_scale(config: PretrainedConfig, largest: int) -> None:
    """Refuse another scale of attention than the engine's: by the width of a head; in the largest model, with
    ``largest`` layers, by the model's width over the number of heads."""
    by_width = config.num_hidden_layers == largest
    wanted = config.hidden_size // config.num_attention_heads if by_width else _head_dim(config)
    if config.query_pre_attn_scalar != wanted:
        raise PeftlabError(
            f"query_pre_attn_scalar={config.query_pre_attn_scalar}: llama.cpp scales attention by {wanted} here"
        )


def _require_windows(config: PretrainedConfig, period: int) -> None:
    """Refuse other layers with full attention than every ``period``-th."""
    full = ["full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(config.num_hidden_layers)]
    if config.layer_types and list(config.layer_types) != full:
        raise PeftlabError(f"llama.cpp attends to all positions in every {period}. layer, this model in others")


def _decoder_fields(config: PretrainedConfig) -> Fields:
    """Return the fields that every decoder has."""
    heads, head_dim = config.num_attention_heads, _head_dim(config)
    fields: Fields = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None) or heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
    }
    if (width := getattr(config, "intermediate_size", None)) is not None:
        fields["feed_forward_length"] = width
    if (eps := getattr(config, "rms_norm_eps", None)) is not None:
        fields["attention.layer_norm_rms_epsilon"] = eps
    return fields


def _rope(config: PretrainedConfig) -> tuple[Fields, dict[str, Tensor]]:
    """Return the fields of rotary positions, and the tensors of frequencies that no field can express."""
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        return {}, {}
    rope = rope.get("full_attention", rope)  # Gemma 3 has others in its local layers
    dim = int(_head_dim(config) * (rope.get("partial_rotary_factor") or 1.0))
    fields: Fields = {"rope.dimension_count": dim, "rope.freq_base": float(rope["rope_theta"])}
    kind, factor = rope.get("rope_type", "default"), rope.get("factor")
    if kind == "default":
        return fields, {}
    if kind == "linear":
        return fields | {"rope.scaling.type": "linear", "rope.scaling.factor": float(factor)}, {}
    if kind == "yarn":
        return fields | _yarn(rope, config.max_position_embeddings), {}
    plain = 1.0 / float(rope["rope_theta"]) ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if kind == "llama3":
        return fields, {"rope_freqs.weight": plain / _llama3(plain, rope)}
    if kind == "longrope" and type(config).__name__ == "Phi3Config":
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        scale = config.max_position_embeddings / original
        default = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        fields["rope.scaling.attn_factor"] = float(rope.get("attention_factor") or default)
        factors = {name: torch.tensor(rope[f"{name}_factor"], dtype=torch.float32) for name in ("long", "short")}
        if any(len(values) != dim // 2 for values in factors.values()):
            raise PeftlabError(f"rope_parameters: long_factor and short_factor must have {dim // 2} values each")
        return fields, {f"rope_factors_{name}.weight": values for name, values in factors.items()}
    raise PeftlabError(
        f"rotary positions of type {kind!r} cannot be expressed in a GGUF file of {type(config).__name__}"
    )


def _llama3(plain: Tensor, rope: Mapping[str, float]) -> Tensor:
    """Return the frequencies of rotary positions as Llama 3.1 scales them: low ones by ``factor``, high ones not, those
    between by something between; by the operations of transformers in their order.

    Args:
        plain: the frequencies before. rope: the settings.
    """
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    context = rope["original_max_position_embeddings"]
    length = 2 * math.pi / plain
    scaled = torch.where(length > context / low, plain / factor, plain)
    smooth = (context / length - low) / (high - low)
    between = ~(length < context / high) * ~(length > context / low)
    return torch.where(between, (1 - smooth) * scaled / factor + smooth * scaled, scaled)


def _yarn(rope: Mapping[str, float], context: int) -> Fields:
    known = {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow"}
    known |= {"partial_rotary_factor", "truncate"}
    factor = float(rope["factor"])
    if unknown := sorted(key for key in rope.keys() - known if rope[key] is not None):
        default = 0.1 * math.log(factor) + 1.0
        if unknown != ["attention_factor"] or not math.isclose(rope["attention_factor"], default, rel_tol=1e-6):
            raise PeftlabError(f"rope_parameters: {', '.join(unknown)} of yarn cannot be expressed in a GGUF file")
    if rope.get("truncate") is False:
        raise PeftlabError("rope_parameters: truncate: false of yarn cannot be expressed in a GGUF file")
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": int(rope.get("original_max_position_embeddings") or context),
        "rope.scaling.yarn_beta_fast": float(rope.get("beta_fast") or 32.0),
        "rope.scaling.yarn_beta_slow": float(rope.get("beta_slow") or 1.0),
    }


# The file.


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a GGUF file.

    Attributes:
        name: its name there. type: the format's name of its type. shape: rows first, as torch has it.
        offset: of its first byte in the file. nbytes: its size.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    offset: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class Incoming:
    """One tensor to be written.

    Attributes:
        key: its key in the merge. name: the parameter's name in the model. dtype, shape: as the base or the adapter
            stores it.
    """

    key: str
    name: str
    dtype: str
    shape: tuple[int, ...]


class GgufModel:
    """What a model's configuration becomes in a GGUF file.

    Args:
        config: of the model, or of a larger one that it is the text model of. class_name: the model's class.

    Raises:
        PeftlabError: the class, or something that the configuration says, has no counterpart in llama.cpp.
    """

    def __init__(self, config: PretrainedConfig, class_name: str) -> None:
        self.row = architecture_of(class_name)
        gguf = package()
        self.config = config.get_text_config()
        activation = getattr(self.config, "hidden_activation", None) or getattr(self.config, "hidden_act", None)
        activation = activation or getattr(self.config, "activation_function", None)
        if activation not in self.row.activations:
            raise PeftlabError(f"{class_name} with the activation {activation!r} cannot be written as a GGUF file")
        arch = gguf.MODEL_ARCH[self.row.name]
        self.name = gguf.MODEL_ARCH_NAMES[arch]
        self._names = gguf.get_tensor_name_map(arch, self.config.num_hidden_layers)
        rope, self.extra = _rope(self.config)
        self.fields = _decoder_fields(self.config) | rope | self.row.extra(self.config)
        self.notes: list[str] = []
        window = getattr(self.config, "sliding_window", None)
        unread = getattr(self.config, "use_sliding_window", True) and not self.fields.get("attention.sliding_window")
        if unread and window is not None and window < self.config.max_position_embeddings:
            self.notes.append(
                f"llama.cpp's {self.name} attends to all positions, this model to the last {window}: they agree on "
                "texts of up to that many tokens"
            )

    def tensor_name(self, parameter: str) -> str | None:
        """Return a parameter's name in the file; None where there is none."""
        if not parameter.endswith((".weight", ".bias")):
            return None
        plain = parameter.replace("language_model.", "")  # the text model in one of images and text
        found: str | None = self._names.get_name(plain, try_suffixes=(".weight", ".bias"))
        return found

    def beside_text(self, parameter: str) -> bool:
        """Whether a parameter belongs to what is beside the text model of a larger one, as a vision tower."""
        return self.row.composite and "language_model." not in parameter and not parameter.startswith("lm_head.")

    def order(self, name: str, rows: int) -> Tensor | None:
        """Return which row of a weight (out, in) or a bias (out) is stored at each place; None where none is moved."""
        matrix = name.rpartition(".")[0].rpartition(".")[2]
        if not self.row.permuted or matrix not in ("attn_q", "attn_k"):
            return None
        key = "attention.head_count" if matrix == "attn_q" else "attention.head_count_kv"
        heads = self.fields[key]
        assert isinstance(heads, int)
        return rotary_order(heads, rows)

    def transposed(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor is stored transposed."""
        return self.row.transposed and len(shape) == 2 and name.startswith("blk.")

    def offset(self, name: str) -> float:
        """Return what is added to a tensor's values."""
        return 1.0 if self.row.offset_norms and name.endswith("norm.weight") else 0.0

    def type(self, name: str, shape: tuple[int, ...], wanted: str | None, dtype: str) -> str:
        """Return the type that a tensor is stored in.

        Args:
            shape: as it is stored. wanted: of matrices; None: as the base stores it, which is ``dtype``.

        Raises:
            PeftlabError: rows are no whole number of the type's blocks.
        """
        if len(shape) < 2 or name.startswith(("position_embd.", "rope_f")):
            return "F32"  # what llama.cpp adds, or multiplies rows by
        if wanted is None:
            return _PLAIN.get(dtype, "F32")
        return _checked(name, shape, wanted.upper())

    def head(self, directory: Path, rows: int, main: str, metadata: Mapping[str, str]) -> tuple[bytes, int]:
        """Return the bytes of all fields, and how many there are.

        Args:
            directory: with the tokenizer. rows: of the embedding. main: the type of most weights.
            metadata: texts by field.
        """
        tokens = tokenizer_fields(directory, rows)
        self.notes += tokens.notes
        general: Fields = {"general.type": "model", **metadata, "general.file_type": _FILE_TYPES[main]}
        general["general.quantization_version"] = 2
        fields = {f"{self.name}.{key}": value for key, value in {**self.fields, "vocab_size": rows}.items()}
        return packed_fields(self.name, general | fields | tokens.fields)


def rotary_order(heads: int, rows: int) -> Tensor:
    """Return which row of a query or key projection llama.cpp stores at each place, where it turns neighbours.

    Args:
        heads: of the projection. rows: of its matrix.
    """
    return torch.arange(rows).view(heads, 2, rows // heads // 2).transpose(1, 2).reshape(-1)


def _checked(name: str, shape: tuple[int, ...], kind: str) -> str:
    """Return a type; refuse it where rows are no whole number of its blocks, or nothing here quantises to it."""
    gguf = package()
    if kind in _PLAIN:
        return kind
    if kind.lower() not in TYPES:
        raise PeftlabError(
            f"{name} is stored as {kind}, to which the gguf package does not quantise; choose --dtype q8_0 (or f16), "
            "and quantise that file by llama.cpp's llama-quantize"
        )
    block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    if shape[-1] % block:
        raise PeftlabError(
            f"{name}: rows of {shape[-1]} weights are no whole number of {kind.lower()}'s blocks of {block}; choose "
            "--dtype f16 or bf16"
        )
    return kind


def packed_fields(architecture: str, fields: Mapping[str, object]) -> tuple[bytes, int]:
    """Return fields as the format has them, and how many there are, the architecture's name included."""
    import io

    gguf = package()
    kinds = gguf.GGUFValueType
    writer = gguf.GGUFWriter(None, architecture)
    empty: list[bytes] = []
    for key, value in fields.items():
        if value == []:  # which the writer leaves out, and llama.cpp wants of merges
            text = key.encode()
            empty.append(struct.pack(f"<Q{len(text)}sIIQ", len(text), text, int(kinds.ARRAY), int(kinds.STRING), 0))
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool | str | float):
            kind = kinds.BOOL if isinstance(value, bool) else kinds.STRING if isinstance(value, str) else kinds.FLOAT32
            writer.add_key_value(key, value, kind)
        else:
            writer.add_key_value(key, value, kinds.UINT32)
    out = io.BytesIO()
    writer.fout, writer.state = [out], gguf.gguf_writer.WriterState.HEADER
    writer.write_kv_data_to_file()
    return out.getvalue() + b"".join(empty), len(writer.kv_data[0]) + len(empty)


def layout(
    fields: bytes, count: int, tensors: Sequence[GgufTensor], alignment: int = _ALIGNMENT
) -> tuple[bytes, list[GgufTensor]]:
    """Return a file's head, up to the first tensor's data, and its tensors with their places.

    Args:
        fields: as ``packed_fields`` returns them. count: how many they are.
        tensors: in the order of the file. alignment: of their data, in bytes.
    """
    gguf = package()
    infos, placed, position = b"", [], 0
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[tensor.type]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        nbytes = math.prod(tensor.shape) // block * size
        name = tensor.name.encode()
        dims = tuple(reversed(tensor.shape))
        infos += struct.pack(f"<Q{len(name)}sI{len(dims)}QIQ", len(name), name, len(dims), *dims, int(kind), position)
        placed.append(GgufTensor(tensor.name, tensor.type, tensor.shape, position, nbytes))
        position += -(-nbytes // alignment) * alignment
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), count) + fields + infos
    head += b"\0" * (-len(head) % alignment)
    return head, [
        GgufTensor(tensor.name, tensor.type, tensor.shape, len(head) + tensor.offset, tensor.nbytes)
        for tensor in placed
    ]


class GgufFile(OutputFile):
    """One GGUF file being written: its head first, then each tensor at its place, in any order.

    Args:
        path: the file. head: its bytes up to the first tensor's data.
        stored: each tensor's place, by its key in the merge. incoming: dtype and shape of what is written to it.
        model: says how values are stored; None where all are stored as they come.
    """

    def __init__(
        self,
        path: Path,
        head: bytes,
        stored: Mapping[str, GgufTensor],
        incoming: Mapping[str, tuple[str, tuple[int, ...]]],
        model: GgufModel | None,
    ) -> None:
        self.path, self.stored, self.model = path, stored, model
        self.entries = {key: Entry(*incoming[key], tensor.offset) for key, tensor in stored.items()}
        self.size = len(head) + sum(tensor.nbytes for tensor in stored.values())
        self._descriptor = open_binary(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self._flush, self._written, self._unflushed, self._lock = None, 0, 0, threading.Lock()
        self._write(memoryview(head), 0)
        end = max(tensor.offset + tensor.nbytes for tensor in stored.values())
        os.ftruncate(self._descriptor, -(-end // _ALIGNMENT) * _ALIGNMENT)  # what follows the last tensor is zeros

    def as_it_is(self, key: str) -> bool:
        """Whether a tensor's bytes are stored as they come."""
        tensor, entry = self.stored[key], self.entries[key]
        if self.model is None or entry.dtype == _BYTES_OF_BASE:
            return True
        moved = self.model.order(tensor.name, entry.shape[0]) is not None or tensor.shape != entry.shape
        changed = self.model.transposed(tensor.name, entry.shape) or self.model.offset(tensor.name)
        return tensor.type == entry.dtype and not moved and not changed

    def write(self, key: str, tensor: Tensor) -> None:
        """Store one tensor's values, some rows at a time, so that no second copy of them is in memory."""
        stored = self.stored[key]
        if self.as_it_is(key):
            super().write(key, tensor)
            return
        assert self.model is not None
        order = self.model.order(stored.name, tensor.shape[0])
        if self.model.transposed(stored.name, tuple(tensor.shape)):
            tensor = tensor.t()
        count = _rows_at_a_time(stored)
        starts = range(0, stored.shape[0], count)
        self._write_rows(
            stored, (tensor[n : n + count] if order is None else tensor[order[n : n + count]] for n in starts)
        )

    def convert(self, key: str, shard: Shard, source: str) -> None:
        """Store the values of a tensor of another file, whose rows stay in their order, without reading it whole.

        Args:
            key: of the tensor. shard: the file to read. source: its key there.
        """
        stored = self.stored[key]
        self._write_rows(stored, shard.read_rows(source, _rows_at_a_time(stored)))

    def _write_rows(self, stored: GgufTensor, parts: Iterable[Tensor]) -> None:
        assert self.model is not None
        added, offset = self.model.offset(stored.name), stored.offset
        for part in parts:
            data = _stored(part.float() + added if added else part, stored.type)
            self._write(data, offset)
            offset += len(data)

    def steps(self, steps: Iterable[Job | Copy]) -> Iterator[Job | Copy]:
        """Yield the steps of a merge; a tensor that is not stored as it comes is read instead of copied."""
        for step in steps:
            if not isinstance(step, Copy) or self.as_it_is(step.key):
                yield step
                continue
            stored, entry = self.stored[step.key], self.entries[step.key]
            assert self.model is not None
            if self.model.order(stored.name, entry.shape[0]) is None and stored.shape == entry.shape:
                yield Job([], self._converted(step), {}, 0)
            else:
                yield Job([(step.shard, step.source)], _named(step.key), {step.key: self}, entry.nbytes)

    def _converted(self, step: Copy) -> Callable[[list[Tensor]], dict[str, Tensor]]:
        def convert(_: list[Tensor]) -> dict[str, Tensor]:
            self.convert(step.key, step.shard, step.source)
            return {}

        return convert


def _rows_at_a_time(stored: GgufTensor) -> int:
    return max(1, _STEP // max(1, math.prod(stored.shape[1:])))


def _named(key: str) -> Callable[[list[Tensor]], dict[str, Tensor]]:
    return lambda tensors: {key: tensors[0]}


def _stored(values: Tensor, kind: str) -> memoryview:
    """Return the bytes of some rows in a type of the format."""
    if kind in _PLAIN:
        return values.to(DTYPES[kind]).contiguous().reshape(-1).view(torch.uint8).numpy().data
    gguf = package()
    codes = gguf.quantize(values.float().contiguous().numpy(), gguf.GGMLQuantizationType[kind])
    return memoryview(codes.reshape(-1))


class GgufBase:
    """A GGUF file that another is made of: its fields, and its tensors byte for byte.

    Args:
        path: the file.

    Raises:
        PeftlabError: it is none, or its bytes are in another order.
    """

    def __init__(self, path: Path) -> None:
        gguf = package()
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, KeyError, OSError, IndexError) as error:
            raise PeftlabError(f"{path}: {reason(error)}") from None
        if reader.byte_order != "I" or not reader.tensors:
            raise PeftlabError(f"{path}: has no tensors, or its numbers in another byte order than this machine's")
        self.path, self.alignment = path, int(reader.alignment)
        if "general.architecture" not in reader.fields:
            raise PeftlabError(f"{path}: has no field general.architecture")
        self.architecture = str(reader.fields["general.architecture"].contents())
        self.count = int(reader.fields["GGUF.kv_count"].parts[0][0])
        end = min(tensor.field.offset for tensor in reader.tensors)
        self.fields = bytearray(reader.data[24:end].tobytes())
        file_type = reader.fields.get("general.file_type")
        self._file_type = (
            None
            if file_type is None
            else int(file_type.offset) - 24 + sum(int(part.nbytes) for part in file_type.parts[:-1])
        )
        self.tensors = {
            tensor.name: GgufTensor(
                tensor.name,
                tensor.tensor_type.name,
                tuple(int(size) for size in reversed(tensor.shape)),
                int(tensor.data_offset),
                int(tensor.n_bytes),
            )
            for tensor in reader.tensors
        }

    def set_file_type(self, kind: str) -> None:
        """Let the fields say that most weights are of another type."""
        if self._file_type is not None:
            self.fields[self._file_type : self._file_type + 4] = struct.pack("<I", _FILE_TYPES[kind])

    def shard(self) -> Shard:
        """Return the file as one whose tensors' bytes can be copied."""
        return Shard(
            self.path,
            {name: Entry(_BYTES_OF_BASE, (t.nbytes,), t.offset) for name, t in self.tensors.items()},
        )


@dataclass(frozen=True)
class FilePlan:
    """What a GGUF file will contain.

    Attributes:
        head: its bytes up to the first tensor's data. stored: the tensors, by key.
        incoming: dtype and shape of what is written to each.
        copied: names of the tensors whose bytes are the GGUF base's; their keys are their names.
        extra: values of tensors that the merge has none of, by key. type: of most weights.
    """

    head: bytes
    stored: dict[str, GgufTensor]
    incoming: dict[str, tuple[str, tuple[int, ...]]]
    copied: list[str]
    extra: dict[str, Tensor]
    type: str


def plan_file(
    model: GgufModel,
    directory: Path,
    tensors: Sequence[Incoming],
    wanted: str | None,
    metadata: Mapping[str, str],
    base: GgufBase | None = None,
    changed: Iterable[str] = (),
) -> FilePlan:
    """Decide how each tensor is stored, and where.

    Args:
        model: what the fields are made of. directory: with the tokenizer.
        tensors: what is to be written, in this order.
        wanted: the type of matrices, one of ``TYPES``, in 4 or 5 bits but for the head; None: each keeps the type it is
            stored in.
        metadata: texts by field, for a file without a GGUF base.
        base: the GGUF file that the base is, whose fields are kept.
        changed: keys of the tensors that the merge changes.

    Raises:
        PeftlabError: llama.cpp has no tensor for a parameter, or a type cannot be had.
    """
    by_name: dict[str, Incoming] = {}
    changed = set(changed)
    for tensor in tensors:
        name = model.tensor_name(tensor.name)
        if name is None:
            raise PeftlabError(
                f"{tensor.name}: llama.cpp's {model.name} has no tensor for it; write a directory (-o DIR)"
            )
        if name in by_name:
            raise PeftlabError(
                f"{tensor.name} and {by_name[name].name} would both be {name} of llama.cpp's {model.name}"
            )
        by_name[name] = tensor
    kinds: dict[str, str] = {}
    copied: list[str] = []
    extra = {} if base is not None else model.extra
    if base is not None:
        kinds, copied = _kinds_beside(model, by_name, wanted, base, changed)
    shapes = {name: t.shape[::-1] if model.transposed(name, t.shape) else t.shape for name, t in by_name.items()}
    for name, tensor in by_name.items():
        if name not in kinds:
            kinds[name] = model.type(name, shapes[name], _wanted(name, by_name, wanted), tensor.dtype)
    planned = [
        GgufTensor(name, kind, shapes.get(name, base.tensors[name].shape if base else ()))
        for name, kind in kinds.items()
    ]
    planned += [GgufTensor(name, "F32", tuple(values.shape)) for name, values in extra.items()]
    placed = layout(b"", 0, planned)[1]
    sizes = Counter[str]()
    for each in placed:
        sizes[each.type] += each.nbytes
    main = wanted.upper() if wanted else sizes.most_common(1)[0][0]
    if base is None:
        fields, count = model.head(directory, by_name["token_embd.weight"].shape[0], main, metadata)
    else:
        if wanted is not None:
            base.set_file_type(main)
        fields, count = bytes(base.fields), base.count
    head, placed = layout(fields, count, planned, _ALIGNMENT if base is None else base.alignment)
    keys = {name: tensor.key for name, tensor in by_name.items() if name not in copied}
    stored = {keys.get(each.name, each.name): each for each in placed}
    incoming: dict[str, tuple[str, tuple[int, ...]]] = {}
    for key, each in stored.items():
        if each.name in copied:
            incoming[key] = _BYTES_OF_BASE, (each.nbytes,)
        elif each.name in by_name:
            tensor = by_name[each.name]
            wide = each.type not in ("F16", "BF16")  # quantised, or F32: what a sum is stored in
            as_it_is = (
                wide and key not in changed and tensor.dtype in _PLAIN
            )  # then rows are converted as they are written
            incoming[key] = tensor.dtype if as_it_is else "F32" if wide else each.type, tensor.shape
        else:
            incoming[key] = "F32", each.shape
    return FilePlan(head, stored, incoming, copied, extra, main)


def _wanted(name: str, names: Container[str], wanted: str | None) -> str | None:
    """Return the type that a tensor should have: the head at least 8 bits, as llama.cpp's own quantiser has it (Q6_K,
    to which the ``gguf`` package does not quantise, or Q8_0).

    Args:
        name: of the tensor. names: of all, by which the head is known: the embedding, where it has no matrix.
        wanted: of matrices.
    """
    head = "output.weight" if "output.weight" in names else "token_embd.weight"
    return "q8_0" if wanted is not None and wanted.startswith(("q4", "q5")) and name == head else wanted


def _kinds_beside(
    model: GgufModel, tensors: Mapping[str, Incoming], wanted: str | None, base: GgufBase, changed: set[str]
) -> tuple[dict[str, str], list[str]]:
    """Return the type of each tensor of a GGUF base, in its order, and the names of those that are copied."""
    if base.architecture != model.name:
        raise PeftlabError(f"{base.path} is a {base.architecture}, the merged model a {model.name}")
    kinds: dict[str, str] = {}
    copied = []
    for name, stored in base.tensors.items():
        tensor = tensors.get(name)
        if tensor is None and not name.startswith("rope_f"):
            raise PeftlabError(f"{base.path}: {name} is no parameter of the merged model, and would be lost")
        if tensor is not None and math.prod(tensor.shape) != math.prod(stored.shape):
            raise PeftlabError(
                f"{tensor.name} is {tensor.shape} in the merged model and {stored.shape} in {base.path.name}, whose "
                "fields the new file has; write a directory (-o DIR) first, and merge from that"
            )
        if tensor is None or (wanted is None and tensor.key not in changed):
            kinds[name] = stored.type
            copied.append(name)
        elif wanted is None:
            kinds[name] = _checked(name, stored.shape, stored.type)
        else:
            kinds[name] = model.type(name, stored.shape, _wanted(name, tensors, wanted), "F32")
    if wanted is None and "output.weight" in tensors and "output.weight" not in kinds:  # tied before
        kinds["output.weight"] = _checked("output.weight", tensors["output.weight"].shape, kinds["token_embd.weight"])
    return kinds, copied


def load_values(model: PreTrainedModel, path: Path) -> None:
    """Put the values of a GGUF file into a model of the class that it was made of, in place.

    Parameters that the format has no tensor for, as those of a vision tower, stay as they are.

    Raises:
        PeftlabError: the file lacks a tensor, or has one of another shape.
    """
    gguf = package()
    made = GgufModel(model.config, type(model).__name__)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if made.beside_text(name):
                continue
            found = stored.get(made.tensor_name(name) or "")
            if found is None:
                raise PeftlabError(f"{path}: has no tensor for {name}")
            values = torch.from_numpy(gguf.dequantize(found.data, found.tensor_type).copy())
            values = values.view(tuple(int(size) for size in reversed(found.shape)))
            values = values.t() if made.transposed(found.name, tuple(values.shape)) else values
            if values.shape != parameter.shape:
                raise PeftlabError(f"{path}: {found.name} has shape {tuple(values.shape)}, {name} {parameter.shape}")
            order = made.order(found.name, values.shape[0])
            values = values if order is None else values[torch.argsort(order)]
            parameter.copy_(values - made.offset(found.name))


def write_lora(
    path: Path, model: GgufModel, factors: Mapping[str, tuple[Tensor, Tensor]], name: str, base: GgufBase | None = None
) -> int:
    """Write factors as an adapter of llama.cpp's, and return the highest rank.

    The engine adds alpha / rank · B·A with the rank of each pair: alpha is the highest rank, and a B of a lower one is
    multiplied by the difference.

    Args:
        path: the file. model: the base.
        factors: A (r, in) and B (out, r), with the scaling in B, by module; of an embedding, in is the vocabulary.
        name: of the adapter. base: the base's file, whose shapes the factors must have.

    Raises:
        PeftlabError: llama.cpp has no matrix for a module, or the base's matrix is of another shape.
    """
    highest = max(a.shape[0] for a, _ in factors.values())
    values: dict[str, Tensor] = {}
    for module, (a, b) in factors.items():
        matrix = model.tensor_name(f"{module}.weight")
        if matrix is None:
            raise PeftlabError(f"llama.cpp's {model.name} has no matrix for {module}; merge the adapter instead")
        sides = (b.shape[0], a.shape[1])
        sides = sides[::-1] if matrix == "token_embd.weight" else sides
        if base is not None and matrix in base.tensors and base.tensors[matrix].shape != sides:
            raise PeftlabError(
                f"{module}: the factors are for a matrix of {sides[0]} × {sides[1]}; {base.path.name} has "
                f"{' × '.join(map(str, base.tensors[matrix].shape))}"
            )
        if matrix == "token_embd.weight":
            if model.config.tie_word_embeddings:
                raise PeftlabError(
                    f"{module} is the head as well: llama.cpp cannot add to one of the two; merge the adapter instead"
                )
            a = a.t()
        elif matrix == "output.weight" and model.config.tie_word_embeddings:
            raise PeftlabError(f"{module} is tied: llama.cpp has no such matrix of its own; merge the adapter instead")
        order = model.order(matrix, b.shape[0])
        rank = b.shape[1]
        b = (b if order is None else b[order]) * (rank / highest)
        values |= {f"{matrix}.lora_a": a.contiguous(), f"{matrix}.lora_b": b.contiguous()}
    fields: Fields = {"general.type": "adapter", "general.name": name, "general.file_type": _FILE_TYPES["F32"]}
    fields |= {"adapter.type": "lora", "adapter.lora.alpha": float(highest)}
    write_gguf(path, model.name, fields, {key: tensor.float() for key, tensor in values.items()})
    return highest


def write_gguf(path: Path, architecture: str, fields: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
    """Write tensors in their own dtypes.

    Args:
        path: the file. architecture: its name in the format. fields: by full names, the architecture's aside.
        tensors: by their names in the format.
    """
    planned = [GgufTensor(name, NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]
    head, placed = layout(*packed_fields(architecture, fields), planned)
    incoming = {tensor.name: (tensor.type, tensor.shape) for tensor in placed}
    _write_all(GgufFile(path, head, {tensor.name: tensor for tensor in placed}, incoming, None), tensors)


def read_gguf(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file whose types are dtypes of torch, by name."""
    found = {}
    for tensor in package().GGUFReader(path).tensors:
        raw = torch.from_numpy(tensor.data.copy()).contiguous().view(torch.uint8).reshape(-1)
        shape = tuple(int(size) for size in reversed(tensor.shape))
        found[tensor.name] = raw.view(DTYPES[tensor.tensor_type.name]).reshape(shape)
    return found


def write_model(model: PreTrainedModel, directory: Path, path: Path) -> list[str]:
    """Write a model in memory, matrices in its own dtype, and return notes on what llama.cpp computes otherwise.

    Args:
        model: a decoder with its head. directory: with its tokenizer. path: the file.

    Raises:
        PeftlabError: its class, its tokenizer or a parameter has no counterpart in the format.
    """
    made, values = GgufModel(model.config, type(model).__name__), dict(model.named_parameters())
    incoming = [Incoming(name, name, NAMES[value.dtype], tuple(value.shape)) for name, value in values.items()]
    file = plan_file(made, directory, incoming, None, {"general.name": path.stem})
    _write_all(GgufFile(path, file.head, file.stored, file.incoming, made), values | file.extra)
    return made.notes


def _write_all(output: GgufFile, values: Mapping[str, Tensor]) -> None:
    try:
        for key, tensor in values.items():
            output.write(key, tensor.detach().to(DTYPES[output.entries[key].dtype]))
    finally:
        output.close()
