"""How long one step of a target or a draft takes, by the number of sequences and of tokens of each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from peftlab.decoding.engines.base import Engine, Output
from peftlab.decoding.engines.cache import Block
from peftlab.decoding.engines.prefill import empty_cache
from peftlab.errors import PeftlabError


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
class MeasuredTimes:
    """Seconds of a step at some batch sizes; between two of them they are taken to lie on a line.

    Attributes:
        targets: batch size -> seconds of a target step over 1, 2, ... tokens of each sequence; the sizes rise.
        drafts: batch size -> seconds of a draft step over one token of each; empty for a drafter without a model.
    """

    targets: Mapping[int, Sequence[float]]
    drafts: Mapping[int, float]

    def target(self, batch: int, tokens: int) -> float:
        """Return the seconds of a target step."""
        return _between({size: times[tokens - 1] for size, times in self.targets.items()}, batch)

    def draft(self, batch: int) -> float:
        """Return the seconds of a draft step."""
        return _between(self.drafts, batch) if self.drafts else 0.0


def measure_times(
    target: Engine, draft: Engine | None, largest: int, longest: int, *, context: int = 128, repeats: int = 3
) -> MeasuredTimes:
    """Measure the steps that a draft length is chosen by, the median of a few repeats each.

    Args:
        draft: engine of the draft; None for a drafter without a model.
        largest: batch size; 1, 2, 4, ... up to it are measured. longest: drafted tokens at most.
        context: tokens of each sequence in the cache, fewer where the models have less room.

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
    return MeasuredTimes(targets, drafts)


def _between(values: Mapping[int, float], size: int) -> float:
    """Return the value at ``size`` on the line through its neighbours; past the ends, that of the nearest size."""
    below = max((each for each in values if each <= size), default=min(values))
    above = min((each for each in values if each >= size), default=max(values))
    if above <= below:
        return values[above]
    share = (size - below) / (above - below)
    return (1 - share) * values[below] + share * values[above]
