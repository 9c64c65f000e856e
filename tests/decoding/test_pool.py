"""A pool that refills: outputs of single sequences, whatever ended beside them, for every kind of drafter."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
from typer.testing import CliRunner

from peftlab.cli.app import app
from peftlab.decoding.benchmark import Question, Settings, measure_pool
from peftlab.decoding.decode import StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.decoding.model_free import NGramDrafter, PromptLookup, SuffixAndDraft, SuffixLookup, TokenRecycling
from peftlab.decoding.policies import Fixed
from peftlab.decoding.sampling import Sampling
from peftlab.decoding.state_drafters import FeatureDrafter, HeadsDrafter
from peftlab.decoding.statistics import acceptance_statistics
from peftlab.decoding.verify import Verifier, verify_chain, verify_tree
from peftlab.drafting.heads import MedusaHeads
from peftlab.drafting.state_network import usual_features
from peftlab.drafting.states import truncate
from peftlab.errors import PeftlabError
from tests.eagle_models import trained_eagle

NEW = 20


def layers(model):
    return ModelDrafter(build_engine(truncate(model, range(4)), pack=False))


DRAFTERS = {
    "plain": lambda m: None,
    "layers": layers,
    "early exit": lambda m: ModelDrafter(
        build_engine(truncate(m, range(4), share=True), pack=False), shares_cache=True
    ),
    "heads": lambda m: HeadsDrafter(MedusaHeads(m.get_output_embeddings().weight, 4), width=4),
    "eagle tree": lambda m: FeatureDrafter(trained_eagle(m), 3),
    "lookup": lambda m: PromptLookup(),
    "n-gram": lambda m: NGramDrafter(),
    "recycling": lambda m: TokenRecycling(),
    "suffix+layers": lambda m: SuffixAndDraft(SuffixLookup(shortest=2), layers(m)),
}


@pytest.fixture(scope="module")
def target(stories_model):
    return build_engine(stories_model, pack=False, features=usual_features(5))


@pytest.fixture(scope="module")
def ends(target, uneven_prompts):
    """Tokens of some outputs, so that slots become free at different times."""
    plain = decode(target, uneven_prompts, StoppingCriteria(NEW))
    return StoppingCriteria(NEW, frozenset({plain[1].tokens[8], plain[2].tokens[3]}))


@pytest.fixture(scope="module")
def expected(target, uneven_prompts, ends):
    outputs = [decode(target, [prompt], ends)[0] for prompt in uneven_prompts]
    assert len({len(output.tokens) for output in outputs}) > 2
    return [(output.tokens, output.reason) for output in outputs]


@pytest.mark.parametrize("pool", [1, 3])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_pool_gives_the_outputs_of_single_sequences(
    stories_model, target, uneven_prompts, ends, expected, name, pool
):
    drafter, together = DRAFTERS[name](stories_model), []

    def observe(rows, verified):
        together.append(len(rows))

    found = decode(target, uneven_prompts, ends, drafter, policy=partial(Fixed, 4), pool=pool, observe=observe)
    assert [(output.tokens, output.reason) for output in found] == expected
    full = together.count(pool)
    assert max(together) == pool and together[:full] == [pool] * full, "never less while a prompt waits"
    if name in ("layers", "early exit", "heads", "eagle tree"):
        assert acceptance_statistics(found).accepted > 0


def test_a_pool_of_nothing(target):
    with pytest.raises(PeftlabError, match="pool: 0 sequences; give 1 or more"):
        decode(target, [[1]], StoppingCriteria(3), pool=0)


def test_sampling_in_a_pool_is_that_of_single_sequences(stories_model, target, uneven_prompts, ends):
    sampling, policy = Sampling(temperature=0.9, seed=4), partial(Fixed, 3)
    found = decode(target, uneven_prompts, ends, layers(stories_model), policy=policy, sampling=sampling, pool=2)
    for i, prompt in enumerate(uneven_prompts):
        own = replace(sampling, seed=sampling.seed + i)
        alone = decode(target, [prompt], ends, layers(stories_model), policy=policy, sampling=own)
        assert alone[0].tokens == found[i].tokens


def test_a_pool_verifies_as_asked(stories_model, target, uneven_prompts):
    used = []

    def chain(*arguments):
        used.append(arguments)
        return verify_chain(*arguments)

    settings = Settings(6, sampling=Sampling(1.0), batch_size=2, repeats=1, verifier=Verifier(chain, verify_tree))
    questions = [Question(str(i), "", prompt) for i, prompt in enumerate(uneven_prompts[:3])]
    measured = measure_pool(target, "draft", partial(layers, stories_model), questions, settings)
    assert measured.equal is None and set(measured.pooled) == {"plain", "draft"}
    assert used


def test_bench_times_a_pool(stories, tmp_path):
    (tmp_path / "p.txt").write_text("Once upon a time\nTom and Lily\nThe dog\n")
    settings = ["--draft", "exit:3", "--max-new-tokens", "8", "--repeats", "1", "--drafter", "lookup", "--pool"]
    shared = ["draft", "bench", "--target", str(stories), "--prompts", str(tmp_path / "p.txt"), *settings]
    shown = CliRunner().invoke(app, [*shared, "--batch-size", "2", "--json", str(tmp_path / "o.json")])
    assert shown.exit_code == 0, shown.output
    pool = json.loads((tmp_path / "o.json").read_text())["pool"]
    assert pool["equal"] is True and set(pool["static"]) == set(pool["pooled"]) == {"plain", "draft"}
    assert min(*pool["static"].values(), *pool["pooled"].values()) > 0
    assert "a pool that refills against static batches: plain" in shown.stdout.replace("\n", " ")
    with pytest.raises(PeftlabError, match="pool: a batch size of 1; give 2 or more"):
        raise CliRunner().invoke(app, shared).exception
