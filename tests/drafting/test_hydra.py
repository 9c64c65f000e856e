"""Hydra heads: Medusa's at the start, each reads the tokens drafted before it and none after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_models import medusa, requests, tiny
from torch.nn import functional as F

from peftlab.drafting.config import HydraDraft
from peftlab.drafting.heads import (
    HeadsLoss,
    HydraKind,
    ReducedHeads,
    measure_heads,
    measure_ranks,
    read_hydra,
    write_hydra,
)
from peftlab.drafting.objectives import Objective, kl
from peftlab.drafting.target import head_weight, last_hidden
from peftlab.drafting.text import Collate, make_dataset
from peftlab.errors import PeftlabError
from peftlab.methods.inject import inject, make_config, trainable_parameters

TREE = ((0,), (1,), (0, 0), (1, 0), (0, 1), (0, 0, 0), (1, 0, 1))


def batch() -> dict[str, torch.Tensor]:
    rows = make_dataset(requests())
    return Collate(pad=2)([rows[i] for i in range(len(rows))])


def loud(model: Any) -> Any:
    """A model whose embeddings are as large as its states, as those of trained models are."""
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(50)
    return model


def hydra(model: Any = None, *, stirred: bool = False, **fields: Any) -> Any:
    made = HydraKind.attach_heads(model if model is not None else tiny(0), HydraDraft(**{"heads": 3, **fields}))
    if stirred:
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in trainable_parameters(made).values():
                parameter.normal_(std=0.3)
    return made


def by_hand(model: Any, head: int, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Logits of one head after one state [H] and the tokens [head + 1] behind it, from the formula."""
    x = torch.cat((hidden, *(model.trunk.model.embed_tokens.weight[token] for token in before)))
    block, weight = [*model.heads][head]
    return weight @ (block.residual.weight @ x + F.silu(block.layers[0].weight @ x))


@pytest.mark.parametrize("shared", [False, True])
def test_at_the_start_they_are_medusa_heads(shared: bool) -> None:
    ours, plain = hydra(shared_head=shared), medusa(tiny(0), heads=3, shared_head=shared)
    hidden, last = torch.randn(2, 16), torch.tensor([5, 9])
    assert torch.equal(ours.heads.tokens(hidden, last, TREE), plain.heads.tokens(hidden, last, TREE))
    torch.testing.assert_close(*(HeadsLoss(Objective("kl"))(model, batch()) for model in (ours, plain)))


def test_a_node_follows_from_the_tokens_on_its_path() -> None:
    model, hidden, last = hydra(loud(tiny(0)), stirred=True), torch.randn(8, 16), torch.arange(5, 13)
    found = model.heads.tokens(hidden, last, TREE)
    for row in range(8):
        for node, path in enumerate(TREE):
            above = [int(found[row, TREE.index(path[:k])]) for k in range(1, len(path))]
            logits = by_hand(model, len(path) - 1, hidden[row], torch.tensor([int(last[row]), *above]))
            assert int(found[row, node]) == int(logits.topk(path[-1] + 1).indices[-1]), path
    differ = found[:, TREE.index((0, 0))] != found[:, TREE.index((1, 0))]
    assert differ.any(), "children of different parents differ"


def test_loss_and_gradients_are_those_of_the_formula() -> None:
    model, inputs = hydra(tiny(0).double(), stirred=True), batch()
    ids, weights = inputs["input_ids"], inputs["weights"]
    loss = HeadsLoss(Objective("kl"), decay=0.7)(model, inputs)
    loss.backward()
    found = {name: p.grad.clone() for name, p in trainable_parameters(model).items()}
    model.zero_grad()
    hidden = last_hidden(model, ids, inputs["attention_mask"]).detach()
    base, expected = F.linear(hidden, head_weight(model)), torch.zeros((), dtype=torch.float64)
    for i in range(3):
        for row, t in ((weights[:, : -i - 1] > 0) & (weights[:, i + 1 :] > 0)).nonzero().tolist():
            logits = by_hand(model, i, hidden[row, t], ids[row, t + 1 : t + 2 + i])
            expected = expected + 0.7**i * kl(base[row, t + 1 + i][None], logits[None]).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-10)
    for name, parameter in trainable_parameters(model).items():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-9)


def test_a_trunk_may_train_with_them() -> None:
    model = hydra(stirred=True)
    inject(model.trunk, make_config("lora", r=2))
    HeadsLoss(Objective("kl"), preserve=1.0)(model, batch()).backward()
    names = {name.split(".")[0] for name, p in trainable_parameters(model).items() if p.grad is not None}
    assert names == {"trunk", "heads"} and not model.heads.embedding.requires_grad


def test_they_see_what_was_drafted_and_are_accepted_more_often_than_heads_that_do_not() -> None:
    """A text in which what comes next depends on the token before, and nothing else is to be known."""
    rows = make_dataset(requests(24, response=12))
    inputs = Collate(pad=2)([rows[i] for i in range(len(rows))])
    second = {}
    for name, made in (("medusa", medusa), ("hydra", hydra)):
        torch.manual_seed(0)
        model = made(loud(tiny(0)), heads=2, shared_head=True)
        optimizer = torch.optim.Adam(trainable_parameters(model).values(), lr=1e-2)
        for _ in range(40):
            optimizer.zero_grad()
            HeadsLoss(Objective("kl"))(model, inputs).backward()
            optimizer.step()
        second[name] = measure_heads(model, rows)[0][1].rates()["acceptance"]
    assert second["hydra"] > second["medusa"] + 0.1


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("tokens", [None, torch.tensor([3, 4, 9, 30])])
def test_round_trip_and_continuing(tmp_path: Path, tokens: torch.Tensor | None, shared: bool) -> None:
    model = hydra(stirred=True, shared_head=shared)
    embedding, hidden, last = model.heads.embedding, torch.randn(3, 16), torch.tensor([4, 5, 6])
    write_hydra(model.heads, tmp_path / "m", tokens=tokens)
    back = read_hydra(tmp_path / "m", embedding)
    if tokens is None:
        assert torch.equal(back.tokens(hidden, last, TREE), model.heads.tokens(hidden, last, TREE))
    else:
        assert isinstance(back, ReducedHeads)
        assert set(back.tokens(hidden, last, TREE).flatten().tolist()) <= set(tokens.tolist())
        measure_ranks(model, back, make_dataset(requests()), 4)
    again = hydra(shared_head=shared, from_=str(tmp_path / "m"))
    stored = model.heads.blocks.state_dict()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in again.heads.blocks.state_dict().items())
    kept = torch.arange(40) if tokens is None else tokens
    for (_, mine), (_, theirs) in zip(again.heads, model.heads, strict=True):
        assert torch.equal(mine[kept], theirs[kept])
    with pytest.raises(PeftlabError, match=r"has 3 heads with .*; the recipe asks for 2"):
        hydra(shared_head=shared, heads=2, from_=str(tmp_path / "m"))


def test_heads_of_another_target_are_refused(tmp_path: Path) -> None:
    model = hydra()
    write_hydra(model.heads, tmp_path / "m")
    with pytest.raises(PeftlabError, match="embeddings of 40 tokens and width 16, but the target has 40 of 12"):
        read_hydra(tmp_path / "m", torch.zeros(40, 12))
    config = tmp_path / "m" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "medusa"}))
    with pytest.raises(PeftlabError, match="model_type is 'medusa', not hydra"):
        read_hydra(tmp_path / "m", model.heads.embedding)
