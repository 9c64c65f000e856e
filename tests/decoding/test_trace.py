"""What was drafted for one output: every token of it once, and what was drafted and rejected beside it."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch

from peftlab.decoding.benchmark import Question, Settings, drafted_text, pieces
from peftlab.decoding.decode import StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.decoding.model_free import TokenRecycling
from peftlab.decoding.policies import Fixed
from peftlab.drafting.states import truncate
from tests.byte_tokens import byte_tokenizer

NEW, GAMMA = 56, 3
POLICY = partial(Fixed, GAMMA)
SETTINGS = Settings(NEW, policy=POLICY)


@pytest.fixture(scope="module")
def draft_model(stories_model):
    return truncate(stories_model, range(4))


@pytest.mark.parametrize("drafter", ["draft", "recycling"])
def test_its_tokens_are_the_output_and_its_counts_the_steps(stories_model, stories_tokenizer, draft_model, drafter):
    make = {"draft": lambda: ModelDrafter(build_engine(draft_model, pack=False)), "recycling": TokenRecycling}[drafter]
    target, prompt = build_engine(stories_model, pack=False), stories_tokenizer("Once upon a time").input_ids
    found = drafted_text(target, SETTINGS, "draft", make(), Question("0", "", prompt), stories_tokenizer)
    (output,) = decode(target, [prompt], StoppingCriteria(NEW), make(), policy=POLICY)
    kept = [piece for piece in found.pieces if piece.kind != "rejected"]
    assert len(kept) == NEW and found.prompt == "Once upon a time"
    whole = stories_tokenizer.decode([*prompt, *output.tokens])
    assert whole == stories_tokenizer.decode(prompt) + "".join(piece.text for piece in kept)
    kinds = [piece.kind for piece in found.pieces]
    assert kinds.count("accepted") == sum(step.accepted for step in output.steps) > 0
    assert kinds.count("target") == sum(step.emitted - step.accepted for step in output.steps) > 0
    if drafter == "draft":  # a chain: what was not accepted was rejected, but where the output ended before
        rejected = sum(step.drafted - step.accepted for step in output.steps if step.emitted > step.accepted)
        assert kinds.count("rejected") == rejected > 0


def test_rejected_tokens_are_what_the_draft_would_have_written(stories_model, stories_tokenizer, draft_model):
    target, draft = build_engine(stories_model, pack=False), build_engine(draft_model, pack=False)
    prompt = stories_tokenizer("Tom and Lily").input_ids
    found = drafted_text(target, SETTINGS, "draft", ModelDrafter(draft), Question("0", "", prompt), stories_tokenizer)
    (output,) = decode(target, [prompt], StoppingCriteria(NEW))
    ids, following, checked = list(prompt), iter(output.tokens), 0
    for before, piece in pairwise(found.pieces):
        if before.kind != "rejected":
            ids.append(next(following))
        if piece.kind == "rejected" and before.kind != "rejected":
            with torch.inference_mode():
                likeliest = int(draft_model(torch.tensor([ids])).logits[0, -1].argmax())
            assert stories_tokenizer.decode([*ids, likeliest]) == stories_tokenizer.decode(ids) + piece.text
            checked += 1
    assert checked >= 3


def test_a_character_of_several_tokens_is_shown_once():
    tokenizer = byte_tokenizer(None, [], bos="<s>", eos="</s>")
    before, ids = tokenizer("na").input_ids, tokenizer("ïve\n").input_ids
    found = pieces(tokenizer, before, ids, "target")
    assert [piece.text for piece in found] == ["", "ï", "v", "e", "\n"]
    assert [piece.text for piece in pieces(tokenizer, [*before, ids[0]], ids[1:3], "target")] == ["ï", "v"]
