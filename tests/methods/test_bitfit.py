"""BitFit's choice of biases."""

from __future__ import annotations

import pytest
from tiny_models import base
from torch import nn

import peftlab
from peftlab import PeftlabError
from peftlab.methods.in_place import is_bias
from peftlab.methods.inject import is_injected, trainable_parameters

HEAD = {"classifier.weight", "classifier.bias"}


def trained_in(architecture, biases):
    return set(trainable_parameters(peftlab.inject_bitfit(base(architecture), biases)))


def test_all_biases_of_bert():
    plain = base("bert")
    assert trained_in("bert", "all") == {n for n, _ in plain.named_parameters() if n.endswith(".bias")} | HEAD


def test_sparse_is_query_and_middle():
    expected = {
        f"bert.encoder.layer.{i}.{part}.bias"
        for i in range(2)
        for part in ("attention.self.query", "intermediate.dense")
    }
    assert trained_in("bert", "sparse") == expected | HEAD


@pytest.mark.parametrize(
    "architecture",
    ["roberta", "distilbert", "electra", "deberta-v2", "albert", "mpnet", "opt", "bart", "vit"],
)
def test_sparse_finds_two_biases_a_layer(architecture):
    model = peftlab.inject_bitfit(base(architecture), "sparse")
    head = {"classifier", "classification_head", "score", "pooler", "pre_classifier"}
    body = [name for name in trainable_parameters(model) if not head & set(name.split("."))]
    # ALBERT has one layer, used twice; BART's decoder layers have a second query, for the encoder's output.
    assert len(body) == {"albert": 2, "bart": 10}.get(architecture, 4)
    assert all(name.endswith(".bias") for name in body)


@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox", "qwen2"])
def test_sparse_is_refused_where_a_bias_is_fused_or_absent(architecture):
    model = base(architecture)
    with pytest.raises(PeftlabError, match="sparse needs"):
        peftlab.inject_bitfit(model, "sparse")
    assert not is_injected(model)


def test_named_modules():
    expected = {f"bert.encoder.layer.{i}.attention.self.value.bias" for i in range(2)}
    assert trained_in("bert", ["self.value"]) == expected | HEAD


@pytest.mark.parametrize(
    ("biases", "message"),
    [
        (["qury"], "'qury' matches no module; nearest: .*query"),
        (["query", "nothing"], "nothing"),
        ([], "biases"),
        ("most", "biases"),
    ],
)
def test_bad_choices(biases, message):
    model = base("bert")
    with pytest.raises(PeftlabError, match=message):
        peftlab.inject_bitfit(model, biases)
    assert not is_injected(model)


def test_weights_that_are_called_bias_are_not():
    assert is_bias("layer.0.query.bias") and is_bias("self.q_bias") and is_bias("mlp.experts.down_proj_bias")
    assert not is_bias("SelfAttention.relative_attention_bias.weight")
    with pytest.raises(PeftlabError, match="no biases"):
        peftlab.inject_bitfit(nn.Sequential(nn.Linear(3, 3, bias=False)))
