"""Greedy output is the target's own, token for token: every drafter, draft length, batch and kernel, in fp32."""

from __future__ import annotations

from functools import partial
from itertools import cycle

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from peftlab.decoding.decode import Fixed, PolicyInputs, StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.measurements import MeasuredStepTimes, acceptance_statistics, divergence
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.decoding.model_free import (
    END,
    NGramDrafter,
    PromptLookup,
    SuffixAndDraft,
    SuffixAutomaton,
    SuffixLookup,
    TokenRecycling,
)
from peftlab.decoding.parallel_drafters import MaskedPassEngine, Masks, OnePassDrafter, ParallelDrafter
from peftlab.decoding.policies import AcceptanceHead, Confidence, Heuristic, goodput
from peftlab.decoding.sampled_trees import DrawnTrees, rsd_c, rsd_s
from peftlab.decoding.state_drafters import BlockDrafter, FeatureDrafter, HeadsDrafter
from peftlab.drafting.block import BlockStep
from peftlab.drafting.eagle import EagleStep
from peftlab.drafting.early_exit import exit_engine
from peftlab.drafting.heads import HydraHeads, MedusaHeads
from peftlab.drafting.state_network import default_features
from peftlab.drafting.target import truncate
from peftlab.environment import resolve_device
from peftlab.models.load import load_base
from tests.eagle_models import dflash, eagle, trained_block, trained_eagle
from tests.gated_models import gated_model

pytestmark = pytest.mark.device
DEVICE = resolve_device("auto")
NEW = 32
FEATURES = default_features(5)  # of both models here
DRAFTERS = {
    "itself": lambda m, way: ModelDrafter(build_engine(m, **way)),
    "first layers": lambda m, way: ModelDrafter(build_engine(truncate(m, range(4)), **way)),
    "early exit": lambda m, way: ModelDrafter(exit_engine(m, 4, build_engine(m, **way)), shares_cache=True),
    "rsd_s": lambda m, way: DrawnTrees(build_engine(truncate(m, range(4)), **way), grow=rsd_s(3)),
    "suffix+rsd_c": lambda m, way: fused(DrawnTrees(build_engine(truncate(m, range(4)), **way), grow=rsd_c(3))),
    "lookup": lambda m, way: PromptLookup(),
    "n-gram": lambda m, way: NGramDrafter(),
    "recycling": lambda m, way: TokenRecycling(),
    "recycling chain": lambda m, way: TokenRecycling(width=1),
    "medusa": lambda m, way: HeadsDrafter(heads(m)),
    "medusa tree": lambda m, way: HeadsDrafter(heads(m), width=4),
    "suffix": lambda m, way: SuffixLookup(),
    "suffix+heads tree": lambda m, way: fused(HeadsDrafter(heads(m), width=3)),
    "suffix+layers": lambda m, way: fused(DRAFTERS["first layers"](m, way)),
    "suffix+early exit": lambda m, way: fused(DRAFTERS["early exit"](m, way)),
    "markov heads": lambda m, way: HeadsDrafter(markov_heads(m)),
    "markov heads tree": lambda m, way: HeadsDrafter(markov_heads(m), width=4),
    "shared heads": lambda m, way: HeadsDrafter(shared_heads(m)),
    "shared heads tree": lambda m, way: HeadsDrafter(shared_heads(m), width=4),
    "hydra tree": lambda m, way: HeadsDrafter(hydra_heads(m), width=4),
    "several at once": lambda m, way: ParallelDrafter(build_engine(truncate(m, range(4)), **way), Masks(7, 6)),
    "several at once, tree": lambda m, way: ParallelDrafter(
        build_engine(truncate(m, range(4)), **way), Masks(7, 3), width=3
    ),
    "gated": lambda m, way: ParallelDrafter(MaskedPassEngine(*gated(m, way)), Masks(7, 4), shares_cache=True),
    "gated tree": lambda m, way: ParallelDrafter(MaskedPassEngine(*gated(m, way)), Masks(7, 4), 3, shares_cache=True),
    "suffix+gated, one pass, tree": lambda m, way: fused(in_one_pass(m, way)),
    "eagle": lambda m, way: features_drafter(m),
    "eagle tree": lambda m, way: features_drafter(m, 3),
    "suffix+eagle": lambda m, way: fused(features_drafter(m)),
    "suffix+eagle tree": lambda m, way: fused(features_drafter(m, 3)),
    "block": lambda m, way: block_drafter(m),
    "block, window": lambda m, way: BlockDrafter(BlockStep(dflash(m, window=9))),
    "block tree": lambda m, way: block_drafter(m, 3),
    "spark": lambda m, way: BlockDrafter(BlockStep(spark(m))),
    "spark tree": lambda m, way: BlockDrafter(BlockStep(spark(m)), 3),
    "suffix+block": lambda m, way: fused(block_drafter(m)),
}
WAYS = {"flat": {"pack": False}, "packed": {}, "transformers": {"flat": False}}


def fused(drafter):
    """Copies join the draft's tree from two tokens on, and replace it from six."""
    return SuffixAndDraft(SuffixLookup(corpus(), shortest=2, margin=0), drafter, long=6)


def corpus():
    """Text of the vocabulary's more frequent half: some matches, most of them wrong."""
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(250, 512, (4000,), generator=generator).tolist()
    return SuffixAutomaton([*text[:2000], END, *text[2000:], END])


def heads(model):
    """Untrained heads repeat the next token's distribution: right where the text repeats itself."""
    return MedusaHeads(model.get_output_embeddings().weight, 4).to(DEVICE)


def drawn(parameter, std, generator):
    """Fill a parameter with the same numbers on every device."""
    parameter.data.copy_(torch.empty(parameter.shape).normal_(std=std, generator=generator))


def shared_heads(model):
    """Heads that differ, through the model's own LM head."""
    heads = MedusaHeads(model.get_output_embeddings().weight, 4, shared=True).to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    for block in heads.blocks:
        drawn(block.layers[0].weight, 0.05, generator)
    return heads


def markov_heads(model):
    """Heads that differ after every token drafted before."""
    weight = model.get_output_embeddings().weight
    heads = MedusaHeads(weight, 3, shared=True, markov=8).to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    for parameter in heads.markov_head.parameters():
        drawn(parameter, 0.5, generator)
    return heads


def hydra_heads(model):
    """Heads that differ after every token drafted before."""
    embeddings = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    heads = HydraHeads(embeddings[0], 3, embeddings[1], shared=True).to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    for block in heads.blocks:
        drawn(block.layers[0].weight, 0.5, generator)
    return heads


def gated(model, way):
    """The model with a random LoRA for masks, and its gate."""
    adapted, gate = gated_model(model, 0.05)
    return build_engine(adapted, **way), gate


def in_one_pass(model, way):
    """Masks in the verification pass, all of whose rows the model with a LoRA reads."""

    class Own(OnePassDrafter):
        def read(self, target, *given):
            return super().read(self.engine, *given)

    engine, gate = gated(model, way)
    return Own(engine, Masks(7, 4), 3, gate=gate)


def features_drafter(model, width=1):
    """An EAGLE-3 layer: one that has learned from the stories, or, for another model, a random one."""
    return FeatureDrafter(trained_eagle(model) if model.config.vocab_size == 512 else EagleStep(eagle(model)), width)


def spark(model):
    """A DSpark draft: what follows a drafted token differs after every token."""
    network = dflash(model, block_size=5, from_anchor=True, markov_rank=6, markov_head="rnn", confidence=True)
    generator = torch.Generator().manual_seed(0)
    for parameter in network.markov_head.parameters():
        drawn(parameter, 0.5, generator)
    return network


def block_drafter(model, width=1):
    """A DFlash draft: one that has learned from the stories, or, for another model, a random one."""
    return BlockDrafter(trained_block(model) if model.config.vocab_size == 512 else BlockStep(dflash(model)), width)


@pytest.fixture(scope="module")
def stories_model(stories):
    return load_base(str(stories), "AutoModelForCausalLM")[0].to(DEVICE)


@pytest.fixture(scope="module")
def expected(stories_model, uneven_prompts, generate_greedy):
    return [generate_greedy(stories_model, prompt, NEW) for prompt in uneven_prompts]


@pytest.fixture(scope="module")
def engines(stories_model):
    return {name: build_engine(stories_model, features=FEATURES, **way) for name, way in WAYS.items()}


def run(target, prompts, batch, drafter=None, gamma=1, new=NEW, **settings):
    outputs = []
    settings.setdefault("policy", partial(Fixed, gamma))
    for i in range(0, len(prompts), batch):
        outputs += decode(target, prompts[i : i + batch], StoppingCriteria(new), drafter, **settings)
    return outputs


def tokens(outputs):
    return [output.tokens for output in outputs]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_plain_decoding_is_transformers_generate(engines, uneven_prompts, expected, way, batch):
    assert tokens(run(engines[way], uneven_prompts, batch)) == expected


@pytest.mark.parametrize(
    ("gamma", "batch"), [pytest.param(1, 1, marks=pytest.mark.long), (4, 3), pytest.param(8, 8, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter(stories_model, engines, uneven_prompts, expected, name, gamma, batch):
    drafter = DRAFTERS[name](stories_model, WAYS["flat"])
    assert tokens(run(engines["flat"], uneven_prompts, batch, drafter, gamma)) == expected


@pytest.mark.long
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_draft_length(stories_model, engines, uneven_prompts, expected, name):
    """Lengths between those of ``test_every_drafter``."""
    for gamma, batch in zip(range(1, 9), cycle((3, 8, 1)), strict=False):
        drafter = DRAFTERS[name](stories_model, WAYS["flat"])
        assert tokens(run(engines["flat"], uneven_prompts, batch, drafter, gamma)) == expected, gamma


@pytest.mark.parametrize("way", ["packed", "transformers"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_kernel(stories_model, engines, uneven_prompts, expected, name, way):
    drafter = DRAFTERS[name](stories_model, WAYS[way])
    assert tokens(run(engines[way], uneven_prompts[:6], 3, drafter, 5)) == expected[:6]


@pytest.mark.parametrize(
    "policy",
    [
        partial(Confidence, 8, 0.5),
        partial(Heuristic, 3),
        partial(AcceptanceHead, 6, head=lambda hidden: torch.sigmoid(hidden.mean())),
        goodput(
            PolicyInputs(
                6, times=MeasuredStepTimes({1: [1.0] * 7, 8: [2.0] * 7}, {1: {1: 0.25, 6: 1.5}, 8: {1: 0.5, 6: 3.0}})
            ),
            None,
        ),
    ],
    ids=["confidence", "heuristic", "head", "goodput"],
)
@pytest.mark.parametrize("batch", [1, 8])
def test_every_policy(stories_model, engines, uneven_prompts, expected, policy, batch):
    drafter = DRAFTERS["first layers"](stories_model, WAYS["flat"])
    outputs = run(engines["flat"], uneven_prompts, batch, drafter, policy=policy)
    assert tokens(outputs) == expected
    assert len({step.drafted for output in outputs for step in output.steps}) > 2


def test_drafts_do_stand_and_do_fall(stories_model, engines, uneven_prompts):
    """The gate would be empty if nothing were accepted, or nothing rejected."""
    for name in ("first layers", "lookup", "recycling", "medusa tree", "eagle", "eagle tree", "block", "block tree"):
        drafter = DRAFTERS[name](stories_model, WAYS["flat"])
        statistics = acceptance_statistics(run(engines["flat"], uneven_prompts, 3, drafter, 4))
        assert 0 < statistics.accepted < statistics.drafted, name
        assert statistics.tau > 1, name


@pytest.mark.parametrize("batch", [1, 3])
def test_a_draft_equal_to_the_target_is_always_right(stories_model, engines, uneven_prompts, batch):
    drafter = DRAFTERS["itself"](stories_model, WAYS["flat"])
    outputs = run(engines["flat"], uneven_prompts, batch, drafter, 4, new=40)
    statistics = acceptance_statistics(outputs)
    assert statistics.acceptance == 1.0
    assert statistics.acceptance_by_position == [1.0] * 4
    assert all([step.emitted for step in output.steps] == [5] * 8 for output in outputs)


@pytest.fixture(scope="module")
def windowed():
    torch.manual_seed(1)
    config = MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=10,
        max_position_embeddings=256,
        initializer_range=0.25,
    )
    return MistralForCausalLM(config).to(DEVICE).eval()


@pytest.fixture(scope="module")
def past_window(windowed, generate_greedy):
    """Prompts and their outputs, which pass the window."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(64, (n,), generator=generator).tolist() for n in (3, 25, 9)]
    want = [generate_greedy(windowed, prompt, 30) for prompt in prompts]
    assert len({token for output in want for token in output}) > 5
    return prompts, want


@pytest.fixture(scope="module")
def windowed_engines(windowed):
    return {way: build_engine(windowed, features=FEATURES, **WAYS[way]) for way in ("flat", "transformers")}


@pytest.mark.parametrize(
    ("way", "batch", "gamma"),
    [
        ("flat", 1, 6),
        pytest.param("flat", 3, 4, marks=pytest.mark.long),
        pytest.param("transformers", 1, 6, marks=pytest.mark.long),
        ("transformers", 3, 4),
    ],
)
@pytest.mark.parametrize("name", DRAFTERS)
def test_past_a_sliding_window(windowed, windowed_engines, past_window, name, way, batch, gamma):
    (prompts, want), drafter = past_window, DRAFTERS[name](windowed, WAYS[way])
    assert tokens(run(windowed_engines[way], prompts, batch, drafter, gamma, new=30)) == want


@pytest.fixture(scope="module")
def ended(stories_model, uneven_prompts, expected, generate_greedy):
    """A full stop, and the outputs that it ends."""
    eos = max({t for output in expected for t in output[2:12]}, key=[t for o in expected for t in o].count)
    want = [generate_greedy(stories_model, prompt, NEW, eos) for prompt in uneven_prompts]
    assert len({len(output) for output in want}) > 2
    return eos, want


@pytest.mark.parametrize("name", [None, *DRAFTERS])
@pytest.mark.parametrize("batch", [*(pytest.param(n, marks=pytest.mark.long) for n in (1, 3)), 8])
def test_past_the_end_of_sequence(stories_model, engines, uneven_prompts, ended, name, batch):
    """A full stop ends the output, and pads it elsewhere: no mask may come from it, nothing may follow it."""
    eos, want = ended
    drafter = DRAFTERS[name](stories_model, WAYS["flat"]) if name else None
    for i in range(0, 8, batch):
        ending = StoppingCriteria(NEW, frozenset({eos}))
        outputs = decode(engines["flat"], uneven_prompts[i : i + batch], ending, drafter, policy=partial(Fixed, 6))
        assert tokens(outputs) == want[i : i + batch]
        for output in outputs:
            assert output.reason == ("eos" if output.tokens[-1] == eos else "length")
            assert sum(step.emitted for step in output.steps) == len(output.tokens)
            assert all(0 <= step.accepted <= min(step.drafted, step.emitted) for step in output.steps)


def test_in_bfloat16_outputs_part_only_at_near_ties(stories, uneven_prompts):
    model = load_base(str(stories), "AutoModelForCausalLM", dtype=torch.bfloat16)[0].to(DEVICE)
    target = build_engine(model)
    plain = run(target, uneven_prompts, 1, new=80)
    drafted = run(target, uneven_prompts, 3, DRAFTERS["first layers"](model, {}), 4, new=80)
    apart = [
        divergence(target, prompt, one.tokens, other.tokens)
        for prompt, one, other in zip(uneven_prompts, plain, drafted, strict=True)
    ]
    assert all(d is None or d.near_tie for d in apart), apart


def test_a_rounded_draft_leaves_the_output_alone(stories_model, engines, uneven_prompts, expected):
    rounded = truncate(stories_model, range(4)).to(torch.bfloat16)
    outputs = run(engines["flat"], uneven_prompts, 3, ModelDrafter(build_engine(rounded)), 4)
    assert tokens(outputs) == expected


def test_a_real_divergence_is_no_tie(engines, uneven_prompts, expected):
    wrong = [*expected[1][:7], (expected[1][7] + 1) % 512, *expected[1][8:]]
    found = divergence(engines["flat"], uneven_prompts[1], expected[1], wrong)
    assert found.position == 7 and found.margin > 0.01 and not found.near_tie
    assert not divergence(engines["flat"], uneven_prompts[1], expected[1], wrong, torch.bfloat16).near_tie
    assert divergence(engines["flat"], uneven_prompts[1], expected[1], expected[1]) is None


def test_a_tie_of_a_program_that_rounds_to_16_bits(engines, uneven_prompts, expected):
    """Logits of about ten are 1/16 apart in bfloat16: a margin between these limits is a tie there alone."""
    changed = [
        (prompt, output, [*output[:i], (output[i] + 1) % 512])
        for prompt, output in zip(uneven_prompts, expected, strict=True)
        for i in range(len(output))
    ]
    found = [(each, divergence(engines["flat"], *each)) for each in changed]
    narrow = [(each, one) for each, one in found if 0.01 < one.margin < 0.05]
    assert narrow and not any(one.near_tie for _, one in narrow)
    assert all(divergence(engines["flat"], *each, torch.bfloat16).near_tie for each, _ in narrow)
    wide = [each for each, one in found if one.margin > 1]
    assert wide and not any(divergence(engines["flat"], *each, torch.bfloat16).near_tie for each in wide)
