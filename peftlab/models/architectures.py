"""What peftlab knows of models by their architecture: sub-layers, projections, embeddings, task heads, parameters.

A new architecture that is built like a known one needs no row: methods fall back on the rows there are. Otherwise add
its sub-layers to ``SITES``, its query and value projections to ``QUERY_VALUE`` and fused projections to ``FUSED``, by
transformers' ``model_type``, and the names of query projections to ``QUERIES``, which all architectures share.

``DECODERS`` and ``ENCODERS`` list the classes whose empty models are made of their configuration alone, without
transformers' model code: names and shapes. A test compares each row with the class itself. For any other class, and
wherever a setting is not plain, there is no such model, and the caller makes the class's own (``empty_model``).
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType, SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from peftlab.files import Json
from peftlab.untyped import Attributes, Function

if TYPE_CHECKING:
    from transformers import BloomConfig, GPTNeoXConfig, Phi3Config, PretrainedConfig, PreTrainedModel
    from transformers import PreTrainedModel as _Model  # of which this is the part that a plan asks for
else:
    _Model = nn.Module


@dataclass(frozen=True)
class Sites:
    """The ends of a layer's sub-layers in one family of architectures, as patterns of module names.

    A pattern is the end of a name, with ``*`` for a number; its first number is that of the layer. The dropout that
    ends a sub-layer is named where it is a module of its own, called once per layer; else the output projection (or,
    in a mixture of experts, the experts) before it.

    Attributes:
        attention: where self- and cross-attention end.
        ffn: where the feed-forward sub-layer ends.
        ffn_input: the leaf that receives the input of the feed-forward sub-layer.
        listed_only: whether only the architectures of ``SITES`` may use this, not unknown ones whose names fit: an
            unknown mixture of experts may have further experts beside those named.
    """

    attention: tuple[str, ...]
    ffn: tuple[str, ...]
    ffn_input: tuple[str, ...]
    listed_only: bool = False


_BERT = Sites(
    ("layer.*.attention.output.dropout", "layer.*.crossattention.output.dropout"),
    ("layer.*.output.dropout",),
    ("layer.*.intermediate.dense",),
)
_BERT_BARE = Sites(
    ("layer.*.attention.output.dropout", "layer.*.crossattention.output.dropout"),
    ("layer.*.output.dense",),
    ("layer.*.intermediate.dense",),
)
_GPT2 = Sites(("h.*.attn.resid_dropout", "h.*.crossattention.resid_dropout"), ("h.*.mlp.dropout",), ("h.*.mlp.c_fc",))
_LLAMA = Sites(
    ("layers.*.self_attn.o_proj",),
    ("layers.*.mlp.down_proj",),
    ("layers.*.mlp.gate_proj", "layers.*.mlp.gate_up_proj"),
)
_EXPERTS = Sites(
    ("layers.*.self_attn.o_proj",),
    ("layers.*.mlp.experts", "layers.*.mlp.down_proj"),
    ("layers.*.mlp.experts", "layers.*.mlp.gate_proj"),
    listed_only=True,
)
_T5 = Sites(
    ("encoder.block.*.layer.0.dropout", "decoder.block.*.layer.0.dropout", "decoder.block.*.layer.1.dropout"),
    ("encoder.block.*.layer.1.dropout", "decoder.block.*.layer.2.dropout"),
    ("block.*.layer.*.DenseReluDense.wi", "block.*.layer.*.DenseReluDense.wi_0"),
)
_BART = Sites(("layers.*.self_attn.out_proj", "layers.*.encoder_attn.out_proj"), ("layers.*.fc2",), ("layers.*.fc1",))
_BLOOM = Sites(("h.*.self_attention.dense",), ("h.*.mlp.dense_4h_to_h",), ("h.*.mlp.dense_h_to_4h",))
_CLIP = Sites(("layers.*.self_attn.out_proj",), ("layers.*.mlp.fc2",), ("layers.*.mlp.fc1",))
_VIT = Sites(("layers.*.attention.o_proj",), ("layers.*.mlp.fc2",), ("layers.*.mlp.fc1",))

SITES: dict[str, Sites] = {
    **dict.fromkeys(
        (
            "bert", "camembert", "convbert", "deberta", "deberta-v2", "electra", "ernie",
            "layoutlm", "rembert", "roberta", "roberta-prelayernorm", "splinter", "xlm-roberta",
        ),
        _BERT,
    ),
    **dict.fromkeys(("megatron-bert", "xlm-roberta-xl"), _BERT_BARE),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), _GPT2),
    **dict.fromkeys(
        (
            "cohere", "cohere2", "gemma", "gemma2", "gemma3", "gemma3_text", "glm", "granite",
            "llama", "mistral", "olmo", "olmo2", "qwen2", "qwen3", "smollm3", "stablelm",
        ),
        _LLAMA,
    ),
    **dict.fromkeys(("gpt_oss", "mixtral", "olmoe", "qwen3_moe"), _EXPERTS),
    **dict.fromkeys(("longt5", "mt5", "t5", "umt5"), _T5),
    **dict.fromkeys(("bart", "blenderbot", "m2m_100", "marian", "mbart", "opt", "pegasus", "whisper"), _BART),
    **dict.fromkeys(("bloom", "falcon"), _BLOOM),
    **dict.fromkeys(("clip", "siglip"), _CLIP),
    **dict.fromkeys(("deit", "vit"), _VIT),
    "albert": Sites(
        ("albert_layers.*.attention.output_dropout",),
        ("albert_layers.*.ffn_output",),
        ("albert_layers.*.ffn",),
    ),
    "dinov2": Sites(("layer.*.attention.o_proj",), ("layer.*.mlp.fc2",), ("layer.*.mlp.fc1",)),
    "distilbert": Sites(("layer.*.attention.out_lin",), ("layer.*.ffn.dropout",), ("layer.*.ffn.lin1",)),
    "gpt_neo": Sites(("h.*.attn.attention.resid_dropout",), ("h.*.mlp.dropout",), ("h.*.mlp.c_fc",)),
    "gpt_neox": Sites(
        ("layers.*.post_attention_dropout",), ("layers.*.post_mlp_dropout",), ("layers.*.mlp.dense_h_to_4h",)
    ),
    "gptj": Sites(("h.*.attn.resid_dropout",), ("h.*.mlp.dropout",), ("h.*.mlp.fc_in",)),
    "modernbert": Sites(("layers.*.attn.out_drop",), ("layers.*.mlp.Wo",), ("layers.*.mlp.Wi",)),
    "mpnet": Sites(
        ("layer.*.attention.dropout",), ("layer.*.output.dropout",), ("layer.*.intermediate.dense",)
    ),
    "phi": Sites(("layers.*.self_attn.dense",), ("layers.*.mlp.fc2",), ("layers.*.mlp.fc1",)),
    "phi3": Sites(
        ("layers.*.resid_attn_dropout",), ("layers.*.resid_mlp_dropout",), ("layers.*.mlp.gate_up_proj",)
    ),
    "starcoder2": Sites(("layers.*.self_attn.o_proj",), ("layers.*.mlp.c_proj",), ("layers.*.mlp.c_fc",)),
}  # fmt: skip


# model_type -> the attention's query and value projections, which LoRA adapts by default unless the model is a language
# model; or the projection that fuses them with the key's, which is then adapted as a whole.
QUERY_VALUE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "albert", "bert", "camembert", "convbert", "electra", "ernie", "layoutlm", "megatron-bert",
            "rembert", "roberta", "roberta-prelayernorm", "splinter", "xlm-roberta", "xlm-roberta-xl",
        ),
        ("query", "value"),
    ),
    **dict.fromkeys(
        (
            "bart", "blenderbot", "clip", "cohere", "cohere2", "deit", "dinov2", "gemma", "gemma2", "gemma3",
            "gemma3_text",
            "glm", "gpt_neo", "gptj", "granite", "gpt_oss", "llama", "m2m_100", "marian", "mbart", "mistral", "mixtral",
            "olmo", "olmo2", "olmoe", "opt", "pegasus", "phi", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "siglip",
            "smollm3", "stablelm", "starcoder2", "vit",
            "whisper",
        ),
        ("q_proj", "v_proj"),
    ),
    **dict.fromkeys(("convnext", "convnextv2"), ("pwconv1", "pwconv2")),  # no attention: its pointwise linear maps
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5"), ("q", "v")),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("c_attn",)),
    **dict.fromkeys(("gpt_neox", "bloom", "falcon", "chatglm"), ("query_key_value",)),
    **dict.fromkeys(("deberta-v2",), ("query_proj", "value_proj")),
    "deberta": ("in_proj",),
    "distilbert": ("q_lin", "v_lin"),
    "modernbert": ("Wqkv",),
    "mpnet": ("attn.q", "attn.v"),
    "mpt": ("Wqkv",),
    "phi3": ("qkv_proj",),
}  # fmt: skip


# model_type -> modules whose weights the module above them uses without calling them, by name suffix: as an argument of
# a fused kernel, or in a product of its own. A low-rank addition to one would not act.
UNCALLED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba"), ("conv1d", "dt_proj")),
    **dict.fromkeys(("mamba2", "bamba", "zamba2", "granitemoehybrid", "nemotron_h", "falcon_h1"), ("conv1d",)),
    "wavlm": ("q_proj", "k_proj", "v_proj", "out_proj"),
}

# model_type -> modules that are called but in training with mamba_ssm's kernels, which use their weights alone: an
# addition computes, and trains where there are no kernels. They are adapted by name, not by default.
CALLED_WITHOUT_KERNELS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("mamba", "falcon_mamba"), ("x_proj", "out_proj")),
    **dict.fromkeys(("mamba2", "bamba", "zamba2", "granitemoehybrid", "nemotron_h", "falcon_h1"), ("out_proj",)),
}


# Name suffixes of query projections with a bias of their own, for BitFit's sparse variant.
QUERIES = ("query", "q_proj", "q_lin", "query_proj", "attn.q")


def _stacked(**sizes: int) -> dict[str, Tensor]:
    """One part after the other."""
    edges = torch.tensor([0, *sizes.values()]).cumsum(0).tolist()
    return {part: torch.arange(edges[i], edges[i + 1]) for i, part in enumerate(sizes)}


def _thirds(width: int) -> dict[str, Tensor]:
    return _stacked(q=width, k=width, v=width)


def _by_head(config: BloomConfig | GPTNeoXConfig) -> dict[str, Tensor]:
    """Query, key and value of the first head, then of the second, and so on."""
    heads = config.num_attention_heads
    rows = torch.arange(3 * config.hidden_size).view(heads, 3, config.hidden_size // heads)
    return {part: rows[:, i].flatten() for i, part in enumerate("qkv")}


def _phi3(config: Phi3Config) -> dict[str, Tensor]:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert config.num_key_value_heads is not None  # the number of heads, where none was given
    key_value = config.num_key_value_heads * width
    return _stacked(q=config.num_attention_heads * width, k=key_value, v=key_value)


# model_type -> fused projection -> function from the configuration to the output rows of each part.
FUSED: dict[str, dict[str, Function[dict[str, Tensor]]]] = {
    "gpt2": {"attn.c_attn": lambda c: _thirds(c.hidden_size)},
    "gpt_neox": {"query_key_value": _by_head},
    "bloom": {"query_key_value": _by_head},
    "modernbert": {"Wqkv": lambda c: _thirds(c.hidden_size)},
    "phi3": {
        "qkv_proj": _phi3,
        "gate_up_proj": lambda c: _stacked(gate=c.intermediate_size, up=c.intermediate_size),
    },
}


def conv1d() -> tuple[type[nn.Module], ...]:
    """Return transformers' ``Conv1D``, a linear map that stores its weight as (in, out).

    Nothing before the module that defines it is imported: until then no model contains one.
    """
    module = sys.modules.get("transformers.pytorch_utils")
    return () if module is None else (module.Conv1D,)


def model_type(model: nn.Module) -> str:
    """Return the ``model_type`` of a transformers model, or its class name in lower case."""
    return getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__.lower()


def generates_text(model: nn.Module) -> bool:
    """Return whether ``model`` is a language model: it generates text, and has no encoder that reads it."""
    if isinstance(model, PlainModel):
        return type(model).__name__ in DECODERS
    generates = getattr(model, "can_generate", lambda: False)()
    return generates and not getattr(getattr(model, "config", None), "is_encoder_decoder", False)


def embeddings_of(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the modules that the model names as its input and its output embeddings; None where it names none."""
    found: list[nn.Module | None] = []
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        try:
            layer = getattr(model, getter, lambda: None)()
        except NotImplementedError:  # transformers' answer for models without tokens
            layer = None
        found.append(layer if isinstance(layer, nn.Module) else None)
    return found[0], found[1]


def language_part(model: nn.Module) -> str:
    """Return the name of the language model within a model of images and text; "" where a model is no such one."""
    if getattr(getattr(model, "config", None), "vision_config", None) is None:
        return ""
    decoder = getattr(model, "get_decoder", lambda: None)()
    return next((name for name, module in model.named_modules() if module is decoder), "")


def unread_parameters(model: nn.Module) -> set[str]:
    """Return the parameters that no forward pass of the model's task reads, so that they never have a gradient.

    A classifier of images does not read ``mask_token``, which stood for hidden patches in pretraining; LLaVA and its
    like take an image's states from one layer (``vision_feature_layer``) and read no layer, norm or head behind it.
    """
    names = [name for name, _ in model.named_parameters()]
    if type(model).__name__.endswith("ForImageClassification"):
        return {name for name in names if name.rpartition(".")[2] == "mask_token"}
    config = getattr(model, "config", None)
    taken, layers = getattr(config, "vision_feature_layer", None), None
    if isinstance(taken, int):
        layers = getattr(getattr(config, "vision_config", None), "num_hidden_layers", None)
    if not isinstance(taken, int) or not isinstance(layers, int):
        return set()
    read = taken + layers + 1 if taken < 0 else taken  # states 0 are the embeddings', states i those behind i layers
    found = set()
    for name in names:
        layer = re.search(r"(?:^|\.)vision_tower\.(?:.*\.)?layers\.(\d+)\.", name)
        behind = re.search(r"(?:^|\.)vision_tower\.(?:vision_model\.)?(?:post_layernorm|head)\.", name)
        if behind or (layer and int(layer[1]) >= read):
            found.add(name)
    return found


def inside(name: str, modules: Iterable[str]) -> bool:
    """Whether a module or parameter name is one of ``modules`` or is below one of them."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def task_head(model: nn.Module) -> list[str]:
    """Return the task head: the modules, and single parameters, that the task class adds to its base model.

    A parameter counts as added if the base class (``AutoModel``'s for the configuration) does not have it. Where there
    is no base class, or the task class is listed as its own (``ParakeetForCTC``), it is each parameter outside the
    pretrained models within the model: the body, an encoder, a backbone.

    A model with output embeddings (a language model) has no task head: its LM head belongs to the body. Nor has a
    class of transformers that is not called ``<Model>For<Task>``.
    """
    if getattr(model, "get_output_embeddings", lambda: None)() is not None:
        return []
    # An adapted leaf (``methods.base.Adapted``) names what it has beside its base class.
    adapted = {name: leaf for name, leaf in model.named_modules() if hasattr(leaf, "base_class")}
    of_a_method = {f"{name}.{added}" for name, leaf in adapted.items() for added in getattr(leaf, "added", ())}
    names = [name for name, _ in model.named_parameters() if of_a_method.isdisjoint(prefixes(name))]
    body = _pretrained(model, names)
    mixed = {prefix for name in body for prefix in prefixes(name)}
    heads = (next(prefix for prefix in prefixes(name) if prefix not in mixed) for name in names if name not in body)
    return list(dict.fromkeys(heads))


def _pretrained(model: nn.Module, names: list[str]) -> set[str]:
    """Return those of the parameters ``names`` that belong to the pretrained base model."""
    kind, prefix = type(model), getattr(model, "base_model_prefix", "")
    bare = not re.search("For[A-Z]", kind.__name__)
    if issubclass(kind, PlainModel):
        return set(names) if bare else {name for name in names if inside(name, [prefix])}
    from transformers import PreTrainedModel

    base = _base_class(model)
    if bare and (kind is base or kind.__module__.startswith("transformers.")):
        return set(names)
    prefix = prefix if isinstance(model._modules.get(prefix), nn.Module) else ""
    nested = [name for name, module in model.named_modules() if name and isinstance(module, PreTrainedModel)]
    known = _parameters_of(base, model) if base is not None and kind is not base else set()
    if not known:
        bodies = [prefix] if prefix else nested
        return {name for name in names if inside(name, bodies)} if bodies else set(names)
    body = next((name for name, module in model.named_modules() if base and isinstance(module, base)), prefix)
    others = [name for name in nested if not (body and (inside(name, [body]) or inside(body, [name])))]
    start = f"{body}." if body else ""
    return {
        name for name in names if (name.startswith(start) and name.removeprefix(start) in known) or inside(name, others)
    }


def _base_class(model: nn.Module) -> type[PreTrainedModel] | None:
    from transformers import MODEL_MAPPING

    kind: type = type(getattr(model, "config", None))
    found = MODEL_MAPPING.get(kind, None)  # a tuple where a configuration has several
    return found[0] if isinstance(found, tuple) else found


def _parameters_of(base: type[PreTrainedModel], model: nn.Module) -> set[str]:
    """Return the names of all parameters of the model's base class; none where it cannot be made."""
    from transformers.initialization import no_init_weights

    try:
        with torch.device("meta"), no_init_weights():
            plain = base(copy.deepcopy(getattr(model, "config")))  # noqa: B009
    except (AttributeError, ImportError, KeyError, RuntimeError, TypeError, ValueError):
        return set()
    return {name for name, _ in plain.named_parameters(remove_duplicate=False)}


def prefixes(name: str) -> Iterator[str]:
    """Yield ``a``, ``a.b`` and ``a.b.c`` of ``a.b.c``."""
    yield from (name[: dot.start()] for dot in re.finditer(r"\.", name))
    yield name


# Models of plain decoders and encoders on the meta device.

Leaves = Iterator[tuple[str, nn.Module | nn.Parameter]]
"""Modules and lone parameters by name, in the order of the class."""
_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish")  # transformers judges any other
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True)
class _Decoder:
    """How a class differs from the others: they have the modules of a Llama.

    Attributes:
        kind: the ``model_type``.
        biases: of the four projections of attention: their names, or the setting that gives all four a bias.
        mlp_bias: whether the setting of that name is read. head_norms: whether queries and keys are normalised.
        head_dim: whether the configuration must state ``head_dim``; else the width over the heads is its default.
        window: the setting of a sliding window, or the one that turns it on.
    """

    kind: str
    biases: tuple[str, ...] | str = ()
    mlp_bias: bool = False
    head_norms: bool = False
    head_dim: bool = False
    window: str = ""


DECODERS = {
    "LlamaForCausalLM": _Decoder("llama", "attention_bias", mlp_bias=True),
    "MistralForCausalLM": _Decoder("mistral", window="sliding_window"),
    "Qwen2ForCausalLM": _Decoder("qwen2", ("q_proj", "k_proj", "v_proj"), window="use_sliding_window"),
    "Qwen3ForCausalLM": _Decoder(
        "qwen3", "attention_bias", head_norms=True, head_dim=True, window="use_sliding_window"
    ),
}


@dataclass(frozen=True)
class _Encoder:
    """How a class differs from the others: they have the modules of a BERT.

    Attributes:
        kind: the ``model_type``. task: what the class is called for, behind the family's name.
        roberta: whether embeddings and heads are RoBERTa's.
    """

    kind: str
    task: str
    roberta: bool = True


_FAMILIES = {"Bert": "bert", "Roberta": "roberta", "XLMRoberta": "xlm-roberta", "Camembert": "camembert"}
ENCODERS = {
    f"{family}{task}": _Encoder(kind, task, roberta=family != "Bert")
    for family, kind in _FAMILIES.items()
    for task in ("Model", "ForMaskedLM", "ForSequenceClassification")
}


class PlainModel(_Model):
    """A model on the meta device: names, shapes, kinds of modules and ties, no forward.

    Its class is called as transformers' class. ``words`` and ``output`` are the names of its embeddings.
    """

    words: str
    output: str

    def get_input_embeddings(self) -> nn.Module:
        return self.get_submodule(self.words)

    def get_output_embeddings(self) -> nn.Module | None:  # None: a model without them
        return self.get_submodule(self.output) if self.output else None


class _Config(SimpleNamespace):
    """The values of a ``config.json``, which are those of one model of text."""

    def get_text_config(self) -> _Config:
        return self


@dataclass(frozen=True)
class _Parts:
    """What a class of transformers makes of a configuration.

    Attributes:
        prefix: of the body. leaves: what has a name, in the class's order.
        words, output: the embeddings' names. ties: the name of a parameter to that of the one it is.
    """

    prefix: str
    leaves: Leaves
    words: str
    output: str = ""
    ties: dict[str, str] = field(default_factory=dict)


def plain_model(config: Mapping[str, Json]) -> PlainModel | None:
    """Return the model of a ``config.json``; None where configuration and class are not plain.

    It is the class that ``architectures`` names first.
    """
    if name := decoder(config):
        parts = _decoder_parts(config, DECODERS[name])
    elif name := _named(config, ENCODERS):
        parts = _encoder_parts(config, ENCODERS[name])
    else:
        return None
    if parts is None:
        return None
    members = {"__module__": __name__, "base_model_prefix": parts.prefix, "words": parts.words, "output": parts.output}
    model: PlainModel = type(name, (PlainModel,), members)()
    with NoValues():
        for path, leaf in parts.leaves:
            _put(model, path, leaf)
    model.config = _Config(**config)  # type: ignore[assignment]
    model.all_tied_weights_keys = parts.ties
    model._keys_to_ignore_on_save = None
    for name, other in parts.ties.items():
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, model.get_parameter(other))
    return model.eval()


def decoder(config: Mapping[str, Json]) -> str:
    """Return the class in ``DECODERS`` that a ``config.json`` names; "" for another one, for code of its own beside
    it, and for weights that are stored quantised."""
    return _named(config, DECODERS)


# What rotary positions of each type must state.
_ROTARY = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def decoder_config(model: PreTrainedModel) -> PretrainedConfig | None:
    """Return the configuration of a plain decoder as its class of transformers would have it: with the rotary settings
    in one place and the window that is on.

    None for another model, and where a setting is missing, whose default is the class's, or odd.
    """
    if not isinstance(model, PlainModel) or type(model).__name__ not in DECODERS:
        return None
    values, row = vars(model.config), DECODERS[type(model).__name__]
    if type(values.get("max_position_embeddings")) is not int or type(values.get("rms_norm_eps")) is not float:
        return None
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(rope, dict) or {"partial_rotary_factor", "original_max_position_embeddings"} & values.keys():
        return None
    kind = rope.get("rope_type", rope.get("type", "default"))
    rope = {"rope_theta": values.get("rope_theta"), **rope, "rope_type": kind}
    if kind in ("llama3", "yarn"):
        rope = {"original_max_position_embeddings": values["max_position_embeddings"], **rope}
    if kind not in _ROTARY or any(type(rope.get(k)) not in (int, float) for k in ("rope_theta", *_ROTARY[kind])):
        return None
    window = values.get("sliding_window")
    if row.window and (row.window not in values or type(window) not in (int, NoneType)):
        return None
    config = copy.copy(model.config)
    windowed = row.window == "sliding_window" or values.get(row.window)
    vars(config).update(rope_parameters=rope, sliding_window=window if windowed else None)
    return config


def _named(config: Mapping[str, Json], rows: Mapping[str, _Decoder] | Mapping[str, _Encoder]) -> str:
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    row = rows.get(name) if isinstance(name, str) else None
    odd = any(config.get(key) for key in ("auto_map", "quantization_config", "compression_config"))
    odd = odd or config.get("hidden_act") not in _ACTIVATIONS
    return str(name) if row is not None and config.get("model_type") == row.kind and not odd else ""


def _sizes(config: Mapping[str, Json], *keys: str) -> tuple[int, ...]:
    """Return the sizes that a configuration states, those of ``keys`` behind; none if one is missing or not above 0."""
    numbers = [config.get(key) for key in (*_SIZES, *keys)]
    return tuple(int(str(n)) for n in numbers) if all(type(n) is int and n > 0 for n in numbers) else ()


def _decoder_parts(config: Mapping[str, Json], row: _Decoder) -> _Parts | None:
    """Return the modules of a Llama that have parameters; None if a setting is missing or odd."""
    sizes, tied = _sizes(config, "num_key_value_heads"), config.get("tie_word_embeddings")
    settings = [config.get(key, False) for key in ("attention_bias", "mlp_bias")]
    if not sizes or not all(isinstance(setting, bool) for setting in (tied, *settings)):
        return None
    tokens, hidden, inner, layers, heads, groups = sizes
    width = config.get("head_dim")
    if width is None and not row.head_dim and hidden % heads == 0:
        width = hidden // heads
    if type(width) is not int or width <= 0 or heads % groups:
        return None
    head, queries, keys = width, heads * width, groups * width
    every = ("q_proj", "k_proj", "v_proj", "o_proj")
    biased = row.biases if isinstance(row.biases, tuple) else every if settings[0] else ()
    mlp_bias = row.mlp_bias and bool(settings[1])

    def norm(name: str, width: int) -> tuple[str, nn.Module]:
        return name, nn.RMSNorm(width, device="meta")

    def layer_leaves() -> Iterator[tuple[str, nn.Module]]:
        for name, width in {"q_proj": queries, "k_proj": keys, "v_proj": keys}.items():
            yield _linear(f"self_attn.{name}", hidden, width, name in biased)
        yield _linear("self_attn.o_proj", queries, hidden, "o_proj" in biased)
        if row.head_norms:
            yield norm("self_attn.q_norm", head)
            yield norm("self_attn.k_norm", head)
        for name in ("gate_proj", "up_proj"):
            yield _linear(f"mlp.{name}", hidden, inner, mlp_bias)
        yield _linear("mlp.down_proj", inner, hidden, mlp_bias)
        yield norm("input_layernorm", hidden)
        yield norm("post_attention_layernorm", hidden)

    def leaves() -> Leaves:
        yield "model.embed_tokens", nn.Embedding(tokens, hidden, device="meta")
        for number in range(layers):
            for name, leaf in layer_leaves():
                yield f"model.layers.{number}.{name}", leaf
        yield norm("model.norm", hidden)
        yield _linear("lm_head", hidden, tokens, False)

    words = "model.embed_tokens"
    return _Parts("model", leaves(), words, "lm_head", {"lm_head.weight": f"{words}.weight"} if tied else {})


def _encoder_parts(config: Mapping[str, Json], row: _Encoder) -> _Parts | None:
    """Return the modules of a BERT, its dropouts included: bottleneck adapters replace them.

    None where it is a decoder, unties its embeddings, or a size is missing.
    """
    plain = {"is_decoder": False, "add_cross_attention": False, "tie_word_embeddings": True}
    if any(config.get(key, value) is not value for key, value in plain.items()):
        return None
    if config.get("position_embedding_type", "absolute") != "absolute":
        return None
    sizes = _sizes(config, "max_position_embeddings", "type_vocab_size")
    labels = config.get("id2label", {"0": "", "1": ""})
    if not sizes or not isinstance(labels, dict):
        return None
    tokens, hidden, inner, layers, heads, positions, types = sizes
    if hidden % heads:
        return None
    classes = len(labels)
    prefix = "roberta" if row.roberta else "bert"  # of the body, in a class with a head
    body = "" if row.task == "Model" else f"{prefix}."
    predictions = "lm_head" if row.roberta else "cls.predictions"

    def norm(name: str) -> tuple[str, nn.Module]:
        return name, nn.LayerNorm(hidden, device="meta")

    def body_leaves() -> Leaves:
        at = f"{body}embeddings"
        places = (f"{at}.position_embeddings", nn.Embedding(positions, hidden, device="meta"))
        yield f"{at}.word_embeddings", nn.Embedding(tokens, hidden, device="meta")
        if not row.roberta:
            yield places
        yield f"{at}.token_type_embeddings", nn.Embedding(types, hidden, device="meta")
        yield norm(f"{at}.LayerNorm")
        yield f"{at}.dropout", nn.Dropout()
        if row.roberta:
            yield places
        for layer in range(layers):
            at = f"{body}encoder.layer.{layer}"
            for name in ("query", "key", "value"):
                yield _linear(f"{at}.attention.self.{name}", hidden, hidden)
            yield f"{at}.attention.self.dropout", nn.Dropout()
            yield _linear(f"{at}.attention.output.dense", hidden, hidden)
            yield norm(f"{at}.attention.output.LayerNorm")
            yield f"{at}.attention.output.dropout", nn.Dropout()
            yield _linear(f"{at}.intermediate.dense", hidden, inner)
            yield _linear(f"{at}.output.dense", inner, hidden)
            yield norm(f"{at}.output.LayerNorm")
            yield f"{at}.output.dropout", nn.Dropout()
        if row.task == "Model" or (row.task == "ForSequenceClassification" and not row.roberta):
            yield _linear(f"{body}pooler.dense", hidden, hidden)

    def head_leaves() -> Leaves:
        if row.task == "ForSequenceClassification":
            if row.roberta:
                yield _linear("classifier.dense", hidden, hidden)
            yield ("classifier.dropout" if row.roberta else "dropout"), nn.Dropout()
            yield _linear("classifier.out_proj" if row.roberta else "classifier", hidden, classes)
        elif row.task == "ForMaskedLM":
            yield f"{predictions}.bias", nn.Parameter(torch.empty(tokens, device="meta"))
            transform = predictions if row.roberta else f"{predictions}.transform"
            yield _linear(f"{transform}.dense", hidden, hidden)
            yield norm(f"{transform}.{'layer_norm' if row.roberta else 'LayerNorm'}")
            yield _linear(f"{predictions}.decoder", hidden, tokens)

    def leaves() -> Leaves:
        head_first = row.kind not in ("bert", "roberta")  # as the classes do that RoBERTa's was copied to
        for part in (head_leaves, body_leaves) if head_first else (body_leaves, head_leaves):
            yield from part()

    words = f"{body}embeddings.word_embeddings"
    if row.task != "ForMaskedLM":
        return _Parts(prefix, leaves(), words)
    output = f"{predictions}.decoder"
    ties = {f"{output}.weight": f"{words}.weight", f"{output}.bias": f"{predictions}.bias"}
    return _Parts(prefix, leaves(), words, output, ties)


def _linear(name: str, d_in: int, d_out: int, bias: bool = True) -> tuple[str, nn.Module]:
    return name, nn.Linear(d_in, d_out, bias=bias, device="meta")


def _put(model: nn.Module, path: str, leaf: nn.Module | nn.Parameter) -> None:
    """Register a module or a parameter, and the modules above it that are not there yet."""
    *owners, last = path.split(".")
    for name in owners:
        child = model._modules.get(name)
        if child is None:
            child = nn.Module()
            model.add_module(name, child)
        model = child
    if isinstance(leaf, nn.Parameter):
        model.register_parameter(last, leaf)
    else:
        model.add_module(last, leaf)


class NoValues(TorchFunctionMode):
    """A context in which tensors on the meta device, which have no values, are given none at random.

    torch would trace each drawing in Python, for which it imports its compiler.
    """

    def __torch_function__(
        self, func: Function[object], types: object, args: Sequence[object] = (), kwargs: Attributes | None = None
    ) -> object:
        options = kwargs or {}
        tensor = args[0] if args else options.get("tensor")
        draws = func in (Tensor.normal_, Tensor.uniform_) or getattr(func, "__module__", "") == "torch.nn.init"
        if draws and isinstance(tensor, Tensor) and tensor.is_meta:
            return tensor
        return func(*args, **options)
