"""Drafting with a model that writes several tokens in one pass, as a chain or as a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from peftlab.decoding.drafters.base import Drafter, PossibleDraft, Proposal, Row, TargetState
from peftlab.decoding.drafters.chain_draft import draft_chain
from peftlab.decoding.drafters.model_drafter import check_vocabulary, read_rows, room
from peftlab.decoding.engines.base import Engine, Output
from peftlab.decoding.engines.cache import KVCache
from peftlab.decoding.engines.prefill import empty_cache, right_padded
from peftlab.decoding.sampling import Sampling
from peftlab.decoding.trees import RankRates, best_tree, parents_of
from peftlab.errors import PeftlabError


@dataclass(frozen=True)
class Masks:
    """What a draft model that writes several tokens in one pass reads in their place.

    Attributes:
        token: the mask's id. length: K, the tokens it was trained to write.
        noise: masks have no id of their own: they are drawn once, uniformly from the ids below ``token``.
    """

    token: int
    length: int
    noise: bool = False

    def ids(self, count: int) -> list[int]:
        """Return the ids of the first ``count`` masks."""
        if not self.noise:
            return [self.token] * count
        return torch.randint(self.token, (count,), generator=torch.Generator().manual_seed(0)).tolist()

    def check_gamma(self, gamma: int) -> None:
        """Raise ``PeftlabError`` for more tokens in one pass than the draft was trained to write."""
        if gamma > self.length:
            raise PeftlabError(f"--gamma {gamma}: the draft was trained to write {self.length} tokens in one pass")


@dataclass
class ParallelDrafter(Drafter):
    """A model that reads n - 1 masks behind the last token and drafts n tokens in that one pass (PARD).

    The masks are not kept: the next pass writes over them. A token is drafted without knowing those drafted before it.
    γ counts drafted tokens: a chain is drawn place by place and has at most K; the nodes of a tree are the γ most
    probable paths of the ``width`` best tokens at each of K places, by the product of their probabilities, row by row.

    Attributes:
        engine: of the draft. masks: see ``Masks``. width: choices of each place; 1 is a chain.
        shares_cache: the draft reads tokens as the target does, and masks as it alone does: it needs no cache of its
            own, and what it predicts behind the last token is what the target predicts.
        name: for reports.
    """

    engine: Engine
    masks: Masks
    width: int = 1
    shares_cache: bool = False
    name: str = "parallel draft"
    _cache: KVCache = field(init=False, repr=False)
    _sampling: Sampling = field(init=False, repr=False)
    _read: dict[int, int] = field(init=False, repr=False, default_factory=dict)  # of each row: tokens in the cache

    @property
    def has_logits(self) -> bool:
        return self.width == 1

    def start(self, rows: list[Row], state: TargetState) -> None:
        check_vocabulary(self.engine, state)
        if self.engine.encoder is not None or state.cache.context is not None:
            raise PeftlabError("draft: a draft that writes several tokens in one pass is for decoders alone")
        self._sampling, self._read = state.sampling, {}
        self._cache = state.cache
        if not self.shares_cache:
            # Rows that have not read for several steps are read together with one that is nearly at its end.
            capacity = 2 * state.cache.capacity + self.masks.length
            self._cache = empty_cache(self.engine, capacity, [row.source for row in rows])
        self.join(rows, state)

    def join(self, rows: list[Row], state: TargetState) -> None:
        self._read |= {row.index: len(row.tokens) - 1 for row in rows}
        if not self.shares_cache:
            read_rows(self.engine, self._cache, rows)

    @property
    def _certain(self) -> bool:
        """Whether the first token is the target's own choice, with no other worth a node of a tree."""
        return self.shares_cache and self._sampling.greedy

    def _room(self, row: Row) -> int:
        """How many places behind a row are drafted at most."""
        return room(self.engine, row, self.masks.length)

    def propose(self, rows: list[Row], budgets: list[int]) -> Proposal:
        rooms = [self._room(row) for row in rows]
        chain = self.width == 1
        budgets = [min(b, places) if chain else b * (places > 0) for b, places in zip(budgets, rooms, strict=True)]
        if not any(budgets):
            return Proposal.empty(len(rows), self.engine.device)
        output = self._places(rows, min(max(budgets), max(rooms)))
        if not chain:
            return self._trees(output.logits, budgets, rooms)

        def following(x: Tensor, before: Output, drawn: int) -> Output:
            return _place(output, drawn + 1)

        return draft_chain(rows, budgets, _place(output, 0), following, self._sampling)

    def _places(self, rows: list[Row], n: int) -> Output:
        """Read each row's new tokens and n - 1 masks; return the output of its last token and of the masks."""
        starts = [len(row.tokens) - 1 if self.shares_cache else self._read[row.index] for row in rows]
        new = [row.tokens[start:] for row, start in zip(rows, starts, strict=True)]
        masks = self.masks.ids(n - 1)
        longest = max(map(len, new)) + n - 1
        tokens = right_padded([[*tokens, *masks] for tokens in new], longest).to(self.engine.device)
        keep = sorted({len(tokens) - 1 + place for tokens in new for place in range(n)})
        block = self._cache.block([row.slot for row in rows], starts, longest)
        output = self.engine.forward(self._cache, tokens, block, keep)
        self._read |= {row.index: len(row.tokens) for row in rows}
        first = torch.tensor([keep.index(len(tokens) - 1) for tokens in new], device=self.engine.device)
        each = torch.arange(len(rows), device=self.engine.device)[:, None]
        # Places next to one another are next to one another in ``keep``, too.
        here = first[:, None] + torch.arange(n, device=self.engine.device)
        return Output(output.logits[each, here], output.hidden[each, here])

    def _trees(self, logits: Tensor, budgets: list[int], rooms: list[int]) -> Proposal:
        """Return the most probable nodes of each row, for logits [b, n, V]."""
        best, ids = logits.float().softmax(-1).topk(min(self.width, logits.shape[-1]), -1)
        if self._certain:
            best[:, 0, 0], best[:, 0, 1:] = 1, 0
        tokens, parents = [], []
        for rates, choices, budget, places in zip(best.tolist(), ids.tolist(), budgets, rooms, strict=True):
            known = RankRates(tuple(tuple(max(rate, 1e-12) for rate in place) for place in rates))
            tree = best_tree(budget, min(len(rates), max(places, 1)), best.shape[-1], known)
            tokens.append([choices[len(path) - 1][path[-1]] for path in tree])
            parents.append(parents_of(tree))
        size = max(map(len, tokens))
        filled = [(*line, *[-1] * (size - len(line))) for line in parents]
        return Proposal(right_padded(tokens, size, -1).to(logits.device), parents=filled)

    def possible(self, acceptance: Sequence[float], verification: Sequence[float]) -> list[PossibleDraft]:
        """See ``Drafter.possible``: chains, each drafted in one pass; of a tree's nodes no acceptance is known."""
        if self.width > 1:
            return []
        return [replace(draft, effort=1.0) for draft in super().possible(acceptance, verification)]

    def select(self, slots: list[int]) -> None:
        if not self.shares_cache:
            self._cache.select(slots)


def _place(output: Output, place: int) -> Output:
    return Output(output.logits[:, place : place + 1], output.hidden[:, place : place + 1])
