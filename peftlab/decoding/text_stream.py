"""Streaming of token ids as text: only whole characters are returned, and output ends at stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from peftlab.errors import PeftlabError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BROKEN = "\N{REPLACEMENT CHARACTER}"  # the decoded text of a character whose bytes are incomplete


def stop_at(tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> Callable[[Sequence[int]], bool] | None:
    """Return a function (output ids) -> whether they contain a stop string; None without stop strings.

    It is an argument of ``decode.StoppingCriteria``.

    The output then ends with the token that completes the stop string; ``cut_at`` removes it from the text.

    Args:
        tokenizer: decodes. stops: stop strings.

    Raises:
        PeftlabError: an empty stop string, which every output contains.
    """
    if "" in stops:
        raise PeftlabError("stop: an empty string ends every output before it begins")
    if not stops:
        return None
    # A stop string spans at most as many tokens as it has bytes; one more may overlap either end.
    reach = max(len(stop.encode()) for stop in stops) + 2

    def complete(ids: Sequence[int]) -> bool:
        tail = tokenizer.decode(list(ids[-reach:]), skip_special_tokens=True)
        return any(stop in tail for stop in stops)

    return complete


def cut_at(text: str, stops: Sequence[str]) -> str:
    """Return ``text`` up to the first stop string in it.

    Args:
        text: decoded output. stops: stop strings.
    """
    return text[: min((found for stop in stops if (found := text.find(stop)) >= 0), default=len(text))]


class TextStream:
    """A decoder of token ids into text, piece by piece; a returned piece never changes.

    Characters whose bytes are incomplete, and an ending that may become a stop string, are withheld.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str] = ()):
        self._tokenizer, self._stops = tokenizer, stops
        self._ids: list[int] = []
        self._returned = 0

    def add(self, ids: Sequence[int]) -> str:
        """Add ids and return the text that can no longer change."""
        self._ids += ids
        text = cut_at(self._text(), self._stops)
        return self._new_text(text[: len(text) - self._withheld_length(text)])

    def finish(self) -> str:
        """Return the text withheld so far."""
        return self._new_text(cut_at(self._text(), self._stops))

    def _text(self) -> str:
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True))

    def _withheld_length(self, text: str) -> int:
        broken = len(text) - len(text.rstrip(BROKEN))
        prefixes = (
            n for stop in self._stops for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])
        )
        return max(broken, max(prefixes, default=0))

    def _new_text(self, text: str) -> str:
        piece = text[self._returned :]
        self._returned = max(self._returned, len(text))
        return piece
