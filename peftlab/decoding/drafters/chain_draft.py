"""A chain of tokens from a draft that computes one after the other, for a batch of rows with budgets of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from peftlab.decoding.drafters.base import Proposal, Row
from peftlab.decoding.engines.base import Output
from peftlab.decoding.verification.sampling import RowRandomSource, Sampling, forked


def draft_chain(
    rows: Sequence[Row],
    budgets: list[int],
    first: Output,
    following: Callable[[Tensor, Output, int], Output],
    sampling: Sampling,
) -> Proposal:
    """Return a chain for each row, drawn from the draft's distribution or, greedily, its largest logits.

    Args:
        budgets: of each row, one of them 1 or more; a row's policy may stop earlier, and the number is then lowered to
            what was drafted.
        first: the draft's output, of which the last place gives the first token: logits [b, n, V], states [b, n, H].
        following: (tokens [b], the output they were drawn from, how many were drawn before) -> the next output.
        sampling: as the target's.
    """
    # A row draws as long as the longest draft of the batch, which must not change what it draws afterwards.
    random, greedy = RowRandomSource(forked(row.generator for row in rows)), sampling.greedy
    watched = any(row.policy.needs_confidence for row in rows)  # only then is a greedy q worth its softmax
    tokens, probs, logits = [], [], []
    output = first
    for i in range(max(budgets)):
        step = output.logits[:, -1]
        q = sampling.probabilities(step) if not greedy else step.softmax(-1) if watched else step
        x = step.argmax(-1) if greedy else random.draw(q)
        active = torch.tensor([i < budget for budget in budgets], device=x.device)
        tokens.append(torch.where(active, x, -1))
        logits.append(step)
        if not greedy:
            probs.append(torch.where(active[:, None], q, 0))
        if watched:
            confidence = q.gather(-1, x[:, None])[:, 0].tolist()
            for j, row in enumerate(rows):
                if i < budgets[j] and not row.policy.should_continue(confidence[j], output.hidden[j, -1]):
                    budgets[j] = i + 1
        if i + 1 >= max(budgets):
            break
        output = following(x, output, i)
    return Proposal(torch.stack(tokens, 1), torch.stack(probs, 1) if probs else None, torch.stack(logits, 1))
