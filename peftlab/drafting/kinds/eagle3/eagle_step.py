"""The forward pass of an EAGLE-3 layer while it drafts, as a handful of products and little else."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peftlab.decoding.cache import Block, KVCache
from peftlab.decoding.flat import fold_heads, rotate, unfold_heads
from peftlab.decoding.packed import pack_linears
from peftlab.drafting.kinds.eagle3.eagle_network import Eagle3, EagleLayer, norm_features


class EagleStep(nn.Module):
    """What ``Eagle3`` computes row by row, with a cache; see ``decoding.state_drafters.FeatureNetwork``.

    Queries, keys and values are one product, and so are gate and up.

    Args:
        network: trained; its weights must not change any more. pack: pack them for the CPU.
    """

    def __init__(self, network: Eagle3, pack: bool = True):
        super().__init__()
        shape, layer = network.shape, network.layers[0]
        assert isinstance(layer, EagleLayer)
        self.features, self.vocab_size, self.ranks = network.features, network.vocab_size, network.ranks
        self._heads, self._kv_heads, self._dim, self._eps = shape.heads, shape.kv_heads, shape.head_dim, shape.eps
        self.tokens, self._embedding, self._angles = network.tokens, network.embedding, network.angles
        self._norm_before_residual, self._norm_output = shape.norm_before_residual, shape.norm_output
        self._norm_features = partial(norm_features, network) if shape.norm_before_fc or shape.fc_norm else None
        self._first_norms = torch.stack((layer.input_layernorm.weight, layer.hidden_norm.weight)).detach()
        self._mlp_norm, self._norm = layer.post_attention_layernorm.weight.detach(), network.norm.weight.detach()
        attention, mlp = layer.self_attn, layer.mlp
        self.fc, self.out, self.down = _stacked(network.fc), _stacked(attention.o_proj), _stacked(mlp.down_proj)
        self.qkv = _stacked(attention.q_proj, attention.k_proj, attention.v_proj)
        self.up = _stacked(mlp.gate_proj, mlp.up_proj)
        self.lm_head = _stacked(network.lm_head)
        self._turns = self._angles.new_empty(0)
        if pack:
            pack_linears(self)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._embedding.device

    def fuse(self, features: Tensor) -> Tensor:
        """Return g for the target's states, [..., F] -> [..., H]."""
        features = features.to(self._norm.dtype)
        return self.fc(features if self._norm_features is None else self._norm_features(features))

    def advance(
        self, cache: KVCache, tokens: Tensor, states: Tensor, block: Block, positions: Tensor, visible: Tensor | None
    ) -> Tensor:
        """Return the outputs of rows, and store their keys and values."""
        b, n = tokens.shape
        heads, kv, dim = self._heads, self._kv_heads, self._dim
        both = torch.stack((F.embedding(tokens, self._embedding).to(states.dtype), states), 2)
        both = F.rms_norm(both, both.shape[-1:], eps=self._eps).mul_(self._first_norms)
        residual = both[:, :, 1] if self._norm_before_residual else states
        x = self.qkv(both.flatten(2)).view(b, n, heads + 2 * kv, dim)
        cos, sin = self._rotation(positions, cache.capacity, x.dtype)
        rotate(x[:, :, : heads + kv], cos, sin)
        keys, values = cache.write(0, x[:, :, heads:].transpose(1, 2), block)
        mask = visible if visible is None or n == 1 else visible.repeat(1, 1, heads // kv, 1)
        seen = F.scaled_dot_product_attention(fold_heads(x[:, :, :heads], kv), keys, values, attn_mask=mask)
        hidden = residual + self.out(unfold_heads(seen, n))
        gate, factor = self.up(F.rms_norm(hidden, self._mlp_norm.shape, self._mlp_norm, self._eps)).chunk(2, -1)
        output = hidden + self.down(F.silu(gate).mul_(factor))
        return F.rms_norm(output, self._norm.shape, self._norm, self._eps) if self._norm_output else output

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of ``tokens``, [..., H] -> [..., V_d]."""
        if not self._norm_output:
            states = F.rms_norm(states, self._norm.shape, self._norm, self._eps)
        return self.lm_head(states)

    def _rotation(self, positions: Tensor, capacity: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [b or 1, n, 1, D], of a table of all positions."""
        if len(self._turns) < capacity:
            angles = torch.arange(capacity, device=self.device)[:, None] * self._angles
            # (x1, x2) becomes (x1 cos - x2 sin, x2 cos + x1 sin): the halves are swapped, and the sign is in the sine.
            cos, sin = angles.cos(), angles.sin()
            self._turns = torch.stack((cos, cos, -sin, sin), 1).unflatten(1, (2, 2)).flatten(2).to(dtype)
        cos, sin = self._turns[positions].unbind(2)
        return cos[:, :, None], sin[:, :, None]


def _stacked(*linears: nn.Linear) -> nn.Linear:
    """Return linear maps of the same input as one, their outputs next to one another."""
    with torch.device("meta"):
        whole = nn.Linear(linears[0].in_features, sum(linear.out_features for linear in linears), bias=False)
    weights = [linear.weight.detach() for linear in linears]
    whole.weight = nn.Parameter(torch.cat(weights) if len(weights) > 1 else weights[0], requires_grad=False)
    return whole
