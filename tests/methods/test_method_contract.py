"""What every method promises in every architecture."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from tiny_models import (
    COMBINATIONS,
    LAYERS,
    NO_BIASES,
    D,
    base,
    batch,
    config_of,
    injected,
    logits,
    train,
    trained,
)

import peftlab
from peftlab import LoraConfig, PeftlabError
from peftlab.methods.base import parameters_under
from peftlab.methods.config import METHODS
from peftlab.methods.inject import count_parameters, injection_of, is_injected, trainable_parameters
from peftlab.models.architectures import task_head
from peftlab.training.recomputation import recompute_activations

every = pytest.mark.parametrize(("method", "architecture"), COMBINATIONS)
WITH_EVERY_METHOD = ("bert", "gpt2", "t5")


def covering(combinations):
    """Parametrise by each method and each architecture; the other combinations are for `make test-long`."""
    marked = [
        pytest.param(m, a, marks=() if m == "lora" or a in WITH_EVERY_METHOD else pytest.mark.long)
        for m, a in combinations
    ]
    return pytest.mark.parametrize(("method", "architecture"), marked)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[key], other[key]) for key in one)


@every
def test_output_at_start_is_the_base_models(method, architecture):
    inputs = batch(architecture)
    difference = logits(injected(method, architecture), inputs) - logits(base(architecture), inputs)
    assert difference.abs().max() <= 1e-5


# Method -> which of the model's own parameters it trains beside the task head.
TRAINED: dict[str, Callable[[str], bool]] = {
    "full": lambda name: not name.endswith("mask_token"),  # which a classifier does not read
    "head": lambda name: False,
    "bitfit": lambda name: name.endswith("bias"),
    "houlsby": lambda name: "norm" in name.lower() or ".ln_" in name.lower(),
    "lora": lambda name: False,
}


@every
def test_what_trains(method, architecture):
    plain = base(architecture)
    head = set(parameters_under(plain, task_head(plain)))
    sizes = {name: parameter.numel() for name, parameter in plain.named_parameters()}
    model = injected(method, architecture)
    names = set(trainable_parameters(model))
    added = names - set(sizes)
    expected = head | {name for name in sizes if TRAINED[method](name)}
    if (
        architecture == "t5" and method == "houlsby"
    ):  # its norms inside a block are called layer_norm, its biases differ
        expected = head | {name for name in sizes if "layer_norm" in name}
    assert head
    assert names - added == expected
    if method == "lora":
        assert added and all(".lora_" in name for name in added)
    assert count_parameters(model)[0] == sum(sizes[name] for name in expected) + sum(
        model.get_parameter(name).numel() for name in added
    )
    if method == "houlsby":
        ends = {"albert": 2, "t5": 5 * LAYERS, "bart": 5 * LAYERS}.get(architecture, 2 * LAYERS)
        m = 6
        assert sum(model.get_parameter(name).numel() for name in added) == ends * (2 * D * m + m + D)
    if method in ("full", "head", "bitfit"):
        assert not added


@every
def test_training_moves_the_adapter_and_nothing_else(method, architecture):
    before = injected(method, architecture)
    model = copy.deepcopy(before)
    train(model, batch(architecture), steps=2)
    was, now = dict(before.named_parameters()), dict(model.named_parameters())
    moved = {name for name in now if not torch.equal(was[name], now[name])}
    trainable = set(trainable_parameters(model))
    assert moved <= trainable
    assert all(torch.isfinite(now[name].grad).all() for name in trainable)
    assert all(now[name].grad is None for name in set(now) - trainable)
    still = {name.rpartition(".")[0] for name in trainable - moved} - {name.rpartition(".")[0] for name in moved}
    assert not still
    buffers = dict(before.named_buffers())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())


@every
def test_save_and_load(method, architecture, tmp_path):
    inputs = batch(architecture)
    model = trained(method, architecture)
    peftlab.save_adapter(model, tmp_path)
    onto_base = peftlab.load_adapter(base(architecture), tmp_path)
    assert torch.equal(logits(onto_base, inputs), logits(model, inputs))
    assert set(trainable_parameters(onto_base)) == set(trainable_parameters(model))
    swapped_in = peftlab.load_adapter(injected(method, architecture), tmp_path)
    assert torch.equal(logits(swapped_in, inputs), logits(model, inputs))


@every
def test_disabled_and_removed_are_the_base_model(method, architecture):
    inputs, plain = batch(architecture), base(architecture)
    model = trained(method, architecture)
    adapted = logits(model, inputs)
    with peftlab.disabled(model):
        assert torch.equal(logits(model, inputs), logits(plain, inputs))
    assert torch.equal(logits(model, inputs), adapted)
    assert not torch.equal(adapted, logits(plain, inputs))
    assert peftlab.remove(model) is model
    assert not is_injected(model)
    assert same(model.state_dict(), plain.state_dict())
    assert {n: type(m) for n, m in model.named_modules()} == {n: type(m) for n, m in plain.named_modules()}
    assert all(p.requires_grad for p in model.parameters())
    assert torch.equal(logits(model, inputs), logits(plain, inputs))


@covering(COMBINATIONS)
def test_state_dict_keys_are_stable(method, architecture, tmp_path):
    plain = list(base(architecture).state_dict())
    model = injected(method, architecture)
    keys = list(model.state_dict())
    assert [key for key in keys if key in set(plain)] == plain
    train(model, batch(architecture), steps=1)
    peftlab.save_adapter(model, tmp_path)
    with peftlab.disabled(model):
        assert list(model.state_dict()) == keys
    assert list(model.state_dict()) == keys


@covering(
    [(m, a) for m, a in COMBINATIONS if a not in ("albert", "convnext", "mpnet")]
)  # transformers has none for these
def test_gradient_checkpointing_gives_the_same_gradients(method, architecture):
    model = trained(method, architecture)
    inputs, gradients = batch(architecture), []
    for selective in (None, False, True):
        if selective is not None:
            recompute_activations(model, selective=selective)
        torch.manual_seed(4)
        model.train()
        model.zero_grad()
        model(**inputs).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in trainable_parameters(model).items()})
    for name, gradient in gradients[0].items():
        atol = 1e-6 * float(gradient.abs().max())  # kernels may add the same terms in another order
        for other in gradients[1:]:
            torch.testing.assert_close(other[name], gradient, rtol=1e-5, atol=atol, msg=name)
    copy.deepcopy(model)  # a finished pass leaves nothing behind that a copy would stumble over


@covering(COMBINATIONS)
def test_copies_and_pickles(method, architecture):
    inputs = batch(architecture)
    model = trained(method, architecture)
    expected = logits(model, inputs)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(twin, inputs), expected)
        assert set(trainable_parameters(twin)) == set(trainable_parameters(model))
        train(twin, inputs, steps=1)
        assert torch.equal(logits(model, inputs), expected)
        assert same(peftlab.remove(twin).state_dict(), base(architecture).state_dict())


@pytest.mark.parametrize("method", ["lora", "houlsby", "bitfit"])
def test_the_handle_of_a_hook_removes_it_at_any_time(method):
    """A hook acts once in each call until it is removed, whatever is injected or taken out; a copy keeps its own."""
    model, inputs = base("bert"), batch("bert")
    steps = [
        lambda: peftlab.inject(model, config_of(method)),
        lambda: peftlab.inject(model, LoraConfig(r=2, target_modules=["attention.output.dense"]), name="second"),
        lambda: peftlab.set_adapter(model, "default"),
        lambda: peftlab.delete_adapter(model, "second"),
        lambda: peftlab.remove(model),
        lambda: peftlab.merge(peftlab.inject_lora(model), keep=True),
        lambda: peftlab.unmerge(model),
        lambda: peftlab.merge(model),
    ]
    calls: list[str] = []
    handles = []

    def add(name):
        leaf = model.bert.encoder.layer[0].attention.output.dense
        handles.append(leaf.register_forward_hook(lambda *_: calls.append(name)))

    def check(asked, count):
        calls.clear()
        logits(asked, inputs)
        assert len(calls) == len(set(calls)) == count

    for i, step in enumerate(steps):
        add(f"before {i}, removed at once")
        add(f"before {i}")
        step()
        check(model, len(handles))
        handles.pop(-2).remove()
        check(model, len(handles))
        if i == 2:
            with peftlab.adapter_names(model, ["default", "second"] * 2):
                add("within")
                check(model, len(handles))
            twin, count = copy.deepcopy(model), len(handles)
    for handle in handles:
        handle.remove()
    check(model, 0)
    check(twin, count)


@every
def test_merged(method, architecture):
    inputs, plain = batch(architecture), base(architecture)
    model = trained(method, architecture)
    expected = logits(model, inputs)
    if not METHODS[method].folds:
        with pytest.raises(PeftlabError, match=method):
            peftlab.merge(model)
        assert torch.equal(logits(model, inputs), expected)
        return
    assert peftlab.merge(model) is model
    assert not is_injected(model)
    torch.testing.assert_close(logits(model, inputs), expected, rtol=1e-4, atol=1e-5)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert {n: type(m) for n, m in model.named_modules()} == {n: type(m) for n, m in plain.named_modules()}


@pytest.mark.parametrize("architecture", NO_BIASES)
def test_bitfit_names_the_alternatives_where_there_are_no_biases(architecture):
    model = base(architecture)
    with pytest.raises(PeftlabError, match=r"no biases.*lora.*houlsby"):
        peftlab.inject_bitfit(model)
    assert not is_injected(model)
    assert all(p.requires_grad for p in model.parameters())


COMPILED = [  # LoRA and Houlsby in BERT by inductor, below
    pytest.param("lora", "bert", {}, marks=pytest.mark.long),
    ("lora", "gpt2", {}),
    ("lora", "llama", {}),
    pytest.param("houlsby", "bert", {}, marks=pytest.mark.long),
    ("houlsby", "bert", {"placement": "parallel"}),
    pytest.param("houlsby", "llama", {"placement": "parallel"}, marks=pytest.mark.long),
    ("bitfit", "bert", {}),
]


def compiled_agrees(method, architecture, options, backend):
    torch._dynamo.reset()
    torch.manual_seed(2)
    config = config_of(method).model_copy(update=options)
    model = peftlab.inject(base(architecture), config)
    inputs = batch(architecture)
    train(model, inputs)
    model.zero_grad()
    model(**inputs).loss.backward()
    expected = {name: p.grad.clone() for name, p in trainable_parameters(model).items()}
    model.zero_grad()
    loss = torch.compile(model, backend=backend)(**inputs).loss
    loss.backward()
    for name, gradient in expected.items():
        # Rounding of a sum is relative to its terms, not to what is left of them: an element may be near 0 by chance.
        atol = 1e-5 * float(gradient.abs().max())
        torch.testing.assert_close(
            model.get_parameter(name).grad,
            gradient,
            rtol=1e-4,
            atol=atol,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize(("method", "architecture", "options"), COMPILED)
def test_compiled_gradients_agree(method, architecture, options):
    compiled_agrees(method, architecture, options, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "houlsby"])
def test_inductor_gradients_agree(method):
    compiled_agrees(method, "bert", {}, "inductor")


def test_saved_whole_model_loads_with_torch(tmp_path):
    model, stream = trained("houlsby", "bert"), io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    twin = torch.load(stream, weights_only=False)
    assert torch.equal(logits(twin, batch("bert")), logits(model, batch("bert")))
    assert injection_of(twin).config == injection_of(model).config
