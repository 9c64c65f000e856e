"""Heads that see each other: a bias on the token drafted before, and trees of the shape that was measured to be best."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_models import medusa, requests, tiny
from torch.nn import functional as F

from peftlab.decoding.state_drafters import HeadsDrafter
from peftlab.decoding.theory import RankRates, best_tree
from peftlab.drafting.acceptance import RANKS, write_ranks
from peftlab.drafting.heads import (
    HeadsLoss,
    MedusaHeads,
    measure_heads,
    measure_ranks,
    read_medusa,
    write_medusa,
)
from peftlab.drafting.objectives import Objective, kl
from peftlab.drafting.target import head_weight, last_hidden
from peftlab.drafting.text import Collate, make_dataset
from peftlab.errors import PeftlabError
from peftlab.methods.inject import trainable_parameters
from peftlab.tasks.prompts import Request

TREE = ((0,), (1,), (0, 0), (1, 0), (0, 1), (0, 0, 0))


def batch() -> dict[str, torch.Tensor]:
    rows = make_dataset(requests())
    return Collate(pad=2)([rows[i] for i in range(len(rows))])


def counting(heads: int = 3, vocab: int = 12) -> MedusaHeads:
    """Heads that know nothing but the bias: after x comes x + 1, or else x + 2."""
    made = MedusaHeads(torch.zeros(vocab, 4), heads, markov=vocab)
    assert made.markov_head is not None
    with torch.no_grad():
        made.markov_head.markov_w1.weight.copy_(torch.eye(vocab))
        after = 2 * torch.eye(vocab).roll(1, 0) + torch.eye(vocab).roll(2, 0)
        made.markov_head.markov_w2.weight.copy_(after)
    return made


def test_at_the_start_they_are_plain_heads() -> None:
    plain, markov = medusa(tiny(0), heads=3), medusa(tiny(0), heads=3, markov=4)
    hidden, last = torch.randn(2, 16), torch.tensor([5, 9])
    assert torch.equal(plain.heads.tokens(hidden, last, TREE), markov.heads.tokens(hidden, last, TREE))
    losses = [HeadsLoss(Objective("kl"))(model, batch()) for model in (plain, markov)]
    torch.testing.assert_close(*losses)


def test_the_bias_reads_the_drafted_token() -> None:
    heads, hidden = counting(), torch.randn(2, 4)
    chain = heads.tokens(hidden, torch.tensor([3, 7]), best_tree(3, 3, 1))
    assert chain.tolist() == [[4, 5, 6], [8, 9, 10]]
    tree = heads.tokens(hidden, torch.tensor([3, 7]), TREE)
    assert tree.tolist() == [[4, 5, 5, 6, 6, 6], [8, 9, 9, 10, 10, 10]], "children of different parents differ"


def test_a_reduced_vocabulary_drafts_and_reads_the_targets_tokens(tmp_path: Path) -> None:
    kept = torch.tensor([4, 5, 6, 7])
    heads = read_medusa(write_medusa(counting(), tmp_path / "m", tokens=kept))
    tokens = heads.tokens(torch.randn(1, 4), torch.tensor([3]), best_tree(3, 3, 1))
    assert tokens.tolist() == [[4, 5, 6]]


def test_loss_and_gradients_are_those_of_whole_logits() -> None:
    model, inputs = medusa(tiny(0).double(), heads=3, shared_head=True, markov=4), batch()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter.normal_(std=0.3)
    loss = HeadsLoss(Objective("kl"), decay=0.7)(model, inputs)
    loss.backward()
    found = {name: p.grad.clone() for name, p in trainable_parameters(model).items()}
    model.zero_grad()
    ids, weights = inputs["input_ids"], inputs["weights"]
    hidden = last_hidden(model, ids, inputs["attention_mask"]).detach()
    base, whole = F.linear(hidden, head_weight(model)), model.heads(hidden)
    expected = torch.zeros((), dtype=torch.float64)
    for i in range(3):
        places = (weights[:, : -i - 1] > 0) & (weights[:, i + 1 :] > 0)
        logits = whole[i, :, : -i - 1] + model.heads.markov_head(ids[:, i + 1 :])
        expected = expected + 0.7**i * kl(base[:, i + 1 :][places], logits[places]).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    assert any("markov_w1" in name for name in found) and any("markov_w2" in name for name in found)
    for name, parameter in trainable_parameters(model).items():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-10, atol=1e-10)


def test_heads_that_see_the_token_before_are_accepted_more_often() -> None:
    """A text in which what comes next depends on the token before, and nothing else is to be known."""
    rows = make_dataset(requests(24, response=12))
    inputs = Collate(pad=2)([rows[i] for i in range(len(rows))])
    second = {}
    for markov in (None, 8):
        torch.manual_seed(0)
        model = medusa(tiny(0), heads=2, shared_head=True, markov=markov)
        optimizer = torch.optim.Adam(trainable_parameters(model).values(), lr=2e-2)
        for _ in range(40):
            optimizer.zero_grad()
            HeadsLoss(Objective("kl"))(model, inputs).backward()
            optimizer.step()
        second[markov] = measure_heads(model, rows)[0][1].rates()["acceptance"]
    assert second[8] > second[None] + 0.1


def test_round_trip_and_a_rank_that_does_not_fit(tmp_path: Path) -> None:
    model = medusa(tiny(0), heads=2, shared_head=True, markov=4)
    with torch.no_grad():
        model.heads.markov_head.markov_w2.weight.normal_()
    back = read_medusa(write_medusa(model.heads, tmp_path / "m"))
    hidden, last = torch.randn(3, 16), torch.tensor([4, 5, 6])
    assert torch.equal(back.tokens(hidden, last, TREE[:4]), model.heads.tokens(hidden, last, TREE[:4]))
    assert {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"} <= set(back.state_dict())
    config = tmp_path / "m" / "config.json"
    for rank, message in ((None, "do not fit its configuration"), (5, "has shape"), (0, "markov_rank is 0")):
        config.write_text(json.dumps(json.loads(config.read_text()) | {"markov_rank": rank}))
        with pytest.raises(PeftlabError, match=message):
            read_medusa(tmp_path / "m")


def counted(model: Any, rows: list[Request], heads: MedusaHeads) -> tuple[list[list[int]], list[int]]:
    """The right choices and the tries of each head, text by text and place by place."""
    right, tried = [[0] * RANKS for _ in heads.blocks], [0] * heads.depth
    for request in rows:
        ids = [*request.prompt, *request.response]
        with torch.no_grad():
            output = model.trunk(input_ids=torch.tensor([ids]), output_hidden_states=True)
            hidden, greedy = output.hidden_states[-1][0], output.logits[0].argmax(-1).tolist()
            for t in range(len(request.prompt) - 1, len(ids) - 2):
                for i in range(heads.depth):
                    if t + 2 + i >= len(ids) or (i and ids[t + 1 + i] != greedy[t + i]):
                        break
                    logits = heads(hidden[t])[i]
                    if heads.markov_head is not None:
                        logits = logits + heads.markov_head(torch.tensor(ids[t + 1 + i]))
                    ranking = logits.topk(RANKS).indices.tolist()
                    tried[i] += 1
                    if greedy[t + 1 + i] not in ranking:
                        break
                    right[i][ranking.index(greedy[t + 1 + i])] += 1
    return right, tried


@pytest.mark.parametrize("markov", [None, 4])
def test_rates_by_head_and_rank_are_counted_where_a_tree_can_reach(tmp_path: Path, markov: int | None) -> None:
    model = medusa(tiny(0), heads=3, shared_head=True, markov=markov)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter.normal_(std=0.2)
        prompts = torch.randint(3, 40, (16, 3))
        text = model.trunk.generate(prompts, max_new_tokens=20, do_sample=False, eos_token_id=None)
    written = [Request(row[:3], row[3:]) for row in text.tolist()]
    written[1] = Request(written[1].prompt, [*written[1].response[:6], 30, *written[1].response[6:9]])
    found = measure_ranks(model, model.heads, make_dataset(written), 5)
    right, tried = counted(model, written, model.heads)
    assert tried[0] > tried[2] > 0
    assert found == RankRates.counted(right, tried)
    write_medusa(model.heads, tmp_path / "m")
    write_ranks(tmp_path / "m" / "config.json", found)
    back = read_medusa(tmp_path / "m")
    assert back.ranks == found
    drafter = HeadsDrafter(back)
    assert drafter.tree(6) == best_tree(6, 3, RANKS, found) and HeadsDrafter(back, 1).tree(3) == best_tree(3, 3, 1)


@pytest.mark.parametrize("rates", [[], [[]], [[0.5], [0.5, 0.2]], [[0.2, 0.5]], [[0.0]], [["a"]], 3])
def test_rates_that_are_none_are_refused(tmp_path: Path, rates: object) -> None:
    config = write_medusa(medusa(tiny(0), heads=1).heads, tmp_path / "m") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rank_acceptance": rates}))
    with pytest.raises(PeftlabError, match="rank_acceptance is not"):
        read_medusa(tmp_path / "m")
