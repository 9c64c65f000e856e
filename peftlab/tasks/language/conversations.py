"""From the columns of a table to conversations and completions, whatever the shape is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from peftlab.errors import PeftlabError
from peftlab.files import Json
from peftlab.tasks.chat import Message
from peftlab.tasks.config import DataConfig
from peftlab.tasks.labels import is_missing
from peftlab.tasks.language.tool_calls import read_tools
from peftlab.tasks.language.turns import CALLED, call_of, check_turns, read_turns
from peftlab.tasks.reading.bad_rows import listed, quoted
from peftlab.tasks.reading.content import is_unicode
from peftlab.tasks.reading.readers import Table

_SHAPES = (("messages",), ("conversations",), ("instruction", "output"), ("prompt", "completion"))
_NAMED = "messages, conversations (ShareGPT), instruction and output (alpaca), or prompt and completion"


@dataclass(frozen=True)
class Conversation:
    """A chat; ``tools`` are JSON schemas for the template. ``where``: file and line.

    ``texts``: the same turns where the file has a tool call as text (ShareGPT), for templates that write no tool calls.
    """

    messages: list[Message]
    where: str
    tools: list[dict[str, Json]] = field(default_factory=list)
    texts: list[Message] | None = None


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
    names = chat_columns(table, row, data)
    if names is None:
        raise PeftlabError(f"{where}: no chat in it; a row has {_NAMED}; columns: {listed(values, 50)}")
    if names == ("instruction", "output"):
        messages = _alpaca(values, where)
    elif len(names) == 2:
        messages = pair(values[names[0]], values[names[1]], where, names)
    else:
        messages = read_turns(values[names[0]], where)
    return as_conversation(messages, values, where)


def as_conversation(messages: list[Message], values: Mapping[str, object], where: str) -> Conversation:
    """Return turns that were read, with the columns ``system`` and ``tools`` of their row; errors name ``where``."""
    messages = with_system(messages, values, where)
    check_turns(messages, where)
    calls = [call_of(message, where) for message in messages]
    texts = [{**message, "role": "assistant"} if message["role"] == CALLED else message for message in messages]
    tools = read_tools(values.get("tools"), where)
    return Conversation(calls, where, tools, texts if texts != messages else None)


def chat_columns(table: Table, row: int, data: DataConfig) -> tuple[str, ...] | None:
    """Return the columns that contain a row's chat: those that ``data`` names, else the first known shape it has."""
    if data.messages is not None:
        table.column(data.messages, "data.messages")
        return (data.messages,)
    if data.prompt is not None and data.completion is not None:
        table.column(data.prompt, "data.prompt"), table.column(data.completion, "data.completion")
        return data.prompt, data.completion
    whole = (names for names in _SHAPES if all(name in table.columns for name in names))
    return next((names for names in whole if table.columns[names[0]][row] is not None), None)


def completion_columns(table: Table, row: int, data: DataConfig) -> tuple[str, ...]:
    """Return the columns that contain a completion."""
    return data.prompt or "prompt", data.completion or "completion"


def plain_columns(table: Table, row: int, data: DataConfig) -> tuple[str, ...]:
    """Return the column that contains a text."""
    return (data.text[0] if data.text else "text",)


def read_completion(table: Table, row: int, data: DataConfig) -> Completion:
    """Return a row of ``data.prompt`` (default ``prompt``) and ``data.completion`` (default ``completion``).

    ``data.separator`` is between them. White space at its end belongs to the completion: tokenizers join it with the
    word that follows, so a prompt that ended with it would not be the beginning of the training text.
    """
    prompt = table.column(data.prompt or "prompt", "data.prompt")[row]
    completion = table.column(data.completion or "completion", "data.completion")[row]
    names = completion_columns(table, row, data)
    where, separator = table.where(row), data.separator or ""
    kept = separator.rstrip()
    return Completion(
        _text(prompt, names[0], where) + kept,
        separator.removeprefix(kept) + _text(completion, names[1], where),
        where,
    )


def read_plain(table: Table, row: int, data: DataConfig) -> Completion:
    """Return a row of ``data.text`` (default ``text``)."""
    name = data.text[0] if data.text else "text"
    return Completion("", _text(table.column(name, "data.text")[row], name, table.where(row)), table.where(row))


def pair(
    prompt: object, completion: object, where: str, names: Sequence[str] = ("prompt", "completion")
) -> list[Message]:
    """Return a question and its answer, each a text or a list of turns, as one conversation; ``names``: for errors."""
    asked: list[Message] = [{"role": "user", "content": ""}]
    if isinstance(prompt, list):
        asked = read_turns(prompt, where)
    else:
        asked[0]["content"] = _text(prompt, names[0], where)
    if isinstance(completion, list):
        return [*asked, *read_turns(completion, where)]
    return [*asked, {"role": "assistant", "content": _text(completion, names[1], where)}]


def _alpaca(values: Mapping[str, object], where: str) -> list[Message]:
    instruction, more = _text(values["instruction"], "instruction", where), values.get("input")
    asked = instruction if is_missing(more) else f"{instruction}\n{_text(more, 'input', where)}"
    history = values.get("history") or []
    if not isinstance(history, list):
        raise PeftlabError(f"{where}: history is a list of questions and answers, not {quoted(history)}")
    earlier: list[Message] = []
    for turn in history:
        if not isinstance(turn, list) or len(turn) != 2:
            raise PeftlabError(f"{where}: a turn of history is a question and an answer, not {quoted(turn)}")
        earlier += pair(turn[0], turn[1], where, ("the question of history", "the answer of history"))
    return [*earlier, *pair(asked, values["output"], where, ("instruction", "output"))]


def with_system(messages: list[Message], values: Mapping[str, object], where: str) -> list[Message]:
    """Return a conversation that begins with its row's column ``system``, where there is one."""
    value = values.get("system")
    if is_missing(value):
        return messages
    if messages[0]["role"] == "system":
        raise PeftlabError(f"{where}: two system turns, in the column system and as the first turn")
    return [{"role": "system", "content": _text(value, "system", where)}, *messages]


def _text(value: object, name: str, where: str) -> str:
    if isinstance(value, str) and not value.strip():
        raise PeftlabError(f"{where}: {name} is empty")
    if not isinstance(value, str) or not is_unicode(value):
        raise PeftlabError(f"{where}: {name} is not a text, but {quoted(value)}")
    return value
