"""Drafting by counts of n-grams: the distributions that published tables of acceptance compare drafts with."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from peftlab.decoding.drafters.base import Drafter, Proposal, Row, TargetState
from peftlab.decoding.drafters.chain_draft import draft_chain
from peftlab.decoding.drafters.suffix_automaton import END, SuffixAutomaton
from peftlab.decoding.engines.base import Output
from peftlab.decoding.sampling import Sampling
from peftlab.decoding.table import DRAWN, TIMES


@dataclass
class Counts:
    """How often each token followed each context of up to ``order - 1`` tokens."""

    order: int
    followers: dict[tuple[int, ...], Counter[int]] = field(default_factory=lambda: defaultdict(Counter))

    def add(self, tokens: Sequence[int], start: int) -> None:
        """Count the tokens from place ``start`` on, each after those before it."""
        for end in range(start, len(tokens)):
            for n in range(min(self.order, end + 1)):
                self.followers[tuple(tokens[end - n : end])][tokens[end]] += 1


@lru_cache(maxsize=4)
def _of_corpus(corpus: SuffixAutomaton, order: int) -> Counts:
    """Count a corpus once for all drafters; no context crosses from one of its documents to the next."""
    counts, document = Counts(order), list[int]()
    for token in (*corpus.tokens, END):
        if token != END:
            document.append(token)
        elif document:
            counts.add(document, 0)
            document = []
    return counts


@dataclass
class NGram(Drafter):
    """What followed the last ``order - 1`` tokens, as often as it did; a baseline.

    q(x) is the share of x after the longest context of at most ``order - 1`` tokens that is known: 1 is the unigram
    distribution, 2 the bigram's; 0, or no text at all, makes all tokens equally probable. Counted are the corpus, and
    all sequences since the drafter was made. Drafts are drawn from q, greedily its most frequent token.

    Attributes:
        order: N. corpus: text to count; None: the sequences alone. name: for reports.
    """

    order: int = 3
    corpus: SuffixAutomaton | None = None
    name: str = "ngram"
    gives = frozenset({DRAWN, TIMES})
    has_logits = True
    _counts: Counts = field(init=False, repr=False)
    _counted: dict[int, int] = field(init=False, repr=False, default_factory=dict)
    _size: int = field(init=False, repr=False, default=0)
    _sampling: Sampling = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._counts = Counts(self.order)

    def start(self, rows: list[Row], state: TargetState) -> None:
        self._counted = {}
        self._size, self._sampling = state.vocab_size, state.sampling
        self.join(rows, state)

    def join(self, rows: list[Row], state: TargetState) -> None:
        self._counted |= {row.index: 1 for row in rows}

    def propose(self, rows: list[Row], budgets: list[int]) -> Proposal:
        for row in rows:
            self._counts.add(row.tokens, self._counted[row.index])
            self._counted[row.index] = len(row.tokens)
        texts = [row.tokens[max(0, len(row.tokens) - self.order) :] for row in rows]
        device = rows[0].generator.device

        def output() -> Output:
            scores = torch.stack([self._scores(text) for text in texts])[:, None].to(device)
            return Output(scores, scores.new_zeros(len(rows), 1, 1))

        def following(x: Tensor, _: Output, drawn: int) -> Output:
            for text, token in zip(texts, x.tolist(), strict=True):
                text.append(token)
            return output()

        return draft_chain(rows, budgets, output(), following, self._sampling)

    def _scores(self, text: list[int]) -> Tensor:
        """Return log counts of what follows a text, [V]."""
        sources = [self._counts] + ([_of_corpus(self.corpus, self.order)] if self.corpus is not None else [])
        for n in range(min(self.order - 1, len(text)), -1, -1):
            context = tuple(text[len(text) - n :])
            known = [source.followers[context] for source in sources if context in source.followers]
            if known:
                counts = torch.zeros(self._size)
                for followers in known:
                    counts[list(followers)] += torch.tensor([*followers.values()], dtype=counts.dtype)
                return counts.log()
        return torch.zeros(self._size)


def ngram(corpus: SuffixAutomaton | None, order: float) -> NGram:
    """Return a new drafter, named after its order."""
    return NGram(int(order), corpus, f"ngram:{order:.0f}")
