"""Trees that grow with the draft's probabilities (EAGLE-2, Li et al. 2024, arXiv 2406.16858), one for each row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class GrowingTrees:
    """A tree for each of b rows. In each level the most probable of its nodes are read, and their children are added.

    A node is as probable as its path: the product of the draft's probabilities along it. Nodes are numbered as they are
    added, -1 is the root; all rows have the same number of nodes in each level.

    Args:
        b: rows. device: of what is added.
    """

    def __init__(self, b: int, device: torch.device):
        self._tokens = torch.empty(b, 0, dtype=torch.long, device=device)  # [b, N], as the next two
        self._parents, self._values = self._tokens, torch.empty(b, 0, device=device)
        self._begin, self._children = 0, 1  # the first node of the newest level, and how many each parent has there
        self._read = torch.full((b, 1), -1, device=device)  # the nodes read last, [b, k], and their values
        self._read_values = torch.zeros(b, 1, device=device)
        self._above = torch.ones(b, 1, 0, dtype=torch.bool, device=device)  # see ``expand``

    def add(self, tokens: Tensor, log_probs: Tensor) -> None:
        """Add the newest level: children [b, k, w] of the k nodes that were read last, of the root at first."""
        self._begin, self._children = self._tokens.shape[1], tokens.shape[2]
        self._tokens = torch.cat((self._tokens, tokens.flatten(1)), 1)
        self._parents = torch.cat((self._parents, self._read.repeat_interleave(self._children, 1)), 1)
        self._values = torch.cat((self._values, (self._read_values[:, :, None] + log_probs).flatten(1)), 1)

    def expand(self, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the ``width`` most probable nodes of the newest level, which are now read.

        Returns:
            Their tokens [b, k]; the place [b, k] of each one's parent among the nodes read before; and [b, k, m]
            booleans, which of the m nodes read so far, in their order, each of them descends from or is.
        """
        newest = self._values[:, self._begin :]
        self._read_values, best = newest.topk(min(width, newest.shape[1]), 1)
        self._read, place = self._begin + best, best // self._children
        above = self._above.gather(1, place[:, :, None].expand(-1, -1, self._above.shape[2]))
        own = torch.eye(best.shape[1], dtype=torch.bool, device=best.device).expand(len(best), -1, -1)
        self._above = torch.cat((above, own), 2)
        return self._tokens.gather(1, self._read), place, self._above

    def deeper_matters(self, sizes: Sequence[int]) -> bool:
        """Whether a child of one of the newest nodes can be among the ``sizes[i]`` most probable ones of a row i."""
        count = self._values.shape[1]
        if max(sizes) > count:
            return True
        last = torch.tensor(sizes, device=self._values.device)[:, None].clamp_min(1) - 1
        least = self._values.sort(dim=1, descending=True).values.gather(1, last)[:, 0]
        return bool((self._values[:, self._begin :].amax(1) > least).any())

    def best(self, sizes: Sequence[int]) -> tuple[Tensor, list[tuple[int, ...]]]:
        """Return the ``sizes[i]`` most probable nodes of each row i, parents first and of equals the older.

        Returns:
            Their tokens [b, N], -1 where a row has fewer, and their parents.
        """
        count = self._values.shape[1]
        ranks = torch.arange(min(max(sizes), count), device=self._values.device)
        # The values fall along a path, or are equal to rounding: in this order no node comes before its parent.
        order = self._values.sort(dim=1, descending=True, stable=True).indices[:, : len(ranks)]
        asked = ranks < torch.tensor(sizes, device=order.device)[:, None]
        kept = order.where(asked, count).sort(dim=1).values
        place = torch.full((len(kept), count + 2), -1, device=order.device)  # of the root, the nodes, and no node
        place.scatter_(1, kept + 1, ranks.expand(len(kept), -1))
        some = kept.clamp_max(count - 1)
        parents = place.gather(1, self._parents.gather(1, some) + 1).where(kept < count, -1)
        return self._tokens.gather(1, some).where(kept < count, -1), [tuple(line) for line in parents.tolist()]
