"""The loop beside a plain one of torch; modes of modules; batches made ahead."""

from __future__ import annotations

import json

import pytest
import tiny
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

from peftlab.errors import PeftlabError
from peftlab.methods.inject import trainable_parameters
from peftlab.models.load import eval_mode
from peftlab.training.loop import lr_factor, prefetch
from peftlab.training.order import epoch_batches

# --- The loop against a plain one: a list of batches, a loss, a backward pass, a clip, a step.
# Gradients that are zero but for rounding (a key's bias) would be blown up by Adam with its usual epsilon.
CALM = {"eps": 1e-4, "lr": 1e-3}


def adapter(problem):
    return {name: p.detach().clone() for name, p in trainable_parameters(problem.model).items()}


def last_adapter(directory):
    path = max((directory / "checkpoints").glob("*.pt"))
    return torch.load(path, weights_only=True)["adapter"]


def assert_close(one, other, atol=1e-6):
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=atol, msg=name)


def plain_loop(values, epochs):
    """Return the adapter and the losses of a loop without accelerate, accumulation or checkpoints."""
    settings, problem = tiny.prepare(values)
    parameters = list(trainable_parameters(problem.model).values())
    optimiser = torch.optim.AdamW(parameters, lr=settings.lr, eps=settings.eps, weight_decay=0.0)
    batches = [
        batch
        for epoch in range(epochs)
        for batch in epoch_batches(problem.train["length"], settings.batch_size, seed=settings.seed, epoch=epoch)
    ]
    losses = []
    problem.model.train()
    for step, batch in enumerate(batches):
        inputs = problem.collate([problem.train[i] for i in batch])
        labels = inputs.pop("labels")
        loss = F.cross_entropy(problem.model(**inputs).logits, labels)
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, settings.max_grad_norm)
        for group in optimiser.param_groups:
            group["lr"] = settings.lr * lr_factor(step, len(batches), settings.warmup, settings.scheduler)
        optimiser.step()
        losses.append(loss.item())
    return adapter(problem), losses


@pytest.mark.parametrize("method", tiny.METHODS)
@pytest.mark.parametrize("accumulation", [1, 3, 9])
def test_any_accumulation_equals_the_plain_loop(method, accumulation, still, rows, tmp_path, monkeypatch):
    """Batches of 7 in 3 parts, a last one of 3 examples, and (in 9 parts) parts with no example at all."""
    monkeypatch.setitem(tiny.METHODS, "lora", {**tiny.METHODS["lora"], "lora_dropout": 0.0})
    options = {**CALM, "batch_size": 7, "max_grad_norm": 0.05, "warmup": 2}
    values = tiny.recipe(still, rows, tmp_path / "run", method, gradient_accumulation_steps=accumulation, **options)
    expected, losses = plain_loop(values, epochs=2)
    tiny.fit(values, tmp_path / "run")
    assert_close(last_adapter(tmp_path / "run"), expected)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["loss"] for line in steps] == pytest.approx(losses, abs=1e-6)
    assert all(line["grad_norm"] > 0.05 for line in steps)  # the norm before clipping, which did clip


def test_what_is_counted(still, rows, tmp_path):
    values = tiny.recipe(still, rows, tmp_path, batch_size=7, gradient_accumulation_steps=2)
    progress, problem = tiny.fit(values, tmp_path)
    assert (progress.step, progress.examples) == (10, 62)
    assert progress.tokens == 2 * sum(problem.train["length"])
    assert progress.tokens <= progress.padded_tokens < 1.5 * progress.tokens


def test_a_budget_of_tokens(still, rows, tmp_path):
    values = tiny.recipe(still, rows, tmp_path, max_tokens=48, epochs=2)
    progress, _ = tiny.fit(values, tmp_path)
    assert progress.examples == 62
    assert progress.padded_tokens <= 48 * progress.step
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines if "eval" in line] == [1.0, 2.0]


def test_evaluations_and_steps(still, rows, tmp_path):
    progress, _ = tiny.fit(tiny.recipe(still, rows, tmp_path, max_steps=7, eval_every=3), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval" in line] == [3, 6, 7]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6, 7]
    assert progress.step == 7


def test_early_stopping_and_the_best_adapter(still, rows, tmp_path):
    """With a learning rate of nearly nothing no evaluation is better than the first."""
    values = tiny.recipe(still, rows, tmp_path, lr=1e-9, epochs=9, eval_every=2, early_stopping=2, keep_checkpoints=1)
    progress, problem = tiny.fit(values, tmp_path)
    assert (progress.step, progress.best_step, progress.stale) == (6, 2, 2)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000002.pt", "step-00000006.pt"]
    best = torch.load(tmp_path / "checkpoints" / names[0], weights_only=True)
    assert_close(adapter(problem), best["adapter"], atol=0)
    again, _ = tiny.fit(values, tmp_path, resume=True)  # a run that has stopped early stays stopped
    assert again.step == 6


def test_a_loss_that_is_not_finite_stops_the_run(still, rows, tmp_path):
    def poison(problem):
        collate = problem.collate

        def poisoned(examples):
            batch = collate(examples)
            poisoned.calls += 1
            if poisoned.calls == 6:
                problem.model.bert.embeddings.LayerNorm.weight.data.fill_(float("nan"))
            return batch

        poisoned.calls = 0
        problem.collate = poisoned

    values = tiny.recipe(still, rows, tmp_path, save_every=5, eval_every=100)
    _, problem = tiny.prepare(values)
    batches = epoch_batches(problem.train["length"], 8, seed=3, epoch=1)
    named = ", ".join(map(str, sorted(batches[1])))
    with pytest.raises(PeftlabError, match=rf"the loss is nan at step 6, on training examples {named} "):
        tiny.fit(values, tmp_path, poison)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000005.pt"]


def test_a_gradient_that_is_not_finite_stops_the_run(still, rows, tmp_path):
    """Its loss is finite, and the weights that the step leaves are not: no checkpoint has them."""

    def poison(problem):
        weight = next(p for p in problem.model.parameters() if p.requires_grad)
        seen = []

        def poisoned(gradient):
            seen.append(gradient)
            return gradient * float("inf") if len(seen) == 6 else gradient

        weight.register_hook(poisoned)

    values = tiny.recipe(still, rows, tmp_path, save_every=1, eval_every=100)
    with pytest.raises(PeftlabError, match=r"the norm of the gradient is (nan|inf) at step 6, on training examples "):
        tiny.fit(values, tmp_path, poison)
    assert max(path.name for path in (tmp_path / "checkpoints").iterdir()) == "step-00000005.pt"


def test_the_same_recipe_twice_gives_the_same_bytes(model, rows, tmp_path):
    for name in ("one", "other"):
        tiny.run(tiny.recipe(model, rows, tmp_path / name, gradient_accumulation_steps=2))
    tiny.assert_same_run(tmp_path / "one", tmp_path / "other")
    tiny.run(tiny.recipe(model, rows, tmp_path / "another", seed=4))
    files = [tmp_path / name / "adapter" / "adapter_model.safetensors" for name in ("one", "another")]
    assert files[0].read_bytes() != files[1].read_bytes()


def test_batches_made_ahead_are_the_same_batches():
    assert list(prefetch(iter(range(20)))) == list(range(20))
    assert list(prefetch(iter([]))) == []

    def broken():
        yield 1
        raise ValueError("no more")

    items = prefetch(broken())
    assert next(items) == 1
    with pytest.raises(ValueError, match="no more"):
        next(items)


def test_one_batch_is_made_ahead():
    made = []
    items = prefetch(made.append(i) or i for i in range(5))
    assert next(items) == 0
    items.close()  # waits for the thread, which has made the next one and no more
    assert made == [0, 1]


# --- Dropout is on while training and off wherever a model is scored, whatever mode it was in before.
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


def test_a_score_that_is_not_finite_stops_the_run(still, rows, tmp_path):
    def change(problem):
        problem.score = lambda model: {"validation": {problem.deciding: float("nan")}}

    with pytest.raises(PeftlabError, match="of the held-out examples is nan after step 1; the checkpoints of earlier"):
        tiny.fit(tiny.recipe(still, rows, tmp_path, max_steps=2, eval_every=1), tmp_path, change)
