"""The interface of engines: the key-value cache, the blocks of new tokens that a forward pass reads, its output.

The cache is that of a batch of sequences of different lengths. Token i of row b is stored in slot i of row b, whatever
the other rows' lengths. So nothing is padded, positions are slots, a crop is a smaller length, and a rejected token's
slot is simply written again. No mask is ever derived from token ids, so a padding token that equals the end-of-sequence
token is harmless. ``WindowedCache`` has a constant size: a sequence's first tokens and its last ones.

A ``Block`` says where new tokens go and what they see; ``TreeShape`` which tokens of a drafted tree see which. An
``Engine`` reads a block into a cache and returns an ``Output``; ``engines.py`` chooses one for a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from peftlab.decoding.table import Window


@dataclass(frozen=True)
class Context:
    """The encoder's output for each row's prompt, and the keys and values of cross-attention computed from it.

    Attributes:
        states: [B, S, H], the encoder's output. mask: [B, S], 1 where there is a token.
        layers: keys and values of each layer's cross-attention, [B, heads, S, D] each.
    """

    states: Tensor
    mask: Tensor
    layers: list[tuple[Tensor, Tensor]]

    def select(self, rows: Sequence[int]) -> Context:
        """Return the context of these rows, in this order."""
        kept = list(rows)
        return Context(self.states[kept], self.mask[kept], [(k[kept], v[kept]) for k, v in self.layers])


@dataclass(frozen=True)
class FirstLayers:
    """Tokens that only the first layers of a model have read so far, as an early exit does while drafting.

    Attributes:
        tokens: [b, n]. block: their places. layers: how many layers have read them. states: [b, n, H], after these.
        features: [b, n, F], states that entered some of these layers, one after the other; F may be 0.
    """

    tokens: Tensor
    block: Block
    layers: int
    states: Tensor
    features: Tensor

    def first(self, m: int) -> FirstLayers:
        """Return the record of the first m tokens of each row."""
        block = replace(self.block, n=m)
        return FirstLayers(self.tokens[:, :m], block, self.layers, self.states[:, :m], self.features[:, :m])


class KVCache:
    """Keys and values of every layer, [B, 2 H_kv, capacity, D], the keys' heads first; allocated at its first write.

    Attributes:
        batch: rows B.
        capacity: tokens per row. slots: how many of them are stored.
        most: tokens that may be read at once; None for any number.
        states: one tensor per layer.
        context: what the prompts gave in an encoder-decoder model; None in others.
        dtype: of what is stored; None: as the first that is written to a layer.
    """

    most: int | None = None
    keeps_states = False
    """Whether a row continues only after tokens whose output was asked for, of which alone it has the state."""

    def __init__(
        self,
        layers: int,
        batch: int,
        capacity: int,
        context: Context | None = None,
        dtype: torch.dtype | None = None,
    ):
        self.batch, self.capacity, self.context, self.dtype = batch, capacity, context, dtype
        self.slots = capacity
        self.states: list[Tensor | None] = [None] * layers
        self._first_layers: FirstLayers | None = None

    @property
    def bytes(self) -> int:
        """Return the bytes of keys and values, not counting an encoder-decoder model's ``context``."""
        return sum(stored.nbytes for stored in self.states if stored is not None)

    def write(self, layer: int, new: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Store keys and values of a block and return all that its tokens may attend to.

        Args:
            layer: index. new: [b, 2 H_kv, n, D], the keys' heads first. block: the slots that they go to.

        Returns:
            Keys and values [b, H_kv, block.end, D] of the block's rows.
        """
        stored = self.allocated(layer, new.shape[1], new.shape[3], new)
        if block.rows is None and block.even:  # one slice of all rows: no scatter
            stored[:, :, block.starts[0] : block.end] = new
        else:
            rows = torch.tensor(block.rows or range(len(block.starts)), device=new.device)
            stored[rows[:, None], :, block.slots(new.device)] = new.transpose(1, 2).to(stored.dtype)
        return self.seen(layer, block)

    def allocated(self, layer: int, heads: int, dim: int, like: Tensor) -> Tensor:
        """Return the keys and values of a layer, [B, 2 H_kv, slots, D], allocated where there are none.

        Args:
            layer: index. heads: of keys and values together. dim: D. like: for dtype and device.
        """
        stored = self.states[layer]
        if stored is None:
            dtype = self.dtype or like.dtype
            stored = self.states[layer] = like.new_zeros(self.batch, heads, self.slots, dim, dtype=dtype)
        return stored

    def seen(self, layer: int, block: Block) -> tuple[Tensor, Tensor]:
        """Return keys and values that a block's tokens may attend to, [b, H_kv, block.end, D] of its rows.

        Args:
            layer: index. block: of tokens that are stored.
        """
        stored = self.states[layer]
        assert stored is not None
        seen = stored[:, :, : block.end] if block.rows is None else stored[list(block.rows), :, : block.end]
        keys, values = seen.chunk(2, 1)
        return keys, values

    def update(self, layer: int, keys: Tensor, values: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Store keys and values, which may differ in width, and return all that the block's tokens may attend to.

        Multi-head latent attention (DeepSeek) stores a latent and a rotated key in their place. The narrower of the two
        takes as much room as the wider.

        Args:
            layer: index. keys: [b, H_kv, n, D]. values: [b, H_kv, n, E]. block: the slots that they go to.

        Returns:
            Keys and values [b, H_kv, block.end, D or E] of the block's rows.
        """
        widths = keys.shape[-1], values.shape[-1]
        both = [F.pad(part, (0, max(widths) - part.shape[-1])) for part in (keys, values)]
        seen = self.write(layer, torch.cat(both, 1), block)
        return seen[0][..., : widths[0]], seen[1][..., : widths[1]]

    def record_first_layers(self, new: FirstLayers) -> None:
        """Record tokens that the first layers of a model have read.

        A block that continues the recorded one is added to it, another one takes its place; trees are not recorded.
        """
        old = self._first_layers
        if old is not None and old.layers == new.layers and old.block.after(old.block.n, new.block.n) == new.block:
            pairs = ((old.tokens, new.tokens), (old.states, new.states), (old.features, new.features))
            tokens, states, features = (torch.cat(pair, 1) for pair in pairs)
            new = FirstLayers(tokens, replace(old.block, n=tokens.shape[1]), new.layers, states, features)
        self._first_layers = None if new.block.tree is not None else new

    def take_first_layers(self, tokens: Tensor, block: Block) -> FirstLayers | None:
        """Return the record of the first m tokens of a block, and forget it; None for m = 0.

        m is the number of leading tokens that equal the recorded ones in every row.

        Args:
            tokens: [b, n]. block: where they go.
        """
        ahead, self._first_layers = self._first_layers, None
        if ahead is None or (block.starts, block.rows, block.tree) != (ahead.block.starts, ahead.block.rows, None):
            return None
        n = min(block.n, ahead.block.n)
        # The product is 1 up to the first place at which some row differs from what was recorded.
        m = int((tokens[:, :n] == ahead.tokens[:, :n]).all(0).cumprod(0).sum())
        return ahead.first(m) if m else None

    def block(self, slots: Sequence[int], starts: Sequence[int], n: int, tree: TreeShape | None = None) -> Block:
        """Return the block of n new tokens for each of these rows.

        Args:
            slots: rows of the cache. starts: first slot of each row's new tokens. n, tree: see ``Block``.
        """
        whole = tuple(slots) == tuple(range(self.batch))
        return Block(tuple(starts), n, None if whole else tuple(slots), tree)

    def copy(self, rows: Sequence[int], capacity: int) -> KVCache:
        """Return a cache that has copies of some rows.

        Args:
            rows: to copy, in this order; a row may be named twice. capacity: slots of each copy.
        """
        context = None if self.context is None else self.context.select(rows)
        copies = KVCache(len(self.states), len(rows), capacity, context, self.dtype)
        for layer, stored in enumerate(self.states):
            if stored is not None:
                state = stored.new_zeros(len(rows), stored.shape[1], capacity, stored.shape[3])
                kept = min(capacity, self.capacity)
                state[:, :, :kept] = stored[list(rows), :, :kept]
                copies.states[layer] = state
        return copies

    def commit(self, row: int, start: int, nodes: Sequence[int] = ()) -> None:
        """Keep a row's tokens before ``start`` and, of those that follow, the accepted ones.

        Slots ``start + node`` become ``start, start + 1, ...``: an accepted path of a tree becomes a chain.

        Args:
            row: of the cache. start: slot of node 0. nodes: the accepted ones, rising.
        """
        if list(nodes) == list(range(len(nodes))):  # a chain: its tokens are in the right slots already
            return
        for stored in self.states:
            if stored is not None:
                kept = stored[row, :, [start + node for node in nodes]]
                stored[row, :, start : start + len(nodes)] = kept

    @contextmanager
    def restoring(self, row: int, start: int, n: int) -> Iterator[None]:
        """Restore n slots of a row when the with-block ends, whatever was written to them in it.

        Args:
            row: of the cache. start: the first slot. n: how many.
        """
        kept = [None if stored is None else stored[row, :, start : start + n].clone() for stored in self.states]
        try:
            yield
        finally:
            for stored, old in zip(self.states, kept, strict=True):
                if stored is not None and old is not None:
                    stored[row, :, start : start + n] = old

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows of the cache, in this order; keys and values of a row that stays are not copied."""
        self.batch = len(rows)
        self.context = None if self.context is None else self.context.select(rows)
        moved = [place for place, row in enumerate(rows) if row != place]
        for layer, stored in enumerate(self.states):
            if stored is not None:
                stored[moved] = stored[[rows[place] for place in moved]]
                self.states[layer] = stored[: len(rows)]


@dataclass(frozen=True)
class Block:
    """The slots, positions and visible tokens of n new tokens for each of b rows.

    Attributes:
        starts: first slot of each row's new tokens, which is the row's length so far.
        n: new tokens per row.
        rows: rows of the cache; None is all of them.
        tree: each row's tree of n tokens with its root, in place of a chain's depth 0, 1, ... and lower triangle.
    """

    starts: tuple[int, ...]
    n: int
    rows: tuple[int, ...] | None = None
    tree: TreeShape | None = None

    def after(self, m: int, n: int | None = None) -> Block | None:
        """Return the block of this chain's tokens from the m-th on; None if there are none.

        Args:
            m: tokens to leave out. n: how many to take after them; None: all.
        """
        n = self.n - m if n is None else n
        return None if n == 0 else replace(self, starts=tuple(start + m for start in self.starts), n=n)

    @property
    def end(self) -> int:
        """Return the slot after the last one that any row uses."""
        return max(self.starts) + self.n

    @property
    def even(self) -> bool:
        """Return whether all rows have the same length, so that a slice can replace a scatter."""
        return self.starts.count(self.starts[0]) == len(self.starts)

    @property
    def consecutive(self) -> bool:
        """Return whether the positions of all rows are those from the same one on, so that they are a slice."""
        return self.even and self.tree is None

    def positions(self, device: torch.device) -> Tensor:
        """Return the position of each new token in its sequence, [b, n] (or [1, n] for even rows of chains)."""
        starts = torch.tensor(self.starts[:1] if self.even else self.starts, device=device)
        depths = torch.arange(self.n, device=device) if self.tree is None else self.tree.depths.to(device)
        return starts[:, None] + depths

    def slots(self, device: torch.device) -> Tensor:
        """Return the slot of each new token, [b, n]."""
        return torch.tensor(self.starts, device=device)[:, None] + torch.arange(self.n, device=device)

    def visible(self, window: int | None, device: torch.device) -> Tensor | None:
        """Return the mask of slots that each new token sees, [b or 1, 1, n, end] booleans; None where it sees all.

        A token sees itself, its ancestors among the new tokens, and all earlier slots of its row; with a
        window w only those whose position is less than w behind its own.

        Args:
            window: of attention; None for none. device: of the mask.
        """
        if window is not None and self.end <= window:  # no token is far enough behind to be hidden
            window = None
        if self.n == 1 and self.even and window is None:
            return None
        positions, slot = self.positions(device)[:, :, None], torch.arange(self.end, device=device)
        if self.tree is None:
            # In a chain a token's slot is its position, so that the causal mask is a comparison of the two.
            seen, stored = slot <= positions, slot
        else:
            seen, stored = (
                visible_slots(self.starts, self.tree.below.to(device)),
                self._stored_positions(slot, self.tree),
            )
        if window is not None:  # counted in positions, which nodes on one level of a tree share, not in slots
            seen = seen & (positions - stored < window)
        return seen[:, None]

    def _stored_positions(self, slot: Tensor, tree: TreeShape) -> Tensor:
        """Return the positions of the tokens in the slots [end], as [b, 1, end]."""
        starts = torch.tensor(self.starts, device=slot.device)[:, None, None]
        offset = slot - starts  # place among the new tokens, negative for older slots
        depths = tree.depths.to(slot.device)[:, None].gather(2, offset.clamp(0, self.n - 1))
        return torch.where(offset < 0, slot, starts + depths)


@dataclass(frozen=True)
class WholeBlock(Block):
    """A block whose tokens see one another, the later ones too, and all before them; causal where there is a window."""

    def visible(self, window: int | None, device: torch.device) -> Tensor | None:
        if window is not None:
            return super().visible(window, device)
        if self.even:
            return None
        ends = torch.tensor(self.starts, device=device)[:, None] + self.n
        return (torch.arange(self.end, device=device) < ends)[:, None, None].expand(-1, 1, self.n, -1)


@dataclass(frozen=True)
class PlacedBlock(Block):
    """The tokens of a block at other positions, or with another mask of what they see.

    Attributes:
        of: the block. at: positions, [b or 1, n]. mask: as ``visible`` returns it.
    """

    of: Block = field(kw_only=True)
    at: Tensor = field(kw_only=True)
    mask: Tensor | None = field(kw_only=True)

    @property
    def end(self) -> int:
        return self.of.end

    @property
    def even(self) -> bool:
        return self.of.even

    @property
    def consecutive(self) -> bool:
        return False

    def positions(self, device: torch.device) -> Tensor:
        return self.at.to(device)

    def slots(self, device: torch.device) -> Tensor:
        return self.of.slots(device)

    def visible(self, window: int | None, device: torch.device) -> Tensor | None:
        return self.mask


def visible_slots(starts: Sequence[int], below: Tensor) -> Tensor:
    """Return the mask of slots that the tokens of trees see: all before a row's start, then those of its own tree.

    Args:
        starts: b slots, those of the trees' first tokens.
        below: [b, n, m] booleans, which of the m tokens of its tree each of n tokens sees.

    Returns:
        [b, n, max(starts) + m] booleans.
    """
    m = below.shape[-1]
    if min(starts) == max(starts):
        return F.pad(below, (starts[0], 0), value=True)  # every row has as many earlier slots
    slot = torch.arange(max(starts) + m, device=below.device)
    offset = (slot - torch.tensor(starts, device=below.device)[:, None])[:, None]  # [b, 1, end]
    inside = below.gather(2, offset.clamp(0, m - 1).expand(-1, below.shape[1], -1))
    return (offset < 0) | (inside & (offset < m))


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to add to attention scores: 0 where a slot is seen, the most negative number elsewhere.

    Args:
        visible: booleans [b or 1, 1, n, end]. dtype: of the mask.
    """
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, torch.finfo(dtype).min)


_MAX_BLOCK = 128  # tokens of a block at most, and so drafted tokens that may be rejected


class WindowedCache(KVCache):
    """A cache of constant size: slots for the first tokens of each row, and a ring of slots for those that follow.

    The ring has more slots than the window has tokens: what a block writes must not take the place of what its first
    token sees, nor drafted tokens that are rejected that of tokens seen without them.
    """

    most = _MAX_BLOCK

    def __init__(self, layers: int, batch: int, capacity: int, window: Window):
        super().__init__(layers, batch, capacity)
        self.window, self.ring = window, window.last + _MAX_BLOCK
        self.slots = min(capacity, slots_of(window))

    def block(self, slots: Sequence[int], starts: Sequence[int], n: int, tree: TreeShape | None = None) -> Block:
        whole = tuple(slots) == tuple(range(self.batch))
        return _WindowedBlock(
            tuple(starts), n, None if whole else tuple(slots), tree, window=self.window, ring=self.ring
        )


def slots_of(window: Window) -> int:
    """Return the number of slots that a row with a window takes, once the text is longer than that."""
    return window.sinks + window.last + _MAX_BLOCK


@dataclass(frozen=True)
class _WindowedBlock(Block):
    """A block of a ``WindowedCache``: its slots are in a ring, once the text is longer than that.

    Attributes:
        window: what each of them sees. ring: slots after those of the first tokens.
    """

    window: Window = field(kw_only=True)
    ring: int = field(kw_only=True)

    @property
    def end(self) -> int:
        return min(super().end, self.window.sinks + self.ring)

    @property
    def even(self) -> bool:
        return super().even and super().end <= self.window.sinks + self.ring

    def slots(self, device: torch.device) -> Tensor:
        place, sinks = super().slots(device), self.window.sinks
        return torch.where(place < sinks, place, sinks + (place - sinks) % self.ring)

    def visible(self, window: int | None, device: torch.device) -> Tensor | None:
        sinks, last = self.window.sinks, self.window.last
        if super().end <= sinks + last:
            return super().visible(window, device)
        # A slot of the ring has the latest token whose place is congruent to it modulo the ring.
        newest = torch.tensor(self.starts, device=device)[:, None] + self.n - 1
        slot = torch.arange(self.end, device=device)
        stored = torch.where(slot < sinks, slot, newest - (newest - slot) % self.ring)[:, None]  # [b, 1, end]
        positions = torch.tensor(self.starts, device=device)[:, None] + torch.arange(self.n, device=device)
        behind = positions[:, :, None] - stored  # [b, n, end]
        seen = (behind >= 0) & ((slot < sinks) | ((behind < last) & (stored >= sinks)))
        return (seen if window is None else seen & (behind < window))[:, None]


def depths_of(parents: Sequence[int]) -> list[int]:
    """Return the level of each node of a tree, 1 for the root's children."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


@dataclass(frozen=True)
class TreeShape:
    """The shapes of b trees of N nodes and a root, which is the last known token.

    Attributes:
        depths: [b, N+1], 0 for the root.
        below: [b, N+1, N+1] booleans: the row's token descends from the column's or is it.
    """

    depths: Tensor
    below: Tensor

    def of_rows(self, places: Sequence[int]) -> TreeShape:
        """Return the trees of some of the rows."""
        return TreeShape(self.depths[list(places)], self.below[list(places)])


def shape_of(parents: Sequence[tuple[int, ...]]) -> TreeShape:
    """Return the shape of trees of N nodes each.

    Args:
        parents: of the nodes of each tree; -1 is the root, and a parent comes before its children.
    """
    depths, below = zip(*map(_tree_shape, parents), strict=True)
    return TreeShape(torch.stack(depths), torch.stack(below))


@lru_cache
def _tree_shape(parents: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the depths [N+1] and the mask of ancestors [N+1, N+1] of one tree with its root."""
    lines = [[0]]  # of the root and each node: its ancestors and itself
    for node, parent in enumerate(parents):
        lines.append([*lines[parent + 1], node + 1])
    below = torch.zeros(len(lines), len(lines), dtype=torch.bool)
    below[[i for i, line in enumerate(lines) for _ in line], [i for line in lines for i in line]] = True
    return torch.tensor([0, *depths_of(parents)]), below


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
    """Return the paths from root to leaf of trees.

    Args:
        below: [b, n, n] booleans: the row's node descends from the column's or is it.
    """
    # A leaf is an ancestor of itself alone.
    row, leaf = (below.sum(1) == 1).nonzero().unbind(1)
    within = below[row, leaf]  # [paths, n]
    lines = [line.nonzero().flatten() for line in within]  # parents come before their children
    longest = max(map(len, lines))
    nodes = torch.stack([torch.cat((line, line[-1:].expand(longest - len(line)))) for line in lines])
    own = row == torch.arange(len(below), device=row.device)[:, None]  # [b, paths]
    first = (own[:, :, None] & within).int().argmax(1)
    return Paths(row, nodes, first, below.sum(2) - 1)


@dataclass(frozen=True)
class Output:
    """The output of a forward pass for the tokens asked for.

    Attributes:
        logits: [b, kept, V].
        hidden: [b, kept, H], the input of the LM head (after the final norm).
        features: [b, n, F], of all tokens that were read: the states that enter the layers that the engine was built to
            report, one after the other; None for an engine that reports none.
    """

    logits: Tensor
    hidden: Tensor
    features: Tensor | None = None


class Encoder(Protocol):
    """The encoder of an encoder-decoder model, which reads the prompts.

    Attributes:
        start: tokens that every output of the decoder begins with.
        limit: how many tokens a prompt may have; None if there is no limit.
    """

    start: list[int]
    limit: int | None

    def encode(self, prompts: Sequence[Sequence[int]]) -> Context:
        """Return the encoder's output for prompts of any lengths, in their order."""
        ...


class Engine(Protocol):
    """A model that decodes.

    Attributes:
        kind: how the step is computed, for reports.
        vocab_size: V, the rows of the LM head.
        limit: how many positions the model has; None if it has no limit.
        layers: layers of the cache.
        device: where tokens go.
        encoder: of an encoder-decoder model; None of others, whose prompts are the beginnings of their outputs.
        positioned: whether tokens are placed by the positions of their block, whatever slots they are stored in.
        packed: the forms in which the CPU's products store the weights; empty: the model's own form alone.
    """

    kind: str
    positioned: bool
    packed: tuple[str, ...]
    vocab_size: int
    limit: int | None
    layers: int
    device: torch.device
    encoder: Encoder | None

    def new_cache(self, batch: int, capacity: int, context: Context | None = None) -> KVCache:
        """Return an empty cache.

        Args:
            batch: rows. capacity: tokens per row. context: see ``KVCache``.
        """
        ...

    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """Run the model on new tokens, store their keys and values, and return logits and states.

        Tokens past the model's limit may be among the n; their output is undefined.

        Args:
            cache: of this engine's ``new_cache``. tokens: [b, n]. block: the slots that they go to.
            keep: indices of those of the n tokens whose output is returned, perhaps none; None: all.
        """
        ...


class EngineWrapper:
    """A base class for an engine around another one: it has all attributes of the other, and a forward of its own.

    Args:
        engine: the other one. note: added to its ``kind``.
    """

    def __init__(self, engine: Engine, note: str = ""):
        self._engine = engine
        self.kind, self.packed, self.positioned = f"{engine.kind}{note}", engine.packed, engine.positioned
        self.vocab_size, self.limit, self.layers = engine.vocab_size, engine.limit, engine.layers
        self.device, self.encoder = engine.device, engine.encoder

    def new_cache(self, batch: int, capacity: int, context: Context | None = None) -> KVCache:
        """Return an empty cache; see ``Engine.new_cache``."""
        return self._engine.new_cache(batch, capacity, context)


@dataclass(frozen=True)
class Prefilled:
    """The output of ``prefill`` for each sequence, of which all tokens but the last were read.

    Attributes:
        hidden: state [H] of the last token read; None for a sequence of one token, or where it is not asked for.
        features: [length - 1, F] of all tokens read; None for a sequence of one token, or an engine without features.
    """

    hidden: list[Tensor | None]
    features: list[Tensor | None]


def prefill(
    engine: Engine, cache: KVCache, sequences: Sequence[Sequence[int]], slots: Sequence[int], *, last: bool = True
) -> Prefilled:
    """Read all tokens but the last of each sequence into the cache.

    Args:
        engine: the model. cache: of this engine. sequences: token ids. slots: the cache's row of each sequence.
        last: return the state of the last token read. Logits come with it, at the last places of all sequences.
    """
    lengths = [len(sequence) - 1 for sequence in sequences]
    hidden: list[Tensor | None] = [None] * len(sequences)
    features: list[list[Tensor]] = [[] for _ in sequences]
    for rows, first, n in spans(lengths, cache.most):
        counts = [min(n, lengths[row] - first) for row in rows]
        keep = sorted({count - 1 for count in counts}) if last or cache.keeps_states else []
        parts = [sequences[row][first : first + count] for row, count in zip(rows, counts, strict=True)]
        block = cache.block([slots[row] for row in rows], [first] * len(rows), n)
        output = engine.forward(cache, right_padded(parts, n).to(engine.device), block, keep)
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if keep:
                hidden[row] = output.hidden[i, keep.index(count - 1)]
            if output.features is not None:
                features[row].append(output.features[i, :count])
    return Prefilled(hidden, [torch.cat(parts) if parts else None for parts in features])


def spans(counts: Sequence[int], most: int | None) -> Iterator[tuple[list[int], int, int]]:
    """Yield the passes that read rows of several lengths: (rows, index of their first token, number of tokens).

    Args:
        counts: tokens of each row. most: tokens of a pass at most; None for any number.
    """
    longest = max(counts)
    for first in range(0, longest, most or max(1, longest)):
        yield [i for i, count in enumerate(counts) if count > first], first, min(longest - first, most or longest)


def empty_cache(engine: Engine, capacity: int, sources: Sequence[Sequence[int]]) -> KVCache:
    """Return an empty cache with a row for each sequence, and the encoded prompts of an encoder-decoder engine.

    Args:
        engine: the model. capacity: slots per row.
        sources: prompts for the encoder; any other engine takes only their number.
    """
    context = None if engine.encoder is None else engine.encoder.encode(sources)
    return engine.new_cache(len(sources), capacity, context)


def right_padded(sequences: Sequence[Sequence[int]], n: int, filler: int = 0) -> Tensor:
    """Return sequences of token ids padded on the right to [b, n].

    Args:
        sequences: of at most n tokens each. n: length. filler: token that pads.
    """
    return torch.tensor([[*s, *[filler] * (n - len(s))] for s in sequences], dtype=torch.long)


@dataclass(frozen=True)
class CacheMemory:
    """Bytes of the caches, without what an encoder-decoder model keeps of its prompts.

    Attributes:
        batch: sequences. tokens: of each. target: bytes. draft: bytes; None without a draft model.
    """

    batch: int
    tokens: int
    target: int
    draft: int | None


def cache_memory(
    target: Engine, draft: Engine | None, batches: Sequence[int], lengths: Sequence[int], window: Window | None = None
) -> list[CacheMemory]:
    """Return the bytes of the caches of target and draft for each batch size and length.

    Args:
        target, draft: the engines; draft is None for none. batches: numbers of sequences. lengths: tokens of each.
        window: of the draft; None: it sees all tokens.
    """

    def of(engine: Engine, tokens: int) -> int:
        fixed, each = _cache_bytes(engine)
        return fixed + each * tokens

    stored = {n: n if window is None else min(n, slots_of(window)) for n in lengths}
    return [
        CacheMemory(b, n, b * of(target, n), None if draft is None else b * of(draft, stored[n]))
        for b in batches
        for n in dict.fromkeys(lengths)
    ]


def _cache_bytes(engine: Engine) -> tuple[int, int]:
    """Return the bytes of a sequence's cache that do not depend on its length (states), and those per token.

    Both follow from caches with room for one and for two tokens: fixed + each, and fixed + 2 each.
    """
    found = []
    for capacity in (1, 2):
        cache = empty_cache(engine, capacity, [[0]])
        engine.forward(cache, torch.zeros(1, 1, dtype=torch.long, device=engine.device), Block((0,), 1))
        cache.commit(0, 1)
        found.append(cache.bytes)
    one, two = found
    return 2 * one - two, two - one
