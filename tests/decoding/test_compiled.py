"""The compiled step: its products, its bits in any company, and the architectures that it serves."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peftlab.decoding.cache import Block, WindowedCache, shape_of
from peftlab.decoding.decode import StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.flat import FlatEngine, structure_of
from peftlab.decoding.model_free import PromptLookup, TokenRecycling
from peftlab.decoding.packed import Linear
from peftlab.decoding.table import Window

pytest.importorskip("numba")
compiled = pytest.importorskip(
    "peftlab.decoding.compiled", reason="torch without GNU's OpenMP", exc_type=AttributeError
)
kernels = pytest.importorskip("peftlab.decoding.kernels")
tiled = pytest.importorskip("peftlab.decoding.tiled")


def coded(codes: Tensor, scales: Tensor, minima: Tensor | None = None) -> Tensor:
    """Return a weight of blocks of 32 inputs, [outputs, 32 groups]."""
    weight = codes.float().unflatten(1, (-1, 32)) * scales[..., None]
    return (weight if minima is None else weight + minima[..., None]).flatten(1)


def some_weight(form: str, outputs: int, groups: int, seed: int) -> Tensor:
    """Return a random weight [outputs, 32 groups] that is stored in a form, by the name of GGUF's type for codes."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(outputs, 32 * groups, generator=generator)
    scales = (torch.rand(outputs, groups, generator=generator) * 0.02 + 0.001).half().float()
    minima = torch.randn(outputs, groups, generator=generator).half().float()

    def codes(low: int, high: int) -> Tensor:
        drawn = torch.randint(low, high + 1, (outputs, 32 * groups), generator=generator)
        drawn[:, ::32], drawn[:, 1::32] = high, low
        return drawn

    return {
        "f32": lambda: normal,
        "bf16": lambda: normal.bfloat16().float(),
        "f16": lambda: normal.half().float(),
        "q8_0": lambda: coded(codes(-127, 127), scales),
        "q4_0": lambda: coded(codes(-8, 7), scales),
        "q4_1": lambda: coded(codes(0, 15), scales, minima),
        "q5_1": lambda: coded(codes(0, 31), scales, minima),
        "scales in 32 bits": lambda: coded(codes(-127, 127), scales * 29 / 32),
        "int8 rows": lambda: codes(-127, 127) * (scales[:, :1] * 29 / 32),
        "rounded": lambda: normal.bfloat16().float(),
    }[form]()


FORMS = {
    "f32": (tiled.F32, "weights in 32 bits"),
    "bf16": (tiled.BF16, "weights in 16 bits"),
    "f16": (tiled.F16, "weights in 16 bits"),
    "q8_0": (tiled.INT8, "8-bit blocks of 32"),
    "q4_0": (tiled.UINT4, "4-bit blocks of 32"),
    "q4_1": (tiled.UINT4, "4-bit blocks of 32"),
    "q5_1": (tiled.INT8, "5-bit blocks of 32"),
    "scales in 32 bits": (tiled.INT8, "8-bit blocks of 32"),
    "int8 rows": (tiled.INT8, "8-bit rows"),
    "rounded": (tiled.PAIRS, "weights and inputs in bf16"),
}


def tile(form: str, weights: Sequence[Tensor], bias: Tensor | None = None) -> tiled.TiledWeight:
    """Return the tiles of stacked weights of a form, interleaved if there are two."""
    linears = [Linear(weight, bias) for weight in weights]
    return tiled.tile_linears(linears, interleaved=len(weights) > 1, rounded=form == "rounded")


def multiply(weight: tiled.TiledWeight, x: Tensor, out: Tensor, mode: int) -> Tensor:
    """Return ``out`` after one product of rows x with a weight."""
    instruction, block = np.zeros(1, kernels.INSTRUCTION), np.zeros(1, kernels.BLOCK)
    sums = x.new_empty(torch.get_num_threads() * len(x) + kernels.PADDING, weight.inputs)
    rows = len(x)
    x = F.pad(x, (0, 0, 0, kernels.PADDING), value=float("nan"))  # no output depends on what pads the rows
    x = x.bfloat16() if weight.form == tiled.PAIRS else x
    fields = {"x_stride": x.element_size() * x.shape[1], "out_stride": 4 * out.shape[1], "out": 1, "mode": mode}
    fields |= {"kind": kernels.PRODUCT, "sums": 2 if weight.sums_needed else -1, **weight.fields()}
    for name, value in fields.items():
        instruction[name] = value
    block["program"], block["length"], block["rows"] = instruction.ctypes.data, 1, rows
    block["buffers"][0, :3] = x.data_ptr(), out.data_ptr(), sums.data_ptr()
    kernels.run(block)
    return out


@contextmanager
def threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("form", FORMS)
@given(
    outputs=st.integers(1, 70),
    groups=st.integers(1, 4),
    rows=st.integers(1, 9),
    with_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=15)
def test_products_are_those_of_the_stored_numbers(
    form: str, outputs: int, groups: int, rows: int, with_bias: bool, seed: int
) -> None:
    weight = some_weight(form, outputs, groups, seed)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, weight.shape[1], generator=generator)
    bias = torch.randn(outputs, generator=generator) if with_bias else None
    tiles = tile(form, [weight], bias)
    x = x.bfloat16().float() if form == "rounded" else x
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    # Each of K products and sums is rounded; codes with a minimum or an offset are sums of larger numbers.
    magnitude = x.double().abs() @ weight.double().abs().T + 1
    for start in (0.0, 1.0):
        out = multiply(tiles, x, torch.full((rows, 16 * tiles.tiles), start), kernels.ADD if start else kernels.STORE)
        off = (out[:, :outputs] - expected - start).abs() / magnitude
        assert off.max() < 16 * 2**-23 * weight.shape[1] ** 0.5


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_is_stored_in_the_smallest_exact_form(form: str) -> None:
    tiles = tile(form, [some_weight(form, 100, 4, seed=1)])
    assert (tiles.form, tiles.stored) == FORMS[form]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", [kernels.STORE, kernels.GATED])
def test_a_row_has_the_same_bits_alone_and_in_company_and_on_any_number_of_threads(form: str, mode: int) -> None:
    weight = some_weight(form, 160, 3, seed=3)
    tiles = tile(form, [weight] if mode == kernels.STORE else weight.split(80))
    x = torch.randn(11, 96, generator=torch.Generator().manual_seed(4))
    alone = torch.cat([multiply(tiles, row[None].clone(), torch.zeros(1, 160), mode) for row in x])
    for rows in range(2, 12):
        assert torch.equal(multiply(tiles, x[:rows].clone(), torch.zeros(rows, 160), mode), alone[:rows])
    for n in (1, 2, 3):
        with threads(n):
            assert torch.equal(multiply(tiles, x, torch.zeros(11, 160), mode), alone)
    for rows in (16, 17, 33, 48, 63, 64, 65, 129, 150):  # around the rows that are multiplied together
        some = torch.arange(rows) % 11
        assert torch.equal(multiply(tiles, x[some], torch.zeros(rows, 160), mode), alone[some])


@pytest.mark.parametrize("mode", [kernels.STORE, kernels.ADD, kernels.GATED])
def test_amx_multiplies_what_vectors_do(mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernels.MATRICES:
        pytest.skip("no AMX")
    weight, bias = some_weight("rounded", 160, 3, seed=7), torch.randn(80, generator=torch.Generator().manual_seed(9))
    tiles = tile("rounded", weight.split(80) if mode == kernels.GATED else [weight[:80]], bias)
    x = torch.randn(70, 96, generator=torch.Generator().manual_seed(8))
    by_amx = multiply(tiles, x, torch.ones(70, 160), mode)
    monkeypatch.setattr(kernels, "MATRICES", False)
    torch.testing.assert_close(multiply(tiles, x, torch.ones(70, 160), mode), by_amx, rtol=1e-4, atol=1e-4)


def test_a_gated_product_is_silu_of_the_gate_times_the_factor() -> None:
    weight = some_weight("bf16", 2 * 24, 1, seed=5)  # each half ends within a tile
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(6)) * 5
    tiles = tiled.tile_linears([Linear(weight[:24]), Linear(weight[24:])], interleaved=True)
    out = multiply(tiles, x, torch.zeros(3, 32), kernels.GATED)[:, :24]
    gate, factor = (x.double() @ weight.double().T).chunk(2, 1)
    torch.testing.assert_close(out, (torch.nn.functional.silu(gate) * factor).float(), rtol=1e-5, atol=1e-5)


SIZES = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
ARCHITECTURES: dict[str, dict[str, object]] = {
    "Llama": {"attention_bias": True},
    "Mistral": {"sliding_window": 7},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "Qwen3": {},
    "SmolLM3": {"no_rope_layer_interval": 2},
    "Phi3": {"partial_rotary_factor": 0.5},
}


def tiny(name: str = "Llama", scale: float = 4.0, **options: object) -> transformers.PreTrainedModel:
    """Return a random model whose logits differ enough for greedy text that is not constant."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **ARCHITECTURES[name], **options})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale if parameter.dim() == 2 else 1).add_(
                0.1 * torch.randn_like(parameter) * (parameter.dim() == 1)
            )
    return model


def compiled_engine(model: transformers.PreTrainedModel, **options: object) -> FlatEngine:
    engine = build_engine(model, **options)
    assert isinstance(engine, compiled.CompiledEngine), engine.kind
    return engine


def read(engine: FlatEngine, tokens: Tensor, starts: tuple[int, ...] = (0,), **options: object) -> Tensor:
    """Return the logits of tokens [b, n] in a new cache, whose earlier slots have states of a fixed seed."""
    cache = engine.new_cache(len(starts), 64)
    for row, start in enumerate(starts):
        for layer in range(engine.layers):
            earlier = torch.randn(1, 4, start, 16, generator=torch.Generator().manual_seed(layer))
            cache.write(layer, earlier, Block((0,), start, rows=(row,)))
    return engine.forward(cache, tokens, Block(starts, tokens.shape[1], **options)).logits


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_those_of_the_model(name: str) -> None:
    model = tiny(name, scale=1.0)
    tokens = torch.arange(3, 13)[None]
    with torch.inference_mode():
        own = model(tokens).logits
    torch.testing.assert_close(read(compiled_engine(model), tokens), own, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_logits_of_a_long_prompt_are_those_of_the_model(name: str) -> None:
    model = tiny(name, scale=1.0, max_position_embeddings=512)
    tokens = torch.randint(101, (1, 300), generator=torch.Generator().manual_seed(3))
    engine = compiled_engine(model)
    with torch.inference_mode():
        own = model(tokens).logits
    logits = engine.forward(engine.new_cache(1, 300), tokens, Block((0,), 300)).logits
    torch.testing.assert_close(logits, own, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_have_the_same_bits_alone_in_chains_and_in_batches(name: str) -> None:
    engine = compiled_engine(tiny(name))
    tokens = torch.randint(101, (1, 9), generator=torch.Generator().manual_seed(1))
    cache = engine.new_cache(1, 64)
    alone = torch.cat([engine.forward(cache, tokens[:, [i]], Block((i,), 1)).logits for i in range(9)], 1)
    assert torch.equal(read(engine, tokens), alone)
    together = read(engine, tokens.expand(3, -1), (0, 12, 5))
    for row, start in enumerate((0, 12, 5)):
        assert torch.equal(together[row], read(engine, tokens, (start,))[0])
    with threads(3):
        assert torch.equal(read(engine, tokens), alone)


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_a_path_of_a_tree_has_the_bits_of_a_chain(name: str) -> None:
    engine = compiled_engine(tiny(name))
    tokens = torch.randint(101, (1, 8), generator=torch.Generator().manual_seed(2))
    parents = (-1, -1, 1, 0, 2, 4, 4)  # node i + 1 is tokens[i + 1]; the root is tokens[0]
    logits = read(engine, tokens, (11,), tree=shape_of([parents]))[0]
    for path in ([0, 1, 4], [0, 2, 3, 5, 6], [0, 2, 3, 5, 7]):
        assert torch.equal(logits[path], read(engine, tokens[:, path], (11,))[0])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_in_bf16_rounds_the_inputs_of_products_alone(name: str) -> None:
    """Its logits are nearer to those in float64 of the same weights than the model's own, and have the same bits."""
    model = tiny(name, scale=1.0).bfloat16()
    engine = compiled_engine(model)
    assert "inputs in bf16" in engine.kind
    tokens = torch.randint(101, (1, 40), generator=torch.Generator().manual_seed(1))
    short = tokens[:, :9]
    with torch.inference_mode():
        exact = copy.deepcopy(model).double()(tokens).logits
        own = model(tokens).logits
    long, cache = read(engine, tokens), engine.new_cache(1, 64)
    assert long.dtype == torch.float32
    assert (long - exact).norm() < (own - exact).norm() / 2
    torch.testing.assert_close(long[:, :9], read(engine, short), rtol=0.05, atol=0.05)
    alone = torch.cat([engine.forward(cache, short[:, [i]], Block((i,), 1)).logits for i in range(9)], 1)
    assert torch.equal(read(engine, short), alone)


def test_long_blocks_agree_with_short_ones() -> None:
    engine = compiled_engine(tiny("Mistral"))
    tokens = torch.randint(101, (1, compiled.MOST_TOKENS + 8), generator=torch.Generator().manual_seed(3))
    cache = engine.new_cache(1, 64)
    parts = [engine.forward(cache, part, Block((start,), part.shape[1])).logits for start, part in spans(tokens, 8)]
    torch.testing.assert_close(read(engine, tokens), torch.cat(parts, 1), rtol=1e-3, atol=1e-3)


def spans(tokens: Tensor, n: int) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, tokens.shape[1], n):
        yield start, tokens[:, start : start + n]


def test_parts_of_the_step_are_those_of_the_flattened_one() -> None:
    """Features, left-out sublayers, a window over the cache: what drafts of a target's own layers use."""
    model = tiny(scale=1.0)
    structure = structure_of(model)
    assert structure is not None
    ours, flat = compiled_engine(model, features=(1, 3)), FlatEngine(structure, features=(1, 3))
    tokens = torch.arange(3, 13)[None]
    block = Block((0,), 10)
    outputs = [engine.forward(engine.new_cache(1, 16), tokens, block) for engine in (ours, flat)]
    torch.testing.assert_close(outputs[0].features, outputs[1].features, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(outputs[0].hidden, outputs[1].hidden, rtol=1e-4, atol=1e-4)
    with torch.inference_mode():
        h = [
            engine.run_layers(engine.new_cache(1, 16), engine.embed(tokens, block), block, range(3), {1, 2})[0]
            for engine in (ours, flat)
        ]
    torch.testing.assert_close(h[0], h[1], rtol=1e-4, atol=1e-4)
    windowed = []
    for engine in (ours, flat):
        cache = WindowedCache(engine.layers, 1, 256, Window(2, 5))
        windowed.append([])
        for start in range(0, 200, 20):
            part = torch.arange(start, start + 20)[None] % 101
            windowed[-1].append(engine.forward(cache, part, cache.block([0], [start], 20)).logits)
    torch.testing.assert_close(torch.cat(windowed[0]), torch.cat(windowed[1]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("drafter", [PromptLookup, TokenRecycling], ids=["chains", "trees"])
def test_speculative_decoding_is_lossless(drafter: Callable[[], object]) -> None:
    engine = compiled_engine(tiny("Qwen3"))
    prompts = [[3, 4, 5, 3, 4], [7, 8, 7, 8, 7, 9, 7], [11]]
    plain = [out.tokens for out in decode(engine, prompts, StoppingCriteria(40))]
    outputs = decode(engine, prompts, StoppingCriteria(40), drafter())
    assert [out.tokens for out in outputs] == plain
    assert sum(len(out.steps) for out in outputs) < sum(len(tokens) for tokens in plain)  # some drafts were accepted


@pytest.mark.parametrize("name", ["Gemma", "Cohere"])
def test_other_architectures_keep_their_step(name: str) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES)
    engine = build_engine(getattr(transformers, f"{name}ForCausalLM")(config).eval())
    assert not isinstance(engine, compiled.CompiledEngine)


def test_without_packing_in_float16_or_with_odd_heads_the_step_is_not_compiled() -> None:
    assert build_engine(tiny(), pack=False).kind == "flat"
    assert "compiled" not in build_engine(tiny().half()).kind
    assert "compiled" not in build_engine(tiny(head_dim=8)).kind


def test_without_numba_the_step_is_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("compiled", "kernels", "tiled"):
        monkeypatch.delitem(sys.modules, f"peftlab.decoding.{name}")
        monkeypatch.delattr(f"peftlab.decoding.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    engine = build_engine(tiny())
    assert type(engine) is FlatEngine and "compiled" not in engine.packed


def test_a_block_past_the_cache_is_refused() -> None:
    engine = compiled_engine(tiny())
    with pytest.raises(IndexError, match="a cache of 16 tokens"):
        engine.forward(engine.new_cache(1, 16), torch.zeros(1, 2).long(), Block((15,), 2))
