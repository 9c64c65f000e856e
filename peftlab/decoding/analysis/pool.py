"""Prompts decoded as they are served: a pool that takes the next prompt as soon as an output ends."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from peftlab.decoding.analysis.benchmark import PLAIN, Question, Settings, decode_batch, fits
from peftlab.decoding.analysis.results import PoolResult
from peftlab.decoding.drafters.base import Drafter
from peftlab.decoding.engines.base import Engine
from peftlab.errors import PeftlabError


@dataclass(frozen=True)
class _Way:
    """One way to decode all prompts: with the drafter or plainly, in a pool or batch after batch."""

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
    """Raise ``PeftlabError`` for a pool of one sequence, in which nothing waits for anything."""
    if batch_size < 2:
        raise PeftlabError(f"pool: a batch size of {batch_size}; give 2 or more sequences to decode together")


def measure_pool(
    target: Engine, name: str, make: Callable[[], Drafter], questions: Sequence[Question], settings: Settings
) -> PoolResult:
    """Time a pool and static batches of the same size in turn on the same prompts, plainly and with a drafter.

    Args:
        name, make: the drafter. questions: those that do not fit the context are left out.

    Raises:
        PeftlabError: a batch size below 2.
    """
    check_pool(settings.batch_size)
    fitting = [question for question in questions if fits(target, question)]
    ways = {
        (each, pooled): _Way(target, settings, fitting, each, maker, pooled)
        for each, maker in ((PLAIN, None), (name, make))
        for pooled in (False, True)
    }
    seconds, tokens = defaultdict[tuple[str, bool], list[float]](list), dict[tuple[str, bool], list[list[int]]]()
    for _ in range(settings.repeats + 1):
        for key, way in ways.items():
            began = time.perf_counter()
            tokens[key] = way.outputs()
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
