"""Which characters of a formatted conversation are the answers: found by formatting its beginnings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from peftlab.errors import PeftlabError
from peftlab.tasks.chat import Message
from peftlab.tasks.language.tool_calls import calls_of

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
        messages: with at least one answer. form: see ``Format``.
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
        start = _start(messages[:i], form, upto)
        text = whole if whole.startswith(upto) else upto
        _check_written(messages[i], text[start : len(upto)])
        end, ends = _end(text, start, len(upto), markers)
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
    for call in calls_of(message):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if name not in text or (arguments and str(arguments) in text):  # str: as Python writes it, which is not JSON
            raise PeftlabError(f"the chat template does not write tool calls (of {name})")


def _start(before: Sequence[Message], form: Format, upto: str) -> int:
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


def _end(text: str, start: int, end: int, markers: Sequence[str]) -> tuple[int, bool]:
    """Return where the answer ends, its marker included, and whether it lacks one."""
    stripped = start + len(text[start:end].rstrip())
    if any(text.endswith(marker, start, stripped) for marker in markers):
        return stripped, False
    following = next((marker for marker in markers if text.startswith(marker, end)), None)
    if following is not None:  # the next role's marker is what ends the turn
        return end + len(following), False
    return end, True
