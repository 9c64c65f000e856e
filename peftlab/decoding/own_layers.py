"""Drafting with the target's own layers, in the target's cache: early exits, DEL, SWIFT and Kangaroo.

The engines are parts of a flattened step (``flat.py``): the first layers (``EarlyExit``), all layers without some
sublayers (``SkippedSublayers``), the first layers and further ones of a draft (``AdaptedExit``). Of the sublayers,
2i is the attention of layer i, 2i + 1 its MLP. The drafters choose among these parts while they decode.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from peftlab.decoding.cache import Block, EngineWrapper, FirstLayers, KVCache, Output
from peftlab.decoding.decode import DraftCandidate, Proposal, Row, TargetState, Verified
from peftlab.decoding.flat import FlatEngine, concatenate_states, without_torch_function
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.decoding.sampling import argmax
from peftlab.decoding.table import CHAIN


class EarlyExit(EngineWrapper):
    """An engine of the first layers of a flat engine; it records its states in the cache for the other layers.

    Attributes:
        first: how many of the layers. May change from draft to draft.
    """

    def __init__(self, engine: FlatEngine, first: int):
        super().__init__(engine, f", first {first} layers")
        self._whole, self.first = engine, first

    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """Run this engine on new tokens; see ``Engine.forward``."""
        with without_torch_function():
            return self._whole.output(self.states(cache, tokens, block), keep)

    def states(self, cache: KVCache, tokens: Tensor, block: Block) -> Tensor:
        """Read tokens and return the states after these layers, [b, n, H].

        Args:
            cache: the whole model's. tokens: [b, n]. block: their slots.
        """
        whole = self._whole
        with without_torch_function():
            h, entering = whole.run_layers(cache, whole.embed(tokens, block), block, range(self.first))
            cache.record_first_layers(FirstLayers(tokens, block, self.first, h, concatenate_states(entering, h)))
            return h

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits of an exit for the states after its layers, [..., H] -> [..., V]."""
        with without_torch_function():
            return self._whole.output(states).logits


def tokens_per_layer(alpha: float, exit_: float, length: int, layers: float, head: float = 0.0) -> float:
    """Return TPL(l, d): the expected tokens of a round per layer that it runs, the LM head included.

    (1 + α + ... + α^d) / (d (l + head) + L + head): d tokens drafted after l layers each, and one pass of all L.

    Args:
        alpha: acceptance α of a drafted token. exit_: l, layers before the exit. length: d, drafted tokens.
        layers: L. head: time of the LM head relative to a layer.
    """
    return sum(alpha**i for i in range(length + 1)) / (length * (exit_ + head) + layers + head)


@dataclass
class ExitSelector:
    """A selector of the exit and draft length with the most tokens per layer, by each exit's estimated acceptance.

    Attributes:
        exits: layers before each exit that may be chosen, rising. layers: L. head: as for ``tokens_per_layer``.
        memory: tokens after which a count weighs 1/e.
    """

    exits: Sequence[int]
    layers: int
    head: float
    memory: int = 64
    _seen: float = field(default=0.0, init=False)
    _accepted: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self._accepted = [0.0] * len(self.exits)

    @property
    def alphas(self) -> list[float]:
        """Return the estimated acceptance of each exit: over the last tokens and one more that counts as accepted."""
        return [(accepted + 1) / (self._seen + 1) for accepted in self._accepted]

    def best(self, longest: int) -> tuple[int, int]:
        """Return the best exit and length, at most ``longest``; length 0: no draft pays. The cheapest wins a tie."""
        options = [(exit_, d) for exit_ in self.exits for d in range(longest + 1)]
        alphas = dict(zip(self.exits, self.alphas, strict=True))

        def gain(option: tuple[int, int]) -> float:
            exit_, length = option
            return tokens_per_layer(alphas[exit_], exit_, length, self.layers, self.head)

        return max(options, key=gain)

    def learn(self, accepted: Sequence[float]) -> None:
        """Update the estimates with the acceptance of each exit at one more token, from 0 to 1."""
        keep = 1 - 1 / self.memory
        self._seen = keep * self._seen + 1
        self._accepted = [keep * old + new for old, new in zip(self._accepted, accepted, strict=True)]


@dataclass(kw_only=True)
class DelDrafter(ModelDrafter):
    """A drafter with an early exit whose layer and draft length are chosen anew in every round, for all sequences.

    DEL (Zarch et al. 2025, arXiv 2504.05598). After a verification the state after every possible exit is known at each
    token up to the first rejection, from drafting or from verification. The LM head turns it into what the exit would
    have drafted there (a shadow token). Greedily its acceptance is whether that is the target's token, otherwise
    Σ min(p, q). The target's engine must report the states that enter the layers ``choice.exits``.

    Attributes:
        exit: the target's first layers; ``engine``, which may be one around it, runs it.
        choice: what the acceptance of each exit was; may be shared by drafters one after the other.
    """

    exit: EarlyExit
    choice: ExitSelector
    name: str = "del"
    shares_cache: bool = field(default=True, init=False)
    provides = ModelDrafter.provides - {CHAIN}  # it chooses the length itself, by what ``choice`` has counted

    def candidates(self, acceptance: Sequence[float], verification: Sequence[float]) -> list[DraftCandidate]:
        """Return no candidates: this drafter chooses its lengths itself."""
        return []

    def propose(self, rows: list[Row], budgets: list[int]) -> Proposal:
        self.exit.first, length = self.choice.best(max(budgets))
        if length == 0:
            return Proposal.empty(len(rows), self.engine.device)
        return super().propose(rows, [min(budget, length) for budget in budgets])

    def accept(self, rows: list[Row], verified: Verified) -> None:
        super().accept(rows, verified)
        features = verified.output.features
        assert features is not None
        for i, path in enumerate(verified.paths):
            read = [0, *(node + 1 for node in path)]
            states = features[i, read].unflatten(-1, (len(self.choice.exits), -1))  # [m, exits, H]
            for accepted in self._accepted(self.exit.logits(states), verified.output.logits[i, read]):
                self.choice.learn(accepted)

    def _accepted(self, shadows: Tensor, logits: Tensor) -> list[list[float]]:
        """Return the acceptance of each exit at m tokens, by logits [m, exits, V] and the target's [m, V]."""
        if self._sampling.greedy:
            return (argmax(shadows) == argmax(logits)[:, None]).float().tolist()
        p, q = self._sampling.probabilities(logits), self._sampling.probabilities(shadows)
        return torch.minimum(p[:, None], q).sum(-1).tolist()


class SkippedSublayers(EngineWrapper):
    """An engine that runs a flat engine without some of its sublayers, as a draft in the same cache.

    Attributes:
        skipped: sublayers that are left out: 2i is the attention of layer i, 2i + 1 its MLP. May change.
    """

    def __init__(self, engine: FlatEngine):
        super().__init__(engine, ", some sublayers left out")
        self._whole = engine
        self.skipped: Collection[int] = ()

    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """Run this engine on new tokens; see ``Engine.forward``."""
        whole = self._whole
        with without_torch_function():
            h = whole.embed(tokens, block)
            h, _ = whole.run_layers(cache, h, block, range(self.layers), self.skipped)
            return whole.output(h, keep)


_SKIPPED_SHARE = 0.45  # share of the sublayers between the first and the last layer that are left out
_PROPOSAL_INTERVAL = 25  # tries between two sets that the Gaussian process proposes
_GOOD_SCORE, _MAX_MISSES, _MAX_TRIES = 0.95, 300, 1000
_CANDIDATES = 256  # random sets of which the Gaussian process takes the most promising
_DEVIATIONS = 2.576  # standard deviations above the mean, the weight of exploration; 99.5 % quantile of a normal law
_WINDOW = 32  # tokens on which a set is tried


@dataclass
class SkipSearch:
    """A search for the set of sublayers to leave out that predicts most tokens.

    All sets have the same size, .45 of the sublayers outside the first and the last layer. The first is spread evenly;
    the others are random, but every 25th is the most promising of many by a Gaussian process on the scores so far. The
    search ends at a score of .95, after 300 tries without a better one, or after 1000.

    Attributes:
        layers: of the model, 3 or more. best: the best set. score: of it; 0 before the first try.
        tries: so far.
    """

    layers: int
    best: frozenset[int] = field(init=False)
    score: float = field(default=0.0, init=False)
    tries: int = field(default=0, init=False)
    _misses: int = field(default=0, init=False)
    _tried: list[Tensor] = field(default_factory=list, init=False, repr=False)
    _scores: list[float] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self._places = 2 * (self.layers - 2)
        self._size = max(1, round(_SKIPPED_SHARE * self._places))
        self._random = torch.Generator().manual_seed(0)
        self._first = torch.zeros(self._places)
        self._first[[math.floor((i + 0.5) * self._places / self._size) for i in range(self._size)]] = 1
        self.best = self._sublayer_numbers(self._first)

    @property
    def over(self) -> bool:
        """Return whether the search has ended."""
        return self.score >= _GOOD_SCORE or self._misses >= _MAX_MISSES or self.tries >= _MAX_TRIES

    def candidate(self) -> frozenset[int]:
        """Return the next set to try; its score must be given to ``record`` before the next call."""
        if not self._tried:
            chosen = self._first
        elif len(self._tried) % _PROPOSAL_INTERVAL:
            chosen = self._random_set()
        else:
            sets = torch.stack([self._random_set() for _ in range(_CANDIDATES)])
            promise = upper_bound(torch.stack(self._tried[: self.tries]), torch.tensor(self._scores), sets)
            chosen = sets[int(promise.argmax())]
        self._tried.append(chosen)
        return self._sublayer_numbers(chosen)

    def record(self, score: float) -> None:
        """Record the score, from 0 to 1, of the set that ``candidate`` returned last."""
        self._scores.append(score)
        self.tries += 1
        self._misses += 1
        if score > self.score:
            self.score, self.best, self._misses = score, self._sublayer_numbers(self._tried[-1]), 0

    def _random_set(self) -> Tensor:
        chosen = torch.zeros(self._places)
        chosen[torch.randperm(self._places, generator=self._random)[: self._size]] = 1
        return chosen

    def _sublayer_numbers(self, chosen: Tensor) -> frozenset[int]:
        """Return the numbers of chosen sublayers: place i is sublayer i + 2, as the first layer is never left out."""
        return frozenset(2 + place for place in chosen.nonzero()[:, 0].tolist())


def upper_bound(tried: Tensor, scores: Tensor, sets: Tensor) -> Tensor:
    """Return mean + 2.576 standard deviations of a Gaussian process's prediction of the scores of ``sets``, [m].

    Its kernel is a Matérn kernel (5/2), its unit of length the mean distance of random sets; scores are normalised to
    mean 0 and deviation 1.

    Args:
        tried: [n, d], sets whose scores are known, 1 where a sublayer is left out.
        scores: [n], of these.
        sets: [m, d], random sets.
    """
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import Matern

    tried, scores, sets = tried.double(), scores.double(), sets.double()
    unit = float(torch.cdist(sets, sets).mean().clamp_min(1e-6))
    process = GaussianProcessRegressor(Matern(unit, nu=2.5), alpha=1e-3, optimizer=None)  # the kernel is not fitted
    process.fit(tried.numpy(), ((scores - scores.mean()) / scores.std(correction=0).clamp_min(1e-6)).numpy())
    mean, deviation = process.predict(sets.numpy(), return_std=True)
    return torch.from_numpy(mean + _DEVIATIONS * deviation)


@dataclass(kw_only=True)
class SwiftDrafter(ModelDrafter):
    """A drafter that runs the target without some sublayers, chosen while it decodes; nothing is trained.

    SWIFT (Xia et al. 2024, arXiv 2410.06916). After each step one more set of sublayers is tried on the newest tokens
    of the first sequence, in one pass: its score is the share of them that it predicts. All sequences use one set.

    Attributes:
        layers: the target without some sublayers; ``engine``, which may be one around it, runs it.
        search: what was tried, and the best; may be shared by drafters one after the other.
    """

    layers: SkippedSublayers
    search: SkipSearch
    name: str = "swift"
    shares_cache: bool = field(default=True, init=False)
    # Its time changes with its layers, which every text that it reads decides.
    provides = ModelDrafter.provides - {CHAIN}
    least: float = 0.8

    def __post_init__(self) -> None:
        self.layers.skipped = self.search.best

    def candidates(self, acceptance: Sequence[float], verification: Sequence[float]) -> list[DraftCandidate]:
        """Return no candidates: acceptance changes with the set of sublayers."""
        return []

    def accept(self, rows: list[Row], verified: Verified) -> None:
        super().accept(rows, verified)
        row = rows[0]
        if not self.search.over and len(row.tokens) - row.prompt_length >= _WINDOW:
            self.layers.skipped = self.search.candidate()
            self.search.record(self._predicted_share(row))
            self.layers.skipped = self.search.best

    def _predicted_share(self, row: Row) -> float:
        """Return the share of a row's newest tokens that the current set predicts; the cache is restored."""
        read, written = row.tokens[-_WINDOW - 1 : -1], row.tokens[-_WINDOW:]
        start = len(row.tokens) - _WINDOW - 1
        device = self.engine.device
        with self._cache.restoring(row.slot, start, _WINDOW):
            block = self._cache.block([row.slot], [start], _WINDOW)
            logits = self.engine.forward(self._cache, torch.tensor([read], device=device), block).logits[0]
        return float((argmax(logits) == torch.tensor(written, device=device)).float().mean())


class AdaptedExit(EngineWrapper):
    """An engine of the target's first layers followed by the later layers of a draft that has the same first ones.

    The first layers read and write the cache of the whole; the draft's own layers have one beside it.

    Args:
        exit_: the target's first layers. draft: its layers from ``exit_.first`` on run.
    """

    def __init__(self, exit_: EarlyExit, draft: FlatEngine):
        super().__init__(draft, f", the first {exit_.first} layers with the target")
        self._exit, self._draft = exit_, draft
        self._layers = range(exit_.first, draft.layers)
        self.limit, self.layers = exit_.limit, exit_.layers
        self._caches: WeakKeyDictionary[KVCache, KVCache] = WeakKeyDictionary()

    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """Run this engine on new tokens; see ``Engine.forward``."""
        with without_torch_function():
            h, _ = self._draft.run_layers(
                self.own_cache(cache), self._exit.states(cache, tokens, block), block, self._layers
            )
            return self._draft.output(h, keep)

    def read(self, cache: KVCache, states: Tensor, block: Block) -> None:
        """Run the draft's own layers to store their keys and values.

        Args:
            cache: the target's. states: [b, n, H], which enter these layers. block: slots of the tokens.
        """
        with without_torch_function():
            self._draft.run_layers(self.own_cache(cache), states, block, self._layers)

    def own_cache(self, cache: KVCache) -> KVCache:
        """Return the cache of the draft's own layers that belongs to the target's ``cache``."""
        if cache not in self._caches:
            # Twice the capacity: a block that starts at the end of one row may be as long as the tokens that another
            # row, which has not drafted for several steps, still has to read.
            self._caches[cache] = KVCache(self._draft.layers, cache.batch, 2 * cache.capacity)
        return self._caches[cache]


@dataclass(kw_only=True)
class KangarooDrafter(ModelDrafter):
    """A drafter with an early exit and layers of its own after it (Kangaroo, Liu et al. 2024, arXiv 2404.18911).

    Target and draft read a token's first layers once between them. The draft's own layers take the states of accepted
    tokens from the verification, and so the target's engine must report the states that enter the layer after the exit.

    Attributes:
        adapted: the layers; ``engine``, which may be one around it, runs them.
    """

    adapted: AdaptedExit
    shares_cache: bool = field(default=True, init=False)
    # Of each row: how many of its tokens the draft's own layers have read, and the states of those after them.
    _held: dict[int, int] = field(init=False, repr=False, default_factory=dict)
    _states: dict[int, Tensor] = field(init=False, repr=False, default_factory=dict)

    def start(self, rows: list[Row], state: TargetState) -> None:
        self._held, self._states = {}, {}
        super().start(rows, state)

    def join(self, rows: list[Row], state: TargetState) -> None:
        super().join(rows, state)
        self._held |= {row.index: 0 for row in rows}
        self._states |= {row.index: new for row, new in zip(rows, state.features, strict=True) if new is not None}

    def propose(self, rows: list[Row], budgets: list[int]) -> Proposal:
        self._read_states(rows)
        return super().propose(rows, budgets)

    def _read_states(self, rows: list[Row]) -> None:
        """Run the draft's own layers on the tokens accepted since they last drafted for these rows."""
        starts, news = [self._held[row.index] for row in rows], [self._states.pop(row.index, None) for row in rows]
        known = [new for new in news if new is not None]
        if not known:
            return
        states = pad_sequence([known[0][:0] if new is None else new for new in news], batch_first=True)
        block = self._cache.block([row.slot for row in rows], starts, states.shape[1])
        self.adapted.read(self._cache, states, block)
        for row, new in zip(rows, news, strict=True):
            self._held[row.index] += 0 if new is None else len(new)

    def accept(self, rows: list[Row], verified: Verified) -> None:
        super().accept(rows, verified)
        features = verified.output.features
        assert features is not None
        for i, (row, path) in enumerate(zip(rows, verified.paths, strict=True)):
            new, old = features[i, [0, *(node + 1 for node in path)]], self._states.get(row.index)
            self._states[row.index] = new if old is None else torch.cat((old, new))

    def select(self, slots: list[int]) -> None:
        self.adapted.own_cache(self._cache).select(slots)
