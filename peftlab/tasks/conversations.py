"""Reading conversations, completions and plain texts from the columns of a table.

A conversation may be OpenAI's ``messages``, ShareGPT's ``conversations``, alpaca's ``instruction`` and ``output``, or
``prompt`` and ``completion``; its turns may call tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, TypedDict

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import Json, parse_json
from peftlab.tasks.data import Table, is_missing, is_unicode, listed, quoted
from peftlab.tasks.table import DataConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Message: TypeAlias = dict[str, str]
"""One turn of a conversation, ``role`` and ``content``, in transformers' own type; a template may take more than text
(a list of parts), which is passed on as it is."""


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: list[Message], where: str) -> list[int]:
    """Return the token ids of a conversation, ending with the prompt for the model's answer.

    Args:
        tokenizer: one with a chat template.
        messages: ``[{role, content}, ...]``.
        where: names the row in error messages.

    Raises:
        PeftlabError: the template rejects the conversation, or produces no text.
    """
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        text.encode()  # an unpaired surrogate: the tokenizer's own error does not name the cause
    except Exception as error:  # a template is a program that comes with the tokenizer: it may raise anything
        reason = str(error).strip() or type(error).__name__
        raise PeftlabError(
            f"{where}: the tokenizer's chat template does not take this conversation: {reason.splitlines()[0]}"
        ) from error
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])  # the template writes the special tokens
    if not ids:
        raise PeftlabError(f"{where}: the tokenizer's chat template makes an empty text of this conversation")
    return ids


# --- Turns, read from the shapes that files have and checked.
_ROLES = {
    "system": "system", "developer": "system", "human": "user", "user": "user", "gpt": "assistant",
    "assistant": "assistant", "model": "assistant", "function_call": "function_call", "observation": "tool",
    "tool": "tool",
}  # fmt: skip
CALLED = "function_call"  # ShareGPT's role of a turn whose text is a tool call


def read_turns(value: object, where: str, *, images: bool = False) -> list[Message]:
    """Return a list of turns, or a JSON text of one, as turns of ``role`` and ``content``.

    A user's turn with images has the key ``parts`` too: ``{type: text, text}`` and ``{type: image, path}`` in order.

    Args:
        value: the list, or its JSON text.
        where: file and line, for errors.
        images: whether turns may have images.

    Raises:
        PeftlabError: not a list, a role or content that is none, or a broken tool call; ``where`` is named.
    """
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise PeftlabError(f"{where}: messages are not JSON ({error})") from None
    if not isinstance(value, list) or not value:
        raise PeftlabError(f"{where}: messages are a list of turns, not {quoted(value)}")
    return [_read_turn(turn, where, images) for turn in value]


def _read_turn(turn: object, where: str, images: bool) -> Message:
    """Return a turn of ``role`` and ``content``, or of ShareGPT's ``from`` and ``value``, with the rest of its keys."""
    if not isinstance(turn, Mapping):
        raise PeftlabError(f"{where}: a turn is an object with role and content, not {quoted(turn)}")
    name = turn.get("role", turn.get("from"))
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        hint = did_you_mean(name, _ROLES) if isinstance(name, str) else ""
        raise PeftlabError(f"{where}: role {quoted(name)} is none of {', '.join(_ROLES)}{hint}")
    content, parts = _read_content(turn.get("content", turn.get("value")), where, images)
    if parts and role != "user":
        raise PeftlabError(f"{where}: an image in a turn of role {role}; the user's turns have them")
    known = ("role", "from", "content", "value", "weight", "parts")
    rest = {key: value for key, value in turn.items() if key not in known}
    rest |= {"parts": parts} if parts else {}
    if turn.get("weight") not in (None, 1):
        raise PeftlabError(f"{where}: a turn of weight {quoted(turn['weight'])}; data.train_on says what is trained")
    if rest.get("tool_calls"):
        if role != "assistant":
            raise PeftlabError(f"{where}: tool_calls in a turn of role {role}; the assistant's turns have them")
        rest["tool_calls"] = read_calls(rest["tool_calls"], where)
        content = "" if content is None else content
    if not isinstance(content, str) or not is_unicode(content):
        raise PeftlabError(f"{where}: the content of a turn ({role}) is not a text, but {quoted(content)}")
    return {"role": role, "content": content, **{str(key): value for key, value in rest.items() if value is not None}}


def _read_content(value: object, where: str, images: bool) -> tuple[object, list[dict[str, str]]]:
    """Return a turn's text, that of its text parts where it is a list, and its parts, if an image is among them."""
    if not isinstance(value, list):
        return value, []
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in value]
    other = next((kind for kind in kinds if kind != "text" and not (images and kind == "image")), None)
    if other is not None:
        what = "learns from texts and images" if images else "trains on text alone"
        raise PeftlabError(f"{where}: a content with a part of type {quoted(other)}; this task {what}")
    parts: list[dict[str, str]] = []
    for part, kind in zip(value, kinds, strict=True):
        key = "text" if kind == "text" else "path"
        found = part.get(key) if isinstance(part, Mapping) else None
        if not isinstance(found, str) or not is_unicode(found):
            form = "{type: text, text: ...}" + (" and {type: image, path: ...}" if images else "")
            raise PeftlabError(f"{where}: a content is a text, or parts {form}, not {quoted(value)}")
        parts.append({"type": str(kind), key: found})
    if not parts:
        raise PeftlabError(f"{where}: a content is a text, or a list of parts, not an empty list")
    seen = "image" in kinds
    return ("\n" if seen else "").join(part["text"] for part in parts if "text" in part), parts if seen else []


def with_parsed_call(message: Message, where: str) -> Message:
    """Return a turn whose text is a tool call as an assistant's turn with that call; other turns are unchanged.

    Args:
        message: a turn with ``role`` and ``content``.
        where: file and line, for errors.
    """
    if message["role"] != CALLED:
        return message
    changes: dict[str, object] = {
        "role": "assistant",
        "content": "",
        "tool_calls": read_calls(message["content"], where),
    }
    return {**message, **changes}  # type: ignore[dict-item]


def check_turns(messages: Sequence[Message], where: str) -> None:
    """Refuse an answer without a question, two questions in a row, and an empty answer.

    Args:
        messages: the conversation's turns.
        where: file and line, for errors.
    """
    roles = [message["role"].replace(CALLED, "assistant") for message in messages]
    order = f"; the roles are {', '.join(roles)}"
    for before, role in zip([None, *roles], roles, strict=False):
        if role == "assistant" and before in (None, "system"):
            raise PeftlabError(f"{where}: an assistant turn without a user turn before it{order}")
        if role == "user" and before == "user":
            raise PeftlabError(f"{where}: two user turns one after the other{order}")
        if role == "tool" and before not in ("assistant", "tool"):
            raise PeftlabError(
                f"{where}: a tool's answer without an assistant turn that calls the tool before it{order}"
            )
        if role == "system" and before is not None:
            raise PeftlabError(f"{where}: a system turn after the first turn{order}")
    for message in messages:
        answer = message["role"] in ("assistant", CALLED)
        if answer and not message["content"].strip() and not message.get("tool_calls"):
            raise PeftlabError(f"{where}: an empty answer")
    if "assistant" not in roles:
        raise PeftlabError(f"{where}: no assistant turn to train on; its roles are {', '.join(dict.fromkeys(roles))}")


# --- Tools and calls of them, as chat templates take them.
_CALL = ("name", "arguments")
VARIABLES = "chat_template_kwargs"
"""The column of a row's variables for the chat template, such as ``{"enable_thinking": false}``."""


class Function(TypedDict):
    """The function that is called, and its arguments."""

    name: str
    arguments: dict[str, Json] | str


class Call(TypedDict):
    """A tool call, as chat templates take it; an ``id`` may be beside these keys."""

    type: str
    function: Function


def read_tools(value: object, where: str) -> list[dict[str, Json]]:
    """Return the JSON schemas of a row's tools: a list, or a text of one; a bare function is wrapped.

    Args:
        value: a cell of the table.
        where: file and line, for errors.

    Raises:
        PeftlabError: not JSON, not a list of objects, or a tool without a name; ``where`` is named.
    """
    if is_missing(value):
        return []
    tools = _json(value, "tools", where)
    if not isinstance(tools, list):
        raise PeftlabError(f"{where}: tools are a list, not {quoted(tools)}")
    return [_read_tool(tool, where) for tool in tools]


def _read_variables(value: object, where: str) -> dict[str, Json]:
    """Return the variables of a row for its chat template: an object, or a text of one; null stands for none."""
    if is_missing(value):
        return {}
    variables = _json(value, VARIABLES, where)
    if not isinstance(variables, dict):
        raise PeftlabError(f"{where}: {VARIABLES} are an object of the template's variables, not {quoted(variables)}")
    return {name: each for name, each in variables.items() if each is not None}


def read_calls(value: object, where: str) -> list[dict[str, Json]]:
    """Return the calls of a turn as ``{type, function: {name, arguments}}``; arguments may be JSON text in the file.

    Args:
        value: what the turn has as its calls.
        where: file and line, for errors.

    Raises:
        PeftlabError: not JSON, or a call without a name or with arguments that are no object; ``where`` is named.
    """
    calls = _json(value, "tool_calls", where)
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list) or not calls:
        raise PeftlabError(f"{where}: tool_calls are a list of calls, not {quoted(calls)}")
    return [_read_call(call, where) for call in calls]


def tool_calls_of(message: Mapping[str, object]) -> list[Call]:
    """Return the calls in a turn that was read."""
    calls: list[Call] = message.get("tool_calls") or []  # type: ignore[assignment]
    return calls


def _read_tool(tool: Json, where: str) -> dict[str, Json]:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise PeftlabError(f"{where}: a tool is an object with name and parameters, not {quoted(tool)}")
    assert isinstance(tool, dict)
    return tool if "function" in tool else {"type": "function", "function": function}


def _read_call(call: Json, where: str) -> dict[str, Json]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise PeftlabError(f"{where}: a tool call is an object with name and arguments, not {quoted(call)}")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        hint = next((did_you_mean(key, _CALL) for key in function if did_you_mean(key, _CALL)), "")
        raise PeftlabError(f"{where}: a tool call without a name{hint}: {quoted(function)}")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        arguments = _json(arguments or "{}", f"the arguments of {name}", where)
    if not isinstance(arguments, dict | None):
        raise PeftlabError(f"{where}: the arguments of {name} are not an object, but {quoted(arguments)}")
    assert isinstance(call, dict)
    rest = {key: value for key, value in call.items() if key not in ("function", *_CALL, "parameters")}
    return {"type": "function", **rest, "function": {"name": name, "arguments": arguments or {}}}


def _json(value: object, what: str, where: str) -> Json:
    try:
        return parse_json(value if isinstance(value, str) else json.dumps(value))
    except (TypeError, ValueError) as error:
        raise PeftlabError(f"{where}: {what}: not JSON ({error})") from None


# --- Rows, whatever the shape of their columns.
_SHAPES = (("messages",), ("conversations",), ("instruction", "output"), ("prompt", "completion"))
_NAMED = "messages, conversations (ShareGPT), instruction and output (alpaca), or prompt and completion"


@dataclass(frozen=True)
class Picture:
    """An image of a conversation: its file, the SHA-256 digest of it, and its width and height in pixels."""

    path: str
    digest: str
    size: tuple[int, int]


@dataclass(frozen=True)
class Conversation:
    """A chat; ``tools`` are JSON schemas for the template, ``variables`` further ones of it. ``where``: file and line.

    ``texts``: the same turns where the file has a tool call as text (ShareGPT), for templates that write no tool calls.
    ``pictures``: the images, in the order of the parts of type ``image``.
    """

    messages: list[Message]
    where: str
    tools: list[dict[str, Json]] = field(default_factory=list)
    texts: list[Message] | None = None
    pictures: tuple[Picture, ...] = ()
    variables: dict[str, Json] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """A text and what follows it, which is trained; a plain text has an empty prompt. ``where``: file and line."""

    prompt: str
    completion: str
    where: str


def read_conversation(table: Table, row: int, data: DataConfig) -> Conversation:
    """Return a row as a conversation.

    Args:
        table: the file.
        row: index of the row, from 0.
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
        messages = question_and_answer(values[names[0]], values[names[1]], where, names, images=True)
    else:
        messages = read_turns(values[names[0]], where, images=True)
    return as_conversation(messages, values, where)


def as_conversation(messages: list[Message], values: Mapping[str, object], where: str) -> Conversation:
    """Return turns as a conversation, with the columns ``system``, ``tools`` and ``chat_template_kwargs`` of their row.

    Args:
        messages: the turns that ``read_turns`` returned.
        values: the row, by column.
        where: file and line, for errors.
    """
    messages = with_system(messages, values, where)
    check_turns(messages, where)
    calls = [with_parsed_call(message, where) for message in messages]
    texts = [{**message, "role": "assistant"} if message["role"] == CALLED else message for message in messages]
    tools, variables = read_tools(values.get("tools"), where), _read_variables(values.get(VARIABLES), where)
    return Conversation(calls, where, tools, texts if texts != messages else None, variables=variables)


def chat_columns(table: Table, row: int, data: DataConfig) -> tuple[str, ...] | None:
    """Return the columns that contain a row's chat: those that ``data`` names, else the first known shape it has.

    Args:
        table: the file.
        row: index of the row, from 0.
        data: the recipe's data section.
    """
    if data.messages is not None:
        table.column(data.messages, "data.messages")
        return (data.messages,)
    if data.prompt is not None and data.completion is not None:
        table.column(data.prompt, "data.prompt"), table.column(data.completion, "data.completion")
        return data.prompt, data.completion
    whole = (names for names in _SHAPES if all(name in table.columns for name in names))
    return next((names for names in whole if table.columns[names[0]][row] is not None), None)


def read_completion(table: Table, row: int, data: DataConfig) -> Completion:
    """Read a row's columns ``data.prompt`` (default ``prompt``) and ``data.completion`` (default ``completion``).

    ``data.separator`` is between them. White space at its end belongs to the completion: tokenizers join it with the
    word that follows, so a prompt that ended with it would not be the beginning of the training text.

    Args:
        table: the file.
        row: index of the row, from 0.
        data: the recipe's data section.
    """
    names = data.prompt or "prompt", data.completion or "completion"
    prompt = table.column(names[0], "data.prompt")[row]
    completion = table.column(names[1], "data.completion")[row]
    where, separator = table.where(row), data.separator or ""
    kept = separator.rstrip()
    return Completion(
        _text(prompt, names[0], where) + kept,
        separator.removeprefix(kept) + _text(completion, names[1], where),
        where,
    )


def read_plain(table: Table, row: int, data: DataConfig) -> Completion:
    """Read a row's column ``data.text`` (default ``text``) as a completion of an empty prompt.

    Args:
        table: the file.
        row: index of the row, from 0.
        data: the recipe's data section.
    """
    name = data.text[0] if data.text else "text"
    return Completion("", _text(table.column(name, "data.text")[row], name, table.where(row)), table.where(row))


def question_and_answer(
    prompt: object,
    completion: object,
    where: str,
    names: Sequence[str] = ("prompt", "completion"),
    *,
    images: bool = False,
) -> list[Message]:
    """Return a question and its answer as one conversation.

    Args:
        prompt: the question, a text or a list of turns.
        completion: its answer, a text or a list of turns.
        where: file and line, for errors.
        names: what errors call the two.
        images: whether turns may have images.
    """
    asked: list[Message] = [{"role": "user", "content": ""}]
    if isinstance(prompt, list):
        asked = read_turns(prompt, where, images=images)
    else:
        asked[0]["content"] = _text(prompt, names[0], where)
    if isinstance(completion, list):
        return [*asked, *read_turns(completion, where)]
    return [*asked, {"role": "assistant", "content": _text(completion, names[1], where)}]


def alpaca_question(values: Mapping[str, object], where: str) -> str:
    """Return what a row in alpaca's format asks: its instruction, and its input on a line of its own if it has one.

    Args:
        values: the row, with ``instruction`` and maybe ``input``, by column.
        where: file and line, for errors.
    """
    instruction, more = _text(values["instruction"], "instruction", where), values.get("input")
    return instruction if is_missing(more) else f"{instruction}\n{_text(more, 'input', where)}"


def _alpaca(values: Mapping[str, object], where: str) -> list[Message]:
    asked = alpaca_question(values, where)
    history = values.get("history") or []
    if not isinstance(history, list):
        raise PeftlabError(f"{where}: history is a list of questions and answers, not {quoted(history)}")
    earlier: list[Message] = []
    for turn in history:
        if not isinstance(turn, list) or len(turn) != 2:
            raise PeftlabError(f"{where}: a turn of history is a question and an answer, not {quoted(turn)}")
        earlier += question_and_answer(turn[0], turn[1], where, ("the question of history", "the answer of history"))
    return [*earlier, *question_and_answer(asked, values["output"], where, ("instruction", "output"))]


def with_system(messages: list[Message], values: Mapping[str, object], where: str) -> list[Message]:
    """Return a conversation that begins with its row's column ``system``, where there is one.

    Args:
        messages: the conversation's turns.
        values: the row, by column.
        where: file and line, for errors.
    """
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
