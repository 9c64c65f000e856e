"""The flattened step: a decoder's forward pass in some twenty operations per layer, without modules or hooks.

At one token, most of the time of ``transformers``' forward is Python. Here q, k, v are one product, gate and up are
one, attention folds the query heads that share a key head into the query length, and on the CPU every weight is packed
once (``packed.py``).

What a decoder computes (``Structure``) is read from a model of ``transformers``. A family is one row of a table: how
its modules are called; norms, heads, windows, caps and scales are then read from the modules themselves. Whether the
reading is right is not left to this module: ``engines.py`` tries every engine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from peftlab.decoding.cache import Block, Context, Encoder, FirstLayers, KVCache, Output, additive_mask
from peftlab.decoding.packed import Added, Addition, Linear, Product, Products, can_pack
from peftlab.methods.base import base_leaf
from peftlab.methods.lora.layers import Gate, LowRank
from peftlab.models.quantised import dequantised, is_quantised
from peftlab.untyped import KnownModel

Angles = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Positions [1, n] to cosines and sines [1, n, R], in float32, of the R first numbers of a head."""


@dataclass(frozen=True)
class Norm:
    """RMSNorm, or LayerNorm where ``centred``.

    A ``weight`` in float32 is multiplied before the result is rounded to the model's dtype, another one after.
    """

    weight: Tensor
    eps: float
    bias: Tensor | None = None
    centred: bool = False


@dataclass(frozen=True)
class LayerStructure:
    """The weights of one layer: h + after(out(attention(before(h)))), then the same with the MLP.

    Attributes:
        qkv: all query heads, then key heads, then value heads; in one linear or several, to be stacked.
        queries, keys: norms of each head, or of all heads at once where the weight is wider than a head.
        angles: name of the angles that rotate queries and keys; None for none.
        scale: of the products of queries and keys. cap: c of c tanh(x / c) on them.
        window: of attention; None for all tokens.
        up: where ``Structure.gated``, gates and then what they multiply.
    """

    qkv: tuple[Linear, ...]
    out: Linear
    up: tuple[Linear, ...]
    down: Linear
    scale: float
    before_attention: Norm | None = None
    after_attention: Norm | None = None
    before_mlp: Norm | None = None
    after_mlp: Norm | None = None
    queries: Norm | None = None
    keys: Norm | None = None
    angles: str | None = None
    cap: float | None = None
    window: int | None = None


@dataclass(frozen=True)
class Structure:
    """The weights and settings of a decoder.

    Attributes:
        embedding: [V, H]. embedding_scale: what it is multiplied by. positions: learned ones, [limit, H].
        cap: c of c tanh(x / c) on the logits.
        heads, kv_heads, dim: query heads, key heads and numbers per head.
        angles: by name, see ``LayerStructure``.
        parallel: whether a layer's MLP reads what its attention reads, not what that gives.
        limit: how many positions there are.
    """

    layers: tuple[LayerStructure, ...]
    embedding: Tensor
    norm: Norm
    head: Linear
    heads: int
    kv_heads: int
    dim: int
    activation: Callable[[Tensor], Tensor]
    gated: bool
    limit: int
    angles: dict[str, Angles]
    embedding_scale: Tensor | None = None
    positions: Tensor | None = None
    cap: float | None = None
    parallel: bool = False


def structure_of(model: PreTrainedModel) -> Structure | None:
    """Return the weights that ``model`` computes with; None for an unknown family, a hook, or an unusual layer."""
    read = _FAMILIES.get(type(model).__name__)
    if read is None or _has_dynamic_rope(model.config) or _has_hooks(model):
        return None
    try:
        return read(model)
    except _Unsupported:
        return None


class _Unsupported(Exception):
    """A module is not of the class that the family usually has: an adapter's, or one quantised on a GPU."""


_PRE_NORMS = {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"}
_POST_NORMS = {"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"}
_PRE_AND_POST_NORMS = {"before_attention": "input_layernorm", "before_mlp": "pre_feedforward_layernorm", **_POST_NORMS}


def _llama(model: KnownModel, norms: dict[str, str]) -> Structure:
    """Return the structure of a model built as Llama is.

    Args:
        norms: place in a layer -> name of the norm's module.
    """
    config, body = model.config, model.model
    first = body.layers[0].self_attn
    queries, keys = config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)
    kinds = sorted(set(getattr(config, "layer_types", None) or ["full_attention"]))
    by_kind = isinstance(getattr(body.rotary_emb, "rope_type", None), dict)

    def layer(i: int, module: KnownModel) -> LayerStructure:
        attention, mlp = module.self_attn, module.mlp
        fused = hasattr(attention, "qkv_proj")
        rotated = getattr(attention, "use_rope", True)
        return LayerStructure(
            qkv=_read_linears(attention, ["qkv_proj"] if fused else ["q_proj", "k_proj", "v_proj"]),
            out=_read_linear(attention.o_proj),
            up=_read_linears(mlp, ["gate_up_proj"] if hasattr(mlp, "gate_up_proj") else ["gate_proj", "up_proj"]),
            down=_read_linear(mlp.down_proj),
            scale=float(attention.scaling),
            queries=_read_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
            keys=_read_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
            angles=(config.layer_types[i] if by_kind else "all") if rotated else None,
            cap=getattr(attention, "attn_logit_softcapping", None),
            window=_attention_window(config, i),
            **{place: _read_norm(module.get_submodule(name)) for place, name in norms.items()},
        )

    def angles(kind: str, positions: Tensor) -> tuple[Tensor, Tensor]:
        return body.rotary_emb(body.embed_tokens.weight[:1].float(), positions, *([kind] if by_kind else []))

    scale = getattr(body.embed_tokens, "embed_scale", None)
    act = getattr(body.layers[0].mlp, "act_fn", None) or body.layers[0].mlp.activation_fn
    return Structure(
        layers=tuple(layer(i, module) for i, module in enumerate(body.layers)),
        embedding=body.embed_tokens.weight.detach(),
        norm=_read_norm(body.norm),
        head=_read_linear(model.lm_head),
        heads=queries,
        kv_heads=keys,
        dim=first.head_dim,
        activation=_read_activation(act),
        gated=True,
        limit=config.max_position_embeddings,
        angles={kind: partial(angles, kind) for kind in (kinds if by_kind else ["all"])},
        embedding_scale=None if scale is None else scale.to(body.embed_tokens.weight.dtype),
        cap=getattr(config, "final_logit_softcapping", None),
    )


def _gpt2(model: KnownModel) -> Structure:
    config, body = model.config, model.transformer
    if config.add_cross_attention:
        raise _Unsupported

    def layer(module: KnownModel) -> LayerStructure:
        attention, mlp = module.attn, module.mlp
        return LayerStructure(
            qkv=_read_linears(attention, ["c_attn"]),
            out=_read_linear(attention.c_proj),
            up=_read_linears(mlp, ["c_fc"]),
            down=_read_linear(mlp.c_proj),
            scale=float(attention.scaling),
            before_attention=_read_norm(module.ln_1),
            before_mlp=_read_norm(module.ln_2),
        )

    return Structure(
        layers=tuple(layer(module) for module in body.h),
        embedding=body.wte.weight.detach(),
        norm=_read_norm(body.ln_f),
        head=_read_linear(model.lm_head),
        heads=config.n_head,
        kv_heads=config.n_head,
        dim=config.n_embd // config.n_head,
        activation=_read_activation(body.h[0].mlp.act),
        gated=False,
        limit=config.n_positions,
        angles={},
        positions=body.wpe.weight.detach(),
    )


def _gpt_neox(model: KnownModel) -> Structure:
    config, body = model.config, model.gpt_neox
    heads, dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads

    def by_part(linear: Linear) -> Linear:
        """Return a map with outputs by head, (query, key, value) each, reordered: all queries, all keys, all values."""

        def parts(outputs: Tensor) -> Tensor:
            return outputs.unflatten(0, (heads, 3, dim)).transpose(0, 1).flatten(0, 2)

        bias, added = linear.bias, linear.addition
        added = None if added is None else replace(added, b=parts(added.b))
        return Linear(parts(linear.weight), None if bias is None else parts(bias), added)

    def layer(module: KnownModel) -> LayerStructure:
        attention, mlp = module.attention, module.mlp
        return LayerStructure(
            qkv=(by_part(_read_linear(attention.query_key_value)),),
            out=_read_linear(attention.dense),
            up=_read_linears(mlp, ["dense_h_to_4h"]),
            down=_read_linear(mlp.dense_4h_to_h),
            scale=float(attention.scaling),
            before_attention=_read_norm(module.input_layernorm),
            before_mlp=_read_norm(module.post_attention_layernorm),
            angles="all",
        )

    def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
        return body.rotary_emb(body.embed_in.weight[:1].float(), positions)

    return Structure(
        layers=tuple(layer(module) for module in body.layers),
        embedding=body.embed_in.weight.detach(),
        norm=_read_norm(body.final_layer_norm),
        head=_read_linear(model.get_output_embeddings()),
        heads=heads,
        kv_heads=heads,
        dim=dim,
        activation=_read_activation(body.layers[0].mlp.act),
        gated=False,
        limit=config.max_position_embeddings,
        angles={"all": angles},
        parallel=config.use_parallel_residual,
    )


_FAMILIES: dict[str, Callable[[PreTrainedModel], Structure]] = {
    **dict.fromkeys(
        (
            "LlamaForCausalLM",
            "MistralForCausalLM",
            "Qwen2ForCausalLM",
            "Qwen3ForCausalLM",
            "Phi3ForCausalLM",
            "SmolLM3ForCausalLM",
            "GemmaForCausalLM",
        ),
        partial(_llama, norms=_PRE_NORMS),
    ),
    "Gemma2ForCausalLM": partial(_llama, norms=_PRE_AND_POST_NORMS),
    "Gemma3ForCausalLM": partial(_llama, norms=_PRE_AND_POST_NORMS),
    "Olmo2ForCausalLM": partial(_llama, norms=_POST_NORMS),
    "GPT2LMHeadModel": _gpt2,
    "GPTNeoXForCausalLM": _gpt_neox,
}


def _read_linear(module: KnownModel | None) -> Linear:
    if isinstance(module, LowRank) and module.lora_gate is not None and not is_quantised(module):
        return replace(_read_linear(base_leaf(module)), addition=_read_addition(module, module.lora_gate))
    if type(module) is Conv1D:
        return Linear(module.weight.detach().T, module.bias.detach())
    if module is None or not (_is_plain(module) or _is_quantised_on_cpu(module)):
        raise _Unsupported
    weight = module.weight.detach() if _is_plain(module) else dequantised(module, torch.float32)
    return Linear(weight, None if module.bias is None else module.bias.detach())


def _is_plain(module: nn.Module) -> bool:
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter


def _is_quantised_on_cpu(module: nn.Module) -> bool:
    """Return whether a module is a quantised linear map of bitsandbytes on the CPU, dequantised at every step."""
    own = type(module).__name__ in ("Linear4bit", "Linear8bitLt")
    return own and is_quantised(module) and module.get_parameter("weight").device.type == "cpu"


def _read_addition(leaf: LowRank, gate: Gate) -> Addition:
    if leaf.lora_magnitude_vector is not None or leaf.lora_bias is not None:
        raise _Unsupported
    a, b = (factor.detach().to(leaf.weight.dtype) for factor in leaf.factors())
    return Addition(a, b * leaf.scale, gate)


def _read_linears(owner: nn.Module, names: list[str]) -> tuple[Linear, ...]:
    linears = tuple(_read_linear(owner.get_submodule(name)) for name in names)
    if len({linear.bias is None for linear in linears}) > 1:
        raise _Unsupported  # they are to be stacked
    return linears


def _read_norm(module: KnownModel) -> Norm:
    if type(module) is nn.LayerNorm:
        bias = None if module.bias is None else module.bias.detach()
        return Norm(module.weight.detach(), module.eps, bias, centred=True)
    weight, name = module.weight.detach(), type(module).__name__
    if not name.endswith("RMSNorm"):
        raise _Unsupported
    if name.startswith("Gemma"):  # stored as the difference from one
        return Norm(1 + weight.float(), float(module.eps))
    return Norm(weight.float() if name.startswith("Olmo2") else weight, float(module.variance_epsilon))


def _read_activation(module: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the function of an activation module: calling the module takes longer than a small product."""
    return F.silu if isinstance(module, nn.SiLU) or type(module).__name__ == "SiLUActivation" else module


def _attention_window(config: PretrainedConfig, layer: int) -> int | None:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer] == "full_attention":
        return None
    return getattr(config, "sliding_window", None)


def _has_dynamic_rope(config: PretrainedConfig) -> bool:
    """Return whether the angles of a position depend on the text's length, so that no table has them."""
    parameters = getattr(config, "rope_parameters", None) or {}
    each = [parameters] if "rope_type" in parameters else [p for p in parameters.values() if isinstance(p, dict)]
    return any(p.get("rope_type") in ("dynamic", "longrope") for p in each)


def _has_hooks(model: nn.Module) -> bool:
    """Return whether a module has hooks, other than those of ``output_hidden_states``, which only record."""
    hooks = (hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values()))
    return any(getattr(hook, "__module__", None) != "transformers.utils.output_capturing" for hook in hooks)


Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Layer:
    """The functions of one layer, made from its ``LayerStructure``.

    Attributes:
        qkv: h to queries, keys and values. norm_heads: the norms of queries and keys, in place.
        out: what attention gives, and h, to their sum. up: h to the input of ``down``, which adds to h again.
    """

    qkv: Function
    norm_heads: Callable[[Tensor], None] | None
    out: Added
    up: Function
    down: Added
    scale: float
    angles: str | None
    cap: float | None
    window: int | None


class FlatEngine:
    """See ``cache.Engine``; made by ``engines.build_engine`` from a model's structure.

    Args:
        structure: of the decoder. vocabulary, pack, features: see ``engines.build_engine``.
    """

    encoder: Encoder | None = None
    _computed_in: torch.dtype | None = None  # dtype of states, keys and values; None: the model's

    def __init__(
        self,
        structure: Structure,
        vocabulary: int | None = None,
        *,
        pack: bool = True,
        features: Sequence[int] = (),
    ):
        stored = structure.embedding
        products = Products(pack and can_pack(stored), stored.dtype)
        self._dtype = self._computed_in or stored.dtype
        self.device = stored.device
        self.vocab_size = vocabulary or structure.head.weight.shape[0]
        self.limit: int | None = structure.limit
        self.layers = len(structure.layers)
        self._features = tuple(features)
        self._heads, self._kv_heads, self._dim = structure.heads, structure.kv_heads, structure.dim
        self._embedding, self._embedding_scale = structure.embedding, structure.embedding_scale
        self._positions, self._parallel, self._cap = structure.positions, structure.parallel, structure.cap
        self._norm = _norm_function(structure.norm)
        self._tables = {name: _RotaryTable(angles, self._dtype) for name, angles in structure.angles.items()}
        self.packed = self._store_weights(structure, products)
        self.kind = ", ".join(["flat", *self.packed])

    positioned = True

    def _store_weights(self, structure: Structure, products: Products) -> tuple[str, ...]:
        """Make the products of all layers and of the LM head; return the forms in which they store the weights."""
        self._layers = [_layer_functions(layer, structure, products) for layer in structure.layers]
        logits, shrink = products.product([structure.head], self.vocab_size)
        self._head: Product = lambda h: logits(h * shrink)
        return tuple(products.stored)

    def new_cache(self, batch: int, capacity: int, context: Context | None = None) -> KVCache:
        """Return an empty cache; see ``Engine.new_cache``."""
        return KVCache(self.layers, batch, capacity, context, self._dtype)

    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """Run the model; see ``Engine.forward``. Tokens that an early exit has read skip the first layers."""
        with without_torch_function():
            done = cache.take_first_layers(tokens, block)
            if done is None or done.features.shape[-1] != self._feature_width(done.layers):
                h, reported = self.run_layers(cache, self.embed(tokens, block), block, range(self.layers))
            else:
                h, reported = self._run_remaining(cache, tokens, block, done)
            if self.layers in self._features:
                reported.append(self._norm(h))
            output = self.output(h, keep)
            return replace(output, features=torch.cat(reported, -1) if reported else None)

    def _run_remaining(
        self, cache: KVCache, tokens: Tensor, block: Block, done: FirstLayers
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the later layers on tokens that the first ones have read, and all layers on the rest of the block."""
        states, features = done.states, done.features
        rest = block.after(states.shape[1])
        if rest is not None:
            h = self.embed(tokens[:, -rest.n :], rest)
            h, reported = self.run_layers(cache, h, rest, range(done.layers))
            states = torch.cat((states, h), 1)
            features = torch.cat((features, concatenate_states(reported, h)), 1)
        h, reported = self.run_layers(cache, states, block, range(done.layers, self.layers))
        return h, [features, *reported] if features.shape[-1] else reported

    def _feature_width(self, layers: int) -> int:
        """Return the width F of the features that the first ``layers`` layers report."""
        return self._embedding.shape[1] * sum(layer < layers for layer in self._features)

    def run_layers(
        self,
        cache: KVCache,
        h: Tensor,
        block: Block,
        layers: range,
        skipped: Collection[int] = (),
        given: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run some layers on the states [b, n, H] that enter them.

        Args:
            cache: keys and values. h: [b, n, H]. block: slots of the tokens. layers: indices, rising.
            skipped: sublayers that are left out: 2i is the attention of layer i, 2i + 1 its MLP.
            given: what queries, keys and values of a layer without a norm before them are made of, [b, n, inputs];
                None: h.

        Returns:
            The states after them, and those that entered the ones among them that ``features`` names.
        """
        b, n, _ = h.shape
        heads, kv, dim = self._heads, self._kv_heads, self._dim
        rotations = {name: table.rotation(block, cache.capacity, self.device) for name, table in self._tables.items()}
        spans = {w: self._spans(block, w) for w in {self._layers[i].window for i in layers}}
        reported: list[Tensor] = []
        for i in layers:
            layer = self._layers[i]
            if i in self._features:
                reported.append(h)
            after = h
            if 2 * i not in skipped:
                x = layer.qkv(h if given is None else given).view(b, n, heads + 2 * kv, dim)
                if layer.norm_heads is not None:
                    layer.norm_heads(x)
                if layer.angles is not None:
                    rotate(x[:, :, : heads + kv], *rotations[layer.angles])
                keys, values = cache.write(i, x[:, :, heads:].transpose(1, 2), block)
                seen = attend(x[:, :, :heads], keys, values, spans[layer.window], layer.scale, layer.cap)
                after = layer.out(seen, h)
            h = after if 2 * i + 1 in skipped else layer.down(layer.up(h if self._parallel else after), after)
        return h, reported

    def output(self, h: Tensor, keep: list[int] | None = None) -> Output:
        """Return logits and normed states for the output of the last layer.

        Args:
            h: [b, n, H], or [..., H] without ``keep``. keep: places of n to return; None: all.
        """
        if keep is not None:
            h = h[:, keep]
            if not keep:
                return Output(h.new_zeros(len(h), 0, self.vocab_size), h)
        h = self.normed(h)
        logits = self.logits(h)
        return Output(logits if self._cap is None else softcap(logits, self._cap), h)

    def normed(self, h: Tensor) -> Tensor:
        """Return states [..., H] after the final norm."""
        return self._norm(h)

    def logits(self, h: Tensor) -> Tensor:
        """Return the logits for normed states, [..., H] -> [..., V], before a cap."""
        return self._head(h)

    def embed(self, tokens: Tensor, block: Block) -> Tensor:
        """Return the states that enter the first layer, [b, n, H].

        Args:
            tokens: [b, n]. block: their slots, for learned positions.
        """
        h = F.embedding(tokens, self._embedding)
        if self._embedding_scale is not None:
            h = h * self._embedding_scale
        if self._positions is not None:
            positions = block.positions(self.device).clamp_max(len(self._positions) - 1)
            h = h + F.embedding(positions, self._positions)
        return h

    def _spans(self, block: Block, window: int | None) -> list[Span]:
        """Return how the queries of a block attend in layers with a window: in parts, where they are many."""
        visible = block.visible(window, self.device)
        groups = self._heads // self._kv_heads  # the queries of a group follow one another, see ``fold_heads``
        if visible is None:
            return [Span(slice(0, block.n), slice(0, block.end), None)]
        spans = []
        for first in range(0, block.n, _TOGETHER):
            queries, slots = slice(first, first + _TOGETHER), slice(0, block.end)
            if block.n > _TOGETHER:
                (seen,) = visible[:, :, queries].flatten(0, 2).any(0).nonzero(as_tuple=True)
                slots = slice(int(seen[0]), int(seen[-1]) + 1)
            mask = additive_mask(visible[:, :, queries, slots], self._dtype)
            spans.append(Span(queries, slots, mask.repeat(1, 1, groups, 1)))
        return spans


_TOGETHER = 128  # queries of a head that attend at once: for a prompt's first ones its last slots are not multiplied


@dataclass(frozen=True)
class Span:
    """Queries of a block that attend together.

    Attributes:
        queries: their places. slots: among which all are that they see.
        mask: what is added to the scores of folded queries, [b or 1, 1, groups * n, slots]; None: nothing.
    """

    queries: slice[int, int, None]
    slots: slice[int, int, None]
    mask: Tensor | None


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, spans: Sequence[Span], scale: float, cap: float | None = None
) -> Tensor:
    """Return attention of queries to keys and values, [b, n, heads * D].

    Args:
        queries: [b, n, heads, D]. keys, values: [b, kv, end, D]. spans: which attend together, in their order.
        scale: of the scores. cap: c of c tanh(x / c) on them.
    """
    if len(spans) > 1:
        parts = [(queries[:, s.queries], keys[:, :, s.slots], values[:, :, s.slots], [s]) for s in spans]
        return torch.cat([attend(*part, scale, cap) for part in parts], 1)
    folded, mask = fold_heads(queries, keys.shape[1]), spans[0].mask
    if cap is None:
        seen = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
    else:
        products = softcap(folded @ keys.mT * scale, cap)
        products = products if mask is None else products + mask
        seen = products.softmax(-1, dtype=torch.float32).to(values.dtype) @ values
    return unfold_heads(seen, queries.shape[1])


@contextmanager
def without_torch_function() -> Iterator[None]:
    """Disable autograd and torch-function overrides in the with-block, in which parts of a flat engine are called."""
    # Checking packed weights for overrides of torch's functions would take longer than a small product.
    with torch.inference_mode(), torch._C.DisableTorchFunctionSubclass():
        yield


def concatenate_states(states: list[Tensor], like: Tensor) -> Tensor:
    """Return states concatenated to [b, n, F]; F is 0 where there are none.

    Args:
        states: [b, n, H] each. like: [b, n, H], for shape and dtype where there are none.
    """
    return torch.cat(states, -1) if states else like[..., :0]


class _RotaryTable:
    """A table of the cosines and sines of all positions, computed once for a capacity."""

    def __init__(self, angles: Angles, dtype: torch.dtype):
        self._angles, self._dtype, self._cos_sin = angles, dtype, (torch.empty(0), torch.empty(0))

    def rotation(self, block: Block, capacity: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the block's positions, [b or 1, n, 1, R].

        Args:
            block: of tokens. capacity: positions that the table must have. device: of the table.
        """
        cos, sin = self.parts(capacity, device)
        if block.consecutive:
            span = slice(block.starts[0], block.end)
            return cos[None, span, None], sin[None, span, None]
        positions = block.positions(device)
        return cos[positions][:, :, None], sin[positions][:, :, None]

    def parts(self, capacity: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of at least ``capacity`` positions, [capacity, R], as ``rotate`` takes them.

        Args:
            capacity: positions. device: of the tables.
        """
        if len(self._cos_sin[0]) < capacity:
            cos, sin = (part.to(self._dtype) for part in self._angles(torch.arange(capacity, device=device)[None]))
            # (x1, x2) becomes (x1 cos - x2 sin, x2 cos + x1 sin): the halves are swapped, and the sign is in the sine.
            first, second = sin[0].chunk(2, -1)
            self._cos_sin = cos[0].contiguous(), torch.cat((-first, second), -1)
        return self._cos_sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first R features of heads [b, n, heads, D] in place.

    Args:
        x: [b, n, heads, D].
        cos, sin: [b or 1, n, 1, R]: (x1, x2) becomes (x1 cos - x2 sin, x2 cos + x1 sin), with the sign in the sine.
    """
    turned = x[..., : cos.shape[-1]]
    torch.addcmul(turned * cos, turned.roll(cos.shape[-1] // 2, -1), sin, out=turned)


def fold_heads(queries: Tensor, kv: int) -> Tensor:
    """Return queries with heads that share a key head turned into further queries of it.

    Args:
        queries: [b, n, heads, D]. kv: key heads.

    Returns:
        [b, kv, groups * n, D].
    """
    b, n, heads, dim = queries.shape
    folded = queries.reshape(b, n, kv, heads // kv, dim)
    return folded[:, 0] if n == 1 else folded.permute(0, 2, 3, 1, 4).flatten(2, 3)


def unfold_heads(seen: Tensor, n: int) -> Tensor:
    """Return the attention output of folded queries by token, [b, n, heads * D].

    Args:
        seen: [b, kv, groups * n, D]. n: tokens.
    """
    if n > 1:
        seen = seen.unflatten(2, (-1, n)).permute(0, 3, 1, 2, 4)
    return seen.reshape(len(seen), n, -1)


def _layer_functions(layer: LayerStructure, structure: Structure, products: Products) -> _Layer:
    raised = _norm_then_linear(layer.before_mlp, layer.up, products)
    act, gated = structure.activation, structure.gated

    def up(h: Tensor) -> Tensor:
        wide = raised(h)
        if not gated:
            return act(wide)
        gate, factor = wide.chunk(2, -1)
        return act(gate).mul_(factor)

    return _Layer(
        qkv=_norm_then_linear(layer.before_attention, layer.qkv, products),
        norm_heads=_head_norms(layer, structure),
        out=_linear_then_norm(layer.out, layer.after_attention, products),
        up=up,
        down=_linear_then_norm(layer.down, layer.after_mlp, products),
        scale=layer.scale,
        angles=layer.angles,
        cap=layer.cap,
        window=layer.window,
    )


def _norm_then_linear(norm: Norm | None, linears: Sequence[Linear], products: Products) -> Function:
    """Return h -> norm(h) Wᵀ + bias; the scale of packed weights is folded into the norm's weight."""
    multiply, shrink = products.product(linears)
    if norm is not None:
        normed = _norm_function(norm, shrink)
        return lambda h: multiply(normed(h))
    return multiply if shrink == 1 else lambda h: multiply(h * shrink)


def _linear_then_norm(linear: Linear, norm: Norm | None, products: Products) -> Added:
    """Return (x, residual) -> residual + norm(x Wᵀ + bias)."""
    if norm is None:
        return products.added(linear)
    multiply, shrink = products.product([linear])
    normed = _norm_function(norm)
    return lambda x, residual: residual + normed(multiply(x * shrink))


def _head_norms(layer: LayerStructure, structure: Structure) -> Callable[[Tensor], None] | None:
    """Return a function that norms queries and keys [b, n, heads + 2 kv, D] in place; None without such norms."""
    queries, keys = layer.queries, layer.keys
    if queries is None or keys is None:
        return None
    split, end = structure.heads, structure.heads + structure.kv_heads
    if queries.weight.numel() == structure.dim:
        weight = torch.cat((queries.weight.expand(split, -1), keys.weight.expand(end - split, -1)))
        each = _norm_function(Norm(weight, queries.eps))

        def by_head(x: Tensor) -> None:
            x[:, :, :end] = each(x[:, :, :end])

        return by_head
    both = ((slice(split), _norm_function(queries)), (slice(split, end), _norm_function(keys)))

    def all_heads(x: Tensor) -> None:
        for place, normed in both:
            part = x[:, :, place]
            x[:, :, place] = normed(part.flatten(2)).view(part.shape)

    return all_heads


def _norm_function(norm: Norm, factor: float = 1.0) -> Function:
    """Return h -> factor * norm(h), in the operations that take the least time on a handful of rows."""
    weight = norm.weight * factor
    bias = None if norm.bias is None else norm.bias * factor
    if norm.centred:
        return lambda h: F.layer_norm(h, weight.shape, weight, bias, norm.eps)
    eps = torch.tensor(norm.eps, device=weight.device)

    def scaled(h: Tensor) -> Tensor:
        wide = h.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = torch.addcmul(eps, length, length, value=1 / h.shape[-1]).rsqrt_()
        result = wide.mul(inverse)
        # Rounded where transformers rounds: before the weight in half precision, or after one in float32.
        return result.mul_(weight).to(h.dtype) if weight.dtype == torch.float32 else result.to(h.dtype).mul_(weight)

    return scaled


def softcap(x: Tensor, cap: float) -> Tensor:
    """Return c tanh(x / c)."""
    return torch.tanh(x / cap) * cap
