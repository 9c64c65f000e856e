"""Gradients of attention in 16 bits, computed in fp32 on a CPU."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import tiny
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from peftlab.training.attention import gradients_in_fp32

N = 20
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def operands(dtype: torch.dtype, kv_heads: int = 2, n: int = N) -> list[Tensor]:
    """Return queries of 4 heads, keys and values, as a model has them: heads behind positions in memory."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, n, heads, 16) for heads in (4, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator).to(dtype).transpose(1, 2).requires_grad_() for shape in shapes]


def bool_mask() -> Tensor:
    """Return a causal mask whose second row has three padded tokens in front, which see nothing."""
    mask = torch.ones(N, N, dtype=torch.bool).tril().repeat(3, 1, 1, 1)
    mask[1, :, :, :3] = False
    return mask


def added_mask(dtype: torch.dtype) -> Tensor:
    return torch.zeros(3, 1, N, N, dtype=dtype).masked_fill(~bool_mask(), torch.finfo(dtype).min)


def gradients(inputs: list[Tensor], **options: object) -> tuple[Tensor, list[Tensor]]:
    """Return attention, and the gradients of its sum weighted at random."""
    out = functional.scaled_dot_product_attention(*inputs, enable_gqa=True, **options)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return out, list(torch.autograd.grad(out, inputs, weights))


class Kernels(TorchDispatchMode):
    """Within the block the dtypes of what the fused kernel's backward is given are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is BACKWARD:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("how", ["plain", "causal", "bool", "added", "scaled"])
def test_results_are_the_kernels_and_gradients_are_nearer_to_the_exact_ones(dtype, kv_heads, how):
    options = {
        "plain": {}, "causal": {"is_causal": True}, "bool": {"attn_mask": bool_mask()},
        "added": {"attn_mask": added_mask(dtype)}, "scaled": {"scale": 0.5},
    }[how]  # fmt: skip
    inputs = operands(dtype, kv_heads)
    wide = dict(options)
    if how == "added":
        wide["attn_mask"] = added_mask(dtype).double()
    exact = gradients([x.detach().double().requires_grad_() for x in inputs], **wide)[1]
    theirs, their_gradients = gradients(inputs, **options)
    with gradients_in_fp32(), Kernels() as kernels:
        ours, our_gradients = gradients(inputs, **options)
    assert kernels.dtypes == [torch.float32]
    assert torch.equal(ours, theirs)
    for mine, other, right in zip(our_gradients, their_gradients, exact, strict=True):
        error, theirs_off = ((found.double() - right).norm() / right.norm() for found in (mine, other))
        assert error < 4 * torch.finfo(dtype).eps and error < 1.1 * theirs_off


def test_autocast_casts_as_torch_does():
    inputs = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        theirs, their_gradients = gradients(inputs)
        with gradients_in_fp32(), Kernels() as kernels:
            ours, our_gradients = gradients(inputs)
    assert torch.equal(ours, theirs) and ours.dtype == torch.bfloat16 and kernels.dtypes == [torch.float32]
    assert all(grad.dtype == torch.float32 for grad in our_gradients)
    assert all(torch.allclose(*pair, rtol=0.05, atol=0.05) for pair in zip(our_gradients, their_gradients, strict=True))


@pytest.mark.parametrize("why", ["fp32", "fp64 under autocast", "dropout", "a mask that trains"])
def test_other_calls_remain_torchs(why):
    inputs = operands({"fp32": torch.float32, "fp64 under autocast": torch.float64}.get(why, torch.bfloat16))
    options = {"dropout_p": 0.3} if why == "dropout" else {}
    if why == "a mask that trains":
        options["attn_mask"] = added_mask(torch.bfloat16).requires_grad_()
    found = []
    for context in (nullcontext, gradients_in_fp32):
        torch.manual_seed(0)
        with context(), torch.autocast("cpu", torch.bfloat16, enabled="autocast" in why):
            found.append(gradients(inputs, **options))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(*pair) for pair in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_a_run_in_16_bits_trains_by_them(still, rows, tmp_path, checkpointing):
    """With a model without dropout, since calls that drop remain torch's."""
    values = tiny.recipe(still, rows, tmp_path / "run", precision="bf16", gradient_checkpointing=checkpointing)
    with Kernels() as kernels:
        tiny.run(values)
    assert set(kernels.dtypes) == {torch.float32}
