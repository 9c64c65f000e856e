"""Prompts to measure with: Spec-Bench's questions, other JSON lines, or lines of text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peftlab.errors import PeftlabError
from peftlab.files import parse_json
from peftlab.tasks.chat import chat_ids
from peftlab.tasks.reading.content import is_unicode, text_lines

_ASKED = ("question", "instruction")
_FIELDS = ("turns", "messages", *_ASKED, "prompt", "text")


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        id: the file's own, else the line number.
        category: the file's own, else "all".
        text: for the model as it is.
        messages: a conversation for the tokenizer's chat template; None where ``text`` is meant literally.
        where: file and line, for error messages; empty: ``prompt ID``.
    """

    id: str
    category: str
    text: str
    messages: list[dict[str, str]] | None = None
    where: str = ""


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read prompts from a ``.jsonl`` file, or one a line from any other.

    A JSON object has ``turns`` (Spec-Bench: a list of which the first is asked), ``messages`` (role and
    content), ``question`` or ``instruction``, ``prompt`` or ``text``, and optionally ``question_id`` or ``id``,
    and ``category``. All but a prompt or a text go through the chat template where there is one.

    Raises:
        PeftlabError: no such file, no prompt in it, or a line that is none; file and line are named.
    """
    path = Path(path)
    filled = [(n, line) for n, line in text_lines(path) if line.strip()]
    if path.suffix == ".jsonl":
        prompts = [_parse(line, f"{path}:{n}", n) for n, line in filled]
    else:
        prompts = [Prompt(str(n), "all", line, where=f"{path}:{n}") for n, line in filled]
    if not prompts:
        raise PeftlabError(f"{path}: no prompt in it")
    return prompts


def _parse(line: str, where: str, number: int) -> Prompt:
    try:
        value = parse_json(line)
    except ValueError as error:
        raise PeftlabError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(value, dict) or not any(name in value for name in _FIELDS):
        raise PeftlabError(f"{where}: no prompt; an object needs one of {', '.join(_FIELDS)}")
    identity = str(value.get("question_id", value.get("id", number)))
    category = str(value.get("category", "all"))
    field = next(name for name in _FIELDS if name in value)
    content = value[field]
    if field in ("prompt", "text") and isinstance(content, str):
        return Prompt(identity, category, content, where=where)
    if field in _ASKED and isinstance(content, str):
        return Prompt(identity, category, content, [{"role": "user", "content": content}], where)
    if field == "turns" and isinstance(content, list) and content and isinstance(content[0], str):
        return Prompt(identity, category, content[0], [{"role": "user", "content": content[0]}], where)
    if field == "messages" and isinstance(content, list) and content and all(map(_is_message, content)):
        text = "\n".join(message["content"] for message in content)
        return Prompt(identity, category, text, content, where)
    raise PeftlabError(f"{where}: {field} is not what it should be; see the documentation of prompt files")


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def encode(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Return the prompt's token ids; an empty text is the BOS token.

    Raises:
        PeftlabError: an empty prompt and no BOS token to begin with, or a conversation that the template refuses.
    """
    where = prompt.where or f"prompt {prompt.id}"
    if prompt.messages is not None and getattr(tokenizer, "chat_template", None):
        return chat_ids(tokenizer, prompt.messages, where)
    if not is_unicode(prompt.text):
        raise PeftlabError(f"{where}: not valid Unicode (half a surrogate pair)")
    ids = list(tokenizer(prompt.text).input_ids)
    if not ids:
        if tokenizer.bos_token_id is None:
            raise PeftlabError(f"{where}: empty, and the tokenizer has no BOS token to begin with")
        ids = [tokenizer.bos_token_id]
    return ids


def spread(prompts: Iterable[Prompt], most: int) -> list[Prompt]:
    """Return at most so many prompts, taken in turn from every category, in the file's order.

    Raises:
        PeftlabError: ``most < 1``.
    """
    if most < 1:
        raise PeftlabError(f"max_prompts: {most} leaves none")
    prompts = list(prompts)
    seen: dict[str, int] = {}
    ranked = []
    for place, prompt in enumerate(prompts):
        ranked.append((seen.get(prompt.category, 0), place))
        seen[prompt.category] = seen.get(prompt.category, 0) + 1
    return [prompts[place] for place in sorted(place for _, place in sorted(ranked)[:most])]
