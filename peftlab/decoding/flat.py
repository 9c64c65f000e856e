"""The forward pass of Llama-like models written out flat: some twenty operations a layer and nothing else.

At one token, most of the time of ``transformers``' forward is Python. Here q, k, v are one product, gate and
up are one, attention folds the query heads that share a key head into the query length, and on the CPU every
weight is packed once by oneDNN, whose products then cost nearly the same for 1 and for 8 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from peftlab.decoding.cache import Block, KVCache, additive
from peftlab.decoding.engine import Output

_CLASSES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"})
_PACKED_FOR = 8  # rows that oneDNN lays the weights out for; measured no slower at 1 and at 64
Product = Callable[[Tensor], Tensor]
Added = Callable[[Tensor, Tensor], Tensor]


def flattens(model: PreTrainedModel) -> bool:
    """Return whether the flattened step computes what ``model`` does: known class, plain linears, no hooks."""
    if type(model).__name__ not in _CLASSES or model.config.hidden_act != "silu":
        return False
    if model.config.rope_parameters.get("rope_type", "default") in ("dynamic", "longrope"):
        return False  # the table of angles would depend on the length
    if any(
        _acting(hook) for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())
    ):
        return False
    body: Any = model.model
    linears = [model.lm_head, *(linear for layer in body.layers for linear in _linears(layer))]
    norms = [n for layer in body.layers for n in (layer.input_layernorm, layer.post_attention_layernorm)]
    return all(type(m) is nn.Linear for m in linears) and all(type(n) is type(body.norm) for n in norms)


def _acting(hook: Any) -> bool:
    """Whether a hook may change what is computed; those that ``output_hidden_states`` leaves behind only record."""
    return getattr(hook, "__module__", None) != "transformers.utils.output_capturing"


def _linears(layer: Any) -> list[nn.Module]:
    attention, mlp = layer.self_attn, layer.mlp
    heads = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    return [*heads, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


@dataclass(frozen=True)
class _Layer:
    before_attention: Tensor
    qkv: Product
    out: Added
    before_mlp: Tensor
    gate_up: Product
    down: Added
    window: int | None


class FlatEngine:
    """See ``engine.Engine``; made by ``engine.build_engine``."""

    def __init__(self, model: PreTrainedModel, vocabulary: int | None = None, *, pack: bool = True):
        config: Any = model.config
        body: Any = model.model
        self.device = model.device
        pack = pack and can_pack(model)
        self.kind = "flat, packed by oneDNN" if pack else "flat"
        self.vocab_size = vocabulary or model.lm_head.weight.shape[0]
        self.limit: int | None = config.max_position_embeddings
        self.layers = len(body.layers)
        attention = body.layers[0].self_attn
        self._dim, self._groups = attention.head_dim, attention.num_key_value_groups
        self._kv_heads = attention.k_proj.out_features // self._dim
        self._scale = attention.scaling
        self._eps = body.norm.variance_epsilon
        self._embed, self._norm = body.embed_tokens.weight.detach(), body.norm.weight.detach()
        self._head = _product([model.lm_head], pack, self.vocab_size)
        self._rope, self._angles = body.rotary_emb, (torch.empty(0), torch.empty(0))
        self._blocks = [_flatten(layer, _window(config, i), pack) for i, layer in enumerate(body.layers)]

    @torch.inference_mode()
    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """See ``Engine.forward``."""
        b, n = tokens.shape
        h = F.embedding(tokens, self._embed)
        cos, sin = self._rotation(block, cache.capacity)
        masks = {w: self._mask(block, w) for w in {layer.window for layer in self._blocks}}
        heads = self._kv_heads * self._groups
        for i, layer in enumerate(self._blocks):
            x = layer.qkv(F.rms_norm(h, h.shape[-1:], layer.before_attention, self._eps))
            x = x.view(b, n, heads + 2 * self._kv_heads, self._dim)
            turning, values = x[:, :, : heads + self._kv_heads], x[:, :, heads + self._kv_heads :]
            turning = turning * cos + _half_turned(turning) * sin
            queries, keys = turning[:, :, :heads], turning[:, :, heads:]
            keys, values = cache.write(i, keys.transpose(1, 2), values.transpose(1, 2), block)
            h = layer.out(self._attend(queries, keys, values, masks[layer.window]), h)
            gate, up = layer.gate_up(F.rms_norm(h, h.shape[-1:], layer.before_mlp, self._eps)).chunk(2, -1)
            h = layer.down(F.silu(gate) * up, h)
        if keep is not None:
            h = h[:, keep]
        h = F.rms_norm(h, h.shape[-1:], self._norm, self._eps)
        return Output(self._head(h), h)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """queries [b, n, heads, D], keys and values [b, kv, end, D] -> [b, n, heads * D]."""
        b, n = queries.shape[:2]
        # Query heads that share a key head become further queries of it: [b, kv, groups * n, D].
        folded = queries.reshape(b, n, self._kv_heads, self._groups, self._dim).permute(0, 2, 3, 1, 4)
        folded = folded.reshape(b, self._kv_heads, self._groups * n, self._dim)
        seen = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=self._scale)
        seen = seen.view(b, self._kv_heads, self._groups, n, self._dim).permute(0, 3, 1, 2, 4)
        return seen.reshape(b, n, -1)

    def _mask(self, block: Block, window: int | None) -> Tensor | None:
        mask = additive(block.visible(window, self.device), self._embed.dtype)
        return None if mask is None else mask.repeat(1, 1, self._groups, 1)

    def _rotation(self, block: Block, capacity: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the block's positions, [b or 1, n, 1, D], from a table made once."""
        if len(self._angles[0]) < capacity:
            positions = torch.arange(capacity, device=self.device)[None]
            cos, sin = self._rope(self._embed[:1], positions)
            self._angles = cos[0], sin[0]
        if block.even and block.tree is None:
            span = slice(block.starts[0], block.end)
            return self._angles[0][None, span, None], self._angles[1][None, span, None]
        positions = block.positions(self.device)
        return self._angles[0][positions][:, :, None], self._angles[1][positions][:, :, None]


def can_pack(model: PreTrainedModel) -> bool:
    """Return whether oneDNN can lay out this model's weights: on the CPU, in float32 or bfloat16."""
    return (
        model.device.type == "cpu"
        and model.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and (model.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def _window(config: Any, layer: int) -> int | None:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer] == "full_attention":
        return None
    return getattr(config, "sliding_window", None)


def _flatten(layer: Any, window: int | None, pack: bool) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        before_attention=layer.input_layernorm.weight.detach(),
        qkv=_product([attention.q_proj, attention.k_proj, attention.v_proj], pack),
        out=_added(attention.o_proj, pack),
        before_mlp=layer.post_attention_layernorm.weight.detach(),
        gate_up=_product([mlp.gate_proj, mlp.up_proj], pack),
        down=_added(mlp.down_proj, pack),
        window=window,
    )


def _stacked(linears: list[nn.Linear], outputs: int | None = None) -> tuple[Tensor, Tensor | None]:
    """Weights and biases of linears that read the same input, one under the other."""
    weights = [linear.weight.detach() for linear in linears]
    weight = (torch.cat(weights) if len(weights) > 1 else weights[0])[:outputs]
    biases = [linear.bias for linear in linears]
    return weight, None if biases[0] is None else torch.cat([b.detach() for b in biases])[:outputs]


def _packed(weight: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR)


def _product(linears: list[nn.Linear], pack: bool, outputs: int | None = None) -> Product:
    """x -> x Wᵀ + bias, its first ``outputs`` numbers."""
    weight, bias = _stacked(linears, outputs)
    if not pack:
        return lambda x: F.linear(x, weight, bias)
    packed, linear = _packed(weight), torch.ops.mkldnn._linear_pointwise.default
    if weight.dtype != torch.float32:
        return lambda x: linear(x, packed, bias, "none", [], "")
    # One token in float32 is bound by memory, and there the plain layout is the faster one to stream.
    return lambda x: F.linear(x, weight, bias) if _one(x) else linear(x, packed, bias, "none", [], "")


def _added(linear: nn.Linear, pack: bool) -> Added:
    """(x, residual) -> residual + x Wᵀ + bias, one kernel where weights are packed."""
    weight, bias = _stacked([linear])
    if not pack:
        return lambda x, residual: residual + F.linear(x, weight, bias)
    packed, fused = _packed(weight), torch.ops.mkldnn._linear_pointwise.binary
    if weight.dtype != torch.float32:
        return lambda x, residual: fused(x, residual, packed, bias, "add")

    def added(x: Tensor, residual: Tensor) -> Tensor:
        return residual + F.linear(x, weight, bias) if _one(x) else fused(x, residual, packed, bias, "add")

    return added


def _one(x: Tensor) -> bool:
    return x.shape[0] * x.shape[1] == 1


def _half_turned(x: Tensor) -> Tensor:
    """(x1, x2) -> (-x2, x1), halves of the last dimension."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)
