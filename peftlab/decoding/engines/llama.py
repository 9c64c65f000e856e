"""The forward pass of Llama-like models as some twenty operations per layer and nothing else.

At one token, most of the time of ``transformers``' forward is Python. Here q, k, v are one product, gate and
up are one, attention folds the query heads that share a key head into the query length, and on the CPU every weight is
packed once: in float32, weights that 16 bits represent exactly are stored in 16 (FBGEMM), which halves what a step
reads from memory; others are packed by oneDNN, whose products then cost nearly the same for 1 and for 8 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from peftlab.decoding.engines.base import Output
from peftlab.decoding.engines.cache import Block, KVCache, additive

_CLASSES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"})
_PACKED_FOR = 8  # rows that oneDNN packs the weights for; measured no slower at 1 and at 64
_HEADS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_OUT, _GATE_UP, _DOWN = "self_attn.o_proj", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"
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
    body = model.model
    linears = [model.lm_head, *(linear for layer in body.layers for linear in _linears(layer))]
    norms = [n for layer in body.layers for n in (layer.input_layernorm, layer.post_attention_layernorm)]
    return all(type(m) is nn.Linear for m in linears) and all(type(n) is type(body.norm) for n in norms)


def _acting(hook: object) -> bool:
    """Whether a hook may change what is computed; those that ``output_hidden_states`` leaves behind only record."""
    return getattr(hook, "__module__", None) != "transformers.utils.output_capturing"


def _linears(layer: nn.Module) -> list[nn.Module]:
    return [layer.get_submodule(name) for name in (*_HEADS, _OUT, *_GATE_UP, _DOWN)]


@dataclass(frozen=True)
class _Layer:
    before_attention: Tensor
    qkv: Product
    out: Added
    before_mlp: Tensor
    gate_up: Product
    down: Added
    window: int | None


class LlamaEngine:
    """See ``base.Engine``; made by ``build.build_engine``."""

    def __init__(self, model: PreTrainedModel, vocabulary: int | None = None, *, pack: bool = True):
        config, body = model.config, model.model
        self.device = model.device
        pack = pack and can_pack(model)
        self.vocab_size = vocabulary or model.lm_head.weight.shape[0]
        self.limit: int | None = config.max_position_embeddings
        self.layers = len(body.layers)
        attention = body.layers[0].self_attn
        self._dim, self._groups = attention.head_dim, attention.num_key_value_groups
        self._kv_heads = attention.k_proj.out_features // self._dim
        self._scale = attention.scaling
        self._eps = torch.tensor(body.norm.variance_epsilon, device=self.device)
        self._embed, self._norm = body.embed_tokens.weight.detach(), body.norm.weight.detach()
        head, shrink = _product([model.lm_head], pack, self.vocab_size)
        self._head: Product = lambda h: head(h * shrink)
        packing = "weights in 16 bits" if shrink != 1 else "packed by oneDNN"
        self.kind = f"flat, {packing}" if pack else "flat"
        self._rope, self._angles = body.rotary_emb, (torch.empty(0), torch.empty(0))
        self._blocks = [_flatten(layer, _window(config, i), pack) for i, layer in enumerate(body.layers)]

    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """See ``Engine.forward``."""
        # Checking packed weights for overrides of torch's functions would take longer than a small product.
        with torch.inference_mode(), torch._C.DisableTorchFunctionSubclass():
            return self._forward(cache, tokens, block, keep)

    def _forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None) -> Output:
        b, n = tokens.shape
        h = F.embedding(tokens, self._embed)
        cos, sin = self._rotation(block, cache.capacity)
        masks = {w: self._mask(block, w) for w in {layer.window for layer in self._blocks}}
        heads = self._kv_heads * self._groups
        for i, layer in enumerate(self._blocks):
            x = layer.qkv(self._normed(h, layer.before_attention))
            x = x.view(b, n, heads + 2 * self._kv_heads, self._dim)
            rotated = x[:, :, : heads + self._kv_heads]
            torch.addcmul(rotated * cos, rotated.roll(self._dim // 2, -1), sin, out=rotated)
            keys, values = cache.write(i, x[:, :, heads:].transpose(1, 2), block)
            h = layer.out(self._attend(x[:, :, :heads], keys, values, masks[layer.window]), h)
            gate, up = layer.gate_up(self._normed(h, layer.before_mlp)).chunk(2, -1)
            h = layer.down(F.silu(gate).mul_(up), h)
        if keep is not None:
            h = h[:, keep]
        h = self._normed(h, self._norm)
        return Output(self._head(h), h)

    def _normed(self, h: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm in the operations that take the least time on a handful of rows; rounded as ``transformers`` does."""
        wide = h.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = torch.addcmul(self._eps, length, length, value=1 / h.shape[-1]).rsqrt_()
        return wide.mul(inverse).to(h.dtype).mul_(weight)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """queries [b, n, heads, D], keys and values [b, kv, end, D] -> [b, n, heads * D]."""
        b, n = queries.shape[:2]
        # Query heads that share a key head become further queries of it: [b, kv, groups * n, D].
        folded = queries.view(b, n, self._kv_heads, self._groups, self._dim)
        folded = folded[:, 0] if n == 1 else folded.permute(0, 2, 3, 1, 4).flatten(2, 3)
        seen = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=self._scale)
        if n > 1:
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
            # (x1, x2) becomes (x1 cos - x2 sin, x2 cos + x1 sin): the halves are swapped, and the sign is in the sine.
            first, second = sin[0].chunk(2, -1)
            self._angles = cos[0], torch.cat((-first, second), -1)
        if block.even and block.tree is None:
            span = slice(block.starts[0], block.end)
            return self._angles[0][None, span, None], self._angles[1][None, span, None]
        positions = block.positions(self.device)
        return self._angles[0][positions][:, :, None], self._angles[1][positions][:, :, None]


def can_pack(model: PreTrainedModel) -> bool:
    """Return whether this model's weights can be packed for the CPU: with oneDNN, in float32 or bfloat16."""
    return (
        model.device.type == "cpu"
        and model.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and (model.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def _window(config: PretrainedConfig, layer: int) -> int | None:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer] == "full_attention":
        return None
    return getattr(config, "sliding_window", None)


def _flatten(layer: nn.Module, window: int | None, pack: bool) -> _Layer:
    qkv, shrink_heads = _product([_linear(layer, name) for name in _HEADS], pack)
    gate_up, shrink_mlp = _product([_linear(layer, name) for name in _GATE_UP], pack)
    return _Layer(
        before_attention=layer.get_parameter("input_layernorm.weight").detach() * shrink_heads,
        qkv=qkv,
        out=_added(_linear(layer, _OUT), pack),
        before_mlp=layer.get_parameter("post_attention_layernorm.weight").detach() * shrink_mlp,
        gate_up=gate_up,
        down=_added(_linear(layer, _DOWN), pack),
        window=window,
    )


def _linear(layer: nn.Module, name: str) -> nn.Linear:
    linear = layer.get_submodule(name)
    assert isinstance(linear, nn.Linear)  # see ``flattens``
    return linear


def _stacked(linears: list[nn.Linear], outputs: int | None = None) -> tuple[Tensor, Tensor | None]:
    """Weights and biases of linears that read the same input, stacked along the outputs."""
    weights = [linear.weight.detach() for linear in linears]
    weight = (torch.cat(weights) if len(weights) > 1 else weights[0])[:outputs]
    biases = [linear.bias for linear in linears]
    return weight, None if biases[0] is None else torch.cat([b.detach() for b in biases])[:outputs]


def _product(linears: list[nn.Linear], pack: bool, outputs: int | None = None) -> tuple[Product, float]:
    """x -> (x / shrink) Wᵀ + bias, its first ``outputs`` numbers; and shrink, a factor of the norm before it."""
    weight, bias = _stacked(linears, outputs)
    if not pack:
        return lambda x: F.linear(x, weight, bias), 1.0
    if (grow := growth(weight)) is not None:
        return _half(weight * grow, bias), 1 / grow
    packed, linear = _packed(weight), torch.ops.mkldnn._linear_pointwise.default
    if weight.dtype != torch.float32:
        return lambda x: linear(x, packed, bias, "none", [], ""), 1.0
    # One token in float32 is bound by memory, and there the plain layout is the faster one to stream.
    return lambda x: F.linear(x, weight, bias) if _one(x) else linear(x, packed, bias, "none", [], ""), 1.0


def _added(linear: nn.Linear, pack: bool) -> Added:
    """(x, residual) -> residual + x Wᵀ + bias, one kernel where oneDNN packed the weights."""
    weight, bias = _stacked([linear])
    if not pack:
        return lambda x, residual: residual + F.linear(x, weight, bias)
    if (grow := growth(weight)) is not None:
        product, shrink = _half(weight * grow, None if bias is None else bias * grow), 1 / grow
        return lambda x, residual: torch.add(residual, product(x), alpha=shrink)
    packed, fused = _packed(weight), torch.ops.mkldnn._linear_pointwise.binary
    if weight.dtype != torch.float32:
        return lambda x, residual: fused(x, residual, packed, bias, "add")

    def added(x: Tensor, residual: Tensor) -> Tensor:
        return residual + F.linear(x, weight, bias) if _one(x) else fused(x, residual, packed, bias, "add")

    return added


def _packed(weight: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR)


def growth(weight: Tensor) -> float | None:
    """The power of two that moves float32 weights into float16 without rounding a single one; None where none does.

    Checkpoints in bfloat16 or float16 contain numbers that float16 represents, too, once the largest is
    moved to the top of its range: with activations, products and sums in float32, the result is the same from half the
    bytes.
    """
    if (
        weight.dtype != torch.float32
        or not torch.any(weight)
        or "fbgemm" not in torch.backends.quantized.supported_engines
    ):
        return None
    grow = 2.0 ** (15 - int(torch.frexp(weight.abs().max()).exponent))
    grown = weight * grow
    return grow if torch.equal(grown.half().float(), grown) else None


def _half(weight: Tensor, bias: Tensor | None) -> Product:
    """x -> x Wᵀ + bias in float32, the weights kept in 16 bits."""
    packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
    linear = torch.ops.quantized.linear_dynamic_fp16.default
    return lambda x: linear(x, packed)


def _one(x: Tensor) -> bool:
    return x.shape[0] * x.shape[1] == 1
