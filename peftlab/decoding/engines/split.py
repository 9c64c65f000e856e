"""Exact steps for models whose own forward is exact for simpler blocks only: a block is split into such blocks.

Some architectures place tokens by their slot instead of the position that they are given (ALiBi, GPT-Neo's
local layers) or build their own mask. Such a model reads rows of different lengths in several passes, and a tree as one
row per path from the root to a leaf. Both return what the single rows would have returned, at the price of more work.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peftlab.decoding.engines.base import Engine, Output
from peftlab.decoding.engines.cache import Block, KVCache


class EqualLengths:
    """An engine that runs rows of one length at a time."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self.kind = f"{engine.kind}, rows of one length at a time"
        self.vocab_size, self.limit = engine.vocab_size, engine.limit
        self.layers, self.device, self.encoder = engine.layers, engine.device, engine.encoder

    @torch.inference_mode()
    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """See ``Engine.forward``."""
        by_start: dict[int, list[int]] = defaultdict(list)
        for place, start in enumerate(block.starts):
            by_start[start].append(place)
        slots = block.rows or range(len(block.starts))
        wanted = list(range(block.n)) if keep is None else keep
        logits = hidden = torch.empty(0)
        features: Tensor | None = None
        for start, places in by_start.items():
            # A model that places tokens by their slots has none past its limit.
            n = block.n if self.limit is None or block.tree else min(block.n, self.limit - start)
            kept = [i for i, place in enumerate(wanted) if place < n]
            if not kept:
                continue
            rows = block.rows if len(by_start) == 1 else tuple(slots[place] for place in places)
            part = replace(block, starts=(start,) * len(places), n=n, rows=rows)
            out = self._engine.forward(cache, tokens[places, :n], part, [wanted[i] for i in kept])
            if not len(logits):
                logits, hidden = (x.new_zeros(len(tokens), len(wanted), x.shape[-1]) for x in (out.logits, out.hidden))
            rectangle = torch.tensor(places)[:, None], torch.tensor(kept)
            logits[rectangle], hidden[rectangle] = out.logits, out.hidden
            if out.features is not None:
                if features is None:
                    features = out.features.new_zeros(*tokens.shape, out.features.shape[-1])
                features[places, :n] = out.features
        return Output(logits, hidden, features)


class PathByPath:
    """An engine that runs a tree as chains: one copy of the row for each leaf."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self.kind = f"{engine.kind}, trees path by path"
        self.vocab_size, self.limit = engine.vocab_size, engine.limit
        self.layers, self.device, self.encoder = engine.layers, engine.device, engine.encoder

    @torch.inference_mode()
    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """See ``Engine.forward``."""
        if block.tree is None:
            return self._engine.forward(cache, tokens, block, keep)
        paths = _paths(block.tree[1].to(self.device))
        b, (leaves, n) = len(tokens), paths.nodes.shape
        starts = tuple(start for start in block.starts for _ in range(leaves))
        slots = [slot for slot in block.rows or range(b) for _ in range(leaves)]
        copies = cache.copy(slots, max(starts) + n)
        out = self._engine.forward(copies, tokens[:, paths.nodes].flatten(0, 1), Block(starts, n))
        for layer, stored in enumerate(copies.states):
            if stored is not None:  # [b * leaves, 2 H_kv, capacity, D]
                slot = torch.tensor(block.starts, device=stored.device)[:, None] + paths.depth
                row = torch.arange(b, device=stored.device)[:, None] * leaves + paths.leaf
                cache.write(layer, stored[row, :, slot].transpose(1, 2), block)
        wanted = slice(None) if keep is None else keep
        logits, hidden = (x.unflatten(0, (b, leaves))[:, paths.leaf, paths.depth] for x in (out.logits, out.hidden))
        features = None
        if out.features is not None:
            features = out.features.unflatten(0, (b, leaves))[:, paths.leaf, paths.depth]
        return Output(logits[:, wanted], hidden[:, wanted], features)


@dataclass(frozen=True)
class _Paths:
    """The paths of a tree of n nodes, and where each node is first found in them.

    Attributes:
        nodes: [leaves, longest], a leaf repeated up to the length of the longest path.
        leaf, depth: [n], each node's place in ``nodes``.
    """

    nodes: Tensor
    leaf: Tensor
    depth: Tensor


def _paths(below: Tensor) -> _Paths:
    """Return the paths of a tree, given which row descends from which column or is it, [n, n] booleans."""
    leaves = (below.sum(0) == 1).nonzero().flatten()
    lines = [below[leaf].nonzero().flatten() for leaf in leaves]  # parents come before their children
    longest = max(map(len, lines))
    nodes = torch.stack([torch.cat((line, line[-1:].expand(longest - len(line)))) for line in lines])
    return _Paths(nodes, below[leaves].int().argmax(0), below.sum(1) - 1)
