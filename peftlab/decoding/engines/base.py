"""The interface of a forward pass: tokens and a cache in, logits and hidden states out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from peftlab.decoding.engines.cache import Block, Context, KVCache


@dataclass(frozen=True)
class Output:
    """What a forward pass returns for the tokens asked for.

    Attributes:
        logits: [b, kept, V].
        hidden: [b, kept, H], the input of the LM head (after the final norm).
        features: [b, n, F], of all tokens that were read: the states that enter the layers that the engine was built to
            report, one after the other; None for an engine that reports none.
    """

    logits: Tensor
    hidden: Tensor
    features: Tensor | None = None


class Encoder(Protocol):
    """What reads the prompts of an encoder-decoder model.

    Attributes:
        start: tokens that every output of the decoder begins with.
        limit: how many tokens a prompt may have; None if there is no limit.
    """

    start: list[int]
    limit: int | None

    def encode(self, prompts: Sequence[Sequence[int]]) -> Context:
        """Return what the decoder reads of prompts of any lengths, in their order."""
        ...


class Engine(Protocol):
    """A model that decodes.

    Attributes:
        kind: how the step is computed, for reports.
        vocab_size: V, the rows of the LM head.
        limit: how many positions the model has; None if it has no limit.
        layers: layers of the cache.
        device: where tokens go.
        encoder: of an encoder-decoder model; None of others, whose prompts are the beginnings of their outputs.
        positioned: whether tokens are placed by the positions of their block, whatever slots they are stored in.
        packed: how the CPU's products have the weights, beside the model's own; empty: as the model has them.
    """

    kind: str
    positioned: bool
    packed: tuple[str, ...]
    vocab_size: int
    limit: int | None
    layers: int
    device: torch.device
    encoder: Encoder | None

    def new_cache(self, batch: int, capacity: int, context: Context | None = None) -> KVCache:
        """Return an empty cache; see ``KVCache`` for the arguments."""
        ...

    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """Run tokens [b, n] whose slots in the cache ``block`` gives.

        ``keep`` selects tokens of the n whose output is returned, default all. Tokens past the model's limit may be
        among the n; their output is undefined.
        """
        ...


class Wrapper:
    """What an engine around another one has of it: all but the forward pass.

    Args:
        engine: the other one. note: added to its ``kind``.
    """

    def __init__(self, engine: Engine, note: str = ""):
        self._engine = engine
        self.kind, self.packed, self.positioned = f"{engine.kind}{note}", engine.packed, engine.positioned
        self.vocab_size, self.limit, self.layers = engine.vocab_size, engine.limit, engine.layers
        self.device, self.encoder = engine.device, engine.encoder

    def new_cache(self, batch: int, capacity: int, context: Context | None = None) -> KVCache:
        """See ``Engine.new_cache``."""
        return self._engine.new_cache(batch, capacity, context)
