"""Encoder-decoder targets: plain and speculative output equal ``transformers.generate`` on rows alone."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM

import peftlab
from peftlab.decoding.decode import Fixed, StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.measurements import acceptance_statistics
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.decoding.model_free import NGramDrafter, PromptLookup, SuffixLookup, TokenRecycling, with_copies
from peftlab.decoding.sampling import Sampling
from peftlab.errors import PeftlabError
from peftlab.pipelines.benchmark import DecodingOptions, benchmark, plan_draft
from peftlab.pipelines.generate import generate
from tests.byte_tokens import byte_tokenizer
from tests.decoding.test_architectures import make as decoder_only
from tests.decoding.test_architectures import with_biases

NEW = 20
SIZES = {"vocab_size": 64, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 4}
# Few buckets, so that a token in the wrong place is seen.
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "initializer_factor": 3.0}
BART = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 48, "init_std": 0.4}
MODELS = {
    "T5": ("t5", T5),
    "T5, untied": ("t5", {**T5, "tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}),
    "BART": ("bart", {**BART, "forced_bos_token_id": 5, "forced_eos_token_id": None}),
    "Pegasus": ("pegasus", {**BART, "forced_eos_token_id": None}),
}
PROMPTS = [[5, 6, 7, 8, 9, 6, 7, 1], [11, 12, 1], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 1]]


def make(name, seed=0, **other):
    kind, settings = MODELS[name]
    torch.manual_seed(seed)
    return with_biases(AutoModelForSeq2SeqLM.from_config(CONFIG_MAPPING[kind](**SIZES, **settings, **other)).eval())


@pytest.fixture(scope="module", params=MODELS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def model(name):
    return make(name)


@pytest.fixture(scope="module")
def target(model):
    return build_engine(model)


def library(model, prompt, new=NEW):
    """Return the greedy output of ``generate`` without the tokens that it begins with."""
    output = model.generate(torch.tensor([prompt]), max_new_tokens=new, num_beams=1, do_sample=False)[0].tolist()
    begun = 1 if getattr(model.generation_config, "forced_bos_token_id", None) is None else 2
    return output[begun : begun + new]


def ours(target, drafter=None, gamma=4, prompts=PROMPTS, **options):
    stopping = StoppingCriteria(NEW, frozenset({1}))
    return decode(target, prompts, stopping, drafter, policy=partial(Fixed, gamma), **options)


def test_plain_output_of_a_batch_equals_generate_of_each_row(model, target):
    expected = [library(model, prompt, NEW + 1)[:NEW] for prompt in PROMPTS]
    assert [output.tokens for output in ours(target)] == expected
    assert len({token for tokens in expected for token in tokens}) > 2  # a model that repeats itself would hide errors


def test_every_drafter_gives_the_plain_output(model, target):
    plain = [output.tokens for output in ours(target)]
    draft = build_engine(model)  # the target itself: its whole draft is accepted
    for make_drafter in (
        PromptLookup,
        SuffixLookup,
        NGramDrafter,
        TokenRecycling,
        lambda: ModelDrafter(draft),
        lambda: with_copies(ModelDrafter(draft), None),
    ):
        outputs = ours(target, make_drafter())
        assert [output.tokens for output in outputs] == plain
    found = acceptance_statistics(ours(target, ModelDrafter(draft)))
    assert found.acceptance == 1


def test_a_smaller_draft_reads_the_prompts_itself(name, target):
    small = build_engine(make(name, seed=1))
    assert [o.tokens for o in ours(target, ModelDrafter(small))] == [o.tokens for o in ours(target)]


def test_rows_do_not_influence_one_another(target):
    together = ours(target, sampling=Sampling(temperature=1.0, seed=3))
    for i, prompt in enumerate(PROMPTS):
        alone = ours(target, prompts=[prompt], sampling=Sampling(temperature=1.0, seed=3 + i))[0]
        assert alone.tokens == together[i].tokens


def test_prompt_lookup_copies_from_the_prompt():
    output = ours(build_engine(make("T5")), PromptLookup(), prompts=[[*range(2, 64), 1]])[0]
    assert output.tokens[0] > 1  # in the prompt, once, and not yet in the output
    assert [step.drafted for step in output.steps[:2]] == [0, 4]


def test_a_draft_of_another_form_is_refused():
    causal = build_engine(decoder_only("Llama"))
    with pytest.raises(PeftlabError, match="only one is an encoder-decoder"):
        ours(build_engine(make("T5")), ModelDrafter(causal))
    with pytest.raises(PeftlabError, match="only one is an encoder-decoder"):
        ours(causal, ModelDrafter(build_engine(make("T5"))))


def test_a_prompt_longer_than_the_encoder_reads_is_refused():
    with pytest.raises(PeftlabError, match="prompt 0: 49 tokens, but the model's context is 48"):
        ours(build_engine(make("BART")), prompts=[[7] * 49])


def saved(directory, seed, **other):
    """Write a model and a tokenizer of bytes, and return the directory."""
    tokenizer = byte_tokenizer(None, [], bos="<s>", eos="</s>")
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "initializer_factor": 3.0}
    torch.manual_seed(seed)
    model = AutoModelForSeq2SeqLM.from_config(CONFIG_MAPPING["t5"](**{**SIZES, **T5, **sizes, **other}))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    (place / "prompts.jsonl").write_text('{"prompt": "one two one two"}\n{"prompt": "three"}\n')
    small = {"num_layers": 1, "num_decoder_layers": 1}
    return saved(place / "target", 0), saved(place / "draft", 1, **small), place / "prompts.jsonl"


def test_the_command_line_decodes_and_measures(places, tmp_path):
    target, draft, prompts = places
    plain = generate(target, "one two", options=DecodingOptions(max_new_tokens=8))
    for drafter in ({"drafter": "lookup"}, {"draft": draft}, {"draft": draft, "drafter": "suffix"}):
        assert generate(target, "one two", options=DecodingOptions(max_new_tokens=8), **drafter).tokens == plain.tokens
    found = benchmark(target, prompts, draft, DecodingOptions(max_new_tokens=8, gamma=2), repeats=1).result
    assert set(found.drafters) >= {"draft", "lookup", "suffix+draft"}
    assert all(result.lossless for result in found.drafters.values())
    assert plan_draft(target, draft, max_gamma=2, context=16, repeats=1).result.c > 0


def test_what_needs_a_causal_model_is_refused(places, tmp_path):
    target, _, prompts = places
    with pytest.raises(PeftlabError, match="encoder-decoder model, which no recipe trains a draft for"):
        peftlab.run("draft/medusa", [f"target={target}", f"data.prompts={prompts}", f"output_dir={tmp_path / 'run'}"])
    with pytest.raises(PeftlabError, match="not cut to some of its layers"):
        generate(target, "one two", draft="exit:1")
