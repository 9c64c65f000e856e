"""What peftlab knows of models by their architecture: sub-layers, projections, embeddings, task heads.

A new architecture that is built like a known one needs no row: methods fall back on the rows there are. Otherwise add
its sub-layers to ``SITES``, its query and value projections to ``QUERY_VALUE`` and fused projections to ``FUSED``, by
transformers' ``model_type``, and the names of query projections to ``QUERIES``, which all architectures share.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from peftlab.models.plain import PlainModel
from peftlab.untyped import Function

if TYPE_CHECKING:
    from transformers import BloomConfig, GPTNeoXConfig, Phi3Config, PreTrainedModel


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


# model_type -> the modules that LoRA adapts by default: the attention's query and value projections (the paper's
# choice), or the projection that fuses them with the key's, which is then adapted as a whole.
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
            "bart", "blenderbot", "clip", "cohere", "cohere2", "deit", "gemma", "gemma2", "gemma3", "gemma3_text",
            "glm", "gpt_neo", "gptj", "granite", "gpt_oss", "llama", "m2m_100", "marian", "mbart", "mistral", "mixtral",
            "olmo", "olmo2", "olmoe", "opt", "pegasus", "phi", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "siglip",
            "smollm3", "stablelm", "starcoder2", "vit",
            "whisper",
        ),
        ("q_proj", "v_proj"),
    ),
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
    # An adapted leaf (``methods.leaf``) names what it has beside its base class.
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
