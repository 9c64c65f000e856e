"""Drafting from the target's hidden states: heads, layers that continue the states, layers that fill a block.

Heads (Medusa, Hydra) predict several positions from one state, without a cache. A layer that continues the states
(EAGLE, MTP) has a cache of its own and drafts a chain, or a tree that grows with the draft's probabilities (EAGLE-2).
Layers that fill a block (DFlash) have keys and values of the states in a cache, and draft all tokens in one pass.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from peftlab.decoding.cache import (
    Block,
    KVCache,
    Output,
    PlacedBlock,
    WindowedCache,
    right_padded,
    spans,
    visible_slots,
)
from peftlab.decoding.decode import (
    DraftCandidate,
    Drafter,
    DrafterWrapper,
    Proposal,
    Row,
    TargetState,
    Verified,
    draft_chain,
)
from peftlab.decoding.sampling import Sampling
from peftlab.decoding.table import CHAIN, DRAWN, HEAD, Window
from peftlab.decoding.theory import (
    FEATURE_DEPTH,
    FEATURE_TREE,
    Path,
    RankRates,
    best_tree,
    expected_tokens,
    parents_of,
    rank_probability,
)
from peftlab.errors import PeftlabError
from peftlab.models.image_tokens import draft_places


class Heads(Protocol):
    """The interface of heads that predict several positions from one state (Medusa, Hydra).

    Attributes:
        vocab_size: V.
        depth: K.
        ranks: how often each head's choices are right, as measured; None: not measured.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def depth(self) -> int: ...

    @property
    def ranks(self) -> RankRates | None: ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the weights; their dtype and device are those of the computation."""
        ...

    def tokens(self, hidden: Tensor, last: Tensor, tree: Sequence[Path]) -> Tensor:
        """Return the tokens of a tree's nodes: (.., r) is the choice of rank r after its parent's token.

        Args:
            hidden: [b, H], the states from which the last tokens were chosen. last: [b], these tokens.
            tree: N paths, a parent before its children, at most K deep.

        Returns:
            [b, N].
        """
        ...


def tree_tokens(
    logits: Tensor,
    last: Tensor,
    tree: Sequence[Path],
    bias: Callable[[Tensor], Tensor] | None = None,
    ids: Tensor | None = None,
) -> Tensor:
    """Return the tokens of a tree's nodes, [b, N], where a level's logits depend at most on the parent's token.

    Args:
        logits: [K, b, V] of the heads. last, tree: as for ``Heads.tokens``.
        bias: tokens [b, n] -> [b, n, V], added to the logits of what follows them: children of different parents then
            have different choices. None: a head's choices are the same after every parent.
        ids: [V], the token of each logit; None: its own number.
    """

    def following(level: int, before: Tensor) -> Tensor:
        scores = logits[level][:, None]  # [b, 1, V]: one for all parents
        return scores if bias is None else scores + bias(before[..., -1])

    return grown_tokens(following, last, tree, ids)


def grown_tokens(
    following: Callable[[int, Tensor], Tensor], last: Tensor, tree: Sequence[Path], ids: Tensor | None = None
) -> Tensor:
    """Return the tokens of a tree's nodes, [b, N], where a level's logits depend on all tokens above.

    Args:
        following: (level from 0, the last token and the drafted ones up to each of n parents [b, n, level + 1]) ->
            logits of their children, [b, n or 1, V].
        last, tree: as for ``Heads.tokens``. ids: [V], the token of each logit; None: its own number.
    """
    tokens: dict[Path, Tensor] = {(): last}
    for level in range(max(map(len, tree))):
        here = [path for path in tree if len(path) == level + 1]
        parents = list(dict.fromkeys(path[:-1] for path in here))
        lines = [torch.stack([tokens[parent[:k]] for k in range(level + 1)], -1) for parent in parents]
        scores = following(level, torch.stack(lines, 1))
        best = scores.topk(1 + max(path[-1] for path in here), -1).indices
        best = (best if ids is None else ids[best]).expand(-1, len(parents), -1)
        for path in here:
            tokens[path] = best[:, parents.index(path[:-1]), path[-1]]
    return torch.stack([tokens[path] for path in tree], 1)


@dataclass
class HeadsDrafter(Drafter):
    """A drafter from heads on the target's last hidden state, without a cache or a model of its own.

    γ counts drafted tokens: a chain takes the first choice of γ heads, a tree the γ nodes most likely to be reached.
    Candidates are the heads' top tokens, so verification treats them as deterministic.

    Attributes:
        heads: head i predicts i + 2 positions ahead.
        width: choices of a head that a tree may use; 1 is a chain. None: all that were measured for the heads, a chain
            where nothing was.
        name: for reports.
    """

    heads: Heads
    width: int | None = None
    name: str = "heads"
    _hidden: dict[int, Tensor] = field(init=False, repr=False, default_factory=dict)

    @property
    def provides(self) -> frozenset[str]:
        return frozenset({CHAIN} if self.width == 1 else ())

    @property
    def reads_hidden(self) -> bool:
        return True

    @property
    def chain_limit(self) -> int | None:
        return self.heads.depth if self.width == 1 else None

    def start(self, rows: list[Row], state: TargetState) -> None:
        self._hidden, self._vocab = {}, state.vocab_size
        self.join(rows, state)

    def join(self, rows: list[Row], state: TargetState) -> None:
        states = zip(rows, state.hidden, strict=True)
        self._hidden |= {row.index: hidden for row, hidden in states if hidden is not None}

    @torch.inference_mode()
    def propose(self, rows: list[Row], budgets: list[int]) -> Proposal:
        weight = next(self.heads.parameters())
        device = weight.device
        # A prompt of one token has no hidden state yet: nothing is drafted for it in the first step.
        budgets = [b if row.index in self._hidden else 0 for row, b in zip(rows, budgets, strict=True)]
        if not any(budgets):
            return Proposal.empty(len(rows), device)
        blank = torch.zeros_like(next(iter(self._hidden.values())))
        hidden = torch.stack([self._hidden.get(row.index, blank) for row in rows])
        if self.heads.vocab_size != self._vocab:
            raise PeftlabError(f"heads: vocabulary of {self.heads.vocab_size}, but the target's has {self._vocab}")
        tree = self.tree(max(budgets))
        last = torch.tensor([row.tokens[-1] for row in rows], device=device)
        tokens = self.heads.tokens(hidden.to(weight.dtype), last, tree)
        allowed = torch.arange(len(tree), device=device) < torch.tensor(budgets, device=device)[:, None]
        chain = all(set(path) == {0} for path in tree)
        parents = None if chain else [parents_of(tree)] * len(rows)
        return Proposal(torch.where(allowed, tokens, -1), parents=parents)

    def tree(self, size: int) -> tuple[Path, ...]:
        """Return the best tree of at most ``size`` nodes."""
        ranks = self.heads.ranks
        width = self.width or (1 if ranks is None else ranks.width)
        return best_tree(size, self.heads.depth, width, ranks or rank_probability)

    def accept(self, rows: list[Row], verified: Verified) -> None:
        # The state from which a row's newest token was chosen: that of the last accepted node, or of the root.
        for i, (row, path) in enumerate(zip(rows, verified.paths, strict=True)):
            self._hidden[row.index] = verified.output.hidden[i, path[-1] + 1 if path else 0]

    def candidates(self, acceptance: Sequence[float], verification: Sequence[float]) -> list[DraftCandidate]:
        """Return trees by the measured ranks, else chains, all of one effort; see ``Drafter.candidates``."""
        if self.heads.ranks is None:
            return [replace(draft, effort=1.0) for draft in super().candidates(acceptance, verification)]
        return [
            DraftCandidate(n, tokens, 1.0)
            for n, tokens in enumerate(expected_tokens(self.tree(len(verification) - 1), self.heads.ranks), start=1)
        ]


class FeatureNetwork(Protocol):
    """The interface of a network that continues the target's states (EAGLE, MTP).

    Row t of a sequence reads token t + 1 and a state of position t, the target's or its own output of row t - 1, and
    its output gives the logits of token t + 2.

    Attributes:
        features: layers of the target whose entering states it reads.
        vocab_size: V, of the target.
        tokens: ids of the tokens that it can draft, rising, [V_d]; None for all.
        ranks: how often each choice is right at each depth, as measured; None: not measured.
        window: how many tokens a row sees, itself among them; None: all.
        image_tokens: how many tokens it reads of an image (``FewerImageTokens``); None: all.
    """

    features: tuple[int, ...]
    vocab_size: int
    ranks: RankRates | None
    window: int | None
    image_tokens: int | None

    @property
    def tokens(self) -> Tensor | None: ...

    @property
    def device(self) -> torch.device: ...

    def fuse(self, features: Tensor) -> Tensor:
        """Return the network's input for the target's states, [..., F] -> [..., H]."""
        ...

    def advance(self, cache: KVCache, tokens: Tensor, states: Tensor, block: Block) -> Tensor:
        """Return the output of n rows for each of b sequences, [b, n, H], and store their keys and values.

        Args:
            cache: of the network. tokens: [b, n]. states: [b, n, H]. block: slots and positions of the rows.
        """
        ...

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of ``tokens`` for the outputs of ``advance``, [..., H] -> [..., V_d]."""
        ...


class BlockNetwork(Protocol):
    """The interface of a network that drafts a block of tokens in one pass, over the target's states (DFlash).

    Attributes:
        features: layers of the target whose entering states it reads.
        vocab_size: V, of the target.
        tokens: ids of the tokens that it can draft, rising, [V_d]; None for all.
        block_size: rows of a pass. length: tokens that a pass drafts.
        ranks: how often each choice is right at each depth, as measured; None: not measured.
        image_tokens: how many tokens it reads of an image (``FewerImageTokens``); None: all.
    """

    features: tuple[int, ...]
    vocab_size: int
    block_size: int
    length: int
    ranks: RankRates | None
    image_tokens: int | None

    @property
    def tokens(self) -> Tensor | None: ...

    @property
    def device(self) -> torch.device: ...

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Return an empty cache of the network.

        Args:
            batch: sequences. capacity: tokens of each.
        """
        ...

    def read(self, cache: KVCache, features: Tensor, block: Block) -> None:
        """Store the keys and values of n states of the target for each of b sequences.

        Args:
            cache: of the network. features: [b, n, F]. block: their slots.
        """
        ...

    def draft(self, cache: KVCache, last: Tensor, block: Block, count: int) -> Output:
        """Return logits of ``tokens`` [b, count, V_d] and states [b, count, H] for the next ``count`` tokens.

        Args:
            cache: of the network, with the states of all tokens before the last one. last: the last tokens, [b].
            block: the slots of the last tokens and of the masks behind them. count: 1 to ``length``.
        """
        ...

    @property
    def sees_tokens(self) -> bool:
        """Whether a token's logits depend on the token drafted before it."""
        ...

    @property
    def acceptance(self) -> Callable[[Tensor], float] | None:
        """The state that ``place`` returns [H] -> the probability that the token is accepted; None: not estimated."""
        ...

    def place(self, output: Output, k: int, before: Tensor, memory: Tensor | None) -> tuple[Output, Tensor | None]:
        """Return the output [b, n, ...] of place k after each of n tokens, and the memory for the places after it.

        Args:
            output: of ``draft``. k: from 0. before: the tokens before, [b, n].
            memory: what the tokens before them left, [b, n, r]; None at place 0.
        """
        ...


NetworkT = TypeVar("NetworkT", bound=FeatureNetwork | BlockNetwork)


@dataclass
class StateDrafter(Drafter, Generic[NetworkT]):
    """Base of the drafters by a network that reads the target's states into a cache of its own.

    After each verification the states of accepted tokens are the target's: the cache never keeps a row that was
    computed from a guess.

    Attributes:
        network: what drafts.
    """

    network: NetworkT
    _cache: KVCache = field(init=False, repr=False)
    _sampling: Sampling = field(init=False, repr=False)
    _read: dict[int, int] = field(init=False, repr=False, default_factory=dict)  # of each row: states in the cache
    _new: dict[int, Tensor] = field(init=False, repr=False, default_factory=dict)  # of each row: states to read

    @abstractmethod
    def _make_cache(self, batch: int, capacity: int) -> KVCache:
        """Return the network's cache.

        Args:
            batch: sequences. capacity: tokens of each.
        """

    def start(self, rows: list[Row], state: TargetState) -> None:
        if self.network.vocab_size != state.vocab_size:
            raise PeftlabError(
                f"draft: trained for {self.network.vocab_size} tokens, but the target has {state.vocab_size}"
            )
        self._sampling = state.sampling
        # Twice the capacity: a block that starts at the end of one row may be as long as the tokens that another row,
        # which has not read for several steps, still has to read.
        self._cache = self._make_cache(len(rows), 2 * state.cache.capacity)
        self._read, self._new = {}, {}
        self.join(rows, state)

    def join(self, rows: list[Row], state: TargetState) -> None:
        self._read |= {row.index: 0 for row in rows}
        self._new |= {row.index: new for row, new in zip(rows, state.features, strict=True) if new is not None}
        if any(len(row.tokens) > 1 and row.index not in self._new for row in rows):
            layers = ", ".join(map(str, self.network.features))
            raise PeftlabError(
                f"draft: reads the states entering layers {layers}; build_engine(..., features=...) is due"
            )

    def _new_states(self, rows: list[Row]) -> Iterator[tuple[list[int], list[int], list[Tensor]]]:
        """Yield the target's new states in parts: which of the rows, the places they begin at, states [n, F] of each.

        Afterwards they count as read.
        """
        some = next(new for row in rows if (new := self._new.get(row.index)) is not None)
        news = [self._new.pop(row.index, some[:0]) for row in rows]
        starts, counts = [self._read[row.index] for row in rows], [len(new) for new in news]
        for row, count in zip(rows, counts, strict=True):
            self._read[row.index] += count
        for places, first, n in spans(counts, self._cache.most):
            yield places, [starts[i] + first for i in places], [news[i][first : first + n] for i in places]

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
class FeatureDrafter(StateDrafter[FeatureNetwork]):
    """A drafter by a layer that continues the target's states, with a cache of its own.

    γ counts drafted tokens. Width 1 is a chain, drawn from the draft's distribution. Otherwise, as in EAGLE-2
    (arXiv 2406.16858), the ``width`` most probable nodes of the newest level get ``width`` children each, and the γ
    most probable of all nodes are verified, by the product of the probabilities along their path. Such a tree has
    another shape in every step and for every row.

    Attributes:
        width: children of a node, and nodes expanded per level. depth: levels, at most.
        name: for reports.
        window: what the layer sees of a text, in a cache of constant size, for chains only; None: all of it.
    """

    width: int = 1
    depth: int = FEATURE_DEPTH
    name: str = "eagle3 or mtp"
    window: Window | None = None

    @property
    def provides(self) -> frozenset[str]:
        return frozenset({DRAWN, CHAIN} if self.width == 1 else ())

    @property
    def has_logits(self) -> bool:
        return self.width == 1

    def _make_cache(self, batch: int, capacity: int) -> KVCache:
        size = batch, capacity + self.width * self.depth
        return KVCache(1, *size) if self.window is None else WindowedCache(1, *size, self.window)

    @torch.inference_mode()
    def propose(self, rows: list[Row], budgets: list[int]) -> Proposal:
        # A prompt of one token has no states yet: nothing is drafted for it in the first step.
        budgets = [b if row.index in self._new else 0 for row, b in zip(rows, budgets, strict=True)]
        if not any(budgets):
            return Proposal.empty(len(rows), self.network.device)
        first = self._catch_up(rows)
        if self.width > 1:
            return self._trees(rows, budgets, first)
        starts, slots = [len(row.tokens) - 1 for row in rows], [row.slot for row in rows]

        def following(x: Tensor, output: Output, drawn: int) -> Output:
            block = self._cache.block(slots, [start + drawn for start in starts], 1)
            return self._output(self.network.advance(self._cache, x[:, None], output.hidden, block))

        tokens, size = self.network.tokens, self.network.vocab_size
        known = None if tokens is None else (tokens, size)
        return draft_chain(rows, budgets, self._output(first), following, self._sampling, known)

    def _catch_up(self, rows: list[Row]) -> Tensor:
        """Read the target's new states of each row; return the output of the last one, [b, 1, H]."""
        last: dict[int, Tensor] = {}
        for places, begins, parts in self._new_states(rows):
            tokens = [rows[i].tokens[at + 1 : at + 1 + len(x)] for i, at, x in zip(places, begins, parts, strict=True)]
            features = pad_sequence(parts, batch_first=True)
            ids = right_padded(tokens, features.shape[1]).to(features.device)
            block = self._cache.block([rows[i].slot for i in places], begins, features.shape[1])
            states = self.network.advance(self._cache, ids, self.network.fuse(features), block)
            last |= {i: row[len(x) - 1] for i, row, x in zip(places, states, parts, strict=True)}
        nothing = torch.zeros_like(next(iter(last.values())))  # for rows without a new state, whose budget is 0
        return torch.stack([last.get(i, nothing) for i in range(len(rows))])[:, None]

    def _output(self, states: Tensor) -> Output:
        return Output(self.network.logits(states), states)

    def _trees(self, rows: list[Row], budgets: list[int], first: Tensor) -> Proposal:
        """Return the ``budgets[i]`` most probable nodes of the tree below the last token of each row i.

        Args:
            first: the output that the tokens after the last one are drafted from, [b, 1, H].
        """
        starts, slots = [len(row.tokens) - 1 for row in rows], [row.slot for row in rows]
        trees, states, device = GrowingTrees(len(rows), first.device), first, first.device
        trees.add(*top_children(self.network.logits(states), self.width, self.network.tokens))
        for level in range(min(self.depth, max(budgets)) - 1):
            if not trees.children_can_enter(budgets):
                break
            tokens, above, seen = trees.expand(self.width)
            (_, k, m), wide = seen.shape, states.shape[-1]
            positions = torch.tensor(starts, device=device)[:, None].expand(-1, k) + level
            # The m nodes read so far are stored from ``start`` on, the k newest last; all of a level share a position.
            block = self._cache.block(slots, [start + m - k for start in starts], k)
            visible = visible_slots(starts, seen)[:, None]
            if self.network.window is not None:  # the tree's own slots are not before its positions
                slots_behind = positions[:, None, :, None] - torch.arange(visible.shape[-1], device=device)
                visible = visible & (slots_behind < self.network.window)
            states = states.gather(1, above[..., None].expand(-1, -1, wide))
            placed = PlacedBlock(block.starts, k, block.rows, of=block, at=positions, mask=visible)
            states = self.network.advance(self._cache, tokens, states, placed)
            trees.add(*top_children(self.network.logits(states), self.width, self.network.tokens))
        drafted, parents = trees.best(budgets)
        return Proposal(drafted, parents=parents)

    def candidates(self, acceptance: Sequence[float], verification: Sequence[float]) -> list[DraftCandidate]:
        """Return chains, and trees of its own or the usual width, by the measured ranks (``Drafter.candidates``).

        Each level of a tree after the first reads several nodes, which takes as many times longer as a target step over
        as many tokens.
        """
        ranks = self.network.ranks
        if ranks is None:
            return super().candidates(acceptance, verification)
        longest, found = len(verification) - 1, list[DraftCandidate]()
        for width in sorted({1, self.width if self.width > 1 else FEATURE_TREE}):
            tree = best_tree(longest, self.depth if width > 1 else longest, min(width, ranks.width), ranks)
            levels, several = accumulate(map(len, tree), max), verification[min(width, longest) - 1]
            for n, (tokens, level) in enumerate(zip(expected_tokens(tree, ranks), levels, strict=True), start=1):
                found.append(DraftCandidate(n, tokens, 1 + (level - 1) * several, width, width == self.width))
        return found


@dataclass
class BlockDrafter(StateDrafter[BlockNetwork]):
    """A drafter by layers that fill a block of tokens in one pass, over keys and values of the target's states.

    The block's own rows are not kept: the next pass, and the states of accepted tokens, are written over them. γ counts
    drafted tokens: a chain is drawn place by place; the nodes of a tree are the γ most probable paths of the ``width``
    best tokens of each place. Where a token sees the one before it, trees grow as those of ``FeatureDrafter``.

    Attributes:
        width: choices of each place; 1 is a chain. name: for reports.
    """

    width: int = 1
    name: str = "dflash"

    @property
    def provides(self) -> frozenset[str]:
        if self.width > 1:
            return frozenset()
        return frozenset({DRAWN, CHAIN, *([HEAD] if self.network.acceptance is not None else [])})

    @property
    def has_logits(self) -> bool:
        return self.width == 1

    @property
    def chain_limit(self) -> int | None:
        return self.network.length if self.width == 1 else None

    @property
    def acceptance(self) -> Callable[[Tensor], float] | None:
        return self.network.acceptance

    def _make_cache(self, batch: int, capacity: int) -> KVCache:
        return self.network.new_cache(batch, capacity + self.network.block_size)

    @torch.inference_mode()
    def propose(self, rows: list[Row], budgets: list[int]) -> Proposal:
        # A prompt of one token has no states yet: nothing is drafted for it in the first step.
        longest, network = self.network.length, self.network
        most = longest if self.width == 1 else max(budgets)
        budgets = [min(b, most) * (row.index in self._new) for row, b in zip(rows, budgets, strict=True)]
        if not any(budgets):
            return Proposal.empty(len(rows), network.device)
        for places, begins, parts in self._new_states(rows):
            features = pad_sequence(parts, batch_first=True)
            block = self._cache.block([rows[i].slot for i in places], begins, features.shape[1])
            network.read(self._cache, features, block)
        last = torch.tensor([row.tokens[-1] for row in rows], device=network.device)
        starts, slots = [self._read[row.index] for row in rows], [row.slot for row in rows]
        block = self._cache.block(slots, starts, network.block_size)
        output = network.draft(self._cache, last, block, min(longest, max(budgets)))
        if self.width > 1 and network.sees_tokens:
            return self._growing_trees(output, last, budgets)
        if self.width > 1:
            return place_trees(output.logits, budgets, self.width, ids=network.tokens)
        first, memory = network.place(output, 0, last[:, None], None)

        def following(x: Tensor, before: Output, drawn: int) -> Output:
            nonlocal memory
            found, memory = network.place(output, drawn + 1, x[:, None], memory)
            return found

        known = None if network.tokens is None else (network.tokens, network.vocab_size)
        return draft_chain(rows, budgets, first, following, self._sampling, known)

    def _growing_trees(self, output: Output, last: Tensor, budgets: Sequence[int]) -> Proposal:
        """Return the most probable nodes of trees whose nodes' children depend on them.

        Args:
            output: of the block. last: the last tokens, [b]. budgets: nodes of each row.
        """
        trees, tokens, memory = GrowingTrees(len(last), last.device), last[:, None], None
        for k in range(output.logits.shape[1]):
            if k:
                if not trees.children_can_enter(budgets):
                    break
                tokens, above, _ = trees.expand(self.width)
                if memory is not None:
                    memory = memory.gather(1, above[..., None].expand(-1, -1, memory.shape[-1]))
            found, memory = self.network.place(output, k, tokens, memory)
            trees.add(*top_children(found.logits, self.width, self.network.tokens))
        drafted, parents = trees.best(budgets)
        return Proposal(drafted, parents=parents)

    def candidates(self, acceptance: Sequence[float], verification: Sequence[float]) -> list[DraftCandidate]:
        """Return chains, and trees of its own or the usual width, each drafted in one pass (``Drafter.candidates``)."""
        ranks, longest = self.network.ranks, len(verification) - 1
        if ranks is None:
            chains = super().candidates(acceptance, verification)[: self.network.length]
            return [replace(draft, effort=1.0) for draft in chains]
        found = list[DraftCandidate]()
        for width in sorted({1, self.width if self.width > 1 else FEATURE_TREE}):
            tree = best_tree(longest, self.network.length, min(width, ranks.width), ranks)
            for n, tokens in enumerate(expected_tokens(tree, ranks), start=1):
                found.append(DraftCandidate(n, tokens, 1.0, width, width == self.width))
        return found


def output_at(output: Output, place: int) -> Output:
    """Return the output of one place, logits [b, n, V] -> [b, 1, V]."""
    return Output(output.logits[:, place : place + 1], output.hidden[:, place : place + 1])


def place_trees(
    logits: Tensor,
    budgets: Sequence[int],
    width: int,
    rooms: Sequence[int] | None = None,
    *,
    ids: Tensor | None = None,
    certain: bool = False,
) -> Proposal:
    """Return a tree of the most probable nodes for each row, where a token's law depends on its place alone.

    Args:
        logits: [b, n, V_d] of n places. budgets: nodes of each row. width: choices of a place, at most.
        rooms: places of each row that may be used; None: all. ids: [V_d], the token of each logit; None: its number.
        certain: the first place's best token is the target's own.
    """
    best, places = logits.float().softmax(-1).topk(min(width, logits.shape[-1]), -1)
    if certain:
        best[:, 0, 0], best[:, 0, 1:] = 1, 0
    tokens, parents = [], []
    choices = places if ids is None else ids[places]
    rooms = [logits.shape[1]] * len(budgets) if rooms is None else rooms
    for rates, each, budget, room in zip(best.tolist(), choices.tolist(), budgets, rooms, strict=True):
        known = RankRates(tuple(tuple(max(rate, 1e-12) for rate in place) for place in rates))
        tree = best_tree(budget, min(len(rates), max(room, 1)), best.shape[-1], known)
        tokens.append([each[len(path) - 1][path[-1]] for path in tree])
        parents.append(parents_of(tree))
    size = max(map(len, tokens))
    filled = [(*line, *[-1] * (size - len(line))) for line in parents]
    return Proposal(right_padded(tokens, size, -1).to(logits.device), parents=filled)


@dataclass
class FewerImageTokens(DrafterWrapper):
    """A drafter by a network that reads a few tokens of an image, or none: its texts are shorter than the target's.

    In the place of an image's states it reads means of equal parts of them, and the placeholder's token
    (``models.image_tokens.draft_places``). Its positions count what it reads.

    Attributes:
        drafter: of the network. kept: tokens that it reads of an image.
    """

    drafter: FeatureDrafter | BlockDrafter
    kept: int
    _shorter: dict[int, tuple[list[int], int]] = field(init=False, repr=False, default_factory=dict)
    """Index of a row -> its prompt as the draft reads it, and how many tokens that prompt has."""

    @property
    def chain_limit(self) -> int | None:
        return self.drafter.chain_limit

    def start(self, rows: list[Row], state: TargetState) -> None:
        self._shorter = {}
        self.drafter.start(*self._begin(rows, state))

    def join(self, rows: list[Row], state: TargetState) -> None:
        self.drafter.join(*self._begin(rows, state))

    def propose(self, rows: list[Row], budgets: list[int]) -> Proposal:
        return self.drafter.propose(self._of_draft(rows), budgets)

    def accept(self, rows: list[Row], verified: Verified) -> None:
        self.drafter.accept(self._of_draft(rows), verified)

    def _begin(self, rows: list[Row], state: TargetState) -> tuple[list[Row], TargetState]:
        """Return new rows, and the target's state after their prompts, as the draft reads them."""
        features = list[Tensor | None]()
        for row, states in zip(rows, state.features, strict=True):
            # The last token is not read yet: whatever it is, it is a row of its own.
            places = draft_places([*(row.images or row.tokens)[:-1], row.tokens[-1]], self.kept)
            first = {place: i for i, place in reversed([*enumerate(places)]) if place >= 0}
            self._shorter[row.index] = [row.tokens[first[place]] for place in sorted(first)], len(places)
            read = torch.tensor(places[:-1])
            features.append(None if states is None else mean_of_parts(states, read))
        return self._of_draft(rows), replace(state, features=features)

    def _of_draft(self, rows: list[Row]) -> list[Row]:
        """Return rows with the tokens that the draft reads."""
        return [
            replace(row, tokens=[*self._shorter[row.index][0], *row.tokens[self._shorter[row.index][1] :]], images=[])
            for row in rows
        ]


def mean_of_parts(states: Tensor, places: Tensor) -> Tensor:
    """Return the mean of the states [n, F] that go to each place, [m, F].

    Args:
        states: [n, F]. places: of each of them, 0 to m - 1, or -1: it is left out; [n].
    """
    kept = (places >= 0).to(states.device)
    at = places.to(states.device)[kept]
    m = int(at.max()) + 1 if len(at) else 0
    total = states.new_zeros(m, states.shape[1]).index_add_(0, at, states[kept])
    return total / at.bincount(minlength=m)[:, None]


def state_drafter(network: FeatureNetwork | BlockNetwork, width: int = 1) -> Drafter:
    """Return a new drafter by a network on the target's states.

    Args:
        network: which drafts. width: as of the drafters.
    """
    # By an attribute, which a stopwatch around the network has, too.
    if hasattr(network, "block_size"):
        drafter: FeatureDrafter | BlockDrafter = BlockDrafter(cast(BlockNetwork, network), width)
    else:
        drafter = FeatureDrafter(network, width)
    return drafter if network.image_tokens is None else FewerImageTokens(drafter, network.image_tokens)


def top_children(logits: Tensor, width: int, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the ``width`` most probable tokens and their log-probabilities, [b, k, V_d] -> [b, k, width] each.

    Args:
        logits: after each of k nodes. width: how many. ids: [V_d], the token of each logit; None: its own number.
    """
    values, places = logits.topk(min(width, logits.shape[-1]), -1)
    log_probs = values.float() - logits.float().logsumexp(-1, keepdim=True)
    return places if ids is None else ids[places], log_probs


class GrowingTrees:
    """Trees for b rows that grow level by level: the most probable nodes are read, and their children are added.

    A node is as probable as its path: the product of the draft's probabilities along it. Nodes are numbered as they are
    added, -1 is the root; all rows have the same number of nodes in each level.

    Args:
        b: rows. device: of what is added.
    """

    def __init__(self, b: int, device: torch.device):
        self._tokens = torch.empty(b, 0, dtype=torch.long, device=device)  # [b, N], as the next two
        self._parents, self._values = self._tokens, torch.empty(b, 0, device=device)
        self._begin, self._children = 0, 1  # the first node of the newest level, and how many each parent has there
        self._read = torch.full((b, 1), -1, device=device)  # the nodes read last, [b, k], and their values
        self._read_values = torch.zeros(b, 1, device=device)
        self._above = torch.ones(b, 1, 0, dtype=torch.bool, device=device)  # see ``expand``

    def add(self, tokens: Tensor, log_probs: Tensor) -> None:
        """Add a level: w children of each of the k nodes that were read last, of the root at first.

        Args:
            tokens: [b, k, w]. log_probs: [b, k, w], of each token after its parent.
        """
        self._begin, self._children = self._tokens.shape[1], tokens.shape[2]
        self._tokens = torch.cat((self._tokens, tokens.flatten(1)), 1)
        self._parents = torch.cat((self._parents, self._read.repeat_interleave(self._children, 1)), 1)
        self._values = torch.cat((self._values, (self._read_values[:, :, None] + log_probs).flatten(1)), 1)

    def expand(self, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the ``width`` most probable nodes of the newest level, which the caller reads next.

        Returns:
            Their tokens [b, k]; the place [b, k] of each one's parent among the nodes read before; and [b, k, m]
            booleans, which of the m nodes read so far, in their order, each of them descends from or is.
        """
        newest = self._values[:, self._begin :]
        self._read_values, best = newest.topk(min(width, newest.shape[1]), 1)
        self._read, place = self._begin + best, best // self._children
        above = self._above.gather(1, place[:, :, None].expand(-1, -1, self._above.shape[2]))
        own = torch.eye(best.shape[1], dtype=torch.bool, device=best.device).expand(len(best), -1, -1)
        self._above = torch.cat((above, own), 2)
        return self._tokens.gather(1, self._read), place, self._above

    def children_can_enter(self, sizes: Sequence[int]) -> bool:
        """Return whether a child of a newest node can be among the ``sizes[i]`` most probable nodes of row i."""
        count = self._values.shape[1]
        if max(sizes) > count:
            return True
        last = torch.tensor(sizes, device=self._values.device)[:, None].clamp_min(1) - 1
        least = self._values.sort(dim=1, descending=True).values.gather(1, last)[:, 0]
        return bool((self._values[:, self._begin :].amax(1) > least).any())

    def best(self, sizes: Sequence[int]) -> tuple[Tensor, list[tuple[int, ...]]]:
        """Return the ``sizes[i]`` most probable nodes of each row i, parents first; the older node wins a tie.

        Returns:
            Their tokens [b, N], -1 where a row has fewer, and their parents.
        """
        count = self._values.shape[1]
        ranks = torch.arange(min(max(sizes), count), device=self._values.device)
        # The values fall along a path, or are equal to rounding: in this order no node comes before its parent.
        order = self._values.sort(dim=1, descending=True, stable=True).indices[:, : len(ranks)]
        within_size = ranks < torch.tensor(sizes, device=order.device)[:, None]
        kept = order.where(within_size, count).sort(dim=1).values
        place = torch.full((len(kept), count + 2), -1, device=order.device)  # of the root, the nodes, and no node
        place.scatter_(1, kept + 1, ranks.expand(len(kept), -1))
        some = kept.clamp_max(count - 1)
        parents = place.gather(1, self._parents.gather(1, some) + 1).where(kept < count, -1)
        return self._tokens.gather(1, some).where(kept < count, -1), [tuple(line) for line in parents.tolist()]
