"""``train.emulate``: number formats by enumeration, the two copies of the weights, and runs."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import tiny
import torch
from torch import nn

from peftlab.methods.injection import inject, make_config
from peftlab.training.config import EmulatedHardware, TrainConfig
from peftlab.training.efficient import (
    Emulation,
    block_floating,
    coarse_gradient,
    dorefa,
    dorefa_weights,
    pruned,
    pruning_threshold,
    sparsity_at,
)

VALUES = torch.tensor([0.3, -1.0, 0.77, 0.0, -0.1234, 0.5, 1e-3], dtype=torch.float64)
DRAWS = 4096


def mean(rounded):
    """Return the mean of ``rounded(noise)`` over evenly spaced noises, of each value by itself."""
    noise = ((torch.arange(DRAWS, dtype=torch.float64) + 0.5) / DRAWS).unsqueeze(1).expand(-1, len(VALUES))
    return rounded(VALUES.expand(DRAWS, -1), noise).mean(0)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_dorefas_gradients_are_exact_in_the_mean(bits):
    found = mean(lambda x, noise: dorefa(x, bits, noise))
    torch.testing.assert_close(found, VALUES, atol=2 / (2**bits - 1) / DRAWS, rtol=0)
    assert len(dorefa(VALUES.view(1, -1), bits).unique()) <= 2**bits


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("tile", [3, 24])
def test_block_floating_gradients_are_exact_in_the_mean(bits, tile):
    found = mean(lambda x, noise: block_floating(x, bits, tile, noise))
    torch.testing.assert_close(found, VALUES, atol=2.0 / DRAWS, rtol=0)


def test_a_block_has_one_exponent_and_loses_nothing_that_fits():
    x = torch.tensor([[3.0, -5.0, 0.25, 7.0, 96.0, -112.0]])
    found = block_floating(x, 4, 3)
    assert found.tolist() == [[3.0, -5.0, 0.0, 0.0, 96.0, -112.0]]  # steps of 1, and of 16
    assert block_floating(torch.zeros(2, 5), 4, 3).abs().max() == 0
    assert torch.equal(block_floating(found, 4, 3), found)


def test_dorefas_weights_keep_their_scale():
    weights = torch.linspace(-0.2, 0.2, 101)
    assert (dorefa_weights(weights, 8) - weights).abs().max() < 0.2 / 255 + 0.2 - math.tanh(0.2)
    assert dorefa_weights(weights, 1).unique().numel() <= 3 and len(dorefa_weights(weights, 2).unique()) == 4
    assert dorefa(torch.zeros(3, 4), 8).abs().max() == 0


def test_pruning_is_exact_in_the_mean_and_as_sparse_as_asked():
    found = mean(lambda x, noise: pruned(x, 0.8, noise))
    torch.testing.assert_close(found, VALUES, atol=1.0 / DRAWS, rtol=0)
    places = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    normal = torch.special.ndtri(places)
    for sigma, share in ((0.5, 0.3), (1.5, 0.85), (3.0, 0.95)):
        values = (sigma * normal - 4).exp()
        threshold = pruning_threshold(values, share)
        zeros = (1 - values / threshold).clamp(min=0).mean()  # the mean over the noise of each value
        assert float(zeros) == pytest.approx(share, abs=5e-3)
        assert sparsity_at(math.log(threshold) + 4, sigma, NormalDist()) == pytest.approx(share, abs=5e-3)
    assert pruning_threshold(torch.zeros(5), 0.5) == pruning_threshold(torch.ones(5), 0.5) == 0.0


def test_small_gradients_survive_where_the_nearest_loses_them():
    """The mean of many 4-bit gradients of 0.01 beside 1: far below the lowest level, 1/15."""
    grad = torch.tensor([[1.0, 0.01]]).expand(4000, -1).contiguous()
    torch.manual_seed(0)
    means = {}
    for rounding in ("stochastic", "nearest"):
        hardware = EmulatedHardware(gradients=4, rounding=rounding)
        means[rounding] = coarse_gradient(grad, hardware).mean(0)[1].item()
    assert abs(means["stochastic"] - 0.01) < 0.01 < abs(means["nearest"] - 0.01) + 1e-9


def linears():
    torch.manual_seed(1)
    return inject(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)), make_config("full"))


def test_two_copies_of_the_weights():
    """Forward and backward see the quantised one; the optimiser's is what it was, and gets the gradient of the other."""
    model, other = linears(), linears()
    hardware = EmulatedHardware(weights=4)
    emulation = Emulation(model, hardware)
    x = torch.randn(3, 6)
    before = [p.detach().clone() for p in model.parameters()]
    with emulation.computing():
        out = model(x)
        out.square().sum().backward()
    for parameter, start in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, start) and parameter.grad is not None
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.ndim > 1:
                parameter.copy_(dorefa_weights(parameter, 4))
    expected = other(x)
    expected.square().sum().backward()
    assert torch.equal(out, expected)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert not torch.equal(model(x), out)


def test_one_copy_stays_where_steps_are_smaller_than_its_levels():
    moved = {}
    for stored in (None, 4):
        model = linears()
        emulation = Emulation(model, EmulatedHardware(weights=4, stored=stored, format="bfp"))
        start = model[0].weight.detach().clone()
        for _ in range(20):
            with torch.no_grad():
                model[0].weight.sub_(1e-4)
            emulation.store()
        moved[stored] = float((start - model[0].weight.detach()).mean())
    assert moved[None] == pytest.approx(20e-4, rel=1e-3) and moved[4] == 0


HARDWARE = {"weights": 8, "activations": 8, "gradients": 8, "prune": 0.5, "format": "bfp"}


@pytest.mark.parametrize("method", [name for name in tiny.METHODS if name != "lora"])
def test_every_method_trains(method, model, rows, tmp_path):
    """LoRA below, too; the frozen weights are what they were."""
    values = tiny.recipe(model, rows, tmp_path / "run", method, max_steps=2, eval_every=2, emulate=HARDWARE)
    start = {}
    _, problem = tiny.fit(
        values,
        tmp_path / "run",
        lambda problem: start.update({n: p.clone() for n, p in problem.model.named_parameters()}),
    )
    moved = {n for n, p in problem.model.named_parameters() if not torch.equal(p, start[n])}
    assert moved and all(p.requires_grad for n, p in problem.model.named_parameters() if n in moved)


def test_a_resumed_run_is_the_same_bit_for_bit(model, rows, tmp_path):
    def values(run):
        return tiny.recipe(model, rows, run, "lora", epochs=1, save_every=2, emulate=HARDWARE)

    with tiny.stopped_after(2):
        tiny.run(values(tmp_path / "run"))
    tiny.run(values(tmp_path / "run"), resume=True)
    tiny.run(values(tmp_path / "whole"))
    tiny.assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_scores_are_the_hardwares_and_layers_that_rest_have_new_copies_later(still, rows, tmp_path):
    """With one bit of weights the scored model is another than the one that is written, whose weights are whole."""
    values = tiny.recipe(still, rows, tmp_path / "run", "full", epochs=1, emulate={"weights": 1})
    values["train"]["layers"] = {"active": 1, "every": 1}
    seen = []

    def change(problem):
        whole = problem.score
        problem.score = lambda model: (
            seen.append(model.bert.encoder.layer[0].attention.self.query.weight.clone()),
            whole(model),
        )[1]

    _, problem = tiny.fit(values, tmp_path / "run", change=change)
    weight = problem.model.bert.encoder.layer[0].attention.self.query.weight
    assert len(seen[-1].abs().unique()) == 1 < len(weight.abs().unique())
    torch.testing.assert_close(seen[-1].abs().max(), weight.abs().mean())


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"emulate": {}}, "give bits of weights"),
        ({"emulate": {"weights": 8, "tile": 8}}, "dorefa has no blocks"),
        ({"emulate": {"gradients": 1, "format": "bfp"}}, "1 bit leaves no mantissa"),
        ({"emulate": {"weights": 8}, "compile": True}, "remove compile"),
        ({"emulate": {"weights": 8}, "precision": "bf16"}, "remove precision bf16"),
    ],
)
def test_refused_sections(train, said):
    with pytest.raises(ValueError, match=said):
        TrainConfig.model_validate(train)


def test_refused_bases(model, rows, tmp_path):
    from peftlab.recipe.schema import FinetuneRecipe

    values = {**tiny.recipe(model, rows, tmp_path / "run", emulate={"weights": 8}), "base": {"dtype": "int8"}}
    with pytest.raises(ValueError, match=r"train\.emulate: computes few bits from weights in fp32"):
        FinetuneRecipe.model_validate(values)
