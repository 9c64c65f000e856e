"""The forward pass of a decoder as some twenty operations per layer and nothing else.

At one token, most of the time of ``transformers``' forward is Python. Here q, k, v are one product, gate and up are
one, attention folds the query heads that share a key head into the query length, and on the CPU every weight is packed
once (``packed.py``). What a model computes is read by ``structure.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from peftlab.decoding.cache import Ahead, Block, Context, KVCache, additive
from peftlab.decoding.engine import Encoder, Output
from peftlab.decoding.packed import Added, Linear, Product, Products, can_pack
from peftlab.decoding.structure import Angles, LayerStructure, Norm, Structure

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class _Layer:
    """``LayerStructure`` as functions.

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
    """See ``engine.Engine``; made by ``engines.build_engine`` from a model and its structure."""

    encoder: Encoder | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        structure: Structure,
        vocabulary: int | None = None,
        *,
        pack: bool = True,
        features: Sequence[int] = (),
    ):
        products = Products(pack and can_pack(model), model.dtype)
        self.device = model.device
        self.vocab_size = vocabulary or structure.head.weight.shape[0]
        self.limit: int | None = structure.limit
        self.layers = len(structure.layers)
        self._features = tuple(features)
        self._heads, self._kv_heads, self._dim = structure.heads, structure.kv_heads, structure.dim
        self._embedding, self._embedding_scale = structure.embedding, structure.embedding_scale
        self._positions, self._parallel, self._cap = structure.positions, structure.parallel, structure.cap
        self._norm = _normed(structure.norm)
        self._tables = {name: _Table(angles) for name, angles in structure.angles.items()}
        self._layers = [_layer(layer, structure, products) for layer in structure.layers]
        logits, shrink = products.product([structure.head], self.vocab_size)
        self._head: Product = lambda h: logits(h * shrink)
        self.packed = tuple(products.stored)
        self.kind = ", ".join(["flat", *self.packed])

    positioned = True

    def new_cache(self, batch: int, capacity: int, context: Context | None = None) -> KVCache:
        """See ``Engine.new_cache``."""
        return KVCache(self.layers, batch, capacity, context)

    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """See ``Engine.forward``. Tokens that an exit has read in this cache go through the other layers alone."""
        with flat_operations():
            ahead = cache.take_ahead(tokens, block)
            if ahead is None or ahead.features.shape[-1] != self._width(ahead.layers):
                h, entering = self.through(cache, self.embedded(tokens, block), block, range(self.layers))
            else:
                h, entering = self._continued(cache, tokens, block, ahead)
            if self.layers in self._features:
                entering.append(self._norm(h))
            output = self.output(h, keep)
            return replace(output, features=torch.cat(entering, -1) if entering else None)

    def _continued(self, cache: KVCache, tokens: Tensor, block: Block, ahead: Ahead) -> tuple[Tensor, list[Tensor]]:
        """As ``through`` from the embeddings on, where the first layers have read the first tokens."""
        states, features = ahead.states, ahead.features
        rest = block.after(states.shape[1])
        if rest is not None:
            h = self.embedded(tokens[:, -rest.n :], rest)
            h, entering = self.through(cache, h, rest, range(ahead.layers))
            states = torch.cat((states, h), 1)
            features = torch.cat((features, side_by_side(entering, h)), 1)
        h, entering = self.through(cache, states, block, range(ahead.layers, self.layers))
        return h, [features, *entering] if features.shape[-1] else entering

    def _width(self, layers: int) -> int:
        """F of the states that enter the first ``layers`` layers and are to be reported."""
        return self._embedding.shape[1] * sum(layer < layers for layer in self._features)

    def through(
        self,
        cache: KVCache,
        h: Tensor,
        block: Block,
        layers: range,
        skipped: Collection[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Run some layers on the states [b, n, H] that enter them.

        Args:
            skipped: sublayers that are left out: 2i is the attention of layer i, 2i + 1 its MLP.

        Returns:
            The states after them, and those that entered the ones among them that ``features`` names.
        """
        b, n, _ = h.shape
        heads, kv, dim = self._heads, self._kv_heads, self._dim
        rotations = {name: table.rotation(block, cache.capacity, self.device) for name, table in self._tables.items()}
        masks = {w: self._mask(block, w) for w in {self._layers[i].window for i in layers}}
        entering: list[Tensor] = []
        for i in layers:
            layer = self._layers[i]
            if i in self._features:
                entering.append(h)
            after = h
            if 2 * i not in skipped:
                x = layer.qkv(h).view(b, n, heads + 2 * kv, dim)
                if layer.norm_heads is not None:
                    layer.norm_heads(x)
                if layer.angles is not None:
                    rotate(x[:, :, : heads + kv], *rotations[layer.angles])
                keys, values = cache.write(i, x[:, :, heads:].transpose(1, 2), block)
                after = layer.out(self._attend(x[:, :, :heads], keys, values, masks[layer.window], layer), h)
            h = after if 2 * i + 1 in skipped else layer.down(layer.up(h if self._parallel else after), after)
        return h, entering

    def output(self, h: Tensor, keep: list[int] | None = None) -> Output:
        """Return what the final norm and the LM head give for states [..., H] of layers."""
        if keep is not None:
            h = h[:, keep]
        h = self._norm(h)
        logits = self._head(h)
        return Output(logits if self._cap is None else _capped(logits, self._cap), h)

    def embedded(self, tokens: Tensor, block: Block) -> Tensor:
        """Return the states that enter the first layer, [b, n, H]."""
        h = F.embedding(tokens, self._embedding)
        if self._embedding_scale is not None:
            h = h * self._embedding_scale
        if self._positions is not None:
            positions = block.positions(self.device).clamp_max(len(self._positions) - 1)
            h = h + F.embedding(positions, self._positions)
        return h

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, layer: _Layer) -> Tensor:
        """queries [b, n, heads, D], keys and values [b, kv, end, D] -> [b, n, heads * D]."""
        folded = fold_heads(queries, keys.shape[1])
        if layer.cap is None:
            seen = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=layer.scale)
        else:
            products = _capped(folded @ keys.mT * layer.scale, layer.cap)
            products = products if mask is None else products + mask
            seen = products.softmax(-1, dtype=torch.float32).to(values.dtype) @ values
        return unfold_heads(seen, queries.shape[1])

    def _mask(self, block: Block, window: int | None) -> Tensor | None:
        mask = additive(block.visible(window, self.device), self._embedding.dtype)
        groups = self._heads // self._kv_heads
        return None if mask is None else mask.repeat(1, 1, groups, 1)


@contextmanager
def flat_operations() -> Iterator[None]:
    """Within the block a flat engine's parts may be called."""
    # Checking packed weights for overrides of torch's functions would take longer than a small product.
    with torch.inference_mode(), torch._C.DisableTorchFunctionSubclass():
        yield


def side_by_side(states: list[Tensor], like: Tensor) -> Tensor:
    """Return states [b, n, H] one after the other, [b, n, F]; of no width for none."""
    return torch.cat(states, -1) if states else like[..., :0]


class _Table:
    """Cosines and sines of all positions, made once."""

    def __init__(self, angles: Angles):
        self._angles, self._made = angles, (torch.empty(0), torch.empty(0))

    def rotation(self, block: Block, capacity: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the block's positions, [b or 1, n, 1, R]."""
        if len(self._made[0]) < capacity:
            cos, sin = self._angles(torch.arange(capacity, device=device)[None])
            # (x1, x2) becomes (x1 cos - x2 sin, x2 cos + x1 sin): the halves are swapped, and the sign is in the sine.
            first, second = sin[0].chunk(2, -1)
            self._made = cos[0], torch.cat((-first, second), -1)
        if block.even and block.tree is None:
            span = slice(block.starts[0], block.end)
            return self._made[0][None, span, None], self._made[1][None, span, None]
        positions = block.positions(device)
        return self._made[0][positions][:, :, None], self._made[1][positions][:, :, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first R features of heads [b, n, heads, D] in place.

    Args:
        cos, sin: [b or 1, n, 1, R]: (x1, x2) becomes (x1 cos - x2 sin, x2 cos + x1 sin), with the sign in the sine.
    """
    turned = x[..., : cos.shape[-1]]
    torch.addcmul(turned * cos, turned.roll(cos.shape[-1] // 2, -1), sin, out=turned)


def fold_heads(queries: Tensor, kv: int) -> Tensor:
    """Make query heads that share a key head further queries of it: [b, n, heads, D] -> [b, kv, groups * n, D]."""
    b, n, heads, dim = queries.shape
    folded = queries.reshape(b, n, kv, heads // kv, dim)
    return folded[:, 0] if n == 1 else folded.permute(0, 2, 3, 1, 4).flatten(2, 3)


def unfold_heads(seen: Tensor, n: int) -> Tensor:
    """Return what folded queries saw, by token: [b, kv, groups * n, D] -> [b, n, heads * D]."""
    if n > 1:
        seen = seen.unflatten(2, (-1, n)).permute(0, 3, 1, 2, 4)
    return seen.reshape(len(seen), n, -1)


def _layer(layer: LayerStructure, structure: Structure, products: Products) -> _Layer:
    raised = _after(layer.before_mlp, layer.up, products)
    act, gated = structure.activation, structure.gated

    def up(h: Tensor) -> Tensor:
        wide = raised(h)
        if not gated:
            return act(wide)
        gate, factor = wide.chunk(2, -1)
        return act(gate).mul_(factor)

    return _Layer(
        qkv=_after(layer.before_attention, layer.qkv, products),
        norm_heads=_heads_norm(layer, structure),
        out=_before(layer.out, layer.after_attention, products),
        up=up,
        down=_before(layer.down, layer.after_mlp, products),
        scale=layer.scale,
        angles=layer.angles,
        cap=layer.cap,
        window=layer.window,
    )


def _after(norm: Norm | None, linears: Sequence[Linear], products: Products) -> Function:
    """h -> norm(h) Wᵀ + bias; the factor of packed weights is part of the norm's weight."""
    multiply, shrink = products.product(linears)
    if norm is not None:
        normed = _normed(norm, shrink)
        return lambda h: multiply(normed(h))
    return multiply if shrink == 1 else lambda h: multiply(h * shrink)


def _before(linear: Linear, norm: Norm | None, products: Products) -> Added:
    """(x, residual) -> residual + norm(x Wᵀ + bias)."""
    if norm is None:
        return products.added(linear)
    multiply, shrink = products.product([linear])
    normed = _normed(norm)
    return lambda x, residual: residual + normed(multiply(x * shrink))


def _heads_norm(layer: LayerStructure, structure: Structure) -> Callable[[Tensor], None] | None:
    """The norms of queries and keys, in place on [b, n, heads + 2 kv, D]."""
    queries, keys = layer.queries, layer.keys
    if queries is None or keys is None:
        return None
    split, end = structure.heads, structure.heads + structure.kv_heads
    if queries.weight.numel() == structure.dim:
        weight = torch.cat((queries.weight.expand(split, -1), keys.weight.expand(end - split, -1)))
        each = _normed(Norm(weight, queries.eps))

        def by_head(x: Tensor) -> None:
            x[:, :, :end] = each(x[:, :, :end])

        return by_head
    both = ((slice(split), _normed(queries)), (slice(split, end), _normed(keys)))

    def at_once(x: Tensor) -> None:
        for place, normed in both:
            part = x[:, :, place]
            x[:, :, place] = normed(part.flatten(2)).view(part.shape)

    return at_once


def _normed(norm: Norm, factor: float = 1.0) -> Function:
    """h -> factor times its norm, in the operations that take the least time on a handful of rows."""
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


def _capped(x: Tensor, cap: float) -> Tensor:
    return torch.tanh(x / cap) * cap
