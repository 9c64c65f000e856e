"""The forms in which OpenAI-compatible servers take a prompt, and how their answers are read.

Token ids are exact. A text is, where the target's tokenizer makes the prompt's ids of it. A conversation goes through
the server's own chat template; that the server read as many tokens as the prompt has is checked for every form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from peftlab.drafting.text.retokenised import text_of
from peftlab.drafting.text.target_text import Writing
from peftlab.errors import PeftlabError
from peftlab.files import Json, member
from peftlab.tasks.conversations import Message


@dataclass(frozen=True)
class ServedPrompt:
    """A prompt to be sent.

    Attributes:
        ids: token ids. messages: the conversation that the chat template made them of; None for another text.
    """

    ids: list[int]
    messages: list[Message] | None


@dataclass(frozen=True)
class Reply:
    """An answer as the server gave it.

    Attributes:
        text: without special tokens. finish: why it ends: "stop", "length" or another reason.
        end: id of the token that ended it, where the server says so. prompt_tokens: those that it read, where it does.
    """

    text: str
    finish: str
    end: int | None
    prompt_tokens: int | None


@dataclass(frozen=True)
class Form:
    """A form of request.

    Attributes:
        name: for messages and results. path: after the endpoint's address.
        prompt: returns the prompt's part of the request; None where the prompt has no such form.
    """

    name: str
    path: str
    prompt: Callable[[PreTrainedTokenizerBase, ServedPrompt], dict[str, Json] | None]


def _as_ids(tokenizer: PreTrainedTokenizerBase, prompt: ServedPrompt) -> dict[str, Json] | None:
    return {"prompt": [*prompt.ids]}


def _as_text(tokenizer: PreTrainedTokenizerBase, prompt: ServedPrompt) -> dict[str, Json] | None:
    """The text of which a server that adds special tokens, as it usually does, makes the prompt's ids."""
    for ids in (prompt.ids[1:], prompt.ids):  # the first token may be one that it adds
        text = text_of(tokenizer, ids)
        if list(tokenizer(text)["input_ids"]) == prompt.ids:
            return {"prompt": text}
    return None


def _as_messages(tokenizer: PreTrainedTokenizerBase, prompt: ServedPrompt) -> dict[str, Json] | None:
    return {"messages": [{**message} for message in prompt.messages]} if prompt.messages is not None else None


FORMS = (
    Form("completions of token ids", "/completions", _as_ids),
    Form("completions of text", "/completions", _as_text),
    Form("chat completions", "/chat/completions", _as_messages),
)
"""In the order in which they are tried."""


def sampling(writing: Writing, row: int) -> dict[str, Json]:
    """Return a request's settings; the answer of each row has a seed of its own."""
    settings: dict[str, Json] = {"max_tokens": writing.max_new_tokens, "temperature": writing.temperature}
    if writing.temperature > 0:  # top_p in any case: a server's default may be another
        settings |= {"top_p": writing.top_p or 1.0, "seed": (writing.seed + row) % 2**31}
    return settings


def read_reply(value: dict[str, Json]) -> Reply:
    """Return the first answer of a completion or chat completion; ``PeftlabError`` for anything else."""
    where = "the answer"
    choice = next(iter(member(value, "choices", list, where)), None)
    if not isinstance(choice, dict):
        raise PeftlabError(f"{where}: no choice in it")
    if "message" in choice:
        message = member(choice, "message", dict, where)
        text = member(message, "content", str, where) if message.get("content") is not None else ""
    else:
        text = member(choice, "text", str, where)
    usage, end = value.get("usage"), choice.get("stop_reason")
    read = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return Reply(
        text=text,
        finish=str(choice.get("finish_reason")),
        end=end if isinstance(end, int) else None,
        prompt_tokens=read if isinstance(read, int) else None,
    )


def read_otherwise(reply: Reply, prompt: Sequence[int]) -> bool:
    """Whether the server says that it read another number of tokens than the prompt has."""
    return reply.prompt_tokens is not None and reply.prompt_tokens != len(prompt)
