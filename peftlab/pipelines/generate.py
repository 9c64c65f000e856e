"""Text from a prompt or in a conversation, with a draft if one is named."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from peftlab.checkpoints.adapter import load_model
from peftlab.decoding.decode import PolicyFactory, PolicyInputs, StoppingCriteria, decode, fixed
from peftlab.decoding.generation import TextStream, answer_inputs, stop_at
from peftlab.decoding.measurements import (
    DistanceMeter,
    LossyResult,
    acceptance_statistics,
)
from peftlab.decoding.sampling import LossyRule
from peftlab.decoding.table import model_free
from peftlab.drafting.base import (
    ONE_PASS,
    PEARL,
    SUFFIX,
    SUFFIX_AND_DRAFT,
    Pair,
    make_drafter,
    needs_draft,
)
from peftlab.drafting.target import eos_ids
from peftlab.environment import Cpu, describe_cpu, resolve_device
from peftlab.errors import PeftlabError
from peftlab.models.load import load_processor, load_tokenizer, max_positions
from peftlab.models.quantised import torch_dtype
from peftlab.pipelines.benchmark import DecodingOptions, StoredWeights, acceptance_head, draft_lengths, stored_weights
from peftlab.tasks.batches import padding_or_end
from peftlab.tasks.conversations import Conversation, Message, chat_ids
from peftlab.tasks.images import prompt_inputs, with_pictures
from peftlab.tasks.language_examples import check_placeholders, end_of_turn, prompt_of, tokenizer_of
from peftlab.tasks.prompts import Prompt, encode
from peftlab.tasks.table import GenerateConfig


@dataclass(frozen=True)
class GeneratedText:
    """An output with its figures.

    Attributes:
        text: without the prompt. tokens: its token ids. reason: why it ended ("length", "eos" or "stop").
        seconds: of decoding, loading not included.
        block_efficiency: output tokens per target step; None without a drafter.
        acceptance: share of drafted tokens that were accepted; None if none was drafted.
        lossy: the rule that accepted them, and what it cost; None: the output is the target's own.
        weights: how those of the ``target`` and of the ``draft``, if that is a model, are stored. cpu: the processor.
    """

    text: str
    tokens: list[int]
    reason: str
    seconds: float
    block_efficiency: float | None
    acceptance: float | None
    lossy: LossyResult | None = None
    weights: dict[str, StoredWeights] = field(default_factory=dict)
    cpu: Cpu = field(default_factory=describe_cpu)


@dataclass(frozen=True)
class Writer:
    """A loaded target, with its draft if there is one, that writes outputs one after another.

    Attributes:
        drafter: as for ``generate``; None decodes plainly. policy: makes the draft length of an output.
        eos: token ids that end an output. stop: texts before which an output ends.
        lossy: accepts drafted tokens in place of exact verification; None: exactly.
    """

    pair: Pair
    options: DecodingOptions
    drafter: str | None
    policy: PolicyFactory
    eos: frozenset[int]
    stop: Sequence[str] = ()
    lossy: LossyRule | None = None

    def write(
        self, ids: Sequence[int], on_text: Callable[[str], None] | None = None, *, seed: int | None = None
    ) -> GeneratedText:
        """Return the target's continuation of a prompt.

        Args:
            ids: the prompt's tokens. on_text: called with each piece of text as soon as it is final.
            seed: of sampling; None: the options'.
        """
        options, tokenizer = self.options, self.pair.tokenizer
        stream, pieces = TextStream(tokenizer, self.stop), list[str]()

        def show(piece: str) -> None:
            pieces.append(piece)
            if on_text is not None:
                on_text(piece)

        sampling, rule = options.sampling(), self.lossy
        meter = None if rule is None else DistanceMeter(rule, sampling)
        began = time.perf_counter()
        result = decode(
            self.pair.target,
            [ids],
            StoppingCriteria(options.max_new_tokens, self.eos, stop_at(tokenizer, self.stop)),
            make_drafter(self.drafter, self.pair, options.width, options.grow()) if self.drafter else None,
            policy=self.policy,
            sampling=sampling if seed is None else replace(sampling, seed=seed),
            on_tokens=lambda _, tokens: show(stream.add(tokens)),
            observe=meter,
            lossy=rule,
            verifier=options.verifier(),
        )[0]
        seconds = time.perf_counter() - began
        show(stream.finish())
        found = acceptance_statistics([result])
        tau, acceptance = (found.tau, found.acceptance) if self.drafter else (None, None)
        lossy = None if meter is None else meter.result()
        weights = stored_weights(self.pair, options)
        return GeneratedText("".join(pieces), result.tokens, result.reason, seconds, tau, acceptance, lossy, weights)


def load_writer(
    target: str,
    draft: str | None = None,
    options: DecodingOptions | None = None,
    *,
    drafter: str | None = None,
    stop: Sequence[str] = (),
    chat: bool = False,
) -> Writer:
    """Load target and draft into a ``Writer``; arguments and errors are those of ``generate``.

    In a chat the marker that the template puts after an answer ends an output, too, whatever the model calls its end.
    """
    options = options or DecodingOptions()
    _check(options, draft, drafter)
    if chat and not getattr(load_tokenizer(target), "chat_template", None):
        raise PeftlabError(f"chat: the tokenizer of {target!r} has no chat template")
    pair = options.load(target, draft)
    ends = end_of_turn(pair.tokenizer) if chat else frozenset[int]()
    name = drafter or ("draft" if draft is not None else None)
    name = SUFFIX_AND_DRAFT if name == SUFFIX and draft is not None else name
    policy = fixed(PolicyInputs(options.gamma), None) if name is None else _policy(options, pair, draft, name)
    relaxation = options.lossy_rule()
    rule = None if relaxation is None else LossyRule.of(relaxation, pair.embedding)
    return Writer(pair, options, name, policy, pair.eos | ends, stop, rule)


_WITH_DRAFT = ("draft", SUFFIX, SUFFIX_AND_DRAFT, PEARL, ONE_PASS)


def _check(options: DecodingOptions, draft: str | None, drafter: str | None) -> None:
    """Refuse settings that are wrong or contradict each other, before anything is loaded."""
    if draft is not None and drafter not in (None, *_WITH_DRAFT):
        with_draft = f"only drafters {SUFFIX}, {PEARL} and {ONE_PASS} go with a draft"
        raise PeftlabError(f"draft and drafter {drafter}: give one of them; {with_draft}")
    if drafter is not None and drafter not in _WITH_DRAFT:
        model_free(drafter)
    needs_draft(drafter or "draft", draft)
    options.check_drafters([] if drafter is None else [drafter])
    options.length(), options.sampling(), options.lossy_rule(), options.grow(), options.verifier()
    if drafter is None and draft is None:
        default = DecodingOptions()
        for what in ("gamma", "policy", "lossy", "verify"):
            if (value := getattr(options, what)) != getattr(default, what):
                raise PeftlabError(f"{what} {value}: nothing is drafted; give a draft or a drafter")


def _policy(options: DecodingOptions, pair: Pair, draft: str | None, name: str) -> PolicyFactory:
    """Return the chosen policy of draft length for the one drafter ``name``."""
    length = options.length()
    head = partial(acceptance_head, draft, pair.target.device)
    drafters = {name: partial(make_drafter, name, pair, options.width, options.grow())}
    return draft_lengths(length, options.gamma, pair.target, drafters, head=head).policies[name]


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
        drafter: NAME or NAME:X of ``decoding.table.MODEL_FREE``, which need no draft; ``suffix`` goes with a draft,
            too; ``pearl`` is the draft at work beside the target, ``one_pass`` a gated LoRA in the target's own steps.
            None: the draft.
        stop: texts before which the output ends. chat: ask through the tokenizer's chat template.
        on_text: called with each piece of text as soon as it is final.

    Raises:
        PeftlabError: a setting, target or draft cannot be used.
    """
    writer = load_writer(target, draft, options, drafter=drafter, stop=stop, chat=chat)
    messages = [{"role": "user", "content": prompt}] if chat else None
    return writer.write(encode(writer.pair.tokenizer, Prompt("prompt", "all", prompt, messages)), on_text)


def generate_with_images(
    target: str,
    prompt: str,
    images: Sequence[str],
    draft: str | None = None,
    options: DecodingOptions | None = None,
    *,
    drafter: str | None = None,
    on_text: Callable[[str], None] | None = None,
) -> GeneratedText:
    """Answer a question about images.

    Without a draft or a drafter transformers' ``generate`` answers, for every model that it knows.

    Args:
        target: reference of a model of images and text.
        prompt: the question; the chat template writes it behind the images.
        images: their files, in order.
        draft: reference of a draft for the target.
        options: of decoding; None for the defaults. Without a draft ``max_new_tokens``, sampling, ``dtype`` and
            ``device`` count.
        drafter: as for ``generate``.
        on_text: called with each piece of text as soon as it is final.

    Raises:
        PeftlabError: the target sees no images, or a file is none.
    """
    options = options or DecodingOptions()
    _check(options, draft, drafter)
    device, dtype = resolve_device(options.device), torch_dtype(options.dtype)
    parts = [*({"type": "image", "path": path} for path in images), {"type": "text", "text": prompt}]
    if draft is not None or drafter is not None:
        writer = load_writer(target, draft, options, drafter=drafter, chat=True)
        turn: dict[str, object] = {"role": "user", "content": parts}
        asking = Prompt("prompt", "all", messages=[turn])  # type: ignore[list-item]
        return writer.write(encode(writer.pair.tokenizer, asking, images=writer.pair.images), on_text)
    asked: dict[str, object] = {"role": "user", "content": prompt, "parts": parts}
    turns: list[Message] = [asked, {"role": "assistant", "content": "a"}]  # type: ignore[list-item]
    row = with_pictures(Conversation(turns, "prompt"), Path())
    if options.max_new_tokens < 1:
        raise PeftlabError(f"max_new_tokens: {options.max_new_tokens} writes nothing; give 1 or more")
    options.check_draft(draft)
    processor = load_processor(target)
    loaded, _ = load_model(target, "AutoModelForImageTextToText", dtype=dtype)
    model: PreTrainedModel = nn.Module.to(loaded, device)
    text = prompt_of(row, processor)
    check_placeholders(processor, text, len(images), "prompt")
    tokenizer = tokenizer_of(processor)
    settings = GenerateConfig(
        metrics=["exact_match"],  # not computed
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    ends = eos_ids(model) | end_of_turn(tokenizer)
    began = time.perf_counter()
    inputs = prompt_inputs(processor, [text], [images])
    limit, length = max_positions(model.config.get_text_config(decoder=True)), inputs["input_ids"].shape[1]
    if limit is not None and length > limit:
        raise PeftlabError(f"prompt: {length} tokens with its images, but the model's context is {limit}")
    (tokens,) = answer_inputs(model, settings, ends, padding_or_end(tokenizer) or 0, inputs)
    seconds = time.perf_counter() - began
    reason = "eos" if tokens and tokens[-1] in ends else "length"
    answer = str(tokenizer.decode(tokens, skip_special_tokens=True))
    if on_text is not None:
        on_text(answer)
    return GeneratedText(answer, tokens, reason, seconds, None, None)


_LEAST_ROOM = 4  # a quarter of the context is room enough for an answer, however many tokens one may have


class Chat:
    """A conversation with a model.

    Attributes:
        messages: what was said and still fits into the model's context, oldest first.
        forgotten: turns that no longer did.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer, self._turn = writer, 0
        self.messages: list[Message] = []
        self.forgotten = 0

    def ask(self, text: str, on_text: Callable[[str], None]) -> GeneratedText:
        """Return the model's answer to ``text``, and remember both.

        An answer that Ctrl-C stops (``KeyboardInterrupt``) is remembered as far as it was shown; its ``reason`` is
        "interrupt", and it has no tokens.

        Args:
            on_text: called with each piece of the answer as soon as it is final.

        Raises:
            PeftlabError: the text alone does not fit into the context, or the template refuses the conversation;
                nothing is remembered of it.
        """
        self.messages.append({"role": "user", "content": text})
        shown: list[str] = []

        def show(piece: str) -> None:
            shown.append(piece)
            on_text(piece)

        began = time.perf_counter()
        try:
            answer = self._writer.write(self._prompt(), show, seed=self._writer.options.seed + self._turn)
        except KeyboardInterrupt:
            answer = GeneratedText("".join(shown), [], "interrupt", time.perf_counter() - began, None, None)
        except PeftlabError:
            self.messages.pop()
            raise
        self._turn += 1
        if answer.text:
            self.messages.append({"role": "assistant", "content": answer.text})
        else:
            self.messages.pop()
        return answer

    def _prompt(self) -> list[int]:
        """Return the conversation's tokens, forgetting the oldest turns that leave no room for an answer."""
        pair, most = self._writer.pair, self._writer.options.max_new_tokens
        ids = chat_ids(pair.tokenizer, self.messages, "chat")
        if pair.target.limit is None:
            return ids
        room = pair.target.limit - min(most, pair.target.limit // _LEAST_ROOM)
        kept = self.messages
        while len(ids) > room and len(kept) > 1:
            following = next(i for i, turn in enumerate(kept) if i > 0 and turn["role"] == "user")
            kept = kept[following:]
            ids = chat_ids(pair.tokenizer, kept, "chat")
        if len(ids) >= pair.target.limit:
            raise PeftlabError(
                f"chat: this message has {len(ids)} tokens, and the model's context {pair.target.limit}: shorten it"
            )
        self.forgotten += len(self.messages) - len(kept)
        self.messages = kept
        return ids


def converse(
    writer: Writer,
    read: Callable[[], str | None],
    on_text: Callable[[str], None],
    on_answer: Callable[[GeneratedText], None],
    on_note: Callable[[str], None],
    *,
    interactive: bool,
) -> None:
    """Answer each text that ``read`` returns, until it returns None.

    Args:
        on_text: called with each piece of an answer. on_answer: with each answer. on_note: with what the user should
            know: turns that were forgotten, and mistakes.
        interactive: a person types: Ctrl-C stops an answer, not the conversation, and a mistake does not end it.

    Raises:
        PeftlabError: a text that cannot be asked, if not interactive.
    """
    chat = Chat(writer)
    while True:
        try:
            text = read()
        except KeyboardInterrupt:
            if not interactive:
                raise
            on_note("Ctrl-D ends the chat")
            continue
        if text is None:
            return
        if not text.strip():
            continue
        forgotten = chat.forgotten
        try:
            answer = chat.ask(text, on_text)
        except PeftlabError as error:
            if not interactive:
                raise
            on_note(str(error))
            continue
        on_answer(answer)
        if chat.forgotten > forgotten:
            on_note(f"the context is full: the {chat.forgotten} oldest turns are forgotten")
        if answer.reason == "interrupt" and not interactive:
            raise KeyboardInterrupt
