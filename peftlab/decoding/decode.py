"""The decoder: plain and speculative decoding of a batch; the output is exact unless a lossy rule is given.

A step reads the last known token and the drafted ones in one forward pass of the target, accepts some of the drafted
tokens, and emits one token more. Plain decoding is the same step with nothing drafted. A ``Drafter`` proposes what is
drafted; ``draft_chain`` is the loop of every draft that computes one token after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from operator import mul
from typing import Protocol

import torch
from torch import Tensor

from peftlab.decoding.cache import (
    Block,
    Engine,
    KVCache,
    Output,
    depths_of,
    empty_cache,
    prefill,
    right_padded,
    shape_of,
)
from peftlab.decoding.sampling import (
    TRAVERSAL,
    Accepted,
    LossyRule,
    RowRandomSource,
    Sampling,
    Verifier,
    accept,
    accept_lossy,
    argmax,
    fork_generators,
)
from peftlab.decoding.table import MOST_DRAFTED
from peftlab.errors import PeftlabError
from peftlab.models.image_tokens import LIMIT, text_id


class Policy(Protocol):
    """The interface of a draft length policy, which decides for one sequence; a class that inherits has its defaults.

    A policy may stop after a drafted token, but never withdraws one: to withdraw a token because of its own q(x) would
    bias the output, which would no longer follow p.

    Attributes:
        needs_confidence: whether ``should_continue`` is called after each drafted token (it costs a softmax).
    """

    needs_confidence: bool = False

    def budget(self, batch: int) -> int:
        """Return the most tokens to draft in the coming step, in which ``batch`` sequences are decoded together."""
        ...

    def should_continue(self, confidence: float, hidden: Tensor) -> bool:
        """Return whether to draft another token after token x; by default always.

        Args:
            confidence: q(x), the draft's probability of x. hidden: [H], the draft's state from which x was drawn.
        """
        return True

    def update(self, drafted: int, accepted: int) -> None:
        """Learn from a step, by default nothing.

        Args:
            drafted: tokens. accepted: how many of them.
        """
        return


@dataclass
class Fixed(Policy):
    """A policy that drafts γ tokens in every step.

    Raises:
        PeftlabError: γ is outside 1..64.
    """

    gamma: int

    def __post_init__(self) -> None:
        if self.gamma < 1:
            raise PeftlabError(f"gamma: {self.gamma} drafts nothing; give 1 or more, or leave the draft out")
        if self.gamma > MOST_DRAFTED:
            raise PeftlabError(f"gamma: {self.gamma}; a step drafts at most {MOST_DRAFTED} tokens")

    def budget(self, batch: int) -> int:
        return self.gamma


class StepTimes(Protocol):
    """The seconds of a step of target and draft, by the number of sequences."""

    def target(self, batch: int, tokens: int) -> float:
        """Return the seconds of a target step.

        Args:
            batch: sequences. tokens: of each.
        """
        ...

    def draft(self, batch: int, tokens: int) -> float:
        """Return the seconds of drafting.

        Args:
            batch: sequences. tokens: drafted for each, 1 or more.
        """
        ...


@dataclass(frozen=True)
class PolicyInputs:
    """The inputs from which policies are made.

    Attributes:
        gamma: tokens per step, at most or at first. head: the draft's hidden state [H] -> p̂. times: of a step.
    """

    gamma: int
    head: Callable[[Tensor], float] | None = None
    times: StepTimes | None = None


PolicyFactory = Callable[[], Policy]
"""Makes the policy of one sequence."""


def fixed(parts: PolicyInputs, n: float | None) -> PolicyFactory:
    """Return a factory of ``Fixed`` policies.

    Args:
        parts: shared inputs. n: tokens; None: γ.
    """
    return partial(Fixed, parts.gamma if n is None else int(n))


@dataclass
class Row:
    """A sequence that is being decoded.

    Attributes:
        index: which of the caller's prompts it continues.
        slot: its row in every cache.
        tokens: prompt and output so far; no cache contains the last one yet. With an encoder-decoder target the
            output alone, behind the tokens that every output begins with.
        prompt_length: tokens before the output.
        policy: its draft length.
        generator: its randomness in the drafting of a step.
        source: the prompt that an encoder-decoder target's encoder reads; empty with any other target.
        images: the prompt as a target reads it that sees, its ids of image tokens telling which image each is of
            (``models.image_tokens``); empty where it has none. ``tokens`` have the placeholder's id.
    """

    index: int
    slot: int
    tokens: list[int]
    prompt_length: int
    policy: Policy
    generator: torch.Generator
    source: list[int] = field(default_factory=list)
    images: list[int] = field(default_factory=list)

    @property
    def text(self) -> list[int]:
        """Return the tokens, after the encoder's prompt if there is one."""
        return self.source + self.tokens if self.source else self.tokens


@dataclass
class Proposal:
    """Proposed tokens for b rows.

    Attributes:
        tokens: [b, N]; -1 where a row has fewer.
        probs: [b, N, V], what each token was drawn from given its elder siblings, zeros at -1; None if the draft is
            deterministic.
        logits: [b, N, V] of the draft model before temperature, for measurements; None without a model.
        parents: of the N nodes of each row's tree, -1 for the root, a parent before its children; None: all are chains.
    """

    tokens: Tensor
    probs: Tensor | None = None
    logits: Tensor | None = None
    parents: Sequence[tuple[int, ...]] | None = None

    def parents_of(self, row: int) -> tuple[int, ...]:
        """Return the parents of a row's nodes; those of a chain are -1, 0, 1, ..."""
        return tuple(range(-1, self.tokens.shape[1] - 1)) if self.parents is None else self.parents[row]

    @classmethod
    def empty(cls, b: int, device: torch.device) -> Proposal:
        """Return a proposal without tokens for b rows.

        Args:
            b: rows. device: of the tensors.
        """
        return cls(torch.full((b, 0), -1, device=device))


@dataclass
class Verified:
    """The target's verdict on a draft.

    Attributes:
        inputs: [b, N+1], the last known token of each row and the drafted ones, which the target read.
        draft: the draft.
        output: the target's output for the inputs.
        paths: accepted nodes of each row, as indices into the draft.
        next_tokens: the token after each path.
        next_was_drafted: of each row, whether that token was drafted, too, and accepted (``PearlDrafter``); None: none.
        kept: of each row, how many of the path's tokens and the next one are output: fewer where it ends among them.
    """

    inputs: Tensor
    draft: Proposal
    output: Output
    paths: list[list[int]]
    next_tokens: list[int]
    next_was_drafted: list[bool] | None = None
    kept: list[int] = field(default_factory=list)


@dataclass
class TargetState:
    """The target's state after it has read all prompts but their last tokens.

    Attributes:
        cache: the target's.
        hidden: last hidden state of each row, [H], for a drafter that reads it (``Drafter.reads_hidden``); None for a
            prompt of one token.
        vocab_size: V of the target.
        sampling: how tokens are chosen.
        features: of each row's tokens but the last, [length - 1, F]; None for a prompt of one token, or where the
            engine reports none (``Output.features``).
    """

    cache: KVCache
    hidden: list[Tensor | None]
    vocab_size: int
    sampling: Sampling
    features: list[Tensor | None] = field(default_factory=list)


@dataclass(frozen=True)
class DraftCandidate:
    """A draft that the target could verify in a step.

    Attributes:
        gamma: its tokens. tokens: expected per step. effort: of drafting it, in a unit that depends on the drafter.
        width: the ``--width`` that makes it; None: none does. own: whether the drafter makes it with its own width.
    """

    gamma: int
    tokens: float
    effort: float
    width: int | None = None
    own: bool = True


Accept = Callable[[Proposal, Output], Accepted]
"""A draft and the target's output for it -> the accepted nodes of each row, and the token after them."""


class Drafter(Protocol):
    """The interface of drafters, which propose the next tokens; a class that inherits from it has its defaults.

    Attributes:
        name: for reports.
        provides: the properties that policies of ``decoding.table.POLICIES`` may need of a drafter.
        concurrent: whether it drafts while the target verifies. Its time is then no part of a step's, and tokens that
            the target has not read are verified exactly or not at all.
        has_logits: whether it proposes chains with the logits of each token's distribution (``Proposal.logits``).
        chain_limit: tokens of a chain that it drafts at most; None: any number.
        reads_hidden: whether it reads the target's state of a prompt (``TargetState.hidden``).
        acceptance: of a draft that estimates it, the state from which a token is drafted [H] -> the probability that
            the token is accepted; None: it does not.
    """

    @property
    def name(self) -> str: ...

    @property
    def provides(self) -> frozenset[str]:
        return frozenset()

    @property
    def concurrent(self) -> bool:
        return False

    @property
    def has_logits(self) -> bool:
        return False

    @property
    def reads_hidden(self) -> bool:
        return False

    @property
    def chain_limit(self) -> int | None:
        return None

    @property
    def acceptance(self) -> Callable[[Tensor], float] | None:
        return None

    def candidates(self, acceptance: Sequence[float], verification: Sequence[float]) -> list[DraftCandidate]:
        """Return the drafts of 1, 2, ... tokens whose acceptance is known; by default chains, drafted token by token.

        Args:
            acceptance: of the first, second, ... token of a step, where those before it were accepted.
            verification: C(1), C(2), ...: of as many tokens as a draft may have, and one more.
        """
        reached = accumulate(acceptance, mul)  # the probability that all of the first n tokens are accepted
        return [DraftCandidate(n, tokens, n) for n, tokens in enumerate(accumulate(reached, initial=1.0)) if n]

    def start(self, rows: list[Row], state: TargetState) -> None:
        """Begin new sequences; earlier ones are finished.

        Args:
            rows: the sequences. state: the target's, after their prompts.
        """
        ...

    def join(self, rows: list[Row], state: TargetState) -> None:
        """Begin further sequences, in slots of sequences that have ended.

        Args:
            rows: the further sequences. state: the target's, after their prompts.
        """
        ...

    def propose(self, rows: list[Row], budgets: list[int]) -> Proposal:
        """Propose tokens that may follow each row.

        Args:
            rows: the sequences of a step. budgets: of each row, how many tokens at most; one of them is 1 or more.
        """
        ...

    def read(self, target: Engine, cache: KVCache, inputs: Tensor, draft: Proposal, block: Block) -> Output:
        """Run the target on the last known tokens and the draft; a drafter may have it read more after them.

        Args:
            target, cache: the target and its cache. inputs: [b, N+1], the last known token and the drafted ones.
            draft: the proposal. block: the slots of the inputs.

        Returns:
            The output for the inputs.
        """
        return target.forward(cache, inputs, block)

    def verify(self, rows: list[Row], inputs: Tensor, draft: Proposal, output: Output, accepted: Accept) -> Verified:
        """Return the verification of a draft; by default of the tokens that the target has read, and of no others.

        Args:
            rows: the sequences of the step. inputs: [b, N+1], read by the target. draft: the proposal among them.
            output: the target's, for the inputs. accepted: verifies a draft.
        """
        return Verified(inputs, draft, output, *accepted(draft, output))

    def accept(self, rows: list[Row], verified: Verified) -> None:
        """Learn from the verification, by default nothing; ``rows`` contain their new tokens already.

        What was verified may contain more than this drafter proposed, or nothing of it.

        Args:
            rows: the sequences of the step. verified: accepted tokens and the target's output.
        """
        return

    def select(self, slots: list[int]) -> None:
        """Keep only the sequences in these slots, in this order; by default a drafter keeps nothing by slots."""
        return


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
        stops: output ids -> whether they are complete, asked at every token (``generation.stop_at``).
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
    lossy: LossyRule | None = None,
    verifier: Verifier = TRAVERSAL,
    pool: int | None = None,
) -> list[Generation]:
    """Decode a batch of prompts of any lengths.

    Greedy output equals plain greedy decoding token for token (to rounding, and so in float32); sampled output
    follows the target's distribution. Rows of a batch do not influence one another, but for the random numbers of
    samples whose drafter learns from all rows (``TokenRecycling``).

    Args:
        target: the model whose output it is.
        prompts: token ids; at least one each. An encoder-decoder target reads them with its encoder.
        stopping: what ends an output. The target's context limit ends it too.
        drafter: proposes tokens; None is plain decoding.
        policy: makes each sequence its draft length policy. sampling: default greedy.
        on_tokens: called with a prompt's number and its new tokens after every step.
        observe: called with the rows of a step and its verification, before the new tokens are appended to the rows.
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
        images = begun if max(begun) >= LIMIT else []
        begun = [text_id(token) for token in begun] if images else begun
        row = Row(index, len(rows), begun, len(begun), policy(), generator, source, images)
        if _remaining_tokens(target, row, stopping) > 0:
            rows.append(row)
        elif stopping.max_new_tokens:
            results[index].reason = "context"
    if rows:
        size = len(rows) if pool is None else pool
        how = (target, drafter, stopping, sampling)
        batch = _Batch(*how, rows[:size], rows[size:], results, on_tokens, observe, lossy, verifier)
        while batch.rows:
            batch.step()
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
        tokens = [text_id(token) for token in prompt] if max(prompt) >= LIMIT else prompt
        if not (min(tokens) >= 0 and max(tokens) < target.vocab_size):
            wrong = next(t for t in prompt if not 0 <= text_id(t) < target.vocab_size)
            raise PeftlabError(f"prompt {i}: token {wrong} is outside the vocabulary of {target.vocab_size}")
    if pool is not None and pool < 1:
        raise PeftlabError(f"pool: {pool} sequences; give 1 or more")
    if pool is not None and pool < len(prompts) and target.encoder is not None:
        raise PeftlabError(f"pool: {pool} of {len(prompts)} prompts; an encoder-decoder model reads all at once")


def _remaining_tokens(target: Engine, row: Row, stopping: StoppingCriteria) -> int:
    """Return the number of tokens that a row may still emit by ``max_new_tokens`` and the target's context."""
    room = stopping.max_new_tokens - (len(row.tokens) - row.prompt_length)
    return room if target.limit is None else min(room, target.limit - len(row.tokens))


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
        if self.lossy is not None and self.drafter is not None and self.drafter.concurrent:
            name = self.drafter.name
            raise PeftlabError(f"lossy {self.lossy.name}: drafter {name} verifies exactly only; leave one of them out")
        every = [*self.rows, *self.waiting]
        self._seeds = {row.index: row.generator for row in every}
        longest = max(len(row.tokens) + _remaining_tokens(self.target, row, self.stopping) for row in every)
        self.cache = empty_cache(self.target, longest + MOST_DRAFTED, [row.source for row in self.rows])
        state = self._read(self.rows)
        if self.drafter is not None:
            self.drafter.start(self.rows, state)

    def _read(self, rows: list[Row]) -> TargetState:
        """Read the prompts of some rows, all tokens but the last, into their slots of the cache."""
        texts = [row.images or row.tokens for row in rows]
        last = self.drafter is not None and self.drafter.reads_hidden
        read = prefill(self.target, self.cache, texts, [row.slot for row in rows], last=last)
        return TargetState(self.cache, read.hidden, self.target.vocab_size, self.sampling, read.features)

    def step(self) -> None:
        """Draft for all rows, verify the drafts, and append the emitted tokens."""
        rows = self.rows
        for row, generator in zip(rows, self._generators(rows), strict=True):
            row.generator = generator
        verified = self._verify(rows, self._propose(rows))
        draft, tokens = verified.draft, verified.draft.tokens.tolist()
        runs = [
            [*(drafted[node] for node in path), following]
            for drafted, path, following in zip(tokens, verified.paths, verified.next_tokens, strict=True)
        ]
        ends = [self._end_of_output(row, run) for row, run in zip(rows, runs, strict=True)]
        verified.kept = [kept for kept, _ in ends]
        if self.observe is not None:
            self.observe(rows, verified)
        parents = [None] * len(rows) if draft.parents is None else draft.parents
        ahead = verified.next_was_drafted or [False] * len(rows)
        outcome = zip(rows, parents, tokens, verified.paths, ahead, runs, ends, strict=True)
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
        """Return what the drafter proposes: at most as many tokens as can be emitted with one more after them."""
        if self.drafter is not None:
            rooms = [_remaining_tokens(self.target, row, self.stopping) - 1 for row in rows]
            policy_budgets = [row.policy.budget(len(rows)) for row in rows]
            budgets = [max(0, min(*both, MOST_DRAFTED)) for both in zip(policy_budgets, rooms, strict=True)]
            if any(budgets):
                return self.drafter.propose(rows, budgets)
        return Proposal.empty(len(rows), self.target.device)

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
            drawn = draft.tokens, draft.probs, parents
            return accept_lossy(self.lossy, output.logits, *drawn, self.sampling, generators)
        drafted = draft.tokens, draft.probs, draft.parents
        return accept(output.logits, *drafted, self.sampling, generators, self.verifier)

    def _emit(
        self,
        row: Row,
        parents: Sequence[int] | None,
        tokens: list[int],
        path: list[int],
        ahead: bool,
        run: list[int],
        end: tuple[int, str | None],
    ) -> bool:
        """Append a row's accepted tokens and the next token to its output; return whether the output has ended.

        Args:
            row: the sequence. parents, tokens: of its N drafted nodes. path: the accepted nodes.
            ahead: whether the next token was drafted, too. run: the path's tokens and the next one.
            end: as ``_end_of_output`` returned it.
        """
        self.cache.commit(row.slot, len(row.tokens), path)
        depths = range(1, len(tokens) + 1) if parents is None else depths_of(parents)
        drafted = max((depth for depth, token in zip(depths, tokens, strict=True) if token >= 0), default=0)
        accepted = len(path) + ahead
        row.policy.update(drafted, accepted)
        result, (kept, reason) = self.results[row.index], end
        result.tokens += run[:kept]
        row.tokens += run[:kept]
        # Tokens past the end were never output: neither they nor their acceptance count.
        whole = kept == len(run)
        result.steps.append(Step(drafted if whole else kept, accepted if whole else kept, kept))
        if self.on_tokens is not None:
            self.on_tokens(row.index, run[:kept])
        result.reason = reason or result.reason
        return reason is not None

    def _end_of_output(self, row: Row, run: list[int]) -> tuple[int, str | None]:
        """Return how many of a row's accepted tokens are output, and the reason if the output ends there."""
        room, before = _remaining_tokens(self.target, row, self.stopping), self.results[row.index].tokens
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
            # The last sequences move to the free slots; the others stay, so that little is copied.
            of_slot, last = {row.slot: row for row in self.rows}, self.rows[:]
            self.rows = [of_slot.get(slot) or last.pop() for slot in range(len(self.rows))]
            slots = [row.slot for row in self.rows]
            self.cache.select(slots)
            if self.drafter is not None:
                self.drafter.select(slots)
            for slot, row in enumerate(self.rows):
                row.slot = slot


class DrafterWrapper(Drafter):
    """A base class for a drafter around another one: every method that it does not override is the other's.

    Attributes:
        drafter: the other one.
    """

    drafter: Drafter

    @property
    def name(self) -> str:
        return self.drafter.name

    @property
    def provides(self) -> frozenset[str]:
        return self.drafter.provides

    @property
    def concurrent(self) -> bool:
        return self.drafter.concurrent

    @property
    def has_logits(self) -> bool:
        return self.drafter.has_logits

    @property
    def reads_hidden(self) -> bool:
        return self.drafter.reads_hidden

    @property
    def acceptance(self) -> Callable[[Tensor], float] | None:
        return self.drafter.acceptance

    def candidates(self, acceptance: Sequence[float], verification: Sequence[float]) -> list[DraftCandidate]:
        return self.drafter.candidates(acceptance, verification)

    def start(self, rows: list[Row], state: TargetState) -> None:
        self.drafter.start(rows, state)

    def join(self, rows: list[Row], state: TargetState) -> None:
        self.drafter.join(rows, state)

    def propose(self, rows: list[Row], budgets: list[int]) -> Proposal:
        return self.drafter.propose(rows, budgets)

    def read(self, target: Engine, cache: KVCache, inputs: Tensor, draft: Proposal, block: Block) -> Output:
        return self.drafter.read(target, cache, inputs, draft, block)

    def verify(self, rows: list[Row], inputs: Tensor, draft: Proposal, output: Output, accepted: Accept) -> Verified:
        return self.drafter.verify(rows, inputs, draft, output, accepted)

    def accept(self, rows: list[Row], verified: Verified) -> None:
        self.drafter.accept(rows, verified)

    def select(self, slots: list[int]) -> None:
        self.drafter.select(slots)


def draft_chain(
    rows: Sequence[Row],
    budgets: list[int],
    first: Output,
    following: Callable[[Tensor, Output, int], Output],
    sampling: Sampling,
    known: tuple[Tensor, int] | None = None,
    least: float = 0.0,
) -> Proposal:
    """Return a chain for each row: drawn from the draft's distributions, or its largest logits in greedy decoding.

    Args:
        rows: the sequences. budgets: of each row, one of them 1 or more; a row's policy may stop earlier, and the
            number is then lowered to what was drafted.
        first: the draft's output, of which the last place gives the first token: logits [b, n, V], states [b, n, H].
        following: (tokens [b], the output they were drawn from, how many were drawn before) -> the next output.
        sampling: as the target's.
        least: a row drafts no further after a token before which no probability was as large.
        known: of a draft with logits of some tokens only, these tokens [V_d] and V; None: logits are of all.
    """
    random, greedy = RowRandomSource([row.generator for row in rows]), sampling.greedy
    # In greedy decoding q is needed only to decide where to stop: without that, its softmax is saved.
    watched = least > 0 or any(row.policy.needs_confidence for row in rows)
    tokens, probs, logits = [], [], []
    output = first
    for i in range(max(budgets)):
        step = output.logits[:, -1]
        q = sampling.probabilities(step) if not greedy else step.softmax(-1) if watched else step
        place = argmax(step) if greedy else random.draw(q)
        x = place if known is None else known[0][place]
        tokens.append(x)
        logits.append(step)
        probs.append(q)
        if watched:
            confidence, highest = q.gather(-1, place[:, None])[:, 0].tolist(), q.amax(-1).tolist()
            for j, row in enumerate(rows):
                if i >= budgets[j]:
                    continue
                if highest[j] < least or not row.policy.should_continue(confidence[j], output.hidden[j, -1]):
                    budgets[j] = i + 1
        if i + 1 >= max(budgets):
            break
        output = following(x, output, i)
    drafted, scores = torch.stack(tokens, 1), _expand_vocabulary(torch.stack(logits, 1), known, -torch.inf)
    active = torch.arange(drafted.shape[1], device=drafted.device) < torch.tensor(budgets).to(drafted.device)[:, None]
    drawn_from = None if greedy else _expand_vocabulary(torch.stack(probs, 1).where(active[..., None], 0), known, 0)
    return Proposal(drafted.where(active, -1), drawn_from, scores)


def _expand_vocabulary(values: Tensor, known: tuple[Tensor, int] | None, other: float) -> Tensor:
    """Return values of V_d tokens, [b, N, V_d], as values of all V, [b, N, V]: ``other`` for the other tokens."""
    if known is None:
        return values
    tokens, size = known
    return values.new_full((*values.shape[:-1], size), other).index_copy_(-1, tokens, values)
