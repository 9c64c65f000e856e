"""LoRA's dropout: masks that drop with exactly probability p, and what a step keeps and computes with them."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import peftlab
from peftlab.errors import PeftlabError
from peftlab.methods.lora import functional
from peftlab.methods.lora.dropout import Dropped, dropout, keep_mask
from peftlab.methods.lora.functional import MASK_BLOCK, low_rank_linear
from peftlab.models.costs import CountFlops

RATES = (0.05, 0.1, 0.3, 0.5, 1 / 3, 0.9, 0.75, 2**-9, 0.999)


@pytest.mark.parametrize("p", RATES)
def test_the_probability_is_exact(p):
    """Over all 2^16 values of the first bits, and all 2^64 of the further word."""
    bound, rest = Dropped(0, p).threshold()
    assert 0 <= rest < 2**64
    assert abs((bound + Fraction(rest, 2**64)) / 2**16 - Fraction(p)) <= Fraction(1, 2**80)


def word(number: int, seed: int) -> int:
    """SplitMix64, in Python's numbers."""
    z = (seed + number * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


@pytest.mark.parametrize("p", [*RATES, 1e-6, 1 - 1e-6])
def test_what_each_elements_bits_decide(p):
    bound, rest = Dropped(0, p).threshold()
    seeds = (0, 1, 2**63 + 12345, 2**64 - 1)
    for seed in seeds:
        kept = Dropped(seed, p).kept(8, 400)
        for i in range(400):
            bits = word((8 + i) // 4, seed) >> 16 * (i % 4) & 0xFFFF
            assert kept[i] == (bits > bound or (bits == bound and word(2**63 + 8 + i, seed) >= rest))


def test_bits_that_are_the_bound_are_decided_by_a_further_word():
    """Of all elements with bits equal to the bound; each further word is used for one element."""
    dropped = Dropped(7, (100 + 0.25) / 2**16)
    every = np.array([word(i, 7) for i in range(1 << 16)], dtype=np.uint64).view(np.uint16)
    (undecided,) = np.nonzero(every == 100)
    kept = dropped.kept(0, len(every))[undecided]
    assert len(kept) > 2 and kept.tolist() == [word(2**63 + int(i), 7) >= 2**62 for i in undecided]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_elements_at_every_place_of_a_word_are_dropped_alike(p):
    """A word decides for four elements: all its 64 bits must be random, and independent of the next word's."""
    torch.manual_seed(0)
    mask = keep_mask(torch.empty(100_000, 8), p).double()
    spread = math.sqrt(p * (1 - p) / len(mask))
    assert ((1 - mask.mean(0) - p).abs() < 5 * spread).all()
    pairs = torch.corrcoef(mask.t()) - torch.eye(8)
    assert pairs.abs().max() < 5 / math.sqrt(len(mask))


def test_torchs_generator_decides():
    x = torch.empty(7, 5)
    masks = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        masks.append((keep_mask(x, 0.5), keep_mask(x, 0.5)))
    assert torch.equal(masks[0][0], masks[2][0]) and torch.equal(masks[0][1], masks[2][1])
    assert not torch.equal(masks[0][0], masks[0][1]) and not torch.equal(masks[0][0], masks[1][0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dropout_divides_what_it_keeps(dtype):
    torch.manual_seed(0)
    x = torch.ones(40, 50, dtype=dtype, requires_grad=True)
    y = dropout(x, 0.25)
    y.sum().backward()
    assert y.dtype == dtype and set(y.detach().flatten().tolist()) == {0.0, float(torch.tensor(1 / 0.75, dtype=dtype))}
    assert x.grad is not None and torch.equal(x.grad, y.detach())


def factors(large: bool = False) -> tuple[Tensor, ...]:
    """x, W, bias, A and B; large ones are multiplied by compiled code."""
    generator = torch.Generator().manual_seed(4)
    n, wide, dtype = (2048, 64, torch.float32) if large else (4, 6, torch.float64)
    shapes = ((3, n, wide), (5, wide), (5,), (2, wide), (5, 2))
    return tuple(torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes)


def test_gradients_are_those_of_the_formula():
    x, w, bias, a, b = factors()
    torch.manual_seed(1)
    y = low_rank_linear(x, w.detach(), bias, a, b, 0.5, 0.3)
    torch.manual_seed(1)
    dropped = x * keep_mask(x, 0.3) / 0.7
    expected = F.linear(x, w.detach(), bias) + 0.5 * F.linear(F.linear(dropped, a), b)
    torch.testing.assert_close(y, expected)
    up = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(2))
    ours, theirs = (torch.autograd.grad(out, (x, bias, a, b), up) for out in (y, expected))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_second_derivatives(p):
    generator = torch.Generator().manual_seed(4)
    x, w, bias, a, b = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((3, 8), (4, 8), (4,), (2, 8), (4, 2))
    )

    def y(*operands: Tensor) -> Tensor:
        torch.manual_seed(1)
        return low_rank_linear(operands[0], w.detach(), *operands[1:], 0.5, p).square()

    assert torch.autograd.gradgradcheck(y, (x, bias, a, b))
    first = torch.autograd.grad(y(x, bias, a, b).sum(), (x, bias, a, b))
    again = torch.autograd.grad(y(x, bias, a, b).sum(), (x, bias, a, b), create_graph=True)
    torch.testing.assert_close(first, again)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_second_derivatives_beside_compiled_products(p):
    x, w, a, b = (torch.randn(shape).requires_grad_() for shape in ((1024, 64), (8, 64), (4, 64), (8, 4)))
    first, again = (
        torch.autograd.grad(low_rank_linear(x, w.detach(), None, a, b, 0.5, p).square().mean(), (x, a, b), **graph)
        for graph in ({}, {"create_graph": True})
        if torch.manual_seed(1)
    )
    torch.testing.assert_close(first, again)
    assert all(t.requires_grad for t in again)


def test_second_derivatives_where_b_trains_alone():
    x, w, a, b = (torch.randn(shape) for shape in ((3, 8), (4, 8), (2, 8), (4, 2)))
    y = low_rank_linear(x, w, None, a, b.requires_grad_(), 0.5)
    with pytest.raises(PeftlabError, match="second derivatives of LoRA need A to train too"):
        torch.autograd.grad(y.square().sum(), b, create_graph=True)


LONG = (2 * MASK_BLOCK + 1000) // 64  # rows of width 64 that make two blocks or more, the last of them shorter


@pytest.fixture(params=["compiled", "torch"])
def products(request, monkeypatch):
    """By numba's code, or as without it."""
    if request.param == "torch":
        monkeypatch.setattr(functional, "_kernels", lambda: None)
    elif functional._kernels() is None:
        pytest.skip("no numba")


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.01)]
)
@pytest.mark.parametrize(("threads", "p", "rank"), [(1, 0.1, 2), (2, 0.1, 5), (2, 0.0, 3), (1, 0.3, 32)])
def test_inputs_of_several_blocks_have_the_formulas_gradients(dtype, tolerance, threads, p, rank):
    """The dropout of backward is that of forward in each block, and bf16 loses no more than by one product."""
    generator = torch.Generator().manual_seed(4)
    x, w, a, b, up = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((LONG + 1, 64), (24, 64), (rank, 64), (24, rank), (LONG + 1, 24))
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(1)
        y = low_rank_linear(x, w.detach(), None, a, b, 0.5, p)
        ours = (y, *torch.autograd.grad(y, (x, a, b), up.detach()))
    finally:
        torch.set_num_threads(before)
    torch.manual_seed(1)
    keep = keep_mask(x, p) if p else 1
    exact = [t.detach().double().requires_grad_() for t in (x, a, b)]
    dropped = exact[0] * keep / (1 - p)
    expected = F.linear(exact[0], w.detach().double()) + 0.5 * F.linear(F.linear(dropped, exact[1]), exact[2])
    theirs = (expected, *torch.autograd.grad(expected, exact, up.detach().double()))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - other).norm() < tolerance * other.norm()


@pytest.mark.parametrize("trains", ["x", "a", "b", "xa", "xb", "ab"])
def test_each_gradient_alone_is_what_it_is_among_all(trains):
    def gradients(names: str) -> dict[str, Tensor]:
        x, w, _, a, b = factors()
        inputs = {"x": x, "a": a, "b": b}
        for name, tensor in inputs.items():
            tensor.requires_grad_(name in names)
        torch.manual_seed(1)
        y = low_rank_linear(x, w.detach(), None, a, b, 0.5, 0.3).square().sum()
        return dict(zip(names, torch.autograd.grad(y, [inputs[name] for name in names]), strict=True))

    every = gradients("xab")
    for name, gradient in gradients(trains).items():
        torch.testing.assert_close(gradient, every[name])


@pytest.mark.parametrize("p", [0.1, 1e-4, 0.5, 0.9999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_products_drop_what_the_rule_drops(p, dtype):
    """With A the identity of sixteen places the product is the dropped input itself: bits are compared."""
    kernels = pytest.importorskip("peftlab.methods.lora.kernels")
    dropped = Dropped(2**64 - 3, p)
    x = torch.arange(1, 1 + 4099 * 32, dtype=torch.float32).remainder(251).add(1).view(4099, 32).to(dtype)
    kept = torch.from_numpy(dropped.kept(0, x.numel())).view(x.shape)
    for half in (slice(0, 16), slice(16, 32)):
        a = torch.zeros(16, 32, dtype=dtype)
        a[:, half] = torch.eye(16, dtype=dtype)
        h = kernels.narrow_product(x, a, dropped)
        assert h.dtype == dtype and torch.equal(h, (x * kept)[:, half])
        grad_x = x.clone()
        grad_a = kernels.narrow_gradients(None, a, h, grad_x, dropped)
        assert grad_a is None
        expected = x.clone()
        expected[:, half] += h * kept[:, half]
        assert torch.equal(grad_x, expected)


def test_a_long_mask_keeps_its_law_and_does_not_depend_on_threads():
    """Parts are decided one after another; the number of elements is no multiple of a part's, nor of a word's."""
    like, masks, before = torch.empty(3 * MASK_BLOCK + 13), [], torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            torch.manual_seed(3)
            masks.append(keep_mask(like, 0.1))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*masks)
    assert masks[0].unique().tolist() == [0, 1]
    for part in masks[0].double().split(MASK_BLOCK)[:3]:
        assert abs(part.mean() - 0.9) < 5 * math.sqrt(0.09 / len(part))
    parts = torch.corrcoef(torch.stack(masks[0].double().split(MASK_BLOCK)[:3])) - torch.eye(3)
    assert parts.abs().max() < 5 / math.sqrt(MASK_BLOCK)


def test_maps_with_the_same_input_have_masks_of_their_own():
    x = torch.ones(64, 64)
    a, b = torch.eye(64), torch.eye(64)
    torch.manual_seed(0)
    one, other = (low_rank_linear(x, torch.zeros(64, 64), None, a, b, 1.0, 0.5) for _ in range(2))
    share = (one == other).double().mean()
    assert abs(share - 0.5) < 5 * math.sqrt(0.25 / x.numel())


@pytest.mark.parametrize("large", [False, True])
def test_a_restored_generator_gives_the_same_step(large):
    """A resumed run restores the generator's state; the state may lie anywhere between two masks."""
    x, w, bias, a, b = factors(large)
    torch.manual_seed(5)
    torch.rand(3)
    state = torch.get_rng_state()
    steps = []
    for _ in range(2):
        torch.set_rng_state(state)
        y = low_rank_linear(x, w.detach(), bias, a, b, 0.5, 0.3)
        steps.append((y, *torch.autograd.grad(y.square().sum(), (x, a, b)), torch.get_rng_state()))
    assert all(torch.equal(one, other) for one, other in zip(*steps, strict=True))


@pytest.mark.parametrize("large", [False, True])
def test_checkpointing_draws_the_same_masks_again(large):
    x, w, bias, a, b = factors(large)

    def forward(x: Tensor) -> Tensor:
        return low_rank_linear(x, w.detach(), bias, a, b, 0.5, 0.3).square().sum()

    torch.manual_seed(1)
    plain = torch.autograd.grad(forward(x), (x, a, b))
    torch.manual_seed(1)
    recomputed = torch.autograd.grad(checkpoint(forward, x, use_reentrant=False), (x, a, b))
    assert all(torch.equal(one, other) for one, other in zip(plain, recomputed, strict=True))


def kept_bytes(net: nn.Module, x: Tensor) -> int:
    """Return the bytes that a forward pass keeps for backward, parameters apart, each storage once."""
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        net(x)
    return sum(storages.values())


@pytest.mark.parametrize(
    ("p", "trains", "per_element", "per_row"),
    [(0.0, "AB", 4, 8), (0.1, "AB", 5, 8), (0.1, "A", 5, 0), (0.1, "B", 1, 8), (0.0, "", 0, 0), (0.1, "", 1, 0)],
)
def test_what_a_map_keeps_for_backward(p, trains, per_element, per_row):
    """The input for A, the r values a row that B multiplies, and a byte of mask an element."""
    net = peftlab.inject_lora(nn.Sequential(nn.Linear(32, 16)), r=2, lora_dropout=p, target_modules=["0"]).train()
    for side in "AB":
        net.get_parameter(f"0.lora_{side}").requires_grad_(side in trains)
    assert kept_bytes(net, torch.randn(8, 32, requires_grad=True)) == 8 * 32 * per_element + 8 * per_row


def test_compiled_products_keep_no_mask():
    pytest.importorskip("numba")
    net = peftlab.inject_lora(nn.Sequential(nn.Linear(64, 16)), r=2, lora_dropout=0.1, target_modules=["0"]).train()
    assert kept_bytes(net, torch.randn(2048, 64, requires_grad=True)) == 2048 * (64 * 4 + 8)


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_compiled_products_count_the_same_flops(p, monkeypatch):
    pytest.importorskip("numba")
    x, w, a, b = torch.randn(2048, 64, requires_grad=True), torch.randn(16, 64), torch.randn(3, 64), torch.randn(16, 3)
    counted = []
    for compiled in (True, False):
        if not compiled:
            monkeypatch.setattr(functional, "_kernels", lambda: None)
        with CountFlops() as counter:
            y = low_rank_linear(x, w, None, a.requires_grad_(), b.requires_grad_(), 1.0, p)
            y.sum().backward()
        counted.append(counter.flops)
    assert counted[0] == counted[1] > 0
