"""Plain and speculative decoding timed side by side on the same stack, counted in token ids."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from peftlab.decoding.analysis.conditions import Conditions, Watch, uncertain
from peftlab.decoding.analysis.statistics import (
    Interval,
    Overlap,
    Timings,
    acceptance_statistics,
    divergence,
    rate_intervals,
)
from peftlab.decoding.decode import Generation, StoppingCriteria, decode
from peftlab.decoding.draft_length import Fixed, Policy
from peftlab.decoding.drafters.base import Drafter, Sampling
from peftlab.decoding.drafters.heads import Heads
from peftlab.decoding.engines.build import Engine, Output
from peftlab.decoding.engines.cache import Block, KVCache
from peftlab.errors import PeftlabError

PLAIN = "plain"


@dataclass(frozen=True)
class Question:
    """A prompt ready to decode.

    Attributes:
        id, category: for the report.
        ids: its tokens.
    """

    id: str
    category: str
    ids: list[int]


class Stopwatch:
    """An engine that adds up the time of its forward passes; to the decoder it is the engine."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self.seconds = 0.0
        self.kind, self.vocab_size, self.limit = engine.kind, engine.vocab_size, engine.limit
        self.layers, self.device = engine.layers, engine.device

    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """See ``Engine.forward``."""
        return self._timed(self._engine.forward, cache, tokens, block, keep)

    def including(self, heads: Heads) -> Heads:
        """Return ``heads`` with their time counted as this engine's."""
        inner = heads.best
        heads.best = lambda hidden, width: self._timed(inner, hidden, width)  # type: ignore[method-assign]
        return heads

    def _timed(self, work: Callable[..., Any], *arguments: Any) -> Any:
        began = time.perf_counter()
        output = work(*arguments)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds += time.perf_counter() - began
        return output


@dataclass
class Settings:
    """How to measure.

    Attributes:
        max_new_tokens: of every output.
        eos: ids that end an output.
        policy: draft length; the same for every drafter.
        sampling: default greedy.
        batch_size: prompts decoded together.
        repeats: timed passes over all prompts, contestants in turn; one batch of each warms up.

    Raises:
        PeftlabError: a number of tokens, prompts or repeats below 1.
    """

    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    policy: Callable[[], Policy] = field(default_factory=lambda: partial(Fixed, 4))
    sampling: Sampling = field(default_factory=Sampling)
    batch_size: int = 1
    repeats: int = 3

    def __post_init__(self) -> None:
        for name in ("batch_size", "repeats", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise PeftlabError(f"{name}: {getattr(self, name)} is less than 1")


@dataclass
class _Record:
    """One contestant: seconds of each batch in each repeat, and the outputs of the last."""

    seconds: list[list[float]]
    outputs: list[Generation]


@dataclass
class Race:
    """Plain decoding and drafters, timed in turn on the same prompts.

    Attributes:
        target, settings: what was measured, and how.
        batches: the prompts as they were decoded together.
        conditions: what the machine was like meanwhile.
    """

    target: Engine
    settings: Settings
    batches: list[Sequence[Question]]
    records: dict[str, _Record]
    conditions: Conditions

    def summary(self, name: str) -> dict[str, Any]:
        """Return one drafter's figures: those of ``bench`` but ``alpha``."""
        record, plain = self.records[name], self.records[PLAIN]
        mine, theirs = self.timed(name), self.timed(PLAIN)
        intervals = rate_intervals(mine, theirs)
        speedup = mine.rate() / theirs.rate()
        questions = [q for batch in self.batches for q in batch]
        apart = []
        if self.settings.sampling.greedy:
            for q, one, other in zip(questions, plain.outputs, record.outputs, strict=True):
                parting = divergence(self.target, q.ids, one.tokens, other.tokens)
                if parting is not None:
                    apart.append({"id": q.id, **asdict(parting)})
        return {
            "tokens_per_second": mine.rate(),
            "tokens_per_second_interval": intervals["rate"],
            "baseline_tokens_per_second": theirs.rate(),
            "baseline_tokens_per_second_interval": intervals["baseline"],
            "speedup": speedup,
            "speedup_interval": intervals["speedup"],
            "verdict": verdict(speedup, intervals["speedup"], self.conditions.doubts()),
            **acceptance_statistics(record.outputs),
            # A sampled output cannot be compared token for token: that the scheme is exact is proved elsewhere.
            "lossless": not apart,
            "lossless_by": "comparison" if self.settings.sampling.greedy else "construction",
            "divergences": apart,
        }

    def timed(self, name: str, batches: Sequence[int] | None = None) -> Timings:
        """Return one contestant's tokens and times, of all batches or of those numbered."""
        record, tokens, place = self.records[name], [], 0
        for batch in self.batches:
            tokens.append(sum(len(g.tokens) for g in record.outputs[place : place + len(batch)]))
            place += len(batch)
        chosen = range(len(tokens)) if batches is None else batches
        return Timings([tokens[i] for i in chosen], [record.seconds[i] for i in chosen])


def bench(
    target: Engine,
    drafters: dict[str, Callable[[], Drafter]],
    questions: Sequence[Question],
    settings: Settings,
    *,
    models: Sequence[Stopwatch] = (),
) -> dict[str, Any]:
    """Measure drafters against plain decoding.

    Args:
        target, drafters, questions, settings: as for ``race``; the first drafter is the one the result is about,
            the others stand beside it. Pass a ``Stopwatch`` as target to learn the decoder's own share of the time.
        models: every stopwatch that runs inside, for ``overhead``.

    Returns:
        ``tokens_per_second``, ``baseline_tokens_per_second``, ``speedup`` (each with an ``_interval``, null for a
        single batch), ``tau``, ``acceptance``, ``acceptance_by_position``, ``histogram``, ``alpha``, ``lossless``,
        ``divergences``, ``verdict``, ``overhead``, all of the first drafter; ``drafters``, the same for each;
        ``categories``; ``conditions`` of the machine, with ``doubts``; ``prompts`` with the generated ids of each;
        ``skipped``.

    Raises:
        PeftlabError: no drafter, or no prompt that fits.
    """
    run = race(target, drafters, questions, settings, models=models)
    everything = sum(map(sum, (row for record in run.records.values() for row in record.seconds)))
    within = sum(model.seconds for model in models)
    summaries = {name: run.summary(name) for name in drafters}
    first = next(iter(drafters))
    for name, make in drafters.items():
        summaries[name]["alpha"] = _overlap(target, run.batches, make(), settings)
    fitting = [q for batch in run.batches for q in batch]
    return summaries[first] | {
        "drafter": first,
        "overhead": 1 - within / everything if models else None,
        "batch_size": settings.batch_size,
        "temperature": settings.sampling.temperature,
        "max_new_tokens": settings.max_new_tokens,
        "repeats": settings.repeats,
        "kernel": target.kind,
        "threads": torch.get_num_threads(),
        "device": str(target.device),
        "conditions": run.conditions.as_json(),
        "drafters": summaries,
        "categories": _categories(run, first),
        "prompts": [_prompt(q, run.records, first, i) for i, q in enumerate(fitting)],
        "skipped": [q.id for q in questions if not _fits(target, q)],
    }


def race(
    target: Engine,
    drafters: dict[str, Callable[[], Drafter]],
    questions: Sequence[Question],
    settings: Settings,
    *,
    models: Sequence[Stopwatch] = (),
) -> Race:
    """Time plain decoding and every drafter on every prompt, after one batch of each to warm up.

    Who goes first changes from batch to batch. Every pass makes its drafters anew, so that none remembers the
    answers of the pass before.

    Args:
        target: the model. drafters: name -> maker.
        questions: those that do not fit the context are left out.
        models: stopwatches, set to 0 when the timing begins.

    Raises:
        PeftlabError: no drafter, or no prompt that fits.
    """
    if not drafters:
        raise PeftlabError("drafters: none given, nothing to compare with plain decoding")
    fitting = [q for q in questions if _fits(target, q)]
    if not fitting:
        raise PeftlabError("prompts: none fits the model's context" if questions else "prompts: none given")
    size = settings.batch_size
    batches: list[Sequence[Question]] = [fitting[i : i + size] for i in range(0, len(fitting), size)]
    contestants: dict[str, Callable[[], Drafter] | None] = {PLAIN: None, **drafters}
    for make in contestants.values():
        _decode(target, batches[0], make and make(), settings)
    for model in models:
        model.seconds = 0.0
    with Watch(target.device) as watch:
        records = _timed(target, batches, contestants, settings)
    return Race(target, settings, batches, records, watch.conditions(records[PLAIN].seconds))


def _fits(target: Engine, question: Question) -> bool:
    return target.limit is None or len(question.ids) < target.limit


def _decode(
    target: Engine,
    batch: Sequence[Question],
    drafter: Drafter | None,
    settings: Settings,
    observe: Overlap | None = None,
) -> list[Generation]:
    return decode(
        target,
        [q.ids for q in batch],
        StoppingCriteria(settings.max_new_tokens, settings.eos),
        drafter,
        policy=settings.policy,
        sampling=settings.sampling,
        observe=observe,
    )


def _timed(
    target: Engine,
    batches: list[Sequence[Question]],
    contestants: dict[str, Callable[[], Drafter] | None],
    settings: Settings,
) -> dict[str, _Record]:
    """Decode every batch with every contestant in turn, as often as asked."""
    records = {name: _Record([[] for _ in batches], []) for name in contestants}
    names = list(contestants)
    for repeat in range(settings.repeats):
        drafters = {name: make and make() for name, make in contestants.items()}
        for record in records.values():
            record.outputs = []
        for i, batch in enumerate(batches):
            turn = (i + repeat) % len(names)
            for name in names[turn:] + names[:turn]:
                began = time.perf_counter()
                outputs = _decode(target, batch, drafters[name], settings)
                records[name].seconds[i].append(time.perf_counter() - began)
                records[name].outputs += outputs
    return records


def verdict(speedup: float, interval: Interval, doubts: Sequence[str] = ()) -> str:
    """Return the gain in words: "slower" where it is slower, "no clear difference" where noise hides it.

    Args:
        interval: of ``speedup``; None for a single batch, from which nothing is concluded.
        doubts: why the times may be wrong; with any, the verdict is called uncertain.
    """
    if interval is None:
        return uncertain(doubts, f"{speedup:.2f}x plain decoding on a single batch, too few for an interval")
    low, high = interval
    numbers = f"{speedup:.2f}x, 95 % interval {low:.2f} to {high:.2f}"
    if low > 1:
        return uncertain(doubts, f"faster than plain decoding ({numbers})")
    if high < 1:
        return uncertain(doubts, f"slower than plain decoding ({numbers})")
    return uncertain(doubts, f"no clear difference from plain decoding ({numbers})")


def _overlap(
    target: Engine, batches: list[Sequence[Question]], drafter: Drafter, settings: Settings
) -> dict[str, float] | None:
    """Measured in a pass of its own, because looking at every distribution takes time."""
    overlap = Overlap(settings.sampling)
    if getattr(drafter, "engine", None) is not None:
        for batch in batches:
            _decode(target, batch, drafter, settings, overlap)
    return overlap.result()


def _categories(run: Race, name: str) -> dict[str, Any]:
    """Acceptance by category, and speed where no batch holds two categories."""
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
        result[category] = {
            "prompts": len(generations),
            "tau": statistics["tau"],
            "acceptance": statistics["acceptance"],
            "tokens_per_second": rate if pure else None,
            "speedup": rate / baseline if pure else None,
        }
    return result


def _prompt(question: Question, records: dict[str, _Record], first: str, i: int) -> dict[str, Any]:
    mine, plain = records[first].outputs[i], records[PLAIN].outputs[i]
    return {
        "id": question.id,
        "category": question.category,
        "prompt_tokens": len(question.ids),
        "ids": mine.tokens,
        "baseline_ids": plain.tokens,
        "reason": mine.reason,
    }
