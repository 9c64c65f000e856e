"""Text from a prompt or in a conversation, with a draft if one is named; the options that benchmarks share."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from peftlab.decoding.cache import Engine
from peftlab.decoding.decode import Drafter, Fixed, PolicyFactory, PolicyInputs, StoppingCriteria, decode, fixed
from peftlab.decoding.generation import TextStream, stop_at
from peftlab.decoding.measurements import (
    DistanceMeter,
    LossyResult,
    MeasuredStepTimes,
    acceptance_statistics,
    measure_times,
)
from peftlab.decoding.sampled_trees import GrowthFactory
from peftlab.decoding.sampling import TRAVERSAL, LossyRule, Sampling, Verifier
from peftlab.decoding.table import DRAWN, HEAD, TIMES, NamedRule, lossy, model_free, policy, tree, verifier, window
from peftlab.drafting.acceptance import load_acceptance_head
from peftlab.drafting.base import (
    ONE_PASS,
    PEARL,
    SUFFIX,
    SUFFIX_AND_DRAFT,
    Pair,
    check_tree,
    load_pair,
    make_drafter,
    needs_draft,
)
from peftlab.drafting.table import find_draft
from peftlab.drafting.text import index_corpus, read_documents
from peftlab.environment import Cpu, describe_cpu
from peftlab.errors import PeftlabError
from peftlab.models.load import load_tokenizer
from peftlab.models.quantised import torch_dtype
from peftlab.registry import resolve
from peftlab.tasks.conversations import Message, chat_ids
from peftlab.tasks.language_examples import end_of_turn
from peftlab.tasks.prompts import Prompt, encode


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """Settings of speculative decoding.

    Attributes:
        max_new_tokens: length of the longest output.
        gamma: tokens drafted for one target step; the first number for the policy ``heuristic``, the most for others.
        width: choices of each Medusa head in a tree of ``gamma`` tokens, or children of an eagle3 layer's node; 1 is a
            chain, None the best tree as measured for heads, else a chain.
        policy: how the draft length is chosen, NAME or NAME:X of ``decoding.table.POLICIES``.
        temperature: 0 is greedy. top_k, top_p: restrict sampling; None does not. seed: of sampling.
        dtype: of the target: ``fp32``, ``bf16`` or ``fp16``. draft_dtype: of the draft; None: the target's.
        device: where the models run: ``auto``, ``cpu``, ``cuda`` or ``mps``.
        pack: store the weights in the layout of fast kernels (CPU).
        corpus: file of texts that ``suffix`` copies from, as ``read_documents`` takes it.
        lossy: NAME or NAME:X of ``decoding.table.LOSSY``: accept drafted tokens by it, so that the output is no longer
            the target's; None: exactly.
        tree: NAME:W of ``decoding.table.TREES``: a tree of ``gamma`` nodes drawn from a draft model; None: a chain.
        verify: NAME of ``decoding.table.VERIFIERS``, how sampled drafts are verified; None: ``traversal``.
        draft_window: SINKS:LAST, the first and the last tokens that the draft sees; None: all.
    """

    max_new_tokens: int = 64
    gamma: int = 4
    width: int | None = None
    policy: str = "fixed"
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    dtype: str = "fp32"
    draft_dtype: str | None = None
    pack: bool = True
    corpus: str | None = None
    device: str = "auto"
    lossy: str | None = None
    tree: str | None = None
    verify: str | None = None
    draft_window: str | None = None

    def sampling(self) -> Sampling:
        """Return the rule by which tokens are chosen."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)

    def length(self) -> NamedRule:
        """Return the rule of draft length.

        Raises:
            PeftlabError: no such rule, or a ``gamma`` that drafts nothing.
        """
        Fixed(self.gamma)
        return policy(self.policy)

    def lossy_rule(self) -> LossyRule | None:
        """Return the rule of lossy verification; None verifies exactly.

        Raises:
            PeftlabError: no such rule.
        """
        return None if self.lossy is None else LossyRule.of(lossy(self.lossy))

    def grow(self) -> GrowthFactory | None:
        """Return what makes the growth of drawn trees; None drafts in the draft's own way.

        Raises:
            PeftlabError: no such tree.
        """
        if self.tree is None:
            return None
        chosen = tree(self.tree)
        made: GrowthFactory = resolve(chosen.row.make)(chosen.value)
        return made

    def verifier(self) -> Verifier:
        """Return the function that verifies sampled drafts.

        Raises:
            PeftlabError: no such verifier, or one with nothing to verify: greedily, beside a lossy rule, or without the
                tree that it needs.
        """
        if self.verify is None:
            return TRAVERSAL
        chosen = verifier(self.verify)
        if self.sampling().greedy:
            raise PeftlabError(f"verify {self.verify}: temperature 0 is greedy, where all verify alike; leave it out")
        if self.lossy is not None:
            raise PeftlabError(f"verify {self.verify}: lossy {self.lossy} takes its place; give one of them")
        if chosen.row.needs and (self.tree is None or tree(self.tree).name != chosen.row.needs):
            raise PeftlabError(f"verify {self.verify}: verifies independent drafts; give tree {chosen.row.needs}:W")
        found: Verifier = resolve(chosen.row.make)
        return found

    def load(self, target: str, draft: str | None) -> Pair:
        """Load target and draft in their dtypes, after checking that the tree fits the draft.

        Args:
            target: reference. draft: reference as ``find_draft`` takes it; None for none.
        """
        heads = draft is not None and find_draft(draft)[0].heads
        check_tree(self.width, self.tree is not None, drafted=draft is not None, heads=heads)
        seen = None if self.draft_window is None else window(self.draft_window)
        if seen is not None and draft is None:
            raise PeftlabError(f"draft_window {self.draft_window}: no draft is given to see it")
        dtype = torch_dtype(self.dtype)
        draft_dtype = dtype if self.draft_dtype is None else torch_dtype(self.draft_dtype, "draft_dtype")
        documents = None if self.corpus is None else read_documents(self.corpus)
        pair = load_pair(target, draft, dtype=dtype, draft_dtype=draft_dtype, device=self.device, pack=self.pack)
        pair.window = seen
        if documents is not None:
            pair.corpus = index_corpus(documents, pair.tokenizer)
        return pair


@dataclass(frozen=True)
class StoredWeights:
    """How the weights of a model are stored while it decodes.

    Attributes:
        dtype: of the model. packed: in what ways its products have them, beside the model's own or in place of them:
            in 16 bits, by oneDNN, as codes; empty: as the model has them.
    """

    dtype: str
    packed: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.dtype} ({', '.join(self.packed) or 'as loaded'})"


def stored_weights(pair: Pair, options: DecodingOptions) -> dict[str, StoredWeights]:
    """Return how the weights of the ``target``, and of the ``draft`` if that is a model, are stored.

    Args:
        pair: the loaded models. options: which name the dtypes.
    """
    stored = {"target": StoredWeights(options.dtype, pair.target.packed)}
    if pair.draft is not None:
        stored["draft"] = StoredWeights(options.draft_dtype or options.dtype, pair.draft.packed)
    return stored


def weights_line(stored: Mapping[str, StoredWeights]) -> str:
    """Return how the weights are stored as a line of text."""
    return "weights: " + "; ".join(f"{name} in {how}" for name, how in stored.items())


HEAD_FILE = "acceptance_head.safetensors"


@dataclass(frozen=True)
class Lengths:
    """Policies of draft length, one for each drafter.

    Attributes:
        policies: drafter -> what makes the policy of a sequence. notes: what the user should know.
    """

    policies: Mapping[str, PolicyFactory]
    notes: tuple[str, ...] = ()


def draft_lengths(
    chosen: NamedRule,
    gamma: int,
    target: Engine,
    drafters: Mapping[str, Callable[[], Drafter]],
    *,
    batch: int = 1,
    head: Callable[[Tensor], float] | None = None,
) -> Lengths:
    """Return the chosen policy for the drafters that can follow it, and a fixed γ for the others.

    ``goodput`` measures a few steps of the target and of the draft.

    Args:
        gamma: tokens per step, at most or at first.
        drafters: name -> maker; the first is the one that was asked for.
        batch: sequences that are decoded together, at most. head: for ``head``, see ``acceptance_head``.

    Raises:
        PeftlabError: the first drafter cannot follow the policy.
    """
    made = {name: make() for name, make in drafters.items()}
    refused = {name: reason for name, drafter in made.items() if (reason := _obstacle(chosen.row.needs, drafter))}
    first = next(iter(made))
    if first in refused:
        raise PeftlabError(f"policy {chosen.text}: {refused[first]}")
    times: MeasuredStepTimes | None = None
    if chosen.row.needs == TIMES:
        draft = next((drafter.draft_model for drafter in made.values() if drafter.draft_model is not None), None)
        times = measure_times(target, draft, batch, gamma)
    policies: dict[str, PolicyFactory] = {}
    for name, drafter in made.items():
        if name in refused:
            policies[name] = fixed(PolicyInputs(gamma), None)
            continue
        # Copies cost no draft step: for a drafter without a model only the target's times count.
        own = times if times is None or drafter.draft_model is not None else replace(times, drafts={})
        policies[name] = resolve(chosen.row.make)(PolicyInputs(gamma, head, own), chosen.value)
    notes = (f"policy {chosen.text}: {', '.join(refused)} draft {gamma} tokens instead",) if refused else ()
    return Lengths(policies, notes)


def acceptance_head(draft: str | None, device: torch.device) -> Callable[[Tensor], float]:
    """Return the acceptance head of a draft run as the policy ``head`` takes it.

    Args:
        draft: reference of the run, or of a directory in it. device: where the draft's states are.

    Raises:
        PeftlabError: there is none.
    """
    places = [Path(draft), Path(draft).parent] if draft is not None else []
    place = next((place for place in places if (place / HEAD_FILE).is_file()), None)
    if place is None:
        where = f"{draft} has no {HEAD_FILE}" if draft is not None else "no draft run is named"
        raise PeftlabError(f"policy head: {where}; a draft recipe with acceptance_head: true trains one")
    predictor = torch.nn.Module.to(load_acceptance_head(place / HEAD_FILE), device)
    return lambda hidden: float(predictor(hidden))


_REFUSALS = {
    DRAWN: "stops a chain that is drawn token by token, and {} draws none",
    HEAD: "reads the states of a draft model that drafts a chain, and {} is none",
    TIMES: "needs a chain from a draft model or from copies, and {} is neither",
}


def _obstacle(needs: str, drafter: Drafter) -> str | None:
    """Return why a drafter cannot follow a policy, or None if it can."""
    return _REFUSALS[needs].format(drafter.name) if needs and needs not in drafter.provides else None


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
    """

    pair: Pair
    options: DecodingOptions
    drafter: str | None
    policy: PolicyFactory
    eos: frozenset[int]
    stop: Sequence[str] = ()

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

        sampling, rule = options.sampling(), options.lossy_rule()
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
    return Writer(pair, options, name, policy, pair.eos | ends, stop)


_WITH_DRAFT = ("draft", SUFFIX, SUFFIX_AND_DRAFT, PEARL, ONE_PASS)


def _check(options: DecodingOptions, draft: str | None, drafter: str | None) -> None:
    """Refuse settings that are wrong or contradict each other, before anything is loaded."""
    if draft is not None and drafter not in (None, *_WITH_DRAFT):
        with_draft = f"only drafters {SUFFIX}, {PEARL} and {ONE_PASS} go with a draft"
        raise PeftlabError(f"draft and drafter {drafter}: give one of them; {with_draft}")
    free = drafter if drafter is None or drafter in _WITH_DRAFT else model_free(drafter).name
    needs_draft(drafter or "draft", draft)
    if options.corpus is not None and free not in (SUFFIX, SUFFIX_AND_DRAFT, "ngram"):
        raise PeftlabError(f"corpus {options.corpus}: only drafter {SUFFIX} copies from it, and ngram counts it")
    options.length(), options.sampling(), options.lossy_rule(), options.grow(), options.verifier()
    if drafter is None and draft is None:
        policy = options.policy if options.policy != DecodingOptions.policy else None
        for what, name in (("policy", policy), ("lossy", options.lossy), ("verify", options.verify)):
            if name is not None:
                raise PeftlabError(f"{what} {name}: nothing is drafted; give a draft or a drafter")


def _policy(options: DecodingOptions, pair: Pair, draft: str | None, name: str) -> PolicyFactory:
    """Return the chosen policy of draft length for the one drafter ``name``."""
    length = options.length()
    head = acceptance_head(draft, pair.target.device) if length.row.needs == HEAD else None
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
