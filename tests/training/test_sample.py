"""``train.sample``: shares of examples and of batches, and examples chosen by a score in rounds."""

from __future__ import annotations

import itertools
import math
from contextlib import contextmanager
from itertools import chain, pairwise
from types import SimpleNamespace

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from peftlab.errors import PeftlabError
from peftlab.training.config import SampledExamples, TrainConfig
from peftlab.training.efficient import Selection
from peftlab.training.faults import Interrupted, StopSignals
from peftlab.training.order import make_order

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
        if selection.begins(len(batches), chosen):
            chosen.append(selection.choose(chosen, lambda left: [score(i) for i in left]))
        batches += selection.batches(len(batches), chosen)
    return selection, chosen, batches


@settings(deadline=None, max_examples=30)
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
def test_refused_sections(sample, said):
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
