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

from peftlab.decoding.cache import Block, KVCache
from peftlab.decoding.decoder import Ending, Generation, decode
from peftlab.decoding.drafters import Drafter, Sampling
from peftlab.decoding.engine import Engine, Output
from peftlab.decoding.lengths import Fixed, Policy
from peftlab.decoding.measures import Overlap, acceptance_statistics, divergence, rate_intervals
from peftlab.errors import PeftlabError
from peftlab.methods.medusa_heads import MedusaHeads, ReducedHeads

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

    def including(self, heads: MedusaHeads | ReducedHeads) -> MedusaHeads | ReducedHeads:
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
    """

    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    policy: Callable[[], Policy] = field(default_factory=lambda: partial(Fixed, 4))
    sampling: Sampling = field(default_factory=Sampling)
    batch_size: int = 1
    repeats: int = 3


@dataclass
class _Record:
    """One contestant: seconds of each batch in each repeat, and the outputs of the last."""

    seconds: list[list[float]]
    outputs: list[Generation]


def bench(
    target: Engine,
    drafters: dict[str, Callable[[], Drafter]],
    questions: Sequence[Question],
    settings: Settings,
    *,
    models: Sequence[Stopwatch] = (),
) -> dict[str, Any]:
    """Measure drafters against plain decoding.

    Every pass makes its drafters anew, so that none remembers the answers of the pass before.

    Args:
        target: the model; pass a ``Stopwatch`` to learn the decoder's own share of the time.
        drafters: name -> maker; the first is the one the result is about, the others stand beside it.
        questions: those that do not fit the context are left out, and named under ``skipped``.
        settings: how.
        models: every stopwatch that runs inside, for ``overhead``.

    Returns:
        ``tokens_per_second``, ``baseline_tokens_per_second``, ``speedup`` (each with an ``_interval``), ``tau``,
        ``acceptance``, ``acceptance_by_position``, ``histogram``, ``alpha``, ``lossless``, ``divergences``,
        ``verdict``, ``overhead``, all of the first drafter; ``drafters``, the same for each; ``categories``;
        ``prompts`` with the generated ids of each; ``skipped``.

    Raises:
        PeftlabError: no drafter, no prompt that fits, or settings that make no sense.
    """
    _check(drafters, settings)
    fitting = [q for q in questions if _fits(target, q)]
    if not fitting:
        raise PeftlabError("prompts: none fits the model's context" if questions else "prompts: none given")
    batches: list[Sequence[Question]] = [
        fitting[i : i + settings.batch_size] for i in range(0, len(fitting), settings.batch_size)
    ]
    contestants: dict[str, Callable[[], Drafter] | None] = {PLAIN: None, **drafters}
    for make in contestants.values():
        _decode(target, batches[0], make and make(), settings)
    for model in models:
        model.seconds = 0.0
    records = _race(target, batches, contestants, settings)
    everything = sum(map(sum, (row for record in records.values() for row in record.seconds)))
    within = sum(model.seconds for model in models)
    summaries = {name: _summary(records[name], records[PLAIN], batches, fitting, target, settings) for name in drafters}
    first = next(iter(drafters))
    for name, make in drafters.items():
        summaries[name]["alpha"] = _overlap(target, batches, make(), settings)
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
        "drafters": summaries,
        "categories": _categories(records[first], records[PLAIN], batches, fitting),
        "prompts": [_prompt(q, records, first, i) for i, q in enumerate(fitting)],
        "skipped": [q.id for q in questions if not _fits(target, q)],
    }


def _check(drafters: dict[str, Callable[[], Drafter]], settings: Settings) -> None:
    if not drafters:
        raise PeftlabError("drafters: none given, nothing to compare with plain decoding")
    for name in ("batch_size", "repeats", "max_new_tokens"):
        if getattr(settings, name) < 1:
            raise PeftlabError(f"{name}: {getattr(settings, name)} is less than 1")


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
        Ending(settings.max_new_tokens, settings.eos),
        drafter,
        policy=settings.policy,
        sampling=settings.sampling,
        observe=observe,
    )


def _race(
    target: Engine,
    batches: list[Sequence[Question]],
    contestants: dict[str, Callable[[], Drafter] | None],
    settings: Settings,
) -> dict[str, _Record]:
    """Time every contestant on every batch; who goes first changes from batch to batch."""
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


def _summary(
    record: _Record,
    plain: _Record,
    batches: list[Sequence[Question]],
    questions: Sequence[Question],
    target: Engine,
    settings: Settings,
) -> dict[str, Any]:
    tokens, seconds = _totals(record, batches)
    plain_tokens, plain_seconds = _totals(plain, batches)
    rate, baseline = sum(tokens) / sum(seconds), sum(plain_tokens) / sum(plain_seconds)
    intervals = rate_intervals(tokens, seconds, plain_tokens, plain_seconds)
    apart = []
    if settings.sampling.greedy:
        for q, one, other in zip(questions, plain.outputs, record.outputs, strict=True):
            parting = divergence(target, q.ids, one.tokens, other.tokens)
            if parting is not None:
                apart.append({"id": q.id, **asdict(parting)})
    return {
        "tokens_per_second": rate,
        "tokens_per_second_interval": intervals["rate"],
        "baseline_tokens_per_second": baseline,
        "baseline_tokens_per_second_interval": intervals["baseline"],
        "speedup": rate / baseline,
        "speedup_interval": intervals["speedup"],
        "verdict": verdict(rate / baseline, intervals["speedup"]),
        **acceptance_statistics(record.outputs),
        # A sampled output cannot be compared token for token: that the scheme is exact is proved elsewhere.
        "lossless": not apart,
        "lossless_by": "comparison" if settings.sampling.greedy else "construction",
        "divergences": apart,
    }


def verdict(speedup: float, interval: tuple[float, float]) -> str:
    """Return the gain in words: "slower" where it is slower, "no clear difference" where noise hides it."""
    low, high = interval
    numbers = f"{speedup:.2f}x, 95 % interval {low:.2f} to {high:.2f}"
    if low > 1:
        return f"faster than plain decoding ({numbers})"
    if high < 1:
        return f"slower than plain decoding ({numbers})"
    return f"no clear difference from plain decoding ({numbers})"


def _totals(record: _Record, batches: list[Sequence[Question]]) -> tuple[list[int], list[float]]:
    """Tokens and seconds of each batch; seconds are the median over repeats."""
    tokens, place = [], 0
    for batch in batches:
        tokens.append(sum(len(g.tokens) for g in record.outputs[place : place + len(batch)]))
        place += len(batch)
    return tokens, [sorted(times)[len(times) // 2] for times in record.seconds]


def _overlap(
    target: Engine, batches: list[Sequence[Question]], drafter: Drafter, settings: Settings
) -> dict[str, float] | None:
    """Measured in a pass of its own, because looking at every distribution takes time."""
    overlap = Overlap(settings.sampling)
    if getattr(drafter, "engine", None) is not None:
        for batch in batches:
            _decode(target, batch, drafter, settings, overlap)
    return overlap.result()


def _categories(
    record: _Record, plain: _Record, batches: list[Sequence[Question]], questions: Sequence[Question]
) -> dict[str, Any]:
    """Acceptance by category, and speed where no batch holds two categories."""
    outputs: dict[str, list[Generation]] = defaultdict(list)
    for q, generation in zip(questions, record.outputs, strict=True):
        outputs[q.category].append(generation)
    tokens, seconds = _totals(record, batches)
    plain_tokens, plain_seconds = _totals(plain, batches)
    result = {}
    for category, generations in outputs.items():
        mine = [i for i, batch in enumerate(batches) if any(q.category == category for q in batch)]
        pure = all(q.category == category for i in mine for q in batches[i])
        rate = sum(tokens[i] for i in mine) / sum(seconds[i] for i in mine)
        baseline = sum(plain_tokens[i] for i in mine) / sum(plain_seconds[i] for i in mine)
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
