"""Held-out rows as prompts with all their references."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peftlab.errors import PeftlabError
from peftlab.tasks.batches import seeded_subset
from peftlab.tasks.language.conversations import Conversation
from peftlab.tasks.language.examples import Encoding, Source, encode, opening, prompt_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Context:
    """A prompt as text and as token ids, and every answer to it that the data has."""

    prompt: str
    ids: tuple[int, ...]
    references: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """A generated answer to a context, without special tokens."""

    text: str
    prompt: str
    references: tuple[str, ...]


@dataclass(frozen=True)
class Contexts:
    """The prompts to answer.

    Attributes:
        ends: the special tokens that answers end with in the data.
        too_long: how many contexts were left out because their prompt exceeds ``train.max_length``.
    """

    items: list[Context]
    ends: frozenset[int]
    too_long: int = 0


def make_contexts(
    rows: Sequence[Source], tokenizer: PreTrainedTokenizerBase, how: Encoding, seed: int, examples: int | None
) -> Contexts:
    """Return the contexts of held-out rows: rows with one prompt are one context with several references.

    Of a conversation the last answer is the reference, and all before it the prompt.

    Args:
        examples: at most so many contexts, drawn with ``seed``.

    Raises:
        PeftlabError: every prompt is longer than ``how.max_length``.
    """
    together: dict[tuple[int, ...], Context] = {}
    first: dict[tuple[int, ...], Source] = {}
    for row in rows:
        prompt, reference = prompt_text(row, tokenizer), _reference(row)
        ids = tuple(prompt_ids(row, prompt, tokenizer))
        before = together.get(ids)
        references = (*before.references, reference) if before is not None else (reference,)
        together[ids] = Context(prompt, ids, references)
        first.setdefault(ids, row)
    items = [context for context in together.values() if len(context.ids) <= how.max_length]
    if not items:
        raise PeftlabError(f"generate: every held-out prompt is longer than train.max_length, {how.max_length} tokens")
    too_long = len(together) - len(items)
    chosen = seeded_subset(len(items), examples, seed)
    items = items if chosen is None else [items[i] for i in chosen]
    return Contexts(items, _ends([first[context.ids] for context in items], tokenizer, how), too_long)


def prompt_text(row: Source, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text before a row's last answer, with the template's prompt for it."""
    return prompt_of(row, tokenizer) if isinstance(row, Conversation) else row.prompt


def _reference(row: Source) -> str:
    text = row.messages[_last(row)]["content"] if isinstance(row, Conversation) else row.completion
    return text.strip()


def _last(row: Conversation) -> int:
    return max(i for i, message in enumerate(row.messages) if message["role"] == "assistant")


def prompt_ids(row: Source, prompt: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a row's prompt, begun as its training example begins."""
    ids = list(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    ids = ids if isinstance(row, Conversation) else [*opening(tokenizer), *ids]
    if not ids:
        raise PeftlabError(f"{row.where}: an empty prompt, and the tokenizer has no BOS token to begin with")
    return ids


def _ends(rows: Sequence[Source], tokenizer: PreTrainedTokenizerBase, how: Encoding) -> frozenset[int]:
    """Return the last trained special token of each row."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | {*tokenizer.all_special_ids}
    found = set()
    for row in rows:
        tokens = encode(row, tokenizer, how)[-1]
        trained = [i for i, marked in zip(tokens.input_ids, tokens.trained, strict=True) if marked and i in special]
        found |= {*trained[-1:]}
    return frozenset(found)
