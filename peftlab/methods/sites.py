"""Where a transformer layer's sub-layers end: the leaves whose output the residual connection adds."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from peftlab.errors import PeftlabError
from peftlab.methods.targets import model_type


@dataclass(frozen=True)
class Sites:
    """The ends of a layer's sub-layers in one family of architectures, as patterns of module names.

    A pattern is the tail of a name, with ``*`` for a number; its first number is that of the layer. The
    dropout that ends a sub-layer is named where it is a module of its own, called once a layer; else the
    output projection (or, in a mixture of experts, the experts) before it.

    Attributes:
        attention: where self- and cross-attention end.
        ffn: where the feed-forward sub-layer ends.
        ffn_input: the leaf that sees the input of the feed-forward sub-layer first.
    """

    attention: tuple[str, ...]
    ffn: tuple[str, ...]
    ffn_input: tuple[str, ...]


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


def sites_of(model: nn.Module) -> Sites:
    """Return the sub-layer ends of a model: the table's row, else the first row that fits.

    A row fits where every layer that has an attention end has one feed-forward input and one feed-forward
    end, and the other way round. Experts must be in the table: others may lie beside them.

    Raises:
        PeftlabError: no row fits.
    """
    names = [name for name, _ in model.named_modules()]
    kind = model_type(model)
    rows = [SITES[kind]] if kind in SITES else []
    rows += [sites for sites in SITES.values() if sites is not _EXPERTS]
    for sites in dict.fromkeys(rows):
        ends, starts = find(names, sites.ffn), find(names, sites.ffn_input)
        layers = set(find(names, sites.attention).values())
        if layers and layers == set(ends.values()) == set(starts.values()) and len(ends) == len(layers) == len(starts):
            return sites
    raise PeftlabError(
        f"method houlsby does not know where the sub-layers of {kind} ({type(model).__name__}) end, and no "
        "known architecture is built like it; method lora adapts any linear map, or add a row to "
        "peftlab.methods.sites.SITES"
    )


def find(names: Iterable[str], patterns: Iterable[str]) -> dict[str, str]:
    """Return those of ``names`` that end as one of ``patterns`` does, each with the name of its layer."""
    expression = "|".join(_expression(pattern) for pattern in patterns)
    found = {}
    for name in names:
        match = re.fullmatch(rf"(?:.*\.)?(?:{expression})", name)
        if match and match.lastindex:
            found[name] = name[: match.end(match.lastindex)]
    return found


def _expression(pattern: str) -> str:
    layer, _, tail = re.escape(pattern).partition(r"\*")
    return rf"{layer}(\d+){tail}".replace(r"\*", r"\d+")
