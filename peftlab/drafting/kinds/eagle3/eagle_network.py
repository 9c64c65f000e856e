"""EAGLE-3: one decoder layer over a token's embedding and the target's states (Li et al. 2025, arXiv 2503.01840)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from peftlab.decoding.trees import RankRates

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [b, heads, n, D], keys and values [b, kv_heads, n, D] of new rows -> what they read, [b, heads, n, D]."""


@dataclass(frozen=True)
class EagleShape:
    """The sizes of a network, those of a layer of a Llama.

    Attributes:
        features: layers of the target, rising, whose entering states are fused.
        theta: base of the rotary angles. eps: of the norms. limit: positions of the target.
        norm_before_fc: the target's states are normed together before ``fc``. fc_norm: each is normed on its own.
        norm_before_residual: the residual of the layer is the normed state, which attention reads, too.
        norm_output: the next row reads the output after the final norm, as the LM head does.
        window: how many tokens the layer was trained to see; None: all.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    limit: int
    features: tuple[int, ...]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    window: int | None = None


def usual_features(layers: int) -> tuple[int, ...]:
    """Return which of the target's layers give their entering states: 2, L/2 and L - 3, spread out below 7 layers."""
    three = (2, layers // 2, layers - 3) if layers >= 7 else (layers // 4, layers // 2, layers - 1)
    return tuple(sorted(set(three)))


def shape_for(target: PretrainedConfig, features: tuple[int, ...] | None = None) -> EagleShape:
    """Return the sizes of a network for a target: those of its own layers, where it names them as a Llama does."""
    config = target.get_text_config(decoder=True)
    width = config.hidden_size
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:  # a state-space model, whose ``head_dim`` is not that of an attention
        heads, head_dim = max(1, width // 64), None
    else:
        head_dim = getattr(config, "head_dim", None)
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
    return EagleShape(
        vocab_size=config.vocab_size,
        hidden_size=width,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * width,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim or width // heads,
        eps=float(getattr(config, "rms_norm_eps", None) or 1e-5),
        theta=float(theta),
        limit=getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None) or 2048,
        features=features or usual_features(config.num_hidden_layers),
    )


class RMSNorm(nn.Module):
    """h / rms(h) · w, the root mean square in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(hidden.dtype)


class LayerAttention(nn.Module):
    """Attention of a layer.

    Args:
        width: of what queries, keys and values are read from. norms: whether queries and keys of each head are normed.
    """

    def __init__(self, shape: EagleShape, width: int, *, norms: bool = False):
        super().__init__()
        self.head_dim = shape.head_dim
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(width, wide, bias=False)
        self.k_proj = nn.Linear(width, narrow, bias=False)
        self.v_proj = nn.Linear(width, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden_size, bias=False)
        self.q_norm, self.k_norm = (
            RMSNorm(shape.head_dim, shape.eps) if norms else nn.Identity() for _ in ("queries", "keys")
        )

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        b, n = hidden.shape[:2]
        q, k, v = (
            project(hidden).view(b, n, -1, self.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        seen = attend(_rotated(self.q_norm(q), *rotation), _rotated(self.k_norm(k), *rotation), v)
        return self.o_proj(seen.transpose(1, 2).reshape(b, n, -1))


class LayerMLP(nn.Module):
    """down(SiLU(gate h) · up h)."""

    def __init__(self, shape: EagleShape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class EagleLayer(nn.Module):
    """A decoder layer over [norm(E(x_{t+1})); norm(g_t)]; by ``norm_before_residual`` the residual is the latter."""

    def __init__(self, shape: EagleShape):
        super().__init__()
        self.norm_before_residual = shape.norm_before_residual
        self.self_attn, self.mlp = LayerAttention(shape, 2 * shape.hidden_size), LayerMLP(shape)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            RMSNorm(shape.hidden_size, shape.eps) for _ in range(3)
        )

    def forward(self, embedded: Tensor, states: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        normed = self.hidden_norm(states)
        both = torch.cat((self.input_layernorm(embedded), normed), -1)
        hidden = (normed if self.norm_before_residual else states) + self.self_attn(both, rotation, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class StateNetwork(nn.Module):
    """What drafts from the target's states with frozen rows of its LM head, token by token on its own output.

    Row t reads token t + 1 and a state of the target, or in its place the output of row t - 1; its output is the state
    of the next row and gives the logits of token t + 2.

    Args:
        shape: sizes. embedding: the target's, [V, H]. head: rows of the target's LM head, [V_d, H], frozen.
        tokens: whose rows they are, rising, [V_d]; None for all.

    Attributes:
        norm: between an output and the LM head. ranks: how often each choice is right at each depth, as measured; None:
            not measured.
    """

    ranks: RankRates | None = None
    norm: nn.Module

    def __init__(self, shape: EagleShape, embedding: Tensor, head: Tensor, tokens: Tensor | None = None):
        super().__init__()
        self.shape, self.features, self.vocab_size = shape, shape.features, shape.vocab_size
        self.lm_head = nn.Linear(shape.hidden_size, len(head), bias=False, device="meta")
        self.embedding: Tensor
        self.tokens: Tensor | None
        self.angles: Tensor
        self.register_buffer("embedding", embedding.detach(), persistent=False)
        halves = torch.arange(0, shape.head_dim, 2, device=embedding.device) / shape.head_dim
        self.register_buffer("angles", shape.theta ** -halves.float(), persistent=False)
        self.register_buffer("tokens", None, persistent=False)
        self.draft_only(head, tokens)

    def draft_only(self, head: Tensor, tokens: Tensor | None) -> None:
        """Draft ``tokens`` [V_d] alone, with these rows [V_d, H] of the LM head; None for all."""
        self.lm_head.weight = nn.Parameter(head.detach(), requires_grad=False)
        self.lm_head.out_features = len(head)
        self.tokens = tokens

    def parts_to(self, dtype: torch.dtype, device: torch.device | None = None) -> None:
        """Convert the layer, its norms and the rows of the LM head; the embeddings stay as the target has them."""
        for part in self.children():
            part.to(device, dtype)

    def round(self) -> None:
        """Convert to bfloat16, in which drafts are stored: their steps then read half the bytes.

        Rows of the LM head that bfloat16 would round stay as the target has them.
        """
        head = self.lm_head.weight.detach()
        self.parts_to(torch.bfloat16)
        if not torch.equal(self.lm_head.weight.to(head.dtype), head):
            self.draft_only(head, self.tokens)

    def get_output_embeddings(self) -> nn.Module:
        """Return the rows of the LM head, which no method takes for a linear map of the layer."""
        return self.lm_head

    def draft_ids(self, ids: Tensor) -> Tensor:
        """Return the places of token ids among ``tokens``, -1 for those that cannot be drafted."""
        if self.tokens is None:
            return ids
        places = torch.full((self.vocab_size,), -1, device=ids.device)
        places[self.tokens] = torch.arange(len(self.tokens), device=ids.device)
        return places[ids]

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.lm_head.weight.device

    def fuse(self, features: Tensor) -> Tensor:
        """Return the states that are read for the target's, [..., F] -> [..., H]."""
        raise NotImplementedError

    def layer(self, embedded: Tensor, states: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Return the outputs of rows that read these embeddings and states, [b, n, H] each."""
        raise NotImplementedError

    def rows(self, tokens: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Return the outputs of rows that read these tokens [b, n] and states [b, n, H] at [b or 1, n], [b, n, H]."""
        embedded = F.embedding(tokens, self.embedding).to(states.dtype)
        return self.layer(embedded, states, self._rotation(positions, states.dtype), attend)

    def read_by_head(self, states: Tensor) -> Tensor:
        """Return what the LM head reads of outputs, [..., H] -> [..., H]."""
        return self.norm(states)

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of ``tokens``, [..., H] -> [..., V_d]."""
        return self.lm_head(self.read_by_head(states))

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines, [b or 1, 1, n, D]."""
        angles = (positions[:, None, :, None].float() * self.angles).repeat(1, 1, 1, 2)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class Eagle3(StateNetwork):
    """g_t = fc[h_a; h_b; h_c] of the target's states, one layer over it and the next token, and rows of the LM head.

    The output, before the final norm, is the next g. Norms before ``fc``, in the residual and after the output are
    EAGLE 3.1's, see ``EagleShape``. Parameters are named as in the files of speculators' ``eagle3``; the embeddings are
    the target's and no parameter.
    """

    norm: RMSNorm

    def __init__(self, shape: EagleShape, embedding: Tensor, head: Tensor, tokens: Tensor | None = None):
        super().__init__(shape, embedding, head, tokens)
        width = len(shape.features) * shape.hidden_size
        self.fc = nn.Linear(width, shape.hidden_size, bias=False)
        if shape.norm_before_fc:
            self.input_norm = RMSNorm(width, shape.eps)
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(shape.hidden_size, shape.eps) for _ in shape.features)
        self.layers = nn.ModuleList([EagleLayer(shape)])
        self.norm = RMSNorm(shape.hidden_size, shape.eps)

    def fuse(self, features: Tensor) -> Tensor:
        """See ``StateNetwork``."""
        return self.fc(norm_features(self, features.to(self.fc.weight.dtype)))

    def layer(self, embedded: Tensor, states: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """See ``StateNetwork``."""
        output = self.layers[0](embedded, states, rotation, attend)
        return self.norm(output) if self.shape.norm_output else output

    def read_by_head(self, states: Tensor) -> Tensor:
        """See ``StateNetwork``; with ``norm_output`` the outputs are normed already."""
        return states if self.shape.norm_output else self.norm(states)


def norm_features(network: Eagle3, features: Tensor) -> Tensor:
    """Return the target's states [..., m·H] as ``fc`` of a network reads them: normed together, each alone, or not."""
    if network.shape.norm_before_fc:
        return network.input_norm(features)
    if network.shape.fc_norm:
        parts = features.chunk(len(network.fc_norm), -1)
        return torch.cat([norm(part) for norm, part in zip(network.fc_norm, parts, strict=True)], -1)
    return features


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin
