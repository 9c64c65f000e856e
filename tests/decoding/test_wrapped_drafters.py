"""Wrapped drafters: every attribute and method that the decoder uses is passed on to the drafter within."""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from peftlab.decoding.decode import Drafter, DrafterWrapper, Fixed, StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.measurements import Clock, timed_drafter
from peftlab.decoding.model_drafter import context_room
from peftlab.decoding.model_free import with_copies
from peftlab.decoding.parallel_drafters import PearlDrafter
from peftlab.decoding.sampling import LossyRule
from peftlab.decoding.state_drafters import HeadsDrafter
from peftlab.decoding.table import DRAWN, lossy
from peftlab.decoding.theory import RankRates
from peftlab.drafting.heads import MedusaHeads
from peftlab.errors import PeftlabError
from tests.decoding.test_architectures import make
from tests.decoding.test_feature_trees import row
from tests.decoding.test_lossless_gate import DRAFTERS, FEATURES

MEMBERS = {name: member for name, member in vars(Drafter).items() if not name.startswith("_")}
METHODS = {name: len(inspect.signature(m).parameters) - 1 for name, m in MEMBERS.items() if inspect.isfunction(m)}


def timed(drafter):
    return timed_drafter(lambda: drafter, Clock(torch.device("cpu")))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=5, max_position_embeddings=64)).eval()


@pytest.fixture(scope="module")
def target(model):
    return build_engine(model, pack=False, features=FEATURES)


def test_every_attribute_is_that_of_the_drafter_within(target):
    class Odd(Drafter):  # which differs from the protocol's defaults in everything
        name, provides, concurrent, has_logits = "odd", frozenset({DRAWN}), True, True

    assert len(MEMBERS) > len(METHODS) + 4
    for name in MEMBERS.keys() - METHODS.keys():
        assert getattr(timed(Odd()), name) == getattr(Odd(), name), name
        if name not in ("name", "has_logits"):
            assert getattr(with_copies(Odd()), name) == getattr(Odd(), name), name


@pytest.mark.parametrize("name", METHODS)
def test_every_call_reaches_the_drafter_within(name):
    calls = []

    class Noted(Drafter):
        name = "noted"

    setattr(Noted, name, lambda self, *given: calls.append(given))
    given = tuple(range(METHODS[name]))
    for wrapped in (timed(Noted()), timed(timed(Noted()))):
        getattr(wrapped, name)(*given)
    assert calls == [given, given]
    assert name in vars(DrafterWrapper)


def test_with_copies_the_drafts_that_a_drafter_could_make_are_its_own(model):
    heads = MedusaHeads(model.get_output_embeddings().weight, 2)
    heads.ranks = RankRates(((0.5, 0.2), (0.4, 0.1)))
    own = HeadsDrafter(heads).candidates([0.5], [1.0, 1.1, 1.2, 1.3])
    assert len(own) == 3
    assert with_copies(HeadsDrafter(heads)).candidates([0.5], [1.0, 1.1, 1.2, 1.3]) == own


def test_a_timed_drafter_that_works_beside_the_target_is_still_verified_exactly(target):
    with pytest.raises(PeftlabError, match="lossy typical: drafter pearl verifies exactly only"):
        decode(target, [[5]], StoppingCriteria(4), timed(PearlDrafter(target)), lossy=LossyRule.of(lossy("typical")))


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_says_whether_its_chains_have_logits(target, model, name):
    drafter, found = DRAFTERS[name](model, {"pack": False}), []

    def observe(rows, verified):
        draft = verified.draft
        if draft.tokens.shape[1]:
            found.append(draft.logits is not None and draft.parents is None)

    decode(target, [[1, 5, 9, 5, 9]], StoppingCriteria(8), drafter, policy=partial(Fixed, 3), observe=observe)
    assert found
    assert drafter.has_logits == (all(found) and not name.startswith("suffix+")), "what is copied has none"


def test_only_a_context_limits_what_is_drafted():
    with_limit, without = (build_engine(make(name)) for name in ("Llama", "Mamba"))
    assert without.limit is None and [context_room(without, row([5]), budget) for budget in (1, 4)] == [1, 4]
    last = with_limit.limit
    assert [context_room(with_limit, row([5] * n), 4) for n in (1, last - 2, last, last + 1, last + 2)] == [
        4,
        3,
        1,
        0,
        0,
    ]
