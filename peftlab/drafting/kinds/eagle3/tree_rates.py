"""How often each choice of a layer on the target's states is right at each depth, measured on held-out text."""

from __future__ import annotations

import torch
from datasets import Dataset

from peftlab.decoding.trees import RankRates
from peftlab.drafting.acceptance import batches
from peftlab.drafting.hidden_states import head_weight
from peftlab.drafting.kinds.eagle3.feature_loss import EagleModel, predictions, target_states, unroll
from peftlab.drafting.rank_rates import RANKS, greedy_tokens, right_choices


@torch.no_grad()
def measure_ranks(model: EagleModel, data: Dataset, batch_size: int, depth: int) -> RankRates:
    """Return how often the choice of each rank is the target's own greedy token, depth by depth.

    Depth k counts at a place where the right tokens of all depths before were among their choices and are the text's
    own: there a tree can reach it.

    Args:
        data: held-out rows as ``continuations.make_dataset`` makes them. depth: how many tokens ahead.
    """
    network, head = model.network, head_weight(model)
    weight = network.lm_head.weight
    right = torch.zeros(depth, min(RANKS, len(weight)), dtype=torch.float64)
    tried = torch.zeros(depth, dtype=torch.float64)
    for _, places, ids, mask in batches(data, batch_size, head.device):
        features, final = target_states(model, ids, mask)
        own, alive = greedy_tokens(final, head), torch.ones_like(places)
        for k, states in enumerate(unroll(network, features, ids, min(depth, ids.shape[1] - 1))):
            n = ids.shape[1] - k - 1
            alive = alive[:, :n] & predictions(places, k + 1)
            if k:  # the token read last is the text's, and must be the one that was right
                alive = alive & (ids[:, k + 1 :] == own[:, k : k + n])
            hits = right_choices(
                network.read_by_head(states[:, :n][alive]), weight, own[:, k + 1 :][alive], network.tokens
            )
            right[k] += hits.sum(0).cpu().double()
            tried[k] += len(hits)
            alive = alive.masked_scatter(alive, hits.any(-1))
    return RankRates.counted(right.tolist(), tried.tolist())
