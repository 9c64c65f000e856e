"""Dropout is on while training and off wherever a model is scored, whatever mode it was in before."""

from __future__ import annotations

import tiny
import torch
from accelerate import Accelerator
from torch import nn

from peftlab.methods.modes import eval_mode


def modes(model):
    return {name: module.training for name, module in model.named_modules()}


def test_every_module_is_put_back_as_it_was():
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.Linear(2, 2)))
    model[1].eval()  # kept in eval mode inside a model that trains
    before = modes(model)
    with eval_mode(model):
        assert not any(modes(model).values())
    assert modes(model) == before
    try:
        with eval_mode(model):
            raise KeyError
    except KeyError:
        assert modes(model) == before


def test_evaluation_leaves_the_mode_it_found(model, rows, tmp_path):
    _, problem = tiny.prepare(tiny.recipe(model, rows, tmp_path))
    Accelerator()
    scores = []
    for training in (False, True):
        problem.model.train(training)
        scores.append(problem.evaluate(problem.model))
        assert set(modes(problem.model).values()) == {training}
    assert scores[0] == scores[1]


def test_a_scoring_function_of_its_own_reads_in_eval_mode_too(model, rows, tmp_path):
    _, problem = tiny.prepare(tiny.recipe(model, rows, tmp_path))
    seen = []
    problem.score = lambda scored: seen.append(scored.training) or {"test": {"score": 0.0}}
    for training in (False, True):
        problem.model.train(training)
        problem.evaluate(problem.model)
        assert problem.model.training == training
    assert seen == [False, False]


def test_a_trained_model_is_in_eval_mode(model, rows, tmp_path):
    values = tiny.recipe(model, rows, tmp_path / "run", max_steps=2)
    _, problem = tiny.fit(values, tmp_path / "run")
    assert not any(modes(problem.model).values())
    inputs = problem.collate([problem.train[i] for i in range(4)])
    inputs.pop("labels")
    with torch.no_grad():
        assert torch.equal(problem.model(**inputs).logits, problem.model(**inputs).logits)
