"""PEARL at work: draft and target at once, the output of plain decoding, and the schedule of the paper."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial

import pytest
import torch

from peftlab.decoding.decode import StoppingCriteria, decode
from peftlab.decoding.engine import EngineWrapper
from peftlab.decoding.engines import build_engine
from peftlab.decoding.lossy import LossyRule
from peftlab.decoding.parallel_drafters import PearlDrafter
from peftlab.decoding.policies import Confidence, Fixed
from peftlab.decoding.sampling import Sampling
from peftlab.decoding.statistics import acceptance_statistics
from peftlab.decoding.table import Window, lossy
from peftlab.errors import PeftlabError
from peftlab.pipelines.benchmark import benchmark
from peftlab.pipelines.generate import DecodingOptions, generate
from tests.command_line import invoke
from tests.decoding.test_architectures import make, near_copy
from tests.decoding.test_draft_window import places  # noqa: F401
from tests.decoding.test_sampled_decoding import p_value

NEW = 20
PROMPTS = [[5, 6, 7, 8, 9, 6, 7], [11], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29]]
SAMPLING = Sampling(temperature=1.5, top_k=3)


@pytest.fixture(scope="module")
def model():
    return make("Llama")


@pytest.fixture(scope="module")
def target(model):
    return build_engine(model, pack=False)


def near(model, **settings):
    return PearlDrafter(near_copy(model).engine, **settings)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_greedy_output_is_the_plain_one(model, target, generate_greedy, gamma, batch):
    want = [generate_greedy(model, prompt, NEW) for prompt in PROMPTS]
    outputs = []
    for i in range(0, 3, batch):
        some = PROMPTS[i : i + batch]
        outputs += decode(target, some, StoppingCriteria(NEW), near(model), policy=partial(Fixed, gamma))
    assert [output.tokens for output in outputs] == want
    found = acceptance_statistics(outputs)
    assert 0 < found.accepted < found.drafted
    assert all(step.accepted <= step.drafted <= gamma and step.emitted >= 1 for o in outputs for step in o.steps)


@pytest.mark.parametrize(
    "settings",
    [{"pool": 2}, {"group": True}, {"policy": lambda: Confidence(4, 0.3)}, {"stopping": StoppingCriteria(60)}],
    ids=["pool", "group", "confidence", "to the context's end"],
)
def test_however_it_is_decoded(model, target, settings):
    settings = {"stopping": StoppingCriteria(NEW), "policy": partial(Fixed, 4), **settings}
    prompts, stopping = [*PROMPTS, [3, 4]], settings.pop("stopping")
    plain = decode(target, prompts, stopping)
    outputs = decode(target, prompts, stopping, near(model, window=Window(2, 6)), **settings)
    assert [(o.tokens, o.reason) for o in outputs] == [(o.tokens, o.reason) for o in plain]


def test_a_perfect_draft_follows_the_papers_schedule(model, target):
    drafter = PearlDrafter(target)
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        output = decode(
            target, PROMPTS[:1], StoppingCriteria(17), drafter, policy=partial(Fixed, 4), sampling=sampling
        )[0]
        assert [step.emitted for step in output.steps] == [1, 4, 4, 4, 4]
        assert acceptance_statistics([output]).acceptance == 1


@pytest.mark.parametrize("gamma", [2, 3])
def test_sampled_output_follows_the_targets_distribution(model, target, gamma):
    @torch.inference_mode()
    def follow(prefix, left):
        if left == 0:
            return {(): 1.0}
        p = SAMPLING.probabilities(model(torch.tensor([[*PROMPTS[0], *prefix]])).logits[0, -1].double())
        return {
            (x, *rest): float(p[x]) * weight
            for x in p.nonzero()[:, 0].tolist()
            for rest, weight in follow((*prefix, x), left - 1).items()
        }

    outputs = decode(
        target, PROMPTS[:1] * 800, StoppingCriteria(5), near(model), policy=partial(Fixed, gamma), sampling=SAMPLING
    )
    found = acceptance_statistics(outputs)
    assert 0 < found.accepted < found.drafted
    shortened = [replace(output, tokens=output.tokens[:4]) for output in outputs]
    assert p_value(follow((), 4), shortened) > 1e-3


def test_draft_and_target_work_at_once(model, target):
    """The target's step ends only after a step of the draft has begun, and the other way round."""
    begun = {"target": threading.Event(), "draft": threading.Event()}

    class Meeting(EngineWrapper):
        def __init__(self, engine, own, other):
            super().__init__(engine)
            self.own, self.other, self.meets = own, other, False

        def forward(self, cache, tokens, block, keep=None):
            if self.meets:
                begun[self.own].set()
                assert begun[self.other].wait(60), f"the {self.other} has not begun"
            return self._engine.forward(cache, tokens, block, keep)

    own, draft = Meeting(target, "target", "draft"), Meeting(near(model).engine, "draft", "target")
    drafter = PearlDrafter(draft)

    def begin(*_):
        own.meets = draft.meets = True

    decode(own, PROMPTS[:1], StoppingCriteria(8), drafter, policy=partial(Fixed, 2), on_tokens=begin)
    assert begun["target"].is_set() and begun["draft"].is_set()


def test_what_it_cannot_do_is_refused(model, target, places):  # noqa: F811
    with pytest.raises(PeftlabError, match="a state-space draft cannot"):
        decode(target, PROMPTS, StoppingCriteria(4), PearlDrafter(build_engine(make("Mamba"))))
    with pytest.raises(PeftlabError, match="lossy typical: drafter pearl verifies exactly only"):
        rule = LossyRule.of(lossy("typical"))
        decode(target, PROMPTS, StoppingCriteria(4), near(model), lossy=rule)
    with pytest.raises(PeftlabError, match="drafter pearl: needs a draft model"):
        generate(str(places / "target"), "one", drafter="pearl")
    with pytest.raises(PeftlabError, match="drafter pearl: chains"):
        options = DecodingOptions(tree="rsd_c:2")
        generate(str(places / "target"), "one", str(places / "draft"), options, drafter="pearl")


def test_the_command_line(places):  # noqa: F811
    pair = ["--target", places / "target", "--draft", places / "draft", "--drafter", "pearl", "--max-new-tokens", 6]
    assert invoke("generate", *pair, "--prompt", "one two").exit_code == 0
    options = DecodingOptions(max_new_tokens=8, gamma=2)
    files = str(places / "target"), places / "prompts.jsonl", str(places / "draft")
    found = benchmark(*files, options, repeats=1, drafters=["pearl"]).result
    assert set(found.drafters) == {"draft", "suffix+draft", "pearl"}
    assert all(result.lossless for result in found.drafters.values())
    assert found.drafters["pearl"].time.target > 0 and found.drafters["pearl"].time.draft > 0
