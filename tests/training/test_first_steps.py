from __future__ import annotations

import pytest
import torch
from torch import nn

from peftlab.errors import PeftlabError
from peftlab.training.faults import FirstStepsCheck


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))


def steps(net, check, n, lr=0.1, freeze=()):
    for _ in range(n):
        net(torch.ones(1, 3)).square().sum().backward()
        for name, parameter in net.named_parameters():
            if parameter.grad is not None and name not in freeze:
                parameter.data -= lr * parameter.grad
        check.record_step(lr)
        net.zero_grad()


def test_two_steps_that_move_everything():
    net = model()
    check = FirstStepsCheck(net)
    steps(net, check, 1)
    assert not check.done()
    steps(net, check, 1)
    assert check.done()


def test_steps_too_small_to_move_anything_do_not_count():
    net = model()
    check = FirstStepsCheck(net)
    steps(net, check, 9, lr=0.0)
    assert not check.done()


def test_what_nothing_reaches_is_named():
    net = model()
    net.spare = nn.Parameter(torch.ones(2))
    check = FirstStepsCheck(net)
    with pytest.raises(PeftlabError, match=r"have no gradient: spare$"):
        net.forward = lambda x: net[1](net[0](x))
        steps(net, check, 2)
        check.done()


def test_what_does_not_move_is_named():
    net = model()
    check = FirstStepsCheck(net)
    steps(net, check, 2, freeze=("1.weight", "1.bias"))
    with pytest.raises(PeftlabError, match=r"have not changed: 1$"):
        check.done()


def test_a_group_moves_with_one_of_its_parameters():
    net = model()
    check = FirstStepsCheck(net)
    steps(net, check, 2, freeze=("1.weight",))
    assert check.done()


def test_gradients_that_are_not_finite():
    net = model()
    check = FirstStepsCheck(net)
    net[0].weight.grad = torch.full((3, 3), float("nan"))
    steps(net, check, 2)
    with pytest.raises(PeftlabError, match=r"not finite: 0.bias, 0.weight, 1.bias, 1.weight"):
        check.done()
