"""A suffix automaton that grows a token at a time: the longest repeated suffix of a text, and matches in a corpus.

Blumer et al. 1985; SAM-Decoding (Hu et al. 2024, arXiv 2411.10666) drafts with it. Its states are the classes of
substrings that end at the same positions. At most 2n states and 3n transitions for n tokens; each token is read in
amortised constant time.
"""

from __future__ import annotations

from collections.abc import Iterable

ROOT = (0, 0)
"""The place of the empty match, see ``SuffixAutomaton.follow``."""
END = -1
"""The token between two documents of a corpus: no text contains it, so no match crosses it."""


class SuffixAutomaton:
    """The substrings of ``tokens``.

    Attributes:
        tokens: read so far.
    """

    def __init__(self, tokens: Iterable[int] = ()):
        self.tokens: list[int] = []
        # Of each state: transitions, the state of its longest suffix in another class, the length of its longest
        # substring, and how many tokens have been read at the end of its first occurrence.
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._first = [-1], [0], [0]
        self._whole = 0  # the state of the whole text
        for token in tokens:
            self.extend(token)

    def extend(self, token: int) -> None:
        """Append a token to the text."""
        self.tokens.append(token)
        n = len(self.tokens)
        new = self._state({}, 0, n, n)
        state = self._whole
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state >= 0:
            self._link[new] = self._split(state, token)
        self._whole = new

    def _split(self, state: int, token: int) -> int:
        """Return the state of ``state``'s longest substring and ``token``, made from the one that contains it."""
        whole, length = self._next[state][token], self._length[state] + 1
        if self._length[whole] == length:
            return whole
        part = self._state(dict(self._next[whole]), self._link[whole], length, self._first[whole])
        self._link[whole] = part
        while state >= 0 and self._next[state].get(token) == whole:
            self._next[state][token] = part
            state = self._link[state]
        return part

    def _state(self, following: dict[int, int], link: int, length: int, first: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._first.append(first)
        return len(self._next) - 1

    def repeated(self) -> tuple[int, int]:
        """Return the length of the longest suffix of the text that occurs earlier, too, and its first occurrence's end.

        An end is a number of tokens: ``tokens[end]`` followed. (0, 0) where the last token is new.
        """
        state = self._link[self._whole]  # the longest suffix that ends elsewhere as well
        return (0, 0) if state < 0 else (self._length[state], self._first[state])

    def follow(self, place: tuple[int, int], token: int) -> tuple[int, int]:
        """Return the place of the longest suffix of another text that occurs in this one, after one token more.

        A place is a state and the length of the match; the first is ``ROOT``.
        """
        state, length = place
        while state >= 0 and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state] if state >= 0 else 0
        return (self._next[state][token], length + 1) if state >= 0 else ROOT

    def end(self, place: tuple[int, int]) -> int:
        """Return how many tokens had been read at the end of the match's first occurrence."""
        return self._first[place[0]]
