"""Drafting with the target's own layers: shared layers read each token once, and the output stays exact."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from peftlab.decoding.cache import KVCache
from peftlab.decoding.decode import Fixed, StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.decoding.model_free import with_copies
from peftlab.decoding.own_layers import EarlyExit
from peftlab.decoding.policies import Confidence
from peftlab.decoding.sampled_trees import DrawnTrees, rsd_c
from peftlab.decoding.sampling import Sampling
from peftlab.drafting.base import load_pair, make_drafter
from peftlab.drafting.target import truncate
from peftlab.errors import PeftlabError

LAYERS, EXIT = 4, 2
SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "initializer_range": 0.15,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)),
    "mistral, window": lambda: MistralForCausalLM(MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=6)),
    "gpt_neox, parallel": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
}
PROMPTS = [[3, 4, 5, 6, 7, 8, 9], [10, 11], [12, 3, 12, 3, 12]]


def make(name="llama"):
    torch.manual_seed(0)
    return MODELS[name]().eval()


def counted(engine):
    """Count the tokens that each layer of a flat engine reads, from now on."""
    read = Counter()

    def counting(i, qkv):
        def call(h):
            read[i] += h.shape[0] * h.shape[1]
            return qkv(h)

        return call

    engine._layers[:] = [replace(layer, qkv=counting(i, layer.qkv)) for i, layer in enumerate(engine._layers)]
    return read


def run(target, drafter=None, policy=partial(Fixed, 4), prompts=PROMPTS, new=24, **options):
    return [o.tokens for o in decode(target, prompts, StoppingCriteria(new), drafter, policy=policy, **options)]


@pytest.mark.parametrize("name", MODELS)
def test_no_layer_reads_a_token_twice(name):
    target = build_engine(make(name), pack=False)
    want = run(target)
    drafter = ModelDrafter(EarlyExit(target, EXIT), shares_cache=True)
    read = counted(target)
    for prompt, output in zip(PROMPTS, want, strict=True):
        assert run(target, drafter, prompts=[prompt]) == [output]
    assert set(read) == set(range(LAYERS))
    assert len(set(read.values())) == 1, "the exit's layers read what they had drafted once more"
    read.clear()
    assert run(target, drafter) == want
    # Rows whose drafts are cut short by the end of the output share what the shortest of them has.
    assert read[LAYERS - 1] <= read[0] < 1.2 * read[LAYERS - 1]


def test_states_read_ahead_give_the_logits_of_a_whole_pass():
    target = build_engine(make(), pack=False)
    tokens = torch.randint(3, 48, (2, 9), generator=torch.Generator().manual_seed(1))
    for starts in ((0, 0), (3, 5)):
        whole, ahead = KVCache(LAYERS, 2, 16), KVCache(LAYERS, 2, 16)
        for cache in (whole, ahead):
            target.forward(cache, tokens[:, :5], cache.block([0, 1], (0, 0), 5))
        block = whole.block([0, 1], starts, 4)
        draft = EarlyExit(target, EXIT)
        for i in range(3):
            draft.forward(ahead, tokens[:, i : i + 1], ahead.block([0, 1], [s + i for s in starts], 1))
        other = tokens[:, :4].clone()
        other[1, 2] += 1  # not what was drafted: from here on the tokens are read again
        read = counted(target)
        torch.testing.assert_close(
            target.forward(ahead, other, block).logits, target.forward(whole, other, block).logits, atol=1e-4, rtol=1e-4
        )
        assert read[0] == 2 * 2 + 2 * 4 and read[EXIT] == 2 * 4 + 2 * 4
        for mine, theirs in zip(ahead.states, whole.states, strict=True):
            torch.testing.assert_close(mine[:, :, :9], theirs[:, :, :9], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "make_drafter",
    [
        lambda e: ModelDrafter(e, shares_cache=True),
        lambda e: DrawnTrees(e, shares_cache=True, grow=rsd_c(2)),
        lambda e: with_copies(ModelDrafter(e, shares_cache=True)),
    ],
    ids=["chain", "tree", "with copies"],
)
def test_an_exit_is_lossless(make_drafter):
    target = build_engine(make(), pack=False)
    want = run(target)
    for options in ({}, {"pool": 2}, {"policy": partial(Confidence, 6, 0.1)}):
        assert run(target, make_drafter(EarlyExit(target, EXIT)), **options) == want, options


def test_a_sampled_exit_draws_what_a_model_cut_there_does():
    model = make()
    target, cut = build_engine(model, pack=False), build_engine(truncate(model, range(EXIT)), pack=False)
    for seed in range(3):
        sampled = {"sampling": Sampling(1.0, seed=seed)}
        assert run(target, ModelDrafter(EarlyExit(target, EXIT), shares_cache=True), **sampled) == run(
            target, ModelDrafter(cut), **sampled
        )


def test_the_commands_draft_in_the_targets_cache(stories):
    pair = load_pair(str(stories), "exit:2", pack=False)
    drafter = make_drafter("draft", pair)
    assert drafter.shares_cache and pair.draft.kind == "flat, first 2 layers"
    read = counted(pair.target)
    run(pair.target, drafter, prompts=[[5, 6, 7]])
    assert len(set(read.values())) == 1
    with pytest.raises(PeftlabError, match="exit:5: the target has 5 layers; leave out at least the last one"):
        load_pair(str(stories), "exit:5")
