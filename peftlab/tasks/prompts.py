"""Prompts and served requests: read from files, and as token ids."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from peftlab.errors import PeftlabError
from peftlab.files import parse_json
from peftlab.models.image_tokens import LIMIT
from peftlab.references import locate
from peftlab.tasks.conversations import Message, alpaca_question, chat_ids
from peftlab.tasks.data import Table, is_unicode, listed, quoted, read_table, table_suffix, text_lines

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from peftlab.tasks.image_prompts import ImagePrompts

_TEXTS = ("prompt", "text")
_QUESTIONS = ("question", "instruction")
_LISTS = ("messages", "turns", "prompt_ids")
_PROMPTS = (*_TEXTS, *_QUESTIONS, *_LISTS)
_RESPONSES = ("response", "completion", "answer", "output", "response_ids")


@dataclass(frozen=True)
class Prompt:
    """A prompt that was read from a file, or was given as text.

    Attributes:
        id: the file's own, else the line or row number.
        category: the file's own, else "all"; "uncategorised" where other rows of the file have one.
        text: its text; None for a conversation or token ids.
        messages: the conversation, or a question as one user turn; None for a text that is meant literally.
        ids: token ids; None otherwise.
        where: file and line, for error messages; empty: ``prompt ID``.
        home: directory from which paths of images count.
    """

    id: str
    category: str
    text: str | None = None
    messages: list[Message] | None = None
    ids: list[int] | None = None
    where: str = ""
    home: Path = Path()


@dataclass(frozen=True)
class Request:
    """A prompt and what the target answered.

    Attributes:
        prompt: token ids.
        response: token ids, with the end-of-sequence token if it was written.
    """

    prompt: list[int]
    response: list[int]


def read_prompts(
    source: str | Path | Sequence[str], *, field: str | None = None, most: int | None = None
) -> list[Prompt]:
    """Read prompts from texts or a file, in their order.

    Args:
        source: the texts themselves, or a file: a table (``.jsonl``, ``.json``, ``.csv``, ``.tsv``, ``.parquet``), or
            one prompt a line in any other. A row has ``prompt`` or ``text``, ``question`` or ``instruction`` (one user
            turn; an alpaca row's ``input`` follows on a line of its own), ``messages`` (role and content), ``turns``
            (Spec-Bench: a list of which the first is asked) or ``prompt_ids``, and optionally ``question_id`` or
            ``id``, and ``category``.
        field: the column, or a text with columns in braces that each row fills, ``Where is {city}?``; None for the
            first of these columns that a row has.
        most: read the first N prompts only; None: all.

    Raises:
        PeftlabError: no such file, no prompt in it, or a row without one; file and line are named.
    """
    if not isinstance(source, (str, Path)):
        texts = [(f"data.prompts, prompt {i}", text) for i, text in enumerate(source, start=1)]
        prompts = [Prompt(str(i), "all", text, where=where) for i, (where, text) in enumerate(texts, start=1)][:most]
    elif table_suffix(path := _file(source)) is None:
        lines = [(n, line) for n, line in text_lines(path) if line.strip()][:most]
        prompts = [Prompt(str(n), "all", line, where=f"{path}:{n}") for n, line in lines]
    else:
        table = read_table(path)  # rows after the first N are not looked at: their values may be missing
        prompts = _rows(table.take([*table.columns], range(len(table))[:most]), field)
    if not prompts:
        raise PeftlabError(f"{source if isinstance(source, (str, Path)) else 'data.prompts'}: no prompt in it")
    return prompts


def read_prompt_ids(
    source: str | Path | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    field: str | None = None,
    chat: bool | None = None,
    most: int | None = None,
    images: ImagePrompts | None = None,
) -> list[list[int]]:
    """Return the token ids of every prompt, in order; arguments as for ``read_prompts``.

    Args:
        source: the texts or the file, as for ``read_prompts``.
        tokenizer: the model's tokenizer.
        field: the column, as for ``read_prompts``.
        chat: put a text into the tokenizer's chat template as one user turn; None: if it has a template.
        most: read the first N prompts only; None: all.
        images: as for ``encode``.

    Raises:
        PeftlabError: as ``read_prompts``; an empty prompt; or messages without a chat template.
    """
    return [_ids(tokenizer, prompt, chat, images) for prompt in read_prompts(source, field=field, most=most)]


def read_conversations(
    source: str | Path | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    field: str | None = None,
    chat: bool | None = None,
    most: int | None = None,
) -> list[list[Message] | None]:
    """Return the conversation that each of ``read_prompt_ids`` was made from; None where the template had no part.

    Args:
        source: the texts or the file, as for ``read_prompts``.
        tokenizer: the model's tokenizer.
        field: the column, as for ``read_prompts``.
        chat: as for ``read_prompt_ids``.
        most: read the first N prompts only; None: all.
    """
    chat = _uses_template(tokenizer, chat)
    return [conversation(tokenizer, prompt, chat) for prompt in read_prompts(source, field=field, most=most)]


def read_requests(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat: bool | None = None,
    images: ImagePrompts | None = None,
) -> list[Request]:
    """Return served requests: rows with a prompt (as in ``read_prompt_ids``) and a response.

    The response is text (column response, completion, answer or output) or ids (response_ids). A text's end of
    sequence is added unless the row's ``finish_reason`` is ``length``.

    Args:
        path: the file.
        tokenizer: the model's tokenizer.
        chat: as for ``read_prompt_ids``.
        images: as for ``encode``.

    Raises:
        PeftlabError: no row, no such column, or an empty prompt or response.
    """
    table = read_table(_file(path))
    if not len(table):
        raise PeftlabError(f"{path}: no request in it")
    prompts = _rows(table, None)
    responses = table.columns[_column(table.columns, _RESPONSES, table.path, "response")]
    reasons = table.columns.get("finish_reason", ["stop"] * len(table))
    requests = []
    for prompt, response, reason in zip(prompts, responses, reasons, strict=True):
        ids = response if _is_ids(response) else None
        if ids is None:
            if not isinstance(response, str) or not is_unicode(response):
                raise PeftlabError(f"{prompt.where}: the response is not a text or token ids, but {quoted(response)}")
            ids = tokenizer(response, add_special_tokens=False)["input_ids"]
            if reason != "length" and tokenizer.eos_token_id is not None:
                ids = [*ids, tokenizer.eos_token_id]
        if not ids:
            raise PeftlabError(f"{prompt.where}: an empty response")
        requests.append(Request(_ids(tokenizer, prompt, chat, images), ids))
    return requests


def has_images(prompt: Prompt) -> bool:
    """Return whether a turn of a prompt's conversation has a part other than text."""
    contents: list[object] = [message["content"] for message in prompt.messages or ()]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(not isinstance(part, dict) or part.get("type") != "text" for part in parts)


def encode(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    chat: bool | None = None,
    images: ImagePrompts | None = None,
) -> list[int]:
    """Return a prompt's token ids; an empty text is the BOS token.

    Args:
        tokenizer: the model's tokenizer.
        prompt: the prompt.
        chat: whether a text is a user turn for the chat template; conversations then need one. None: questions and
            conversations go through the template where there is one, texts are literal.
        images: what reads the images of conversations; None: the model reads text alone.

    Raises:
        PeftlabError: an empty prompt and no BOS token to begin with, messages without a chat template, or a
            conversation that the template refuses.
    """
    where = prompt.where or f"prompt {prompt.id}"
    if has_images(prompt):
        if images is None:
            raise PeftlabError(f"{where}: a content with a part other than text, and the target reads text alone")
        return images.encode(prompt.messages or [], where, prompt.home)
    if prompt.ids is not None:
        return prompt.ids
    text = prompt.text
    if text is None:
        text = "\n".join(str(message["content"]) for message in prompt.messages or ())
    if not is_unicode(text):
        raise PeftlabError(f"{where}: not valid Unicode (half a surrogate pair)")
    messages = conversation(tokenizer, prompt, chat)
    if messages is not None:
        return _through_template(tokenizer, messages, where)
    ids = list(tokenizer(text).input_ids)
    if not ids:
        if tokenizer.bos_token_id is None:
            raise PeftlabError(f"{where}: empty, and the tokenizer has no BOS token to begin with")
        ids = [tokenizer.bos_token_id]
    return ids


def check_tokens(prompt: Prompt, ids: Sequence[int], vocabulary: int) -> None:
    """Raise ``PeftlabError``, naming file and line, where a prompt's token ids have one that the model does not have.

    Args:
        prompt: the prompt. ids: what ``encode`` returned for it. vocabulary: tokens of the model.
    """
    wrong = next((token for token in ids if token < 0 or vocabulary <= token < LIMIT), None)
    if wrong is not None:
        where = prompt.where or f"prompt {prompt.id}"
        raise PeftlabError(f"{where}: token {wrong} is outside the vocabulary of {vocabulary:,}")


def conversation(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, chat: bool | None = None) -> list[Message] | None:
    """Return the conversation that ``encode`` puts into the chat template; None for token ids and literal texts.

    Args:
        tokenizer: the model's tokenizer.
        prompt: the prompt.
        chat: as for ``encode``.
    """
    template = bool(getattr(tokenizer, "chat_template", None))
    if prompt.messages is not None and (template if chat is None else chat or prompt.text is None):
        return prompt.messages
    return [_user_turn(prompt.text)] if chat and prompt.text is not None else None


def spread(prompts: Iterable[Prompt], most: int) -> list[Prompt]:
    """Return at most ``most`` prompts, taken in turn from every category, in the file's order.

    Args:
        prompts: with their categories.
        most: how many to take, at least 1.

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


def _ids(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, chat: bool | None, images: ImagePrompts | None
) -> list[int]:
    """Return the token ids of a prompt to train on; ``PeftlabError`` where it has none."""
    if prompt.text is not None and not prompt.text.strip():
        raise PeftlabError(f"{prompt.where}: empty")
    return encode(tokenizer, prompt, _uses_template(tokenizer, chat), images)


def _uses_template(tokenizer: PreTrainedTokenizerBase, chat: bool | None) -> bool:
    """Return whether texts to train on are user turns: ``chat``, or by default whether there is a template."""
    return bool(getattr(tokenizer, "chat_template", None)) if chat is None else chat


def _through_template(tokenizer: PreTrainedTokenizerBase, messages: list[Message], where: str) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        raise PeftlabError(
            f"{where}: chat messages, but the target's tokenizer has no chat template; give plain texts, or a "
            "tokenizer with a chat_template"
        )
    return chat_ids(tokenizer, messages, where)


def _rows(table: Table, field: str | None) -> list[Prompt]:
    """Return the prompts of a table's rows."""
    if not len(table):
        return []
    if field is not None:
        fields = {field: _filled_column(table, field)}
    else:
        _column(table.columns, _PROMPTS, table.path, "prompt")
        fields = {name: table.columns[name] for name in _PROMPTS if name in table.columns}
    named = [table.columns[name] for name in ("question_id", "id") if name in table.columns]
    categories = [None if value == "" else value for value in table.columns.get("category", [None] * len(table))]
    without = "uncategorised" if any(value is not None for value in categories) else "all"
    prompts = []
    for row, position in enumerate(table.positions):
        own = next((values[row] for values in named if values[row] is not None), position)
        category = categories[row]
        name = next((name for name, values in fields.items() if values[row] is not None), None)
        if name is None:
            raise PeftlabError(f"{table.where(row)}: no prompt; a row needs one of {', '.join(_PROMPTS)}")
        labels = str(own), without if category is None else str(category)
        value = fields[name][row]
        if name == "instruction" and field is None and isinstance(value, str) and "input" in table.columns:
            value = alpaca_question({name: value, "input": table.columns["input"][row]}, table.where(row))
        prompts.append(_prompt(*labels, name, value, table.where(row), table.path.parent))
    return prompts


def _filled_column(table: Table, field: str) -> Sequence[object]:
    """Return a column, or a text with each row's values in the place of column names in braces."""
    parts = re.split(r"{([^{}]+)}", field)  # every second one is a name
    if field in table.columns or len(parts) == 1:
        return table.column(field, "data.field")
    columns = {name: table.column(name, "data.field") for name in parts[1::2]}
    texts: list[object] = []
    for row in range(len(table)):
        values = {name: values[row] for name, values in columns.items()}
        empty = next((name for name, value in values.items() if value in (None, "")), None)
        if empty is not None:
            raise PeftlabError(f"{table.where(row)}: {empty} is empty; data.field puts it into a prompt")
        texts.append("".join(str(values[part]) if i % 2 else part for i, part in enumerate(parts)))
    return texts


def _prompt(id_: str, category: str, name: str, value: object, where: str, home: Path) -> Prompt:
    if name in _LISTS and isinstance(value, str) and value.lstrip().startswith("["):  # a cell of a csv file
        with suppress(ValueError):
            value = parse_json(value)
    if name == "turns" and isinstance(value, list) and value:
        value = value[0]
    if isinstance(value, str) and is_unicode(value):
        is_question = name in _QUESTIONS or name == "turns"
        return Prompt(id_, category, value, [_user_turn(value)] if is_question else None, where=where)
    if _is_ids(value):
        return Prompt(id_, category, ids=value, where=where)
    if isinstance(value, list) and value and all(map(_is_message, value)):
        return Prompt(id_, category, messages=value, where=where, home=home)
    raise PeftlabError(f"{where}: {name} is not a text, chat messages or token ids, but {quoted(value)}")


def _user_turn(text: str) -> Message:
    return {"role": "user", "content": text}


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value


def _is_ids(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(type(token) is int and token < LIMIT for token in value)


def _file(reference: str | Path) -> Path:
    path = locate(str(reference), "prompts")
    if not isinstance(path, Path) or not path.is_file():
        raise PeftlabError(f"prompts {str(reference)!r}: no such file")
    return path


def _column(columns: Mapping[str, object], names: Sequence[str], path: Path, what: str) -> str:
    found = next((name for name in names if name in columns), None)
    if found is None:
        raise PeftlabError(f"{path}: no {what} column ({', '.join(names)}); columns: {listed(columns, 50)}")
    return found
