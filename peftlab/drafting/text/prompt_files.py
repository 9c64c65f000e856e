"""Prompts and served requests as token ids: from text, columns of a file, or chat messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from peftlab.errors import PeftlabError
from peftlab.references import locate
from peftlab.tasks.bad_rows import listed, quoted
from peftlab.tasks.chat import chat_ids
from peftlab.tasks.content import is_unicode, text_lines
from peftlab.tasks.readers import read_table

_PROMPTS = ("prompt", "text", "question", "instruction", "messages", "prompt_ids")
_RESPONSES = ("response", "completion", "answer", "output", "response_ids")


@dataclass(frozen=True)
class Request:
    """A prompt and what the target answered.

    Attributes:
        prompt: token ids. response: token ids, with the end-of-sequence token if it was written.
    """

    prompt: list[int]
    response: list[int]


def read_prompts(
    source: str | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    field: str | None = None,
    chat: bool | None = None,
) -> list[list[int]]:
    """Return the token ids of every prompt, in order.

    Args:
        source: the texts themselves, or a file: ``.txt`` (a prompt a line), ``.jsonl``, ``.json``, ``.csv``,
            ``.tsv`` or ``.parquet`` with a column of texts, chat messages (``[{role, content}, ...]``) or ids.
        field: the column; None for the first of prompt, text, question, instruction, messages, prompt_ids.
        chat: put a text into the tokenizer's chat template as one user turn; None: if it has a template.

    Raises:
        PeftlabError: no prompt at all, an empty one, a missing column, or messages without a chat template.
    """
    prompts = _values(source, field)
    if not prompts:
        raise PeftlabError(f"{source if isinstance(source, str) else 'data.prompts'}: holds no prompt")
    return [encode_prompt(value, tokenizer, chat, where) for where, value in prompts]


def read_requests(path: str | Path, tokenizer: PreTrainedTokenizerBase, *, chat: bool | None = None) -> list[Request]:
    """Return served requests: rows with a prompt (as in ``read_prompts``) and a response.

    The response is text (column response, completion, answer or output) or ids (response_ids). A text's end of
    sequence is added unless the row's ``finish_reason`` is ``length``.

    Raises:
        PeftlabError: no row, no such column, or an empty prompt or response.
    """
    table = read_table(_file(str(path)))
    if not len(table):
        raise PeftlabError(f"{path}: holds no request")
    prompts = table.columns[_column(table.columns, _PROMPTS, path, "prompt")]
    name = _column(table.columns, _RESPONSES, path, "response")
    reasons = table.columns.get("finish_reason", ["stop"] * len(table))
    requests = []
    for row, (prompt, response, reason) in enumerate(zip(prompts, table.columns[name], reasons, strict=True)):
        ids = _ids(response)
        if ids is None:
            ids = tokenizer(_text(response, table.where(row)), add_special_tokens=False)["input_ids"]
            if reason != "length" and tokenizer.eos_token_id is not None:
                ids = [*ids, tokenizer.eos_token_id]
        if not ids:
            raise PeftlabError(f"{table.where(row)}: an empty response")
        requests.append(Request(encode_prompt(prompt, tokenizer, chat, table.where(row)), ids))
    return requests


def encode_prompt(value: Any, tokenizer: PreTrainedTokenizerBase, chat: bool | None, where: str) -> list[int]:
    """Return the ids of one prompt: a text, chat messages, or the ids themselves."""
    ids = _ids(value)
    if ids is not None:
        return ids
    messages = value if isinstance(value, list) else None
    if messages is None and not _text(value, where).strip():
        raise PeftlabError(f"{where}: empty")
    template = getattr(tokenizer, "chat_template", None)
    if messages is None and (chat if chat is not None else bool(template)):
        messages = [{"role": "user", "content": value}]
    if messages is None:
        return list(tokenizer(value)["input_ids"])
    if not template:
        raise PeftlabError(
            f"{where}: chat messages, but the target's tokenizer has no chat template; give plain texts, or a "
            "tokenizer with a chat_template"
        )
    return chat_ids(tokenizer, messages, where)


def _values(source: str | Sequence[str], field: str | None) -> list[tuple[str, Any]]:
    """Return every prompt as it is written, and where: ``file:line``."""
    if not isinstance(source, str):
        return [(f"data.prompts, prompt {i}", text) for i, text in enumerate(source, start=1)]
    path = _file(source)
    if path.suffix == ".txt":
        return [(f"{path}:{n}", line) for n, line in text_lines(path) if line.strip()]
    table = read_table(path)
    if not len(table):
        return []
    name = field if field is not None else _column(table.columns, _PROMPTS, path, "prompt")
    return [(table.where(row), value) for row, value in enumerate(table.column(name, "data.field"))]


def _file(reference: str) -> Path:
    path = locate(reference, "prompts")
    if not isinstance(path, Path) or not path.is_file():
        raise PeftlabError(f"prompts {reference!r}: no such file")
    return path


def _column(columns: Mapping[str, Any], names: Sequence[str], path: str | Path, what: str) -> str:
    found = next((name for name in names if name in columns), None)
    if found is None:
        raise PeftlabError(f"{path}: no {what} column ({', '.join(names)}); columns: {listed(columns, 50)}")
    return found


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not is_unicode(value):
        raise PeftlabError(f"{where}: not a text, chat messages or token ids, but {quoted(value)}")
    return value


def _ids(value: Any) -> list[int] | None:
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return value
    return None
