"""Draft models with a window of first and last tokens: their logits and memory, and output that stays exact."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from peftlab.decoding.cache import EngineWrapper, WindowedCache
from peftlab.decoding.decode import Fixed, StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.measurements import acceptance_statistics
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.decoding.parallel_drafters import PearlDrafter
from peftlab.decoding.policies import Confidence
from peftlab.decoding.sampling import LossyRule, Sampling
from peftlab.decoding.state_drafters import FeatureDrafter
from peftlab.decoding.table import Window, lossy, window
from peftlab.drafting.eagle import EagleStep
from peftlab.errors import PeftlabError
from peftlab.pipelines.benchmark import DecodingOptions, benchmark, plan_draft
from peftlab.pipelines.generate import generate
from tests.byte_tokens import byte_tokenizer
from tests.command_line import invoke
from tests.decoding.test_architectures import SIZES, make, near_copy, with_biases
from tests.decoding.test_sampled_decoding import p_value
from tests.eagle_models import eagle

SMALL = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 5000}
MODELS = {
    "Llama": ("llama", {**SMALL, "num_hidden_layers": 2, "max_position_embeddings": 5000}),
    "GPT-2": ("gpt2", GPT2),
    "Mistral": ("mistral", {**SMALL, "num_hidden_layers": 2, "max_position_embeddings": 5000, "sliding_window": 12}),
}
SEEN = Window(3, 20)


def small(name="Llama", seed=0, **other):
    kind, settings = MODELS[name]
    torch.manual_seed(seed)
    return with_biases(AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**SIZES, **settings, **other})).eval())


def text(n, seed=0):
    return torch.randint(3, 64, (n,), generator=torch.Generator().manual_seed(seed))


def masked(model, ids):
    """The model's own logits where each token sees the first and the last ones only."""
    place = torch.arange(len(ids))
    behind = place[:, None] - place
    seen = (behind >= 0) & ((place < SEEN.sinks) | (behind < SEEN.last))
    if (width := getattr(model.config, "sliding_window", None)) is not None:
        seen &= behind < width
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    return model(ids[None], attention_mask=mask[None, None]).logits[0].detach()


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_a_mask_over_the_whole_text(name, flat):
    """Rows of different lengths, several times around the ring, with rejected tokens in between."""
    model = small(name)
    engine = build_engine(model, pack=False, flat=flat)
    texts = [text(400), text(330, 1)]
    want = [masked(model, ids) for ids in texts]
    cache = WindowedCache(engine.layers, 2, 450, SEEN)
    starts = [0, 0]
    for n in (100, 128, 1, 1, 90, 5):
        some = torch.stack([ids[at : at + n] for ids, at in zip(texts, starts, strict=True)])
        logits = engine.forward(cache, some, cache.block([0, 1], starts, n)).logits
        for row, own, at in zip(logits, want, starts, strict=True):
            torch.testing.assert_close(row, own[at : at + n], rtol=1e-3, atol=1e-3)
        starts = [start + n for start in starts]
        engine.forward(cache, text(98).expand(2, -1), cache.block([0, 1], starts, 98))  # all of it rejected
        if n == 100:
            starts[1] -= 30  # they were not its tokens after all
    assert starts[0] > SEEN.sinks + cache.ring


def test_memory_does_not_grow_with_the_text():
    draft, target = small(num_hidden_layers=1), build_engine(small(num_hidden_layers=1, seed=1))
    sizes = {}
    for n in (300, 4200):
        for seen in (None, SEEN):
            drafter = ModelDrafter(build_engine(draft), window=seen)
            decode(target, [text(n).tolist()], StoppingCriteria(8), drafter, policy=partial(Fixed, 3))
            sizes[n, seen] = drafter._cache.bytes
    assert sizes[300, SEEN] == sizes[4200, SEEN] < sizes[300, None] < sizes[4200, None] / 10


@pytest.mark.parametrize("kind", ["model", "eagle"])
def test_the_output_is_the_targets_own(kind):
    model = small()
    network = EagleStep(eagle(model))
    engine = build_engine(model, features=network.features)
    prompts = [text(n, n).tolist() for n in (170, 5, 40)]
    stopping = StoppingCriteria(24)
    plain = [output.tokens for output in decode(engine, prompts, stopping)]
    found = {}
    for seen in (None, Window(2, 400), Window(1, 3)):
        if kind == "model":
            drafter = ModelDrafter(build_engine(model), window=seen)
        else:
            drafter = FeatureDrafter(network, window=seen)
        for batch in (1, 3):
            outputs = []
            for i in range(0, 3, batch):
                outputs += decode(engine, prompts[i : i + batch], stopping, drafter, policy=partial(Fixed, 3))
            assert [output.tokens for output in outputs] == plain
        found[seen] = acceptance_statistics(outputs)
    assert found[None] == found[Window(2, 400)]
    if kind == "model":
        assert found[None].acceptance == 1 > found[Window(1, 3)].acceptance


def test_what_a_window_cannot_do_is_refused():
    for wrong in ("4", "4:0", "-1:8", "a:b"):
        with pytest.raises(PeftlabError, match=f"draft_window {wrong}: SINKS:LAST"):
            window(wrong)
    alibi = build_engine(make("BLOOM"))
    with pytest.raises(PeftlabError, match="does not place its tokens by position"):
        decode(alibi, [[5, 6]], StoppingCriteria(4), ModelDrafter(alibi, window=SEEN))


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    place, tokenizer = tmp_path_factory.mktemp("models"), byte_tokenizer(None, [], bos="<s>", eos="</s>")
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    for name, layers in (("target", 2), ("draft", 1)):
        small(num_hidden_layers=layers, **sizes).save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
    (place / "prompts.jsonl").write_text('{"prompt": "one two three four five six seven"}\n{"prompt": "three"}\n')
    return place


def test_the_command_line_and_the_plans_memory(places):
    target, draft = str(places / "target"), str(places / "draft")
    options = DecodingOptions(max_new_tokens=8, gamma=2, draft_window="2:4")
    plain = generate(target, "one two three four", options=DecodingOptions(max_new_tokens=8))
    assert generate(target, "one two three four", draft, options).tokens == plain.tokens
    found = benchmark(target, places / "prompts.jsonl", draft, options, repeats=1, drafters=["lookup"]).result
    assert all(result.lossless for result in found.drafters.values())
    plan = plan_draft(target, draft, options, max_gamma=1, context=16, repeats=1, batches=(1, 3))
    heads, dim, fp32 = 2, 16, 4  # keys and values of one head
    assert [(of.batch, of.tokens, of.target, of.draft) for of in plan.memory] == [
        (batch, n, batch * n * 2 * heads * dim * fp32, batch * min(n, 2 + 4 + 128) * heads * dim * fp32)
        for batch in (1, 3)
        for n in (16, 5000)
    ]
    assert plan.as_json()["memory"][0]["batch"] == 1


@pytest.mark.parametrize(
    ("settings", "given", "reason"),
    [
        ({"draft_window": "2:4"}, {"drafter": "lookup"}, "no draft is given to see it"),
        ({"draft_window": "2:4", "tree": "rsd_c:2"}, {"draft": "draft"}, "for chains"),
        ({"draft_window": "2"}, {"draft": "draft"}, "SINKS:LAST"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(places, settings, given, reason):
    given = {key: str(places / value) if key == "draft" else value for key, value in given.items()}
    with pytest.raises(PeftlabError, match=reason):
        generate(str(places / "target"), "one", options=DecodingOptions(**settings), **given)


def test_the_command_line_takes_a_window(places):
    draft = ["--draft", places / "draft", "--draft-window"]
    base = ["generate", "--target", places / "target", "--prompt", "one two", "--max-new-tokens", 4]
    assert invoke(*base, *draft, "2:4").exit_code == 0
    assert invoke("draft", "plan", *base[1:3], *draft, "2:4", "--repeats", 1, "--max-gamma", 1).exit_code == 0


NEW = 20
PROMPTS = [[5, 6, 7, 8, 9, 6, 7], [11], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29]]
SAMPLING = Sampling(temperature=1.5, top_k=3)


@pytest.fixture(scope="module")
def model():
    return make("Llama")


@pytest.fixture(scope="module")
def target(model):
    return build_engine(model, pack=False)


@pytest.fixture(scope="module")
def want(model, generate_greedy):
    return [generate_greedy(model, prompt, NEW) for prompt in PROMPTS]


def near(model, **settings):
    return PearlDrafter(near_copy(model).engine, **settings)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_greedy_output_is_the_plain_one(model, target, want, gamma, batch):
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
    [{"pool": 2}, {"policy": lambda: Confidence(4, 0.3)}, {"stopping": StoppingCriteria(60)}],
    ids=["pool", "confidence", "to the context's end"],
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


def test_what_it_cannot_do_is_refused(model, target, places):
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


def test_the_command_line(places):
    pair = ["--target", places / "target", "--draft", places / "draft", "--drafter", "pearl", "--max-new-tokens", 6]
    assert invoke("generate", *pair, "--prompt", "one two").exit_code == 0
    options = DecodingOptions(max_new_tokens=8, gamma=2)
    files = str(places / "target"), places / "prompts.jsonl", str(places / "draft")
    found = benchmark(*files, options, repeats=1, drafters=["pearl"]).result
    assert set(found.drafters) == {"draft", "suffix+draft", "pearl"}
    assert all(result.lossless for result in found.drafters.values())
    assert found.drafters["pearl"].time.target > 0 and found.drafters["pearl"].time.draft > 0
