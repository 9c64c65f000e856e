"""From the columns of a table to conversations and completions, whatever the shape is called."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from peftlab.errors import PeftlabError
from peftlab.files import Json, parse_json
from peftlab.tasks.chat import Message
from peftlab.tasks.config import DataConfig
from peftlab.tasks.labels import is_missing
from peftlab.tasks.reading.bad_rows import listed, quoted
from peftlab.tasks.reading.content import is_unicode
from peftlab.tasks.reading.readers import Table

_ROLES = {
    "system": "system", "developer": "system", "human": "user", "user": "user", "gpt": "assistant",
    "assistant": "assistant", "model": "assistant", "function_call": "assistant", "observation": "tool", "tool": "tool",
}  # fmt: skip
_SHAPES = "messages, conversations (ShareGPT), instruction and output (alpaca), or prompt and completion"


@dataclass(frozen=True)
class Conversation:
    """A chat; ``tools`` are JSON schemas for the template. ``where``: file and line."""

    messages: list[Message]
    where: str
    tools: list[Json] = field(default_factory=list)


@dataclass(frozen=True)
class Completion:
    """A text and what follows it, which is trained; a plain text has an empty prompt. ``where``: file and line."""

    prompt: str
    completion: str
    where: str


def read_conversation(table: Table, row: int, data: DataConfig) -> Conversation:
    """Return a row as a conversation.

    Args:
        data: ``messages`` or ``prompt`` and ``completion`` name columns; else the shape is recognised by its columns.

    Raises:
        PeftlabError: no known shape, or a turn that is not one; file and line are named.
    """
    where, values = table.where(row), {name: column[row] for name, column in table.columns.items()}
    named = data.messages or next((name for name in ("messages", "conversations") if name in values), None)
    if data.prompt is not None and data.completion is not None:
        messages = pair(values[data.prompt], values[data.completion], where)
    elif named is not None:
        messages = with_system(turns(values.get(named), where), values)
    elif "instruction" in values and "output" in values:
        messages = _alpaca(values, where)
    elif "prompt" in values and "completion" in values:
        messages = pair(values["prompt"], values["completion"], where)
    else:
        raise PeftlabError(f"{table.path}: no chat in it; a row has {_SHAPES}; columns: {listed(values, 50)}")
    check_turns(messages, where)
    return Conversation(messages, where, read_tools(values.get("tools"), where))


def read_completion(table: Table, row: int, data: DataConfig) -> Completion:
    """Return a row of ``data.prompt`` (default ``prompt``) and ``data.completion`` (default ``completion``).

    ``data.separator`` is between them. White space at its end belongs to the completion: tokenizers join it with the
    word that follows, so a prompt that ended with it would not be the beginning of the training text.
    """
    prompt = table.column(data.prompt or "prompt", "data.prompt")[row]
    completion = table.column(data.completion or "completion", "data.completion")[row]
    where, separator = table.where(row), data.separator or ""
    kept = separator.rstrip()
    return Completion(
        _text(prompt, "prompt", where) + kept,
        separator.removeprefix(kept) + _text(completion, "completion", where),
        where,
    )


def read_plain(table: Table, row: int, data: DataConfig) -> Completion:
    """Return a row of ``data.text`` (default ``text``)."""
    name = data.text[0] if data.text else "text"
    return Completion("", _text(table.column(name, "data.text")[row], name, table.where(row)), table.where(row))


def with_system(messages: list[Message], values: Mapping[str, object]) -> list[Message]:
    """Return a conversation that begins with the column ``system``, where there is one and no such turn."""
    if isinstance(values.get("system"), str) and messages[0]["role"] != "system":
        return [{"role": "system", "content": str(values["system"])}, *messages]
    return messages


def pair(prompt: object, completion: object, where: str) -> list[Message]:
    """Return a question and its answer, each a text or a list of turns, as one conversation."""
    asked = (
        turns(prompt, where)
        if isinstance(prompt, list)
        else [{"role": "user", "content": _text(prompt, "prompt", where)}]
    )
    if isinstance(completion, list):
        return [*asked, *turns(completion, where)]
    return [*asked, {"role": "assistant", "content": _text(completion, "completion", where)}]


def _alpaca(values: Mapping[str, object], where: str) -> list[Message]:
    instruction, more = _text(values["instruction"], "instruction", where), values.get("input")
    asked = instruction if is_missing(more) else f"{instruction}\n{more}"
    history = values.get("history") or []
    earlier: list[Message] = []
    for turn in history if isinstance(history, list) else []:
        if not isinstance(turn, list) or len(turn) != 2:
            raise PeftlabError(f"{where}: a turn of history is a question and an answer, not {quoted(turn)}")
        earlier += pair(turn[0], turn[1], where)
    system = values.get("system")
    return [
        *([{"role": "system", "content": str(system)}] if not is_missing(system) else []),
        *earlier,
        *pair(asked, values["output"], where),
    ]


def turns(value: object, where: str) -> list[Message]:
    """Return a list of turns, or the JSON of one, as messages."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise PeftlabError(f"{where}: messages are not JSON ({error})") from None
    if not isinstance(value, list) or not value:
        raise PeftlabError(f"{where}: messages are a list of turns, not {quoted(value)}")
    return [_turn(turn, where) for turn in value]


def _turn(turn: object, where: str) -> Message:
    """Return a turn of ``role`` and ``content``, or of ShareGPT's ``from`` and ``value``, with the rest of its keys."""
    if not isinstance(turn, Mapping):
        raise PeftlabError(f"{where}: a turn is an object with role and content, not {quoted(turn)}")
    name = turn.get("role", turn.get("from"))
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise PeftlabError(f"{where}: role {quoted(name)} is none of {', '.join(_ROLES)}")
    content = turn.get("content", turn.get("value"))
    rest = {key: value for key, value in turn.items() if key not in ("role", "from", "content", "value", "weight")}
    if content is None and role == "assistant" and rest.get("tool_calls"):
        content = ""
    if not isinstance(content, str) or not is_unicode(content):
        raise PeftlabError(f"{where}: the content of a turn ({role}) is not a text, but {quoted(content)}")
    return {"role": role, "content": content, **{str(key): value for key, value in rest.items() if value is not None}}


def check_turns(messages: Sequence[Message], where: str) -> None:
    """Refuse answers to nothing, two questions in a row, and empty answers."""
    roles = [message["role"] for message in messages]
    for before, role in zip([None, *roles], roles, strict=False):
        if role == "assistant" and before in (None, "system"):
            raise PeftlabError(f"{where}: an assistant turn without a user turn before it")
        if role == "user" and before == "user":
            raise PeftlabError(f"{where}: two user turns one after the other")
        if role == "system" and before is not None:
            raise PeftlabError(f"{where}: a system turn after the first turn")
    for message in messages:
        if message["role"] == "assistant" and not message["content"].strip() and not message.get("tool_calls"):
            raise PeftlabError(f"{where}: an empty answer")


def read_tools(value: object, where: str) -> list[Json]:
    """Return a row's tools, JSON schemas or the text of them; an absent value is no tools."""
    if is_missing(value):
        return []
    try:
        tools = parse_json(value) if isinstance(value, str) else json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise PeftlabError(f"{where}: tools are not JSON ({error})") from None
    if not isinstance(tools, list):
        raise PeftlabError(f"{where}: tools are a list, not {quoted(tools)}")
    return tools


def _text(value: object, name: str, where: str) -> str:
    if not isinstance(value, str) or not is_unicode(value) or is_missing(value):
        raise PeftlabError(f"{where}: {name} is not a text, but {quoted(value)}")
    return value
