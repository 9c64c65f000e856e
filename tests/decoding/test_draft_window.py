"""A draft that sees the first and the last tokens of a text: its logits, its memory, and the output, which stays exact."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from peftlab.decoding.cache import WindowedCache
from peftlab.decoding.decode import StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.decoding.policies import Fixed
from peftlab.decoding.state_drafters import FeatureDrafter
from peftlab.decoding.statistics import acceptance_statistics
from peftlab.decoding.table import Window, window
from peftlab.drafting.eagle import EagleStep
from peftlab.errors import PeftlabError
from peftlab.pipelines.benchmark import benchmark, plan_draft
from peftlab.pipelines.generate import DecodingOptions, generate
from tests.byte_tokens import byte_tokenizer
from tests.command_line import invoke
from tests.decoding.test_architectures import SIZES, make, with_biases
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
