"""The acceptance head: what it learns, and that it stops drafting."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from draft_models import requests, tiny
from safetensors.torch import save_file

from peftlab.decoding.decode import StoppingCriteria, decode
from peftlab.decoding.engines import build_engine
from peftlab.decoding.model_drafter import ModelDrafter
from peftlab.decoding.policies import AcceptanceHead
from peftlab.drafting.acceptance import (
    AcceptancePredictor,
    load_acceptance_head,
    measure,
    save_acceptance_head,
    states_and_rates,
    train_acceptance_head,
)
from peftlab.drafting.target import truncate
from peftlab.drafting.text import make_dataset
from peftlab.errors import PeftlabError


def test_it_learns_the_chance_of_each_token_and_leaves_the_models_alone(tmp_path: Path) -> None:
    target = tiny(0, layers=3)
    draft = truncate(target, [0, 1])
    rows = make_dataset(requests(40))
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    state = torch.get_rng_state()
    head, report = train_acceptance_head(target, draft, rows, rows, epochs=60, lr=1e-2)
    assert report["brier"] < 0.8 * report["brier_constant"]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in draft.state_dict().items())
    save_acceptance_head(head, tmp_path / "head.safetensors")
    again, hidden = load_acceptance_head(tmp_path / "head.safetensors"), torch.randn(5, 16)
    assert torch.equal(again(hidden), head(hidden)) and ((again(hidden) > 0) & (again(hidden) < 1)).all()


def test_tokens_one_by_one_are_those_measured_together() -> None:
    target, draft, rows = tiny(0), tiny(1), make_dataset(requests())
    parts = list(states_and_rates(target, draft, rows, batch_size=4))
    alpha, agree = (torch.cat([part[i].double() for part in parts]).mean() for i in (1, 2))
    rates = measure(target, draft, rows).rates()
    assert float(alpha) == pytest.approx(rates["acceptance"], abs=1e-6)
    assert float(agree) == pytest.approx(rates["agreement"])


def test_a_head_that_expects_rejection_stops_after_one_token() -> None:
    target = tiny(0, layers=3)
    drafter = ModelDrafter(build_engine(truncate(target, [0, 1])))
    low = AcceptancePredictor(16)
    with torch.no_grad():
        low.outer.bias.fill_(-20.0)
    lengths = {}
    for name, head in (("low", low), ("high", lambda hidden: 1.0)):
        output = decode(
            build_engine(target),
            [[5, 6, 7]],
            StoppingCriteria(20),
            drafter,
            policy=lambda head=head: AcceptanceHead(4, head),
        )[0]
        lengths[name] = max(step.drafted for step in output.steps)
        lengths[f"{name} text"] = output.tokens
    assert (lengths["low"], lengths["high"]) == (1, 4)
    assert lengths["low text"] == lengths["high text"]


def test_another_file_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(PeftlabError, match="no acceptance head; it contains weight"):
        load_acceptance_head(tmp_path / "x.safetensors")
