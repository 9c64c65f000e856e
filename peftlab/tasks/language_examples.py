"""Language examples as token ids, with the tokens that are trained marked.

A chat template is a program of the tokenizer's; which characters of its text are the answers is found by formatting
the beginnings of the conversation.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from itertools import product
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from peftlab.errors import PeftlabError
from peftlab.files import Json
from peftlab.tasks.batches import Row, SplitRows
from peftlab.tasks.conversations import VARIABLES, Completion, Conversation, Message, Picture, tool_calls_of
from peftlab.untyped import Processor, Schema

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase


# --- The forms in which chat templates take a conversation.
Shape = Callable[[Sequence[Message]], list[Message]]


def shapes(messages: Sequence[Message]) -> Iterator[Shape]:
    """Yield the forms in which a template may take a conversation, the usual one first.

    Contents are texts, or lists of one text part (templates for images and text). Arguments of tool calls are objects,
    or JSON texts; a turn with calls alone has an empty content, or none. Which form a template takes is found out.
    """
    called = any(tool_calls_of(message) for message in messages)
    both = (False, True) if called else (False,)
    for parts, without, texts in product((False, True), both, both):
        yield partial(_shaped, parts=parts, without=without, texts=texts)


def _shaped(messages: Sequence[Message], *, parts: bool, without: bool, texts: bool) -> list[Message]:
    shaped: list[Message] = []
    for message in messages:
        changes: dict[str, object] = {}
        calls = tool_calls_of(message)
        given: list[dict[str, str]] = message.get("parts")  # type: ignore[assignment]
        if given:  # the image itself goes to the processor
            changes["content"] = [part if part["type"] == "text" else {"type": "image"} for part in given]
        elif without and calls and not message["content"]:
            changes["content"] = None
        elif parts:
            changes["content"] = [{"type": "text", "text": message["content"]}]
        if texts and calls:
            written = [{**c["function"], "arguments": json.dumps(c["function"]["arguments"])} for c in calls]
            changes["tool_calls"] = [{**c, "function": function} for c, function in zip(calls, written, strict=True)]
        shaped.append({key: value for key, value in {**message, **changes}.items() if key != "parts"})  # type: ignore[misc]
    return shaped


# --- Which characters of a formatted conversation are the answers.
TrainOn = Literal["assistant", "last", "all"]
Format = Callable[[Sequence[Message], bool], str]
"""Messages, and whether the prompt for an answer follows them, to the template's text."""


@dataclass(frozen=True)
class Formatted:
    """A text and the spans (start, end) of its characters that are trained.

    ``ends``: whether the text is followed by the end-of-sequence token, trained too, as the template writes no marker
    after the last answer.
    """

    text: str
    spans: tuple[tuple[int, int], ...]
    ends: bool = False


def answers(
    messages: Sequence[Message], form: Format, markers: Sequence[str], train_on: TrainOn = "assistant"
) -> list[Formatted]:
    """Return the texts to train on, and where their answers are.

    For an answer i, with P the conversation before it and the prompt for an answer, Q the conversation up to it, and F
    all of it: where Q begins with P and F with Q, the answer is F[len(P):len(Q)]. Where the template writes earlier
    turns anew (reasoning is removed from all but the last answer), the answer is the end of Q, an example of its own,
    as at inference. Its marker of the end of a turn belongs to an answer, the white space after that does not.

    Args:
        messages: with at least one answer.
        form: the chat template as a function, see ``Format``.
        markers: the tokenizer's special tokens, as text.
        train_on: every answer, the last one, or all of the text.

    Raises:
        PeftlabError: there is no answer; the template changes the turns before an answer once it follows; or it drops
            a text (templates for images and text do so with a content that is not a list of parts) or a tool call.
    """
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not places:
        raise PeftlabError("no assistant turn to train on")
    whole = form(messages, False)
    for message in messages:
        if train_on == "all" or message["role"] in ("system", "user"):
            _check_written(message, whole)
    if train_on == "all":
        return [Formatted(whole, ((0, len(whole)),))]
    shared: list[tuple[int, int]] = []
    alone: list[Formatted] = []
    for i in places if train_on == "assistant" else places[-1:]:
        upto = form(messages[: i + 1], False)
        start = _answer_start(messages[:i], form, upto)
        text = whole if whole.startswith(upto) else upto
        _check_written(messages[i], text[start : len(upto)])
        end, ends = _answer_end(text, start, len(upto), markers)
        if text is whole and not ends:
            shared.append((start, end))
        else:
            alone.append(Formatted(text[:end], ((start, end),), ends))
    return ([Formatted(whole, tuple(shared))] if shared else []) + alone


def _check_written(message: Message, text: str) -> None:
    """Refuse a template that drops a turn's text or tool call. Reasoning may be written anew, its last line is not."""
    role, last = message["role"], message["content"].strip().rpartition("\n")[2].strip()
    if last not in text:
        what = "an answer" if role == "assistant" else f"a {role} turn"
        raise PeftlabError(f"the chat template does not write the text of {what} ({last[:40]!r})")
    for call in tool_calls_of(message):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if name not in text or (arguments and str(arguments) in text):  # str: as Python writes it, which is not JSON
            raise PeftlabError(f"the chat template does not write tool calls (of {name})")


def _answer_start(before: Sequence[Message], form: Format, upto: str) -> int:
    """Return where the answer begins in ``upto``, which ends with it."""
    prompt = form(before, True)
    if upto.startswith(prompt):
        return len(prompt)
    # The prompt may open a part (reasoning) that a finished answer lacks: then the answer begins where they part.
    pairs = enumerate(zip(prompt, upto, strict=False))
    common = next((place for place, (one, other) in pairs if one != other), min(len(prompt), len(upto)))
    if before and common < len(form(before, False)):
        raise PeftlabError(
            "the chat template writes the turns before an answer in another way once the answer follows (at "
            f"{prompt[common:][:40]!r})"
        )
    return common


def _answer_end(text: str, start: int, end: int, markers: Sequence[str]) -> tuple[int, bool]:
    """Return where the answer ends, its marker included, and whether it lacks one."""
    stripped = start + len(text[start:end].rstrip())
    if any(text.endswith(marker, start, stripped) for marker in markers):
        return stripped, False
    following = next((marker for marker in markers if text.startswith(marker, end)), None)
    if following is not None:  # the next role's marker is what ends the turn
        return end + len(following), False
    return end, True


# --- Images in a text: the chat template writes a placeholder for each, and the model's processor its tokens.
_FILLINGS: WeakKeyDictionary[Processor, dict[tuple[int, int], str]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Placed:
    """A placeholder at ``span`` of a text, and the characters ``filled`` that take its place in the longer text."""

    span: tuple[int, int]
    filled: tuple[int, int]


def tokenizer_of(processor: Processor) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a processor of images and text, or the tokenizer that was given."""
    tokenizer: Processor = getattr(processor, "tokenizer", processor)
    return tokenizer


def check_placeholders(processor: Processor, text: str, count: int, where: str) -> None:
    """Refuse a template's text that does not have a placeholder for each of its ``count`` images, and no other.

    Args:
        processor: the model's.
        text: what the chat template wrote.
        count: images of the conversation.
        where: file and line, for errors.
    """
    token = processor.image_token
    if (found := text.count(token)) != count:
        raise PeftlabError(
            f"{where}: {count} images, and {found} times {token} in what the chat template writes: it writes no "
            f"images, or a turn contains {token}"
        )


def with_image_tokens(processor: Processor, text: str, pictures: Sequence[Picture]) -> tuple[str, list[Placed]]:
    """Return a text with the image tokens that the processor puts in the place of each placeholder, and where.

    How many they are depends on an image's size alone, so that no file is read here.

    Args:
        processor: the model's.
        text: with as many placeholders as pictures.
        pictures: the images, in order.
    """
    first, *rest = text.split(processor.image_token)
    longer, places, before = first, list[Placed](), len(first)
    for picture, part in zip(pictures, rest, strict=True):
        filling = _filling(processor, picture)
        end = before + len(processor.image_token)
        places.append(Placed((before, end), (len(longer), len(longer) + len(filling))))
        longer, before = longer + filling + part, end + len(part)
    return longer, places


def _filling(processor: Processor, picture: Picture) -> str:
    """Return the text of an image's tokens, which the processor makes of a white image of its size."""
    from PIL import Image

    known = _FILLINGS.setdefault(processor, {})
    if picture.size not in known:
        found = processor(
            text=[processor.image_token],
            images=[[Image.new("RGB", picture.size, "white")]],
            add_special_tokens=False,
            return_text_replacement_offsets=True,
        )
        known[picture.size] = str(found["text_replacement_offsets"][0][0]["replacement"])
    return known[picture.size]


def moved(places: Sequence[Placed], character: int) -> int:
    """Return where a character of the text is in the longer one; none of a placeholder's is asked for.

    Args:
        places: what ``with_image_tokens`` returned.
        character: its place in the text with placeholders.
    """
    last = max((place for place in places if place.span[1] <= character), key=lambda p: p.span, default=None)
    return character if last is None else character - last.span[1] + last.filled[1]


# --- Token ids.
Source = Conversation | Completion
TooLong = Literal["drop", "truncate", "error"]
TOO_LONG = "longer than train.max_length"
UNTRAINED = "no trained token within train.max_length"


@dataclass(frozen=True)
class Encoding:
    """The settings by which rows become tokens.

    Attributes:
        max_length: tokens of the longest example.
        too_long: what becomes of longer ones.
        train_on: which turns are trained; for completions the completion, or all.
        split: cut longer plain texts into examples of ``max_length``.
    """

    max_length: int
    too_long: TooLong = "drop"
    train_on: TrainOn = "assistant"
    split: bool = False


@dataclass
class Tokens:
    """One example: token ids, which of them are trained, and the UTF-8 bytes of the trained text.

    Attributes:
        text: what a processor makes the tokens of, together with the ``images``' files.
        filled: of each image the first token, the one after its last, and what it is, for people.
    """

    input_ids: list[int]
    trained: list[bool]
    trained_bytes: int
    text: str = ""
    images: list[str] = field(default_factory=list)
    filled: list[tuple[int, int, str]] = field(default_factory=list)


def encode_rows(rows: Sequence[Source], tokenizer: Processor, how: Encoding) -> tuple[Dataset, SplitRows]:
    """Return the examples of ``rows``, and how many of them there are, were left out and were truncated.

    Args:
        rows: conversations or completions.
        tokenizer: the model's tokenizer; its processor where rows have images.
        how: how rows become tokens.

    Returns:
        Columns ``input_ids``, ``trained`` (one per token), ``length``, ``trained_tokens``, ``trained_bytes``; with
        images also ``text`` and ``images``.

    Raises:
        PeftlabError: a row without a trained token, one that the chat template refuses, or one that is too long where
            that is an error; file and line are named.
    """
    from datasets import Dataset

    kept: list[Tokens] = []
    whole: list[int] = []
    dropped = 0
    for row in rows:
        for tokens in encode(row, tokenizer, how):
            fitted = fit_length(tokens, row.where, how)
            whole.append(len(tokens.input_ids))
            dropped += not fitted
            kept += fitted
    counted = count_rows(len(kept), dropped, whole, how)
    columns = {
        "input_ids": [tokens.input_ids for tokens in kept],
        "trained": [tokens.trained for tokens in kept],
        "length": [len(tokens.input_ids) for tokens in kept],
        "trained_tokens": [sum(tokens.trained) for tokens in kept],
        "trained_bytes": [tokens.trained_bytes for tokens in kept],
    }
    if any(tokens.images for tokens in kept):
        columns |= {"text": [tokens.text for tokens in kept], "images": [tokens.images for tokens in kept]}
    return Dataset.from_dict(columns), counted


def count_rows(kept: int, dropped: int, whole: Sequence[int], how: Encoding) -> SplitRows:
    """Return how many rows of a split are used, left out and truncated.

    Args:
        kept: rows that are used. dropped: rows that are not.
        whole: tokens of each row as it is in the file.
        how: how rows become tokens.

    Raises:
        PeftlabError: no row is used.
    """
    why, cuts = (UNTRAINED, True) if how.too_long == "truncate" else (TOO_LONG, False)
    if not kept:
        every = "no example has a trained token within" if cuts else "every example is longer than"
        shortest = f"; the shortest has {min(whole)}" if whole else ""
        raise PeftlabError(f"{every} train.max_length, {how.max_length} tokens{shortest}")
    truncated = sum(n > how.max_length for n in whole) - dropped if cuts and not how.split else 0
    return SplitRows(kept, {why: dropped} if dropped else {}, truncated, max(whole))


def encode(row: Source, tokenizer: Processor, how: Encoding) -> list[Tokens]:
    """Return a row's examples: one, or several where a template writes earlier turns anew.

    Args:
        row: a conversation or a completion.
        tokenizer: the model's tokenizer; its processor where rows have images.
        how: how rows become tokens.
    """
    if isinstance(row, Conversation):
        found, messages, form = _format(row, tokenizer, how.train_on)
        if row.pictures:
            check_placeholders(tokenizer, form(messages, False), len(row.pictures), row.where)
        return [_tokenise_marked(formatted, tokenizer, row.where, pictures=row.pictures) for formatted in found]
    start = 0 if how.train_on == "all" else len(row.prompt)
    text = row.prompt + row.completion
    tokens = _tokenise_marked(Formatted(text, ((start, len(text)),), True), tokenizer, row.where, bos=True)
    return [tokens]


def format_chat(row: Conversation, tokenizer: Processor, train_on: TrainOn) -> list[Formatted]:
    """Return a conversation as its template writes it, and where its answers are; errors name the row.

    Args:
        row: the conversation.
        tokenizer: one with a chat template.
        train_on: every answer, the last one, or all of the text.
    """
    return _format(row, tokenizer, train_on)[0]


def prompt_of(row: Conversation, tokenizer: Processor) -> str:
    """Return the text before a conversation's last answer, with the template's prompt for it.

    Args:
        row: the conversation.
        tokenizer: one with a chat template.
    """
    _, messages, form = _format(row, tokenizer, "last")
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    return form(messages[:last], True)


def _format(
    row: Conversation, tokenizer: Processor, train_on: TrainOn
) -> tuple[list[Formatted], list[Message], Format]:
    """Return what ``format_chat`` does, with the messages and the form in which the template took them."""
    write = template_of(row, tokenizer)
    refusals: list[PeftlabError] = []
    for messages in [row.messages] + ([row.texts] if row.texts else []):
        for shape in shapes(messages):
            form = partial(write, shape)
            try:
                return answers(messages, form, markers(tokenizer_of(tokenizer)), train_on), messages, form
            except PeftlabError as error:
                refusals.append(error)
    raise PeftlabError(f"{row.where}: {refusals[0]}") from refusals[0]


def template_of(row: Conversation, tokenizer: Processor) -> Callable[[Shape, Sequence[Message], bool], str]:
    """Return the tokenizer's chat template with the conversation's tools and variables; see ``Format`` and ``Shape``.

    Args:
        row: the conversation, for its tools and variables.
        tokenizer: one with a chat template, or a processor with one.

    Raises:
        PeftlabError: there is none, or a variable is an argument of the function that calls it; the row is named.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise PeftlabError(
            f"{row.where}: a chat, but the model's tokenizer has no chat template; use text/completion, or a model "
            "with a chat_template"
        )

    schemas: list[Schema] = list(row.tools)
    arguments = signature(tokenizer_of(tokenizer).apply_chat_template).parameters if row.variables else {}
    if taken := [name for name in row.variables if name in arguments]:
        raise PeftlabError(f"{row.where}: {VARIABLES}: {taken[0]!r} is no variable that a row may set for its template")

    def write(shape: Shape, messages: Sequence[Message], prompted: bool) -> str:
        try:
            text = tokenizer.apply_chat_template(
                shape(messages),
                tools=schemas or None,
                tokenize=False,
                add_generation_prompt=prompted,
                **row.variables,
            )
        except Exception as error:  # a template is a program that comes with the tokenizer: it may raise anything
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise PeftlabError(f"the chat template does not take this conversation: {reason}") from error
        return str(text)

    return write


def markers(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the texts of the tokenizer's special tokens, longest first."""
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return sorted({*added, *map(str, tokenizer.all_special_tokens)}, key=len, reverse=True)


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens with which the chat template ends an answer, of which a model that learnt it writes the first.

    Empty where the template writes none, or does not take a question and an answer.
    """
    turns: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        found = format_chat(Conversation(turns, "chat"), tokenizer, "last")[0]
    except PeftlabError:
        return frozenset()
    answer = found.text[slice(*found.spans[0])]
    marker = next((marker for marker in markers(tokenizer) if answer.endswith(marker)), None)
    if found.ends or marker is None:
        return frozenset()
    return frozenset(tokenizer(marker, add_special_tokens=False)["input_ids"][:1])


def _tokenise_marked(
    formatted: Formatted,
    processor: Processor,
    where: str,
    *,
    bos: bool = False,
    pictures: Sequence[Picture] = (),
) -> Tokens:
    """Tokenise a text once and mark the tokens whose first character is within a span, and in no image.

    Args:
        bos: begin with the token that the tokenizer begins texts with; a chat template writes its own.
        pictures: the images whose placeholders the text has, in order; there may be more, of later turns.
    """
    tokenizer = tokenizer_of(processor)
    if not tokenizer.is_fast:
        raise PeftlabError(f"{where}: {type(tokenizer).__name__} does not say where its tokens are in the text")
    text, spans, filled = formatted.text, formatted.spans, list[tuple[int, int]]()
    if pictures:
        pictures = pictures[: text.count(processor.image_token)]
        text, places = with_image_tokens(processor, text, pictures)
        spans = tuple((moved(places, first), moved(places, end)) for first, end in spans)
        filled = [place.filled for place in places]
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, starts = list(found["input_ids"]), [start for start, _ in found["offset_mapping"]]
    trained = [
        any(first <= start < end for first, end in spans) and not any(first <= start < end for first, end in filled)
        for start in starts
    ]
    if bos:
        begin = bos_ids(tokenizer)
        ids, trained = [*begin, *ids], [False] * len(begin) + trained
    if formatted.ends and tokenizer.eos_token_id is not None:
        ids, trained = [*ids, tokenizer.eos_token_id], [*trained, True]
    # Nothing comes before the first token that could predict it: its text is not scored either.
    unscored = found["offset_mapping"][0][1] if trained[:1] == [True] and starts else 0
    trained[:1] = [False]
    if not any(trained):
        raise PeftlabError(f"{where}: no token of this row is trained")
    marked = markers(tokenizer)
    scored = (formatted.text[max(first, unscored) : end] for first, end in formatted.spans)
    size = sum(len(_unmarked(text, marked).encode()) for text in scored)
    shown = []
    for picture, (first, end) in zip(pictures, filled, strict=True):
        inside = [place for place, start in enumerate(starts) if first <= start < end]
        width, height = picture.size
        label = f"[{picture.path}: {width} x {height}, {len(inside)} tokens]"
        shown.append((inside[0], inside[-1] + 1, label))
    ending = str(tokenizer.eos_token) if formatted.ends and tokenizer.eos_token_id is not None else ""
    return Tokens(ids, trained, size, formatted.text + ending, [picture.path for picture in pictures], shown)


def _unmarked(text: str, marked: Sequence[str]) -> str:
    """Return a text without the marker that ends it, which is no byte of an answer."""
    return next((text.removesuffix(marker) for marker in marked if text.endswith(marker)), text)


def bos_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the BOS token where the tokenizer begins texts with it."""
    ids = list(tokenizer("a").input_ids)
    return ids[:1] if ids and ids[0] == tokenizer.bos_token_id else []


def fit_length(tokens: Tokens, where: str, how: Encoding) -> list[Tokens]:
    """Return an example as it is trained: whole, cut into parts, or not at all where it is too long.

    Args:
        tokens: the example.
        where: file and line, for errors.
        how: how rows become tokens.

    Raises:
        PeftlabError: it is longer than ``how.max_length``, and that is an error.
    """
    length = len(tokens.input_ids)
    if length <= how.max_length:
        return [tokens]
    if how.split:
        share = tokens.trained_bytes / max(1, sum(tokens.trained))
        parts = []
        for i in range(0, length, how.max_length):
            ids, trained = tokens.input_ids[i : i + how.max_length], tokens.trained[i : i + how.max_length]
            trained[:1] = [False]
            if any(trained):
                parts.append(Tokens(ids, trained, round(share * sum(trained))))
        return parts
    if how.too_long == "error" or (tokens.images and how.too_long == "truncate"):
        seen = sum(end - first for first, end, _ in tokens.filled)
        what = f", {seen} of them of images" if tokens.images else ""
        cut = "; an image cannot be cut" if tokens.images and how.too_long == "truncate" else ""
        raise PeftlabError(f"{where}: {length} tokens{what}, and train.max_length is {how.max_length}{cut}")
    kept = tokens.trained[: how.max_length]
    if how.too_long == "drop" or not any(kept):
        return []
    share = sum(kept) / sum(tokens.trained)
    return [Tokens(tokens.input_ids[: how.max_length], kept, round(share * tokens.trained_bytes))]


def collate(rows: Sequence[Row], *, pad: int) -> dict[str, Tensor]:
    """Return ``input_ids``, ``attention_mask`` and ``trained``, [examples, longest], padded on the right.

    Args:
        rows: tokenised examples.
        pad: the id that fills the batch.
    """
    lists = [torch.tensor(row["input_ids"]) for row in rows]
    marks = [torch.tensor(row["trained"]) for row in rows]
    padded = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    return {
        "input_ids": padded(lists, padding_value=pad),
        "attention_mask": padded([torch.ones_like(ids) for ids in lists]),
        "trained": padded(marks),
    }


def fingerprint(name: str, splits: Iterable[tuple[str, Sequence[Source]]]) -> str:
    """Return the SHA-256 of a task's name and all its rows, without the files that they come from.

    Args:
        name: the task's name.
        splits: name and rows of each split.
    """
    digest = hashlib.sha256(json.dumps([name]).encode())
    for split, rows in splits:
        digest.update(json.dumps([split, len(rows)]).encode())
        for row in rows:
            values: list[Json] = (
                [json.loads(json.dumps(row.messages)), [*row.tools], *([row.variables] if row.variables else [])]
                if isinstance(row, Conversation)
                else [row.prompt, row.completion]
            )
            digest.update(json.dumps(values).encode())
    return digest.hexdigest()
