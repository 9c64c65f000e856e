"""How often each choice of each head is right, measured on held-out text: what a tree's shape is made from."""

from __future__ import annotations

import torch
from datasets import Dataset
from torch import Tensor

from peftlab.decoding.trees import RankRates
from peftlab.drafting.acceptance import batches
from peftlab.drafting.hidden_states import frozen_hidden, head_weight
from peftlab.drafting.kinds.medusa.head_stack import HeadedModel, HeadStack, ReducedHeads
from peftlab.drafting.kinds.medusa.heads_loss import known_tokens
from peftlab.drafting.rank_rates import RANKS, greedy_tokens, right_choices


@torch.no_grad()
def measure_ranks(model: HeadedModel, heads: HeadStack | ReducedHeads, data: Dataset, batch_size: int) -> RankRates:
    """Return how often the choice of each rank is the model's own greedy token, head by head.

    Head i counts at a place where the right tokens of all earlier heads were among their choices and are the text's
    own: there a tree can reach it. Heads that read tokens read the text's.

    Args:
        model: the target as served. heads: on it, as they draft.
        data: held-out rows as ``continuations.make_dataset`` makes them.
    """
    inner = heads.heads if isinstance(heads, ReducedHeads) else heads
    width = min(RANKS, len(inner.lm_heads[0].get_parameter("weight")))
    right, tried = torch.zeros(inner.depth, width, dtype=torch.float64), torch.zeros(inner.depth, dtype=torch.float64)
    head = head_weight(model)
    for _, places, ids, mask in batches(data, batch_size, head.device):
        hidden = frozen_hidden(model, ids, mask)
        own = greedy_tokens(hidden, head)
        alive = places[:, :-1]
        for i in range(inner.depth):
            n = ids.shape[1] - i - 1
            if n < 1:
                break
            # The token before is known, or it is what the head before had to find.
            alive = alive[:, :n] & places[:, i + 1 :]
            if i:
                alive = alive & (ids[:, i + 1 :] == own[:, i : i + n])
            hits = _hits(heads, i, hidden[:, :n][alive], known_tokens(ids, i + 1)[alive], own[:, i + 1 :][alive])
            right[i] += hits.sum(0).cpu().double()
            tried[i] += len(hits)
            alive = alive.masked_scatter(alive, hits.any(-1))
    return RankRates.counted(right.tolist(), tried.tolist())


def _hits(heads: HeadStack | ReducedHeads, i: int, hidden: Tensor, before: Tensor, right: Tensor) -> Tensor:
    """Return which of a head's best choices are right: [T, H], [T, i + 1], [T] -> booleans [T, ranks]."""
    inner, ids = (heads.heads, heads.kept) if isinstance(heads, ReducedHeads) else (heads, None)
    features, weight = inner.product(i, hidden.to(next(heads.parameters()).dtype), before)
    return right_choices(features, weight, right, ids)
