"""The fold's bits depend on the values alone: not on where a tensor is stored, its strides, or the threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from peftlab.methods.base import Folding
from peftlab.methods.lora.functional import expert_factors, fold_weight


def at(tensor: Tensor, offset: int) -> Tensor:
    """Return a copy that begins ``offset`` bytes after a multiple of 64, as a tensor inside a file may."""
    raw = torch.empty(tensor.nbytes + 128, dtype=torch.uint8)
    begin = -raw.data_ptr() % 64 + offset
    copy = raw[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    assert copy.data_ptr() % 64 == offset
    return copy


def strided(tensor: Tensor) -> Tensor:
    """Return a copy that is stored column after column."""
    return tensor.t().contiguous().t()


@pytest.mark.parametrize("dora", [False, True], ids=["plain", "dora"])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("shape", [(3, 32), (48, 32), (96, 32), (700, 520)], ids=str)
@pytest.mark.parametrize("rank", [1, 3, 8, 16])
def test_addresses_and_strides_do_not_show(shape: tuple[int, int], rank: int, transposed: bool, dora: bool) -> None:
    torch.manual_seed(0)
    weight, a, b = torch.randn(shape), torch.randn(rank, shape[1]), torch.randn(shape[0], rank)
    magnitude = torch.rand(shape[0]) + 0.5 if dora else None
    stored = weight.t().contiguous() if transposed else weight
    expected = fold_weight(stored, a, b, 0.7, transposed=transposed, magnitude=magnitude)
    for w_at, a_at, b_at in [(4, 0, 0), (8, 0, 0), (0, 4, 0), (0, 8, 8), (4, 8, 4), (16, 32, 48)]:
        moved = magnitude if magnitude is None else at(magnitude, w_at)
        folded = fold_weight(
            at(stored, w_at), at(a, a_at), at(b, b_at), 0.7, transposed=transposed, magnitude=moved
        )  # fmt: skip
        assert torch.equal(folded, expected), (w_at, a_at, b_at)
    folded = fold_weight(strided(stored), strided(a), strided(b), 0.7, transposed=transposed, magnitude=magnitude)
    assert torch.equal(folded, expected)
    exact = weight.double() + 0.7 * b.double() @ a.double()
    if magnitude is not None:
        exact *= (magnitude / exact.norm(dim=1))[:, None]
    torch.testing.assert_close(expected.t() if transposed else expected, exact.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_experts_fold_as_matrices_of_their_own(transposed: bool) -> None:
    torch.manual_seed(0)
    weight, a, b = torch.randn(3, 40, 24), torch.randn(3 * 4, 24), torch.randn(40, 4 * 3)
    stored = weight.mT.contiguous() if transposed else weight
    folded = fold_weight(at(stored, 4), at(a, 8), at(b, 4), 0.7, transposed=transposed)
    for w, x, y, z in zip(stored, *expert_factors(a, b, 3), folded, strict=True):
        assert torch.equal(fold_weight(w, x, y, 0.7, transposed=transposed), z)


@pytest.mark.parametrize("shape", [(48, 32), (2048, 520), (300, 1100)])
@pytest.mark.parametrize("rank", [3, 16, 300])
def test_the_number_of_threads_does_not_show(shape: tuple[int, int], rank: int) -> None:
    """Merging on disk folds several tensors at a time, merging in memory one; torch may have any number of threads."""
    torch.manual_seed(0)
    weight = torch.randn(shape).to(torch.bfloat16)
    a, b = torch.randn(rank, shape[1]), torch.randn(shape[0], rank)
    threads = torch.get_num_threads()
    folds = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            how = Folding(stored=torch.float32)
            folds.append(fold_weight(weight, a, b, 0.7, how=how))
            folds.append(fold_weight(weight.t().contiguous(), a, b, 0.7, transposed=True, how=how))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(fold, folds[i % 2]) for i, fold in enumerate(folds))


def test_looking_does_not_show() -> None:
    """A merge on disk counts what it changes, and folds in place; a merge in memory does neither."""
    torch.manual_seed(0)
    weight, a, b = torch.randn(700, 520).bfloat16(), torch.randn(8, 520), torch.randn(700, 8)
    seen = []
    how = Folding(
        in_place=True, watch=lambda before, delta, after, stored: seen.append((before.clone(), stored.clone()))
    )
    folded = fold_weight(weight.clone(), a, b, 0.7, how=how)
    assert torch.equal(folded, fold_weight(weight, a, b, 0.7))
    assert torch.equal(torch.cat([before for before, _ in seen]), weight.float())
    assert torch.equal(torch.cat([stored for _, stored in seen]), folded)


def test_fp64_weights_are_folded_in_fp64() -> None:
    torch.manual_seed(0)
    weight, a, b = torch.randn(40, 24, dtype=torch.float64), torch.randn(4, 24), torch.randn(40, 4)
    exact = weight + 0.7 * b.double() @ a.double()
    torch.testing.assert_close(fold_weight(weight, a, b, 0.7), exact, rtol=1e-13, atol=1e-13)
