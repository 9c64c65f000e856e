"""Packed weights: codes and scales are found in float32 weights bit for bit or not at all, and products use them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from peftlab.decoding.cache import Block, KVCache
from peftlab.decoding.decode import StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.model_free import PromptLookup
from peftlab.decoding.packed import CodedWeight, coded_product, coded_weight
from peftlab.references import locate

pytestmark = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="torch without FBGEMM's kernels"
)


# What GGUF's types hold at random: where the float16 scales and minima of a block are, and their usual sizes. The rest
# are codes, and the 6-bit scales of the K types.
HALVES = {
    "Q4_0": {0: 0.01},
    "Q4_1": {0: 0.01, 2: -0.1},
    "Q5_0": {0: 0.01},
    "Q5_1": {0: 0.01, 2: -0.1},
    "Q8_0": {0: 0.001},
    "Q3_K": {108: 0.003},
    "Q4_K": {0: 0.001, 2: 0.001},
    "Q5_K": {0: 0.001, 2: 0.001},
    "Q6_K": {208: 0.0005},
    "IQ4_NL": {0: 0.001},
    "IQ4_XS": {0: 0.0001},
}


def gguf_weight(kind: str, outputs: int, inputs: int, seed: int) -> Tensor:
    """A weight of random blocks of one of GGUF's types, dequantised by its own package."""
    gguf = pytest.importorskip("gguf")
    random, of_type = np.random.default_rng(seed), gguf.GGMLQuantizationType[kind]
    size, nbytes = gguf.GGML_QUANT_SIZES[of_type]
    data = random.integers(0, 255, (outputs, inputs // size, nbytes), dtype=np.uint8)
    if kind == "Q8_0":
        data[data == 128] = 127  # files have codes from -127 to 127
    for place, usual in HALVES[kind].items():
        halves = (usual * random.uniform(0.5, 1.5, (outputs, inputs // size, 1))).astype(np.float16)
        data[..., place : place + 2] = halves.view(np.uint8)
    return torch.from_numpy(gguf.dequantize(data.reshape(outputs, -1), of_type).copy())


def weight_of(bits: int, outputs: int, groups: int, seed: int) -> Tensor:
    """A weight as GGUF's Q4_1 or Q8_0 dequantises to: scales and minima in 16 bits, the largest code is used."""
    generator = torch.Generator().manual_seed(seed)
    scales = (torch.rand(outputs, groups, 1, generator=generator) * 0.02).half().float()
    minima = (torch.randn(outputs, groups, 1, generator=generator) * 0.1).half().float()
    low, high = (0, 15) if bits == 4 else (-127, 127)
    codes = torch.randint(low, high + 1, (outputs, groups, 32), generator=generator).float()
    codes[..., 7] = high
    return (scales * codes + (minima if bits == 4 else 0)).flatten(1)


def restored(blocks: CodedWeight) -> Tensor:
    codes = blocks.codes.float().unflatten(1, (-1, blocks.size))
    minima = 0 if blocks.minima is None else blocks.minima[..., None]
    return (blocks.scales[..., None] * codes + minima).flatten(1)


@given(
    bits=st.sampled_from([4, 8]),
    outputs=st.integers(1, 400),
    groups=st.integers(1, 5),
    rows=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=25)
def test_blocks_are_found_and_multiply_as_the_weight(
    bits: int, outputs: int, groups: int, rows: int, seed: int
) -> None:
    weight = weight_of(bits, outputs, groups, seed)
    blocks = coded_weight([weight])
    assert blocks is not None
    assert torch.equal(restored(blocks), weight)
    x, bias = torch.randn(1, rows, weight.shape[1]), torch.randn(outputs)
    want = x.double() @ weight.double().T + bias
    got = coded_product(blocks, bias)(x)
    assert got.shape == (1, rows, outputs)
    # A sum's error grows with what is summed, not with the sum.
    summed = x.double().abs() @ (weight.double().abs() + 0.3).T + bias.abs()
    assert ((got - want).abs() <= 3e-6 * summed).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_one_unit_in_the_last_place_off_is_not_of_blocks(bits: int) -> None:
    weight = weight_of(bits, 40, 3, seed=1)
    assert coded_weight([weight]) is not None
    for place in ((0, 20), (39, 70)):
        changed = weight.clone()
        changed[place] = torch.nextafter(changed[place], torch.tensor(torch.inf))
        assert coded_weight([changed]) is None


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_numbers_that_are_not_finite_are_not_of_blocks(value: float) -> None:
    weight = weight_of(4, 3, 2, seed=2)
    weight[1, 40] = value
    assert coded_weight([weight]) is None


def test_equal_weights_and_codes_that_leave_out_the_largest_are_of_blocks() -> None:
    weight = torch.full((2, 64), 0.3)
    weight[1, :32] = torch.tensor([0.01]).half().float() * (torch.arange(32) % 12 + 3) - 0.25
    blocks = coded_weight([weight])
    assert blocks is not None and torch.equal(restored(blocks), weight)
    assert coded_weight([torch.randn(2, 64)]) is None and coded_weight([weight[:, :48]]) is None


@pytest.mark.model
def test_the_blocks_of_a_gguf_file_are_those_it_stores(smollm2: str) -> None:
    gguf = pytest.importorskip("gguf")
    stored = {t.name: t for t in gguf.GGUFReader(locate(smollm2)).tensors}
    for name, kind in (("blk.3.attn_k.weight", "Q4_1"), ("token_embd.weight", "Q8_0")):
        tensor = stored[name]
        assert tensor.tensor_type.name == kind
        data = tensor.data[:300].copy()
        blocks = coded_weight([torch.from_numpy(gguf.dequantize(data, tensor.tensor_type).copy())])
        assert blocks is not None
        raw = torch.from_numpy(data).unflatten(1, (-1, 20 if kind == "Q4_1" else 34))
        assert torch.equal(blocks.scales, raw[..., :2].contiguous().view(torch.float16).float()[..., 0])
        if kind == "Q4_1":
            assert blocks.minima is not None
            assert torch.equal(blocks.minima, raw[..., 2:4].contiguous().view(torch.float16).float()[..., 0])
            assert torch.equal(
                blocks.codes.to(torch.uint8), torch.cat((raw[..., 4:] & 15, raw[..., 4:] >> 4), -1).flatten(1)
            )
        else:
            assert torch.equal(blocks.codes, raw[..., 2:].contiguous().view(torch.int8).flatten(1))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_model_of_blocks_decodes_as_transformers_does(bits: int, step: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=80, num_key_value_heads=2, eos_token_id=None, **sizes)).eval()
    for seed, module in enumerate(m for m in model.modules() if isinstance(m, nn.Linear)):
        outputs, inputs = module.weight.shape
        module.weight.data = weight_of(bits, outputs, inputs // 32, seed)
    engine = build_engine(model)
    assert engine.kind == f"{step}, {bits}-bit blocks of 32"

    ids = torch.randint(80, (1, 9))
    cache = KVCache(engine.layers, 1, 9)
    steps = [engine.forward(cache, ids[:, i : i + 1], Block((i,), 1)).logits for i in range(9)]  # a single token each
    want = model(ids).logits.detach()
    torch.testing.assert_close(torch.cat(steps, 1), want, atol=1e-4, rtol=1e-4)
    cache = KVCache(engine.layers, 1, 9)
    steps = [engine.forward(cache, ids[:, i : i + 3], Block((i,), 3)).logits for i in (0, 3, 6)]
    torch.testing.assert_close(torch.cat(steps, 1), want, atol=1e-4, rtol=1e-4)
    whole = engine.forward(KVCache(engine.layers, 1, 9), ids, Block((0,), 9)).logits
    torch.testing.assert_close(whole, want, atol=1e-4, rtol=1e-4)

    prompt, stop = ids[0].tolist(), StoppingCriteria(max_new_tokens=40, eos=frozenset())
    plain = decode(engine, [prompt], stop)[0].tokens
    assert decode(engine, [prompt], stop, PromptLookup())[0].tokens == plain
    told = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    assert model.generate(ids, **told)[0, 9:].tolist() == plain


@pytest.mark.parametrize("kind", HALVES)
def test_a_model_in_any_type_of_gguf_decodes_from_its_codes(kind: str, step: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=60, num_key_value_heads=2, eos_token_id=None, **sizes)).eval()
    for seed, module in enumerate(m for m in model.modules() if isinstance(m, nn.Linear)):
        module.weight.data = gguf_weight(kind, *module.weight.shape, seed)
        blocks = coded_weight([module.weight.data])
        assert blocks is not None and torch.equal(restored(blocks), module.weight.data)
    engine = build_engine(model)
    bits = {"IQ4_NL": 8, "IQ4_XS": 8, "Q3_K": 4, "Q6_K": 7}.get(kind) or int(kind[1])  # as whole numbers
    assert engine.kind == f"{step}, {bits}-bit blocks of {16 if kind in ('Q3_K', 'Q6_K') else 32}"
    ids = torch.randint(60, (1, 5))
    plain = decode(engine, ids.tolist(), StoppingCriteria(20))[0].tokens
    told = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    assert model.generate(ids, **told)[0, 5:].tolist() == plain


def test_maps_of_one_product_may_have_blocks_of_several_sizes() -> None:
    """As llama.cpp stores queries and keys in Q4_K, values in Q6_K."""
    weights = [gguf_weight(kind, 40, 256, 0) for kind in ("Q4_K", "Q6_K")]
    blocks = coded_weight(weights)
    assert blocks is not None and blocks.size == 16
    assert torch.equal(restored(blocks), torch.cat(weights))
    x = torch.randn(2, 256)
    torch.testing.assert_close(coded_product(blocks, None)(x), x @ torch.cat(weights).T, rtol=1e-4, atol=1e-4)
    assert coded_weight([*weights, torch.randn(40, 256)]) is None


def test_only_some_weights_of_blocks_are_said_to_be(step: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=80, **sizes)).eval()
    model.model.layers[0].mlp.down_proj.weight.data = weight_of(4, 64, 3, seed=0)
    others = "packed by oneDNN" if step == "flat" else "weights in 32 bits"
    assert build_engine(model).kind == f"{step}, {others}, 4-bit blocks of 32"
    assert build_engine(model, pack=False).kind == "flat"
