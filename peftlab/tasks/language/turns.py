"""The turns of a conversation, read from the shapes that files have and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import parse_json
from peftlab.tasks.chat import Message
from peftlab.tasks.language.tool_calls import read_calls
from peftlab.tasks.reading.bad_rows import quoted
from peftlab.tasks.reading.content import is_unicode

_ROLES = {
    "system": "system", "developer": "system", "human": "user", "user": "user", "gpt": "assistant",
    "assistant": "assistant", "model": "assistant", "function_call": "function_call", "observation": "tool",
    "tool": "tool",
}  # fmt: skip
CALLED = "function_call"  # ShareGPT's role of a turn whose text is a tool call


def read_turns(value: object, where: str) -> list[Message]:
    """Return a list of turns, or a JSON text of one, as turns of ``role`` and ``content``.

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
    return [_turn(turn, where) for turn in value]


def _turn(turn: object, where: str) -> Message:
    """Return a turn of ``role`` and ``content``, or of ShareGPT's ``from`` and ``value``, with the rest of its keys."""
    if not isinstance(turn, Mapping):
        raise PeftlabError(f"{where}: a turn is an object with role and content, not {quoted(turn)}")
    name = turn.get("role", turn.get("from"))
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        hint = did_you_mean(name, _ROLES) if isinstance(name, str) else ""
        raise PeftlabError(f"{where}: role {quoted(name)} is none of {', '.join(_ROLES)}{hint}")
    content = _content(turn.get("content", turn.get("value")), where)
    rest = {key: value for key, value in turn.items() if key not in ("role", "from", "content", "value", "weight")}
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


def _content(value: object, where: str) -> object:
    """Return a content; that of a list of text parts is their text."""
    if not isinstance(value, list):
        return value
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in value]
    other = next((kind for kind in kinds if kind != "text"), None)
    if other is not None:
        raise PeftlabError(f"{where}: a content with a part of type {quoted(other)}; this task trains on text alone")
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in value]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise PeftlabError(f"{where}: a content is a text, or parts {{type: text, text: ...}}, not {quoted(value)}")
    return "".join(map(str, texts))


def call_of(message: Message, where: str) -> Message:
    """Return a turn whose text is a tool call as an assistant's turn with that call; others as they are."""
    if message["role"] != CALLED:
        return message
    changes: dict[str, object] = {
        "role": "assistant",
        "content": "",
        "tool_calls": read_calls(message["content"], where),
    }
    return {**message, **changes}  # type: ignore[dict-item]


def check_turns(messages: Sequence[Message], where: str) -> None:
    """Refuse answers to nothing, two questions in a row, and empty answers."""
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
