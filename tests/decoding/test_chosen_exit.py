"""DEL: the exit and draft length of each round are chosen by the acceptance that every exit would have had."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from peftlab.decoding.cache import Block, KVCache
from peftlab.decoding.decode import Fixed, StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.own_layers import DelDrafter, EarlyExit, ExitSelector, tokens_per_layer
from peftlab.decoding.sampling import Sampling
from peftlab.drafting.early_exit import possible_exits

LAYERS, EXITS = 4, [1, 2, 3]
PROMPTS = [[3, 4, 5, 6, 7, 8, 9], [10, 11], [12, 3, 12, 3, 12]]


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=96, initializer_range=0.15,
    )  # fmt: skip
    return build_engine(LlamaForCausalLM(config).eval(), pack=False, features=EXITS)


def drafter_of(target, **options):
    exit_ = EarlyExit(target, 1)
    return DelDrafter(exit_, exit=exit_, choice=ExitSelector(EXITS, LAYERS, **({"head": 1.0} | options)))


def run(target, drafter=None, new=32, **options):
    options.setdefault("policy", partial(Fixed, 4))
    return decode(target, PROMPTS, StoppingCriteria(new), drafter, **options)


def test_tokens_per_layer_is_the_papers_formula():
    for alpha, exit_, d in ((0.5, 3, 4), (0.9, 7, 2), (0.0, 2, 3)):
        paper = (1 - alpha ** (d + 1)) / (1 - alpha) / (d * exit_ + 30)
        assert tokens_per_layer(alpha, exit_, d, 30) == pytest.approx(paper)
        with_head = (1 - alpha ** (d + 1)) / (1 - alpha) / (d * (exit_ + 8) + 30 + 8)
        assert tokens_per_layer(alpha, exit_, d, 30, 8) == pytest.approx(with_head)
    assert tokens_per_layer(1.0, 2, 3, 10) == 4 / 16


def test_exit_and_length_of_the_most_tokens_per_layer():
    choice = ExitSelector([2, 15, 25], 30, 0.0, memory=10**9)
    assert choice.alphas == [1, 1, 1] and choice.best(5) == (2, 5), "at first everything is expected to be accepted"
    for i in range(200):
        choice.learn([i % 10 == 0, i % 10 < 9, 1])
    assert choice.alphas == pytest.approx([0.1, 0.9, 1], abs=0.01)
    assert choice.best(5) == (15, 3)  # 3.44 tokens in 75 layers; (15, 2) has 2.71 in 60, (25, 5) 6 in 155
    for _ in range(2000):
        choice.learn([0, 0, 0])
    assert choice.best(5)[1] == 0, "no draft pays"
    dear = ExitSelector([2], 30, 40.0, memory=10**9)
    for i in range(200):
        dear.learn([i % 2])
    assert dear.best(5)[1] == 0, "half of the tokens, and a head of more than the layers"
    assert possible_exits(5) == [1, 2, 3, 4] and possible_exits(2) == [1]
    assert possible_exits(30) == [3, 7, 10, 13, 17, 20, 23, 27]


def test_the_output_is_the_targets_own(target):
    want = [output.tokens for output in run(target)]
    for options in ({}, {"pool": 2}, {"policy": partial(Fixed, 7)}):
        drafter = drafter_of(target)
        assert [output.tokens for output in run(target, drafter, **options)] == want, options
    chosen = set()

    class Watched(DelDrafter):
        def propose(self, rows, budgets):
            proposal = super().propose(rows, budgets)
            chosen.add((self.exit.first, proposal.tokens.shape[1]))
            return proposal

    exit_ = EarlyExit(target, 1)
    drafter = Watched(exit_, exit=exit_, choice=ExitSelector(EXITS, LAYERS, 0.0, memory=6))
    assert [output.tokens for output in run(target, drafter)] == want
    assert len({first for first, _ in chosen}) > 1 and len({length for _, length in chosen}) > 1, chosen


def test_shadow_tokens_are_what_each_exit_would_have_drafted(target):
    drafter = drafter_of(target, memory=10**9)
    outputs = run(target, drafter)
    right, count = torch.zeros(len(EXITS)), 0
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = torch.tensor([[*prompt, *output.tokens]])
        n = tokens.shape[1] - 1
        for i, layers in enumerate(EXITS):
            logits = EarlyExit(target, layers).forward(KVCache(LAYERS, 1, n), tokens[:, :-1], Block((0,), n)).logits
            right[i] += (logits.argmax(-1) == tokens[:, 1:])[0, len(prompt) - 1 :].sum()
        count += len(output.tokens)
    assert drafter.choice.alphas == pytest.approx(((right + 1) / (count + 1)).tolist(), abs=1e-5)


def test_sampled_shadows_overlap_with_the_target(target):
    drafter = drafter_of(target, memory=10**9)
    run(target, drafter, sampling=Sampling(1.0, seed=2))
    greedy = drafter_of(target, memory=10**9)
    run(target, greedy)
    assert all(0 < alpha < 1 for alpha in drafter.choice.alphas)
    assert drafter.choice.alphas != greedy.choice.alphas
    assert drafter.choice.alphas == sorted(drafter.choice.alphas), "later exits are closer to the target"
