"""LoRA's variants on every kind of leaf: peft and peftlab read each other's files and answer alike."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    ViTConfig,
)

import peftlab
from peftlab.methods.lora.layers import LowRank, fold_weight, row_norms, spread

SIZE: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDS: dict[str, Any] = {"vocab_size": 200, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
GROUPED: dict[str, Any] = {**SIZE, **WORDS, "num_key_value_heads": 2, "intermediate_size": 96}
MODELS: dict[str, tuple[Any, Any]] = {
    "bert": (BertConfig(**SIZE, intermediate_size=128, vocab_size=200), AutoModelForSequenceClassification),
    "gpt2": (GPT2Config(n_embd=64, n_layer=2, n_head=4, **WORDS), AutoModelForCausalLM),
    "gpt_neox": (GPTNeoXConfig(**SIZE, **WORDS, intermediate_size=128), AutoModelForCausalLM),
    "llama": (LlamaConfig(**GROUPED), AutoModelForCausalLM),
    "phi3": (Phi3Config(**GROUPED), AutoModelForCausalLM),
    "mixtral": (MixtralConfig(**GROUPED, num_local_experts=4), AutoModelForCausalLM),
    "vit": (
        ViTConfig(**SIZE, intermediate_size=128, image_size=32, patch_size=8),
        AutoModelForImageClassification,
    ),
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("bert", {"use_dora": True}),
    ("bert", {"target_modules": ["word_embeddings", "query"]}),
    ("bert", {"use_dora": True, "target_modules": ["word_embeddings", "query"]}),
    ("bert", {"bias": "all"}),
    ("bert", {"bias": "lora_only", "use_rslora": True}),
    ("bert", {"rank_pattern": {"value": 4}, "alpha_pattern": {"layer.1.attention.self.query": 3}}),
    ("bert", {"init_lora_weights": "pissa"}),
    ("bert", {"init_lora_weights": "gaussian", "layers_to_transform": [1], "modules_to_save": ["pooler"]}),
    ("llama", {"init_lora_weights": "olora", "use_rslora": True}),
    ("llama", {"target_modules": "all-linear", "exclude_modules": ["up_proj"]}),
    ("gpt2", {"use_dora": True}),
    ("gpt2", {"init_lora_weights": "pissa"}),
    ("gpt2", {"target_modules": ["c_attn.q", "c_attn.v"]}),
    ("gpt_neox", {"target_modules": ["query_key_value.q", "query_key_value.v"]}),
    ("phi3", {"target_modules": ["qkv_proj.q", "gate_up_proj.up"]}),
    (
        "mixtral",
        {"target_parameters": ["experts.down_proj", "experts.gate_up_proj"], "target_modules": ["q_proj"]},
    ),
    ("mixtral", {"target_parameters": ["experts.gate_up_proj"]}),
    ("vit", {"target_modules": ["projection", "q_proj"]}),
]


def build(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config, auto = MODELS[name]
    torch.manual_seed(0)
    model = auto.from_config(config).eval()
    if name == "vit":
        return model, {"pixel_values": torch.randn(2, 3, 32, 32)}
    return model, {"input_ids": torch.randint(1, 200, (2, 9))}


def stir(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in peftlab.trainable_parameters(model).values():
            parameter += torch.randn(parameter.shape, generator=generator) * 0.05


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_a_variant_lives_through_everything(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model, inputs = build(name)
    base = model(**inputs).logits.detach()
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    peftlab.inject_lora(model, **options)
    assert (model(**inputs).logits - base).abs().max() < 1e-5
    assert set(weights) <= set(model.state_dict())
    stir(model)
    answer = model(**inputs).logits.detach()
    assert (answer - base).abs().max() > 1e-3
    with peftlab.disabled(model):
        assert torch.equal(model(**inputs).logits, base)

    peftlab.save_adapter(model, tmp_path / "ours")
    own = peftlab.load_adapter(build(name)[0], tmp_path / "ours")
    assert torch.allclose(own(**inputs).logits, answer, atol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(build(name)[0], tmp_path / "ours").eval()
        assert torch.allclose(theirs(**inputs).logits, answer, atol=2e-6)
        theirs.save_pretrained(tmp_path / "theirs")
    back = peftlab.load_adapter(build(name)[0], tmp_path / "theirs")
    assert torch.allclose(back(**inputs).logits, answer, atol=1e-6)

    merged = peftlab.merge(pickle.loads(pickle.dumps(copy.deepcopy(model))))
    assert torch.allclose(merged(**inputs).logits, answer, atol=2e-6)
    assert set(merged.state_dict()) == set(weights)

    model.train()
    model(**inputs).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in peftlab.trainable_parameters(model).values())
    peftlab.remove(model.eval())
    assert torch.equal(model(**inputs).logits, base)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("dora", [False, True])
def test_gradients_equal_pefts(dora: bool) -> None:
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["query", "dense"], "use_dora": dora}
    ours, inputs = build("bert")
    theirs = peft.get_peft_model(build("bert")[0], peft.LoraConfig(**config))
    peftlab.inject_lora(ours, **config)
    mine = {k: v for k, v in peftlab.trainable_parameters(ours).items() if "lora" in k}
    their = {
        k.removeprefix("base_model.model.").replace(".default.weight", "").replace(".default", ""): v
        for k, v in theirs.named_parameters()
        if "lora" in k
    }
    assert set(mine) == set(their)
    with torch.no_grad():
        for key, parameter in mine.items():
            parameter.normal_(std=0.1)
            their[key].copy_(parameter)
            if "magnitude" in key:
                parameter.abs_()
                their[key].abs_()
    for model in (ours, theirs):
        model(**inputs).logits.square().sum().backward()
    for key, parameter in mine.items():
        assert torch.allclose(parameter.grad, their[key].grad, rtol=1e-4, atol=1e-5), key


@pytest.mark.parametrize("dora", [False, True])
def test_transforms_of_torch_func_equal_pefts(dora: bool) -> None:
    options: dict[str, Any] = {"r": 2, "lora_alpha": 4, "target_modules": ["0"], "use_dora": dora}
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    found: list[Any] = []
    for ours in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh())
        wrapped = None if ours else peft.get_peft_model(model, peft.LoraConfig(**options))
        model = peftlab.inject_lora(model, **options) if wrapped is None else wrapped.base_model.model
        factors = {
            name: torch.randn(p.shape, generator=torch.Generator().manual_seed(2))
            for name, p in model.named_parameters()
            if p.requires_grad
        }
        model.load_state_dict(factors, strict=False)

        def output(factors: dict[str, torch.Tensor], x: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            return torch.func.functional_call(model, factors, (x,))

        def loss(factors: dict[str, torch.Tensor], x: torch.Tensor, output: Any = output) -> torch.Tensor:
            return output(factors, x).square().sum()

        of_each = torch.func.vmap(torch.func.grad(loss), (None, 0))(factors, x[:, None])
        along = torch.func.jvp(lambda x, f=factors, output=output: output(f, x), (x,), (torch.ones_like(x),))
        curvature = torch.func.hessian(loss, argnums=1)(factors, x)
        found.append([*(each for _, each in sorted(of_each.items())), *along, curvature])
        with torch.autograd.forward_ad.dual_level():
            dual = model(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
            torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, along[1])
    torch.testing.assert_close(*found)


def test_parts_train_only_their_rows() -> None:
    model, _ = build("gpt2")
    peftlab.inject_lora(model, r=4, target_modules=["c_attn.q", "c_attn.v"])
    stir(model)
    folded = (
        peftlab.merge(model).transformer.h[0].attn.c_attn.weight - build("gpt2")[0].transformer.h[0].attn.c_attn.weight
    )
    q, k, v = folded.split(64, dim=1)
    assert q.abs().max() > 0 and v.abs().max() > 0 and k.abs().max() == 0


def test_parts_count_their_own_parameters() -> None:
    model, _ = build("gpt2")
    peftlab.inject_lora(model, r=4, target_modules=["c_attn.q", "c_attn.v"])
    assert sum(p.numel() for p in peftlab.trainable_parameters(model).values()) == 2 * 2 * 2 * 64 * 4


def test_each_part_has_its_own_block() -> None:
    rows, sizes = torch.tensor([5, 1, 2, 9, 0]), (3, 2)
    b = torch.randn(5, 4)
    dense = spread(b, rows, sizes, out=10)
    assert dense.shape == (10, 8)
    assert torch.equal(torch.cat((dense[rows[:3], :4], dense[rows[3:], 4:])), b)
    assert dense.count_nonzero() == b.numel()


def test_row_norms_without_forming_the_update() -> None:
    w, a, b = (torch.randn(s, dtype=torch.float64) for s in ((7, 5), (2, 5), (7, 2)))
    assert torch.allclose(row_norms(w, a, b, 0.3), (w + 0.3 * b @ a).norm(dim=1), rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
def test_fold_rounds_once(dtype: torch.dtype, transposed: bool) -> None:
    weight = torch.randn(600, 300).to(dtype)
    out, wide = (300, 600) if transposed else (600, 300)
    a, b = torch.randn(8, wide), torch.randn(out, 8)
    exact = (
        weight.double() + 0.7 * (b.double() @ a.double()).T
        if transposed
        else weight.double() + 0.7 * b.double() @ a.double()
    )
    error = (fold_weight(weight, a, b, 0.7, transposed=transposed).double() - exact).abs()
    half_a_step = torch.finfo(dtype).eps / 2 * exact.abs().clamp_min(torch.finfo(dtype).tiny)
    assert (error <= half_a_step + 2e-5).all()
    assert fold_weight(weight, a, b, 0.7, transposed=transposed).dtype == dtype


def test_tied_head_is_untied_by_a_merge_and_the_embedding_kept() -> None:
    config = LlamaConfig(**GROUPED, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    embedding = model.model.embed_tokens.weight.detach().clone()
    peftlab.inject_lora(model, target_modules=["lm_head"])
    stir(model)
    ids = torch.randint(1, 200, (2, 7))
    answer = model(input_ids=ids).logits
    peftlab.merge(model)
    assert torch.equal(model.model.embed_tokens.weight, embedding)
    assert model.config.tie_word_embeddings is False
    assert torch.allclose(model(input_ids=ids).logits, answer, atol=1e-5)


def test_loraplus_gives_b_its_own_learning_rate() -> None:
    from peftlab.methods.config import lr_ratio

    config = peftlab.LoraConfig(loraplus_lr_ratio=16)
    assert lr_ratio(config) == {"lora_B": 16, "lora_embedding_B": 16}
    assert lr_ratio(peftlab.LoraConfig()) == {}


def test_a_dilated_convolution_folds_exactly() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 6, 3, dilation=2, padding=2)
            self.line = nn.Conv1d(6, 8, 3, stride=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.line(self.conv(x).flatten(2))

    torch.manual_seed(0)
    net, x = Net(), torch.randn(2, 4, 8, 8)
    peftlab.inject_lora(net, r=2, target_modules=["conv", "line"])
    stir(net)
    answer = net(x)
    assert torch.allclose(peftlab.merge(net)(x), answer, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gpt2", {"target_modules": ["c_attn", "c_attn.q"]}, "as a whole and by its part"),
        ("mixtral", {"target_parameters": ["experts.gate"]}, "matches no"),
        ("mixtral", {"target_parameters": ["experts.gate_up_proj"], "lora_dropout": 0.1}, "lora_dropout"),
        ("vit", {"target_modules": ["projection"], "init_lora_weights": "pissa"}, "not linear"),
        ("bert", {"r": 65, "init_lora_weights": "olora"}, "larger than the smaller side"),
        ("bert", {"rank_pattern": {"quary": 2}}, "quary"),
        ("bert", {"layers_to_transform": [7]}, "no layer 7"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(name: str, options: dict[str, Any], message: str) -> None:
    model, inputs = build(name)
    before = model(**inputs).logits
    with pytest.raises(peftlab.PeftlabError, match=message):
        peftlab.inject_lora(model, **options)
    assert torch.equal(model(**inputs).logits, before)
    assert not any(isinstance(module, LowRank) for module in model.modules())


def test_ten_thousand_linear_maps_are_planned_in_linear_time() -> None:
    def count(n: int) -> int:
        """Module look-ups that an injection makes: no clock, so no flakiness."""
        net = nn.Sequential(*(nn.Linear(2, 2, device="meta") for _ in range(n)))
        calls = 0
        original: Callable[..., Any] = nn.Module.named_modules

        def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return original(self, *args, **kwargs)

        nn.Module.named_modules = counted  # type: ignore[method-assign]
        try:
            peftlab.inject_lora(net, r=1, target_modules="all-linear")
        finally:
            nn.Module.named_modules = original  # type: ignore[method-assign]
        return calls

    assert count(2000) < 20 * count(100)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(("name", "start"), [("llama", "pissa"), ("llama", "olora"), ("gpt2", "pissa")])
def test_a_state_dict_of_another_base_brings_its_start(name: str, start: str, assign: bool) -> None:
    """What PiSSA and OLoRA subtract is derived from the weights in the state dict, not from those before."""
    model, inputs = build(name)
    base = model(**inputs).logits.detach()
    stir(peftlab.inject_lora(model, init_lora_weights=start))
    expected = model(**inputs).logits.detach()
    torch.manual_seed(9)
    other = peftlab.inject_lora(type(model)(model.config).eval(), init_lora_weights=start)
    other.load_state_dict(copy.deepcopy(model.state_dict()), assign=assign)
    assert torch.equal(other(**inputs).logits, expected)
    with peftlab.disabled(other):
        assert torch.equal(other(**inputs).logits, base)
    factors = {key: value for key, value in model.state_dict().items() if "lora_" in key}
    other.load_state_dict(factors, strict=False)
    assert torch.equal(other(**inputs).logits, expected)
