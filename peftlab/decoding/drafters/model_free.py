"""Drafters without a model: their only cost is the rejected tokens that the target has to read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from peftlab.decoding.drafters.base import Drafter, Proposal, Row, TargetState, Verified
from peftlab.decoding.drafters.suffix_automaton import SuffixAutomaton
from peftlab.decoding.engines.prefill import right_padded
from peftlab.decoding.table import TIMES
from peftlab.decoding.trees import best_tree, parents_of


def _chains(rows: list[Row], budgets: list[int], guess: Callable[[Row, int], list[int]]) -> Proposal:
    guesses = [guess(row, budget) for row, budget in zip(rows, budgets, strict=True)]
    return Proposal(right_padded(guesses, max(map(len, guesses)), filler=-1))


@dataclass
class PromptLookup(Drafter):
    """What followed the last few tokens at their last occurrence in this sequence.

    Prompt lookup decoding (Saxena 2023): the longest suffix of at most ``longest`` tokens that occurred
    before is taken, and of its occurrences the latest. Suffixes shorter than ``shortest`` are not looked up.
    """

    longest: int = 3
    shortest: int = 1
    name: str = "lookup"
    gives = frozenset({TIMES})
    _after: dict[int, dict[tuple[int, ...], int]] = field(init=False, repr=False, default_factory=dict)
    _indexed: dict[int, int] = field(init=False, repr=False, default_factory=dict)

    def start(self, rows: list[Row], state: TargetState) -> None:
        self._after, self._indexed = {}, {}
        self.join(rows, state)

    def join(self, rows: list[Row], state: TargetState) -> None:
        self._after |= {row.index: {} for row in rows}
        self._indexed |= {row.index: 0 for row in rows}

    def propose(self, rows: list[Row], budgets: list[int]) -> Proposal:
        return _chains(rows, budgets, self._guess)

    def _guess(self, row: Row, budget: int) -> list[int]:
        after, tokens = self._after[row.index], row.text
        for end in range(self._indexed[row.index] + 1, len(tokens)):
            for n in range(self.shortest, min(self.longest, end) + 1):
                after[tuple(tokens[end - n : end])] = end
        self._indexed[row.index] = len(tokens) - 1
        for n in range(min(self.longest, len(tokens)), self.shortest - 1, -1):
            start = after.get(tuple(tokens[-n:]))
            if start is not None:
                return tokens[start : start + budget]
        return []


@dataclass
class Recycling(Drafter):
    """The target's most probable next tokens: a table token -> its followers when it was last read.

    Token Recycling (Luo et al. 2024, arXiv 2408.08696). Every token the target reads, accepted or not,
    updates its entry; a tree of γ nodes over the table is the draft. The table is kept from one sequence to the next.

    Attributes:
        width: followers kept per token.
        name: for reports.
    """

    width: int = 4
    name: str = "recycling"
    _followers: dict[int, list[int]] = field(init=False, repr=False, default_factory=dict)

    def start(self, rows: list[Row], state: TargetState) -> None:
        self._width = min(self.width, state.vocab_size)

    def join(self, rows: list[Row], state: TargetState) -> None:
        pass

    def propose(self, rows: list[Row], budgets: list[int]) -> Proposal:
        tree = best_tree(max(budgets), max(budgets), self._width)
        parents = parents_of(tree)
        drafts = []
        for row, budget in zip(rows, budgets, strict=True):
            tokens: list[int] = []
            for path, parent in zip(tree[:budget], parents, strict=False):
                before = tokens[parent] if parent >= 0 else row.tokens[-1]
                followers = self._followers.get(before)
                tokens.append(followers[path[-1]] if followers else -1)
            drafts.append(tokens)
        return Proposal(right_padded(drafts, len(tree), filler=-1), parents=[parents] * len(rows))

    def accept(self, rows: list[Row], verified: Verified) -> None:
        best = verified.output.logits.topk(self._width, -1).indices.tolist()
        drafted = verified.draft.tokens.tolist()
        for inputs, alive, lines in zip(verified.inputs.tolist(), drafted, best, strict=True):
            for token, mark, line in zip(inputs, [0, *alive], lines, strict=True):
                if mark >= 0:
                    self._followers[token] = line


def lookup(corpus: SuffixAutomaton | None, _: None) -> PromptLookup:
    """Return a new drafter."""
    return PromptLookup()


def recycling(corpus: SuffixAutomaton | None, _: None) -> Recycling:
    """Return a new drafter."""
    return Recycling()
