"""Preference rows: a prompt with a better and a worse answer, read and tokenised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peftlab.errors import PeftlabError
from peftlab.tasks.chat import Message
from peftlab.tasks.config import DataConfig
from peftlab.tasks.labels import is_missing
from peftlab.tasks.language.conversations import (
    Completion,
    Conversation,
    as_conversation,
    pair,
)
from peftlab.tasks.language.examples import TOO_LONG, Encoding, Source, Tokens, encode, fit
from peftlab.tasks.language.turns import read_turns
from peftlab.tasks.reading.bad_rows import quoted
from peftlab.tasks.reading.readers import Table

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

SIDES = ("chosen", "rejected")
_PROMPTS = ("prompt", "messages", "conversations")


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt, each with the prompt before it. ``where``: file and line."""

    chosen: Source
    rejected: Source
    where: str


def read_preference(table: Table, row: int, data: DataConfig) -> Preference:
    """Return a row of ``prompt``, ``chosen`` and ``rejected``.

    An answer is a text, a turn, or a list of turns; a list that does not begin with an answer contains the whole
    conversation, and needs no prompt. ``prompt`` is a text or a list of turns, in the column that ``data.prompt``
    names, else in ``prompt``, ``messages`` or ``conversations``.

    Raises:
        PeftlabError: a column or an answer is missing, a turn is not one, or the two answers are not to one prompt.
    """
    where, values = table.where(row), {name: column[row] for name, column in table.columns.items()}
    named = data.prompt or next((name for name in _PROMPTS if name in values), None)
    prompt = None if named is None else table.column(named, "data.prompt")[row]
    found = {side: table.column(side, "task text/preference")[row] for side in SIDES}
    for side, answer in found.items():
        if is_missing(answer) or answer == []:
            raise PeftlabError(f"{where}: no {side} answer")
    if isinstance(prompt, str) and prompt.strip() and all(isinstance(answer, str) for answer in found.values()):
        chosen, rejected = (Completion(prompt, str(answer), where) for answer in found.values())
        return Preference(chosen, rejected, where)
    better, worse = (_messages(prompt, answer, side, where) for side, answer in found.items())
    if better[:-1] != worse[:-1]:
        raise PeftlabError(f"{where}: chosen and rejected differ before their last answer; they need one prompt")
    return Preference(as_conversation(better, values, where), as_conversation(worse, values, where), where)


def _messages(prompt: object, answer: object, side: str, where: str) -> list[Message]:
    """Return the conversation that ends with an answer."""
    given = [answer] if isinstance(answer, Mapping) else answer
    if not isinstance(given, str | list):
        raise PeftlabError(f"{where}: {side} is neither a text nor turns, but {quoted(answer)}")
    written = read_turns(given, where) if isinstance(given, list) else []
    if written and written[-1]["role"] != "assistant":
        raise PeftlabError(f"{where}: {side} does not end with an answer, but with a turn of {written[-1]['role']}")
    if not written or written[0]["role"] == "assistant":
        if is_missing(prompt) or prompt == []:
            raise PeftlabError(f"{where}: no prompt, and {side} does not contain it")
        return pair(prompt, given, where)
    asked = read_turns(prompt, where) if isinstance(prompt, list) and prompt else []
    elsewhere = isinstance(prompt, str) and prompt.strip() not in [turn["content"].strip() for turn in written[:-1]]
    if elsewhere or written[: len(asked)] != asked:
        raise PeftlabError(f"{where}: {side} contains a whole conversation, and prompt is not a part of it")
    return written


def encode_preference(row: Preference, tokenizer: PreTrainedTokenizerBase, how: Encoding) -> list[Tokens]:
    """Return the chosen and the rejected example, whose last answers are trained.

    Texts are turns of a chat where the model has a chat template, else a text and what follows it.

    Raises:
        PeftlabError: the two are equal, or one of them cannot be formatted.
    """
    found = [encode(spoken(answer, tokenizer), tokenizer, how)[0] for answer in (row.chosen, row.rejected)]
    if found[0].input_ids == found[1].input_ids:
        raise PeftlabError(f"{row.where}: chosen and rejected are the same answer")
    return found


def spoken(source: Source, tokenizer: PreTrainedTokenizerBase) -> Source:
    """Return a text and its answer as a chat, where the tokenizer has a template for one."""
    if isinstance(source, Conversation) or not getattr(tokenizer, "chat_template", None):
        return source
    return Conversation(pair(source.prompt, source.completion, source.where), source.where)


def encode_preferences(
    rows: Sequence[Preference], tokenizer: PreTrainedTokenizerBase, how: Encoding
) -> tuple[Dataset, dict[str, int]]:
    """Return the examples of ``rows``, and the number of rows left out by reason: those with a side that is too long.

    Returns:
        For each side columns ``SIDE_ids`` and ``SIDE_trained`` (one per token), and ``length``, the tokens of both.

    Raises:
        PeftlabError: as ``encode_preference``, or every row is too long; file and line are named.
    """
    from datasets import Dataset

    kept: list[list[Tokens]] = []
    for row in rows:
        sides = [fit(tokens, row.where, how) for tokens in encode_preference(row, tokenizer, how)]
        if all(sides):
            kept.append([tokens for (tokens,) in sides])
    if not kept:
        raise PeftlabError(f"every example is longer than train.max_length, {how.max_length} tokens")
    columns: dict[str, list[object]] = {"length": [sum(len(tokens.input_ids) for tokens in sides) for sides in kept]}
    for place, side in enumerate(SIDES):
        columns[f"{side}_ids"] = [sides[place].input_ids for sides in kept]
        columns[f"{side}_trained"] = [sides[place].trained for sides in kept]
    dropped = len(rows) - len(kept)
    return Dataset.from_dict(columns), {TOO_LONG: dropped} if dropped else {}
