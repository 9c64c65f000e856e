"""Parameter counts of the published models, on the meta device: no weights are needed to count."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DebertaV2Config,
    DebertaV2Model,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
)

import peftlab
from peftlab.methods.base import parameters_under
from peftlab.methods.config import config_class
from peftlab.methods.inject import count_parameters
from peftlab.models.architectures import task_head

LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
BERT, ROBERTA = (
    {"vocab_size": 30522},
    {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1},
)


def build(family: str, size: str):
    shape = LARGE if size == "large" else {}
    with torch.device("meta"):
        if family == "bert":
            return BertForSequenceClassification(BertConfig(**BERT, **shape))
        return RobertaForSequenceClassification(RobertaConfig(**ROBERTA, **shape))


def adapter_and_head(model) -> tuple[int, int]:
    head = sum(model.get_parameter(name).numel() for name in parameters_under(model, task_head(model)))
    return count_parameters(model)[0] - head, head


BARE = {"train_layer_norms": False}


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize(
    ("inject", "options", "base", "large"),
    [
        (peftlab.inject_lora, {"r": 8}, 294_912, 786_432),
        (peftlab.inject_houlsby, {**BARE}, 2_379_264, 6_343_680),
        (peftlab.inject_houlsby, {"bottleneck": 64}, 2_417_664, 6_444_032),
        (peftlab.inject_houlsby, {"bottleneck": 8, **BARE}, 313_536, 835_968),
        (peftlab.inject_houlsby, {"placement": "pfeiffer", **BARE}, 1_189_632, 3_171_840),
        (peftlab.inject_houlsby, {"placement": "pfeiffer", "bottleneck": 16, **BARE}, 304_320, 811_392),
        (peftlab.inject_houlsby, {"placement": "parallel", **BARE}, 1_189_632, 3_171_840),
    ],
)
def test_adapter_counts(family, inject, options, base, large):
    for size, expected in (("base", base), ("large", large)):
        assert adapter_and_head(inject(build(family, size), **options))[0] == expected


@pytest.mark.parametrize(
    ("family", "size", "count"),
    [
        ("bert", "base", 102_912),
        ("bert", "large", 272_384),
        ("roberta", "base", 102_144),
        ("roberta", "large", 271_360),
    ],
)
def test_bitfit_counts(family, size, count):
    assert adapter_and_head(peftlab.inject_bitfit(build(family, size)))[0] == count


@pytest.mark.parametrize(("size", "total", "head"), [("base", 887_042, 592_130), ("large", 1_838_082, 1_051_650)])
def test_roberta_lora_with_its_head(size, total, head):
    model = peftlab.inject_lora(build("roberta", size), r=8)
    assert count_parameters(model)[0] == total
    assert adapter_and_head(model)[1] == head


def test_sparse_bitfit_is_the_papers_share():
    adapter, _ = adapter_and_head(peftlab.inject_bitfit(build("bert", "base"), "sparse"))
    assert adapter == 12 * (768 + 3072)  # 0.04 % of the encoder


@pytest.mark.parametrize(
    ("size", "bert", "roberta"), [("base", 109_482_240, 124_055_040), ("large", 335_141_888, 354_310_144)]
)
def test_encoder_totals(size, bert, roberta):
    shape = LARGE if size == "large" else {}
    with torch.device("meta"):
        assert count_parameters(BertModel(BertConfig(**BERT, **shape)))[1] == bert
        assert count_parameters(RobertaModel(RobertaConfig(**ROBERTA, **shape), add_pooling_layer=False))[1] == roberta


def test_deberta_xxl_at_rank_16():
    config = DebertaV2Config(
        hidden_size=1536,
        num_hidden_layers=48,
        num_attention_heads=24,
        intermediate_size=6144,
        vocab_size=128100,
    )
    with torch.device("meta"):
        model = DebertaV2Model(config)
    assert count_parameters(peftlab.inject_lora(model, r=16))[0] == 4_718_592


def test_full_and_head():
    assert count_parameters(peftlab.inject(build("bert", "base"), config_class("full")()))[0] == 109_482_240 + 1538
    assert count_parameters(peftlab.inject(build("bert", "base"), config_class("head")()))[0] == 1538
