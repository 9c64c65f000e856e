"""A batch whose rows use different adapters gives each row what its adapter gives alone."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import transformers
from test_several_adapters import changed, without_objects
from tiny_models import LABELS, base, batch, logits
from torch import Tensor, nn

import peftlab
from peftlab import BitFitConfig, HoulsbyConfig, LoraConfig, PeftlabError
from peftlab.methods.config import FullConfig, MethodConfig
from peftlab.methods.inject import BASE

LORA = {
    "q": LoraConfig(r=4, lora_alpha=8),
    "all": LoraConfig(r=2, lora_alpha=3, use_rslora=True, target_modules="all-linear"),
    "dora": LoraConfig(r=3, use_dora=True),
    "pissa": LoraConfig(r=2, init_lora_weights="pissa", bias="lora_only"),
}
OTHERS: dict[str, MethodConfig] = {"houlsby": HoulsbyConfig(bottleneck=6), "bitfit": BitFitConfig()}


def several(model: nn.Module, configs: dict[str, Any]) -> nn.Module:
    torch.manual_seed(7)
    for name, config in configs.items():
        changed(peftlab.inject(model, config, name=name))
    return model


def alone(model: nn.Module, name: str, inputs: dict[str, Tensor]) -> Tensor:
    if name == BASE:
        with peftlab.disabled(model):
            return logits(model, inputs)
    peftlab.set_adapter(model, name)
    return logits(model, inputs)


def check(model: nn.Module, names: list[str], inputs: dict[str, Tensor]) -> None:
    """Assert that each row is its adapter's, and that the others' would not do."""
    each = {name: alone(model, name, inputs) for name in set(names)}
    before = without_objects(model)
    with peftlab.adapter_names(model, names):
        mixed = logits(model, inputs)
    assert without_objects(model) == before
    for row, name in enumerate(names):
        for other, expected in each.items():
            difference = (mixed[row] - expected[row]).abs().max()
            assert difference <= 1e-5 if other == name else difference > 1e-3


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "llama", "opt", "t5", "vit", "albert"])
def test_each_row_as_alone(architecture):
    model = several(base(architecture), LORA)
    check(model, ["q", BASE, "all", "dora", "q", "pissa", "all"], batch(architecture, 7))


def test_other_methods_and_their_heads():
    model = several(base("bert"), {"q": LORA["q"], **OTHERS})
    check(model, ["houlsby", "q", BASE, "bitfit", "q", "houlsby"], batch("bert", 6))


def test_fused_projections_and_convolutions():
    parts = LoraConfig(r=2, target_modules=["qkv_proj.q", "qkv_proj.v"])
    check(several(base("phi3"), {"parts": parts, "q": LORA["q"]}), ["q", "parts", BASE], batch("phi3", 3))
    convolution = LoraConfig(r=2, target_modules=["projection"])
    check(several(base("vit"), {"conv": convolution, "q": LORA["q"]}), ["q", "conv", "conv", BASE], batch("vit", 4))


def test_embeddings():
    words = LoraConfig(r=2, target_modules=["wte", "c_attn"])
    places = LoraConfig(r=2, target_modules=["wpe"])
    check(several(base("gpt2"), {"words": words, "places": places}), ["places", "words", BASE], batch("gpt2", 3))


def test_experts():
    experts = LoraConfig(r=2, target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    check(several(base("mixtral"), {"experts": experts, "q": LORA["q"]}), ["q", "experts", BASE], batch("mixtral", 3))


def test_one_adapter_for_all_rows():
    model = several(base("bert"), {"q": LORA["q"], "all": LORA["all"]})
    expected = alone(model, "q", batch("bert"))
    with peftlab.adapter_names(model, ["q"] * 4):
        assert torch.equal(logits(model, batch("bert")), expected)
    base_alone = alone(model, BASE, batch("bert"))
    with peftlab.adapter_names(model, [BASE] * 4):
        assert torch.equal(logits(model, batch("bert")), base_alone)


def test_a_broken_adapter_spoils_its_own_rows_only():
    model = several(base("llama"), {"q": LORA["q"], "bad": LORA["q"]})
    expected = alone(model, "q", batch("llama"))
    peftlab.set_adapter(model, "bad")
    with torch.no_grad():
        for name, parameter in peftlab.trainable_parameters(model).items():
            if ".lora_" in name:
                parameter.fill_(float("nan"))
    with peftlab.adapter_names(model, ["q", "bad", "q", "q"]):
        mixed = logits(model, batch("llama"))
    rows = [0, 2, 3]
    torch.testing.assert_close(mixed[rows], expected[rows])
    assert mixed[1].isnan().all()


def language_model(kind: str = "llama") -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "bart":
        layers = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
        heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
        config = transformers.BartConfig(
            d_model=32, encoder_ffn_dim=32, decoder_ffn_dim=32, forced_eos_token_id=None, **layers, **heads, **sizes
        )
        model: nn.Module = transformers.BartForConditionalGeneration(config)
    else:
        config = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, **sizes
        )
        model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data *= 8
    return several(model.eval(), {"a": LoraConfig(r=3, target_modules="all-linear"), "b": LoraConfig(r=2)})


@pytest.mark.parametrize("kind", ["llama", "bart"])
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}], ids=["greedy", "beams", "returned"]
)
def test_generation(kind, options):
    model: Any = language_model(kind)
    ids = torch.randint(3, 61, (3, 5), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, **options}
    names, alone = ["a", BASE, "b"], []
    for row, name in enumerate(names):
        with peftlab.adapter_names(model, [name]):
            one = model.generate(ids[row : row + 1], attention_mask=torch.ones(1, 5, dtype=torch.long), **options)
        if name != BASE:
            peftlab.set_adapter(model, name)
            twin = model.generate(ids[row : row + 1], attention_mask=torch.ones(1, 5, dtype=torch.long), **options)
            assert torch.equal(one, twin)
        alone.append(one)
    with peftlab.adapter_names(model, names):
        mixed = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert torch.equal(mixed, torch.cat(alone))
    assert len({tuple(row.tolist()) for row in mixed}) == len(mixed)
    assert "generate" not in vars(model)


def test_equal_to_pefts_mixed_batch(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, **sizes
    )
    plain = transformers.LlamaForCausalLM(config).eval()
    state = {key: value.clone() for key, value in plain.state_dict().items()}
    names, theirs = ["a", BASE, "b", "a", BASE, "b"], plain
    for name, rank in (("a", 4), ("b", 2)):
        fields = peft.LoraConfig(r=rank, lora_alpha=9, init_lora_weights=False, target_modules=["q_proj", "down_proj"])
        if isinstance(theirs, peft.PeftModel):
            theirs.add_adapter(name, fields)
        else:
            theirs = peft.get_peft_model(theirs, fields, adapter_name=name)
    theirs.eval().save_pretrained(tmp_path)
    model = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict(state)
    for name in ("a", "b"):
        peftlab.load_adapter(model, tmp_path / name, name=name)
    ids = torch.randint(3, 61, (6, 5), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), peftlab.adapter_names(model, names):
        torch.testing.assert_close(model(ids).logits, theirs(input_ids=ids, adapter_names=names).logits)


def test_what_is_refused():
    model = several(base("bert"), {"q": LORA["q"], "all": LORA["all"]})
    before, expected = without_objects(model), logits(model, batch("bert"))
    with pytest.raises(PeftlabError, match=r"no adapter 'al'.*'all'"), peftlab.adapter_names(model, ["q", "al"]):
        pass
    with pytest.raises(PeftlabError, match="names no row"), peftlab.adapter_names(model, []):
        pass
    for names in (["q"], ["q", "all"], ["q"] * 3, ["q"] * 8):
        with pytest.raises(PeftlabError, match="names, and the batch 4 rows"), peftlab.adapter_names(model, names):
            logits(model, batch("bert"))
    with pytest.raises(PeftlabError, match="is for inference"), peftlab.adapter_names(model, ["q", "all"] * 2):
        model.train()(**batch("bert"))
    assert without_objects(model.eval()) == before
    assert torch.equal(logits(model, batch("bert")), expected)
    with pytest.raises(PeftlabError, match="no adapter 'q'"), peftlab.adapter_names(base("bert"), ["q"]):
        pass


def test_a_module_whose_input_is_not_the_batch_is_refused_by_name():
    model = several(base("deberta-v2"), {"all": LORA["all"], "q": LORA["q"]})  # it projects its relative positions
    with (
        pytest.raises(PeftlabError, match=r"pos_key_proj receives a tensor of shape \(1, 16, 32\)"),
        peftlab.adapter_names(model, ["q", "all", BASE, "q"]),
    ):
        logits(model, batch("deberta-v2"))
    model = several(base("vit"), {"full": FullConfig(), "q": LORA["q"]})
    with (
        pytest.raises(PeftlabError, match=r"adapters change vit.embeddings and vit.embeddings.patch"),
        peftlab.adapter_names(model, ["q", "full"]),
    ):
        pass
    assert logits(model, batch("vit")).shape == (4, LABELS)
