"""Layers that rest, examples that are chosen, and emulated number formats."""

from __future__ import annotations

import itertools
import math
import types
from contextlib import contextmanager
from itertools import chain, pairwise
from statistics import NormalDist
from types import SimpleNamespace

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from peftlab.errors import PeftlabError
from peftlab.methods.base import layer_index
from peftlab.methods.inject import inject, make_config, trainable_parameters
from peftlab.training.config import EmulatedHardware, SampledExamples, TrainConfig
from peftlab.training.efficient import (
    Emulation,
    LayerSampling,
    block_floating,
    coarse_gradient,
    dorefa,
    dorefa_weights,
    pruned,
    pruning_threshold,
    sparsity_at,
)
from peftlab.training.loop import FirstStepsCheck, Interrupted, StopSignals
from peftlab.training.order import Selection, make_order

# --- ``train.layers``: layers from one on, and layers drawn anew in each period.
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
    rested = set().union(*(sampling.resting_parameters(step) for step in range(50)))
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
def test_refused_layers(layers, said):
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

    from peftlab.methods.inject import inject, make_config
    from peftlab.models.costs import count_step
    from peftlab.models.load import empty_model

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


# --- ``train.sample``: shares of examples and of batches, and examples chosen by a score in rounds.
LENGTHS = [3 + (7 * i) % 11 for i in range(103)]


def options(by, keep=0.5, **others):
    sample = SampledExamples.model_validate({"keep": keep, "by": by, **others})
    given = {"batch_size": 4, "max_tokens": None, "seed": 0, "epochs": 2.0, "max_steps": None}
    return SimpleNamespace(**given, sample=sample)


def chosen_run(rounds, score, keep=0.5, total=100):
    """Return the selection of a run, the examples of each round, and the batches of each step."""
    selection = Selection(LENGTHS, options("least_confidence", keep, rounds=rounds), 0, total)
    chosen, batches = [], []
    while len(batches) < total:
        if selection.is_round_start(len(batches), chosen):
            chosen.append(selection.choose(chosen, lambda left: [score(i) for i in left]))
        batches += selection.batches(len(batches), chosen)
    return selection, chosen, batches


@settings(max_examples=30)
@given(st.floats(0.02, 0.98), st.integers(0, 99), st.integers(0, 9))
def test_the_random_share_is_exact_and_a_function_of_seed_and_epoch(keep, seed, epoch):
    values = options("random", keep)
    values.seed = seed
    plan = make_order(LENGTHS, values).plan(epoch)
    seen = sorted(chain(*plan))
    assert len(seen) == len(set(seen)) == max(1, round(keep * len(LENGTHS)))
    assert plan == make_order(LENGTHS, values).plan(epoch)


def test_every_epoch_draws_other_examples_and_batches():
    for by in ("random", "batches"):
        order = make_order(LENGTHS, options(by))
        first, second = (sorted(chain(*order.plan(epoch))) for epoch in (0, 1))
        assert first != second
    whole = make_order(LENGTHS, SimpleNamespace(**{**vars(options("random")), "sample": None}))
    kept = make_order(LENGTHS, options("batches")).plan(3)
    assert len(kept) == round(0.5 * len(whole.plan(3))) and all(batch in whole.plan(3) for batch in kept)


def test_a_schedule_counts_the_steps_that_are_taken():
    for by in ("random", "batches"):
        order = make_order(LENGTHS, options(by))
        assert order.total == order.ends[-1] == 2 * 13 == len(list(order.batches(0)))
        assert list(order.batches(17)) == list(order.batches(0))[17:]


@pytest.mark.parametrize("rounds", [2, 4, 5])
def test_rounds_add_the_least_confident(rounds):
    selection, chosen, batches = chosen_run(rounds, score=lambda i: -i)
    assert [len(those) for those in chosen] == [n - m for m, n in pairwise([0, *selection.sizes])]
    assert selection.sizes[-1] == round(0.5 * len(LENGTHS)) and selection.ends[-1] == len(batches) == 100
    left = set(range(len(LENGTHS))) - set(chosen[0])  # the first round is drawn at random
    for those in chosen[1:]:
        assert set(those) == set(sorted(left)[-len(those) :])
        left -= set(those)
    for number, (begin, end) in enumerate(pairwise([0, *selection.ends])):
        pool = set(chain(*chosen[: number + 1]))
        assert set(chain(*batches[begin:end])) <= pool
        passes = math.ceil(len(pool) / 4)
        if end - begin >= passes:
            assert sorted(chain(*batches[begin : begin + passes])) == sorted(pool)


def test_equal_scores_are_taken_in_order_and_a_round_can_be_entered_anywhere():
    selection, chosen, batches = chosen_run(4, score=lambda i: 0.5)
    left = [i for i in range(len(LENGTHS)) if i not in chosen[0]]
    assert chosen[1] == left[: len(chosen[1])]
    for step in (0, 1, 15, 37, 99):
        number = sum(end <= step for end in selection.ends)
        assert list(selection.batches(step, chosen[: number + 1])) == batches[step : selection.ends[number]]


def test_wrong_labels_are_not_collected():
    """The score knows no labels: among the chosen, flipped ones are as frequent as elsewhere."""
    confidence = {i: (i * 37 % 103) / 103 for i in range(103)}
    flipped = {i for i in range(103) if i * 61 % 5 == 0}
    _, chosen, _ = chosen_run(4, confidence.__getitem__)
    share = len(flipped & set(chain(*chosen))) / len(set(chain(*chosen)))
    assert abs(share - len(flipped) / 103) < 0.1


def test_too_many_rounds():
    with pytest.raises(PeftlabError, match=r"train\.sample\.rounds: 9 rounds need more than 5 examples"):
        Selection(LENGTHS, options("least_confidence", 0.05, rounds=9), 0, 100)
    with pytest.raises(PeftlabError, match=r"9 rounds need more than 5 steps"):
        Selection(LENGTHS, options("least_confidence", rounds=9), 0, 5)


def recipe(model, rows, run, method="lora", by="least_confidence", **train):
    """Return a recipe of 12 steps in rounds that end after 2, 6 and 12."""
    values = tiny.recipe(model, rows, run, method, epochs=6, eval_every=12, save_every=4, **train)
    values["train"]["sample"] = {"keep": 0.5, "by": by, **({"rounds": 3} if by == "least_confidence" else {})}
    return values


@pytest.mark.parametrize("method", ["houlsby", "bitfit", "head"])
def test_rounds_with_every_method(method, model, rows, tmp_path):
    """The others below, too."""
    values = recipe(model, rows, tmp_path / "run", method)
    values["train"] |= {"epochs": 3, "eval_every": 6}
    results = tiny.run(values)
    found = results["selection"]
    assert (results["steps"], found["rounds"], found["scored_examples"]) == (6, 3, (31 - 5) + (31 - 10))


@pytest.mark.parametrize("method", ["lora", "full"])
def test_resumed_inside_a_round(method, model, rows, tmp_path):
    """Stopped in round 2, after step 4; with LoRA also as round 3 begins, after step 6: the same run, bit for bit."""
    with tiny.stopped_after(4):
        tiny.run(recipe(model, rows, tmp_path / "run", method))
    if method == "lora":
        with stopped_at(2, 6):
            tiny.run(recipe(model, rows, tmp_path / "run", method), resume=True)
    first = tiny.run(recipe(model, rows, tmp_path / "run", method), resume=True)
    whole = tiny.run(recipe(model, rows, tmp_path / "whole", method))
    tiny.assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert first["selection"] == whole["selection"] and first["cost"] == whole["cost"]


@contextmanager
def stopped_at(steps, total):
    """A block in which a resumed run gets SIGTERM after ``steps`` of its own, and must end after ``total`` in all."""
    left = itertools.count(1 - steps)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted, match=f"after step {total}"):
        patch.setattr(StopSignals, "received", lambda signals: 15 if next(left) == 0 else 0)
        yield


def test_scoring_is_counted_and_random_costs_as_much_without(model, rows, tmp_path):
    chosen = tiny.run(recipe(model, rows, tmp_path / "chosen"))
    control = tiny.run(recipe(model, rows, tmp_path / "random", by="random"))
    batches = tiny.run(recipe(model, rows, tmp_path / "batches", by="batches"))
    assert chosen["steps"] == control["steps"] == batches["steps"] == 12
    found = chosen["selection"]
    assert (found["rounds"], found["examples"]) == (3, 16) and "selection" not in control
    assert found["scored_examples"] == (31 - 5) + (31 - 10)
    assert 0 < found["scoring_flops"] < chosen["cost"]["forward_flops"]


def test_a_scorer_chooses_once(model, rows, tmp_path):
    """All examples are scored by a run of another model; the least confident half is trained on from the start."""
    small = tiny.save_model(tmp_path / "small", layers=1)
    scorer = tiny.recipe(small, rows, tmp_path / "scorer", "full", epochs=1)
    tiny.run(scorer)
    values = recipe(model, rows, tmp_path / "run")
    values["train"]["sample"] = {"keep": 0.5, "by": "least_confidence", "scorer": str(tmp_path / "scorer")}
    results = tiny.run(values)
    assert results["selection"]["scored_examples"] == 31 and results["selection"]["rounds"] == 1
    from peftlab.training.state import checkpoint_path, read_checkpoint

    state = read_checkpoint(checkpoint_path(tmp_path / "run" / "checkpoints", 12))
    (examples,) = state["progress"]["chosen"]
    assert len(examples) == 16
    values["train"]["sample"]["scorer"] = str(tmp_path / "headless")
    tiny_bert(tmp_path / "headless")
    with pytest.raises(
        PeftlabError, match=r"train\.sample\.scorer: .*headless was not trained for text/classification"
    ):
        tiny.run({**values, "output_dir": str(tmp_path / "other")})
    assert not (tmp_path / "other").exists()


def tiny_bert(directory):
    """Write the body of a tiny BERT, without a head."""
    from transformers import AutoTokenizer, BertModel

    whole = tiny.save_model(directory.with_name("body"))
    BertModel.from_pretrained(whole).save_pretrained(directory)
    AutoTokenizer.from_pretrained(whole).save_pretrained(directory)


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ({"keep": 1}, "less than 1"),
        ({"keep": 0.5, "by": "random", "rounds": 3}, "random draws in every epoch and has no rounds"),
        ({"keep": 0.5, "by": "random", "scorer": "x"}, "random scores no example"),
        ({"keep": 0.5, "by": "least_confidence", "rounds": 3, "scorer": "x"}, "a scorer does not change in training"),
    ],
)
def test_refused_samples(sample, said):
    with pytest.raises(ValueError, match=said):
        TrainConfig.model_validate({"sample": sample})


def test_refused_tasks(model, rows, tmp_path):
    from peftlab.recipe.schema import FinetuneRecipe

    values = {**recipe(model, rows, tmp_path / "run"), "task": "text/regression"}
    with pytest.raises(ValueError, match="which task text/regression does not have; set random or batches"):
        FinetuneRecipe.model_validate(values)
    values = recipe(model, rows, tmp_path / "run", by="lowest_acceptance")
    with pytest.raises(ValueError, match="lowest_acceptance is for drafts"):
        FinetuneRecipe.model_validate(values)


@pytest.mark.parametrize(
    "section",
    [{"layers": {"from": 1}}, {"sample": {"keep": 0.5, "by": "least_confidence"}}, {"sample": {"keep": 0.5}}],
)
def test_a_written_recipe_can_be_read(section):
    train = TrainConfig.model_validate(section)
    assert TrainConfig.model_validate(train.model_dump(mode="json", by_alias=True)) == train


# --- ``train.emulate``: number formats by enumeration, the two copies of the weights, and runs.
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
def test_refused_emulations(train, said):
    with pytest.raises(ValueError, match=said):
        TrainConfig.model_validate(train)


def test_refused_bases(model, rows, tmp_path):
    from peftlab.recipe.schema import FinetuneRecipe

    values = {**tiny.recipe(model, rows, tmp_path / "run", emulate={"weights": 8}), "base": {"dtype": "int8"}}
    with pytest.raises(ValueError, match=r"train\.emulate: computes few bits from weights in fp32"):
        FinetuneRecipe.model_validate(values)
