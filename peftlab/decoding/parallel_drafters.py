"""Parallel drafting: several tokens in one pass by masks (PARD, gated LoRA); drafting during verification (PEARL).

A gated LoRA makes a draft of the target itself: masks are read with the LoRA, tokens without, in a pass of its own or
in the verification pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from peftlab.decoding.cache import Block, Engine, EngineWrapper, KVCache, Output, empty_cache, right_padded, shape_of
from peftlab.decoding.decode import Accept, DraftCandidate, Drafter, Proposal, Row, TargetState, Verified, draft_chain
from peftlab.decoding.model_drafter import ModelDrafter, check_vocabulary, context_room, read_rows
from peftlab.decoding.recurrent import StateCache
from peftlab.decoding.sampling import Sampling
from peftlab.decoding.state_drafters import output_at, place_trees
from peftlab.decoding.table import CHAIN
from peftlab.errors import PeftlabError
from peftlab.methods.lora.layers import Gate


@dataclass(frozen=True)
class Masks:
    """The mask tokens that a draft model reads in place of the tokens that it drafts in one pass.

    Attributes:
        token: the mask's id. length: K, the tokens it was trained to write.
        noise: masks have no id of their own: they are drawn once, uniformly from the ids below ``token``.
    """

    token: int
    length: int
    noise: bool = False

    def ids(self, count: int) -> list[int]:
        """Return the ids of the first ``count`` masks."""
        if not self.noise:
            return [self.token] * count
        return torch.randint(self.token, (count,), generator=torch.Generator().manual_seed(0)).tolist()

    def check_gamma(self, gamma: int) -> None:
        """Raise ``PeftlabError`` for more tokens in one pass than the draft was trained to write."""
        if gamma > self.length:
            raise PeftlabError(f"--gamma {gamma}: the draft was trained to write {self.length} tokens in one pass")


@dataclass
class ParallelDrafter(Drafter):
    """A drafter whose model reads n - 1 masks after the last token and drafts n tokens in that one pass (PARD).

    The masks are not kept: the next pass writes over them. A token is drafted without knowing those drafted before it.
    γ counts drafted tokens: a chain is drawn place by place and has at most K; the nodes of a tree are the γ most
    probable paths of the ``width`` best tokens at each of K places, by the product of their probabilities, row by row.

    Attributes:
        engine: of the draft. masks: see ``Masks``. width: choices of each place; 1 is a chain.
        shares_cache: the draft reads tokens as the target does, and masks as it alone does: it needs no cache of its
            own, and what it predicts behind the last token is what the target predicts.
        name: for reports.
    """

    engine: Engine
    masks: Masks
    width: int = 1
    shares_cache: bool = False
    name: str = "pard or gated_lora"
    _cache: KVCache = field(init=False, repr=False)
    _sampling: Sampling = field(init=False, repr=False)
    _read: dict[int, int] = field(init=False, repr=False, default_factory=dict)  # of each row: tokens in the cache

    @property
    def provides(self) -> frozenset[str]:
        return frozenset({CHAIN} if self.width == 1 else ())

    @property
    def has_logits(self) -> bool:
        return self.width == 1

    @property
    def chain_limit(self) -> int | None:
        return self.masks.length if self.width == 1 else None

    def start(self, rows: list[Row], state: TargetState) -> None:
        check_vocabulary(self.engine, state)
        if self.engine.encoder is not None or state.cache.context is not None:
            raise PeftlabError("draft: a draft that writes several tokens in one pass is for decoders alone")
        self._sampling, self._read = state.sampling, {}
        self._cache = state.cache
        if not self.shares_cache:
            # Twice the capacity: a block that starts at the end of one row may be as long as the tokens that another
            # row, which has not read for several steps, still has to read.
            capacity = 2 * state.cache.capacity + self.masks.length
            self._cache = empty_cache(self.engine, capacity, [row.source for row in rows])
        self.join(rows, state)

    def join(self, rows: list[Row], state: TargetState) -> None:
        self._read |= {row.index: len(row.tokens) - 1 for row in rows}
        if not self.shares_cache:
            read_rows(self.engine, self._cache, rows)

    @property
    def _first_is_certain(self) -> bool:
        """Return whether the first token is the target's own choice, so that no other first token is drafted."""
        return self.shares_cache and self._sampling.greedy

    def _room(self, row: Row) -> int:
        """Return the number of places after a row for which tokens can be drafted."""
        return context_room(self.engine, row, self.masks.length)

    def propose(self, rows: list[Row], budgets: list[int]) -> Proposal:
        rooms = [self._room(row) for row in rows]
        chain = self.width == 1
        budgets = [min(b, places) if chain else b * (places > 0) for b, places in zip(budgets, rooms, strict=True)]
        if not any(budgets):
            return Proposal.empty(len(rows), self.engine.device)
        output = self._mask_outputs(rows, min(max(budgets), max(rooms)))
        if not chain:
            return place_trees(output.logits, budgets, self.width, rooms, certain=self._first_is_certain)

        def following(x: Tensor, before: Output, drawn: int) -> Output:
            return output_at(output, drawn + 1)

        return draft_chain(rows, budgets, output_at(output, 0), following, self._sampling)

    def _mask_outputs(self, rows: list[Row], n: int) -> Output:
        """Read each row's new tokens and n - 1 masks; return the output of the last n places, logits [b, n, V]."""
        starts = [len(row.tokens) - 1 if self.shares_cache else self._read[row.index] for row in rows]
        new = [row.tokens[start:] for row, start in zip(rows, starts, strict=True)]
        masks = self.masks.ids(n - 1)
        longest = max(map(len, new)) + n - 1
        tokens = right_padded([[*tokens, *masks] for tokens in new], longest).to(self.engine.device)
        keep = sorted({len(tokens) - 1 + place for tokens in new for place in range(n)})
        block = self._cache.block([row.slot for row in rows], starts, longest)
        output = self.engine.forward(self._cache, tokens, block, keep)
        self._read |= {row.index: len(row.tokens) for row in rows}
        first = torch.tensor([keep.index(len(tokens) - 1) for tokens in new], device=self.engine.device)
        each = torch.arange(len(rows), device=self.engine.device)[:, None]
        # A row's n places are consecutive, and ``keep`` has all of them in order: they are consecutive there, too.
        here = first[:, None] + torch.arange(n, device=self.engine.device)
        return Output(output.logits[each, here], output.hidden[each, here])

    def candidates(self, acceptance: Sequence[float], verification: Sequence[float]) -> list[DraftCandidate]:
        """Return chains, each drafted in one pass; none for trees: their acceptance is unknown (``Drafter``)."""
        if self.width > 1:
            return []
        return [replace(draft, effort=1.0) for draft in super().candidates(acceptance, verification)]

    def select(self, slots: list[int]) -> None:
        if not self.shares_cache:
            self._cache.select(slots)


class MaskedPassEngine(EngineWrapper):
    """An engine that reads the first token of each row without the LoRA, and the masks after it with the LoRA.

    Args:
        engine: the target's, with a gated LoRA. gate: of the LoRA.
    """

    def __init__(self, engine: Engine, gate: Gate):
        super().__init__(engine, ", masks with a LoRA")
        self._gate = gate

    def forward(self, cache: KVCache, tokens: Tensor, block: Block, keep: list[int] | None = None) -> Output:
        """Run this engine on new tokens; see ``Engine.forward``."""
        masks = torch.ones_like(tokens, dtype=torch.bool)
        masks[:, 0] = False
        with self._gate.over(masks):
            return self._engine.forward(cache, tokens, block, keep)


@dataclass(kw_only=True)
class OnePassDrafter(ParallelDrafter):
    """A drafter by a gated LoRA whose masks are read in the verification pass (Samragh et al. 2025, arXiv 2507.11851).

    A step reads the last token, N drafted ones, and k masks behind each of them: (N + 1)(k + 1) rows. Whatever is
    accepted, k tokens are drafted for the next step: the masks behind the last accepted one, the first of which stands
    in the place of the token that verification adds, predict those after it. The first step of a sequence drafts
    nothing.

    Attributes:
        gate: of the target's LoRA. masks: k is one less than its ``length``.
    """

    gate: Gate
    name: str = "one_pass"
    provides = frozenset[str]()  # a longer draft also lengthens the verification pass, by its masks
    shares_cache: bool = field(default=True, init=False)
    _node_masks: Output | None = field(init=False, repr=False, default=None)  # of each node's masks: [b, N+1, k, ...]
    _row_masks: dict[int, Output] = field(init=False, repr=False, default_factory=dict)  # of each row's: [k, ...]
    _wanted: int = field(init=False, repr=False, default=1)

    def __post_init__(self) -> None:
        self.masks = replace(self.masks, length=self.masks.length - 1)

    def start(self, rows: list[Row], state: TargetState) -> None:
        self._row_masks = {}
        super().start(rows, state)

    def propose(self, rows: list[Row], budgets: list[int]) -> Proposal:
        self._wanted = max(budgets)
        return super().propose(rows, budgets)

    @property
    def _first_is_certain(self) -> bool:
        return False

    def _room(self, row: Row) -> int:
        return min(super()._room(row), len(self._row_masks[row.index].logits)) if row.index in self._row_masks else 0

    def _mask_outputs(self, rows: list[Row], n: int) -> Output:
        """Return the output of the masks that the last verification read, logits [b, n, V]; nothing is read."""
        blank = next(iter(self._row_masks.values()))
        each = [self._row_masks.get(row.index, blank) for row in rows]
        logits, hidden = ([getattr(found, name)[:n] for found in each] for name in ("logits", "hidden"))
        return Output(pad_sequence(logits, batch_first=True), pad_sequence(hidden, batch_first=True))

    def read(self, target: Engine, cache: KVCache, inputs: Tensor, draft: Proposal, block: Block) -> Output:
        b, nodes = inputs.shape
        free = cache.capacity - max(block.starts)
        k = min(self.masks.length, self._wanted, free // nodes - 1)
        if k < 1:
            self._node_masks = None
            return target.forward(cache, inputs, block)
        # Mask m behind node j, of which node 0 is the last known token, is node N + jk + m of the tree.
        behind = [j - 1 if m == 0 else nodes - 2 + j * k + m for j in range(nodes) for m in range(k)]
        tree = shape_of([(*draft.parents_of(i), *behind) for i in range(b)])
        masks = torch.tensor(self.masks.ids(k) * nodes, device=inputs.device).expand(b, -1)
        tokens = torch.cat((inputs, masks), 1)
        gated = torch.arange(tokens.shape[1], device=inputs.device) >= nodes
        with self.gate.over(gated.expand(b, -1)):
            output = target.forward(cache, tokens, replace(block, n=tokens.shape[1], tree=tree))
        logits, hidden = (x[:, nodes:].unflatten(1, (nodes, k)) for x in (output.logits, output.hidden))
        self._node_masks = Output(logits, hidden)
        features = None if output.features is None else output.features[:, :nodes]
        return Output(output.logits[:, :nodes], output.hidden[:, :nodes], features)

    def accept(self, rows: list[Row], verified: Verified) -> None:
        for i, (row, path) in enumerate(zip(rows, verified.paths, strict=True)):
            self._row_masks.pop(row.index, None)
            if self._node_masks is not None:
                last = path[-1] + 1 if path else 0
                self._row_masks[row.index] = Output(self._node_masks.logits[i, last], self._node_masks.hidden[i, last])

    def candidates(self, acceptance: Sequence[float], verification: Sequence[float]) -> list[DraftCandidate]:
        """Return no candidates: a step also reads masks, so that its time is not C(n+1)."""
        return []


@dataclass(frozen=True)
class _Chain:
    """The drafted tokens [n] of a row, their distributions and logits [n, V]; None as in ``Proposal``."""

    tokens: Tensor
    probs: Tensor | None
    logits: Tensor | None

    def part(self, begin: int, end: int | None = None) -> _Chain:
        """Return the part of the chain from ``begin`` up to ``end``.

        Args:
            begin, end: places; ``end`` is left out, and None is the chain's end.
        """
        probs, logits = (None if z is None else z[begin:end] for z in (self.probs, self.logits))
        return _Chain(self.tokens[begin:end], probs, logits)

    def join(self, other: _Chain) -> _Chain:
        """Return this chain followed by the other."""
        if not len(self.tokens) or not len(other.tokens):
            return self if len(self.tokens) else other
        pairs = (self.tokens, other.tokens), (self.probs, other.probs), (self.logits, other.logits)
        tokens, probs, logits = (None if a is None or b is None else torch.cat((a, b)) for a, b in pairs)
        assert tokens is not None
        return _Chain(tokens, probs, logits)


@dataclass
class PearlDrafter(ModelDrafter):
    """A drafter whose model drafts in a thread of its own while the target verifies.

    PEARL (Liu et al. 2024, arXiv 2408.11850). In each phase the target reads the tokens that await verification, and a
    second thread drafts the γ after them. The first of these needs no further step of the target, which has the
    distribution for it: it is verified at once. If it and all before it are accepted, the other γ - 1 await
    verification in the next phase (post-verify), else nothing does, and the next phase verifies the first new token
    alone (pre-verify). ``theory.pearl_tokens_per_phase`` gives the expected tokens.

    Drafted tokens are drawn as ever, and verified against what they were drawn from, so that the output is exact.
    """

    name: str = "pearl"
    _thread: ThreadPoolExecutor = field(init=False, repr=False)
    _drafting: Future[Proposal] | None = field(init=False, repr=False, default=None)
    _waiting: dict[int, _Chain] = field(init=False, repr=False, default_factory=dict)
    _new: dict[int, _Chain] = field(init=False, repr=False, default_factory=dict)

    def start(self, rows: list[Row], state: TargetState) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._drafting, self._waiting, self._new = None, {}, {}
        super().start(rows, state)
        if isinstance(self._cache, StateCache):
            raise PeftlabError("drafter pearl: takes tokens back that it has read; a state-space draft cannot")

    def propose(self, rows: list[Row], budgets: list[int]) -> Proposal:
        """Return the tokens that await verification, and start to draft those after them in the thread."""
        waiting = [self._waiting.pop(row.index, self._empty_chain()) for row in rows]
        ahead = [
            replace(row, tokens=row.tokens + chain.tokens.tolist()) for row, chain in zip(rows, waiting, strict=True)
        ]
        free_slots = self._cache.capacity - max(len(row.tokens) for row in ahead)
        self._drafting = self._thread.submit(
            self._draft, ahead, [max(0, min(budget, free_slots)) for budget in budgets]
        )
        return _stack_chains(waiting)

    def _empty_chain(self) -> _Chain:
        return _Chain(torch.zeros(0, dtype=torch.long, device=self.engine.device), None, None)

    def _draft(self, rows: list[Row], budgets: list[int]) -> Proposal:
        with torch.inference_mode():  # inference mode is set per thread
            return super().propose(rows, budgets)

    @property
    def concurrent(self) -> bool:
        return True

    def verify(self, rows: list[Row], inputs: Tensor, draft: Proposal, output: Output, accepted: Accept) -> Verified:
        """Wait for the new tokens, and verify the first of each row together with those that awaited verification."""
        if self._drafting is None:
            return super().verify(rows, inputs, draft, output, accepted)
        new, self._drafting = self._drafting.result(), None
        chains, read = [], (draft.tokens >= 0).sum(1).tolist()
        for i, row in enumerate(rows):
            self._new[row.index] = _row_chain(new, i)
            chains.append(_row_chain(draft, i).join(self._new[row.index].part(0, 1)))
        every = _stack_chains(chains)
        # The first new token was not read, so that there is no output after it: the last place is repeated, and a token
        # drawn from it is replaced below.
        last = output.logits[:, -1:]
        padded = Output(torch.cat((output.logits, last), 1)[:, : every.tokens.shape[1] + 1], output.hidden)
        paths, following = accepted(every, padded)
        ahead = [len(path) > count for path, count in zip(paths, read, strict=True)]
        for i, path in enumerate(paths):
            if ahead[i]:
                following[i] = int(every.tokens[i, path.pop()])
        return Verified(inputs, every, padded, paths, following, ahead)

    def accept(self, rows: list[Row], verified: Verified) -> None:
        known = []
        for i, row in enumerate(rows):
            new = self._new.pop(row.index, self._empty_chain())
            waiting = new.part(1) if verified.next_was_drafted and verified.next_was_drafted[i] else self._empty_chain()
            self._waiting[row.index] = waiting
            known.append(replace(row, tokens=row.tokens + waiting.tokens.tolist()))
        super().accept(known, verified)


def _row_chain(proposal: Proposal, row: int) -> _Chain:
    tokens = proposal.tokens[row]
    n = int((tokens >= 0).sum())
    probs, logits = (None if z is None else z[row, :n] for z in (proposal.probs, proposal.logits))
    return _Chain(tokens[:n], probs, logits)


def _stack_chains(chains: list[_Chain]) -> Proposal:
    """Return a proposal of b chains of several lengths, padded with -1."""
    tokens = pad_sequence([chain.tokens for chain in chains], batch_first=True, padding_value=-1)
    if not tokens.shape[1]:
        return Proposal(tokens)
    some = next(chain for chain in chains if len(chain.tokens))
    return Proposal(
        tokens,
        _pad_rows([chain.probs for chain in chains], some.probs),
        _pad_rows([chain.logits for chain in chains], some.logits),
    )


def _pad_rows(values: list[Tensor | None], like: Tensor | None) -> Tensor | None:
    if like is None:
        return None
    return pad_sequence([like[:0] if value is None else value for value in values], batch_first=True)
