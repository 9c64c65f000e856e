"""Parameter groups, the learning rate, and steps that are rounded at random."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace

import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from peftlab.errors import PeftlabError
from peftlab.training.config import TrainConfig
from peftlab.training.efficient import StochasticAdamW, _noise, orthogonalise, round_to_bf16
from peftlab.training.loop import lr_factor, make_optimiser

SETTINGS = SimpleNamespace(peak_lr=0.1, weight_decay=0.5, betas=(0.9, 0.99), eps=1e-6, weights=None, optimizer=None)


def parameters():
    shapes = {"a.weight": (2, 3), "a.bias": (2,), "a.lora_A": (1, 3), "a.lora_B": (2, 1), "norm.weight": (3,)}
    return {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}


def test_groups():
    named = parameters()
    optimiser = make_optimiser(named, SETTINGS, {"lora_B": 16.0})
    found = {
        name: (group["weight_decay"], group["peak_lr"])
        for group in optimiser.param_groups
        for name, parameter in named.items()
        if any(parameter is member for member in group["params"])
    }
    assert found == {
        "a.weight": (0.5, 0.1),
        "a.bias": (0.0, 0.1),
        "a.lora_A": (0.5, 0.1),
        "a.lora_B": (0.5, 1.6),
        "norm.weight": (0.0, 0.1),
    }
    assert sum(len(group["params"]) for group in optimiser.param_groups) == len(named)
    assert all(g["betas"] == (0.9, 0.99) and g["eps"] == 1e-6 and g["fused"] for g in optimiser.param_groups)


@pytest.mark.parametrize(
    ("kind", "warmup", "expected"),
    [
        ("linear", 0.0, [1, 0.75, 0.5, 0.25, 0]),
        ("linear", 2, [0, 0.5, 1, 0.5, 0]),
        ("linear", 0.5, [0, 0.5, 1, 0.5, 0]),
        ("linear", 0.3, [0, 0.5, 1, 0.5, 0]),  # a share of the steps is rounded up
        ("constant", 2, [0, 0.5, 1, 1, 1]),
        ("cosine", 0.0, [1, 0.5 + math.sqrt(2) / 4, 0.5, 0.5 - math.sqrt(2) / 4, 0]),
    ],
)
def test_schedule(kind, warmup, expected):
    assert [lr_factor(step, 4, warmup, kind) for step in range(5)] == pytest.approx(expected)


def test_a_run_of_one_step_has_no_warm_up():
    assert lr_factor(0, 1, 0.06, "linear") == 1.0


@given(
    st.integers(1, 500),
    st.floats(0, 0.999) | st.integers(1, 600),
    st.sampled_from(["linear", "cosine", "constant"]),
)
def test_the_factor_stays_within_bounds_and_peaks_once(total, warmup, kind):
    factors = [lr_factor(step, total, warmup, kind) for step in range(total)]
    assert all(0 <= factor <= 1 for factor in factors)
    top = factors.index(max(factors))
    assert factors[: top + 1] == sorted(factors[: top + 1])
    assert factors[top:] == sorted(factors[top:], reverse=True)


# --- ``train.weights: bf16_stochastic``: steps on bf16 weights whose mean is exact.
ROUNDING = TrainConfig(weights="bf16_stochastic", lr=1e-4, seed=3)


@pytest.mark.parametrize("value", [1.0, 1.0001, -1.0001, 3.1415927, -2.5e-7, 1e-40, 65504.3, 0.0])
def test_the_mean_over_all_noises_is_the_value(value):
    x = torch.tensor(value)
    noise = torch.arange(1 << 16, dtype=torch.int32)
    rounded = round_to_bf16(x.expand(1 << 16).contiguous(), noise)
    values, counts = rounded.double().unique(return_counts=True)
    total = sum(Fraction(v) * n for v, n in zip(values.tolist(), counts.tolist(), strict=True))
    assert rounded.dtype == torch.bfloat16 and total / (1 << 16) == Fraction(x.item())
    assert len(rounded.unique()) <= 2


def test_what_is_not_finite_stays():
    last = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # of NaN, a sum with noise would overflow
    x = torch.tensor([float("inf"), float("-inf"), float("nan"), last])
    rounded = round_to_bf16(x, torch.full((4,), (1 << 16) - 1, dtype=torch.int32))
    assert torch.equal(rounded[:2].float(), x[:2]) and rounded[2:].isnan().all()


def test_the_noise_has_every_place_of_a_word():
    """Four numbers are cut from each word of the generator."""
    noise = _noise(torch.empty(1 << 15, 4), torch.Generator().manual_seed(0)).double()
    assert noise.min() >= 0 and noise.max() < 1 << 16 and noise.max() > (1 << 16) - 20
    deviation = (1 << 16) / 12**0.5
    assert ((noise.mean(0) - ((1 << 16) - 1) / 2).abs() < 5 * deviation / len(noise) ** 0.5).all()
    assert (torch.corrcoef(noise.t()) - torch.eye(4)).abs().max() < 5 / len(noise) ** 0.5


def test_a_parameter_larger_than_a_block_steps_as_in_one(monkeypatch):
    weights = []
    for size in (1 << 17, 60):
        monkeypatch.setattr("peftlab.training.efficient._BLOCK", size)
        weight = nn.Parameter(torch.linspace(-1, 1, 12 * 20).view(20, 12).t())  # rows that are not contiguous
        stepper = make_optimiser({"weight": weight}, ROUNDING, {})
        weight.grad = torch.sin(torch.arange(240.0)).view(12, 20)
        stepper.param_groups[0]["lr"] = 1e-2
        stepper.step()
        weights.append(weight.detach())
    torch.testing.assert_close(*weights)
    assert not torch.equal(weights[0], torch.linspace(-1, 1, 12 * 20).view(20, 12).t())


def descend(optimiser_of, steps=400):
    """Return the mean weight after steps of 1e-4 from 1, where neighbours of bf16 are 2^-8 apart."""
    weight = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimiser = optimiser_of({"weight": weight})
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        for group in optimiser.param_groups:
            group["lr"] = group["peak_lr"]
        optimiser.step()
    return weight.detach().double().mean().item()


def test_small_steps_add_up_where_the_nearest_stalls():
    assert descend(lambda p: make_optimiser(p, ROUNDING, {})) == pytest.approx(0.96, abs=2e-3)
    assert descend(lambda p: make_optimiser(p, ROUNDING.model_copy(update={"weights": None}), {})) == 1.0


def test_in_fp32_it_is_adamw():
    weights = [nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4)) for _ in range(2)]
    settings = TrainConfig(weights="bf16_stochastic", lr=1e-2, weight_decay=0.1)
    optimisers = [
        make_optimiser({"weight": weights[0]}, settings, {}),
        make_optimiser({"weight": weights[1]}, settings.model_copy(update={"weights": None}), {}),
    ]
    for step in range(5):
        for weight, optimiser in zip(weights, optimisers, strict=True):
            weight.grad = torch.sin(torch.arange(12.0) + step).view(3, 4)
            optimiser.param_groups[0]["lr"] = 1e-2
            optimiser.step()
    torch.testing.assert_close(*weights)


def test_averages_are_fp32_after_loading_too():
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    first, second = (make_optimiser({"weight": weight}, ROUNDING, {}) for _ in range(2))
    weight.grad = torch.rand(4, 4).bfloat16()
    first.step()
    second.load_state_dict(first.state_dict())
    for key in ("exp_avg", "exp_avg_sq"):
        assert second.state[weight][key].dtype == torch.float32
        assert torch.equal(second.state[weight][key], first.state[weight][key])
    assert isinstance(first, StochasticAdamW) and second.param_groups[0]["taken"] == 1


def recipe(model, rows, run, **train):
    values = tiny.recipe(model, rows, run, "full", weights="bf16_stochastic", lr=1e-4, **train)
    return {**values, "base": {"dtype": "bf16"}}


def test_a_resumed_run_is_the_same_bit_for_bit(model, rows, tmp_path):
    with tiny.stopped_after(3):
        tiny.run(recipe(model, rows, tmp_path / "run", save_every=1))
    tiny.run(recipe(model, rows, tmp_path / "run", save_every=1), resume=True)
    results = tiny.run(recipe(model, rows, tmp_path / "whole", save_every=1))
    tiny.assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert results["cost"]["optimizer_bytes"] == 10 * results["trainable_parameters"]


@pytest.mark.parametrize("change", [{"method": {"name": "lora"}}, {"base": {"dtype": "fp32"}}])
def test_refused_elsewhere(change, model, rows, tmp_path):
    from peftlab.recipe.schema import FinetuneRecipe

    with pytest.raises(ValueError, match=r"train\.weights: bf16_stochastic rounds .* set method=full"):
        FinetuneRecipe.model_validate({**recipe(model, rows, tmp_path / "run"), **change})


def test_refused_where_parameters_are_divided(tmp_path):
    from accelerate.utils import DistributedType

    from peftlab.training.loop import Trainer

    accelerator = types.SimpleNamespace(distributed_type=DistributedType.FSDP, is_fsdp2=True)
    problem = types.SimpleNamespace(model=nn.Linear(2, 2), lr_ratio={})
    with pytest.raises(PeftlabError, match=r"train\.weights: FSDP2 divides"):
        Trainer(problem, ROUNDING, accelerator, None)


def test_muon_steps_matrices_as_torch_does_and_the_rest_by_adamw() -> None:
    torch.manual_seed(0)
    shapes = {"layers.0.weight": (6, 10), "layers.0.norm": (10,), "lm_head.weight": (12, 10)}
    start = {name: torch.randn(shape) for name, shape in shapes.items()}
    gradients = [{name: torch.randn(shape) for name, shape in shapes.items()} for _ in range(4)]

    def trained(make: Callable[[dict[str, nn.Parameter]], list[torch.optim.Optimizer]]) -> dict[str, nn.Parameter]:
        parameters = {name: nn.Parameter(tensor.clone()) for name, tensor in start.items()}
        optimisers = make(parameters)
        for each in gradients:
            for name, parameter in parameters.items():
                parameter.grad = each[name].clone()
            for optimiser in optimisers:
                optimiser.step()
        return parameters

    settings = TrainConfig(lr=0.01, optimizer="muon", weight_decay=0.1)
    rounded = {name: nn.Parameter(tensor.bfloat16()) for name, tensor in start.items()}
    one, other = (make_optimiser(rounded, settings, {}) for _ in range(2))
    rounded["layers.0.weight"].grad = gradients[0]["layers.0.weight"].bfloat16()
    one.step()
    other.load_state_dict(one.state_dict())
    momenta = [of.state[rounded["layers.0.weight"]]["momentum"] for of in (one, other)]
    assert momenta[1].dtype == torch.float32 and torch.equal(*momenta)
    mine = trained(lambda p: [make_optimiser(p, settings, {})])
    theirs = trained(
        lambda p: [
            torch.optim.Muon([p["layers.0.weight"]], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW([p["layers.0.norm"]], lr=0.01, weight_decay=0.0),
            torch.optim.AdamW([p["lm_head.weight"]], lr=0.01, weight_decay=0.1),
        ]
    )
    for name in ("layers.0.norm", "lm_head.weight"):
        torch.testing.assert_close(mine[name], theirs[name])
    ours, reference = (of["layers.0.weight"] - start["layers.0.weight"] for of in (mine, theirs))
    assert float((ours - reference).detach().norm() / reference.norm()) < 0.05  # torch's iterates in bfloat16
    for dtype in (torch.float32, torch.bfloat16):
        singular = torch.linalg.svdvals(orthogonalise(torch.randn(5, 9), dtype).float())
        assert 0.5 < float(singular.min()) <= float(singular.max()) < 1.3
