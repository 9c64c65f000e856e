"""Drafting with a layer that continues the target's own states (EAGLE): a chain, or a tree that grows as it drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from peftlab.decoding.drafters.base import Proposal, Row, TargetState, Verified
from peftlab.decoding.drafters.chain_draft import draft_chain
from peftlab.decoding.engines.base import Output
from peftlab.decoding.engines.cache import Block, KVCache
from peftlab.decoding.engines.prefill import right_padded
from peftlab.decoding.verification.sampling import Sampling
from peftlab.decoding.verification.tree import shape_of
from peftlab.errors import PeftlabError


class FeatureNetwork(Protocol):
    """What a drafter needs of a network that reads the target's states.

    Row t of a sequence reads token t + 1 and a state of position t, the target's or its own output of row t - 1, and
    its output gives the logits of token t + 2.

    Attributes:
        features: layers of the target whose entering states it reads.
        vocab_size: V, of the target.
        tokens: ids of the tokens that it can draft, rising, [V_d]; None for all.
    """

    features: tuple[int, ...]
    vocab_size: int

    @property
    def tokens(self) -> Tensor | None: ...

    @property
    def device(self) -> torch.device: ...

    def fuse(self, features: Tensor) -> Tensor:
        """Return the states that are read for the target's, [..., F] -> [..., H]."""
        ...

    def advance(
        self, cache: KVCache, tokens: Tensor, states: Tensor, block: Block, positions: Tensor, visible: Tensor | None
    ) -> Tensor:
        """Return the output of n rows for each of b sequences, [b, n, H], and store their keys and values.

        Args:
            tokens: [b, n]. states: [b, n, H]. block: where the rows are stored. positions: [b or 1, n].
            visible: which slots each row sees, [b or 1, 1, n, block.end]; None for all.
        """
        ...

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of ``tokens`` for the outputs of ``advance``, [..., H] -> [..., V_d]."""
        ...


@dataclass
class FeatureDrafter:
    """One layer that continues the target's states, with a cache of its own.

    γ counts drafted tokens. Width 1 is a chain, drawn from the draft's distribution. Otherwise, as in EAGLE-2
    (arXiv 2406.16858), the ``width`` most probable nodes of the newest level get ``width`` children each, and the γ
    most probable of all nodes are verified, by the product of the probabilities along their path. Such a tree has
    another shape in every step and for every row, so rows that are decoded together are drafted as chains.

    After each verification the states of accepted tokens are the target's: the cache never keeps a row that was
    computed from a guess.

    Attributes:
        network: what drafts. width: children of a node, and nodes expanded per level. depth: levels, at most.
        name: for reports.
    """

    network: FeatureNetwork
    width: int = 1
    depth: int = 6
    name: str = "features"
    _cache: KVCache = field(init=False, repr=False)
    _sampling: Sampling = field(init=False, repr=False)
    _read: dict[int, int] = field(init=False, repr=False, default_factory=dict)
    _new: dict[int, Tensor] = field(init=False, repr=False, default_factory=dict)

    def start(self, rows: list[Row], state: TargetState) -> None:
        if self.network.vocab_size != state.vocab_size:
            raise PeftlabError(
                f"draft: trained for {self.network.vocab_size} tokens, but the target has {state.vocab_size}"
            )
        self._sampling = state.sampling
        # Rows that have not read for several steps are read together with one that is nearly at its end.
        self._cache = KVCache(1, len(rows), 2 * state.cache.capacity + self.width * self.depth)
        self._read = {row.index: 0 for row in rows}
        self._new = {row.index: new for row, new in zip(rows, state.features, strict=True) if new is not None}
        if any(len(row.tokens) > 1 and row.index not in self._new for row in rows):
            layers = ", ".join(map(str, self.network.features))
            raise PeftlabError(
                f"draft: reads the states entering layers {layers}; build_engine(..., features=...) is due"
            )

    @torch.inference_mode()
    def propose(self, rows: list[Row], budgets: list[int]) -> Proposal:
        # A prompt of one token has no states yet: nothing is drafted for it in the first step.
        budgets = [b if row.index in self._new else 0 for row, b in zip(rows, budgets, strict=True)]
        if not any(budgets):
            return Proposal.empty(len(rows), self.network.device)
        first = self._catch_up(rows)
        if self.width > 1 and len(rows) == 1:
            return self._tree(rows[0], budgets[0], first)
        starts, slots = [len(row.tokens) - 1 for row in rows], [row.slot for row in rows]

        def following(x: Tensor, output: Output, drawn: int) -> Output:
            block = self._cache.block(slots, [start + drawn for start in starts], 1)
            return self._output(self._advance(x[:, None], output.hidden, block, block))

        return draft_chain(rows, budgets, self._output(first), following, self._sampling)

    def _catch_up(self, rows: list[Row]) -> Tensor:
        """Read the target's new states of each row; return the output of the last one, [b, 1, H]."""
        starts, news = [self._read[row.index] for row in rows], [self._new.pop(row.index, None) for row in rows]
        counts = [0 if new is None else len(new) for new in news]
        n = max(counts)
        width = next(new.shape[-1] for new in news if new is not None)
        features = torch.zeros(len(rows), n, width, device=self.network.device)
        for i, new in enumerate(news):
            if new is not None:
                features[i, : len(new)] = new
        spans = zip(rows, starts, counts, strict=True)
        tokens = right_padded([row.tokens[start + 1 : start + 1 + count] for row, start, count in spans], n)
        block = self._cache.block([row.slot for row in rows], starts, n)
        states = self._advance(tokens.to(features.device), self.network.fuse(features), block, block)
        for row, count in zip(rows, counts, strict=True):
            self._read[row.index] += count
        last = torch.tensor([max(0, count - 1) for count in counts], device=states.device)
        return states[torch.arange(len(rows), device=states.device), last][:, None]

    def _advance(self, tokens: Tensor, states: Tensor, block: Block, seen: Block) -> Tensor:
        """Compute the last rows of ``seen``, those of ``block``: where these are stored, and what they see."""
        device, n = self.network.device, block.n
        visible = seen.visible(None, device)
        visible = None if visible is None else visible[..., -n:, :]
        return self.network.advance(self._cache, tokens, states, block, seen.positions(device)[:, -n:], visible)

    def _output(self, states: Tensor) -> Output:
        """Return the network's states with logits of the whole vocabulary, -inf for tokens that it cannot draft."""
        some, tokens = self.network.logits(states), self.network.tokens
        if tokens is None:
            return Output(some, states)
        logits = some.new_full((*some.shape[:-1], self.network.vocab_size), -torch.inf)
        return Output(logits.index_copy_(-1, tokens, some), states)

    def _tree(self, row: Row, budget: int, first: Tensor) -> Proposal:
        """Return the ``budget`` most probable nodes of the tree below a row's last token.

        Args:
            first: the output that the tokens after the last one are drafted from, [1, 1, H].
        """
        tree, base = _Tree(), len(row.tokens) - 1
        newest = self._children(tree, first, [-1])
        while newest and tree.depth(newest[0]) < min(self.depth, budget) and tree.deeper_matters(newest, budget):
            parents = sorted(newest, key=lambda node: -tree.values[node])[: self.width]
            states = torch.stack([tree.states.get(tree.parents[node], first[0, 0]) for node in parents])
            count = len(tree.expanded)
            tree.expanded += parents
            shape = shape_of([tree.expanded_place(tree.parents[node]) for node in tree.expanded])
            # Without the root, which is not a row of this tree: its children are at depth 0 and see all earlier slots.
            seen = self._cache.block(
                [row.slot], [base], count + len(parents), (tuple(d - 1 for d in shape.depths[1:]), shape.below[1:, 1:])
            )
            block = self._cache.block([row.slot], [base + count], len(parents))
            drawn = torch.tensor([[tree.tokens[node] for node in parents]], device=first.device)
            outputs = self._advance(drawn, states[None], block, seen)
            tree.states |= dict(zip(parents, outputs[0], strict=True))
            newest = self._children(tree, outputs, parents)
        kept = tree.best(budget)
        place = {node: i for i, node in enumerate(kept)}
        shape = shape_of([place.get(tree.parents[node], -1) for node in kept])
        return Proposal(torch.tensor([[tree.tokens[node] for node in kept]], device=first.device), shape=shape)

    def _children(self, tree: _Tree, outputs: Tensor, parents: Sequence[int]) -> list[int]:
        """Add the ``width`` most probable children of each parent, whose outputs are [1, n, H]; return their nodes."""
        scores = self.network.logits(outputs)[0].float().log_softmax(-1)
        best = scores.topk(min(self.width, scores.shape[-1]), -1)
        known = self.network.tokens
        tokens = best.indices if known is None else known[best.indices]
        begin = len(tree.tokens)
        for parent, line, values in zip(parents, tokens.tolist(), best.values.tolist(), strict=True):
            above = tree.values[parent] if parent >= 0 else 0.0
            tree.tokens += line
            tree.parents += [parent] * len(line)
            tree.values += [above + value for value in values]
        return list(range(begin, len(tree.tokens)))

    def accept(self, rows: list[Row], verified: Verified) -> None:
        features = verified.output.features
        assert features is not None
        for i, (row, path) in enumerate(zip(rows, verified.paths, strict=True)):
            new = features[i, [0, *(node + 1 for node in path)]]
            old = self._new.get(row.index)
            self._new[row.index] = new if old is None else torch.cat((old, new))

    def select(self, slots: list[int]) -> None:
        self._cache.select(slots)


@dataclass
class _Tree:
    """A tree as it grows: a parent comes before its children, -1 is the root.

    Attributes:
        tokens, parents: of each node. values: logarithm of the probability of the path to it, falling along a path.
        expanded: nodes that were read, in the order of their slots. states: what the network gave for them, [H].
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    expanded: list[int] = field(default_factory=list)
    states: dict[int, Tensor] = field(default_factory=dict)

    def depth(self, node: int) -> int:
        """Return the level of a node, 1 for the root's children."""
        parent = self.parents[node]
        return 1 if parent < 0 else 1 + self.depth(parent)

    def expanded_place(self, node: int) -> int:
        """Return the place of a node among those that were read, -1 for the root."""
        return -1 if node < 0 else self.expanded.index(node)

    def best(self, size: int) -> list[int]:
        """Return the ``size`` most probable nodes, parents first; of equals the older."""
        return sorted(sorted(range(len(self.tokens)), key=lambda node: -self.values[node])[:size])

    def deeper_matters(self, newest: Sequence[int], size: int) -> bool:
        """Whether a child of one of the newest nodes can be among the ``size`` most probable ones."""
        if len(self.tokens) < size:
            return True
        return max(self.values[node] for node in newest) > self.values[self._last_of(size)]

    def _last_of(self, size: int) -> int:
        return sorted(range(len(self.tokens)), key=lambda node: -self.values[node])[size - 1]
