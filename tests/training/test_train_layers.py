"""``train.layers``: layers from one on, and layers drawn anew in each period."""

from __future__ import annotations

import types

import pytest
import tiny
import torch
from torch import nn

from peftlab.errors import PeftlabError
from peftlab.methods.injection import trainable_parameters
from peftlab.methods.targets import layer_index
from peftlab.training.efficient import LayerSampling
from peftlab.training.faults import FirstStepsCheck

LAYERS = 4


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A BERT of four layers."""
    return tiny.save_model(tmp_path_factory.mktemp("deep") / "bert", layers=LAYERS)


def stack(layers=4):
    return nn.ModuleDict({"layer": nn.ModuleList(nn.Linear(2, 2) for _ in range(layers)), "norm": nn.LayerNorm(2)})


def test_every_draw_is_a_pure_function_and_every_pair_of_layers_occurs():
    one, other = (LayerSampling(stack(), 2, 5, seed=3) for _ in range(2))
    draws = [tuple(one.drawn(step)) for step in range(5 * 200)]
    assert draws == [tuple(other.drawn(step)) for step in reversed(range(5 * 200))][::-1]
    assert all(len(set(draws[i : i + 5])) == 1 for i in range(0, len(draws), 5))
    assert set(draws) == {(a, b) for a in range(4) for b in range(a + 1, 4)}
    assert draws != [tuple(LayerSampling(stack(), 2, 5, seed=4).drawn(step)) for step in range(5 * 200)]


def test_what_belongs_to_no_layer_never_rests():
    sampling = LayerSampling(stack(), 1, 1, seed=0)
    rested = set().union(*(sampling.resting(step) for step in range(50)))
    assert rested == {f"layer.{i}.{name}" for i in range(4) for name in ("weight", "bias")}


def test_more_layers_than_train():
    with pytest.raises(PeftlabError, match=r"train\.layers\.active: 5, and only 4 layers train"):
        LayerSampling(stack(), 5, 20, seed=0)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_resting_layers_stay_bit_equal_and_drawn_ones_move(deep, rows, tmp_path, monkeypatch, method):
    """Weight decay and momentum included; the optimiser holds state for what trains alone."""
    import peftlab.training.loop as loop

    seen = []
    original = loop.Trainer.step

    def step(self, batch, factor, total):
        number = self.progress.step
        before = {name: p.detach().clone() for name, p in trainable_parameters(self.problem.model).items()}
        result = original(self, batch, factor, total)
        after = trainable_parameters(self.problem.model)
        moved = {layer_index(n) for n, p in after.items() if not torch.equal(p, before[n])} - {None}
        held = {layer_index(n) for n, p in after.items() if p in self.optimiser.state} - {None}
        seen.append((number, moved, held, set(self.sampling.drawn(number))))
        return result

    monkeypatch.setattr(loop.Trainer, "step", step)
    values = tiny.recipe(deep, rows, tmp_path / "run", method, epochs=3, weight_decay=0.1)
    values["train"]["layers"] = {"active": 2, "every": 2}
    tiny.fit(values, tmp_path / "run")
    assert len(seen) == 12 and len({tuple(drawn) for *_, drawn in seen}) > 2
    for _, moved, held, drawn in seen:
        assert moved == drawn == held


def test_from_a_layer_on_and_drawn_among_them(deep, rows, tmp_path):
    values = tiny.recipe(deep, rows, tmp_path / "run", "full", epochs=1)
    values["train"]["layers"] = {"from": 1, "active": 1, "every": 1}
    start = {}
    _, problem = tiny.fit(
        values,
        tmp_path / "run",
        change=lambda problem: start.update({n: p.detach().clone() for n, p in problem.model.named_parameters()}),
    )
    moved = {layer_index(n) for n, p in problem.model.named_parameters() if not torch.equal(p, start[n])}
    assert None in moved and moved - {None} and min(moved - {None}) >= 1  # the head, and drawn layers above 0


def test_resumed_within_a_period(deep, rows, tmp_path):
    """A run of 8 steps stopped after 5, in a period of 3, ends as one that was not."""

    def values(run):
        recipe = tiny.recipe(deep, rows, run, "lora", save_every=1)
        recipe["train"]["layers"] = {"active": 2, "every": 3}
        return recipe

    with tiny.stopped_after(5):
        tiny.run(values(tmp_path / "run"))
    tiny.run(values(tmp_path / "run"), resume=True)
    tiny.run(values(tmp_path / "whole"))
    tiny.assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_the_first_steps_of_a_layer_are_checked_once_it_was_drawn():
    net = stack(2)
    names = {i: [f"layer.{i}.weight", f"layer.{i}.bias"] for i in range(2)}
    check = FirstStepsCheck(net)

    def step(drawn, dead=()):
        for name, parameter in net.named_parameters():
            parameter.grad = None
            if layer_index(name) in (drawn, None) and name not in dead:
                parameter.grad = torch.ones_like(parameter)
                parameter.data -= 0.1
        check.record_step(0.1, names[1 - drawn])
        return check.done()

    assert [step(0) for _ in range(3)] == [False] * 3  # layer 1 has not been drawn
    assert not step(1, dead=names[1])
    with pytest.raises(PeftlabError, match=r"have no gradient: layer\.1\.weight, layer\.1\.bias$"):
        step(1, dead=names[1])


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ({}, "give from, active, or both"),
        ({"from": 1, "every": 5}, "every is the length of a period"),
        ({"from": -1}, "greater than or equal to 0"),
        ({"active": 0}, "greater than or equal to 1"),
    ],
)
def test_refused_sections(layers, said):
    from pydantic import ValidationError

    from peftlab.training.config import TrainConfig

    with pytest.raises(ValidationError, match=said):
        TrainConfig.model_validate({"layers": layers})


@pytest.mark.parametrize(
    ("train", "method", "said"),
    [
        ({"layers": {"from": 1}}, {"name": "lora", "bias": "all"}, r"train\.layers\.from: method lora: bias: all"),
        ({}, {"name": "bitfit", "first_layer": 1}, r"method\.first_layer: write train\.layers"),
        ({"layers": {"active": 1}, "compile": True}, {"name": "lora"}, r"compile makes one graph"),
    ],
)
def test_refused_recipes(train, method, said, model, rows, tmp_path):
    from peftlab.recipe.schema import FinetuneRecipe

    values = tiny.recipe(model, rows, tmp_path / "run", **train)
    with pytest.raises(ValueError, match=said):
        FinetuneRecipe.model_validate({**values, "method": method})


@pytest.mark.parametrize(("kind", "said"), [("FSDP", "FSDP2 waits for"), ("DEEPSPEED", "DEEPSPEED waits for")])
def test_refused_where_all_gradients_are_awaited(kind, said, tmp_path):
    from accelerate.utils import DistributedType

    from peftlab.training.config import TrainConfig
    from peftlab.training.loop import Trainer

    settings = TrainConfig.model_validate({"layers": {"active": 1}, "lr": 1e-3})
    accelerator = types.SimpleNamespace(distributed_type=DistributedType[kind], is_fsdp2=kind == "FSDP")
    problem = types.SimpleNamespace(model=stack(), lr_ratio={})
    with pytest.raises(PeftlabError, match=said):
        Trainer(problem, settings, accelerator, None)


def test_what_a_run_costs(still, rows, tmp_path):
    """The sum over its batches, as shapes alone say it; the same when it is resumed; half without the lower layer."""
    from transformers import AutoConfig

    from peftlab.methods.injection import inject, make_config
    from peftlab.models.costs import count_step
    from peftlab.models.skeleton import empty_model

    values = tiny.recipe(still, rows, tmp_path / "run", "lora", epochs=1)
    method = {"name": "lora", "r": 2, "lora_alpha": 4, "target_modules": "all-linear"}
    values["method"] = method
    progress, _ = tiny.fit(values, tmp_path / "run")
    empty = inject(
        empty_model("BertForSequenceClassification", AutoConfig.from_pretrained(still)),
        make_config("lora", **{k: v for k, v in method.items() if k != "name"}),
    )
    assert sum(progress.step_kinds.values()) == progress.step == 4
    for kind, (forward, backward, kept, trained) in progress.step_costs.items():
        rows_, longest = map(int, kind.partition(" ")[0].split("x"))
        expected = count_step(empty, rows_, longest)
        assert (forward, backward, trained) == (
            expected.forward_flops, expected.backward_flops, expected.optimizer_bytes
        )  # fmt: skip
        assert kept >= expected.kept_bytes  # the loss, and a mask where there is padding
    cost = progress.cost(empty)
    assert cost.forward_flops == sum(progress.step_costs[kind][0] * n for kind, n in progress.step_kinds.items())

    values["train"]["layers"] = {"from": 1}
    values["output_dir"] = str(tmp_path / "upper")
    results = tiny.run(values)
    assert results["cost"]["forward_flops"] < cost.forward_flops
    assert results["cost"]["backward_flops"] < 0.55 * cost.backward_flops
    assert results["cost"]["kept_bytes"] < 0.6 * cost.kept_bytes
