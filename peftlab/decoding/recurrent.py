"""The forward pass of state-space models (Mamba): it reads several tokens from the state after the accepted ones.

``transformers`` computes one token from a state, or many from none; verification reads several tokens from the state of
the accepted ones. All products but the recurrence itself are computed for the tokens at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from peftlab.decoding.cache import Block, Context, Encoder, KVCache, Output, paths_of
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


class State(NamedTuple):
    """The state of a layer after the tokens that it has read.

    Attributes:
        window: [..., C, k], the last k inputs of the convolution.
        memory: [..., D, N] (Mamba) or [..., heads, D, N] (Mamba 2), in float32.
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
    mixed, windows = _convolve(mixer, mixed, before.window)
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
    mixed, windows = _convolve(mixer, mixed, before.window)
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


def _convolve(mixer: KnownModel, x: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
    """Return the convolution, activated, of x [b, n, C] after a window [b, C, k], and the window after each token."""
    convolution = mixer.conv1d
    inputs = torch.cat((window, x.mT), -1)  # [b, C, k + n]
    windows = inputs.unfold(-1, window.shape[-1], 1)[:, :, 1:]  # [b, C, n, k]
    out = F.conv1d(inputs[..., 1:], convolution.weight, convolution.bias, groups=len(convolution.weight))
    return mixer.act(out).mT, windows.transpose(1, 2)


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

    A state contains all tokens before it, so that none can be taken back from it: the states after drafted tokens are
    kept until it is known which of them were accepted (``commit``).

    Args:
        batch: rows. capacity: tokens per row, which takes no memory here.
        blank: the state of each layer before the first token.
    """

    def __init__(self, batch: int, capacity: int, blank: Layers):
        super().__init__(0, batch, capacity)
        self._blank = blank
        self._saved: list[dict[int, Layers]] = [{} for _ in range(batch)]

    @property
    def bytes(self) -> int:
        return sum(z.nbytes for row in self._saved for layers in row.values() for state in layers for z in state)

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

    def save(self, row: int, slot: int, state: Layers) -> None:
        """Store the states of all layers before a slot.

        Args:
            row: of the cache. slot: the next to be read. state: of each layer, without a batch dimension.
        """
        self._saved[row][slot] = state

    def copy(self, rows: Sequence[int], capacity: int) -> StateCache:
        copies = StateCache(len(rows), capacity, self._blank)
        copies._saved = [dict(self._saved[row]) for row in rows]
        return copies

    def commit(self, row: int, start: int, nodes: Sequence[int] = ()) -> None:
        saved = self._saved[row]
        state = saved[start + nodes[-1] + 1] if nodes else saved.get(start, self._blank)
        # Clones: a view would keep the states of all rows and tokens of its pass in memory.
        self._saved[row] = {start + len(nodes): [State(*(z.clone() for z in layer)) for layer in state]}

    def select(self, rows: Sequence[int]) -> None:
        self.batch = len(rows)
        self._saved = [self._saved[row] for row in rows]
