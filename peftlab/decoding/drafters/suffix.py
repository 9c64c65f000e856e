"""Copying what followed the longest repeated suffix, alone or in one tree with what another drafter proposes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from peftlab.decoding.drafters.base import Around, Drafter, Proposal, Row, TargetState, Verified
from peftlab.decoding.drafters.suffix_automaton import END, ROOT, SuffixAutomaton
from peftlab.decoding.engines.prefill import right_padded
from peftlab.decoding.sampling import certain
from peftlab.decoding.table import TIMES


@dataclass
class SuffixLookup(Drafter):
    """What followed the longest suffix of a sequence at its first occurrence, in the sequence or in a corpus.

    SAM-Decoding (Hu et al. 2024, arXiv 2411.10666). What is copied up to the end of the sequence is repeated from
    there, so that a loop is drafted at any length.

    Attributes:
        corpus: text that does not grow, its documents separated by ``END``; None: the sequence alone.
        shortest: tokens that must match.
        margin: the corpus is copied where its match is longer than the sequence's own by more than this.
        name: for reports.
    """

    corpus: SuffixAutomaton | None = None
    shortest: int = 1
    margin: int = 5
    name: str = "suffix"
    gives = frozenset({TIMES})
    _texts: dict[int, SuffixAutomaton] = field(init=False, repr=False, default_factory=dict)
    _places: dict[int, tuple[int, int]] = field(init=False, repr=False, default_factory=dict)

    def start(self, rows: list[Row], state: TargetState) -> None:
        self._texts, self._places = {}, {}
        self.join(rows, state)

    def join(self, rows: list[Row], state: TargetState) -> None:
        self._texts |= {row.index: SuffixAutomaton() for row in rows}
        self._places |= {row.index: ROOT for row in rows}

    def find(self, row: Row, budget: int) -> tuple[int, list[int]]:
        """Return how many tokens match, and at most ``budget`` tokens that followed; (0, []) if none are copied."""
        text, place = self._texts[row.index], self._places[row.index]
        for token in row.text[len(text.tokens) :]:
            text.extend(token)
            if self.corpus is not None:
                place = self.corpus.follow(place, token)
        self._places[row.index] = place
        length, end = text.repeated()
        if self.corpus is not None and place[1] - self.margin > length and (copied := self._stored(place, budget)):
            return (place[1], copied) if place[1] >= self.shortest else (0, [])
        tail = text.tokens[end : end + budget]
        copied = [tail[k % len(tail)] for k in range(budget)]
        return (length, copied) if length >= self.shortest and copied else (0, [])

    def _stored(self, place: tuple[int, int], budget: int) -> list[int]:
        """Return what followed in the corpus, up to the end of the document."""
        assert self.corpus is not None
        end = self.corpus.end(place)
        copied = self.corpus.tokens[end : end + budget]
        return copied[: copied.index(END)] if END in copied else copied

    def propose(self, rows: list[Row], budgets: list[int]) -> Proposal:
        copies = [self.find(row, budget)[1] for row, budget in zip(rows, budgets, strict=True)]
        return Proposal(right_padded(copies, max(map(len, copies)), filler=-1))


@dataclass
class SuffixAndDraft(Around):
    """A long match is copied; elsewhere another drafter proposes, and a copy that differs from it is a branch.

    Where every row has a long match, the step costs no drafting. Elsewhere, RASD (Quan et al. 2025, arXiv 2503.03434):
    the drafter gets half of the budget of a row that has a match, and the copy the rest; their common beginning is
    shared (``fuse``).

    Attributes:
        suffix: finds the copies.
        drafter: proposes chains or trees; it must accept the outcome of steps and of branches that it did not propose.
        long: tokens of a match that is copied without drafting.
        top: a copy that leaves a draft model's chain is dropped unless its token is among the model's this many best.
        name: for reports.
    """

    suffix: SuffixLookup
    drafter: Drafter
    long: int = 4
    top: int = 10
    name: str = "suffix+draft"
    has_logits = False  # of copies there are none

    def start(self, rows: list[Row], state: TargetState) -> None:
        self.suffix.start(rows, state)
        self.drafter.start(rows, state)

    def join(self, rows: list[Row], state: TargetState) -> None:
        self.suffix.join(rows, state)
        self.drafter.join(rows, state)

    def propose(self, rows: list[Row], budgets: list[int]) -> Proposal:
        found = [self.suffix.find(row, budget) for row, budget in zip(rows, budgets, strict=True)]
        copies = [copied for _, copied in found]
        if all(length >= self.long or not budget for (length, _), budget in zip(found, budgets, strict=True)):
            return Proposal(right_padded(copies, max(map(len, copies)), filler=-1))
        shares = [(budget + 1) // 2 if copied else budget for copied, budget in zip(copies, budgets, strict=True)]
        return fuse(self.drafter.propose(rows, shares), copies, budgets, self.top)

    def accept(self, rows: list[Row], verified: Verified) -> None:
        self.suffix.accept(rows, verified)
        self.drafter.accept(rows, verified)

    def select(self, slots: list[int]) -> None:
        self.suffix.select(slots)
        self.drafter.select(slots)


def suffix(corpus: SuffixAutomaton | None, _: None) -> SuffixLookup:
    """Return a new drafter."""
    return SuffixLookup(corpus)


def with_copies(drafter: Drafter, corpus: SuffixAutomaton | None = None) -> SuffixAndDraft:
    """Return ``drafter`` with copies beside it, of two matching tokens at least."""
    return SuffixAndDraft(SuffixLookup(corpus, shortest=2), drafter)


def fuse(draft: Proposal, copies: Sequence[list[int]], budgets: Sequence[int], top: int) -> Proposal:
    """Return the tree of a draft and a copied chain for each row, merged by their longest common prefix.

    Drafted nodes are never dropped: to drop a sampled token because of its value would bias the output.

    Args:
        draft: chains or trees. copies: tokens of each row's chain, [] for none. budgets: nodes of each row.
        top: drop a copy that leaves the chain where its token is not among the draft model's ``top`` best; a draft
            without logits drops none.
    """
    b, n = draft.tokens.shape
    drafted, trees = draft.tokens.tolist(), [draft.parents_of(i) for i in range(b)]
    used = [1 + max((node for node, token in enumerate(line) if token >= 0), default=-1) for line in drafted]
    tokens, parents = [], []
    for i, (line, tree, count) in enumerate(zip(drafted, trees, used, strict=True)):
        node, rest = _leave(tree, line, copies[i])
        rest = rest[: max(0, budgets[i] - count)] if _likely(draft, line, i, node, rest, top) else []
        tokens.append(line[:count] + rest)
        parents.append([*tree[:count], *[node, *range(count, count + len(rest) - 1)][: len(rest)]])
    if used == [len(line) for line in tokens]:
        return draft
    width = max(map(len, tokens))
    whole = right_padded(tokens, width, filler=-1).to(draft.tokens.device)
    probs = draft.probs
    if probs is not None:
        copied = torch.arange(width, device=whole.device) >= torch.tensor(used, device=whole.device)[:, None]
        probs = certain(whole, probs).where(copied[..., None], F.pad(probs, (0, 0, 0, width - n)))
    if all(tree == [*range(-1, len(tree) - 1)] for tree in parents):
        return Proposal(whole, probs)
    return Proposal(whole, probs, parents=[(*tree, *[-1] * (width - len(tree))) for tree in parents])


def _leave(parents: Sequence[int], tokens: Sequence[int], copied: list[int]) -> tuple[int, list[int]]:
    """Return the node at which a copy leaves a tree (-1: the root), and the rest of the copy."""
    # Of siblings with the same token the eldest has the children.
    places = reversed([*enumerate(zip(parents, tokens, strict=True))])
    children = {(parent, token): node for node, (parent, token) in places}
    node = -1
    for k, token in enumerate(copied):
        below = children.get((node, token))
        if below is None:
            return node, copied[k:]
        node = below
    return node, []


def _likely(draft: Proposal, tokens: Sequence[int], row: int, node: int, rest: list[int], top: int) -> bool:
    """Whether the first token of ``rest`` is among the ``top`` that a draft model found best at this place."""
    if not rest or draft.logits is None or draft.parents is not None:
        return True
    if node + 1 == len(tokens) or tokens[node + 1] < 0:  # past the end of the chain the model said nothing
        return True
    logits = draft.logits[row, node + 1]
    return int((logits > logits[rest[0]]).sum()) < top
