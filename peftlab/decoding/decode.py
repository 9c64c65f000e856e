"""The decoder: plain and speculative decoding of a batch, exact for every drafter.

A step reads the last known token and the drafted ones in one forward pass of the target, accepts a run of
them, and emits one token more. Plain decoding is the same step with nothing drafted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from peftlab.decoding.draft_length import Fixed, Policy
from peftlab.decoding.drafters.base import (
    Draft,
    Drafter,
    Row,
    RowRandomSource,
    Sampling,
    TargetState,
    Verified,
    block_of,
    prefill,
    right_padded,
)
from peftlab.decoding.engines.build import Engine
from peftlab.decoding.engines.cache import KVCache
from peftlab.decoding.verification.chain import verify_chain, verify_greedy, verify_onehot
from peftlab.decoding.verification.multidraft import verify_tree
from peftlab.decoding.verification.tree import walk_greedy
from peftlab.errors import PeftlabError


@dataclass(frozen=True)
class Step:
    """One target step of one sequence.

    Attributes:
        drafted: tokens offered one after the other (levels of a tree), as far as the output goes on.
        accepted: how many of them stood and were emitted.
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
    """What ends an output.

    Attributes:
        max_new_tokens: at most so many tokens.
        eos: token ids that end it; the token itself is part of the output.
        stops: output ids -> whether they are complete, asked at every token (``streaming.stop_at``).
    """

    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    stops: Callable[[Sequence[int]], bool] | None = None


OnTokens = Callable[[int, list[int]], None]
Observe = Callable[[list[Row], Verified], None]


@torch.inference_mode()
def decode(
    target: Engine,
    prompts: Sequence[Sequence[int]],
    ending: StoppingCriteria,
    drafter: Drafter | None = None,
    *,
    policy: Callable[[], Policy] = partial(Fixed, 4),
    sampling: Sampling | None = None,
    on_tokens: OnTokens | None = None,
    observe: Observe | None = None,
    group: bool = False,
) -> list[Generation]:
    """Decode a batch of prompts of any lengths.

    Greedy output equals plain greedy decoding token for token (to rounding, and so in float32); sampled output
    follows the target's distribution. Rows of a batch do not influence one another.

    Args:
        target: the model whose output it is.
        prompts: token ids; at least one each.
        ending: what ends an output. The target's context limit ends it too.
        drafter: proposes tokens; None is plain decoding.
        policy: makes each sequence its draft length policy.
        sampling: default greedy.
        on_tokens: called with a prompt's number and its new tokens after every step.
        observe: called with the rows of a step and its verification, before the rows take up their tokens.
        group: take in each step only the most rows of equal length, which need no scatter and no mask of
            their own (EXSPEC, arXiv 2510.22876); the others wait for their turn.

    Returns:
        One output a prompt, in order.

    Raises:
        PeftlabError: no prompt, an empty prompt, one longer than the context, or a token id out of range.
    """
    sampling = sampling or Sampling()
    _check(target, prompts, ending)
    results = [Generation() for _ in prompts]
    rows = _begin(target, prompts, ending, policy, sampling, results)
    if not rows:
        return results
    cache = KVCache(target.layers, len(rows), _capacity(target, rows, ending))
    hidden = prefill(target, cache, rows)
    if drafter is not None:
        drafter.start(rows, TargetState(cache, hidden, target.vocab_size, sampling))
    while rows:
        turn = _equal_lengths(rows) if group else rows
        budgets = [_budget(target, row, ending) if drafter else 0 for row in turn]
        draft = _nothing(len(turn), target)
        if drafter is not None and any(budgets):
            draft = drafter.propose(turn, budgets)
        verified = _verify(target, cache, turn, draft, sampling)
        if observe is not None:
            observe(turn, verified)
        ended = _emit(target, cache, turn, verified, ending, results, on_tokens)
        if drafter is not None:
            drafter.accept(turn, verified)
        if ended:
            rows = [row for row in rows if row.index not in ended]
            _compact(rows, cache, drafter)
    return results


def _check(target: Engine, prompts: Sequence[Sequence[int]], ending: StoppingCriteria) -> None:
    if not prompts:
        raise PeftlabError("prompts: none given")
    if ending.max_new_tokens < 0:
        raise PeftlabError(f"max_new_tokens: {ending.max_new_tokens} is negative")
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise PeftlabError(f"prompt {i}: empty; give at least one token, such as the tokenizer's BOS")
        if target.limit is not None and len(prompt) > target.limit:
            raise PeftlabError(f"prompt {i}: {len(prompt)} tokens, but the model's context is {target.limit}")
        if not (min(prompt) >= 0 and max(prompt) < target.vocab_size):
            wrong = next(t for t in prompt if not 0 <= t < target.vocab_size)
            raise PeftlabError(f"prompt {i}: token {wrong} lies outside the vocabulary of {target.vocab_size}")


def _begin(
    target: Engine,
    prompts: Sequence[Sequence[int]],
    ending: StoppingCriteria,
    policy: Callable[[], Policy],
    sampling: Sampling,
    results: list[Generation],
) -> list[Row]:
    """Make a row of every prompt that may emit at least one token."""
    rows: list[Row] = []
    for place, prompt in enumerate(prompts):
        generator = torch.Generator(target.device).manual_seed(sampling.seed + place)
        row = Row(place, len(rows), list(prompt), len(prompt), policy(), generator)
        if _room(target, row, ending) > 0:
            rows.append(row)
        elif ending.max_new_tokens:
            results[place].reason = "context"
    return rows


def _room(target: Engine, row: Row, ending: StoppingCriteria) -> int:
    """How many tokens a row may still emit."""
    room = ending.max_new_tokens - (len(row.tokens) - row.prompt_length)
    return room if target.limit is None else min(room, target.limit - len(row.tokens))


_SLACK = 64  # slots past the longest sequence, for drafted tokens that cannot stand


def _capacity(target: Engine, rows: list[Row], ending: StoppingCriteria) -> int:
    return max(len(row.tokens) + _room(target, row, ending) for row in rows) + _SLACK


def _budget(target: Engine, row: Row, ending: StoppingCriteria) -> int:
    """How many tokens to draft: no more than could be emitted before the one that follows them."""
    return max(0, min(row.policy.budget(), _room(target, row, ending) - 1, _SLACK))


def _equal_lengths(rows: list[Row]) -> list[Row]:
    """The most rows of one length; the shortest of equals, which then may catch up with others."""
    by_length: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        by_length[len(row.tokens)].append(row)
    return max(by_length.values(), key=lambda group: (len(group), -len(group[0].tokens)))


def _nothing(b: int, target: Engine) -> Draft:
    return Draft(torch.full((b, 0), -1, device=target.device))


def _verify(target: Engine, cache: KVCache, rows: list[Row], draft: Draft, sampling: Sampling) -> Verified:
    last = right_padded([row.tokens[-1:] for row in rows], 1).to(target.device)
    draft.tokens = draft.tokens.to(target.device)
    inputs = torch.cat((last, draft.tokens.clamp_min(0)), 1)
    starts = [len(row.tokens) - 1 for row in rows]
    output = target.forward(cache, inputs, block_of(rows, cache, starts, inputs.shape[1], draft.shape))
    if draft.shape is None:
        counts, following = _verify_chains(output.logits, rows, draft, sampling)
        paths = [list(range(n)) for n in counts.tolist()]
        next_tokens = following.tolist()
    else:
        paths, next_tokens = _verify_trees(output.logits, rows, draft, sampling)
    return Verified(inputs, draft, output, paths, next_tokens)


def _verify_chains(logits: Tensor, rows: list[Row], draft: Draft, sampling: Sampling) -> tuple[Tensor, Tensor]:
    if sampling.greedy:
        return verify_greedy(logits.argmax(-1), draft.tokens)
    p, random = sampling.probabilities(logits), RowRandomSource(rows)
    if draft.probs is None:
        return verify_onehot(p, draft.tokens, random)
    return verify_chain(p, draft.probs, draft.tokens.clamp_min(0), random)


def _verify_trees(
    logits: Tensor, rows: list[Row], draft: Draft, sampling: Sampling
) -> tuple[list[list[int]], list[int]]:
    assert draft.shape is not None
    parents = draft.shape.parents
    if sampling.greedy:
        choices, tokens = logits.argmax(-1).tolist(), draft.tokens.tolist()
        walks = [walk_greedy(c, t, parents) for c, t in zip(choices, tokens, strict=True)]
    else:
        p, random = sampling.probabilities(logits), RowRandomSource(rows)
        walks = []
        for i, tokens_of in enumerate(draft.tokens):
            # Candidates are certain: each node's row is one-hot, or zeros where nothing was drafted.
            drafted = (tokens_of >= 0).to(p.dtype)[:, None]
            q = torch.zeros_like(p[i, 1:]).scatter_(-1, tokens_of.clamp_min(0)[:, None], drafted)
            walks.append(verify_tree(p[i], q, tokens_of, parents, random.of(i)))
    return [path for path, _ in walks], [token for _, token in walks]


def _emit(
    target: Engine,
    cache: KVCache,
    rows: list[Row],
    verified: Verified,
    ending: StoppingCriteria,
    results: list[Generation],
    on_tokens: OnTokens | None,
) -> set[int]:
    """Append what stood to every row; return the places of those that ended."""
    ended = set()
    tokens = verified.draft.tokens.tolist()
    depths = None if verified.draft.shape is None else verified.draft.shape.depths[1:]
    for i, row in enumerate(rows):
        path = verified.paths[i]
        if depths is not None and path:
            cache.move(row.slot, len(row.tokens), path)
        drafted = max(((depths[j] if depths else j + 1) for j, t in enumerate(tokens[i]) if t >= 0), default=0)
        row.policy.update(drafted, len(path))
        run = [*(tokens[i][node] for node in path), verified.next_tokens[i]]
        result = results[row.index]
        kept, reason = _cut(result.tokens, run, ending, target, row)
        result.tokens += run[:kept]
        row.tokens += run[:kept]
        # Tokens past the end were never output: neither they nor their acceptance count.
        whole = kept == len(run)
        result.steps.append(Step(drafted if whole else kept, len(path) if whole else kept, kept))
        if on_tokens is not None:
            on_tokens(row.index, run[:kept])
        if reason is not None:
            result.reason = reason
            ended.add(row.index)
    return ended


def _cut(
    before: list[int], run: list[int], ending: StoppingCriteria, target: Engine, row: Row
) -> tuple[int, str | None]:
    """How many tokens of an accepted run are output, and why it ends there, if it does."""
    room = _room(target, row, ending)
    for n, token in enumerate(run, start=1):
        if token in ending.eos:
            return n, "eos"
        if ending.stops is not None and ending.stops(before + run[:n]):
            return n, "stop"
        if n == room:
            return n, "length" if len(before) + n == ending.max_new_tokens else "context"
    return len(run), None


def _compact(rows: list[Row], cache: KVCache, drafter: Drafter | None) -> None:
    """Drop the sequences that have ended from every cache."""
    if not rows:
        return
    slots = [row.slot for row in rows]
    cache.select(slots)
    if drafter is not None:
        drafter.select(slots)
    for slot, row in enumerate(rows):
        row.slot = slot
