"""The time that the models of a decoder take, added up call by call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from peftlab.decoding.drafters.ahead_drafter import AheadDrafter
from peftlab.decoding.drafters.base import Around, Drafter, Proposal, Row, TargetState, Verified
from peftlab.decoding.drafters.feature_drafter import FeatureNetwork
from peftlab.decoding.drafters.head_drafter import Heads
from peftlab.decoding.engines.base import Engine, Output, Wrapper
from peftlab.decoding.engines.cache import Block, KVCache
from peftlab.decoding.trees import Path
from peftlab.hardware import wait_for
from peftlab.untyped import Function

ResultT = TypeVar("ResultT")


class Clock:
    """The time of the calls made through it.

    Attributes:
        seconds: so far. device: waited for before and after each call.
    """

    def __init__(self, device: torch.device):
        self.seconds, self.device = 0.0, device

    def timed(self, work: Function[ResultT], *arguments: object) -> ResultT:
        """Call ``work`` and add its time."""
        wait_for(self.device)
        began = time.perf_counter()
        output = work(*arguments)
        wait_for(self.device)
        self.seconds += time.perf_counter() - began
        return output


class Stopwatch(Wrapper, Clock):
    """An engine that adds up the time of its forward passes; to the decoder it is the engine."""

    def __init__(self, engine: Engine):
        Clock.__init__(self, engine.device)
        Wrapper.__init__(self, engine)

    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """See ``Engine.forward``."""
        return self.timed(self._engine.forward, cache, tokens, block, keep)

    def including(self, heads: Heads) -> Heads:
        """Return ``heads`` with their time counted as this engine's."""
        return _TimedHeads(heads, self)

    def including_network(self, network: FeatureNetwork) -> FeatureNetwork:
        """Return ``network`` with its time counted as this engine's."""
        return _TimedNetwork(network, self)


class _TimedEngine(Wrapper):
    """An engine whose forward passes a clock adds up; to a drafter it is the engine."""

    def __init__(self, engine: Engine, clock: Clock):
        super().__init__(engine)
        self._clock = clock

    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """See ``Engine.forward``."""
        return self._clock.timed(self._engine.forward, cache, tokens, block, keep)


@dataclass
class TimedDrafter(Around):
    """A drafter whose time a clock adds up, its model's included; to the decoder it is the drafter."""

    drafter: Drafter
    clock: Clock

    def start(self, rows: list[Row], state: TargetState) -> None:
        self.clock.timed(self.drafter.start, rows, state)

    def join(self, rows: list[Row], state: TargetState) -> None:
        self.clock.timed(self.drafter.join, rows, state)

    def propose(self, rows: list[Row], budgets: list[int]) -> Proposal:
        return self.clock.timed(self.drafter.propose, rows, budgets)

    def accept(self, rows: list[Row], verified: Verified) -> None:
        self.clock.timed(self.drafter.accept, rows, verified)

    def select(self, slots: list[int]) -> None:
        self.clock.timed(self.drafter.select, slots)


def timed_drafter(make: Callable[[], Drafter], clock: Clock) -> Drafter:
    """Return a new drafter whose time ``clock`` adds up."""
    drafter = make()
    if isinstance(drafter, AheadDrafter):  # its own calls return at once: its model works beside the target
        return replace(drafter, engine=_TimedEngine(drafter.engine, clock))
    return TimedDrafter(drafter, clock)


class _TimedHeads:
    """Heads whose time a stopwatch adds up; to a drafter they are the heads."""

    def __init__(self, heads: Heads, stopwatch: Stopwatch):
        self._heads, self._stopwatch = heads, stopwatch
        self.vocab_size, self.depth, self.ranks = heads.vocab_size, heads.depth, heads.ranks
        self.parameters = heads.parameters

    def tokens(self, hidden: Tensor, last: Tensor, tree: Sequence[Path]) -> Tensor:
        return self._stopwatch.timed(self._heads.tokens, hidden, last, tree)


class _TimedNetwork:
    """A network on the target's states whose time a stopwatch adds up; to a drafter it is the network."""

    def __init__(self, network: FeatureNetwork, stopwatch: Stopwatch):
        self._network, self._stopwatch = network, stopwatch
        self.features, self.vocab_size = network.features, network.vocab_size
        self.tokens, self.device, self.ranks = network.tokens, network.device, network.ranks

    def fuse(self, features: Tensor) -> Tensor:
        return self._stopwatch.timed(self._network.fuse, features)

    def advance(
        self, cache: KVCache, tokens: Tensor, states: Tensor, block: Block, positions: Tensor, visible: Tensor | None
    ) -> Tensor:
        return self._stopwatch.timed(self._network.advance, cache, tokens, states, block, positions, visible)

    def logits(self, states: Tensor) -> Tensor:
        return self._stopwatch.timed(self._network.logits, states)
