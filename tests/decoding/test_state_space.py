"""Models with a state (Mamba, Qwen3.5) as targets and as drafts, beyond what ``test_architectures.py`` covers."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from peftlab.decoding.cache import Block
from peftlab.decoding.decode import Fixed, StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.measurements import acceptance_statistics
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.decoding.model_free import TokenRecycling, with_copies
from peftlab.decoding.policies import Confidence
from peftlab.decoding.sampled_trees import DrawnTrees
from peftlab.decoding.sampling import Sampling
from peftlab.drafting.target import truncate
from peftlab.errors import PeftlabError
from peftlab.pipelines.benchmark import DecodingOptions, benchmark, plan_draft
from peftlab.pipelines.generate import generate
from tests.byte_tokens import byte_tokenizer
from tests.decoding.test_architectures import MODELS, SIZES, make, near_copy
from tests.decoding.test_sampled_decoding import p_value

NEW = 24
PROMPTS = [[5, 6, 7, 8, 9, 6, 7], [11], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29]]
STATES = ["Mamba", "Mamba 2", pytest.param("Qwen3.5", marks=pytest.mark.long)]
SAMPLING = Sampling(temperature=1.5, top_k=3)


@pytest.fixture(scope="module", params=STATES)
def model(request):
    return make(request.param)


@pytest.fixture(scope="module")
def target(model):
    return build_engine(model)


@pytest.fixture(scope="module")
def want(model, generate_greedy):
    return [generate_greedy(model, prompt, NEW) for prompt in PROMPTS]


def ours(target, drafter=None, gamma=4, prompts=PROMPTS, new=NEW, **options):
    return decode(target, prompts, StoppingCriteria(new), drafter, policy=partial(Fixed, gamma), **options)


def tokens(outputs):
    return [output.tokens for output in outputs]


DRAFTS = {
    "itself": lambda m: ModelDrafter(build_engine(m)),
    "first layers": lambda m: ModelDrafter(build_engine(truncate(m, range(2)))),
    "early exit": lambda m: ModelDrafter(build_engine(truncate(m, range(2), share=True)), shares_cache=True),
    "transformer": lambda m: ModelDrafter(build_engine(make("Llama"))),
    "suffix+draft": lambda m: with_copies(near_copy(m), None),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_every_draft_gives_the_plain_output(model, target, name, want):
    for batch in (1, 3):
        outputs = []
        for i in range(0, 3, batch):
            outputs += ours(target, DRAFTS[name](model), prompts=PROMPTS[i : i + batch])
        assert tokens(outputs) == want
    found = acceptance_statistics(outputs)
    assert found.acceptance == 1 if name == "itself" else found.accepted < found.drafted


def test_a_state_space_draft_for_a_transformer(model):
    target = build_engine(make("Llama"))
    plain = tokens(ours(target))
    drafter = ModelDrafter(build_engine(model))
    assert tokens(ours(target, drafter)) == plain
    stopping = StoppingCriteria(NEW)
    assert tokens(decode(target, PROMPTS, stopping, drafter, policy=lambda: Confidence(5, 0.3), pool=2)) == plain


def test_sampled_output_follows_the_targets_distribution(model, target):
    """Exact probabilities of every output of three tokens, against outputs drafted by chains and by trees."""
    prompt = PROMPTS[0]

    @torch.inference_mode()
    def follow(prefix, left):
        if left == 0:
            return {(): 1.0}
        p = SAMPLING.probabilities(model(torch.tensor([[*prompt, *prefix]])).logits[0, -1].double())
        return {
            (x, *rest): float(p[x]) * weight
            for x in p.nonzero()[:, 0].tolist()
            for rest, weight in follow((*prefix, x), left - 1).items()
        }

    law, recycling = follow((), 3), TokenRecycling()
    ours(target, recycling, prompts=[prompt] * 4, new=2, sampling=SAMPLING)  # so that it has something to draft
    for drafter in (near_copy(model), recycling):
        outputs = ours(target, drafter, gamma=3, prompts=[prompt] * 500, new=3, sampling=SAMPLING)
        assert acceptance_statistics(outputs).accepted > 20
        assert p_value(law, outputs) > 1e-3


def test_what_a_state_needs_does_not_grow(target):
    """A row keeps one state and those of the drafted tokens, however long it is."""
    caches, sizes = [], []
    new_cache = target.new_cache

    def recorded(*arguments):
        caches.append(new_cache(*arguments))
        return caches[-1]

    target.new_cache = recorded
    try:
        ours(target, prompts=[[5]], new=100, on_tokens=lambda *_: sizes.append(caches[0].bytes))
    finally:
        del target.new_cache
    assert sizes[0] == sizes[-1] > 0


def test_a_long_prompt_is_that_of_the_models_own_forward(model, target):
    ids = torch.randint(64, (2, 60), generator=torch.Generator().manual_seed(0))
    out = target.forward(target.new_cache(2, 60), ids, Block((0, 0), 60), [10, 59])
    torch.testing.assert_close(out.logits, model(ids).logits[:, [10, 59]].detach(), rtol=1e-4, atol=1e-4)


def test_branches_from_a_state_space_draft_are_refused(model, target):
    with pytest.raises(PeftlabError, match="draft: a state-space model drafts chains only"):
        ours(target, DrawnTrees(build_engine(model)))


def saved(directory, layers):
    """Write a model and a tokenizer of bytes, and return the directory."""
    tokenizer = byte_tokenizer(None, [], bos="<s>", eos="</s>")
    kind, settings = MODELS["Mamba"]
    sizes = {**SIZES, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**sizes, **{**settings, "num_hidden_layers": layers})
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def test_the_command_line_decodes_and_measures(tmp_path):
    target, draft = saved(tmp_path / "target", 3), saved(tmp_path / "draft", 1)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one two one two"}\n{"prompt": "three"}\n')
    options = DecodingOptions(max_new_tokens=8, gamma=2)
    plain = generate(target, "one two", options=DecodingOptions(max_new_tokens=8))
    for drafter in ({"draft": draft}, {"draft": "exit:1"}, {"drafter": "recycling"}):
        assert generate(target, "one two", options=options, **drafter).tokens == plain.tokens
    found = benchmark(target, tmp_path / "prompts.jsonl", draft, options, repeats=1, batch_size=2).result
    assert set(found.drafters) >= {"draft", "lookup", "suffix+draft", "recycling"}
    assert all(result.lossless for result in found.drafters.values())
    assert plan_draft(target, draft, max_gamma=2, context=16, repeats=1).result.c > 0
