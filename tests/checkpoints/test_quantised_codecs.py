"""Our own codecs of bitsandbytes' formats, beside bitsandbytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from peftlab.checkpoints import quantised
from peftlab.checkpoints.quantised import int8_values, rows_int8

bitsandbytes = pytest.importorskip("bitsandbytes")
F = bitsandbytes.functional

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
dtypes = st.sampled_from(DTYPES)
fuzz = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@st.composite
def weights(draw: st.DrawFn, columns: st.SearchStrategy[int]) -> Tensor:
    """Draw a matrix, some of whose blocks are zero, tiny, of one value, or at the midpoints between two codes."""
    rows, width = draw(st.integers(1, 70)), draw(columns)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    weight = torch.randn(rows, width, generator=generator) * draw(st.sampled_from([1e-6, 0.02, 1.0, 100.0]))
    flat = weight.view(-1)
    match draw(st.integers(0, 4)):
        case 1:
            flat[: quantised.BLOCK] = 0
        case 2:
            flat[-quantised.BLOCK :] = flat[-1]
        case 3:
            flat[: quantised.BLOCK] = torch.cat([torch.ones(1), quantised._MIDPOINTS.repeat(5)])[
                : min(quantised.BLOCK, len(flat))
            ]
        case 4:
            flat[: quantised.BLOCK] *= 1e-36
    return weight.to(draw(dtypes))


@fuzz
@given(weights(st.integers(1, 200)), st.booleans())
def test_nf4_has_bitsandbytes_bytes(weight: Tensor, double: bool) -> None:
    theirs, state = F.quantize_4bit(weight, quant_type="nf4", compress_statistics=double)
    flat = weight.view(-1)
    magnitudes = quantised.block_magnitudes(flat)
    assert torch.equal(quantised.pack_nf4(flat, magnitudes), theirs.view(-1))
    if not double:
        assert torch.equal(magnitudes, state.absmax)
        return
    ours = quantised.nest_magnitudes(magnitudes)
    assert torch.equal(quantised.dynamic_code(), state.state2.code)
    assert torch.equal(ours.offset, state.offset)
    assert torch.equal(ours.magnitudes, state.state2.absmax)
    assert torch.equal(ours.codes, state.absmax)


@fuzz
@given(weights(st.sampled_from([64, 128, 192, 576])), st.booleans(), dtypes)
def test_nf4_has_the_values_of_a_live_layer(weight: Tensor, double: bool, dtype: torch.dtype) -> None:
    """The product with the identity is the weight that ``Linear4bit`` computes with."""
    layer = bitsandbytes.nn.Linear4bit(
        weight.shape[1], weight.shape[0], bias=False, compute_dtype=dtype, quant_type="nf4", compress_statistics=double
    )
    layer.weight = bitsandbytes.nn.Params4bit(weight.clone(), False, quant_type="nf4", compress_statistics=double)
    layer = layer.to("cpu")
    assert layer.weight.quant_state.dtype == weight.dtype
    ours = quantised.nf4_values(weight, double=double, dtype=dtype)
    state = layer.weight.quant_state
    state.dtype = dtype
    assert torch.equal(ours, F.dequantize_4bit(layer.weight.data, state).float())
    seen = layer(torch.eye(weight.shape[1], dtype=dtype, requires_grad=True)).t()
    torch.testing.assert_close(ours, seen.float(), rtol=0, atol=0)


@fuzz
@given(weights(st.integers(1, 200)), dtypes)
def test_nf4_of_rows_that_are_no_multiple_of_a_block(weight: Tensor, dtype: torch.dtype) -> None:
    """Compared with bitsandbytes' kernel in torch: its AVX-512 kernel reads the wrong magnitudes for such rows."""
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute as compiled

    plain = compiled.__wrapped__
    theirs, state = F.quantize_4bit(weight, quant_type="nf4")
    values = plain(theirs.view(-1), state.absmax, state.code, quantised.BLOCK, weight.shape, dtype)
    assert torch.equal(quantised.nf4_values(weight, double=False, dtype=dtype), values.float())


def test_nf4_of_a_weight_larger_than_one_step() -> None:
    """Blocks are counted over the whole tensor, however it is cut into steps."""
    torch.manual_seed(0)
    weight = torch.randn(1 << 8, (1 << 13) + 64)
    theirs, state = F.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    assert weight.numel() > quantised._STEP
    ours = quantised.nf4_values(weight, double=True, dtype=torch.float32)
    assert torch.equal(ours, F.dequantize_4bit(theirs, state))


@fuzz
@given(weights(st.integers(1, 200)), dtypes)
def test_int8_has_bitsandbytes_codes_and_a_live_layers_values(weight: Tensor, dtype: torch.dtype) -> None:
    weight = torch.where(weight.abs().amax(1, keepdim=True).half() > 0, weight, torch.ones_like(weight))
    weight = weight.clamp(-6e4, 6e4)
    layer = bitsandbytes.nn.Linear8bitLt(weight.shape[1], weight.shape[0], bias=False, has_fp16_weights=False)
    layer.weight = bitsandbytes.nn.Int8Params(weight.clone(), requires_grad=False, has_fp16_weights=False)
    layer = layer.to("cpu").train()
    codes, magnitudes = rows_int8(weight)
    assert torch.equal(codes, layer.weight.CB) and torch.equal(magnitudes, layer.weight.SCB)
    ours = int8_values(weight, dtype=dtype)
    seen = layer(torch.eye(weight.shape[1], dtype=dtype)).t()
    torch.testing.assert_close(ours, seen.float(), rtol=0, atol=0)
