"""The forward pass of a state-space model (Mamba): several tokens from the state of those accepted before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from peftlab.decoding.engines.base import Encoder, Output
from peftlab.decoding.engines.cache import Block, Context, KVCache
from peftlab.decoding.engines.recurrent.mixers import Mix, State, blank
from peftlab.decoding.engines.recurrent.state_cache import StateCache
from peftlab.decoding.engines.split import paths_of
from peftlab.untyped import KnownModel

_AT_ONCE = 32  # tokens, whose states are in memory together: a long prompt's would take gigabytes


class RecurrentEngine:
    """A state-space model, its layers computed by ``mixers.py``; the rest are the model's own modules.

    Rows of different lengths run together, as a state has no positions. A tree runs as one row for each of its paths. A
    row can continue after each token whose output was asked for.

    Args:
        model: a causal language model. mix: computes its layers. vocabulary, features: see ``build.build_engine``.
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
        """See ``Engine.new_cache``."""
        return StateCache(batch, capacity, self._blank)

    @torch.inference_mode()
    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """See ``Engine.forward``."""
        assert isinstance(cache, StateCache)
        rows, n = block.rows or range(len(tokens)), block.n
        states = cache.load(rows, block.starts)[: self.layers]  # of a draft's: the first layers' of the target's
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
        """Read chains [b, n]; return final states [b, wanted, H], features [b, n, F], and layers' [b, wanted, ...]."""
        parts = []
        for first in range(0, tokens.shape[1], _AT_ONCE):
            some = tokens[:, first : first + _AT_ONCE]
            kept = [i - first for i in wanted if first <= i < first + some.shape[1]]
            hidden, features, after = self._part(some, states)
            states = [State(*(z[:, -1] for z in layer)) for layer in after]
            parts.append((hidden[:, kept], features, [State(*(z[:, kept] for z in layer)) for layer in after]))
        every = list(zip(*(after for _, _, after in parts), strict=True))  # of each layer its parts
        joined = [State(*(torch.cat(z, 1) for z in zip(*layer, strict=True))) for layer in every]
        entering = torch.cat([features for _, features, _ in parts], 1) if self._features else None
        return torch.cat([hidden for hidden, _, _ in parts], 1), entering, joined

    def _part(self, tokens: Tensor, states: list[State]) -> tuple[Tensor, Tensor, list[State]]:
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
