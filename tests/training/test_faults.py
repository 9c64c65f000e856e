"""Full disks, too little memory, and parameters that do not learn."""

from __future__ import annotations

import json
import resource

import pytest
import tiny
import torch
from torch import nn

from peftlab.errors import PeftlabError
from peftlab.training.loop import FirstStepsCheck


@pytest.fixture()
def disk():
    """A switch that fills the disk: no file of this process may grow beyond 4 KiB afterwards."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def at_call(number, action):
    """Return a change to the problem that calls ``action`` with it when its ``number``-th batch is made."""

    def change(problem):
        collate, calls = problem.collate, []

        def counted(examples):
            calls.append(1)
            if len(calls) == number:
                action(problem)
            return collate(examples)

        problem.collate = counted

    return change


def test_a_full_disk_keeps_the_checkpoint_before(model, rows, tmp_path, disk):
    values = tiny.recipe(model, rows, tmp_path / "run", save_every=2, eval_every=6, max_steps=6)
    with pytest.raises(PeftlabError) as caught:
        tiny.fit(values, tmp_path / "run", at_call(4, lambda problem: disk()))
    assert "step-00000004.pt: cannot be written" in str(caught.value)
    assert "step-00000002.pt is complete. Is the disk full?" in str(caught.value)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002.pt"]


def test_resuming_with_room_on_the_disk(model, rows, tmp_path, disk):
    options = {"save_every": 2, "eval_every": 6, "max_steps": 6}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(PeftlabError, match="cannot be written"):
        tiny.fit(
            tiny.recipe(model, rows, tmp_path / "run", **options),
            tmp_path / "run",
            at_call(4, lambda problem: disk()),
        )
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    tiny.run(tiny.recipe(model, rows, tmp_path / "run", **options), resume=True)
    tiny.run(tiny.recipe(model, rows, tmp_path / "whole", **options))
    tiny.assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_metrics_file_without_room(model, rows, tmp_path, disk):
    values = tiny.recipe(model, rows, tmp_path, max_steps=80, eval_every=80)
    with pytest.raises(PeftlabError, match=r"metrics.jsonl: cannot be written \(File too large\)"):
        tiny.fit(values, tmp_path, at_call(2, lambda problem: disk()))


def exhaust(problem):
    """Make the model ask for more memory than there are addresses."""
    problem.model.register_forward_pre_hook(lambda *given: torch.empty(2**52))


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (
            {"batch_size": 8, "gradient_accumulation_steps": 2},
            r"with 4 rows of \d+ tokens at once; set train.gradient_accumulation_steps=4 \(.*\), or "
            r"train.gradient_checkpointing=true \(.*\), or train.batch_size=4, or train.max_length=\d+$",
        ),
        (
            {"batch_size": 1, "gradient_checkpointing": True},
            r"with 1 rows of \d+ tokens at once; set train.max_length=\d+$",
        ),
        (
            {"max_tokens": 48, "gradient_checkpointing": True},
            r"with 4 rows of \d+ tokens at once; set train.gradient_accumulation_steps=2 \(.*\), or "
            r"train.max_tokens=24 with train.max_length=\d+ or less$",
        ),
    ],
)
def test_out_of_memory_in_training(options, advice, model, rows, tmp_path):
    with pytest.raises(PeftlabError, match=rf"out of memory at step 2, {advice}"):
        tiny.fit(
            tiny.recipe(model, rows, tmp_path, **options),
            tmp_path,
            at_call(options.get("gradient_accumulation_steps", 1) + 1, exhaust),
        )


def exhaust_in_evaluation(problem):
    score = problem.score

    def scored(model):
        exhaust(problem)
        return score(model)

    problem.score = scored


def test_out_of_memory_in_evaluation(model, rows, tmp_path):
    values = tiny.recipe(model, rows, tmp_path, max_steps=2, eval_batch_size=4)
    with pytest.raises(PeftlabError, match=r"out of memory while evaluating; set train.eval_batch_size=2$"):
        tiny.fit(values, tmp_path, exhaust_in_evaluation)


def test_other_errors_are_not_taken_for_it(model, rows, tmp_path):
    def wrong(problem):
        problem.model.register_forward_pre_hook(lambda *given: torch.ones(2) @ torch.ones(3))

    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        tiny.fit(tiny.recipe(model, rows, tmp_path), tmp_path, at_call(1, wrong))


def csv(tmp_path, *lines):
    file = tmp_path / "rows.csv"
    file.write_text("\n".join(["text,label", *lines]) + "\n")
    return file


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "no examples"),
        (["good film,pos"] * 12, "a single class"),
        ([*["good film,pos", "bad film,neg"] * 6, ",pos"], "text"),
        ([*["good film,pos", "bad film,neg"] * 6, "dull plot,"], "label"),
    ],
)
def test_data_that_cannot_be_learnt_from(lines, words, model, tmp_path):
    with pytest.raises(PeftlabError) as caught:
        tiny.run(tiny.recipe(model, csv(tmp_path, *lines), tmp_path / "run"))
    assert words in str(caught.value) and "rows.csv" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_texts_beyond_the_models_positions(model, tmp_path):
    lines = ["good film,pos", f"{'bad ' * 90}film,neg"] * 12
    values = tiny.recipe(model, csv(tmp_path, *lines), tmp_path / "run", max_length=64)
    with pytest.raises(PeftlabError, match=r"train.max_length is 64; .* has positions for 32 tokens"):
        tiny.run(values)
    assert tiny.run({**values, "train": {**values["train"], "max_length": 32}})["steps"] == 4


@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32"])
def test_other_precisions(precision, model, rows, tmp_path):
    assert tiny.run(tiny.recipe(model, rows, tmp_path / "run", precision=precision))["steps"] == 8


def test_a_budget_below_one_example(model, rows, tmp_path):
    with pytest.raises(ValueError, match="max_tokens 8 does not fit one example of max_length 16"):
        tiny.run(tiny.recipe(model, rows, tmp_path / "run", max_tokens=8))


def test_a_run_continues_without_a_compiler_that_fails(model, rows, tmp_path, capsys, monkeypatch):
    """The run says so, and gives what it gives without."""
    import torch._inductor.compile_fx

    def broken(*given, **options):
        raise RuntimeError("no such compiler")

    torch._dynamo.reset()
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", broken)
    tiny.run(tiny.recipe(model, rows, tmp_path / "compiled", compile=True))
    said = capsys.readouterr().out
    assert "train.compile: continuing without it, as torch.compile failed: " in said and "no such compiler" in said
    tiny.run(tiny.recipe(model, rows, tmp_path / "plain"))
    tiny.assert_same_run(tmp_path / "compiled", tmp_path / "plain")


@pytest.mark.long  # gradients of compiled models: methods/test_method_contract.py
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_compiled_run_scores_alike(backend, rows, tmp_path, capsys, monkeypatch):
    """With the graphs alone, and with the code that a compiler makes of them."""
    import torch._inductor.compile_fx

    torch._dynamo.reset()
    if backend != "inductor":
        monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", torch._dynamo.lookup_backend(backend))
    still = tiny.save_model(tmp_path / "bert", dropout=0.0, layers=1)
    compiled = tiny.run(tiny.recipe(still, rows, tmp_path / "compiled", compile=True, eps=1e-4))
    if "continuing without it" in capsys.readouterr().out:
        pytest.skip("no compiler here")
    plain = tiny.run(tiny.recipe(still, rows, tmp_path / "plain", eps=1e-4))
    assert compiled["metrics"]["validation"]["loss"] == pytest.approx(plain["metrics"]["validation"]["loss"], abs=1e-4)
    assert json.loads((tmp_path / "compiled" / "results.json").read_text())["steps"] == 8
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("compiled", "plain")]
    losses, expected = ([json.loads(line)["loss"] for line in each if '"grad_norm"' in line] for each in lines)
    assert len(losses) == 8 and losses == pytest.approx(expected, abs=1e-3)


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
