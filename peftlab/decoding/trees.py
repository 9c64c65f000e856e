"""Candidate trees: the set of candidates to verify together, by the rate at which each rank is right.

A node is the path of ranks that leads to it: (0, 2) is the third choice after the first choice. Trees are
lists of paths in which a parent comes before its children.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

Path = tuple[int, ...]


def rank_probability(depth: int, rank: int) -> float:
    """Return the estimated probability that a candidate is right where its parent is: .55, .19, .07, ... by rank.

    Args:
        depth: ignored. rank: from 0.
    """
    return 0.55 * 0.35**rank


@dataclass(frozen=True)
class RankRates:
    """The measured rates at which candidates of each depth and rank are right where their parent is.

    Attributes:
        rates: rates[depth][rank], positive and falling in rank.
    """

    rates: tuple[tuple[float, ...], ...]

    @classmethod
    def counted(cls, right: Sequence[Sequence[float]], tried: Sequence[float]) -> RankRates:
        """Return rates from counts, those of a depth falling in rank.

        Half a candidate is added to ``right`` and one to ``tried``: what was never right is not known to be impossible.

        Args:
            right: how often the candidate of each depth and rank was right. tried: how often each depth was tried.
        """
        rates = (((one + 0.5) / (n + 1) for one in ones) for ones, n in zip(right, tried, strict=True))
        return cls(tuple(tuple(accumulate(each, min)) for each in rates))

    @property
    def width(self) -> int:
        """Return how many ranks were measured."""
        return len(self.rates[0])

    def __call__(self, depth: int, rank: int) -> float:
        """Return the rate of a depth and rank, both from 0; past the measured ones, that of the last."""
        of_depth = self.rates[min(depth, len(self.rates) - 1)]
        return of_depth[min(rank, len(of_depth) - 1)]


@lru_cache
def best_tree(
    size: int,
    depth: int,
    width: int,
    probability: Callable[[int, int], float] = rank_probability,
) -> tuple[Path, ...]:
    """Return the ``size`` nodes most likely to be reached, best first, by the product of rank probabilities.

    It is the tree of the most expected tokens under ``probability``, and its first n nodes are the best tree
    of size n. Candidates run out at Σ width^d nodes.

    Args:
        size: nodes, at most.
        depth: levels, at most.
        width: children of a node, at most.
        probability: (depth from 0, rank from 0) -> probability, positive and falling in rank.
    """
    tree: list[Path] = []
    heap: list[tuple[float, Path]] = [(-probability(0, 0), (0,))]
    while heap and len(tree) < size:
        score, path = heapq.heappop(heap)
        tree.append(path)
        level, rank = len(path), path[-1]
        # The next sibling and the first child are no likelier than the node: the heap gives nodes in falling order.
        if rank + 1 < width:
            sibling = score / probability(level - 1, rank) * probability(level - 1, rank + 1)
            heapq.heappush(heap, (sibling, (*path[:-1], rank + 1)))
        if level < depth:
            heapq.heappush(heap, (score * probability(level, 0), (*path, 0)))
    return tuple(tree)


def reach_probabilities(tree: Sequence[Path], probability: Callable[[int, int], float]) -> list[float]:
    """Return the probability that each node of a tree is accepted: the product of its path's rank probabilities.

    Args:
        tree: paths. probability: as for ``best_tree``.
    """
    return [math.prod(probability(depth, rank) for depth, rank in enumerate(path)) for path in tree]


def expected_tokens(tree: Sequence[Path], probability: Callable[[int, int], float]) -> list[float]:
    """Return the expected tokens per step of a tree's first 1, 2, ... nodes: the accepted ones and one more.

    Args:
        tree: paths, a parent before its children. probability: as for ``best_tree``.
    """
    return [1 + accepted for accepted in accumulate(reach_probabilities(tree, probability))]


@lru_cache
def parents_of(tree: tuple[Path, ...]) -> tuple[int, ...]:
    """Return the parent of each node of a tree of paths, -1 for the root."""
    place = {path: i for i, path in enumerate(tree)}
    return tuple(place.get(path[:-1], -1) for path in tree)
