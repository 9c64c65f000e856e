"""SWIFT: the target without some sublayers drafts for itself; the search for these sublayers, and exact output."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from peftlab.decoding.cache import Block, KVCache
from peftlab.decoding.decode import Fixed, StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.own_layers import SkippedSublayers, SkipSearch, SwiftDrafter, upper_bound
from peftlab.decoding.sampled_trees import rsd_c
from peftlab.decoding.sampling import Sampling
from peftlab.drafting.base import load_pair, make_drafter
from peftlab.drafting.early_exit import flattened_step
from peftlab.errors import PeftlabError
from tests.command_line import invoke

SIZES = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 128, "initializer_range": 0.15}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)),
    "gpt_neox, parallel": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
}
ENDS = {"llama": ("self_attn.o_proj", "mlp.down_proj"), "gpt_neox, parallel": ("attention.dense", "mlp.dense_4h_to_h")}
PROMPTS = [[3, 4, 5, 6, 7, 8, 9], [10, 11], [12, 3, 12, 3, 12]]


def make(name="llama"):
    torch.manual_seed(0)
    return MODELS[name]().eval()


def run(target, drafter=None, new=48, **options):
    options.setdefault("policy", partial(Fixed, 4))
    return [output.tokens for output in decode(target, PROMPTS, StoppingCriteria(new), drafter, **options)]


@pytest.mark.parametrize("name", MODELS)
def test_a_sublayer_that_is_left_out_adds_nothing(name):
    model = make(name)
    skipping = SkippedSublayers(build_engine(model, pack=False))
    tokens = torch.randint(3, 48, (1, 7), generator=torch.Generator().manual_seed(0))
    found = {}
    for skipped in ({2}, {3}, {4, 5}, {3, 4}):
        skipping.skipped = skipped
        found[frozenset(skipped)] = skipping.forward(KVCache(4, 1, 8), tokens, Block((0,), 7)).logits
    for skipped, logits in found.items():
        zeroed = make(name)
        with torch.no_grad():
            for number in skipped:
                layer = (zeroed.model if name == "llama" else zeroed.gpt_neox).layers[number // 2]
                for parameter in layer.get_submodule(ENDS[name][number % 2]).parameters():
                    parameter.zero_()
        torch.testing.assert_close(logits, zeroed(tokens).logits, atol=1e-4, rtol=1e-4)


def test_the_search_keeps_the_best_set_of_its_size():
    search = SkipSearch(12)  # 20 sublayers outside the first and the last layer, 9 of them left out
    needless = set(range(4, 14))

    def score(skipped):
        assert len(skipped) == 9 and min(skipped) >= 2 and max(skipped) <= 21
        return len(skipped & needless) / 10  # at most .9

    best = 0.0
    while not search.over:
        found = score(search.candidate())
        search.record(found)
        best = max(best, found)
        assert search.score == best == score(search.best)
    assert search.tries <= 1000 and search.score > 0.6
    done = SkipSearch(6)
    done.candidate()
    done.record(0.96)
    assert done.over


def test_the_model_of_scores_prefers_what_resembles_good_sets():
    tried = torch.tensor([[1.0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1], [0, 1, 0, 0, 0, 1]])
    bound = upper_bound(
        tried, torch.tensor([0.9, 0.1, 0.5]), torch.cat((tried[:2], torch.tensor([[1.0, 0, 1, 0, 0, 0]])))
    )
    assert bound[0] > bound[1] and bound[2] > bound[1]
    assert bound[0] == pytest.approx(1.22 + 2.576 * 0.03, abs=0.1), "what was tried is known"


def test_the_target_is_untouched_while_sets_are_tried():
    target = build_engine(make(), pack=False)
    want = run(target)
    skipping = SkippedSublayers(target)
    search = SkipSearch(target.layers)
    for options in ({}, {"pool": 2}):
        assert run(target, SwiftDrafter(skipping, layers=skipping, search=search), **options) == want, options
    assert search.tries > 10 and search.score > 0
    assert skipping.skipped == search.best


def test_a_draft_ends_where_no_token_is_probable():
    target = build_engine(make(), pack=False)
    skipping = SkippedSublayers(target)

    def lengths(least):
        drafter = SwiftDrafter(skipping, layers=skipping, search=SkipSearch(4), least=least)
        outputs = decode(
            target, PROMPTS, StoppingCriteria(30), drafter, policy=partial(Fixed, 5), sampling=Sampling(1.0, seed=1)
        )
        return [step.drafted for output in outputs for step in output.steps]

    assert max(lengths(1.0)) == 1, "no token has a probability of 1"
    assert max(lengths(0.0)) == 5


@pytest.mark.parametrize(("draft", "new"), [("swift", 34), ("del", 12)])
def test_the_commands_draft_with_the_targets_own_layers(stories, tmp_path, draft, new):
    (tmp_path / "p.txt").write_text("Once upon a time\nTom and Lily\n")
    settings = ["--prompts", tmp_path / "p.txt", "--max-new-tokens", new, "--repeats", 1, "--drafter", "lookup"]
    settings += ["--json", tmp_path / "o.json", "--no-pack"]
    done = invoke("draft", "bench", "--target", stories, "--draft", draft, *settings)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "o.json").read_text())["drafters"]
    assert found["draft"]["lossless"] is True and found["suffix+draft"]["lossless"] is True
    with pytest.raises(PeftlabError, match=f"draft {draft} drafts chains, no trees"):
        make_drafter("draft", load_pair(str(stories), draft, pack=False), grow=rsd_c(2))


def test_only_a_flattened_step_leaves_sublayers_out():
    with pytest.raises(
        PeftlabError, match="flattened step, and this target's kernel is transformers; use --draft exit:K"
    ):
        flattened_step("swift", build_engine(make(), flat=False))
