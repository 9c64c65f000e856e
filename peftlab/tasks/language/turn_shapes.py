"""The forms of one conversation that chat templates ask for: contents as parts, tool calls' arguments as JSON text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

from peftlab.tasks.chat import Message
from peftlab.tasks.language.tool_calls import calls_of

Shape = Callable[[Sequence[Message]], list[Message]]


def shapes(messages: Sequence[Message]) -> Iterator[Shape]:
    """Yield the forms in which a template may take a conversation, the usual one first.

    Contents are texts, or lists of one text part (templates for images and text). Arguments of tool calls are objects,
    or JSON texts; a turn with calls alone has an empty content, or none. Which form a template takes is found out.
    """
    called = any(calls_of(message) for message in messages)
    both = (False, True) if called else (False,)
    for parts, without, texts in product((False, True), both, both):
        yield partial(_shaped, parts=parts, without=without, texts=texts)


def _shaped(messages: Sequence[Message], *, parts: bool, without: bool, texts: bool) -> list[Message]:
    shaped: list[Message] = []
    for message in messages:
        changes: dict[str, object] = {}
        calls = calls_of(message)
        if without and calls and not message["content"]:
            changes["content"] = None
        elif parts:
            changes["content"] = [{"type": "text", "text": message["content"]}]
        if texts and calls:
            written = [{**c["function"], "arguments": json.dumps(c["function"]["arguments"])} for c in calls]
            changes["tool_calls"] = [{**c, "function": function} for c, function in zip(calls, written, strict=True)]
        shaped.append({**message, **changes})  # type: ignore[dict-item]
    return shaped
