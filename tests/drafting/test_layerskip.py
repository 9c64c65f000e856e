"""LayerSkip: schedules against the paper's formulas, layers left out row by row, and runs that resume exactly."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from draft_models import requests, tiny
from safetensors.torch import load_file

from peftlab.drafting.early_exit import (
    EarlyExitLoss,
    LayerDropout,
    dropout_growth,
    dropout_rates,
    exit_weights,
    find_exit,
    loss_shares,
    training_exits,
)
from peftlab.drafting.objectives import Objective
from peftlab.drafting.target import forward_hidden
from peftlab.drafting.text import Collate, make_dataset
from peftlab.errors import PeftlabError
from peftlab.methods.inject import inject, make_config
from peftlab.recipe.load import load_recipe
from tests.command_line import invoke


def test_dropout_rates_and_their_growth() -> None:
    for layers, most in ((5, 0.2), (30, 0.1)):
        paper = [(math.exp(layer * math.log(2) / (layers - 1)) - 1) * most for layer in range(layers)]
        assert dropout_rates(layers, most) == pytest.approx(paper)
    assert dropout_rates(5, 0.2)[0] == 0 and dropout_rates(5, 0.2)[-1] == pytest.approx(0.2)
    assert [dropout_growth("constant", t, 9) for t in (0, 8)] == [1, 1]
    assert [dropout_growth("exponential", t, 9) for t in (0, 4, 8)] == pytest.approx([0, math.sqrt(2) - 1, 1])


def test_weights_of_exits() -> None:
    layers, scale = 6, 0.5
    paper = [scale * sum(range(layer + 1)) for layer in range(layers - 1)]
    paper.append(layers - 1 + scale * sum(range(layers - 1)))
    assert exit_weights([1, 2, 3, 4, 5], layers, scale) == pytest.approx(paper)
    assert exit_weights([2, 4], layers, scale) == pytest.approx([paper[1], paper[3], paper[5]])
    assert exit_weights([2, 4], layers, None) == [1, 1, 1]
    assert loss_shares([1, 3, 4], [True, True]) == [1 / 8, 3 / 8, 1 / 2]
    assert loss_shares([1, 3, 4], [False, True]) == [0, 3 / 7, 4 / 7]


def test_curricula() -> None:
    rotated = [training_exits("rotational", 5, t, 100, 2) for t in range(4)]
    assert rotated[0] == [True, False, True, False, True] == rotated[2]
    assert rotated[1] == [False, True, False, True, False] == rotated[3]
    # One of the five (four exits and the last layer) joins every T / (2 * 5) steps, from the last to the first.
    joined = [sum(training_exits("gradual", 4, t, 100, 2)) for t in range(100)]
    assert [joined.index(count) for count in range(5)] == [0, 10, 20, 30, 40]
    assert joined == sorted(joined)
    assert training_exits("gradual", 4, 15, 100, 2) == [False, False, False, True]
    assert training_exits(None, 3, 0, 1, 2) == [True] * 3


def test_a_layer_that_is_left_out_passes_its_input_on_row_by_row() -> None:
    model = tiny(0, layers=3).train()
    ids = torch.randint(3, 40, (4, 5), generator=torch.Generator().manual_seed(0))
    forward_hidden(model, ids, torch.ones_like(ids))  # transformers installs its own hooks
    plain = [state.detach() for state in forward_hidden(model, ids, torch.ones_like(ids))]
    dropout = LayerDropout(model, 0.6)
    torch.manual_seed(1)
    dropout.draw(4, 1.0, ids.device)
    kept = dropout._kept
    assert kept is not None and kept[0].all() and 0 < kept.sum() < kept.numel()
    states = forward_hidden(model, ids, torch.ones_like(ids))
    for row in range(4):
        for layer in (1, 2):
            same = torch.equal(states[layer][row], plain[layer][row])
            assert same or not kept[:layer, row].all()
        if not kept[1, row]:
            assert torch.equal(states[2][row], states[1][row])
    model.eval()
    assert torch.equal(forward_hidden(model, ids, torch.ones_like(ids))[-1], plain[-1])
    dropout.remove()
    assert torch.equal(forward_hidden(model.train(), ids, torch.ones_like(ids))[-1], plain[-1])
    dropout = LayerDropout(model, 0.6)
    left_out = torch.zeros(3)
    for _ in range(300):
        dropout.draw(8, 0.5, ids.device)
        assert dropout._kept is not None
        left_out += (~dropout._kept).sum(1)
    expected = 0.5 * torch.tensor(dropout_rates(3, 0.6))
    torch.testing.assert_close(left_out / 2400, expected, atol=0.04, rtol=0)  # over four standard deviations


def test_the_loss_is_the_weighted_sum_of_its_exits() -> None:
    model, rows = tiny(0, layers=4), make_dataset(requests())
    inject(model, make_config("lora", r=2, target_modules="all-linear"))
    exits = [find_exit(model, k) for k in (2, 3)]
    batch = Collate(pad=2)([rows[i] for i in range(len(rows))])
    # The model is the base at first: its own KL is 0, and one exit with the last layer has half of the exit's.
    single = [2 * EarlyExitLoss(Objective("kl"), [exit_], [1.0, 1.0])(model, batch).detach() for exit_ in exits]
    loss = EarlyExitLoss(Objective("kl"), exits, [1.0, 3.0, 4.0], curriculum="gradual")
    torch.testing.assert_close(loss(model, batch).detach(), single[0] / 8 + single[1] * 3 / 8)
    assert loss.at_step(2, 9) == " exits 3"
    torch.testing.assert_close(loss(model, batch).detach(), single[1] * 3 / 7)
    assert loss.at_step(0, 9) == " exits "
    assert float(loss(model, batch).detach()) == pytest.approx(0, abs=1e-3)


OPTIONS = "draft={kind: early_exit, exits: [2, 3], scale: 0.5, curriculum: rotational, dropout: 0.5, dropout_schedule: exponential}"  # fmt: skip


def test_a_run_with_every_schedule_resumes_exactly(stories: Path, tmp_path: Path) -> None:
    small = ["data.samples=2", "data.max_new_tokens=8", "train.max_steps=8", "train.eval_every=4", "train.lr=1e-2"]
    out = tmp_path / "run"
    done = invoke("run", "draft/ci", f"target={stories}", f"output_dir={out}", OPTIONS, *small)
    assert done.exit_code == 0, done.output
    results = json.loads((out / "results.json").read_text())
    assert results["score"] > results["baseline_score"]
    assert {"acceptance", "acceptance_exit_3", "preserved"} <= set(results["metrics"]["prompts"])
    assert results["decoding"]["after"]["lossless"] is True
    metrics, weights = (out / "metrics.jsonl").read_bytes(), load_file(out / "merged" / "model.safetensors")
    max((out / "checkpoints").glob("step-*.pt")).unlink()
    (out / "results.json").unlink()
    assert invoke("resume", out).exit_code == 0
    assert (out / "metrics.jsonl").read_bytes() == metrics
    again = load_file(out / "merged" / "model.safetensors")
    assert all(torch.equal(again[key], weights[key]) for key in weights)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("exits: [3, 2]", "draft.exits: [3, 2] is not a rising list of different numbers"),
        ("exits: [1, 2], scale: 1", "draft.scale: an exit after one layer would weigh nothing"),
        ("exits: [1, 2], curriculum: rotational, every: 3", "draft.every: 3 of 2 exits: some steps would train none"),
    ],
)
def test_what_cannot_train_is_refused(fields: str, message: str) -> None:
    with pytest.raises(PeftlabError) as caught:
        load_recipe("draft/ci", ["draft={kind: early_exit, " + fields + "}"])
    assert message in str(caught.value)
