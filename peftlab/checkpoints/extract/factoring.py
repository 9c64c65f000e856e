"""The best low-rank approximation of a matrix, in the memory of that matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# A matrix whose smaller side is at least this, and eight times the rank, is factored by a randomised range finder:
# the whole spectrum of a matrix of 4,096 columns takes a minute, the leading part a second.
RANDOMISED_SIDE = 1024
_OVERSAMPLING = 16  # directions beside the wanted ones
_ITERATIONS = 3  # of the subspace; each sharpens the leading directions
_BLOCK = 1 << 20  # elements computed with at a time
_ROUNDING = 1e-12  # of the whole energy: below it, a singular value is what rounding left


@dataclass(frozen=True)
class Goal:
    """How much of a difference is kept.

    Attributes:
        rank: the highest rank, or None. energy: the share of ‖ΔW‖² to keep, in (0, 1], or None.
    """

    rank: int | None = None
    energy: float | None = None


@dataclass(frozen=True)
class LowRankFactors:
    """B·A beside the matrix that it approximates.

    Attributes:
        a: (k, in). b: (out, k). error: ‖M − B·A‖ / ‖M‖, Frobenius norms, measured on these factors.
        exact: whether the whole spectrum was computed; else the error may exceed the best possible by a little.
    """

    a: Tensor
    b: Tensor
    error: float
    exact: bool


def factored(matrix: Tensor, goal: Goal) -> LowRankFactors:
    """Return factors of an fp32 matrix (out, in): its leading singular vectors, each with the root of its value.

    The eigenvectors come from the Gram matrix of the smaller side in fp64, so that the memory beside the matrix is
    that of its smaller side squared; where only the leading ones of a large matrix are wanted, from a randomised
    subspace iteration (arXiv 0909.4061). The error is measured on the result in either case.
    """
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.t()
    exact = goal.rank is None or not _large(tall, goal.rank)
    v = _spectrum(tall, goal) if exact else _subspace(tall, goal.rank or 0)
    left = tall @ v
    root = left.square().sum(0).double().sqrt().sqrt().float()
    left, right = left / root.clamp_min(torch.finfo(torch.float32).tiny), (v * root).t()
    error = _error(tall, left, right)
    if tall is matrix:
        return LowRankFactors(right.contiguous(), left.contiguous(), error, exact)
    return LowRankFactors(left.t().contiguous(), right.t().contiguous(), error, exact)


def _large(tall: Tensor, rank: int) -> bool:
    return tall.shape[1] >= max(RANDOMISED_SIDE, 8 * rank)


def _blocks(tall: Tensor) -> tuple[Tensor, ...]:
    return tall.split(max(1, _BLOCK // tall.shape[1]))


def _spectrum(tall: Tensor, goal: Goal) -> Tensor:
    """Return the leading right singular vectors (in, k), most important first."""
    gram = torch.zeros(tall.shape[1], tall.shape[1], dtype=torch.float64)
    for block in _blocks(tall):
        wide = block.double()
        gram.addmm_(wide.t(), wide)
    values, vectors = torch.linalg.eigh(gram)
    kept = values.flip(0).clamp_min(0).cumsum(0)
    total = float(kept[-1])
    if goal.rank is not None:
        k = min(goal.rank, len(values))
    else:
        k = 1 + int((kept < (goal.energy or 1.0) * total - _ROUNDING * total).sum())
    return vectors.flip(1)[:, : min(k, len(values))].float()


def _subspace(tall: Tensor, rank: int) -> Tensor:
    """Return nearly the leading right singular vectors (in, rank) by a randomised subspace iteration."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(tall.shape[1], rank + _OVERSAMPLING, generator=generator)
    for _ in range(_ITERATIONS):
        q = torch.linalg.qr(tall.t() @ torch.linalg.qr(tall @ q).Q).Q
    return q @ torch.linalg.svd(tall @ q, full_matrices=False).Vh[:rank].t()


def _error(tall: Tensor, left: Tensor, right: Tensor) -> float:
    missed = whole = 0.0
    for block, rows in zip(_blocks(tall), left.split(len(_blocks(tall)[0])), strict=True):
        whole += float(block.double().square().sum())
        missed += float(torch.addmm(block, rows, right, alpha=-1).double().square().sum())
    return math.sqrt(missed / whole) if whole else 0.0
