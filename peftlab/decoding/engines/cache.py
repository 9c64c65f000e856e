"""The key-value cache of a batch of sequences of different lengths, and which of its slots a token may attend to.

Token i of row b is stored in slot i of row b, whatever the other rows' lengths. So nothing is padded, positions are
slots, a crop is a smaller length, and a rejected token's slot is simply written again. No mask is ever
derived from token ids, so a padding token that equals the end-of-sequence token is harmless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Context:
    """What the decoder of an encoder-decoder model reads of each row's prompt.

    Attributes:
        states: [B, S, H], the encoder's output. mask: [B, S], 1 where there is a token.
        layers: keys and values of each layer's cross-attention, [B, heads, S, D] each.
    """

    states: Tensor
    mask: Tensor
    layers: list[tuple[Tensor, Tensor]]

    def select(self, rows: Sequence[int]) -> Context:
        """Return these rows, in this order."""
        kept = list(rows)
        return Context(self.states[kept], self.mask[kept], [(k[kept], v[kept]) for k, v in self.layers])


class KVCache:
    """Keys and values of every layer, [B, 2 H_kv, capacity, D], the keys' heads first; allocated at its first write.

    Attributes:
        batch: rows B.
        capacity: slots per row.
        states: one tensor per layer.
        context: what the prompts gave in an encoder-decoder model; None in others.
    """

    def __init__(self, layers: int, batch: int, capacity: int, context: Context | None = None):
        self.batch, self.capacity, self.context = batch, capacity, context
        self.states: list[Tensor | None] = [None] * layers

    def write(self, layer: int, new: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Store keys and values of a block, [b, 2 H_kv, n, D], and return all that its tokens may attend to.

        Returns:
            Keys and values [b, H_kv, block.end, D] of the block's rows.
        """
        stored = self.states[layer]
        if stored is None:
            stored = new.new_zeros(self.batch, new.shape[1], self.capacity, new.shape[3])
            self.states[layer] = stored
        if block.rows is None and block.even:
            stored[:, :, block.starts[0] : block.end] = new
            seen = stored[:, :, : block.end]
        else:
            rows = torch.tensor(block.rows or range(len(block.starts)), device=new.device)
            stored[rows[:, None], :, block.slots(new.device)] = new.transpose(1, 2)
            seen = stored[:, :, : block.end] if block.rows is None else stored[rows, :, : block.end]
        keys, values = seen.chunk(2, 1)
        return keys, values

    def block(
        self, slots: Sequence[int], starts: Sequence[int], n: int, tree: tuple[tuple[int, ...], Tensor] | None = None
    ) -> Block:
        """Return where n new tokens of each of these rows go; see ``Block`` for the arguments."""
        whole = tuple(slots) == tuple(range(self.batch))
        return Block(tuple(starts), n, None if whole else tuple(slots), tree)

    def copy(self, rows: Sequence[int], capacity: int) -> KVCache:
        """Return a cache of copies of these rows (a row may be named twice) and their first ``capacity`` slots."""
        context = None if self.context is None else self.context.select(rows)
        copies = KVCache(len(self.states), len(rows), capacity, context)
        for layer, stored in enumerate(self.states):
            if stored is not None:
                state = stored.new_zeros(len(rows), stored.shape[1], capacity, stored.shape[3])
                kept = min(capacity, self.capacity)
                state[:, :, :kept] = stored[list(rows), :, :kept]
                copies.states[layer] = state
        return copies

    def move(self, row: int, start: int, nodes: Sequence[int]) -> None:
        """Move slots ``start + node`` to ``start, start + 1, ...``: an accepted path of a tree becomes a chain."""
        if list(nodes) == list(range(len(nodes))):
            return
        for stored in self.states:
            if stored is not None:
                kept = stored[row, :, [start + node for node in nodes]]
                stored[row, :, start : start + len(nodes)] = kept

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self.batch = len(rows)
        self.context = None if self.context is None else self.context.select(rows)
        self.states[:] = [stored if stored is None else stored[list(rows)] for stored in self.states]


@dataclass(frozen=True)
class Block:
    """n new tokens for each of b rows: where they go and what they attend to.

    Attributes:
        starts: first slot of each row's new tokens, which is the row's length so far.
        n: new tokens per row.
        rows: rows of the cache; None is all of them.
        tree: depth of each new token and [n, n] booleans "row's token descends from column's or is it", in
            place of a chain's depth 0, 1, ... and lower triangle.
    """

    starts: tuple[int, ...]
    n: int
    rows: tuple[int, ...] | None = None
    tree: tuple[tuple[int, ...], Tensor] | None = None

    @property
    def end(self) -> int:
        """One past the last slot that any row uses."""
        return max(self.starts) + self.n

    @property
    def even(self) -> bool:
        """Whether all rows have the same length, so that a slice can replace a scatter."""
        return self.starts.count(self.starts[0]) == len(self.starts)

    def positions(self, device: torch.device) -> Tensor:
        """Return the position of each new token in its sequence, [b, n] (or [1, n] where rows are even)."""
        starts = torch.tensor(self.starts[:1] if self.even else self.starts, device=device)
        depth = torch.arange(self.n, device=device)
        if self.tree:
            depth = torch.tensor(self.tree[0], device=device)
        return starts[:, None] + depth

    def slots(self, device: torch.device) -> Tensor:
        """Return the slot of each new token, [b, n]."""
        return torch.tensor(self.starts, device=device)[:, None] + torch.arange(self.n, device=device)

    def visible(self, window: int | None, device: torch.device) -> Tensor | None:
        """Return which slots each new token sees, [b or 1, 1, n, end] booleans; None where it is all of them.

        A token sees itself, its ancestors among the new tokens, and all earlier slots of its row; with a
        window w only those whose position is less than w behind its own.
        """
        if window is not None and self.end <= window:
            window = None
        if self.n == 1 and self.even and window is None:
            return None
        starts = torch.tensor(self.starts[:1] if self.even else self.starts, device=device)[:, None, None]
        slot = torch.arange(self.end, device=device)[None, None, :]
        offset = slot - starts  # place among the new tokens, negative for older slots: [b, 1, end]
        query = torch.arange(self.n, device=device)[None, :, None]
        if self.tree is None:
            seen = offset <= query
            position, query_position = slot, starts + query
        else:
            depth = torch.tensor(self.tree[0], device=device)
            inside = offset.clamp(0, self.n - 1).expand(-1, self.n, -1)
            below = self.tree[1].to(device)[query.expand(len(starts), -1, 1), inside]
            seen = (offset < 0) | (below & (offset < self.n))
            position = torch.where(offset < 0, slot, starts + depth[offset.clamp(0, self.n - 1)])
            query_position = starts + depth[None, :, None]
        if window is not None:
            seen = seen & (query_position - position < window)
        return seen[:, None]


def additive(visible: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a boolean mask as 0 where seen and the most negative number elsewhere."""
    if visible is None:
        return None
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, torch.finfo(dtype).min)
