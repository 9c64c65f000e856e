"""Sampled output follows the target's distribution whatever drafts it, and seeds reproduce."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from scipy.stats import chi2

from peftlab.decoding.decode import Drafter, Fixed, StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.measurements import MeasuredStepTimes, acceptance_statistics
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.decoding.model_free import NGramDrafter, PromptLookup, SuffixAndDraft, SuffixLookup, TokenRecycling
from peftlab.decoding.policies import AcceptanceHead, Confidence, Goodput, Heuristic
from peftlab.decoding.sampled_trees import KSEQ, DrawnTrees, rsd_c, rsd_s, specinfer
from peftlab.decoding.sampling import TOKENS, TRAVERSAL, Sampling
from peftlab.decoding.state_drafters import BlockDrafter, FeatureDrafter, HeadsDrafter, tree_tokens
from peftlab.drafting.state_network import default_features
from peftlab.drafting.target import truncate
from peftlab.errors import PeftlabError
from tests.eagle_models import trained_block, trained_eagle, trained_spark

SAMPLES = 1000
SHARED, SHARED_BY_LAYER = (Goodput(MeasuredStepTimes({1: [1.0] * 5}, {1: {1: 0.3, 4: 1.2}}), 4) for _ in range(2))
# The first token of a block is hardly ever accepted here: at this price it is tried again.
SHARED_BY_BLOCK = Goodput(MeasuredStepTimes({1: [1.0] * 5}, {1: {1: 0.01, 4: 0.01}}), 4)
SAMPLING = Sampling(temperature=1.3, top_k=5, seed=7)


@pytest.fixture(scope="module")
def target(stories_model):
    return build_engine(stories_model, pack=False, features=default_features(5))


@pytest.fixture(scope="module")
def prompt(stories_tokenizer):
    # It repeats itself, so that looking back finds something to draft.
    return stories_tokenizer("Tom saw a big dog. Tom saw a").input_ids


@pytest.fixture(scope="module")
def law(stories_model, prompt):
    """Exact probability of every output of three tokens."""

    @torch.inference_mode()
    def follow(prefix, left):
        if left == 0:
            return {(): 1.0}
        p = SAMPLING.probabilities(stories_model(torch.tensor([[*prompt, *prefix]])).logits[0, -1].double())
        return {
            (x, *rest): float(p[x]) * weight
            for x in p.nonzero()[:, 0].tolist()
            for rest, weight in follow((*prefix, x), left - 1).items()
        }

    return follow((), 3)


def p_value(law, outputs):
    """Chi-square of the outputs against the law, rare outcomes pooled."""
    counts = Counter(tuple(output.tokens) for output in outputs)
    assert counts.keys() <= law.keys()
    common = [outcome for outcome, weight in law.items() if weight * len(outputs) >= 5]
    observed = [counts[outcome] for outcome in common]
    expected = [law[outcome] * len(outputs) for outcome in common]
    rare = law.keys() - set(common)
    if rare:
        observed.append(sum(counts[outcome] for outcome in rare))
        expected.append(sum(law[outcome] for outcome in rare) * len(outputs))
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    return chi2.sf(statistic, len(observed) - 1)


def warmed(model):
    """Recycling that has read the model's own text, so that it has something to draft."""
    drafter, target = TokenRecycling(), build_engine(model, pack=False)
    decode(target, [[1]], StoppingCriteria(150), drafter)
    return drafter


def fused(drafter):
    """Copies and drafts in one tree, even where one token matches."""
    return SuffixAndDraft(SuffixLookup(), drafter, long=100, top=300)


def first_layers(model):
    return ModelDrafter(build_engine(truncate(model, range(3)), pack=False))


DRAFTERS = {
    "plain": (None, Fixed),
    "first layers": (first_layers, Fixed),
    "confidence": (first_layers, partial(Confidence, threshold=0.5)),
    "heuristic": (first_layers, Heuristic),
    "acceptance head": (
        first_layers,
        partial(AcceptanceHead, head=lambda hidden: torch.sigmoid(hidden.mean()), h=0.6),
    ),
    "goodput": (first_layers, lambda gamma: SHARED),
    "lookup": (lambda m: PromptLookup(), Fixed),
    "n-gram": (lambda m: NGramDrafter(), Fixed),
    "suffix": (lambda m: SuffixLookup(), Fixed),
    "suffix+medusa": (lambda m: fused(HeadsDrafter(Frequent(m))), Fixed),
    "suffix+medusa tree": (lambda m: fused(HeadsDrafter(Frequent(m), width=3)), Fixed),
    "suffix+layers": (lambda m: fused(first_layers(m)), Fixed),
    "suffix+confidence": (lambda m: fused(first_layers(m)), partial(Confidence, threshold=0.5)),
    "medusa": (lambda m: HeadsDrafter(Frequent(m)), Fixed),
    "medusa tree": (lambda m: HeadsDrafter(Frequent(m), width=3), Fixed),
    "recycling": (warmed, Fixed),
    "eagle": (lambda m: FeatureDrafter(trained_eagle(m)), Fixed),
    "block": (lambda m: BlockDrafter(trained_block(m)), Fixed),
    "spark": (lambda m: BlockDrafter(trained_spark(m)), Fixed),
    "spark tree": (lambda m: BlockDrafter(trained_spark(m), width=3), Fixed),
    "suffix+spark": (lambda m: fused(BlockDrafter(trained_spark(m))), Fixed),
    "suffix+block": (lambda m: fused(BlockDrafter(trained_block(m))), partial(Confidence, threshold=0.2)),
    "eagle goodput": (lambda m: FeatureDrafter(trained_eagle(m)), lambda gamma: SHARED_BY_LAYER),
    "block goodput": (lambda m: BlockDrafter(trained_block(m)), lambda gamma: SHARED_BY_BLOCK),
    "eagle confidence": (lambda m: FeatureDrafter(trained_eagle(m)), partial(Confidence, threshold=0.3)),
}


class Frequent(torch.nn.Module):
    """Heads that always hope for the same few tokens, common in second and third place here."""

    def __init__(self, model):
        super().__init__()
        self.scores = torch.nn.Parameter(torch.zeros(model.config.vocab_size))
        for score, token in enumerate((432, 352, 388, 414, 259, 268), start=1):
            self.scores.data[token] = score

        self.vocab_size, self.depth, self.ranks = len(self.scores), 3, None

    def tokens(self, hidden, last, tree):
        return tree_tokens(self.scores.expand(3, len(hidden), -1), last, tree)


@pytest.mark.parametrize("name", DRAFTERS)
def test_follows_the_target(stories_model, target, prompt, law, name):
    make, policy = DRAFTERS[name]
    drafter = make(stories_model) if make else None
    outputs = decode(
        target, [prompt] * SAMPLES, StoppingCriteria(3), drafter, policy=partial(policy, 4), sampling=SAMPLING
    )
    if drafter:
        statistics = acceptance_statistics(outputs)
        assert statistics.accepted > 50 and statistics.acceptance < 1
    assert p_value(law, outputs) > 1e-3


def test_drafts_that_a_confidence_head_ends_follow_the_target(stories_model, target, prompt, law):
    """It estimates a token from those before it and from the token itself, which is verified or drawn anew."""
    step, ending = trained_spark(stories_model), StoppingCriteria(3)
    policy = partial(AcceptanceHead, 4, head=step.acceptance, h=0.75)
    outputs = decode(target, [prompt] * SAMPLES, ending, BlockDrafter(step), policy=policy, sampling=SAMPLING)
    assert len({of.drafted for output in outputs for of in output.steps}) > 2, "it ends no draft"
    assert acceptance_statistics(outputs).accepted > 50 and p_value(law, outputs) > 1e-3


TREES = {"rsd_c": rsd_c, "rsd_s": rsd_s, "specinfer": specinfer}


@pytest.mark.parametrize(
    ("name", "verifier"),
    [
        *((name, verifier) for name in TREES for verifier in (TRAVERSAL, TOKENS)),
        ("specinfer", KSEQ),
        ("suffix+rsd_s", TRAVERSAL),
        ("first layers", TOKENS),
    ],
)
def test_every_tree_by_every_verifier_follows_the_target(stories_model, target, prompt, law, name, verifier):
    """In one batch; that a row draws in any batch what it draws alone is tested in test_drawn_trees.py."""
    drafter: Drafter = first_layers(stories_model)
    if grow := TREES.get(name.removeprefix("suffix+")):
        drafter = DrawnTrees(drafter.engine, grow=grow(2))
    ending, policy = StoppingCriteria(12, stops=lambda tokens: len(tokens) == 3), partial(Fixed, 6)
    how = {"policy": policy, "sampling": SAMPLING, "verifier": verifier}
    outputs = decode(target, [prompt] * 150, ending, fused(drafter) if "+" in name else drafter, **how)
    statistics = acceptance_statistics(outputs)
    assert statistics.accepted > 40 and statistics.acceptance < 1
    assert p_value(law, outputs) > 1e-3


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.long), 3, 8])
@pytest.mark.parametrize("name", ["suffix+layers", "suffix+medusa tree"])
def test_a_fused_tree_follows_the_target_in_every_batch(stories_model, target, prompt, law, name, batch):
    drafter, outputs, branched = DRAFTERS[name][0](stories_model), [], []

    def observe(rows, verified):
        branched.append(verified.draft.parents is not None)

    for i in range(0, 480, batch):
        sampling = replace(SAMPLING, seed=1000 + i)
        ending, policy = StoppingCriteria(3), partial(Fixed, 4)
        outputs += decode(target, [prompt] * batch, ending, drafter, policy=policy, sampling=sampling, observe=observe)
    assert any(branched) and p_value(law, outputs) > 1e-3


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.long), 3, 8])
def test_a_tree_that_grows_follows_the_target(stories_model, target, prompt, law, batch):
    """Each row has a tree of its own, as large as for a longer output."""
    drafter, outputs, trees = FeatureDrafter(trained_eagle(stories_model), width=4), [], []
    ending, policy = StoppingCriteria(12, stops=lambda tokens: len(tokens) == 3), partial(Fixed, 8)

    def observe(rows, verified):
        trees.extend(verified.draft.parents or ())

    for i in range(0, 600, batch):
        sampling = replace(SAMPLING, seed=1000 + i)
        outputs += decode(target, [prompt] * batch, ending, drafter, policy=policy, sampling=sampling, observe=observe)
    statistics = acceptance_statistics(outputs)
    assert statistics.accepted > 50 and statistics.acceptance < 1 and len(set(trees)) > 5
    assert p_value(law, outputs) > 1e-3


def test_a_row_with_a_tree_draws_alone_what_it_draws_in_a_batch(stories_model, target, prompt):
    """Its random numbers do not depend on how far its tree is padded."""
    drafter = FeatureDrafter(trained_eagle(stories_model), width=3)

    def outputs(seed, prompts, new):
        sampling, policy = Sampling(temperature=1.0, seed=seed), partial(Fixed, 6)
        found = decode(target, prompts, StoppingCriteria(new), drafter, policy=policy, sampling=sampling)
        return [output.tokens for output in found]

    together = outputs(1, [prompt, prompt[:-1], prompt], 12)
    assert outputs(2, [prompt[:-1]], 12) == [together[1]] and outputs(3, [prompt], 12) == [together[2]]


def test_a_row_with_a_chain_draws_alone_what_it_draws_in_a_batch(stories_model, target, prompt):
    """In its last step nothing is drafted for it, while the others draft."""
    drafter, policy, ending = first_layers(stories_model), partial(Fixed, 5), StoppingCriteria(9)
    for seed in (3, 24):
        sampling, prompts = Sampling(temperature=1.0, seed=seed), [prompt, prompt[:-2], prompt[:4]]
        together = decode(target, prompts, ending, drafter, policy=policy, sampling=sampling)
        for i, own in enumerate(prompts):
            alone = decode(target, [own], ending, drafter, policy=policy, sampling=replace(sampling, seed=seed + i))
            assert alone[0].tokens == together[i].tokens


def test_the_check_would_see_a_slight_error(target, prompt, law):
    warmer = Sampling(temperature=1.6, top_k=5, seed=7)
    assert p_value(law, decode(target, [prompt] * 2 * SAMPLES, StoppingCriteria(3), sampling=warmer)) < 1e-4


def test_seeds_reproduce_and_differ(stories_model, target, prompt):
    def outputs(seed, batch, gamma=3):
        drafter = ModelDrafter(build_engine(truncate(stories_model, range(3)), pack=False))
        sampling = Sampling(temperature=1.0, seed=seed)
        result = decode(
            target, [prompt] * batch, StoppingCriteria(20), drafter, policy=partial(Fixed, gamma), sampling=sampling
        )
        return [output.tokens for output in result]

    assert outputs(1, 3) == outputs(1, 3)
    assert outputs(1, 3) != outputs(2, 3)
    first, second, third = outputs(1, 3)
    assert first != second != third
    # A row's luck is its own: the second prompt of seed 1 is the only prompt of seed 2.
    assert outputs(1, 1) == [first] and outputs(2, 1) == [second]


def test_a_sampled_draft_equal_to_the_target_is_always_right(stories_model, target, prompt):
    drafter = ModelDrafter(build_engine(stories_model, pack=False))
    outputs = decode(target, [prompt] * 4, StoppingCriteria(30), drafter, sampling=Sampling(temperature=1.0, top_p=0.9))
    assert acceptance_statistics(outputs).acceptance == 1.0


@pytest.mark.parametrize("flags", [{"top_k": 5}, {"top_p": 0.9}])
def test_greedy_refuses_sampling_flags(flags):
    with pytest.raises(PeftlabError, match="temperature: 0 is greedy"):
        Sampling(temperature=0.0, **flags)
    Sampling(temperature=0.7, **flags)
