"""Models that bitsandbytes quantised: they decode as their dequantised weights do, from as few bits as represent them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPTNeoConfig, GPTNeoForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from peftlab.decoding.decode import StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.models.config import BaseConfig
from peftlab.models.load import load_base, storage
from peftlab.models.quantised import dequantised, quantised_linears

pytest.importorskip("bitsandbytes")
STOP = StoppingCriteria(24)
TOLD = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
SIZES = {"vocab_size": 80, "hidden_size": 64, "max_position_embeddings": 128, "eos_token_id": None}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    shape = {"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    place = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**SIZES, **shape)).save_pretrained(place)
    return place


def loaded(place: Path, base: BaseConfig, precision: str = "fp32") -> PreTrainedModel:
    return load_base(str(place), "AutoModelForCausalLM", **storage(base, precision))[0]


def plain(quantised: PreTrainedModel) -> PreTrainedModel:
    """A model whose weights are what those of a quantised one stand for."""
    model = type(quantised)(quantised.config).to(quantised.dtype).eval()
    maps = dict(quantised_linears(quantised))
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        same = not (owner in maps and name.endswith(".weight"))
        parameter.data = quantised.get_parameter(name) if same else dequantised(maps[owner], quantised.dtype)
    return model


INT8 = BaseConfig(dtype="int8")
BASES = {"nf4": BaseConfig(dtype="nf4"), "double": BaseConfig(dtype="nf4", double_quant=True), "int8": INT8}


@pytest.mark.parametrize("base", BASES.values(), ids=BASES)
def test_a_quantised_base_decodes_as_its_values_do(stored: Path, base: BaseConfig) -> None:
    model = loaded(stored, base)
    engine = build_engine(model)
    prompts = torch.randint(80, (3, 7), generator=torch.Generator().manual_seed(1))
    want = plain(model).generate(prompts, **TOLD)[:, 7:].tolist()
    assert [out.tokens for out in decode(engine, prompts.tolist(), STOP)] == want
    assert [decode(engine, [prompt], STOP)[0].tokens for prompt in prompts.tolist()] == want
    assert not any(module.training for module in model.modules())
    if base is INT8:
        assert "8-bit rows" in engine.packed
    assert engine.kind.startswith("flat, ")


@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_bf16_products_take_16_bits_of_a_weight(stored: Path, name: str) -> None:
    model = loaded(stored, BASES[name], "bf16")
    engine = build_engine(model)
    assert engine.kind.startswith("flat") and not any("bit" in kept for kept in engine.packed)
    wide, _ = load_base(str(stored), "AutoModelForCausalLM")
    for at, module in quantised_linears(model):
        values = dequantised(module, torch.bfloat16)
        assert torch.equal(values, dequantised(module, torch.float32).bfloat16())
        wide.get_submodule(at).get_parameter("weight").data = values.float()
    assert "weights in 16 bits" in build_engine(wide).packed


def test_a_checkpoint_that_bitsandbytes_wrote_decodes_in_the_dtype_asked_for(stored: Path, tmp_path: Path) -> None:
    written = loaded(stored, BASES["nf4"], "bf16")
    written.save_pretrained(tmp_path)
    model, _ = load_base(str(tmp_path), "AutoModelForCausalLM", dtype=torch.float32)
    assert model.dtype == torch.float32 and build_engine(model).kind.startswith("flat")
    ids = torch.randint(80, (1, 6), generator=torch.Generator().manual_seed(0))
    reference, tokens = plain(model), ids
    with torch.no_grad():  # generate would hold back the end token that the written configuration names by default
        for _ in range(24):
            tokens = torch.cat([tokens, reference(tokens).logits[:, -1].argmax(-1, keepdim=True)], 1)
    want = tokens[0, 6:].tolist()
    assert decode(build_engine(model), ids.tolist(), STOP)[0].tokens == want


def test_int8_of_a_family_that_is_not_flattened_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    told = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}
    GPTNeoForCausalLM(GPTNeoConfig(**SIZES, **told)).save_pretrained(tmp_path)
    model = loaded(tmp_path, INT8)
    engine = build_engine(model)
    assert engine.kind.startswith("transformers")
    prompts = torch.randint(80, (2, 7), generator=torch.Generator().manual_seed(1))
    want = plain(model).generate(prompts, **TOLD)[:, 7:].tolist()
    assert [out.tokens for out in decode(engine, prompts.tolist(), STOP)] == want
    assert not any(module.training for module in model.modules())
