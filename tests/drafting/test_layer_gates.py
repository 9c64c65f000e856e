"""Layers chosen by gates: what a gate computes, and that useless layers are the ones left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draft_models import requests, tiny

from peftlab.drafting.config import Truncation
from peftlab.drafting.objectives import Objective
from peftlab.drafting.pruning import Search, choose_layers, draw_gates, gated
from peftlab.drafting.target import truncate
from peftlab.drafting.text import make_dataset

IDS = torch.arange(3, 13).view(2, 5)


@torch.inference_mode()
def test_a_closed_gate_leaves_its_layer_out_row_by_row() -> None:
    model = tiny(0, layers=4)
    gates = torch.tensor([[1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    with gated(model, gates):
        logits = model(input_ids=IDS).logits
    torch.testing.assert_close(logits[0], truncate(model, [0, 2])(input_ids=IDS).logits[0])
    torch.testing.assert_close(logits[1], model(input_ids=IDS).logits[1])


def test_gates_are_hard_and_their_gradient_is_that_of_soft_ones() -> None:
    logits = torch.tensor([2.0, -1.0, 0.0], requires_grad=True)
    gates = draw_gates(logits, 4000, torch.Generator().manual_seed(0))
    assert set(gates.detach().unique().tolist()) == {0.0, 1.0}
    torch.testing.assert_close(gates.detach().mean(0), logits.detach().sigmoid(), atol=0.04, rtol=0)
    (hard,) = torch.autograd.grad(gates.sum(), logits)
    noise = torch.rand(4000, 3, generator=torch.Generator().manual_seed(0)).clamp(1e-6, 1 - 1e-6).logit()
    (soft,) = torch.autograd.grad((logits + noise).sigmoid().sum(), logits)
    torch.testing.assert_close(hard, soft)


def search(model: Any, seed: int) -> Search:
    return Search(model, model, Objective("kl"), make_dataset(requests(16)), batch_size=8, seed=seed)


@pytest.mark.parametrize("seed", [0, 1])
def test_layers_that_do_nothing_are_left_out(seed: int) -> None:
    model = tiny(0, layers=6).requires_grad_(False)
    for number, layer in enumerate(model.model.layers):
        for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            torch.nn.init.normal_(weight, std=1.0 if number in (1, 4) else 1e-4)
    config = Truncation(keep=2, by="gates", steps=60)
    found = choose_layers(search(model, seed), config)
    assert found.tensors["layers"].tolist() == found.report["layers"] == [1, 4]
    probabilities = found.report["probabilities"]
    assert min(probabilities[1], probabilities[4]) > max(probabilities[i] for i in (0, 2, 3, 5))
    assert found.report["expected"] < 4, "the price closes gates"
    if seed == 0:
        torch.manual_seed(5)
        assert choose_layers(search(model, seed), config).report == found.report, "it depends on its own seed alone"
