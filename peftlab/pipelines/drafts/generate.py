"""Text from one prompt, with a draft if one is named."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from peftlab.decoding.analysis.statistics import acceptance_statistics
from peftlab.decoding.decode import StoppingCriteria, decode
from peftlab.decoding.text_stream import TextStream, stop_at
from peftlab.drafting.load import LOOKUP_OR_DRAFT, make_drafter
from peftlab.errors import PeftlabError
from peftlab.pipelines.drafts.decoding_options import DecodingOptions
from peftlab.tasks.prompts import Prompt, encode


@dataclass(frozen=True)
class GeneratedText:
    """An output and how it came about.

    Attributes:
        text: without the prompt. tokens: its token ids. reason: why it ended ("length", "eos" or "stop").
        seconds: of decoding, loading not included.
        block_efficiency: output tokens per target step; None without a drafter.
        acceptance: share of drafted tokens that were accepted; None if none was drafted.
    """

    text: str
    tokens: list[int]
    reason: str
    seconds: float
    block_efficiency: float | None
    acceptance: float | None


def generate(
    target: str,
    prompt: str,
    draft: str | None = None,
    options: DecodingOptions | None = None,
    *,
    drafter: str | None = None,
    stop: Sequence[str] = (),
    chat: bool = False,
    on_text: Callable[[str], None] | None = None,
) -> GeneratedText:
    """Continue ``prompt`` with the target's own output.

    Args:
        target: reference of the model whose output it is. draft: reference of a model or a directory of heads.
        options: of decoding; None for the defaults.
        drafter: ``lookup``, ``recycling`` or ``ngram``, which need no draft, or ``lookup+draft``; None: the draft.
        stop: texts before which the output ends. chat: ask through the tokenizer's chat template.
        on_text: called with each piece of text as soon as it is final.

    Raises:
        PeftlabError: a setting, target or draft cannot be used.
    """
    options = options or DecodingOptions()
    if draft is not None and drafter not in (None, "draft", LOOKUP_OR_DRAFT):
        raise PeftlabError(f"draft and drafter {drafter}: give one of them, or drafter {LOOKUP_OR_DRAFT}")
    make_policy, sampling = options.make_policy(), options.sampling()
    pair = options.load(target, draft)
    name = drafter or ("draft" if draft is not None else None)
    if chat and not getattr(pair.tokenizer, "chat_template", None):
        raise PeftlabError(f"chat: the tokenizer of {target!r} has no chat template")
    messages = [{"role": "user", "content": prompt}] if chat else None
    ids = encode(pair.tokenizer, Prompt("prompt", "all", prompt, messages))
    stream, pieces = TextStream(pair.tokenizer, stop), list[str]()

    def show(piece: str) -> None:
        pieces.append(piece)
        if on_text is not None:
            on_text(piece)

    began = time.perf_counter()
    result = decode(
        pair.target,
        [ids],
        StoppingCriteria(options.max_new_tokens, pair.eos, stop_at(pair.tokenizer, stop)),
        make_drafter(name, pair, options.width) if name else None,
        policy=make_policy,
        sampling=sampling,
        on_tokens=lambda _, tokens: show(stream.add(tokens)),
    )[0]
    seconds = time.perf_counter() - began
    show(stream.finish())
    found = acceptance_statistics([result])
    tau, acceptance = (found.tau, found.acceptance) if name else (None, None)
    return GeneratedText("".join(pieces), result.tokens, result.reason, seconds, tau, acceptance)
