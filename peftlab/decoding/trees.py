"""Token trees: which candidates to try together, which token attends to which, and the greedy walk down.

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

import torch
from torch import Tensor

Path = tuple[int, ...]


def rank_probability(depth: int, rank: int) -> float:
    """Return an estimate of how often the candidate of this rank (from 0) is the right one: .55, .19, .07, ..."""
    return 0.55 * 0.35**rank


@dataclass(frozen=True)
class RankRates:
    """How often the candidates of each depth and rank are right where their parent is, measured on text.

    Attributes:
        rates: rates[depth][rank], positive and falling in rank.
    """

    rates: tuple[tuple[float, ...], ...]

    @classmethod
    def counted(cls, right: Sequence[Sequence[float]], tried: Sequence[float]) -> RankRates:
        """Return the rates of counts, each rank at most as good as the one before it.

        Half a candidate is added to ``right`` and one to ``tried``: what was never right is not known to be impossible.

        Args:
            right: how often the candidate of each depth and rank was right. tried: how often each depth was tried.
        """
        rates = (((one + 0.5) / (n + 1) for one in ones) for ones, n in zip(right, tried, strict=True))
        return cls(tuple(tuple(accumulate(each, min)) for each in rates))

    @property
    def width(self) -> int:
        """Ranks that were measured."""
        return len(self.rates[0])

    def __call__(self, depth: int, rank: int) -> float:
        """Return a rate; past what was measured, that of the last depth or rank."""
        of_depth = self.rates[min(depth, len(self.rates) - 1)]
        return of_depth[min(rank, len(of_depth) - 1)]


@lru_cache
def best_tree(
    size: int,
    depth: int,
    width: int,
    probability: Callable[[int, int], float] = rank_probability,
) -> tuple[Path, ...]:
    """Return the ``size`` nodes most likely to be reached, best first: the product of rank probabilities.

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
        if rank + 1 < width:
            sibling = score / probability(level - 1, rank) * probability(level - 1, rank + 1)
            heapq.heappush(heap, (sibling, (*path[:-1], rank + 1)))
        if level < depth:
            heapq.heappush(heap, (score * probability(level, 0), (*path, 0)))
    return tuple(tree)


def reach(tree: Sequence[Path], probability: Callable[[int, int], float]) -> list[float]:
    """Return the probability that each node of a tree is accepted: the product of its path's rank probabilities."""
    return [math.prod(probability(depth, rank) for depth, rank in enumerate(path)) for path in tree]


def expected_tokens(tree: Sequence[Path], probability: Callable[[int, int], float]) -> list[float]:
    """Return the tokens per step of a tree's first 1, 2, ... nodes: one more follows those that are accepted."""
    return [1 + accepted for accepted in accumulate(reach(tree, probability))]


@lru_cache
def parents_of(tree: tuple[Path, ...]) -> tuple[int, ...]:
    """Return the parent of each node of a tree of paths, -1 for the root."""
    place = {path: i for i, path in enumerate(tree)}
    return tuple(place.get(path[:-1], -1) for path in tree)


def depths_of(parents: Sequence[int]) -> list[int]:
    """Return the level of each node of a tree, 1 for the root's children."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


@dataclass(frozen=True)
class TreeShape:
    """Trees for the target, one per row and all of N nodes, each with its root, the token before the drafted ones.

    Attributes:
        depths: [b, N+1], 0 for the root.
        below: [b, N+1, N+1] booleans: the row's token descends from the column's or is it.
    """

    depths: Tensor
    below: Tensor

    def of_rows(self, places: Sequence[int]) -> TreeShape:
        """Return the trees of some of the rows."""
        return TreeShape(self.depths[list(places)], self.below[list(places)])


def shape_of(parents: Sequence[tuple[int, ...]]) -> TreeShape:
    """Return the shape of trees of one size by their nodes' parents, -1 for the root and before their children."""
    depths, below = zip(*map(_shape, parents), strict=True)
    return TreeShape(torch.stack(depths), torch.stack(below))


@lru_cache
def _shape(parents: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    lines = [[0]]  # of the root and each node: itself and those above it
    for node, parent in enumerate(parents):
        lines.append([*lines[parent + 1], node + 1])
    below = torch.zeros(len(lines), len(lines), dtype=torch.bool)
    below[[i for i, line in enumerate(lines) for _ in line], [i for line in lines for i in line]] = True
    return torch.tensor([0, *depths_of(parents)]), below


@dataclass(frozen=True)
class Paths:
    """The paths from root to leaf of b trees of n nodes, those of the first tree first.

    Attributes:
        row: [paths], whose tree it is of. nodes: [paths, longest], a leaf repeated up to the length of the longest.
        path, depth: [b, n], where each node is first found in ``nodes``.
    """

    row: Tensor
    nodes: Tensor
    path: Tensor
    depth: Tensor


def paths_of(below: Tensor) -> Paths:
    """Return the paths of trees, given which row descends from which column or is it, [b, n, n] booleans."""
    row, leaf = (below.sum(1) == 1).nonzero().unbind(1)
    within = below[row, leaf]  # [paths, n]
    lines = [line.nonzero().flatten() for line in within]  # parents come before their children
    longest = max(map(len, lines))
    nodes = torch.stack([torch.cat((line, line[-1:].expand(longest - len(line)))) for line in lines])
    own = row == torch.arange(len(below), device=row.device)[:, None]  # [b, paths]
    first = (own[:, :, None] & within).int().argmax(1)
    return Paths(row, nodes, first, below.sum(2) - 1)


def walk_greedy(choices: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> tuple[list[int], int]:
    """Follow the target's own choices down a tree as far as they were drafted.

    Args:
        choices: N+1 greedy tokens; entry 0 follows the root, entry i+1 follows node i.
        tokens: of the N nodes; -1 where nothing was drafted.
        parents: of the N nodes.

    Returns:
        The accepted path as node indices, and the next token after it.
    """
    children = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens, strict=True))}
    path: list[int] = []
    node = -1
    while (below := children.get((node, choices[node + 1]))) is not None:
        path.append(below)
        node = below
    return path, choices[node + 1]
