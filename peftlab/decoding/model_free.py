"""Drafters without a model: prompt lookup, suffixes of the text or a corpus, Token Recycling, and n-gram counts.

Their only cost is the rejected tokens that the target has to read. ``SuffixAndDraft`` puts copies beside what another
drafter proposes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from peftlab.decoding.cache import Output, right_padded
from peftlab.decoding.decode import Drafter, DrafterWrapper, Proposal, Row, TargetState, Verified, draft_chain
from peftlab.decoding.sampling import Sampling, one_hot
from peftlab.decoding.table import CHAIN, DRAWN
from peftlab.decoding.theory import best_tree, parents_of


def _chains(rows: list[Row], budgets: list[int], guess: Callable[[Row, int], list[int]]) -> Proposal:
    """Return the chains that ``guess`` gives for each row and budget."""
    guesses = [guess(row, budget) for row, budget in zip(rows, budgets, strict=True)]
    return Proposal(right_padded(guesses, max(map(len, guesses)), filler=-1))


@dataclass
class PromptLookup(Drafter):
    """A drafter that copies what followed the last few tokens at their latest earlier occurrence in the sequence.

    Prompt lookup decoding (Saxena 2023): the longest suffix of at most ``longest`` tokens that occurred
    before is taken, and of its occurrences the latest. Suffixes shorter than ``shortest`` are not looked up.
    """

    longest: int = 3
    shortest: int = 1
    name: str = "lookup"
    provides = frozenset({CHAIN})
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
class TokenRecycling(Drafter):
    """A drafter from a table: token -> the target's most probable next tokens when it was last read.

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
    """Return a new drafter by prompt lookup; the arguments, which all model-free drafters get, are unused."""
    return PromptLookup()


def recycling(corpus: SuffixAutomaton | None, _: None) -> TokenRecycling:
    """Return a new drafter by Token Recycling; the arguments, which all model-free drafters get, are unused."""
    return TokenRecycling()


@dataclass
class SuffixLookup(Drafter):
    """A drafter that copies what followed the longest suffix of the sequence, in the sequence or in a corpus.

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
    provides = frozenset({CHAIN})
    _texts: dict[int, SuffixAutomaton] = field(init=False, repr=False, default_factory=dict)
    _places: dict[int, tuple[int, int]] = field(init=False, repr=False, default_factory=dict)

    def start(self, rows: list[Row], state: TargetState) -> None:
        self._texts, self._places = {}, {}
        self.join(rows, state)

    def join(self, rows: list[Row], state: TargetState) -> None:
        self._texts |= {row.index: SuffixAutomaton() for row in rows}
        self._places |= {row.index: ROOT for row in rows}

    def find(self, row: Row, budget: int) -> tuple[int, list[int]]:
        """Return the length of the match, and the tokens that followed it; (0, []) if none are copied.

        Args:
            row: the sequence. budget: tokens at most.
        """
        text, place = self._texts[row.index], self._places[row.index]
        for token in row.text[len(text.tokens) :]:
            text.extend(token)
            if self.corpus is not None:
                place = self.corpus.follow(place, token)
        self._places[row.index] = place
        length, end = text.repeated()
        if (
            self.corpus is not None
            and place[1] - self.margin > length
            and (copied := self._copy_from_corpus(place, budget))
        ):
            return (place[1], copied) if place[1] >= self.shortest else (0, [])
        tail = text.tokens[end : end + budget]
        copied = [tail[k % len(tail)] for k in range(budget)]
        return (length, copied) if length >= self.shortest and copied else (0, [])

    def _copy_from_corpus(self, place: tuple[int, int], budget: int) -> list[int]:
        """Return the tokens that followed a match in the corpus, up to the end of the document."""
        assert self.corpus is not None
        end = self.corpus.end(place)
        copied = self.corpus.tokens[end : end + budget]
        return copied[: copied.index(END)] if END in copied else copied

    def propose(self, rows: list[Row], budgets: list[int]) -> Proposal:
        copies = [self.find(row, budget)[1] for row, budget in zip(rows, budgets, strict=True)]
        return Proposal(right_padded(copies, max(map(len, copies)), filler=-1))


@dataclass
class SuffixAndDraft(DrafterWrapper):
    """A drafter that copies long matches; elsewhere another one proposes, and a copy that differs is a branch.

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
    has_logits = False  # copied tokens have no logits

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
    """Return a new drafter that copies by the longest suffix, also from ``corpus`` if there is one."""
    return SuffixLookup(corpus)


def with_copies(drafter: Drafter, corpus: SuffixAutomaton | None = None) -> SuffixAndDraft:
    """Return a drafter that adds copies to the proposals of another, after two matching tokens at least.

    Args:
        drafter: the other one. corpus: text to copy from; None: the sequence alone.
    """
    return SuffixAndDraft(SuffixLookup(corpus, shortest=2), drafter)


def fuse(draft: Proposal, copies: Sequence[list[int]], budgets: Sequence[int], top: int) -> Proposal:
    """Return a tree for each row that merges a draft and a copied chain by their longest common prefix.

    Drafted nodes are never dropped: to drop a sampled token because of its value would bias the output.

    Args:
        draft: chains or trees. copies: tokens of each row's chain, [] for none. budgets: nodes of each row.
        top: drop a copy that leaves the chain where its token is not among the draft model's ``top`` best; a draft
            without logits drops none.
    """
    b, n = draft.tokens.shape
    drafted, trees = draft.tokens.tolist(), [draft.parents_of(i) for i in range(b)]
    # Places after the last drafted node of a row are free; -1 before it may be a node without a token.
    used = [1 + max((node for node, token in enumerate(line) if token >= 0), default=-1) for line in drafted]
    tokens, parents = [], []
    for i, (line, tree, count) in enumerate(zip(drafted, trees, used, strict=True)):
        node, rest = _branch_point(tree, line, copies[i])
        rest = rest[: max(0, budgets[i] - count)] if _is_among_top(draft, line, i, node, rest, top) else []
        tokens.append(line[:count] + rest)
        parents.append([*tree[:count], *[node, *range(count, count + len(rest) - 1)][: len(rest)]])
    if used == [len(line) for line in tokens]:
        return draft
    width = max(map(len, tokens))
    whole = right_padded(tokens, width, filler=-1).to(draft.tokens.device)
    probs = draft.probs
    if probs is not None:  # a copied token is deterministic: its q is one-hot
        copied = torch.arange(width, device=whole.device) >= torch.tensor(used, device=whole.device)[:, None]
        probs = one_hot(whole, probs).where(copied[..., None], F.pad(probs, (0, 0, 0, width - n)))
    if all(tree == [*range(-1, len(tree) - 1)] for tree in parents):
        return Proposal(whole, probs)
    return Proposal(whole, probs, parents=[(*tree, *[-1] * (width - len(tree))) for tree in parents])


def _branch_point(parents: Sequence[int], tokens: Sequence[int], copied: list[int]) -> tuple[int, list[int]]:
    """Return the last node that a copy shares with a tree (-1: the root), and the rest of the copy."""
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


def _is_among_top(draft: Proposal, tokens: Sequence[int], row: int, node: int, rest: list[int], top: int) -> bool:
    """Return whether the first token of ``rest`` is among the ``top`` best of the draft model after ``node``."""
    if not rest or draft.logits is None or draft.parents is not None:
        return True
    if node + 1 == len(tokens) or tokens[node + 1] < 0:  # past the end of the chain there are no logits
        return True
    logits = draft.logits[row, node + 1]
    return int((logits > logits[rest[0]]).sum()) < top


@dataclass
class Counts:
    """The counts of each token after each context of up to ``order - 1`` tokens."""

    order: int
    followers: dict[tuple[int, ...], Counter[int]] = field(default_factory=lambda: defaultdict(Counter))

    def add(self, tokens: Sequence[int], start: int) -> None:
        """Count each token from place ``start`` on after the contexts before it.

        Args:
            tokens: of a text. start: place of the first token to count.
        """
        for end in range(start, len(tokens)):
            for n in range(min(self.order, end + 1)):
                self.followers[tuple(tokens[end - n : end])][tokens[end]] += 1


@lru_cache(maxsize=4)
def _corpus_counts(corpus: SuffixAutomaton, order: int) -> Counts:
    """Return the counts of a corpus, cached for all drafters; no context spans two of its documents."""
    counts, document = Counts(order), list[int]()
    for token in (*corpus.tokens, END):
        if token != END:
            document.append(token)
        elif document:
            counts.add(document, 0)
            document = []
    return counts


@dataclass
class NGramDrafter(Drafter):
    """A baseline drafter from n-gram counts: draws what followed the last ``order - 1`` tokens.

    q(x) is the share of x after the longest context of at most ``order - 1`` tokens that is known: 1 is the unigram
    distribution, 2 the bigram's; 0, or no text at all, makes all tokens equally probable. Counted are the corpus, and
    all sequences since the drafter was made. Drafts are drawn from q, greedily its most frequent token.

    Attributes:
        order: N. corpus: text to count; None: the sequences alone. name: for reports.
    """

    order: int = 3
    corpus: SuffixAutomaton | None = None
    name: str = "ngram"
    provides = frozenset({DRAWN, CHAIN})
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
        """Return the logarithms of the counts of each token after a text, [V]."""
        sources = [self._counts] + ([_corpus_counts(self.corpus, self.order)] if self.corpus is not None else [])
        for n in range(min(self.order - 1, len(text)), -1, -1):
            context = tuple(text[len(text) - n :])
            known = [source.followers[context] for source in sources if context in source.followers]
            if known:
                counts = torch.zeros(self._size)
                for followers in known:
                    counts[list(followers)] += torch.tensor([*followers.values()], dtype=counts.dtype)
                return counts.log()
        return torch.zeros(self._size)


def ngram(corpus: SuffixAutomaton | None, order: float) -> NGramDrafter:
    """Return a new n-gram drafter, named after its order.

    Args:
        corpus: text to count; None: the sequences alone. order: N.
    """
    return NGramDrafter(int(order), corpus, f"ngram:{order:.0f}")


ROOT = (0, 0)
"""The place of the empty match, see ``SuffixAutomaton.follow``."""
END = -1
"""The token between two documents of a corpus: no text contains it, so no match crosses it."""


class SuffixAutomaton:
    """An index of all substrings of a text that grows, which finds repeated suffixes and matches of other texts.

    Blumer et al. 1985; SAM-Decoding (Hu et al. 2024, arXiv 2411.10666) drafts with it. Its states are the classes of
    substrings that end at the same positions. At most 2n states and 3n transitions for n tokens; each token is read in
    amortised constant time.

    Attributes:
        tokens: read so far.
    """

    def __init__(self, tokens: Iterable[int] = ()):
        self.tokens: list[int] = []
        # Of each state: transitions, the state of its longest suffix in another class, the length of its longest
        # substring, and how many tokens have been read at the end of its first occurrence.
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._first = [-1], [0], [0]
        self._whole_text = 0  # the state of the whole text
        for token in tokens:
            self.extend(token)

    def extend(self, token: int) -> None:
        """Append a token to the text."""
        self.tokens.append(token)
        n = len(self.tokens)
        new = self._add_state({}, 0, n, n)
        state = self._whole_text
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state >= 0:
            self._link[new] = self._split(state, token)
        self._whole_text = new

    def _split(self, state: int, token: int) -> int:
        """Return the state whose longest substring is that of ``state`` and ``token``.

        If the transition leads to a class with longer substrings, too, the class is cloned for the shorter ones.
        """
        whole, length = self._next[state][token], self._length[state] + 1
        if self._length[whole] == length:
            return whole
        part = self._add_state(dict(self._next[whole]), self._link[whole], length, self._first[whole])
        self._link[whole] = part
        while state >= 0 and self._next[state].get(token) == whole:
            self._next[state][token] = part
            state = self._link[state]
        return part

    def _add_state(self, following: dict[int, int], link: int, length: int, first: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._first.append(first)
        return len(self._next) - 1

    def repeated(self) -> tuple[int, int]:
        """Return the length of the longest suffix of the text that occurs earlier, and the end of its first occurrence.

        An end is a number of tokens: ``tokens[end]`` followed. (0, 0) where the last token is new.
        """
        state = self._link[self._whole_text]  # the longest suffix that ends elsewhere as well
        return (0, 0) if state < 0 else (self._length[state], self._first[state])

    def follow(self, place: tuple[int, int], token: int) -> tuple[int, int]:
        """Return the match of another text's longest suffix in this one, after one more token of the other.

        Args:
            place: the match so far, (state, length); at first ``ROOT``. token: the next one of the other text.
        """
        state, length = place
        while state >= 0 and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state] if state >= 0 else 0
        return (self._next[state][token], length + 1) if state >= 0 else ROOT

    def end(self, place: tuple[int, int]) -> int:
        """Return the end of the first occurrence of a match, as a number of tokens."""
        return self._first[place[0]]
