"""Tools and calls of them, as chat templates take them: calls with a name and arguments that are objects."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypedDict

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import Json, parse_json
from peftlab.tasks.labels import is_missing
from peftlab.tasks.reading.bad_rows import quoted

_CALL = ("name", "arguments")


class Function(TypedDict):
    """What is called, and with what."""

    name: str
    arguments: dict[str, Json] | str


class Call(TypedDict):
    """A tool call, as chat templates take it; an ``id`` may be beside these keys."""

    type: str
    function: Function


def read_tools(value: object, where: str) -> list[dict[str, Json]]:
    """Return the JSON schemas of a row's tools: a list, or a text of one; a bare function is wrapped.

    Raises:
        PeftlabError: not JSON, not a list of objects, or a tool without a name; ``where`` is named.
    """
    if is_missing(value):
        return []
    tools = _json(value, "tools", where)
    if not isinstance(tools, list):
        raise PeftlabError(f"{where}: tools are a list, not {quoted(tools)}")
    return [_tool(tool, where) for tool in tools]


def read_calls(value: object, where: str) -> list[dict[str, Json]]:
    """Return the calls of a turn as ``{type, function: {name, arguments}}``; arguments may be JSON text in the file.

    Raises:
        PeftlabError: not JSON, or a call without a name or with arguments that are no object; ``where`` is named.
    """
    calls = _json(value, "tool_calls", where)
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list) or not calls:
        raise PeftlabError(f"{where}: tool_calls are a list of calls, not {quoted(calls)}")
    return [_call(call, where) for call in calls]


def calls_of(message: Mapping[str, object]) -> list[Call]:
    """Return the calls in a turn that was read."""
    calls: list[Call] = message.get("tool_calls") or []  # type: ignore[assignment]
    return calls


def _tool(tool: Json, where: str) -> dict[str, Json]:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise PeftlabError(f"{where}: a tool is an object with name and parameters, not {quoted(tool)}")
    assert isinstance(tool, dict)
    return tool if "function" in tool else {"type": "function", "function": function}


def _call(call: Json, where: str) -> dict[str, Json]:
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
