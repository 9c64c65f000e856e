"""A chain of tokens from a draft that computes one after the other, for a batch of rows with budgets of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from peftlab.decoding.drafters.base import Proposal, Row
from peftlab.decoding.engines.base import Output
from peftlab.decoding.sampling import RowRandomSource, Sampling, largest


def draft_chain(
    rows: Sequence[Row],
    budgets: list[int],
    first: Output,
    following: Callable[[Tensor, Output, int], Output],
    sampling: Sampling,
    known: tuple[Tensor, int] | None = None,
    least: float = 0.0,
) -> Proposal:
    """Return a chain for each row, drawn from the draft's distribution or, greedily, its largest logits.

    Args:
        budgets: of each row, one of them 1 or more; a row's policy may stop earlier, and the number is then lowered to
            what was drafted.
        first: the draft's output, of which the last place gives the first token: logits [b, n, V], states [b, n, H].
        following: (tokens [b], the output they were drawn from, how many were drawn before) -> the next output.
        sampling: as the target's.
        least: a row drafts no further after a token before which no probability was as large.
        known: of a draft with logits of some tokens only, these tokens [V_d] and V; None: logits are of all.
    """
    random, greedy = RowRandomSource([row.generator for row in rows]), sampling.greedy
    # Only then is a greedy q worth its softmax.
    watched = least > 0 or any(row.policy.needs_confidence for row in rows)
    tokens, probs, logits = [], [], []
    output = first
    for i in range(max(budgets)):
        step = output.logits[:, -1]
        q = sampling.probabilities(step) if not greedy else step.softmax(-1) if watched else step
        place = largest(step) if greedy else random.draw(q)
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
    drafted, scores = torch.stack(tokens, 1), _of_all(torch.stack(logits, 1), known, -torch.inf)
    active = torch.arange(drafted.shape[1], device=drafted.device) < torch.tensor(budgets).to(drafted.device)[:, None]
    drawn_from = None if greedy else _of_all(torch.stack(probs, 1).where(active[..., None], 0), known, 0)
    return Proposal(drafted.where(active, -1), drawn_from, scores)


def _of_all(values: Tensor, known: tuple[Tensor, int] | None, other: float) -> Tensor:
    """Return what is known of some tokens, [b, N, V_d], for all of them, [b, N, V]: ``other`` for the rest."""
    if known is None:
        return values
    tokens, size = known
    return values.new_full((*values.shape[:-1], size), other).index_copy_(-1, tokens, values)
