"""The trial of an engine finds wrong masks and positions, in every dtype, and reads few tokens for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GPTNeoXJapaneseConfig,
    GPTNeoXJapaneseForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MptConfig,
    MptForCausalLM,
)

from peftlab.decoding.engines import Trial, build_engine, difference
from peftlab.decoding.flat import FlatEngine, structure_of
from peftlab.decoding.transformers_engine import TransformersEngine
from peftlab.errors import PeftlabError

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def mistral(window=20, **settings):
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.3,
        sliding_window=window,
        **settings,
    )
    return MistralForCausalLM(config).eval()


class Wider(TransformersEngine):
    """Sees one token too many past the window."""

    def __init__(self, model):
        super().__init__(model)
        self._window += 1


class Longest(TransformersEngine):
    """Gives all rows the positions of the longest, as padding on the left without positions would."""

    def forward(self, cache, tokens, block, keep=None):
        self._longest = replace(block, starts=(max(block.starts),) * len(block.starts))
        return super().forward(cache, tokens, block, keep)

    def _logits(self, cache, tokens, positions, block, keep):
        positions = self._longest.positions(self.device).expand(len(tokens), -1)
        return super()._logits(cache, tokens, positions, block, keep)


class Chained(TransformersEngine):
    """Takes a tree for a chain."""

    def forward(self, cache, tokens, block, keep=None):
        return super().forward(cache, tokens, replace(block, tree=None), keep)


class BySlot(TransformersEngine):
    """Masks a tree, but gives its tokens the positions of their slots."""

    def _logits(self, cache, tokens, positions, block, keep):
        return super()._logits(cache, tokens, block.slots(self.device), block, keep)


def flat(model):
    return FlatEngine(model, structure_of(model))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("engine", "right"),
    [
        (TransformersEngine, (True, True, True)),
        (flat, (True, True, True)),
        (Wider, (False, False, False)),
        (Longest, (True, False, False)),
        (Chained, (True, True, False)),
        (BySlot, (True, True, False)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_wrong_is_found(engine, right, dtype):
    model = mistral().to(dtype)
    trial, made = Trial(model), engine(model)
    assert (trial.chains(made), trial.batches(made), trial.trees(made)) == right


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_positions_by_slot_are_found_in_a_model_near_its_initialisation(dtype):
    """GPT-Neo's window and MPT's biases change the logits of a model with small weights by little."""
    torch.manual_seed(0)
    neo = GPTNeoForCausalLM(
        GPTNeoConfig(
            vocab_size=96,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=256,
            max_position_embeddings=512,
        )
    )
    engine, trial = TransformersEngine(neo.eval().to(dtype)), Trial(neo)
    assert (trial.chains(engine), trial.batches(engine), trial.trees(engine)) == (True, False, False)
    mpt = MptForCausalLM(MptConfig(vocab_size=96, d_model=32, n_layers=2, n_heads=4, max_seq_len=512))
    engine, trial = TransformersEngine(mpt.eval().to(dtype)), Trial(mpt)
    assert (trial.chains(engine), trial.batches(engine), trial.trees(engine)) == (True, True, False)


def test_a_window_is_passed_without_reading_it():
    model = mistral(window=900)
    read = []
    model.model.embed_tokens.register_forward_hook(lambda _, inputs, output: read.append(inputs[0].numel()))
    trial = Trial(model)
    assert not trial.chains(Wider(model))
    assert trial.chains(TransformersEngine(model))
    assert sum(read) < 100


def test_a_model_in_training_is_tried_without_dropout_and_stays_in_training():
    model = mistral(attention_dropout=0.5).train()
    model.model.norm.eval()
    training = [module.training for module in model.modules()]
    trial = Trial(model)
    assert trial.causal and trial.chains(TransformersEngine(model))
    assert [module.training for module in model.modules()] == training


@pytest.mark.parametrize("limit", [7, 12, 24])
def test_a_short_context(limit):
    model = mistral()
    model.config.max_position_embeddings = limit
    assert build_engine(model, flat=False).kind == "transformers"


def test_difference_leaves_out_logits_that_are_ruled_out():
    a = torch.randn(3, 8)
    b = torch.cat((a * 1.01, torch.full((3, 1), -torch.inf)), 1)
    assert 0.005 < difference(torch.cat((a, torch.full((3, 1), -1e30)), 1), b) < 0.02
    assert difference(torch.full_like(a, torch.nan), a) == float("inf")


def test_a_model_that_views_its_keys_in_one_piece():
    torch.manual_seed(0)
    config = GPTNeoXJapaneseConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3
    )
    engine = build_engine(GPTNeoXJapaneseForCausalLM(config).eval())
    assert engine.kind == "transformers, its own mask, rows of one length at a time, trees path by path"


class Peeking(MistralForCausalLM):
    """Reads the keys in the library's cache without asking for them."""

    def forward(self, past_key_values=None, **inputs):
        if past_key_values.get_seq_length():
            assert past_key_values.layers[0].keys.shape[0] == 1
        return super().forward(past_key_values=past_key_values, **inputs)


def test_a_model_that_reads_the_cache_itself_is_refused_by_name():
    model = Peeking(mistral().config).eval()
    reason = r"Peeking cannot be decoded losslessly here \(its forward fails on chains: .*\): .* generate"
    with pytest.raises(PeftlabError, match=reason):
        build_engine(model)


def test_a_model_that_is_not_causal_is_refused_by_name():
    config = BertConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    with pytest.raises(PeftlabError, match="BertLMHeadModel is not causal"):
        build_engine(BertLMHeadModel(config).eval())
