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

from peftlab.decoding.engines.base import Engine, Output, Wrapper
from peftlab.decoding.engines.cache import Block, KVCache


class EqualLengths(Wrapper):
    """An engine that runs rows of one length at a time."""

    def __init__(self, engine: Engine):
        super().__init__(engine, ", rows of one length at a time")
        self.positioned = False

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
            tree = None if block.tree is None else block.tree.of_rows(places)
            part = replace(block, starts=(start,) * len(places), n=n, rows=rows, tree=tree)
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


class PathByPath(Wrapper):
    """An engine that runs trees as chains: one copy of the row for each leaf."""

    def __init__(self, engine: Engine):
        super().__init__(engine, ", trees path by path")
        self.positioned = False

    @torch.inference_mode()
    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """See ``Engine.forward``."""
        if block.tree is None:
            return self._engine.forward(cache, tokens, block, keep)
        paths = paths_of(block.tree.below.to(self.device))
        slots, rows = block.rows or range(len(tokens)), paths.row.tolist()
        starts = tuple(block.starts[row] for row in rows)
        copies = cache.copy([slots[row] for row in rows], max(starts) + paths.nodes.shape[1])
        read = tokens[paths.row[:, None], paths.nodes]
        out = self._engine.forward(copies, read, Block(starts, paths.nodes.shape[1]))
        for layer, stored in enumerate(copies.states):
            if stored is not None:  # [paths, 2 H_kv, capacity, D]
                slot = torch.tensor(block.starts, device=stored.device)[:, None] + paths.depth
                cache.write(layer, stored[paths.path, :, slot].transpose(1, 2), block)
        wanted = slice(None) if keep is None else keep
        logits, hidden = (x[paths.path, paths.depth] for x in (out.logits, out.hidden))
        features = None if out.features is None else out.features[paths.path, paths.depth]
        return Output(logits[:, wanted], hidden[:, wanted], features)


@dataclass(frozen=True)
class Paths:
    """The paths from root to leaf of b trees of n nodes, those of the first tree first.

    Attributes:
        row: [paths], whose tree it is of. nodes: [paths, longest], a leaf repeated up to the length of the longest.
        path, depth: [b, n], where each node is first found in ``nodes``.
    """

    row: Tensor
    nodes: Tensor
    path: Tensor
    depth: Tensor


def paths_of(below: Tensor) -> Paths:
    """Return the paths of trees, given which row descends from which column or is it, [b, n, n] booleans."""
    row, leaf = (below.sum(1) == 1).nonzero().unbind(1)
    within = below[row, leaf]  # [paths, n]
    lines = [line.nonzero().flatten() for line in within]  # parents come before their children
    longest = max(map(len, lines))
    nodes = torch.stack([torch.cat((line, line[-1:].expand(longest - len(line)))) for line in lines])
    own = row == torch.arange(len(below), device=row.device)[:, None]  # [b, paths]
    first = (own[:, :, None] & within).int().argmax(1)
    return Paths(row, nodes, first, below.sum(2) - 1)
