"""The decoder: plain and speculative decoding of a batch; the output is exact unless a lossy rule is given.

A step reads the last known token and the drafted ones in one forward pass of the target, accepts some of the drafted
tokens, and emits one token more. Plain decoding is the same step with nothing drafted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from peftlab.decoding.cache import Engine, KVCache, Output, depths_of, empty_cache, prefill, right_padded, shape_of
from peftlab.decoding.drafter import Drafter, Proposal, Row, TargetState, Verified
from peftlab.decoding.lossy import LossyRule, accept_lossy
from peftlab.decoding.policies import Fixed, Policy
from peftlab.decoding.sampling import Sampling, fork_generators
from peftlab.decoding.verify import TRAVERSAL, Accepted, Verifier, accept
from peftlab.errors import PeftlabError


@dataclass(frozen=True)
class Step:
    """One target step of one sequence.

    Attributes:
        drafted: tokens offered one after the other (levels of a tree), up to the end of the output.
        accepted: how many of them were accepted and emitted.
        emitted: tokens of the output that the step gave.
    """

    drafted: int
    accepted: int
    emitted: int


@dataclass
class Generation:
    """The output for one prompt.

    Attributes:
        tokens: new token ids, with the end-of-sequence token if there was one.
        reason: why it ended: "eos", "stop", "length" (max_new_tokens) or "context" (the model's limit).
        steps: what each target step did.
    """

    tokens: list[int] = field(default_factory=list)
    reason: str = "length"
    steps: list[Step] = field(default_factory=list)


@dataclass(frozen=True)
class StoppingCriteria:
    """The conditions that end an output.

    Attributes:
        max_new_tokens: its largest number of tokens.
        eos: token ids that end it; the token itself is part of the output.
        stops: output ids -> whether they are complete, asked at every token (``text_stream.stop_at``).
    """

    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    stops: Callable[[Sequence[int]], bool] | None = None


OnTokens = Callable[[int, list[int]], None]
"""(number of the prompt, its new tokens) -> None."""
Observe = Callable[[list[Row], Verified], None]
"""(the rows of a step, its verification) -> None."""


@torch.inference_mode()
def decode(
    target: Engine,
    prompts: Sequence[Sequence[int]],
    stopping: StoppingCriteria,
    drafter: Drafter | None = None,
    *,
    policy: Callable[[], Policy] = partial(Fixed, 4),
    sampling: Sampling | None = None,
    on_tokens: OnTokens | None = None,
    observe: Observe | None = None,
    group: bool = False,
    lossy: LossyRule | None = None,
    verifier: Verifier = TRAVERSAL,
    pool: int | None = None,
) -> list[Generation]:
    """Decode a batch of prompts of any lengths.

    Greedy output equals plain greedy decoding token for token (to rounding, and so in float32); sampled output
    follows the target's distribution. Rows of a batch do not influence one another.

    Args:
        target: the model whose output it is.
        prompts: token ids; at least one each. An encoder-decoder target reads them with its encoder.
        stopping: what ends an output. The target's context limit ends it too.
        drafter: proposes tokens; None is plain decoding.
        policy: makes each sequence its draft length policy. sampling: default greedy.
        on_tokens: called with a prompt's number and its new tokens after every step.
        observe: called with the rows of a step and its verification, before the new tokens are appended to the rows.
        group: take in each step only the largest set of rows of equal length, which need no scatter and no mask of
            their own (EXSPEC, arXiv 2510.22876); the others wait for a later step.
        lossy: accepts drafted tokens in place of exact verification; the output is then not the target's own.
        verifier: of sampled drafts; the output's law is the same by any.
        pool: sequences decoded together; the next prompt begins as soon as one of them ends. None: all.

    Returns:
        One output per prompt, in order.

    Raises:
        PeftlabError: no prompt, an empty prompt, one longer than the context, a token id out of range, or prompts that
            would have to wait for an encoder-decoder target.
    """
    sampling = sampling or Sampling()
    _check(target, prompts, stopping, pool)
    results = [Generation() for _ in prompts]
    rows: list[Row] = []
    for index, prompt in enumerate(prompts):
        generator = torch.Generator().manual_seed(sampling.seed + index)  # on the CPU: no synchronisation with a device
        source, begun = ([], list(prompt)) if target.encoder is None else (list(prompt), list(target.encoder.start))
        row = Row(index, len(rows), begun, len(begun), policy(), generator, source)
        if _remaining_tokens(target, row, stopping) > 0:
            rows.append(row)
        elif stopping.max_new_tokens:
            results[index].reason = "context"
    if rows:
        size = len(rows) if pool is None else pool
        how = (target, drafter, stopping, sampling)
        batch = _Batch(*how, rows[:size], rows[size:], results, on_tokens, observe, lossy, verifier)
        while batch.rows:
            batch.step(_largest_equal_group(batch.rows) if group else batch.rows)
    return results


def _check(target: Engine, prompts: Sequence[Sequence[int]], stopping: StoppingCriteria, pool: int | None) -> None:
    if not prompts:
        raise PeftlabError("prompts: none given")
    if stopping.max_new_tokens < 0:
        raise PeftlabError(f"max_new_tokens: {stopping.max_new_tokens} is negative")
    limit = target.limit if target.encoder is None else target.encoder.limit
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise PeftlabError(f"prompt {i}: empty; give at least one token, such as the tokenizer's BOS")
        if limit is not None and len(prompt) > limit:
            raise PeftlabError(f"prompt {i}: {len(prompt)} tokens, but the model's context is {limit}")
        if not (min(prompt) >= 0 and max(prompt) < target.vocab_size):
            wrong = next(t for t in prompt if not 0 <= t < target.vocab_size)
            raise PeftlabError(f"prompt {i}: token {wrong} is outside the vocabulary of {target.vocab_size}")
    if pool is not None and pool < 1:
        raise PeftlabError(f"pool: {pool} sequences; give 1 or more")
    if pool is not None and pool < len(prompts) and target.encoder is not None:
        raise PeftlabError(f"pool: {pool} of {len(prompts)} prompts; an encoder-decoder model reads all at once")


def _check_lossy(drafter: Drafter | None, lossy: LossyRule | None) -> None:
    if lossy is not None and drafter is not None and drafter.concurrent:
        raise PeftlabError(f"lossy {lossy.name}: drafter {drafter.name} verifies exactly only; leave one of them out")


def _remaining_tokens(target: Engine, row: Row, stopping: StoppingCriteria) -> int:
    """Return the number of tokens that a row may still emit by ``max_new_tokens`` and the target's context."""
    room = stopping.max_new_tokens - (len(row.tokens) - row.prompt_length)
    return room if target.limit is None else min(room, target.limit - len(row.tokens))


def _largest_equal_group(rows: list[Row]) -> list[Row]:
    """Return the largest set of rows of equal length; of sets of one size, the one with the shortest rows."""
    by_length: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        by_length[len(row.tokens)].append(row)
    return max(by_length.values(), key=lambda group: (len(group), -len(group[0].tokens)))


_SPARE_SLOTS = 64  # slots past the longest sequence, for drafted tokens that will be rejected


@dataclass
class _Batch:
    """The sequences that are being decoded together, their cache, and those that wait for a slot.

    A sequence that ends leaves ``rows``; its slot in every cache is taken by the next one that waits, or else removed.
    """

    target: Engine
    drafter: Drafter | None
    stopping: StoppingCriteria
    sampling: Sampling
    rows: list[Row]
    waiting: list[Row]
    results: list[Generation]
    on_tokens: OnTokens | None
    observe: Observe | None
    lossy: LossyRule | None
    verifier: Verifier
    cache: KVCache = field(init=False)
    _seeds: dict[int, torch.Generator] = field(init=False)

    def __post_init__(self) -> None:
        _check_lossy(self.drafter, self.lossy)
        every = [*self.rows, *self.waiting]
        self._seeds = {row.index: row.generator for row in every}
        longest = max(len(row.tokens) + _remaining_tokens(self.target, row, self.stopping) for row in every)
        self.cache = empty_cache(self.target, longest + _SPARE_SLOTS, [row.source for row in self.rows])
        state = self._read(self.rows)
        if self.drafter is not None:
            self.drafter.start(self.rows, state)

    def _read(self, rows: list[Row]) -> TargetState:
        """Read the prompts of some rows, all tokens but the last, into their slots of the cache."""
        read = prefill(self.target, self.cache, [row.tokens for row in rows], [row.slot for row in rows])
        return TargetState(self.cache, read.hidden, self.target.vocab_size, self.sampling, read.features)

    def step(self, rows: list[Row]) -> None:
        """Draft for some of the rows, verify the drafts, and append the emitted tokens."""
        for row, generator in zip(rows, self._generators(rows), strict=True):
            row.generator = generator
        verified = self._verify(rows, self._propose(rows))
        if self.observe is not None:
            self.observe(rows, verified)
        draft = verified.draft
        parents = [None] * len(rows) if draft.parents is None else draft.parents
        ahead = verified.next_was_drafted or [False] * len(rows)
        emitted = verified.paths, verified.next_tokens, ahead
        outcome = zip(rows, parents, draft.tokens.tolist(), *emitted, strict=True)
        ended = {row.index for row, *emitted in outcome if self._emit(row, *emitted)}
        if self.drafter is not None:
            self.drafter.accept(rows, verified)
        if ended:
            self._refill(ended)

    def _generators(self, rows: list[Row]) -> list[torch.Generator]:
        """Return a new generator for each row, seeded by one number of the row's own.

        So a row draws the same numbers in later steps, however many are drawn in this one.
        """
        return fork_generators((self._seeds[row.index] for row in rows), self.target.device)

    def _propose(self, rows: list[Row]) -> Proposal:
        if self.drafter is not None:
            budgets = [self._budget(row, len(rows)) for row in rows]
            if any(budgets):
                return self.drafter.propose(rows, budgets)
        return Proposal.empty(len(rows), self.target.device)

    def _budget(self, row: Row, batch: int) -> int:
        """Return the number of tokens to draft: at most as many as can be emitted with one more after them."""
        return max(
            0, min(row.policy.budget(batch), _remaining_tokens(self.target, row, self.stopping) - 1, _SPARE_SLOTS)
        )

    def _verify(self, rows: list[Row], draft: Proposal) -> Verified:
        last = right_padded([row.tokens[-1:] for row in rows], 1).to(self.target.device)
        draft.tokens = draft.tokens.to(self.target.device)
        # Places without a drafted token (-1) read token 0; verification never looks at their output.
        inputs = torch.cat((last, draft.tokens.clamp_min(0)), 1)  # [b, N+1]
        tree = None if draft.parents is None else shape_of(draft.parents)
        starts = [len(row.tokens) - 1 for row in rows]
        block = self.cache.block([row.slot for row in rows], starts, inputs.shape[1], tree)
        accepted = partial(self._accepted, rows)
        if self.drafter is None:
            output = self.target.forward(self.cache, inputs, block)
            return Verified(inputs, draft, output, *accepted(draft, output))
        output = self.drafter.read(self.target, self.cache, inputs, draft, block)
        return self.drafter.verify(rows, inputs, draft, output, accepted)

    def _accepted(self, rows: list[Row], draft: Proposal, output: Output) -> Accepted:
        generators = self._generators(rows)
        if self.lossy is not None:
            parents = [draft.parents_of(i) for i in range(len(rows))]
            return accept_lossy(self.lossy, output.logits, draft.tokens, parents, self.sampling, generators)
        drafted = draft.tokens, draft.probs, draft.parents
        return accept(output.logits, *drafted, self.sampling, generators, self.verifier)

    def _emit(
        self, row: Row, parents: Sequence[int] | None, tokens: list[int], path: list[int], following: int, ahead: bool
    ) -> bool:
        """Append a row's accepted tokens and the next token to its output; return whether the output has ended.

        Args:
            row: the sequence. parents, tokens: of its N drafted nodes. path: the accepted nodes.
            following: the next token. ahead: whether that one was drafted, too.
        """
        self.cache.commit(row.slot, len(row.tokens), path)
        depths = range(1, len(tokens) + 1) if parents is None else depths_of(parents)
        drafted = max((depth for depth, token in zip(depths, tokens, strict=True) if token >= 0), default=0)
        accepted = len(path) + ahead
        row.policy.update(drafted, accepted)
        run = [*(tokens[node] for node in path), following]
        result = self.results[row.index]
        kept, reason = self._end_of_output(result.tokens, run, row)
        result.tokens += run[:kept]
        row.tokens += run[:kept]
        # Tokens past the end were never output: neither they nor their acceptance count.
        whole = kept == len(run)
        result.steps.append(Step(drafted if whole else kept, accepted if whole else kept, kept))
        if self.on_tokens is not None:
            self.on_tokens(row.index, run[:kept])
        result.reason = reason or result.reason
        return reason is not None

    def _end_of_output(self, before: list[int], run: list[int], row: Row) -> tuple[int, str | None]:
        """Return the number of accepted tokens that are output, and the reason if the output ends there."""
        room = _remaining_tokens(self.target, row, self.stopping)
        for n, token in enumerate(run, start=1):
            if token in self.stopping.eos:
                return n, "eos"
            if self.stopping.stops is not None and self.stopping.stops(before + run[:n]):
                return n, "stop"
            if n == room:
                return n, "length" if len(before) + n == self.stopping.max_new_tokens else "context"
        return len(run), None

    def _refill(self, ended: set[int]) -> None:
        """Give the slots of ended sequences to waiting ones; remove the slots that are left from every cache."""
        free = [row.slot for row in self.rows if row.index in ended]
        joining, self.waiting = self.waiting[: len(free)], self.waiting[len(free) :]
        for row, slot in zip(joining, free, strict=False):
            row.slot = slot
        kept = [row for row in self.rows if row.index not in ended]
        self.rows = sorted([*kept, *joining], key=lambda row: row.slot)
        if joining:
            state = self._read(joining)
            if self.drafter is not None:
                self.drafter.join(joining, state)
        if self.rows and len(joining) < len(free):
            self._select([row.slot for row in self.rows])

    def _select(self, slots: list[int]) -> None:
        """Keep only these slots in every cache, and renumber the rows."""
        self.cache.select(slots)
        if self.drafter is not None:
            self.drafter.select(slots)
        for slot, row in enumerate(self.rows):
            row.slot = slot
