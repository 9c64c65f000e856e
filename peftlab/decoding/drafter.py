"""The interface of drafters: the sequences that they continue, their proposals, and the target's verification.

``draft_chain`` is the loop of every draft that computes one token after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Protocol

import torch
from torch import Tensor

from peftlab.decoding.cache import Block, Engine, KVCache, Output
from peftlab.decoding.policies import Policy
from peftlab.decoding.sampling import RowRandomSource, Sampling, argmax
from peftlab.decoding.verify import Accepted


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
    """

    index: int
    slot: int
    tokens: list[int]
    prompt_length: int
    policy: Policy
    generator: torch.Generator
    source: list[int] = field(default_factory=list)

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
    """

    inputs: Tensor
    draft: Proposal
    output: Output
    paths: list[list[int]]
    next_tokens: list[int]
    next_was_drafted: list[bool] | None = None


@dataclass
class TargetState:
    """The target's state after it has read all prompts but their last tokens.

    Attributes:
        cache: the target's.
        hidden: last hidden state of each row, [H]; None for a prompt of one token.
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
        draft_model: what drafts its chains, a step for each token; None where no model does.
        concurrent: whether it drafts while the target verifies. Its time is then no part of a step's, and tokens that
            the target has not read are verified exactly or not at all.
        has_logits: whether it proposes chains with the logits of each token's distribution (``Proposal.logits``).
    """

    @property
    def name(self) -> str: ...

    @property
    def provides(self) -> frozenset[str]:
        return frozenset()

    @property
    def draft_model(self) -> Engine | None:
        return None

    @property
    def concurrent(self) -> bool:
        return False

    @property
    def has_logits(self) -> bool:
        return False

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
    def draft_model(self) -> Engine | None:
        return self.drafter.draft_model

    @property
    def concurrent(self) -> bool:
        return self.drafter.concurrent

    @property
    def has_logits(self) -> bool:
        return self.drafter.has_logits

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
