"""Kangaroo: a draft that begins as its target does shares the target's first layers, and has its own after them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from peftlab.decoding.decode import Fixed, StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.decoding.model_free import with_copies
from peftlab.decoding.own_layers import KangarooDrafter
from peftlab.decoding.policies import Confidence
from peftlab.decoding.sampling import Sampling
from peftlab.drafting.base import Pair, load_pair, make_drafter
from peftlab.drafting.model import shared_layers
from peftlab.drafting.target import truncate
from peftlab.models.load import load_base, load_tokenizer
from tests.command_line import invoke

PROMPTS = [[1, 403, 407], [1, 346], [1, 403, 407, 261, 378, 432, 409, 267]]


@pytest.fixture(scope="module")
def model(stories: Path) -> Any:
    return load_base(str(stories), "AutoModelForCausalLM")[0]


@pytest.fixture(scope="module")
def draft(model: Any) -> Any:
    """The first two layers, and another one: the last, changed."""
    cut = truncate(model, [0, 1, 4])
    with torch.no_grad():
        cut.model.layers[2].mlp.down_proj.weight.mul_(0.5)
    return cut


@pytest.fixture(scope="module")
def pair(stories: Path, draft: Any, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    place = tmp_path_factory.mktemp("draft")
    draft.save_pretrained(place)
    load_tokenizer(str(stories)).save_pretrained(place)
    return load_pair(str(stories), str(place), pack=False)


def test_how_many_layers_are_shared(model: Any, draft: Any) -> None:
    assert shared_layers(model, draft) == 2
    assert shared_layers(model, truncate(model, [1, 2])) == 0
    assert shared_layers(model, truncate(model, [0, 1, 2])) == 2, "the last one stays the draft's own"
    other = truncate(model, [0, 1, 4])
    other.config.rms_norm_eps *= 2
    assert shared_layers(model, other) == 0
    assert shared_layers(model, truncate(model, [0, 1, 4]).to(torch.bfloat16)) == 0
    embedded = truncate(model, [0, 1, 4])
    with torch.no_grad():
        embedded.get_input_embeddings().weight[7] += 1
    assert shared_layers(model, embedded) == 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pool": 2},
        {"policy": partial(Confidence, 6, 0.6)},
        {"sampling": Sampling(1.0, seed=1)},
    ],
    ids=["chains", "pool", "double early exit", "sampled"],
)
def test_it_drafts_what_the_whole_draft_drafts(pair: Pair, draft: Any, options: dict[str, Any]) -> None:
    options = {"policy": partial(Fixed, 4)} | options
    drafter = make_drafter("draft", pair)
    assert isinstance(drafter, KangarooDrafter)
    whole = ModelDrafter(build_engine(draft, pack=False))
    found, want = (decode(pair.target, PROMPTS, StoppingCriteria(16), d, **options) for d in (drafter, whole))
    assert [(output.tokens, output.steps) for output in found] == [(output.tokens, output.steps) for output in want]
    assert any(0 < step.accepted < step.drafted for output in found for step in output.steps)
    if "sampling" not in options:
        plain = decode(pair.target, PROMPTS, StoppingCriteria(16))
        copied = decode(pair.target, PROMPTS, StoppingCriteria(16), with_copies(drafter), **options)
        assert [o.tokens for o in plain] == [o.tokens for o in found] == [o.tokens for o in copied]


def test_the_target_reads_every_token_once(pair: Pair) -> None:
    read: Counter[int] = Counter()
    target: Any = pair.target

    def counting(number: int, qkv: Any) -> Any:
        def call(h: torch.Tensor) -> torch.Tensor:
            read[number] += h.shape[1]
            return qkv(h)

        return call

    target._layers[:] = [replace(layer, qkv=counting(i, layer.qkv)) for i, layer in enumerate(target._layers)]
    decode(target, PROMPTS[:1], StoppingCriteria(16), make_drafter("draft", pair), policy=partial(Fixed, 4))
    assert len(read) == 5 and len(set(read.values())) == 1


def test_a_recipe_trains_the_layers_after_the_exit(stories: Path, tmp_path: Path) -> None:
    small = ["data.samples=2", "data.max_new_tokens=8", "train.max_steps=4", "train.eval_every=4", "train.lr=1e-2"]
    ours = ["draft={kind: model, truncate: {layers: [0, 1, 4]}}", "train.layers={from: 2}", "policy=confidence:0.6"]
    done = invoke("run", "draft/ci", f"target={stories}", f"output_dir={tmp_path / 'run'}", *small, *ours)
    assert done.exit_code == 0, done.output
    pair = load_pair(str(stories), str(tmp_path / "run"))
    assert pair.draft is not None and pair.draft.kind.endswith("the first 2 layers with the target")
