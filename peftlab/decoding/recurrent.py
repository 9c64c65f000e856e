"""The forward pass of models with a state (Mamba; hybrids of attention and linear attention, Qwen3-Next and Qwen3.5).

Verification reads several tokens from the state after the accepted ones, and may continue after any of them, where
``transformers`` keeps the state after the last one alone. All products but the recurrence itself are computed for the
tokens at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from peftlab.decoding.cache import (
    Block,
    Context,
    Encoder,
    KVCache,
    Output,
    additive_mask,
    paths_of,
)
from peftlab.models.load import max_positions
from peftlab.untyped import KnownModel

_MAX_TOKENS = 32  # tokens of a pass: the states after each are in memory together, gigabytes for a long prompt


class RecurrentEngine:
    """An engine of a state-space model: its layers are computed here, the rest by the model's own modules.

    Rows of different lengths run together, as a state has no positions. A tree runs as one row for each of its paths. A
    row can continue after each token whose output was asked for.

    Args:
        model: a causal language model. mix: computes its layers. vocabulary, features: see ``engines.build_engine``.
    """

    def __init__(
        self, model: PreTrainedModel, mix: Mix, vocabulary: int | None = None, *, features: Sequence[int] = ()
    ):
        known: KnownModel = model
        self._body, self._head = known.backbone, known.lm_head
        self._mix, self._features = mix, tuple(features)
        self.kind = "states, trees path by path"
        self.positioned = False
        self.packed: tuple[str, ...] = ()
        self.encoder: Encoder | None = None
        self.limit: int | None = None
        self.device = model.device
        self.vocab_size = vocabulary or self._head.weight.shape[0]
        self.layers = len(self._body.layers)
        self._blank = [blank(layer.mixer, model.dtype, self.device) for layer in self._body.layers]

    def new_cache(self, batch: int, capacity: int, context: Context | None = None) -> StateCache:
        """Return an empty cache; see ``Engine.new_cache``."""
        return StateCache(batch, capacity, self._blank)

    @torch.inference_mode()
    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """Run this engine on new tokens; see ``Engine.forward``."""
        assert isinstance(cache, StateCache)
        rows, n = block.rows or range(len(tokens)), block.n
        states = cache.load(rows, block.starts)[: self.layers]  # a draft of the first layers shares the cache
        wanted = list(range(n)) if keep is None else keep
        if block.tree is None:
            hidden, features, after = self._read(tokens, states, wanted)
        else:
            paths = paths_of(block.tree.below.to(self.device))
            longest = list(range(paths.nodes.shape[1]))
            states = [State(*(z[paths.row] for z in layer)) for layer in states]
            hidden, features, after = self._read(tokens[paths.row[:, None], paths.nodes], states, longest)
            place = paths.path[:, wanted], paths.depth[:, wanted]
            hidden, after = hidden[place], [State(*(z[place] for z in layer)) for layer in after]
            features = None if features is None else features[paths.path, paths.depth]
        for i, (row, start) in enumerate(zip(rows, block.starts, strict=True)):
            for j, node in enumerate(wanted):
                cache.save(row, start + node + 1, [State(*(z[i, j] for z in layer)) for layer in after])
        return Output(self._head(hidden).float()[..., : self.vocab_size], hidden, features)

    def _read(
        self, tokens: Tensor, states: list[State], wanted: Sequence[int]
    ) -> tuple[Tensor, Tensor | None, list[State]]:
        """Return hidden states [b, wanted, H], features [b, n, F], layers' states [b, wanted, ...] of chains [b, n]."""
        parts = []
        for first in range(0, tokens.shape[1], _MAX_TOKENS):
            some = tokens[:, first : first + _MAX_TOKENS]
            kept = [i - first for i in wanted if first <= i < first + some.shape[1]]
            hidden, features, after = self._read_part(some, states)
            states = [State(*(z[:, -1] for z in layer)) for layer in after]
            parts.append((hidden[:, kept], features, [State(*(z[:, kept] for z in layer)) for layer in after]))
        every = list(zip(*(after for _, _, after in parts), strict=True))  # of each layer its parts
        joined = [State(*(torch.cat(z, 1) for z in zip(*layer, strict=True))) for layer in every]
        entering = torch.cat([features for _, features, _ in parts], 1) if self._features else None
        return torch.cat([hidden for hidden, _, _ in parts], 1), entering, joined

    def _read_part(self, tokens: Tensor, states: list[State]) -> tuple[Tensor, Tensor, list[State]]:
        h = self._body.embeddings(tokens)
        entering, after = [], []
        for i, (layer, before) in enumerate(zip(self._body.layers, states, strict=True)):
            if i in self._features:
                entering.append(h)
            mixed, states_after = self._mix(layer.mixer, layer.norm(h.to(layer.norm.weight.dtype)), before)
            h = (h.float() if layer.residual_in_fp32 else h) + mixed
            after.append(states_after)
        h = self._body.norm_f(h).to(self._head.weight.dtype)
        if self.layers in self._features:
            entering.append(h)
        return h, torch.cat(entering, -1) if entering else h, after


class HybridEngine:
    """An engine of a model whose layers are some attention, some linear attention with a state (gated DeltaNet).

    Attention reads keys and values from the cache, as in other engines; the states are as those of ``RecurrentEngine``.
    Rows of different lengths run together. A tree runs as one row for each of its paths.

    Args:
        model: a causal language model, one of ``HYBRIDS``. vocabulary, features: see ``engines.build_engine``.
    """

    def __init__(self, model: PreTrainedModel, vocabulary: int | None = None, *, features: Sequence[int] = ()):
        known: KnownModel = model
        self._body, self._head, self._features = known.model, known.lm_head, tuple(features)
        self.kind = "attention and states, trees path by path"
        self.positioned = False
        self.packed: tuple[str, ...] = ()
        self.encoder: Encoder | None = None
        self.limit = max_positions(model.config.get_text_config(decoder=True))
        self.device, self._dtype = model.device, model.dtype
        self.vocab_size = vocabulary or self._head.weight.shape[0]
        self.layers = len(self._body.layers)
        linear = [layer.linear_attn for layer in self._body.layers if layer.block_type == "linear_attention"]
        self._attending = self.layers - len(linear)
        self._blank = [blank_delta(mixer, model.dtype, self.device) for mixer in linear]

    def new_cache(self, batch: int, capacity: int, context: Context | None = None) -> StateCache:
        """Return an empty cache; see ``Engine.new_cache``."""
        return StateCache(batch, capacity, self._blank, self._attending)

    @torch.inference_mode()
    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """Run this engine on new tokens; see ``Engine.forward``."""
        assert isinstance(cache, StateCache)
        wanted = list(range(block.n)) if keep is None else keep
        if block.tree is None:
            return self._read_chains(cache, tokens, block, wanted)
        paths = paths_of(block.tree.below.to(self.device))
        slots, rows = block.rows or range(len(tokens)), paths.row.tolist()
        starts, longest = tuple(block.starts[row] for row in rows), paths.nodes.shape[1]
        copies = cache.copy([slots[row] for row in rows], max(starts) + longest)
        chains = tokens[paths.row[:, None], paths.nodes]
        out = self._read_chains(copies, chains, Block(starts, longest), list(range(longest)))
        for i, stored in enumerate(copies.states):
            if stored is not None:  # [paths, 2 H_kv, capacity, D]
                slot = torch.tensor(block.starts, device=stored.device)[:, None] + paths.depth
                cache.write(i, stored[paths.path, :, slot].transpose(1, 2), block)
        for i, start in enumerate(block.starts):
            for node in wanted:
                path, depth = int(paths.path[i, node]), int(paths.depth[i, node])
                cache.save(slots[i], start + node + 1, copies.saved(path, start + depth + 1))
        hidden, logits = (x[paths.path[:, wanted], paths.depth[:, wanted]] for x in (out.hidden, out.logits))
        features = None if out.features is None else out.features[paths.path, paths.depth]
        return Output(logits, hidden, features)

    def _read_chains(self, cache: StateCache, tokens: Tensor, block: Block, wanted: list[int]) -> Output:
        """Read chains, tokens [b, n]; store keys and values of all, and the states after those that are wanted."""
        rows, h = block.rows or range(len(tokens)), self._body.embed_tokens(tokens)
        positions = block.positions(self.device).expand(len(tokens), -1)
        if self.limit is not None:
            positions = positions.clamp_max(self.limit - 1)  # of rows that are at the end, and draft nothing
        angles = self._body.rotary_emb(h, positions)
        visible = block.visible(None, self.device)
        if visible is None:
            visible = torch.ones(1, 1, block.n, block.end, dtype=torch.bool, device=self.device)
        mask = additive_mask(visible.expand(len(tokens), -1, -1, -1), self._dtype)
        states, entering, after, attending = iter(cache.load(rows, block.starts)), [], [], 0
        for i, layer in enumerate(self._body.layers):
            if i in self._features:
                entering.append(h)
            normed = layer.input_layernorm(h)
            if layer.block_type == "linear_attention":
                mixed, states_after = _delta(layer.linear_attn, normed, next(states), wanted)
                after.append(states_after)
            else:
                mixed, _ = layer.self_attn(
                    hidden_states=normed,
                    position_embeddings=angles,
                    attention_mask=mask,
                    past_key_values=_Slots(cache, block, attending),
                )
                attending += 1
            h = h + mixed
            read = layer.mlp(layer.post_attention_layernorm(h))
            h = h + (read[0] if isinstance(read, tuple) else read)
        for i, (row, start) in enumerate(zip(rows, block.starts, strict=True)):
            for j, node in enumerate(wanted):
                cache.save(row, start + node + 1, [State(*(z[i, j] for z in layer)) for layer in after])
        h = self._body.norm(h)
        if self.layers in self._features:
            entering.append(h)
        hidden = h[:, wanted]
        features = torch.cat(entering, -1) if entering else None
        return Output(self._head(hidden)[..., : self.vocab_size], hidden, features)


class _Slots:
    """One attention layer's part of a ``KVCache``, as the attention of ``transformers`` calls it."""

    def __init__(self, cache: KVCache, block: Block, layer: int):
        self._cache, self._block, self._layer = cache, block, layer

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Store keys and values [b, H_kv, n, D], and return all that the block's tokens may see."""
        return self._cache.update(self._layer, keys, values, self._block)


class State(NamedTuple):
    """The state of a layer after the tokens that it has read.

    Attributes:
        window: [..., C, k], the last k inputs of the convolution.
        memory: [..., D, N] (Mamba) or [..., heads, D, N] (Mamba 2, gated DeltaNet), in float32.
    """

    window: Tensor
    memory: Tensor


Mix = Callable[[KnownModel, Tensor, State], tuple[Tensor, State]]
"""(a layer's mixer, inputs [b, n, H], states before [b, ...]) -> outputs [b, n, H], states after each [b, n, ...]."""


def blank(mixer: KnownModel, dtype: torch.dtype, device: torch.device) -> State:
    """Return the state of a layer before the first token, without a batch dimension.

    Args:
        mixer: of the layer. dtype: of the window. device: of both parts.
    """
    channels, kernel = mixer.conv1d.weight.shape[0], mixer.conv_kernel_size
    heads = (mixer.num_heads, mixer.head_dim) if hasattr(mixer, "num_heads") else (mixer.intermediate_size,)
    return State(
        torch.zeros(channels, kernel, dtype=dtype, device=device),
        torch.zeros(*heads, mixer.ssm_state_size, device=device),
    )


def _mamba(mixer: KnownModel, x: Tensor, before: State) -> tuple[Tensor, State]:
    """Compute a layer of Mamba (Gu and Dao 2023, arXiv 2312.00752) or FalconMamba, which norms B, C and the step."""
    mixed, gate = mixer.in_proj(x).chunk(2, -1)
    mixed, windows = _convolve(mixer.conv1d, mixer.act, mixed, before.window)
    size = mixer.ssm_state_size
    step, b, c = mixer.x_proj(mixed).split([mixer.time_step_rank, size, size], -1)
    if hasattr(mixer, "dt_layernorm"):
        step, b, c = mixer.dt_layernorm(step), mixer.b_layernorm(b), mixer.c_layernorm(c)
    step = F.softplus(F.linear(step, mixer.dt_proj.weight) + mixer.dt_proj.bias.float())[..., None]  # [b, n, D, 1]
    decay = torch.exp(step * -torch.exp(mixer.A_log.float()))
    memories = _recurrence(before.memory, decay, step * b[..., None, :].float() * mixed[..., None].float())
    y = (memories.to(c.dtype) @ c[..., None])[..., 0] + mixed * mixer.D.float()
    return mixer.out_proj((y * F.silu(gate)).to(x.dtype)), State(windows, memories)


def _mamba2(mixer: KnownModel, x: Tensor, before: State) -> tuple[Tensor, State]:
    """Compute a layer of Mamba 2 (Dao and Gu 2024, arXiv 2405.21060): a decay for each head, B and C for groups."""
    heads, size, groups = mixer.num_heads, mixer.ssm_state_size, mixer.n_groups
    gate, mixed, step = mixer.in_proj(x).split([mixer.intermediate_size, mixer.conv_dim, heads], -1)
    mixed, windows = _convolve(mixer.conv1d, mixer.act, mixed, before.window)
    values, b, c = mixed.float().split([mixer.intermediate_size, groups * size, groups * size], -1)
    b, c = (z.unflatten(-1, (groups, size)).repeat_interleave(heads // groups, -2) for z in (b, c))  # [b, n, heads, N]
    values = values.unflatten(-1, (heads, -1))  # [b, n, heads, D]
    step = F.softplus(step + mixer.dt_bias).clamp(*mixer.time_step_limit).float()
    decay = torch.exp(step * -torch.exp(mixer.A_log.float()))[..., None, None]
    memories = _recurrence(before.memory, decay, (step[..., None] * values)[..., None] * b[..., None, :])
    y = (memories @ c[..., None])[..., 0] + values * mixer.D[:, None]
    return mixer.out_proj(mixer.norm(y.flatten(-2), gate).to(x.dtype)), State(windows, memories)


MIXERS: dict[str, Mix] = {
    "MambaForCausalLM": _mamba,
    "FalconMambaForCausalLM": _mamba,
    "Mamba2ForCausalLM": _mamba2,
}
"""Class of a state-space model -> what computes its layers."""


HYBRIDS = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
"""Classes of models that ``HybridEngine`` computes."""


def blank_delta(mixer: KnownModel, dtype: torch.dtype, device: torch.device) -> State:
    """Return the state of a gated DeltaNet before the first token, without a batch dimension.

    Args:
        mixer: of the layer. dtype: of the window. device: of both parts.
    """
    return State(
        torch.zeros(mixer.conv_dim, mixer.conv_kernel_size, dtype=dtype, device=device),
        torch.zeros(mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim, device=device),
    )


def _delta(mixer: KnownModel, x: Tensor, before: State, wanted: Sequence[int]) -> tuple[Tensor, State]:
    """Compute a gated DeltaNet (Yang et al. 2024, arXiv 2412.06464) of inputs [b, n, H].

    The memory decays, then the value that it has for a key moves towards the token's: S ← γ S + k (β (v - γ Sᵀ k))ᵀ.

    Returns:
        Outputs [b, n, H], and the states after the wanted tokens, [b, wanted, ...].
    """
    if hasattr(mixer, "in_proj_qkvz"):
        parts = mixer.fix_query_key_value_ordering(mixer.in_proj_qkvz(x), mixer.in_proj_ba(x))
        *qkv, z, b, a = parts
        mixed = torch.cat([part.flatten(2) for part in qkv], -1)
    else:
        mixed, b, a = mixer.in_proj_qkv(x), mixer.in_proj_b(x), mixer.in_proj_a(x)
        z = mixer.in_proj_z(x).unflatten(-1, (-1, mixer.head_v_dim))
    mixed, windows = _convolve(mixer.conv1d, ACT2FN[mixer.activation], mixed, before.window)
    q, k, v = mixed.float().split([mixer.key_dim, mixer.key_dim, mixer.value_dim], -1)
    q, k = (part.unflatten(-1, (mixer.num_k_heads, -1)) for part in (q, k))
    q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
    q, k = (part.repeat_interleave(mixer.num_v_heads // mixer.num_k_heads, 2) for part in (q, k))  # [b, n, heads, K]
    q, v = q * mixer.head_k_dim**-0.5, v.unflatten(-1, (mixer.num_v_heads, -1))
    decay = torch.exp(-mixer.A_log.float().exp() * F.softplus(a.float() + mixer.dt_bias))  # [b, n, heads]
    rate, memory, kept, outputs = b.sigmoid().float(), before.memory, {}, []
    for t in range(x.shape[1]):
        memory = memory * decay[:, t, :, None, None]  # [b, heads, K, V]
        known = (memory * k[:, t, :, :, None]).sum(-2)
        change = (v[:, t] - known) * rate[:, t, :, None]
        memory = memory + k[:, t, :, :, None] * change[:, :, None]
        outputs.append((memory * q[:, t, :, :, None]).sum(-2))
        if t in wanted:
            kept[t] = memory
    y = mixer.norm(torch.stack(outputs, 1).to(x.dtype).flatten(0, 2), z.flatten(0, 2))
    after = State(windows[:, list(wanted)], torch.stack([kept[t] for t in wanted], 1))
    return mixer.out_proj(y.view(*x.shape[:2], -1)), after


def _convolve(
    convolution: nn.Conv1d, activation: Callable[[Tensor], Tensor], x: Tensor, window: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the convolution, activated, of x [b, n, C] after a window [b, C, k], and the window after each token."""
    inputs = torch.cat((window, x.mT), -1)  # [b, C, k + n]
    windows = inputs.unfold(-1, window.shape[-1], 1)[:, :, 1:]  # [b, C, n, k]
    out = F.conv1d(inputs[..., 1:], convolution.weight, convolution.bias, groups=len(convolution.weight))
    return activation(out).mT, windows.transpose(1, 2)


def _recurrence(memory: Tensor, decay: Tensor, added: Tensor) -> Tensor:
    """Return m_t = decay_t m_{t-1} + added_t for each t, [b, n, ...], with m_0 = ``memory`` [b, ...]."""
    memories = []
    for factor, new in zip(decay.unbind(1), added.unbind(1), strict=True):
        memory = torch.addcmul(new, factor, memory)
        memories.append(memory)
    return torch.stack(memories, 1)


Layers = Sequence[State]
"""A state of each layer."""


class StateCache(KVCache):
    """A cache that has, for each row, the layer states before every slot from which the row may continue.

    Attention layers between them have keys and values.

    A state contains all tokens before it, so that none can be taken back from it: the states after drafted tokens are
    kept until it is known which of them were accepted (``commit``).

    Args:
        batch: rows. capacity: tokens per row, which takes no memory for the states.
        blank: the state of each layer before the first token. attending: number of attention layers.
    """

    keeps_states = True

    def __init__(self, batch: int, capacity: int, blank: Layers, attending: int = 0):
        super().__init__(attending, batch, capacity)
        self._blank = blank
        self._saved: list[dict[int, Layers]] = [{} for _ in range(batch)]

    @property
    def bytes(self) -> int:
        return super().bytes + sum(
            z.nbytes for row in self._saved for layers in row.values() for state in layers for z in state
        )

    def load(self, rows: Sequence[int], starts: Sequence[int]) -> list[State]:
        """Return the states of each layer before these slots, [b, ...]; a row that starts at 0 begins anew.

        Args:
            rows: of the cache. starts: slot of each row.
        """
        for row, start in zip(rows, starts, strict=True):
            if start == 0:
                self._saved[row] = {0: self._blank}
        each = [self._saved[row][start] for row, start in zip(rows, starts, strict=True)]
        return [State(*map(torch.stack, zip(*layer, strict=True))) for layer in zip(*each, strict=True)]

    def saved(self, row: int, slot: int) -> Layers:
        """Return the states of all layers of a row before a slot."""
        return self._saved[row][slot]

    def save(self, row: int, slot: int, state: Layers) -> None:
        """Store the states of all layers before a slot.

        Args:
            row: of the cache. slot: the next to be read. state: of each layer, without a batch dimension.
        """
        self._saved[row][slot] = state

    def copy(self, rows: Sequence[int], capacity: int) -> StateCache:
        copies = StateCache(len(rows), capacity, self._blank, len(self.states))
        copies.states = super().copy(rows, capacity).states
        copies._saved = [dict(self._saved[row]) for row in rows]
        return copies

    def commit(self, row: int, start: int, nodes: Sequence[int] = ()) -> None:
        super().commit(row, start, nodes)
        saved = self._saved[row]
        state = saved[start + nodes[-1] + 1] if nodes else saved.get(start, self._blank)
        # Clones: a view would keep the states of all rows and tokens of its pass in memory.
        self._saved[row] = {start + len(nodes): [State(*(z.clone() for z in layer)) for layer in state]}

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self._saved = [self._saved[row] for row in rows]
