from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from peftlab.training.optimiser import lr_factor, make_optimiser

SETTINGS = SimpleNamespace(peak_lr=0.1, weight_decay=0.5, betas=(0.9, 0.99), eps=1e-6, weights=None)


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
