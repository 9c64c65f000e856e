"""The interface of a forward pass: tokens and a cache in, logits and hidden states out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from peftlab.decoding.cache import Block, Context, KVCache, slots_of
from peftlab.decoding.table import Window

if TYPE_CHECKING:
    from transformers import PretrainedConfig


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
        packed: the forms in which the CPU's products store the weights; empty: the model's own form alone.
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


class EngineWrapper:
    """A base for an engine around another one: all but the forward pass is the other's.

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


def max_positions(config: PretrainedConfig) -> int | None:
    """Return how many positions a model of this (text) config knows; None if it states no limit."""
    # MPT has no other name for it: its biases are made for this number of positions.
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)


@dataclass(frozen=True)
class Prefilled:
    """What was read of each sequence: all tokens but the last.

    Attributes:
        hidden: state [H] of the last token read; None for a sequence of one token.
        features: [length - 1, F] of all tokens read; None for a sequence of one token, or an engine without features.
    """

    hidden: list[Tensor | None]
    features: list[Tensor | None]


def prefill(engine: Engine, cache: KVCache, sequences: Sequence[Sequence[int]], slots: Sequence[int]) -> Prefilled:
    """Read all tokens but the last of each sequence into its slot of the cache."""
    lengths = [len(sequence) - 1 for sequence in sequences]
    hidden: list[Tensor | None] = [None] * len(sequences)
    features: list[list[Tensor]] = [[] for _ in sequences]
    for rows, first, n in spans(lengths, cache.most):
        counts = [min(n, lengths[row] - first) for row in rows]
        keep = sorted({count - 1 for count in counts})
        parts = [sequences[row][first : first + count] for row, count in zip(rows, counts, strict=True)]
        block = cache.block([slots[row] for row in rows], [first] * len(rows), n)
        output = engine.forward(cache, right_padded(parts, n).to(engine.device), block, keep)
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            hidden[row] = output.hidden[i, keep.index(count - 1)]
            if output.features is not None:
                features[row].append(output.features[i, :count])
    return Prefilled(hidden, [torch.cat(parts) if parts else None for parts in features])


def spans(counts: Sequence[int], most: int | None) -> Iterator[tuple[list[int], int, int]]:
    """Yield how rows of ``counts`` tokens are read: which rows, from which of their tokens, and how many tokens.

    Args:
        most: tokens at once; None for all.
    """
    longest = max(counts)
    for first in range(0, longest, most or max(1, longest)):
        yield [i for i, count in enumerate(counts) if count > first], first, min(longest - first, most or longest)


def empty_cache(engine: Engine, capacity: int, sources: Sequence[Sequence[int]]) -> KVCache:
    """Return a cache with a row for each of the ``sources``, the prompts that an encoder-decoder engine reads.

    Args:
        capacity: slots per row. sources: empty or not, they count as rows alone for any other engine.
    """
    context = None if engine.encoder is None else engine.encoder.encode(sources)
    return engine.new_cache(len(sources), capacity, context)


def right_padded(sequences: Sequence[Sequence[int]], n: int, filler: int = 0) -> Tensor:
    """Return sequences of at most n tokens as [b, n]."""
    return torch.tensor([[*s, *[filler] * (n - len(s))] for s in sequences], dtype=torch.long)


@dataclass(frozen=True)
class CacheMemory:
    """Bytes of the caches, without what an encoder-decoder model keeps of its prompts.

    Attributes:
        batch: sequences. tokens: of each. target: bytes. draft: bytes; None without a draft model.
    """

    batch: int
    tokens: int
    target: int
    draft: int | None


def cache_memory(
    target: Engine, draft: Engine | None, batches: Sequence[int], lengths: Sequence[int], window: Window | None = None
) -> list[CacheMemory]:
    """Return the bytes for each batch size and length.

    Args:
        window: of the draft; None: it sees all tokens.
    """

    def of(engine: Engine, tokens: int) -> int:
        fixed, each = _bytes(engine)
        return fixed + each * tokens

    stored = {n: n if window is None else min(n, slots_of(window)) for n in lengths}
    return [
        CacheMemory(b, n, b * of(target, n), None if draft is None else b * of(draft, stored[n]))
        for b in batches
        for n in dict.fromkeys(lengths)
    ]


def _bytes(engine: Engine) -> tuple[int, int]:
    """Return the bytes of a sequence's cache that do not depend on its length (states), and those per token."""
    found = []
    for capacity in (1, 2):
        cache = empty_cache(engine, capacity, [[0]])
        engine.forward(cache, torch.zeros(1, 1, dtype=torch.long, device=engine.device), Block((0,), 1))
        cache.commit(0, 1)
        found.append(cache.bytes)
    one, two = found
    return 2 * one - two, two - one
