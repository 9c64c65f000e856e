"""The time that the models of a decoder take, added up call by call."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from peftlab.decoding.drafters.head_drafter import Heads
from peftlab.decoding.engines.base import Engine, Output
from peftlab.decoding.engines.cache import Block, KVCache
from peftlab.decoding.verification.tree import Path, RankRates
from peftlab.untyped import Function

ResultT = TypeVar("ResultT")


class Stopwatch:
    """An engine that adds up the time of its forward passes; to the decoder it is the engine."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self.seconds = 0.0
        self.kind, self.vocab_size, self.limit = engine.kind, engine.vocab_size, engine.limit
        self.layers, self.device = engine.layers, engine.device

    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """See ``Engine.forward``."""
        return self.timed(self._engine.forward, cache, tokens, block, keep)

    def including(self, heads: Heads) -> Heads:
        """Return ``heads`` with their time counted as this engine's."""
        return _TimedHeads(heads, self)

    def timed(self, work: Function[ResultT], *arguments: object) -> ResultT:
        """Call ``work`` and add its time."""
        began = time.perf_counter()
        output = work(*arguments)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds += time.perf_counter() - began
        return output


@dataclass(frozen=True)
class _TimedHeads:
    """Heads whose time a stopwatch adds up; to a drafter they are the heads."""

    heads: Heads
    stopwatch: Stopwatch

    @property
    def vocab_size(self) -> int:
        return self.heads.vocab_size

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.heads.parameters()

    @property
    def depth(self) -> int:
        return self.heads.depth

    @property
    def ranks(self) -> RankRates | None:
        return self.heads.ranks

    def tokens(self, hidden: Tensor, last: Tensor, tree: Sequence[Path]) -> Tensor:
        return self.stopwatch.timed(self.heads.tokens, hidden, last, tree)
