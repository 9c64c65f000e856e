"""Benchmarks of speculative against plain decoding: both on the same engine, in turn, counted in token ids.

``bench`` measures drafters against plain decoding; ``measured_gain`` explains a gain by its parts; ``measure_pool``
times a pool that refills; ``drafted_text`` shows every drafted token of one output.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from peftlab.decoding.cache import Engine
from peftlab.decoding.decode import (
    Drafter,
    Fixed,
    Generation,
    Observe,
    PolicyFactory,
    Row,
    StoppingCriteria,
    Verified,
    decode,
)
from peftlab.decoding.generation import BROKEN
from peftlab.decoding.measurements import (
    BenchmarkResult,
    CategoryResult,
    Clock,
    Conditions,
    DistanceMeter,
    DrafterResult,
    LossyResult,
    MeasuredGain,
    OverlapMeter,
    OverlapRates,
    PoolResult,
    PromptDivergence,
    PromptResult,
    Stopwatch,
    TimeShares,
    Timings,
    Watch,
    acceptance_statistics,
    differing_share,
    divergence,
    rate_intervals,
    share_interval,
    step_seconds,
    timed_drafter,
    verdict,
)
from peftlab.decoding.sampling import TRAVERSAL, LossyRule, Sampling, Verifier
from peftlab.environment import describe_cpu
from peftlab.errors import PeftlabError
from peftlab.models.image_tokens import text_id
from peftlab.progress import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PLAIN = "plain"


@dataclass(frozen=True)
class Question:
    """A prompt ready to decode.

    Attributes:
        id, category: for the report.
        ids: its tokens.
        number: its place among the prompts that are decoded; with the seed it decides what is drawn for it.
    """

    id: str
    category: str
    ids: list[int]
    number: int = 0


Decode = Callable[[Sequence[Question]], list[Generation]]
"""Decodes a batch of prompts, one output each."""


@dataclass
class Settings:
    """The settings of a benchmark.

    Attributes:
        max_new_tokens: of every output.
        eos: ids that end an output.
        policy: draft length of drafters without one of their own. policies: drafter -> its own.
        sampling: default greedy.
        batch_size: prompts decoded together. lossy: in place of exact verification, for every drafter.
        verifier: of sampled drafts.
        repeats: timed passes over all prompts, contenders in turn; one batch of each warms up.

    Raises:
        PeftlabError: a number of tokens, prompts or repeats below 1.
    """

    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    policy: PolicyFactory = field(default_factory=lambda: partial(Fixed, 4))
    policies: Mapping[str, PolicyFactory] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)
    batch_size: int = 1
    lossy: LossyRule | None = None
    verifier: Verifier = TRAVERSAL
    repeats: int = 3

    def __post_init__(self) -> None:
        for name in ("batch_size", "repeats", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise PeftlabError(f"{name}: {getattr(self, name)} is less than 1")

    @property
    def lossless_by(self) -> str:
        """Return the evidence that outputs are the target's own, or "lossy"; see ``DrafterResult.lossless_by``."""
        if self.lossy is not None:
            return "lossy"
        return "comparison" if self.sampling.greedy else "construction"

    def policy_of(self, drafter: str) -> PolicyFactory:
        """Return the factory that makes the draft length policy of each sequence of a drafter."""
        return self.policies.get(drafter, self.policy)


@dataclass
class _Record:
    """Measurements of one contender: seconds[batch][repeat], seconds in the target, outputs of the last repeat."""

    seconds: list[list[float]]
    outputs: list[Generation]
    target_seconds: float = 0.0


@dataclass
class Comparison:
    """Plain decoding and drafters, timed in turn on the same prompts.

    Attributes:
        target, settings: what was measured, and how.
        batches: the prompts as they were decoded together.
        drafting: each drafter's time.
        conditions: what the machine was like meanwhile.
    """

    target: Engine
    settings: Settings
    batches: list[Sequence[Question]]
    records: dict[str, _Record]
    drafting: dict[str, Clock]
    conditions: Conditions

    def result(self, name: str) -> DrafterResult:
        """Return the figures of one drafter; ``alpha`` and ``lossy`` are measured in further passes (``bench``)."""
        record = self.records[name]
        mine, plain = self.timed(name), self.timed(PLAIN)
        intervals = rate_intervals(mine, plain)
        speedup = mine.rate() / plain.rate()
        differing = self._divergences(name)
        return DrafterResult(
            tokens_per_second=mine.rate(),
            tokens_per_second_interval=intervals.rate,
            baseline_tokens_per_second=plain.rate(),
            baseline_tokens_per_second_interval=intervals.baseline,
            speedup=speedup,
            speedup_interval=intervals.speedup,
            verdict=verdict(speedup, intervals.speedup, self.conditions.doubts()),
            statistics=acceptance_statistics(record.outputs),
            lossless=self.settings.lossy is None and not differing,
            lossless_by=self.settings.lossless_by,
            divergences=differing,
            time=self._shares(name),
            accepted_share_interval=share_interval([_accepted_of_drafted(output) for output in record.outputs]),
        )

    def gain(self, name: str, drafter: Drafter) -> MeasuredGain | None:
        """Return the gain of one drafter by S = τ / (C(n+1) + D); None for batches, or draft lengths that vary.

        Args:
            name: of the drafter. drafter: a new one of the same kind.
        """
        record, found = self.records[name], acceptance_statistics(self.records[name].outputs)
        policy = self.settings.policy_of(name)()
        if self.settings.batch_size > 1 or found.tau is None or type(policy) is not Fixed:
            return None
        if drafter.concurrent:  # drafting and verification overlap in time, so that C and D do not add up
            return None
        return measured_gain(
            self.target,
            drafter,
            found.acceptance_by_position,
            gamma=policy.gamma,
            tau=found.tau,
            drafting=self.drafting[name].seconds / len(record.seconds[0]) / found.steps,
        )

    def _shares(self, name: str) -> TimeShares | None:
        """Return the shares of a contender's time in target and drafter; None for another library's decoding."""
        if name not in self.drafting:
            return None
        record = self.records[name]
        whole = sum(map(sum, record.seconds))
        target, draft = record.target_seconds / whole, self.drafting[name].seconds / whole
        return TimeShares(target, draft, max(0.0, 1 - target - draft))  # at least 0: the two may overlap

    def _divergences(self, name: str) -> list[PromptDivergence]:
        """Return the first differences of greedy outputs from plain decoding's; none are looked for when sampling."""
        if not self.settings.sampling.greedy:
            return []
        questions = [q for batch in self.batches for q in batch]
        outputs = zip(questions, self.records[PLAIN].outputs, self.records[name].outputs, strict=True)
        found = [(q.id, divergence(self.target, q.ids, plain.tokens, mine.tokens)) for q, plain, mine in outputs]
        return [PromptDivergence(id=id_, **asdict(at)) for id_, at in found if at is not None]

    def timed(self, name: str, batches: Sequence[int] | None = None) -> Timings:
        """Return the tokens and times of one contender.

        Args:
            name: of the contender. batches: numbers of the batches to count; None: all.
        """
        record, tokens, place = self.records[name], [], 0
        for batch in self.batches:
            tokens.append(sum(len(g.tokens) for g in record.outputs[place : place + len(batch)]))
            place += len(batch)
        chosen = range(len(tokens)) if batches is None else batches
        return Timings([tokens[i] for i in chosen], [record.seconds[i] for i in chosen])


def _accepted_of_drafted(output: Generation) -> tuple[int, int]:
    return sum(step.accepted for step in output.steps), sum(step.drafted for step in output.steps)


def bench(
    target: Engine,
    drafters: dict[str, Callable[[], Drafter]],
    questions: Sequence[Question],
    settings: Settings,
    *,
    models: Sequence[Stopwatch] = (),
) -> BenchmarkResult:
    """Measure drafters against plain decoding.

    Args:
        target, drafters, questions, settings: as for ``compare``; the first drafter is the one the result is about,
            the others are reported beside it. Pass a ``Stopwatch`` as target to learn the time outside the models.
        models: every stopwatch that runs inside, for ``overhead``.

    Raises:
        PeftlabError: no drafter, or no prompt that fits.
    """
    run = compare(target, drafters, questions, settings, models=models)
    everything = sum(map(sum, (row for record in run.records.values() for row in record.seconds)))
    within = sum(model.seconds for model in models)
    first = next(iter(drafters))
    found = {
        name: replace(run.result(name), alpha=_overlap_rates(run, name, make), lossy=_lossy_result(run, name, make))
        for name, make in drafters.items()
    }
    fitting = [q for batch in run.batches for q in batch]
    return BenchmarkResult(
        drafter=first,
        drafters=found,
        overhead=max(0.0, 1 - within / everything) if models else None,
        gain=run.gain(first, drafters[first]()),
        batch_size=settings.batch_size,
        temperature=settings.sampling.temperature,
        max_new_tokens=settings.max_new_tokens,
        repeats=settings.repeats,
        kernel=target.kind,
        threads=torch.get_num_threads(),
        device=str(target.device),
        cpu=describe_cpu(),
        conditions=run.conditions,
        categories=_category_results(run, first),
        prompts=[_prompt_result(q, run.records, first, i) for i, q in enumerate(fitting)],
        skipped=[q.id for q in questions if not has_room_for_output(target, q)],
    )


def compare(
    target: Engine,
    drafters: dict[str, Callable[[], Drafter]],
    questions: Sequence[Question],
    settings: Settings,
    *,
    models: Sequence[Stopwatch] = (),
    others: Mapping[str, Callable[[], Decode]] = MappingProxyType({}),
) -> Comparison:
    """Time plain decoding and every drafter on every prompt, after one batch of each to warm up.

    The contender that goes first changes from batch to batch. Every pass makes its drafters anew, so that none
    remembers the outputs of the pass before.

    Args:
        target: the model. drafters: name -> maker.
        questions: those that do not fit the context are left out.
        models: stopwatches, set to 0 when the timing begins.
        others: name -> maker of another way to decode the same prompts, such as another library's.

    Raises:
        PeftlabError: no drafter, or no prompt that fits.
    """
    if not drafters:
        raise PeftlabError("drafters: none given, nothing to compare with plain decoding")
    fitting = fitting_questions(target, questions)
    if not fitting:
        raise PeftlabError("prompts: none fits the model's context" if questions else "prompts: none given")
    size = settings.batch_size
    batches: list[Sequence[Question]] = [fitting[i : i + size] for i in range(0, len(fitting), size)]
    watched, drafting = Stopwatch(target), {name: Clock(target.device) for name in drafters}
    contenders: dict[str, Callable[[], Decode]] = {PLAIN: partial(_make_decoder, watched, settings, PLAIN, None)}
    for name, make in drafters.items():
        contenders[name] = partial(_make_decoder, watched, settings, name, partial(timed_drafter, make, drafting[name]))
    contenders |= others
    for make_decoder in contenders.values():
        make_decoder()(batches[0])
    for clock in (*models, *drafting.values()):
        clock.seconds = 0.0
    with Watch(target.device, waits=any(make().concurrent for make in drafters.values())) as watch:
        records = _time_contenders(batches, contenders, settings.repeats, watched)
    return Comparison(target, settings, batches, records, drafting, watch.conditions(records[PLAIN].seconds))


def has_room_for_output(target: Engine, question: Question) -> bool:
    """Return whether a prompt leaves room for at least one token of output in the target's context.

    An encoder-decoder target's prompt has the encoder's context for itself.

    Args:
        target: the model. question: the prompt.
    """
    if target.encoder is not None:
        return target.encoder.limit is None or len(question.ids) <= target.encoder.limit
    return target.limit is None or len(question.ids) < target.limit


def fitting_questions(target: Engine, questions: Sequence[Question]) -> list[Question]:
    """Return the prompts that leave room for output, numbered from 0.

    Args:
        target: the model. questions: the prompts.
    """
    fitting = [question for question in questions if has_room_for_output(target, question)]
    return [replace(question, number=i) for i, question in enumerate(fitting)]


def _make_decoder(target: Engine, settings: Settings, name: str, make: Callable[[], Drafter] | None) -> Decode:
    return partial(decode_batch, target, settings, name, make and make())


def decode_batch(
    target: Engine,
    settings: Settings,
    name: str,
    drafter: Drafter | None,
    batch: Sequence[Question],
    observe: Observe | None = None,
    pool: int | None = None,
) -> list[Generation]:
    """Decode a batch of prompts by the settings of a benchmark.

    Args:
        target, drafter: as for ``decode``. settings: how to decode. name: of the drafter, which selects its policy.
        batch: prompts decoded together, numbered one after the other. observe, pool: as for ``decode``.

    Returns:
        One output per prompt, in order.
    """
    return decode(
        target,
        [q.ids for q in batch],
        StoppingCriteria(settings.max_new_tokens, settings.eos),
        drafter,
        policy=settings.policy_of(name),
        sampling=replace(settings.sampling, seed=settings.sampling.seed + batch[0].number),
        observe=observe,
        pool=pool,
        lossy=settings.lossy,
        verifier=settings.verifier,
    )


def _time_contenders(
    batches: list[Sequence[Question]], contenders: Mapping[str, Callable[[], Decode]], repeats: int, target: Clock
) -> dict[str, _Record]:
    """Return the timed records of each contender; they decode every batch in turn, ``repeats`` times.

    Args:
        target: clock of the target's steps.
    """
    records = {name: _Record([[] for _ in batches], []) for name in contenders}
    names = list(contenders)
    passes = [(repeat, i) for repeat in range(repeats) for i in range(len(batches))]
    for repeat, i in counted(passes, f"decoding by {', '.join(names)} in turn", len(passes), "batch"):
        if i == 0:
            decoders = {name: make() for name, make in contenders.items()}
            for record in records.values():
                record.outputs = []
        turn = (i + repeat) % len(names)
        for name in names[turn:] + names[:turn]:
            before, began = target.seconds, time.perf_counter()
            outputs = decoders[name](batches[i])
            records[name].seconds[i].append(time.perf_counter() - began)
            records[name].target_seconds += target.seconds - before
            records[name].outputs += outputs
    return records


def _overlap_rates(run: Comparison, name: str, make: Callable[[], Drafter]) -> OverlapRates | None:
    overlap, drafter = OverlapMeter(run.settings.sampling), make()
    if drafter.has_logits:
        _decode_observed(run, name, drafter, overlap)
    return overlap.result()


def _lossy_result(run: Comparison, name: str, make: Callable[[], Drafter]) -> LossyResult | None:
    settings = run.settings
    if settings.lossy is None:
        return None
    meter, outputs = DistanceMeter(settings.lossy, settings.sampling), run.records[name].outputs
    _decode_observed(run, name, make(), meter)
    exact, mine = ([generation.tokens for generation in of] for of in (run.records[PLAIN].outputs, outputs))
    return meter.result(differing_share(exact, mine) if settings.sampling.greedy else None)


def _decode_observed(run: Comparison, name: str, drafter: Drafter, observe: Observe) -> None:
    """Decode all prompts once more, untimed: ``observe`` reads every distribution, which takes time."""
    for batch in run.batches:
        decode_batch(run.target, run.settings, name, drafter, batch, observe)


def _category_results(run: Comparison, name: str) -> dict[str, CategoryResult]:
    """Return acceptance by category of prompts, and speed where no batch contains two categories."""
    outputs: dict[str, list[Generation]] = defaultdict(list)
    questions = [q for batch in run.batches for q in batch]
    for q, generation in zip(questions, run.records[name].outputs, strict=True):
        outputs[q.category].append(generation)
    result = {}
    for category, generations in outputs.items():
        mine = [i for i, batch in enumerate(run.batches) if any(q.category == category for q in batch)]
        pure = all(q.category == category for i in mine for q in run.batches[i])
        rate, baseline = run.timed(name, mine).rate(), run.timed(PLAIN, mine).rate()
        statistics = acceptance_statistics(generations)
        result[category] = CategoryResult(
            prompts=len(generations),
            tau=statistics.tau,
            acceptance=statistics.acceptance,
            tokens_per_second=rate if pure else None,
            speedup=rate / baseline if pure else None,
        )
    return result


def _prompt_result(question: Question, records: dict[str, _Record], first: str, i: int) -> PromptResult:
    mine, plain = records[first].outputs[i], records[PLAIN].outputs[i]
    return PromptResult(question.id, question.category, len(question.ids), mine.tokens, plain.tokens, mine.reason)


_TIMED_TOKENS = 12  # drafted tokens: the least number up to which verification is timed
_TIMED_CONTEXT = 128  # tokens in the cache before them


def measured_gain(
    target: Engine,
    drafter: Drafter,
    acceptance: Sequence[float | None],
    *,
    gamma: int,
    tau: float,
    drafting: float,
    repeats: int = 3,
) -> MeasuredGain | None:
    """Measure the target's steps and return the gain S = τ / (C(n+1) + D) of a draft, and the best draft length.

    None where the context is too short for it, and where the acceptance of no draft is known (``Drafter.candidates``).

    Args:
        target, drafter: the two models. acceptance: by position, None where none was tried.
        gamma: drafted tokens per step. tau: tokens per step.
        drafting: seconds of drafting per step. repeats: timed passes of each kind of step.
    """
    longest = max(gamma, _TIMED_TOKENS)
    context = _TIMED_CONTEXT if target.limit is None else min(_TIMED_CONTEXT, target.limit - longest - 1)
    if context < 1:
        return None
    seconds = step_seconds({"target": (target, longest + 1)}, context=context, repeats=repeats)
    times = [statistics.median(seconds["target", n]) for n in range(1, longest + 2)]
    # A step over more tokens takes no less time: where one was measured to, the shorter one was disturbed.
    verification, share = list(accumulate((time / times[0] for time in times), max)), drafting / times[0]
    rates = [rate or 0.0 for rate in acceptance]
    drafts = drafter.candidates([*rates, *[0.0] * (gamma - len(rates))], verification)
    if not drafts:
        return None
    own = max((d for d in drafts if d.own and d.gamma <= gamma), key=lambda d: d.gamma)
    # Rates that were measured in training may be of other text: all are off by as much as they are for its own draft.
    kept = (tau - 1) / (own.tokens - 1) if own.tokens > 1 else 1.0
    gains = [(1 + kept * (d.tokens - 1)) / (verification[d.gamma] + share * d.effort / own.effort) for d in drafts]
    most = max(gains)
    best, best_gain = (drafts[gains.index(most)], most) if most > 1 else (None, 1.0)
    return MeasuredGain(
        gamma=gamma,
        tau=tau,
        verification=verification,
        drafting=share,
        gain=tau / (verification[gamma] + share),
        best_gamma=best.gamma if best else 0,
        best_gain=best_gain,
        best_width=best.width if best else None,
    )


@dataclass(frozen=True)
class _DecodingMode:
    """One way to decode all prompts: with a drafter or plainly, in a pool that refills or in static batches."""

    target: Engine
    settings: Settings
    questions: Sequence[Question]
    name: str
    make: Callable[[], Drafter] | None
    pooled: bool

    def outputs(self) -> list[list[int]]:
        """Decode all prompts and return their tokens."""
        drafter, size = self.make and self.make(), self.settings.batch_size
        step = len(self.questions) if self.pooled else size
        found = []
        for begin in range(0, len(self.questions), step):
            batch = self.questions[begin : begin + step]
            found += decode_batch(self.target, self.settings, self.name, drafter, batch, pool=size)
        return [generation.tokens for generation in found]


def check_pool(batch_size: int) -> None:
    """Raise ``PeftlabError`` for a pool of fewer than two sequences, which is plain sequential decoding."""
    if batch_size < 2:
        raise PeftlabError(f"pool: a batch size of {batch_size}; give 2 or more sequences to decode together")


def measure_pool(
    target: Engine, name: str, make: Callable[[], Drafter], questions: Sequence[Question], settings: Settings
) -> PoolResult:
    """Time a pool and static batches of the same size in turn on the same prompts, plainly and with a drafter.

    Args:
        target: the model. name, make: the drafter. settings: as for ``bench``.
        questions: prompts; those that do not fit the context are left out.

    Raises:
        PeftlabError: a batch size below 2.
    """
    check_pool(settings.batch_size)
    fitting = fitting_questions(target, questions)
    modes = {
        (each, pooled): _DecodingMode(target, settings, fitting, each, maker, pooled)
        for each, maker in ((PLAIN, None), (name, make))
        for pooled in (False, True)
    }
    seconds, tokens = defaultdict[tuple[str, bool], list[float]](list), dict[tuple[str, bool], list[list[int]]]()
    for _ in range(settings.repeats + 1):  # the first repeat warms up
        for key, mode in modes.items():
            began = time.perf_counter()
            tokens[key] = mode.outputs()
            seconds[key].append(time.perf_counter() - began)
    rates = {key: sum(map(len, tokens[key])) / statistics.median(times[1:]) for key, times in seconds.items()}
    equal = None
    if settings.sampling.greedy and settings.lossy is None:
        equal = all(outputs == tokens[PLAIN, False] for outputs in tokens.values())
    return PoolResult(
        static={each: rates[each, False] for each in (PLAIN, name)},
        pooled={each: rates[each, True] for each in (PLAIN, name)},
        equal=equal,
    )


ACCEPTED, REJECTED, TARGET = "accepted", "rejected", "target"
_PROMPT, _OUTPUT = 64, 256  # tokens that are shown at most
_CONTEXT = 8  # tokens decoded before a token, because its text depends on them: spaces, characters of several tokens


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
    """An output and the tokens that were drafted for it.

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
    """Decode one prompt and return the beginning of its output with every drafted token, accepted or rejected.

    Of a tree the rejected tokens are those of the first branch behind the last accepted token.

    Args:
        target, drafter: the models. settings: how to decode. name: of the drafter, which selects its policy.
        question: the prompt. tokenizer: decodes the tokens.
    """
    rejected: list[list[int]] = []

    def observe(rows: list[Row], verified: Verified) -> None:
        rejected.append(_rejected_tokens(verified))

    shorter = replace(settings, max_new_tokens=min(settings.max_new_tokens, _OUTPUT))
    (output,) = decode_batch(target, shorter, name, drafter, [question], observe)
    prompt = [text_id(token) for token in question.ids]
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


def _rejected_tokens(verified: Verified) -> list[int]:
    """Return the drafted tokens after the last accepted one, along the first branch of a tree."""
    tokens, parents, path = verified.draft.tokens[0].tolist(), verified.draft.parents_of(0), verified.paths[0]
    node, found = (path[-1] if path else -1), list[int]()
    while (child := next((i for i, p in enumerate(parents) if p == node and tokens[i] >= 0), None)) is not None:
        found.append(tokens[child])
        node = child
    return found


def pieces(tokenizer: PreTrainedTokenizerBase, before: Sequence[int], tokens: Sequence[int], kind: str) -> list[Piece]:
    """Return the text of each token of a continuation.

    Args:
        tokenizer: decodes. before: the tokens that precede. tokens: the continuation. kind: see ``Piece``.
    """
    context, found = list(before[-_CONTEXT:]), []
    done = _decode_whole_characters(tokenizer, context)
    for token in tokens:
        context.append(token)
        text = _decode_whole_characters(tokenizer, context)
        found.append(Piece(text[len(done) :], kind))
        done = text
    return found


def _decode_whole_characters(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Return the text of ids without an incomplete character at its end."""
    return str(tokenizer.decode(ids)).rstrip(BROKEN)
