"""Parts of a flattened step as engines of their own, which draft in the cache of the whole."""

from __future__ import annotations

from collections.abc import Collection
from weakref import WeakKeyDictionary

from torch import Tensor

from peftlab.decoding.engines.base import Output, Wrapper
from peftlab.decoding.engines.cache import Ahead, Block, KVCache
from peftlab.decoding.engines.flat import FlatEngine, flat_operations, side_by_side


class Exit(Wrapper):
    """The first layers of a flat engine. It leaves the states of what it reads in the cache for the other layers.

    Attributes:
        first: how many of the layers. May change from draft to draft.
    """

    def __init__(self, engine: FlatEngine, first: int):
        super().__init__(engine, f", first {first} layers")
        self._whole, self.first = engine, first

    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """See ``Engine.forward``."""
        with flat_operations():
            return self._whole.output(self.states(cache, tokens, block), keep)

    def states(self, cache: KVCache, tokens: Tensor, block: Block) -> Tensor:
        """Read tokens [b, n] and return the states after these layers, [b, n, H]."""
        whole = self._whole
        with flat_operations():
            h, entering = whole.through(cache, whole.embedded(tokens, block), block, range(self.first))
            cache.read_ahead(Ahead(tokens, block, self.first, h, side_by_side(entering, h)))
            return h

    def logits(self, states: Tensor) -> Tensor:
        """Return what an exit predicts from the states [..., H] after its layers, [..., V]."""
        with flat_operations():
            return self._whole.output(states).logits


class Skipping(Wrapper):
    """A flat engine without some of its sublayers, as a draft in its cache.

    Attributes:
        skipped: sublayers that are left out: 2i is the attention of layer i, 2i + 1 its MLP. May change.
    """

    def __init__(self, engine: FlatEngine):
        super().__init__(engine, ", some sublayers left out")
        self._whole = engine
        self.skipped: Collection[int] = ()

    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """See ``Engine.forward``."""
        whole = self._whole
        with flat_operations():
            h = whole.embedded(tokens, block)
            h, _ = whole.through(cache, h, block, range(self.layers), self.skipped)
            return whole.output(h, keep)


class AdaptedExit(Wrapper):
    """The first layers of a flat engine, and on them the later layers of a draft that has the same first ones.

    The first layers read and write the cache of the whole; the draft's own layers have one beside it.

    Args:
        exit_: the target's first layers. draft: its layers from ``exit_.first`` on run.
    """

    def __init__(self, exit_: Exit, draft: FlatEngine):
        super().__init__(draft, f", the first {exit_.first} layers with the target")
        self._exit, self._draft = exit_, draft
        self._layers = range(exit_.first, draft.layers)
        self.limit, self.layers = exit_.limit, exit_.layers
        self._caches: WeakKeyDictionary[KVCache, KVCache] = WeakKeyDictionary()

    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """See ``Engine.forward``."""
        with flat_operations():
            h, _ = self._draft.through(self.own(cache), self._exit.states(cache, tokens, block), block, self._layers)
            return self._draft.output(h, keep)

    def read(self, cache: KVCache, states: Tensor, block: Block) -> None:
        """Let the draft's own layers read tokens, given the states that enter them [b, n, H]."""
        with flat_operations():
            self._draft.through(self.own(cache), states, block, self._layers)

    def own(self, cache: KVCache) -> KVCache:
        """Return the cache of the draft's own layers beside ``cache``."""
        if cache not in self._caches:
            # Rows that have not drafted for several steps are read together with one that is nearly at its end.
            self._caches[cache] = KVCache(self._draft.layers, cache.batch, 2 * cache.capacity)
        return self._caches[cache]
