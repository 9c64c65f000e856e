"""Empty models of plain decoders and encoders, made of their configuration alone, without transformers' model code.

What a class of transformers makes of a configuration is a matter of names and shapes for these; a test compares each
row with the class itself. For any other class, and wherever a setting is not plain, there is no such model, and the
caller makes the class's own (``models.empty.empty_model``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from peftlab.files import Json
from peftlab.untyped import Function

if TYPE_CHECKING:
    from transformers import PreTrainedModel as _Model  # of which this is the part that a plan asks for
else:
    _Model = nn.Module

_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish")  # transformers judges any other
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads",
)  # fmt: skip


def _draws(func: Function[object]) -> bool:
    return func in (Tensor.normal_, Tensor.uniform_) or getattr(func, "__module__", "") == "torch.nn.init"


class NoValues(TorchFunctionMode):
    """A context in which tensors on the meta device, which have no values, are given none at random.

    torch would trace each drawing in Python, for which it imports its compiler.
    """

    def __torch_function__(
        self,
        func: Function[object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        options = kwargs or {}
        tensor = args[0] if args else options.get("tensor")
        if isinstance(tensor, Tensor) and tensor.is_meta and _draws(func):
            return tensor
        return func(*args, **options)


@dataclass(frozen=True)
class _Decoder:
    """How a class differs from the others: they have the modules of a Llama.

    Attributes:
        kind: the ``model_type``.
        biases: of the four projections of attention: their names, or the setting that gives all four a bias.
        mlp_bias: whether the setting of that name is read. head_norms: whether queries and keys are normalised.
        head_dim: whether the configuration must state ``head_dim``; else the width over the heads is its default.
    """

    kind: str
    biases: tuple[str, ...] | str = ()
    mlp_bias: bool = False
    head_norms: bool = False
    head_dim: bool = False


DECODERS = {
    "LlamaForCausalLM": _Decoder("llama", "attention_bias", mlp_bias=True),
    "MistralForCausalLM": _Decoder("mistral"),
    "Qwen2ForCausalLM": _Decoder("qwen2", ("q_proj", "k_proj", "v_proj")),
    "Qwen3ForCausalLM": _Decoder("qwen3", "attention_bias", head_norms=True, head_dim=True),
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

    @property
    def prefix(self) -> str:
        """The name of the body in a class with a head."""
        return "roberta" if self.roberta else "bert"

    @property
    def pooler(self) -> bool:
        return self.task == "Model" or (self.task == "ForSequenceClassification" and not self.roberta)

    @property
    def head_first(self) -> bool:
        """Whether the class makes its head before its body, as those that RoBERTa's was copied to do."""
        return self.kind not in ("bert", "roberta")


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
        prefix: of the body. leaves: the modules and lone parameters by name, in the class's order.
        words, output: the embeddings' names. ties: the name of a parameter to that of the one it is.
    """

    prefix: str
    leaves: Iterator[tuple[str, nn.Module | nn.Parameter]]
    words: str
    output: str = ""
    ties: dict[str, str] = field(default_factory=dict)


def plain_model(config: Mapping[str, Json]) -> PlainModel | None:
    """Return the model of a ``config.json``; None where configuration and class are not plain.

    It is the class that ``architectures`` names first.
    """
    name = decoder(config) or _named(config, ENCODERS)
    parts = _decoder_parts(config, DECODERS[name]) if name in DECODERS else _encoder_parts(config, ENCODERS.get(name))
    if parts is None:
        return None
    about = {"__module__": __name__, "base_model_prefix": parts.prefix, "words": parts.words, "output": parts.output}
    model: PlainModel = type(name, (PlainModel,), about)()
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


def _named(config: Mapping[str, Json], rows: Mapping[str, _Decoder] | Mapping[str, _Encoder]) -> str:
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    row = rows.get(name) if isinstance(name, str) else None
    odd = any(config.get(key) for key in ("auto_map", "quantization_config", "compression_config"))
    odd = odd or config.get("hidden_act") not in _ACTIVATIONS
    return str(name) if row is not None and config.get("model_type") == row.kind and not odd else ""


def _decoder_parts(config: Mapping[str, Json], row: _Decoder) -> _Parts | None:
    sizes, tied = _sizes(config, row), config.get("tie_word_embeddings")
    if sizes is None or not isinstance(tied, bool):
        return None
    words = "model.embed_tokens"
    return _Parts("model", _leaves(sizes), words, "lm_head", {"lm_head.weight": f"{words}.weight"} if tied else {})


def _encoder_parts(config: Mapping[str, Json], row: _Encoder | None) -> _Parts | None:
    """Return the parts of an encoder; None where it is a decoder, unties its embeddings, or a size is missing."""
    plain = {"is_decoder": False, "add_cross_attention": False, "tie_word_embeddings": True}
    if row is None or any(config.get(key, value) is not value for key, value in plain.items()):
        return None
    if config.get("position_embedding_type", "absolute") != "absolute":
        return None
    keys = (*_SIZES[:5], "max_position_embeddings", "type_vocab_size")
    numbers, labels = [config.get(key) for key in keys], config.get("id2label", {"0": "", "1": ""})
    if not all(type(number) is int and number > 0 for number in numbers) or not isinstance(labels, dict):
        return None
    tokens, hidden, inner, layers, heads, positions, types = (int(str(number)) for number in numbers)
    if hidden % heads:
        return None
    body = "" if row.task == "Model" else f"{row.prefix}."
    leaves = _encoder_leaves(body, row, (tokens, positions, types), (hidden, inner), layers)
    words = f"{body}embeddings.word_embeddings"
    output, ties = "", dict[str, str]()
    head = _classifier(row, hidden, len(labels)) if body else iter(())
    if row.task == "ForMaskedLM":
        at = "lm_head" if row.roberta else "cls.predictions"
        head, output = _word_head(row, at, hidden, tokens), f"{at}.decoder"
        ties = {f"{output}.weight": f"{words}.weight", f"{output}.bias": f"{at}.bias"}
    return _Parts(row.prefix, chain(head, leaves) if row.head_first else chain(leaves, head), words, output, ties)


@dataclass(frozen=True)
class _Sizes:
    tokens: int
    hidden: int
    inner: int
    layers: int
    heads: int
    groups: int
    head: int
    biased: tuple[str, ...]
    mlp_bias: bool
    head_norms: bool


def _sizes(config: Mapping[str, Json], row: _Decoder) -> _Sizes | None:
    """Return the sizes that a configuration states; None if one is missing or odd."""
    numbers = [config.get(key) for key in _SIZES]
    if not all(type(number) is int and number > 0 for number in numbers):
        return None
    tokens, hidden, inner, layers, heads, groups = (int(str(number)) for number in numbers)
    head = config.get("head_dim")
    if head is None and not row.head_dim and hidden % heads == 0:
        head = hidden // heads
    if type(head) is not int or head <= 0 or heads % groups:
        return None
    settings = [config.get(key, False) for key in ("attention_bias", "mlp_bias")]
    if not all(isinstance(setting, bool) for setting in settings):
        return None
    every = ("q_proj", "k_proj", "v_proj", "o_proj")
    biased = row.biases if isinstance(row.biases, tuple) else every if settings[0] else ()
    mlp_bias = row.mlp_bias and bool(settings[1])
    return _Sizes(tokens, hidden, inner, layers, heads, groups, head, biased, mlp_bias, row.head_norms)


def _leaves(sizes: _Sizes) -> Iterator[tuple[str, nn.Module | nn.Parameter]]:
    """Yield the modules of a Llama that have parameters."""

    def norm(name: str, width: int) -> tuple[str, nn.Module]:
        return name, nn.RMSNorm(width, device="meta")

    hidden, inner = sizes.hidden, sizes.inner
    queries, keys = sizes.heads * sizes.head, sizes.groups * sizes.head
    yield "model.embed_tokens", nn.Embedding(sizes.tokens, hidden, device="meta")
    for layer in range(sizes.layers):
        at = f"model.layers.{layer}"
        for name, width in {"q_proj": queries, "k_proj": keys, "v_proj": keys}.items():
            yield _linear(f"{at}.self_attn.{name}", hidden, width, name in sizes.biased)
        yield _linear(f"{at}.self_attn.o_proj", queries, hidden, "o_proj" in sizes.biased)
        if sizes.head_norms:
            yield norm(f"{at}.self_attn.q_norm", sizes.head)
            yield norm(f"{at}.self_attn.k_norm", sizes.head)
        for name in ("gate_proj", "up_proj"):
            yield _linear(f"{at}.mlp.{name}", hidden, inner, sizes.mlp_bias)
        yield _linear(f"{at}.mlp.down_proj", inner, hidden, sizes.mlp_bias)
        yield norm(f"{at}.input_layernorm", hidden)
        yield norm(f"{at}.post_attention_layernorm", hidden)
    yield norm("model.norm", hidden)
    yield _linear("lm_head", hidden, sizes.tokens, False)


def _encoder_leaves(
    body: str, row: _Encoder, tables: tuple[int, int, int], widths: tuple[int, int], layers: int
) -> Iterator[tuple[str, nn.Module | nn.Parameter]]:
    """Yield the body of a BERT, its dropouts included: bottleneck adapters replace them."""
    (tokens, positions, types), (hidden, inner) = tables, widths

    def norm(name: str) -> tuple[str, nn.Module]:
        return name, nn.LayerNorm(hidden, device="meta")

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
    if row.pooler:
        yield _linear(f"{body}pooler.dense", hidden, hidden)


def _classifier(row: _Encoder, hidden: int, labels: int) -> Iterator[tuple[str, nn.Module | nn.Parameter]]:
    if row.roberta:
        yield _linear("classifier.dense", hidden, hidden)
    yield ("classifier.dropout" if row.roberta else "dropout"), nn.Dropout()
    yield _linear("classifier.out_proj" if row.roberta else "classifier", hidden, labels)


def _word_head(row: _Encoder, head: str, hidden: int, tokens: int) -> Iterator[tuple[str, nn.Module | nn.Parameter]]:
    yield f"{head}.bias", nn.Parameter(torch.empty(tokens, device="meta"))
    transform = head if row.roberta else f"{head}.transform"
    yield _linear(f"{transform}.dense", hidden, hidden)
    yield f"{transform}.{'layer_norm' if row.roberta else 'LayerNorm'}", nn.LayerNorm(hidden, device="meta")
    yield _linear(f"{head}.decoder", hidden, tokens)


def _linear(name: str, d_in: int, d_out: int, bias: bool = True) -> tuple[str, nn.Module]:
    return name, nn.Linear(d_in, d_out, bias=bias, device="meta")


def _put(model: nn.Module, path: str, leaf: nn.Module | nn.Parameter) -> None:
    """Register a module or a parameter, and the modules above it that are not there yet."""
    *owners, last = path.split(".")
    for name in owners:
        if name not in model._modules:
            model.add_module(name, nn.Module())
        model = model.get_submodule(name)
    if isinstance(leaf, nn.Parameter):
        model.register_parameter(last, leaf)
    else:
        model.add_module(last, leaf)
