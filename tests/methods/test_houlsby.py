"""Bottleneck adapters against the paper's equations, and where they go."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tiny_models import D, base, batch, injected, logits, train
from torch import nn
from transformers import AutoModel, BertConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import peftlab
from peftlab import PeftlabError
from peftlab.methods.base import find, sites_of
from peftlab.methods.config import config_class
from peftlab.methods.houlsby import ACTIVATIONS
from peftlab.methods.inject import is_injected, trainable_parameters
from peftlab.models.architectures import SITES


def randomised(model, scale=0.3):
    generator = torch.Generator().manual_seed(5)
    for name, parameter in trainable_parameters(model).items():
        if ".adapter_" in name:
            parameter.data = scale * torch.randn(parameter.shape, generator=generator)
    return model


def papers_bert(weights, tokens, placement, heads=4, layers=2):
    """BERT written from the equations alone, with bottlenecks on (or beside) its sub-layers."""
    w = weights
    linear = lambda x, name: x @ w[f"{name}.weight"].T + w[f"{name}.bias"]  # noqa: E731
    norm = lambda x, name: F.layer_norm(x, (D,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-12)  # noqa: E731
    bottleneck = lambda x, at: linear(F.gelu(linear(x, f"{at}.adapter_down")), f"{at}.adapter_up")  # noqa: E731
    e = "bert.embeddings"
    x = w[f"{e}.word_embeddings.weight"][tokens] + w[f"{e}.position_embeddings.weight"][: tokens.shape[1]]
    x = norm(x + w[f"{e}.token_type_embeddings.weight"][0], f"{e}.LayerNorm")
    split = lambda t: t.unflatten(-1, (heads, -1)).transpose(1, 2)  # noqa: E731
    for i in range(layers):
        at = f"bert.encoder.layer.{i}"
        q, k, v = (split(linear(x, f"{at}.attention.self.{part}")) for part in ("query", "key", "value"))
        mixed = (q @ k.mT / math.sqrt(D / heads)).softmax(-1) @ v
        h = linear(mixed.transpose(1, 2).flatten(2), f"{at}.attention.output.dense")
        if placement == "houlsby":
            h = h + bottleneck(h, f"{at}.attention.output.dropout")
        x = norm(x + h, f"{at}.attention.output.LayerNorm")
        h = linear(F.gelu(linear(x, f"{at}.intermediate.dense")), f"{at}.output.dense")
        h = h + bottleneck(x if placement == "parallel" else h, f"{at}.output.dropout")
        x = norm(x + h, f"{at}.output.LayerNorm")
    return linear(torch.tanh(linear(x[:, 0], "bert.pooler.dense")), "classifier")


@pytest.mark.parametrize("placement", ["houlsby", "pfeiffer", "parallel"])
def test_equals_the_papers_equations(placement):
    model = randomised(peftlab.inject_houlsby(base("bert"), 6, placement=placement))
    inputs = batch("bert")
    expected = papers_bert(dict(model.named_parameters()), inputs["input_ids"], placement)
    torch.testing.assert_close(logits(model, inputs), expected, rtol=1e-4, atol=1e-5)
    assert (expected - logits(base("bert"), inputs)).abs().max() > 0.1


def test_the_bottleneck_follows_the_dropout():
    model = randomised(peftlab.inject_houlsby(base("bert"), 6)).train()
    leaf = model.get_submodule("bert.encoder.layer.0.output.dropout")
    assert isinstance(leaf, nn.Dropout)
    x = torch.randn(2, 5, D)
    torch.manual_seed(0)
    dropped = F.dropout(x, leaf.p)
    torch.manual_seed(0)
    assert torch.equal(leaf(x), dropped + leaf.branch(dropped))


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "mixtral", "t5", "albert", "vit", "distilbert", "opt"])
@pytest.mark.parametrize("placement", ["pfeiffer", "parallel"])
def test_other_placements_train_everywhere(architecture, placement):
    model = peftlab.inject_houlsby(base(architecture), 6, placement=placement)
    inputs = batch(architecture)
    assert torch.equal(logits(model, inputs), logits(base(architecture), inputs))
    before = {name: p.clone() for name, p in trainable_parameters(model).items() if ".adapter_" in name}
    assert before
    train(model, inputs, steps=2)
    assert all(not torch.equal(model.get_parameter(name), was) for name, was in before.items())
    peftlab.remove(model)
    assert torch.equal(logits(model, inputs), logits(base(architecture), inputs))


@pytest.mark.parametrize("architecture", ["bert", "llama", "opt"])
def test_parallel_placement_survives_checkpointing(architecture):
    gradients = []
    for checkpointing in (False, True):
        model = randomised(peftlab.inject_houlsby(base(architecture), 6, placement="parallel"))
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        torch.manual_seed(0)
        model.train()(**batch(architecture)).loss.backward()
        gradients.append({name: p.grad for name, p in trainable_parameters(model).items()})
    assert all(gradient.abs().max() > 0 for name, gradient in gradients[0].items() if ".adapter_" in name)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_transformers(name):
    from transformers.activations import ACT2FN

    x = torch.linspace(-3, 3, 31)
    reference = F.leaky_relu if name == "leakyrelu" else ACT2FN[name]
    torch.testing.assert_close(ACTIVATIONS[name](x), reference(x))
    model = peftlab.inject_houlsby(base("bert"), 6, non_linearity=name)
    assert model.get_submodule("bert.encoder.layer.0.output.dropout").non_linearity == name


def test_initial_values():
    model = peftlab.inject_houlsby(base("bert"), 512, init_scale=0.02)
    leaf = model.get_submodule("bert.encoder.layer.1.output.dropout")
    down = leaf.adapter_down.weight.detach()
    assert down.abs().max() <= 0.04
    assert down.std() == pytest.approx(0.02 * 0.880, rel=0.05)  # of a normal cut off at two deviations
    assert all(not tensor.any() for tensor in (leaf.adapter_down.bias, *leaf.adapter_up.parameters()))


def test_width_by_reduction_factor():
    model = peftlab.inject_houlsby(base("bert"), reduction_factor=8)
    assert model.get_submodule("bert.encoder.layer.0.output.dropout").adapter_down.out_features == D // 8


def adapted_layers(model):
    return {name.split(".layer.")[1][0] for name in trainable_parameters(model) if ".adapter_" in name}


@pytest.mark.parametrize(
    ("skip", "left"), [(1, {"1"}), (0, {"0", "1"}), ([1], {"0"}), ([], {"0", "1"}), (None, {"0", "1"})]
)
def test_adapter_drop(skip, left):
    assert adapted_layers(peftlab.inject_houlsby(base("bert"), 6, skip_layers=skip)) == left


@pytest.mark.parametrize(
    ("skip", "message"),
    [(2, "no layer is left"), (3, "no layer 2"), ([7], "no layer 7"), (-1, "counted from 0")],
)
def test_adapter_drop_out_of_range(skip, message):
    model = base("bert")
    with pytest.raises(PeftlabError, match=message):
        peftlab.inject_houlsby(model, 6, skip_layers=skip)
    assert not is_injected(model)


def test_what_trains_beside_the_bottlenecks_is_switchable():
    model = peftlab.inject_houlsby(base("bert"), 6, train_layer_norms=False, train_head=False)
    assert all(".adapter_" in name for name in trainable_parameters(model))
    named = peftlab.inject_houlsby(
        base("bert"), 6, train_layer_norms=False, train_head=False, modules_to_save=["pooler"]
    )
    assert {name for name in trainable_parameters(named) if ".adapter_" not in name} == {
        "bert.pooler.dense.weight",
        "bert.pooler.dense.bias",
    }


def test_albert_shares_its_adapters():
    model = injected("houlsby", "albert")
    assert sum(".adapter_down.weight" in name for name in trainable_parameters(model)) == 2


def test_mixed_precision():
    model = peftlab.inject_houlsby(base("bert").to(torch.bfloat16), 6)
    assert {p.dtype for name, p in trainable_parameters(model).items() if ".adapter_" in name} == {torch.float32}
    model(**batch("bert")).loss.backward()
    assert all(p.grad.dtype == p.dtype for p in trainable_parameters(model).values())
    model = randomised(peftlab.inject_houlsby(base("bert"), 6))
    exact = logits(model, batch("bert"))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(logits(model, batch("bert")).float(), exact, rtol=0.1, atol=0.1)


def shallow(kind: str) -> nn.Module:
    config = CONFIG_MAPPING[kind]()
    for key in ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_decoder_layers", "num_layers"):
        if hasattr(config, key):
            setattr(config, key, 2)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    with torch.device("meta"):
        return AutoModel.from_config(config)


@pytest.mark.parametrize("kind", SITES)
def test_every_row_fits_its_architecture(kind):
    model = shallow(kind)
    assert sites_of(model) is SITES[kind]
    assert find([name for name, _ in model.named_modules()], SITES[kind].ffn)


def test_an_unknown_architecture_takes_the_row_it_is_built_like():
    model = base("llama")
    model.config.model_type = "brand_new"
    assert sites_of(model) is SITES["llama"]


def test_an_architecture_like_no_other_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(PeftlabError, match=r"does not know.*lora.*SITES"):
        peftlab.inject_houlsby(model)
    shared_expert = shallow("qwen2_moe")
    with pytest.raises(PeftlabError, match="qwen2_moe"):
        peftlab.inject_houlsby(shared_expert)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bottleneck": 0}, "bottleneck"),
        ({"bottleneck": 8, "reduction_factor": 2}, "not both"),
        ({"reduction_factor": 0.5}, "reduction_factor"),
        ({"init_scale": 0}, "init_scale"),
        ({"non_linearity": "gelo"}, "non_linearity"),
        ({"placement": "sideways"}, "placement"),
        ({"bottelneck": 8}, "did you mean 'bottleneck'"),
    ],
)
def test_bad_fields(fields, message):
    model = base("bert")
    with pytest.raises(PeftlabError, match=message):
        peftlab.inject_houlsby(model, **fields)
    assert not is_injected(model)


def test_a_written_configuration_reads_back():
    for config in (
        config_class("houlsby")(),
        config_class("houlsby")(reduction_factor=16, skip_layers=[0]),
    ):
        assert config_class("houlsby")(**config.model_dump()) == config


def test_exact_identity_at_a_real_size():
    from transformers import BertModel

    torch.manual_seed(0)
    model = BertModel(BertConfig(num_hidden_layers=3)).eval()
    tokens = torch.randint(0, 30000, (1, 16))
    before = model(tokens).last_hidden_state
    assert torch.equal(peftlab.inject_houlsby(model)(tokens).last_hidden_state, before)
