"""Drafts that write several tokens in one pass: rows of masks, what is dropped, and decoding with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_models import VOCAB, requests, tiny
from transformers import BloomConfig, BloomForCausalLM, MistralConfig, MistralForCausalLM

from peftlab.decoding.decode import Fixed, StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.decoding.parallel_drafters import Masks, ParallelDrafter
from peftlab.decoding.sampling import Sampling
from peftlab.drafting.objectives import Objective, PairLoss
from peftlab.drafting.pard import (
    MaskRows,
    PardLoss,
    check_parallel,
    drawn_places,
    measure_depths,
    parallel_states,
    read_masks,
    with_token,
    write_masks,
)
from peftlab.drafting.target import last_hidden
from peftlab.drafting.text import Collate, make_dataset
from peftlab.errors import PeftlabError
from peftlab.tasks.prompts import Request

MASK = 37


def windowed() -> Any:
    torch.manual_seed(1)
    config = MistralConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=4, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    return MistralForCausalLM(config).eval()


def batch() -> dict[str, torch.Tensor]:
    rows = make_dataset(requests())
    return Collate(pad=2)([rows[i] for i in range(len(rows))])


@pytest.mark.parametrize(("count", "length", "retain", "least"), [(100, 8, 0.7, 0.2), (10, 4, 0.7, 0.2), (5, 8, 1, 1)])
def test_exact_counts_are_kept_and_every_row_has_its_predecessors(
    count: int, length: int, retain: float, least: float
) -> None:
    torch.manual_seed(0)
    kept = drawn_places(count, length, retain, least)
    for i, places in enumerate(kept[1:], start=1):
        possible = [place + 1 for place in kept[i - 1].tolist() if place + 1 < count]
        share = max((7 / 10) ** i, 2 / 10) if retain < 1 else 1
        assert len(places) == min(len(possible), int(round(share * count, 6))), i
        assert set(places.tolist()) <= set(possible) and places.tolist() == sorted(places.tolist())
    if (count, length) == (100, 8):
        assert [len(places) for places in kept][:6] == [100, 70, 49, 34, 24, 20]
    again = drawn_places(count, length, retain, least)
    assert retain == 1 or any(not torch.equal(a, b) for a, b in zip(kept, again, strict=True)), "drawn anew"


@pytest.mark.parametrize("model", [lambda: tiny(0), windowed], ids=["llama", "sliding window"])
def test_a_row_is_what_the_model_computes_with_masks_appended(model: Any) -> None:
    draft, inputs = model(), batch()
    ids, weights = inputs["input_ids"], inputs["weights"]
    torch.manual_seed(3)
    rows = MaskRows.drawn(weights, 4, 0.8, 0.5)
    assert int(rows.depth.max()) == 3
    with torch.no_grad():
        states = parallel_states(draft, ids, rows, MASK)
        plain = last_hidden(draft, ids, inputs["attention_mask"])
        real = inputs["attention_mask"] > 0
        torch.testing.assert_close(states[:, : ids.shape[1]][real], plain[real], atol=1e-5, rtol=1e-4)
        for text, row in (rows.depth > 0).nonzero().tolist():
            i, t = int(rows.depth[text, row]), int(rows.place[text, row])
            assert weights[text, t] > 0 and weights[text, t - i] > 0, "it learns what decoding asks"
            appended = torch.cat((ids[text, : t - i + 1], torch.full((i,), MASK)))[None]
            wanted = last_hidden(draft, appended, torch.ones_like(appended))[0, -1]
            torch.testing.assert_close(states[text, ids.shape[1] + row], wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["kl", "ce", "tvd"])
def test_one_token_is_the_ordinary_draft(name: Any) -> None:
    target, inputs = tiny(3), batch()
    found = []
    for loss in (
        PardLoss(Objective(name), target, 1, 0.7, 0.2, lambda: MASK),
        PairLoss(Objective(name), target),
    ):
        draft = tiny(1)
        value = loss(draft, inputs)
        value.backward()
        found.append((value, *(parameter.grad for parameter in draft.parameters())))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_training_raises_the_acceptance_of_every_place() -> None:
    target, draft, rows = tiny(3).requires_grad_(False), tiny(1), make_dataset(requests(16, response=10))
    inputs = Collate(pad=2)([rows[i] for i in range(len(rows))])
    loss = PardLoss(Objective("kl"), target, 3, 0.7, 0.2, lambda: MASK)
    state = torch.random.get_rng_state()
    before = [depth.rates()["acceptance"] for depth in measure_depths(target, draft, rows, 3, MASK)]
    assert torch.equal(state, torch.random.get_rng_state()), "a score must not change what training draws"
    optimizer = torch.optim.Adam(draft.parameters(), lr=1e-2)
    for _ in range(25):
        optimizer.zero_grad()
        (loss(draft, inputs) / 100).backward()
        optimizer.step()
    after = [depth.rates()["acceptance"] for depth in measure_depths(target, draft, rows, 3, MASK)]
    assert all(new > old + 0.1 for new, old in zip(after, before, strict=True)), (before, after)


def propose_by_hand(draft: Any, text: list[int], n: int) -> list[int]:
    ids = torch.tensor([text + [MASK] * (n - 1)])
    return draft(input_ids=ids).logits[0, len(text) - 1 :].argmax(-1).tolist()


class TestDecoding:
    """A pass over the new tokens and masks, for rows of different lengths."""

    PROMPTS = ([5, 6, 7], [8], [9, 10, 11, 12, 13, 14])

    @pytest.mark.parametrize(("width", "gamma"), [(1, 1), (1, 3), (1, 7), (3, 6)])
    @pytest.mark.parametrize("target", [lambda: tiny(3), windowed], ids=["llama", "sliding window"])
    def test_greedy_output_is_the_targets(self, target: Any, width: int, gamma: int) -> None:
        model = target()
        engine = build_engine(model, pack=False)
        drafter = ParallelDrafter(build_engine(model, pack=False), Masks(MASK, 4), width)
        plain = [output.tokens for output in decode(engine, self.PROMPTS, StoppingCriteria(24))]
        outputs = decode(engine, self.PROMPTS, StoppingCriteria(24), drafter, policy=lambda: Fixed(gamma))
        assert [output.tokens for output in outputs] == plain
        steps = [step for output in outputs for step in output.steps]
        assert max(step.drafted for step in steps) == min(gamma, 4) or width > 1
        assert any(step.accepted for step in steps), "the first token of a draft equal to the target is right"

    def test_what_is_proposed_is_the_models_own_with_masks_appended(self) -> None:
        model, seen = tiny(1), []

        class Recorded(ParallelDrafter):
            def propose(self, rows: Any, budgets: Any) -> Any:
                texts = [list(row.tokens) for row in rows]
                proposal = super().propose(rows, budgets)
                seen.extend(zip(texts, proposal.tokens.tolist(), strict=True))
                return proposal

        drafter = Recorded(build_engine(model, pack=False), Masks(MASK, 3))
        decode(build_engine(tiny(3), pack=False), self.PROMPTS, StoppingCriteria(8), drafter, policy=lambda: Fixed(3))
        assert len({len(text) for text, _ in seen}) > 6
        for text, tokens in seen:
            tokens = [token for token in tokens if token >= 0]
            assert tokens == propose_by_hand(model, text, 3)[: len(tokens)]

    def test_one_token_is_what_the_ordinary_drafter_proposes(self) -> None:
        engine, draft = build_engine(tiny(3), pack=False), build_engine(tiny(1), pack=False)
        steps = []
        for drafter in (ParallelDrafter(draft, Masks(MASK, 4)), ModelDrafter(draft)):
            outputs = decode(engine, self.PROMPTS, StoppingCriteria(16), drafter, policy=lambda: Fixed(1))
            steps.append([[(step.drafted, step.accepted) for step in output.steps] for output in outputs])
        assert steps[0] == steps[1]

    @torch.no_grad()
    def test_a_sampled_chain_has_the_targets_distribution(self) -> None:
        """The second of two tokens, drafted without knowing the first, given the first: against the target's own."""
        model, other = tiny(3, vocab=8), tiny(1, vocab=8)
        engine, drafter = (build_engine(each, pack=False) for each in (model, other))
        drafter, count = ParallelDrafter(drafter, Masks(7, 3)), 2000
        sampling = Sampling(temperature=2.0, seed=1)
        outputs = decode(engine, [[3, 4]] * count, StoppingCriteria(2), drafter, sampling=sampling)
        drawn = torch.zeros(8, 8)
        for output in outputs:
            if len(output.tokens) == 2:
                drawn[output.tokens[0], output.tokens[1]] += 1
        first = (model(input_ids=torch.tensor([[3, 4]])).logits[0, -1] / 2).softmax(-1)
        for token in range(8):
            if float(first[token]) > 0.1 and token != 2:
                wanted = (model(input_ids=torch.tensor([[3, 4, token]])).logits[0, -1] / 2).softmax(-1)
                shares = drawn[token] / drawn[token].sum()
                assert float((shares - wanted).abs().sum()) / 2 < 0.1, token


def test_models_that_cannot_read_such_rows_are_refused_by_name() -> None:
    check_parallel(tiny(0))
    check_parallel(windowed())
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=2, n_head=2)
    with pytest.raises(PeftlabError, match=r"draft\.kind pard: BloomForCausalLM"):
        check_parallel(BloomForCausalLM(config).eval())


def test_the_mask_is_the_highest_token_that_the_text_does_not_contain() -> None:
    text = make_dataset([Request([39, 5], [38, 36]), Request([7], [35, 37])])
    for chosen, expected in ((-1, 34), (3, 3)):
        assert with_token(Masks(chosen, 4), VOCAB, text["input_ids"]) == Masks(expected, 4)
    with pytest.raises(PeftlabError, match=r"draft\.mask_token: the training text contains every token"):
        with_token(Masks(-1, 4), VOCAB, make_dataset([Request([0], [*range(1, VOCAB)])])["input_ids"])


def test_masks_on_disk(tmp_path: Path) -> None:
    config = {"vocab_size": 40, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_masks(tmp_path, Masks(MASK, 4))
    assert read_masks(tmp_path) == Masks(MASK, 4)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written == config | {"pard_token": MASK, "spd_type": "pard", "pard_length": 4}
    (tmp_path / "config.json").write_text(json.dumps(written | {"pard_token": 40}))
    with pytest.raises(PeftlabError, match="pard_token 40"):
        read_masks(tmp_path)
