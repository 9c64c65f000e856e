"""The methods' tables by architecture, by transformers' ``model_type``.

A new architecture that is built like a known one needs no row: methods fall back on the rows there are. Otherwise add
its sub-layers to ``SITES``, its query and value projections to ``QUERY_VALUE``, fused projections to ``FUSED``, and the
names of query projections to ``QUERIES``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peftlab.untyped import Function

if TYPE_CHECKING:
    from transformers import BloomConfig, GPTNeoXConfig, Phi3Config


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
