"""The decoder at its edges: ends of outputs, streamed tokens, and refused arguments."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from peftlab.decoding.decode import Fixed, StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.generation import TextStream, cut_at, stop_at
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.decoding.model_free import PromptLookup, TokenRecycling
from peftlab.decoding.policies import AcceptanceHead, Confidence, Heuristic
from peftlab.decoding.state_drafters import HeadsDrafter, tree_tokens
from peftlab.drafting.heads import MedusaHeads
from peftlab.drafting.target import check_tokens, common_vocabulary, truncate
from peftlab.errors import PeftlabError


@pytest.fixture(scope="module")
def target(stories_model):
    return build_engine(stories_model, pack=False)


@pytest.fixture(scope="module")
def itself(target):
    return ModelDrafter(target)


def tiny(limit=24, vocab=50, layers=2, seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=limit,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("drafter", ["itself", "lookup", "recycling", "medusa", "short"])
def test_stops_at_the_context_limit_as_plain_decoding_does(flat, drafter):
    model = tiny()
    target = build_engine(model, flat=flat)
    prompts = [[3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [1], list(range(20)), [*range(24)]]
    plain = decode(target, prompts, StoppingCriteria(100))
    assert [len(output.tokens) for output in plain] == [14, 23, 4, 0]
    assert [output.reason for output in plain] == ["context"] * 4
    drafters = {
        "itself": lambda: ModelDrafter(target),
        "lookup": PromptLookup,
        "recycling": TokenRecycling,
        "medusa": lambda: HeadsDrafter(MedusaHeads(model.lm_head.weight, 3), width=2),
        "short": lambda: ModelDrafter(build_engine(tiny(limit=12), flat=flat)),  # a draft with less context
    }
    for batch in ([prompts], [[prompt] for prompt in prompts]):
        outputs = [
            o
            for p in batch
            for o in decode(target, p, StoppingCriteria(100), drafters[drafter](), policy=partial(Fixed, 7))
        ]
        assert [o.tokens for o in outputs] == [o.tokens for o in plain]
        assert [o.reason for o in outputs] == ["context"] * 4


def test_asking_for_nothing_gives_nothing(target):
    (output,) = decode(target, [[1, 2]], StoppingCriteria(0))
    assert (output.tokens, output.reason, output.steps) == ([], "length", [])


def test_never_more_than_asked_for(target, itself):
    for most in range(1, 8):
        (output,) = decode(target, [[1, 2]], StoppingCriteria(most), itself, policy=partial(Fixed, 5))
        assert len(output.tokens) == most and output.reason == "length"
        assert sum(step.emitted for step in output.steps) == most


def test_every_token_is_told_once_and_in_order(target, itself):
    told = {0: [], 1: []}
    outputs = decode(
        target, [[1, 2], [1, 2, 3]], StoppingCriteria(17), itself, on_tokens=lambda i, new: told[i].extend(new)
    )
    assert [told[0], told[1]] == [output.tokens for output in outputs]


def test_stop_string_inside_an_accepted_run(target, itself, stories_tokenizer):
    prompt = stories_tokenizer("Once upon a time").input_ids
    (free,) = decode(target, [prompt], StoppingCriteria(60))
    text = stories_tokenizer.decode(free.tokens)
    stop = text[20:27]  # it begins and ends anywhere in a token
    outputs = []
    for drafter in (None, itself):
        stream, pieces = TextStream(stories_tokenizer, [stop]), []
        (output,) = decode(
            target,
            [prompt],
            StoppingCriteria(60, stops=stop_at(stories_tokenizer, [stop])),
            drafter,
            policy=partial(Fixed, 7),
            on_tokens=lambda _, new, stream=stream, pieces=pieces: pieces.append(stream.add(new)),
        )
        assert output.reason == "stop"
        assert output.tokens == free.tokens[: len(output.tokens)]
        assert stop in stories_tokenizer.decode(output.tokens)
        assert stop not in stories_tokenizer.decode(output.tokens[:-1])
        assert "".join(pieces) + stream.finish() == cut_at(text, [stop]) == text[: text.index(stop)]
        outputs.append(output.tokens)
    assert outputs[0] == outputs[1]


def test_stream_holds_back_half_characters(stories_tokenizer):
    ids = stories_tokenizer("a 馬 b", add_special_tokens=False).input_ids
    assert len(ids) > 5  # the character is spelled in bytes
    stream = TextStream(stories_tokenizer)
    pieces = [stream.add([token]) for token in ids]
    assert "".join(pieces) + stream.finish() == stories_tokenizer.decode(ids)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_stream_holds_back_what_may_become_a_stop_string_with_half_a_character(stories_tokenizer):
    ids = stories_tokenizer("x ab馬 c", add_special_tokens=False).input_ids
    stream = TextStream(stories_tokenizer, ["ab馬"])
    assert "".join(stream.add([token]) for token in ids) + stream.finish() == "x "


def test_empty_stop_string(stories_tokenizer):
    with pytest.raises(PeftlabError, match="stop: an empty string"):
        stop_at(stories_tokenizer, ["x", ""])


@pytest.mark.parametrize(
    ("prompts", "reason"),
    [
        ([], "prompts: none given"),
        ([[1], []], "prompt 1: empty"),
        ([[1], [1] * 513], "prompt 1: 513 tokens, but the model's context is 512"),
        ([[1, 512]], "token 512 is outside the vocabulary"),
        ([[-1]], "token -1 is outside"),
    ],
)
def test_prompts_that_make_no_sense(target, prompts, reason):
    with pytest.raises(PeftlabError, match=reason):
        decode(target, prompts, StoppingCriteria(3))


@pytest.mark.parametrize("gamma", [0, -1])
@pytest.mark.parametrize("policy", [Fixed, Confidence, Heuristic, AcceptanceHead])
def test_gamma_below_one(policy, gamma):
    with pytest.raises(PeftlabError, match=f"gamma: {gamma} drafts nothing"):
        policy(gamma)


@pytest.mark.parametrize("policy", [partial(Confidence, threshold=1.5), partial(AcceptanceHead, h=-0.1)])
def test_thresholds_are_shares(policy):
    with pytest.raises(PeftlabError, match=r"outside \[0, 1\]"):
        policy(3)


def test_vocabularies_of_different_size(target):
    with pytest.raises(PeftlabError, match="vocabulary of 50 rows, but the target's has 512"):
        decode(target, [[1, 2]], StoppingCriteria(3), ModelDrafter(build_engine(tiny())))
    with pytest.raises(PeftlabError, match="vocabulary of 50, but the target's has 512"):
        decode(target, [[1, 2]], StoppingCriteria(3), HeadsDrafter(MedusaHeads(torch.zeros(50, 64), 2)))


def test_padded_vocabularies_are_cut_to_one(stories_model, stories_tokenizer, generate_greedy):
    padded = truncate(stories_model, range(4))
    padded.resize_token_embeddings(520)
    vocabulary = common_vocabulary(stories_model, padded, stories_tokenizer)
    assert vocabulary == 512
    target = build_engine(stories_model, vocabulary=vocabulary)
    draft = build_engine(padded, vocabulary=vocabulary)
    (output,) = decode(target, [[1, 5, 6]], StoppingCriteria(20), ModelDrafter(draft))
    assert output.tokens == generate_greedy(stories_model, [1, 5, 6], 20)


def test_tokenizers_that_differ(stories_model, stories_tokenizer, stories):
    from peftlab.models.load import load_tokenizer

    other = load_tokenizer(str(stories))
    other.add_tokens(["zebra"])
    with pytest.raises(PeftlabError, match=r"tokenizer is not the target's: 1 entries differ, the first is 'zebra'"):
        check_tokens(stories_tokenizer, other)
    with pytest.raises(PeftlabError, match="the draft has no tokenizer"):
        common_vocabulary(stories_model, tiny(), None)


def test_rows_that_end_leave_the_others_alone(target):
    """Rows leave a batch one by one; those that stay are in other slots of every cache from then on."""
    prompts = [[1], [1, 403, 407], [1, 10, 20, 30, 40], [1, 77]]
    alone = [decode(target, [prompt], StoppingCriteria(40))[0].tokens for prompt in prompts]
    ends = frozenset({next(token for token in alone[0] if token not in alone[2])})
    alone = [decode(target, [prompt], StoppingCriteria(40, ends))[0].tokens for prompt in prompts]
    assert len(alone[0]) < 35 and len(alone[2]) == 40
    drafter = ModelDrafter(target)  # always right, so that a mix-up in its cache shows
    drafted_alone = [decode(target, [prompt], StoppingCriteria(40, ends), drafter)[0] for prompt in prompts]
    together = decode(target, prompts, StoppingCriteria(40, ends), drafter)
    assert [output.tokens for output in together] == alone
    # The draft's cache follows too: each row is drafted for as it is on its own.
    assert [output.steps for output in together] == [output.steps for output in drafted_alone]


class Oracle(torch.nn.Module):
    """Heads that know a text: at the state of position t they name the tokens of t+2, t+3 and t+4."""

    def __init__(self, model, text):
        super().__init__()
        with torch.inference_mode():
            states = model.model(torch.tensor([text])).last_hidden_state[0]
        self.states = torch.nn.Parameter(states.clone())
        self.text, self.vocab_size, self.depth, self.ranks = text, 512, 3, None

    def tokens(self, hidden, last, tree):
        logits = torch.zeros(3, len(hidden), 512)
        for row, t in enumerate(torch.cdist(hidden, self.states).argmin(-1).tolist()):
            for head in range(3):
                if t + 2 + head < len(self.text):
                    logits[head, row, self.text[t + 2 + head]] = 1
        return tree_tokens(logits, last, tree)


@pytest.mark.parametrize("width", [1, 3])
def test_medusa_heads_that_know_are_always_right(target, stories_model, width):
    prompt = [1, 403, 407, 261]
    (plain,) = decode(target, [prompt], StoppingCriteria(40))
    heads = Oracle(stories_model, prompt + plain.tokens)
    drafter = HeadsDrafter(heads, width=width)
    (output,) = decode(target, [prompt], StoppingCriteria(32), drafter, policy=partial(Fixed, 3))
    assert output.tokens == plain.tokens[:32]
    if width == 1:
        assert all(step.accepted == step.drafted for step in output.steps)
    else:  # three nodes of a tree: the first choice, and its own first choice, always stand
        assert all(step.accepted >= min(2, step.drafted) for step in output.steps[:-1])
