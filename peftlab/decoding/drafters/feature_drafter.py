"""Drafting with a layer that continues the target's own states (EAGLE): a chain, or a tree that grows as it drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from peftlab.decoding.analysis.advice import FEATURE_TREE
from peftlab.decoding.drafters.base import Drafter, PossibleDraft, Proposal, Row, TargetState, Verified
from peftlab.decoding.drafters.chain_draft import draft_chain
from peftlab.decoding.drafters.growing_trees import GrowingTrees
from peftlab.decoding.engines.base import Output
from peftlab.decoding.engines.cache import Block, KVCache, seen_from
from peftlab.decoding.engines.prefill import right_padded, spans
from peftlab.decoding.engines.windowed_cache import WindowedCache
from peftlab.decoding.sampling import Sampling
from peftlab.decoding.table import DRAWN, Window
from peftlab.decoding.trees import RankRates, best_tree, expected_tokens
from peftlab.errors import PeftlabError


class FeatureNetwork(Protocol):
    """What a drafter needs of a network that reads the target's states.

    Row t of a sequence reads token t + 1 and a state of position t, the target's or its own output of row t - 1, and
    its output gives the logits of token t + 2.

    Attributes:
        features: layers of the target whose entering states it reads.
        vocab_size: V, of the target.
        tokens: ids of the tokens that it can draft, rising, [V_d]; None for all.
        ranks: how often each choice is right at each depth, as measured; None: not measured.
    """

    features: tuple[int, ...]
    vocab_size: int
    ranks: RankRates | None

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
class FeatureDrafter(Drafter):
    """One layer that continues the target's states, with a cache of its own.

    γ counts drafted tokens. Width 1 is a chain, drawn from the draft's distribution. Otherwise, as in EAGLE-2
    (arXiv 2406.16858), the ``width`` most probable nodes of the newest level get ``width`` children each, and the γ
    most probable of all nodes are verified, by the product of the probabilities along their path. Such a tree has
    another shape in every step and for every row.

    After each verification the states of accepted tokens are the target's: the cache never keeps a row that was
    computed from a guess.

    Attributes:
        network: what drafts. width: children of a node, and nodes expanded per level. depth: levels, at most.
        name: for reports.
        window: what the layer sees of a text, in a cache of constant size, for chains only; None: all of it.
    """

    network: FeatureNetwork
    width: int = 1
    depth: int = 6
    name: str = "features"
    window: Window | None = None
    _cache: KVCache = field(init=False, repr=False)
    _sampling: Sampling = field(init=False, repr=False)
    _read: dict[int, int] = field(init=False, repr=False, default_factory=dict)
    _new: dict[int, Tensor] = field(init=False, repr=False, default_factory=dict)

    @property
    def gives(self) -> frozenset[str]:
        return frozenset({DRAWN} if self.width == 1 else ())

    @property
    def has_logits(self) -> bool:
        return self.width == 1

    def start(self, rows: list[Row], state: TargetState) -> None:
        if self.network.vocab_size != state.vocab_size:
            raise PeftlabError(
                f"draft: trained for {self.network.vocab_size} tokens, but the target has {state.vocab_size}"
            )
        self._sampling = state.sampling
        # Rows that have not read for several steps are read together with one that is nearly at its end.
        size = len(rows), 2 * state.cache.capacity + self.width * self.depth
        self._cache = KVCache(1, *size) if self.window is None else WindowedCache(1, *size, self.window)
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
            return self._output(self._advance(x[:, None], output.hidden, block))

        tokens, size = self.network.tokens, self.network.vocab_size
        known = None if tokens is None else (tokens, size)
        return draft_chain(rows, budgets, self._output(first), following, self._sampling, known)

    def _catch_up(self, rows: list[Row]) -> Tensor:
        """Read the target's new states of each row; return the output of the last one, [b, 1, H]."""
        some = next(new for row in rows if (new := self._new.get(row.index)) is not None)
        news = [self._new.pop(row.index, some[:0]) for row in rows]
        starts, counts = [self._read[row.index] for row in rows], [len(new) for new in news]
        last: dict[int, Tensor] = {}
        for places, first, n in spans(counts, self._cache.most):
            parts = [news[i][first : first + n] for i in places]
            begins = [starts[i] + first for i in places]
            tokens = [rows[i].tokens[at + 1 : at + 1 + len(x)] for i, at, x in zip(places, begins, parts, strict=True)]
            features, ids = pad_sequence(parts, batch_first=True), right_padded(tokens, n).to(some.device)
            block = self._cache.block([rows[i].slot for i in places], begins, n)
            states = self._advance(ids, self.network.fuse(features), block)
            last |= {i: row[len(x) - 1] for i, row, x in zip(places, states, parts, strict=True)}
        for row, count in zip(rows, counts, strict=True):
            self._read[row.index] += count
        nothing = torch.zeros_like(next(iter(last.values())))  # a row without a state drafts nothing
        return torch.stack([last.get(i, nothing) for i in range(len(rows))])[:, None]

    def _advance(self, tokens: Tensor, states: Tensor, block: Block) -> Tensor:
        """Compute the rows of a block of chains."""
        device = self.network.device
        return self.network.advance(
            self._cache, tokens, states, block, block.positions(device), block.visible(None, device)
        )

    def _output(self, states: Tensor) -> Output:
        return Output(self.network.logits(states), states)

    def _trees(self, rows: list[Row], budgets: list[int], first: Tensor) -> Proposal:
        """Return the ``budgets[i]`` most probable nodes of the tree below the last token of each row i.

        Args:
            first: the output that the tokens after the last one are drafted from, [b, 1, H].
        """
        starts, slots = [len(row.tokens) - 1 for row in rows], [row.slot for row in rows]
        trees, states, device = GrowingTrees(len(rows), first.device), first, first.device
        trees.add(*self._likeliest(states))
        for level in range(min(self.depth, max(budgets)) - 1):
            if not trees.deeper_matters(budgets):
                break
            tokens, above, seen = trees.expand(self.width)
            (_, k, m), wide = seen.shape, states.shape[-1]
            positions = torch.tensor(starts, device=device)[:, None].expand(-1, k) + level
            block = self._cache.block(slots, [start + m - k for start in starts], k)
            visible = seen_from(starts, seen)[:, None]
            states = states.gather(1, above[..., None].expand(-1, -1, wide))
            states = self.network.advance(self._cache, tokens, states, block, positions, visible)
            trees.add(*self._likeliest(states))
        drafted, parents = trees.best(budgets)
        return Proposal(drafted, parents=parents)

    def _likeliest(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ``width`` most probable tokens after each state [b, k, H] and log-probabilities, [b, k, width]."""
        logits, known = self.network.logits(states), self.network.tokens
        values, places = logits.topk(min(self.width, logits.shape[-1]), -1)
        log_probs = values.float() - logits.float().logsumexp(-1, keepdim=True)
        return places if known is None else known[places], log_probs

    def accept(self, rows: list[Row], verified: Verified) -> None:
        features = verified.output.features
        assert features is not None
        for i, (row, path) in enumerate(zip(rows, verified.paths, strict=True)):
            new = features[i, [0, *(node + 1 for node in path)]]
            old = self._new.get(row.index)
            self._new[row.index] = new if old is None else torch.cat((old, new))

    def select(self, slots: list[int]) -> None:
        self._cache.select(slots)

    def possible(self, acceptance: Sequence[float], verification: Sequence[float]) -> list[PossibleDraft]:
        """See ``Drafter.possible``: by the measured ranks the chains, and the trees of its own or the usual width.

        Each level of a tree after the first reads several nodes, which takes as many times longer as a target step over
        as many tokens.
        """
        ranks = self.network.ranks
        if ranks is None:
            return super().possible(acceptance, verification)
        longest, found = len(verification) - 1, list[PossibleDraft]()
        for width in sorted({1, self.width if self.width > 1 else FEATURE_TREE}):
            tree = best_tree(longest, self.depth if width > 1 else longest, min(width, ranks.width), ranks)
            levels, several = accumulate(map(len, tree), max), verification[min(width, longest) - 1]
            for n, (tokens, level) in enumerate(zip(expected_tokens(tree, ranks), levels, strict=True), start=1):
                found.append(PossibleDraft(n, tokens, 1 + (level - 1) * several, width, width == self.width))
        return found
