"""Empty models of plain decoders, made of their configuration alone: transformers and its model code are not imported.

What a class of transformers makes of a configuration is a matter of names and shapes for these; a test compares each
row with the class itself. For any other class, and wherever a setting is not plain, there is no such model, and the
caller makes the class's own (``models.skeleton.empty_model``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from peftlab.files import Json
from peftlab.untyped import Function

if TYPE_CHECKING:
    from transformers import PreTrainedModel as _Model  # of which this is the part that a plan asks for
else:
    _Model = nn.Module

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


class PlainModel(_Model):
    """A decoder on the meta device: names, shapes, kinds of modules and ties, no forward.

    Its class is called as transformers' class.
    """

    base_model_prefix = "model"

    def get_input_embeddings(self) -> nn.Module:
        return self.get_submodule("model.embed_tokens")

    def get_output_embeddings(self) -> nn.Module:
        return self.get_submodule("lm_head")


def plain_model(config: Mapping[str, Json]) -> PlainModel | None:
    """Return the model of a ``config.json``; None where configuration and class are not plain.

    It is the class that ``architectures`` names first.
    """
    name = decoder(config)
    sizes, tied = _sizes(config, DECODERS[name]) if name else None, config.get("tie_word_embeddings")
    if sizes is None or not isinstance(tied, bool):
        return None
    model: PlainModel = type(name, (PlainModel,), {"__module__": __name__})()
    with NoValues():
        for path, leaf in _leaves(sizes):
            _put(model, path, leaf)
    model.config = SimpleNamespace(**config)  # type: ignore[assignment]
    model.all_tied_weights_keys = {}
    model._keys_to_ignore_on_save = None
    if tied:
        model.lm_head.weight = model.get_input_embeddings().weight
        model.all_tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    return model.eval()


def decoder(config: Mapping[str, Json]) -> str:
    """Return the class in ``DECODERS`` that a ``config.json`` names; "" for another one, for code of its own beside
    it, and for weights that are stored quantised."""
    named = config.get("architectures")
    name = named[0] if isinstance(named, list) and named else None
    row = DECODERS.get(name) if isinstance(name, str) else None
    odd = any(config.get(key) for key in ("auto_map", "quantization_config", "compression_config"))
    return str(name) if row is not None and config.get("model_type") == row.kind and not odd else ""


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


def _leaves(sizes: _Sizes) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that have parameters, in the class's order."""

    def linear(name: str, d_in: int, d_out: int, bias: bool) -> tuple[str, nn.Module]:
        return name, nn.Linear(d_in, d_out, bias=bias, device="meta")

    def norm(name: str, width: int) -> tuple[str, nn.Module]:
        return name, nn.RMSNorm(width, device="meta")

    hidden, inner = sizes.hidden, sizes.inner
    queries, keys = sizes.heads * sizes.head, sizes.groups * sizes.head
    yield "model.embed_tokens", nn.Embedding(sizes.tokens, hidden, device="meta")
    for layer in range(sizes.layers):
        at = f"model.layers.{layer}"
        for name, width in {"q_proj": queries, "k_proj": keys, "v_proj": keys}.items():
            yield linear(f"{at}.self_attn.{name}", hidden, width, name in sizes.biased)
        yield linear(f"{at}.self_attn.o_proj", queries, hidden, "o_proj" in sizes.biased)
        if sizes.head_norms:
            yield norm(f"{at}.self_attn.q_norm", sizes.head)
            yield norm(f"{at}.self_attn.k_norm", sizes.head)
        for name in ("gate_proj", "up_proj"):
            yield linear(f"{at}.mlp.{name}", hidden, inner, sizes.mlp_bias)
        yield linear(f"{at}.mlp.down_proj", inner, hidden, sizes.mlp_bias)
        yield norm(f"{at}.input_layernorm", hidden)
        yield norm(f"{at}.post_attention_layernorm", hidden)
    yield norm("model.norm", hidden)
    yield linear("lm_head", hidden, sizes.tokens, False)


def _put(model: nn.Module, path: str, leaf: nn.Module) -> None:
    """Register a module, and the modules above it that are not there yet."""
    *owners, last = path.split(".")
    for name in owners:
        if name not in model._modules:
            model.add_module(name, nn.Module())
        model = model.get_submodule(name)
    model.add_module(last, leaf)
