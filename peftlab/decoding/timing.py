"""Measurements of time: the state of the machine, clocks around the calls of a decoder, and the seconds of a step.

A measurement on a busy machine is called uncertain, with its reasons (``Conditions.doubts``).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import TypeVar, cast

import torch
from torch import Tensor

from peftlab.decoding.cache import Block, Engine, EngineWrapper, KVCache, Output, empty_cache
from peftlab.decoding.drafter import Drafter
from peftlab.decoding.parallel_drafters import PearlDrafter
from peftlab.errors import PeftlabError
from peftlab.files import Json, to_json
from peftlab.hardware import wait_for
from peftlab.untyped import Function

# Beyond these a measurement is called uncertain, see ``Conditions``.
_MAX_LOAD = 1.25  # load average over cores: this process's own threads reach 1
_MIN_RUNNING = 0.9
_MAX_SPREAD = 0.15


@dataclass(frozen=True)
class Conditions:
    """The state of the machine during a measurement.

    Attributes:
        load: 1-minute load average, this process included; None where the system has none.
        cores: that this process may use.
        running: share of the time in which the timing thread ran on a core; None where it waits for a device.
        spread: interquartile range of repeats of the same work, relative to their median; None without repeats.
    """

    load: float | None
    cores: int
    running: float | None
    spread: float | None

    def doubts(self) -> list[str]:
        """Return the reasons why figures measured under these conditions may be wrong; none on an idle machine."""
        doubts = []
        if self.load is not None and self.load > _MAX_LOAD * self.cores:
            doubts.append(f"load average {self.load:.1f} on {self.cores} cores")
        if self.running is not None and self.running < _MIN_RUNNING:
            doubts.append(f"waiting for a core {100 * (1 - self.running):.0f} % of the time")
        if self.spread is not None and self.spread > _MAX_SPREAD:
            doubts.append(f"repeats of the same work differ by {100 * self.spread:.0f} %")
        return doubts

    def as_json(self) -> dict[str, Json]:
        """Return the attributes and the doubts."""
        return to_json(vars(self)) | {"doubts": to_json(self.doubts())}


class Watch:
    """A context manager that observes the machine while its block is timed."""

    def __init__(self, device: torch.device):
        self._waits_for_device = device.type != "cpu"

    def __enter__(self) -> Watch:
        self._load = _load_average()
        self._began, self._ran = time.perf_counter(), time.thread_time()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._wall, self._ran = time.perf_counter() - self._began, time.thread_time() - self._ran
        self._load = max((load for load in (self._load, _load_average()) if load is not None), default=None)

    def conditions(self, repeats: Sequence[Sequence[float]]) -> Conditions:
        """Return the conditions of the measurement, after the with-block.

        Args:
            repeats: for each piece of work the seconds of its repeats.
        """
        running = None if self._waits_for_device else min(1.0, self._ran / self._wall)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return Conditions(self._load, cores, running, relative_spread(repeats))


def relative_spread(repeats: Sequence[Sequence[float]]) -> float | None:
    """Return the median over pieces of work of the interquartile range of their repeats over the median repeat."""
    each = []
    for times in repeats:
        if len(times) > 1:
            first, middle, third = statistics.quantiles(times, n=4, method="inclusive")
            each.append((third - first) / middle)
    return statistics.median(each) if each else None


def _load_average() -> float | None:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def uncertain(doubts: Sequence[str], statement: str) -> str:
    """Return ``statement``, preceded by the reasons why it may be wrong if there are any.

    Args:
        doubts: the reasons. statement: about measured times.
    """
    return f"uncertain, the machine was busy ({'; '.join(doubts)}): by these times {statement}" if doubts else statement


ResultT = TypeVar("ResultT")


class Clock:
    """A clock that adds up the time of the calls made through it.

    Attributes:
        seconds: so far. device: waited for before and after each call.
    """

    def __init__(self, device: torch.device):
        self.seconds, self.device = 0.0, device

    def timed(self, work: Function[ResultT], *arguments: object) -> ResultT:
        """Call ``work``, add its time, and return its result.

        Args:
            work: to call. arguments: by position.
        """
        wait_for(self.device)
        began = time.perf_counter()
        output = work(*arguments)
        wait_for(self.device)
        self.seconds += time.perf_counter() - began
        return output


class Stopwatch(EngineWrapper, Clock):
    """An engine that adds up the time of its forward passes; to the decoder it is the engine."""

    def __init__(self, engine: Engine):
        Clock.__init__(self, engine.device)
        EngineWrapper.__init__(self, engine)

    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """Run this engine on new tokens; see ``Engine.forward``."""
        return self.timed(self._engine.forward, cache, tokens, block, keep)


ObjectT = TypeVar("ObjectT")


def timed_calls(inner: ObjectT, clock: Clock, *methods: str) -> ObjectT:
    """Return a proxy of ``inner`` that adds the time of the calls of some methods to a clock.

    Args:
        inner: such as a draft's engine or heads. clock: adds up. methods: names, called with arguments by position.
    """
    return cast(ObjectT, _TimedCalls(inner, clock, methods))


class _TimedCalls:
    def __init__(self, inner: object, clock: Clock, methods: Sequence[str]):
        self._inner = inner
        for method in methods:
            setattr(self, method, partial(clock.timed, getattr(inner, method)))

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


def timed_drafter(make: Callable[[], Drafter], clock: Clock) -> Drafter:
    """Return a new drafter that adds its time, and its model's, to a clock.

    Args:
        make: makes the drafter. clock: adds up.
    """
    drafter = make()
    # The calls of a drafter that works in another thread return before its model has drafted.
    if isinstance(drafter, PearlDrafter):
        return replace(drafter, engine=timed_calls(drafter.engine, clock, "forward"))
    return timed_calls(drafter, clock, "start", "join", "propose", "accept", "select")


def step_seconds(
    engines: Mapping[str, tuple[Engine, int]], *, batch: int = 1, context: int = 128, repeats: int = 9
) -> dict[tuple[str, int], list[float]]:
    """Measure one forward pass over 1..k tokens of each sequence after ``context`` cached ones.

    Args:
        engines: name -> engine and its largest k.
        batch: sequences in a pass. context: tokens of each in the cache, and of the prompts of an
            encoder-decoder model.
        repeats: passes of each kind, in turn. One more of each warms up.

    Returns:
        (name, k) -> seconds of each repeat.

    Raises:
        PeftlabError: ``repeats < 1``, or a context that does not fit.
    """
    check_repeats(repeats)
    generator = torch.Generator().manual_seed(0)
    runs: dict[tuple[str, int], Callable[[], Output]] = {}
    for name, (engine, most) in engines.items():
        if engine.limit is not None and context + most > engine.limit:
            raise PeftlabError(f"context: {context} and {most} more tokens exceed {name}'s {engine.limit}")
        ids = torch.randint(engine.vocab_size, (batch, context + most), generator=generator).to(engine.device)
        cache = empty_cache(engine, context + most, ids[:, :context].tolist())
        engine.forward(cache, ids[:, :context], Block((0,) * batch, context), [context - 1])
        for k in range(1, most + 1):
            runs[name, k] = partial(engine.forward, cache, ids[:, context : context + k], Block((context,) * batch, k))
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
    for _ in range(repeats + 1):
        for key, run in runs.items():
            began = time.perf_counter()
            float(run().logits[0, -1, 0])  # reading a number waits for the device
            seconds[key].append(time.perf_counter() - began)
    return {key: values[1:] for key, values in seconds.items()}


def check_repeats(repeats: int) -> None:
    """Raise ``PeftlabError`` if nothing would be measured."""
    if repeats < 1:
        raise PeftlabError(f"repeats: {repeats} measures nothing; give 1 or more, and 2 or more for an interval")


@dataclass(frozen=True)
class MeasuredStepTimes:
    """Seconds of a step at some batch sizes; between two of them they are taken to lie on a line.

    Attributes:
        targets: batch size -> seconds of a target step over 1, 2, ... tokens of each sequence; the sizes rise.
        drafts: batch size -> seconds of a draft step over one token of each; empty for a drafter without a model.
    """

    targets: Mapping[int, Sequence[float]]
    drafts: Mapping[int, float]

    def target(self, batch: int, tokens: int) -> float:
        """Return the seconds of a target step.

        Args:
            batch: sequences. tokens: of each.
        """
        return _interpolate({size: times[tokens - 1] for size, times in self.targets.items()}, batch)

    def draft(self, batch: int) -> float:
        """Return the seconds of a draft step."""
        return _interpolate(self.drafts, batch) if self.drafts else 0.0


def measure_times(
    target: Engine, draft: Engine | None, largest: int, longest: int, *, context: int = 128, repeats: int = 3
) -> MeasuredStepTimes:
    """Measure the step times by which a draft length is chosen: medians of a few repeats.

    Args:
        target: its engine. draft: engine of the draft; None for a drafter without a model.
        largest: batch size; 1, 2, 4, ... up to it are measured. longest: drafted tokens at most.
        context: tokens of each sequence in the cache, fewer where the models have less room. repeats: of each step.

    Raises:
        PeftlabError: a model has no room for as many tokens.
    """
    sizes = [*(1 << i for i in range((largest - 1).bit_length())), largest]
    engines = {"target": (target, longest + 1)} | ({"draft": (draft, 1)} if draft is not None else {})
    rooms = [engine.limit - most for engine, most in engines.values() if engine.limit is not None]
    context = max(1, min(context, *rooms)) if rooms else context
    targets, drafts = dict[int, list[float]](), dict[int, float]()
    for size in sizes:
        found = step_seconds(engines, batch=size, context=context, repeats=repeats)
        targets[size] = [statistics.median(found["target", k]) for k in range(1, longest + 2)]
        if draft is not None:
            drafts[size] = statistics.median(found["draft", 1])
    return MeasuredStepTimes(targets, drafts)


def _interpolate(values: Mapping[int, float], size: int) -> float:
    """Return the value at ``size``, interpolated between its neighbours; past the ends, that of the nearest size."""
    below = max((each for each in values if each <= size), default=min(values))
    above = min((each for each in values if each >= size), default=max(values))
    if above <= below:
        return values[above]
    share = (size - below) / (above - below)
    return (1 - share) * values[below] + share * values[above]
