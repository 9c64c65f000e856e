"""What was drafted for one output, token by token, for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from peftlab.decoding.analysis.benchmark import Question, Settings, decode_batch
from peftlab.decoding.drafters.base import Drafter, Row, Verified
from peftlab.decoding.engines.base import Engine
from peftlab.decoding.text_stream import BROKEN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ACCEPTED, REJECTED, TARGET = "accepted", "rejected", "target"
_PROMPT, _OUTPUT = 64, 256  # tokens that are shown at most
_CONTEXT = 8  # tokens before a token that are decoded with it: they decide about spaces and whole characters


@dataclass(frozen=True)
class Piece:
    """The text of one token.

    Attributes:
        text: empty where the token is only a part of a character; the token that completes it has all of it.
        kind: ``accepted`` or ``rejected`` for a drafted token, ``target`` for one that the target added. Rejected ones
            are no part of the output.
    """

    text: str
    kind: str


@dataclass(frozen=True)
class DraftedText:
    """An output with what was drafted for it.

    Attributes:
        prompt: the end of the prompt. pieces: of the output and of rejected tokens, in order.
    """

    prompt: str
    pieces: list[Piece]


def drafted_text(
    target: Engine,
    settings: Settings,
    name: str,
    drafter: Drafter,
    question: Question,
    tokenizer: PreTrainedTokenizerBase,
) -> DraftedText:
    """Decode one prompt, in a pass of its own, and return the beginning of its output with all drafted tokens.

    Of a tree the rejected tokens are those of the first branch behind the last accepted token.

    Args:
        settings: how to decode, with the policy of the drafter's ``name``. tokenizer: decodes the tokens.
    """
    rejected: list[list[int]] = []

    def observe(rows: list[Row], verified: Verified) -> None:
        rejected.append(_rejected(verified))

    shorter = replace(settings, max_new_tokens=min(settings.max_new_tokens, _OUTPUT))
    (output,) = decode_batch(target, shorter, name, drafter, [question], observe)
    prompt = question.ids
    known, shown, place = list(prompt), list[Piece](), 0
    for step, behind in zip(output.steps, rejected, strict=True):
        emitted = output.tokens[place : place + step.emitted]
        place += step.emitted
        accepted, own = emitted[: step.accepted], emitted[step.accepted :]
        shown += pieces(tokenizer, known, accepted, ACCEPTED)
        known += accepted
        if own:  # else the output ended within the accepted ones
            shown += pieces(tokenizer, known, behind, REJECTED)
        shown += pieces(tokenizer, known, own, TARGET)
        known += own
    end = str(tokenizer.decode(list(prompt[-_PROMPT:]), skip_special_tokens=True)).strip()
    return DraftedText(f"… {end}" if len(prompt) > _PROMPT else end, shown)


def _rejected(verified: Verified) -> list[int]:
    """The drafted tokens behind the last accepted one."""
    tokens, parents, path = verified.draft.tokens[0].tolist(), verified.draft.parents_of(0), verified.paths[0]
    node, found = (path[-1] if path else -1), list[int]()
    while (child := next((i for i, p in enumerate(parents) if p == node and tokens[i] >= 0), None)) is not None:
        found.append(tokens[child])
        node = child
    return found


def pieces(tokenizer: PreTrainedTokenizerBase, before: Sequence[int], tokens: Sequence[int], kind: str) -> list[Piece]:
    """Return the texts of tokens that follow ``before``."""
    context, found = list(before[-_CONTEXT:]), []
    done = _text(tokenizer, context)
    for token in tokens:
        context.append(token)
        text = _text(tokenizer, context)
        found.append(Piece(text[len(done) :], kind))
        done = text
    return found


def _text(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """The text of ids up to the last whole character."""
    return str(tokenizer.decode(ids)).rstrip(BROKEN)
