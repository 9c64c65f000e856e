"""Several adapters in one model: one is active and trains, the others are named tensors beside their layers."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny_models import base, batch, logits, train
from torch import nn

import peftlab
from peftlab import BitFitConfig, HoulsbyConfig, LoraConfig, PeftlabError
from peftlab.methods.config import FullConfig, MethodConfig
from peftlab.methods.inject import injection_of

LORA: dict[str, LoraConfig] = {
    "plain": LoraConfig(r=4, lora_alpha=8),
    "rank": LoraConfig(r=2, lora_alpha=3, use_rslora=True, target_modules=["key", "attention.output.dense"]),
    "dora": LoraConfig(r=3, use_dora=True, target_modules=["query", "intermediate.dense"]),
    "pissa": LoraConfig(r=2, init_lora_weights="pissa", rank_pattern={"value": 3}),
    "whole": LoraConfig(r=2, modules_to_save=["pooler"], bias="lora_only"),
    "words": LoraConfig(r=2, target_modules=["word_embeddings", "value"]),
}
OTHERS: dict[str, MethodConfig] = {"houlsby": HoulsbyConfig(bottleneck=6), "bitfit": BitFitConfig()}
CONFIGS = LORA | OTHERS


def changed(model: nn.Module) -> nn.Module:
    """Move every trained parameter, the head too, so that no adapter equals another."""
    with torch.no_grad():
        for parameter in peftlab.trainable_parameters(model).values():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> dict[str, Any]:
    """Return the directories of the adapters, each made in a model of its own, and that model's logits."""
    torch.manual_seed(5)
    found = {}
    for name, config in CONFIGS.items():
        model = changed(peftlab.inject(base("bert"), config))
        directory = peftlab.save_adapter(model, tmp_path_factory.mktemp(name))
        alone = peftlab.load_adapter(base("bert"), directory)
        found[name] = (directory, logits(alone, batch("bert")), alone)
    return found


def loaded(stored, *names: str) -> nn.Module:
    model = base("bert")
    for name in names:
        peftlab.load_adapter(model, stored[name][0], name=name)
    return model


def traces(model: nn.Module) -> dict[str, Any]:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks")
    return {
        "keys": sorted(model.state_dict()),
        "parameters": {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)},
        "trains": {name: p.requires_grad for name, p in model.named_parameters()},
        "classes": {name: type(module) for name, module in model.named_modules()},
        "hooks": {name: [len(getattr(module, h)) for h in hooks] for name, module in model.named_modules()},
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
    }


def without_objects(model: nn.Module) -> dict[str, Any]:
    """Return the traces apart from the identity of parameters, of which a stored head has new ones."""
    return {what: found for what, found in traces(model).items() if what != "parameters"}


def test_each_computes_and_trains_as_alone(stored):
    model = loaded(stored, *CONFIGS)
    assert peftlab.loaded_adapters(model)[0] == list(CONFIGS)[-1]
    for name in [*CONFIGS, *reversed(CONFIGS)]:
        peftlab.set_adapter(model, name)
        _, expected, alone = stored[name]
        assert torch.equal(logits(model, batch("bert")), expected)
        assert list(peftlab.trainable_parameters(model)) == list(peftlab.trainable_parameters(alone))
        assert injection_of(model).config == injection_of(alone).config
        with peftlab.disabled(model):
            assert torch.equal(logits(model, batch("bert")), logits(base("bert"), batch("bert")))


def test_the_others_are_named_tensors_beside_their_layers(stored):
    model = loaded(stored, "plain", "rank", "whole", "houlsby")
    layer, alone = "bert.encoder.layer.0.attention", stored["plain"][2]
    state = dict(model.named_parameters())
    for name in ("self.query.lora_A", "self.value.lora_B"):
        assert torch.equal(state[f"{layer}.{name}.plain"], alone.get_parameter(f"{layer}.{name}"))
    assert f"{layer}.self.key.lora_A.rank" in state and f"{layer}.self.query.lora_A.rank" not in state
    assert torch.equal(state["classifier.weight.plain"], alone.classifier.weight)
    assert "bert.pooler.dense.weight.whole" in state
    down = [name for name in state if name.startswith(layer) and "adapter_down" in name]  # of the active one
    assert {name.rpartition(".")[2] for name in down} == {"weight", "bias"}
    peftlab.set_adapter(model, "plain")
    state = dict(model.named_parameters())
    assert f"{layer}.self.query.lora_A" in state and f"{layer}.self.query.lora_A.plain" not in state
    assert all(f"{name}.houlsby" in state and name not in state for name in down)
    assert {name for name, p in state.items() if p.requires_grad} == set(peftlab.trainable_parameters(alone))


def test_no_trace(stored):
    model = base("bert")
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 3 == 0)
    model.bert.pooler.register_forward_hook(lambda module, inputs, output: None)
    before, values = traces(model), copy.deepcopy(model.state_dict())
    for name in CONFIGS:
        peftlab.load_adapter(model, stored[name][0], name=name)
    switched = None
    for name in ("dora", "houlsby", "dora"):
        peftlab.set_adapter(model, name)
        if name == "dora":
            assert switched in (None, without_objects(model))
            switched = without_objects(model)
    with peftlab.adapter_names(model, ["plain", "__base__", "houlsby", "dora"]):
        logits(model, batch("bert"))
    assert switched == without_objects(model)
    peftlab.delete_adapter(model, "plain")
    peftlab.remove(model)
    assert traces(model) == before
    assert list(model.state_dict()) == list(values)
    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())


def test_training_one_leaves_the_others(stored):
    model = loaded(stored, "plain", "rank", "whole")
    optimizer = torch.optim.SGD(peftlab.trainable_parameters(model).values(), lr=0.1)
    parameters = peftlab.trainable_parameters(model)
    for name in ("plain", "whole"):  # away and back: the optimiser goes on with the same parameters
        peftlab.set_adapter(model, name)
    assert {n: id(p) for n, p in peftlab.trainable_parameters(model).items()} == {
        n: id(p) for n, p in parameters.items()
    }
    model(**batch("bert")).loss.backward()
    optimizer.step()
    assert not torch.equal(logits(model, batch("bert")), stored["whole"][1])
    for name in ("plain", "rank"):
        peftlab.set_adapter(model, name)
        assert torch.equal(logits(model, batch("bert")), stored[name][1])


def test_a_frozen_part_of_an_adapter_stays_frozen(stored):
    model = loaded(stored, "plain", "rank")
    model.bert.encoder.layer[0].attention.self.key.lora_A.requires_grad_(False)
    expected = list(peftlab.trainable_parameters(model))
    peftlab.set_adapter(model, "plain")
    peftlab.set_adapter(model, "rank")
    assert list(peftlab.trainable_parameters(model)) == expected


@pytest.mark.parametrize("name", ["plain", "dora", "whole", "words", "houlsby", "bitfit"])
def test_a_frozen_adapter_is_saved_whole(name, stored, tmp_path):
    """Freezing after training loses nothing, of the active adapter and of one that was active before."""
    model = loaded(stored, name)
    parts = {key: p for key, p in peftlab.trainable_parameters(model).items() if not key.endswith("lora_B")}
    expected = load_file(stored[name][0] / "adapter_model.safetensors")

    def saved(where: str, **options: Any) -> None:
        ours = load_file(peftlab.save_adapter(model, tmp_path / where, **options) / "adapter_model.safetensors")
        assert ours.keys() == expected.keys()
        assert all(torch.equal(ours[key], expected[key]) for key in ours)

    for parameter in parts.values():
        parameter.requires_grad_(False)
    saved("partly")
    model.requires_grad_(False)
    saved("active")
    saved("given", state_dict=model.state_dict())
    peftlab.inject(model, LoraConfig(r=2), name="another")
    saved("stored", name=name)
    peftlab.load_adapter(model, tmp_path / "stored", name=name)  # fills what is there, frozen or not
    assert torch.equal(logits(model, batch("bert")), stored[name][1])


def test_any_of_them_is_saved(stored, tmp_path):
    model = loaded(stored, *CONFIGS)
    before = traces(model)
    for name, (directory, _, _) in stored.items():
        peftlab.save_adapter(model, tmp_path / name, name=name)
        ours, first = (load_file(where / "adapter_model.safetensors") for where in (tmp_path / name, directory))
        assert ours.keys() == first.keys()
        # PiSSA is written as the LoRA it equals, and once more when it is read as one and saved.
        assert all(torch.equal(ours[key], first[key]) for key in ours)
        config = "adapter_config.json"
        assert (tmp_path / name / config).read_text() == (directory / config).read_text()
    assert traces(model) == before
    peftlab.save_adapter(model, tmp_path / "active")
    assert (tmp_path / "active" / "adapter_config.json").read_text() == (
        tmp_path / list(CONFIGS)[-1] / "adapter_config.json"
    ).read_text()


@pytest.mark.parametrize("second", [name for name in CONFIGS if name != "plain"])
def test_a_second_load_without_a_name_replaces_the_first_and_says_so(second, stored):
    model = peftlab.load_adapter(base("bert"), stored["plain"][0])
    with pytest.warns(UserWarning, match="replaces the adapter that was in the model"):
        peftlab.load_adapter(model, stored[second][0])
    assert peftlab.loaded_adapters(model) == ["default"]
    assert torch.equal(logits(model, batch("bert")), stored[second][1])
    alone = stored[second][2]
    assert list(model.state_dict()) == list(alone.state_dict())
    peftlab.remove(model)
    assert without_objects(model) == without_objects(base("bert"))


def test_a_name_replaces_its_own_adapter_only(stored):
    model = loaded(stored, "plain", "rank")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        peftlab.load_adapter(model, stored["dora"][0], name="plain")
    assert peftlab.loaded_adapters(model) == ["plain", "rank"]
    assert torch.equal(logits(model, batch("bert")), stored["dora"][1])
    peftlab.set_adapter(model, "rank")
    assert torch.equal(logits(model, batch("bert")), stored["rank"][1])


@pytest.mark.parametrize("name", ["other", "plain", "rank"])
def test_what_does_not_fit_changes_nothing(name, stored, tmp_path):
    wrong = peftlab.inject(base("bert"), LoraConfig(r=2, target_modules=["key"]))
    wrong.bert.encoder.layer[1].attention.self.key.lora_A = nn.Parameter(torch.zeros(2, 30))
    peftlab.save_adapter(wrong, tmp_path)
    model = loaded(stored, "plain", "rank")
    before = traces(model)
    with pytest.raises(PeftlabError, match="has shape"):
        peftlab.load_adapter(model, tmp_path, name=name)
    assert set(traces(model)["keys"]) == set(before["keys"]) and traces(model)["trains"] == before["trains"]
    assert torch.equal(logits(model, batch("bert")), stored["rank"][1])


def test_deleting(stored):
    model = loaded(stored, "plain", "rank", "dora")
    peftlab.delete_adapter(model, "plain")
    assert peftlab.loaded_adapters(model) == ["dora", "rank"]
    assert torch.equal(logits(model, batch("bert")), stored["dora"][1])
    peftlab.delete_adapter(model, "dora")
    assert torch.equal(logits(model, batch("bert")), stored["rank"][1])
    assert list(model.state_dict()) == list(stored["rank"][2].state_dict())
    peftlab.delete_adapter(model, "rank")
    assert torch.equal(logits(model, batch("bert")), logits(base("bert"), batch("bert")))
    assert without_objects(model) == without_objects(base("bert"))


def test_injected_beside_a_loaded_one(stored):
    model = loaded(stored, "plain")
    peftlab.inject(model, LoraConfig(r=2, target_modules=["key"]), name="new")
    assert peftlab.loaded_adapters(model) == ["new", "plain"]
    train(model, batch("bert"))
    after = logits(model, batch("bert"))
    peftlab.set_adapter(model, "plain")
    assert torch.equal(logits(model, batch("bert")), stored["plain"][1])
    peftlab.set_adapter(model, "new")
    assert torch.equal(logits(model, batch("bert")), after)


def test_they_are_copied_and_loaded_with_the_model(stored):
    model = loaded(stored, "pissa", "whole", "plain")
    twin, other = copy.deepcopy(model), copy.deepcopy(model)
    for name in ("pissa", "whole", "plain"):
        peftlab.set_adapter(other, name)
        changed(other)
    other.load_state_dict(model.state_dict())
    for name in ("pissa", "whole", "plain"):
        for copied in (twin, other):
            peftlab.set_adapter(copied, name)
            assert torch.equal(logits(copied, batch("bert")), stored[name][1])


@pytest.mark.parametrize("new_objects", [False, True])
def test_they_are_cast_with_the_model(new_objects, stored):
    model = loaded(stored, "pissa", "whole", "plain")
    torch.__future__.set_overwrite_module_params_on_conversion(new_objects)
    try:
        model.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    for name in ("pissa", "whole", "plain"):
        peftlab.set_adapter(model, name)
        assert {p.dtype for p in peftlab.trainable_parameters(model).values()} == {torch.float64}
        torch.testing.assert_close(logits(model, batch("bert")).float(), stored[name][1], rtol=1e-3, atol=1e-4)


def test_merging_takes_one(stored):
    model = loaded(stored, "plain", "rank")
    with pytest.raises(PeftlabError, match="the adapters plain are in the model too"):
        peftlab.merge(model)
    peftlab.delete_adapter(model, "plain")
    torch.testing.assert_close(logits(peftlab.merge(model), batch("bert")), stored["rank"][1], rtol=1e-4, atol=1e-5)


def test_names(stored):
    model = loaded(stored, "plain")
    with pytest.raises(PeftlabError, match=r"no adapter 'plian'.*it has plain.*did you mean 'plain'"):
        peftlab.set_adapter(model, "plian")
    with pytest.raises(PeftlabError, match="it has none"):
        peftlab.delete_adapter(base("bert"), "plain")
    with pytest.raises(PeftlabError, match="no adapter 'b'"):
        peftlab.save_adapter(model, "nowhere", name="b")
    with pytest.raises(PeftlabError, match=r"holds a lora injection already \(adapter plain\)"):
        peftlab.inject(model, LoraConfig(), name="plain")
    for name in ("", "a.b", "__base__"):
        with pytest.raises(PeftlabError, match="cannot be called"):
            peftlab.load_adapter(model, stored["rank"][0], name=name)
    with pytest.raises(PeftlabError, match=r"a string \(plain\), not \['plain', 'b'\]; one is active .*add_weighted"):
        peftlab.set_adapter(model, ["plain", "b"])
    for call in (peftlab.set_adapter, peftlab.delete_adapter):
        with pytest.raises(PeftlabError, match=r"a string \(plain\), not None$"):
            call(model, None)
    assert peftlab.loaded_adapters(model) == ["plain"]


def test_not_while_something_is_switched_off(stored):
    model = loaded(stored, "plain", "rank")
    expected = logits(model, batch("bert"))
    for block in (peftlab.disabled(model), peftlab.adapter_names(model, ["plain"] * 4)):
        with block, pytest.raises(PeftlabError, match="within peftlab"):
            peftlab.set_adapter(model, "plain")
    assert torch.equal(logits(model, batch("bert")), expected)


def test_not_on_a_leaf_that_something_else_patched(stored):
    model = loaded(stored, "plain", "rank")
    query = model.bert.encoder.layer[0].attention.self.query  # which the active adapter does not change
    query.forward = query.forward
    with pytest.raises(PeftlabError, match=r"attention.self.query has a forward of its own"):
        peftlab.set_adapter(model, "plain")
    assert torch.equal(logits(model, batch("bert")), stored["rank"][1])
    del query.forward
    peftlab.set_adapter(model, "plain")
    assert torch.equal(logits(model, batch("bert")), stored["plain"][1])


def test_several_at_once_with_weights(stored):
    names, weights = ["rank", "words", "pissa"], [0.7, -0.4, 0.5]
    model = loaded(stored, *names)
    for name in names:  # heads that differ have no weighted sum
        peftlab.set_adapter(model, name)
        for key in ("weight", "bias"):
            with torch.no_grad():
                getattr(model.classifier, key).copy_(getattr(base("bert").classifier, key))
    expected = dict(base("bert").named_parameters())
    for name, weight in zip(names, weights, strict=True):
        peftlab.set_adapter(model, name)
        merged = peftlab.merge(_one(model, name))
        for key, parameter in merged.named_parameters():
            start = base("bert").get_parameter(key)
            expected[key] = expected[key] + weight * (parameter - start)
    summed = base("bert")
    summed.load_state_dict(expected, strict=False)
    peftlab.add_weighted_adapter(model, names, weights, "sum")
    assert peftlab.loaded_adapters(model) == ["sum", "pissa", "words", "rank"]
    torch.testing.assert_close(logits(model, batch("bert")), logits(summed, batch("bert")), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(model, batch("bert")), logits(base("bert"), batch("bert")), atol=1e-2)


@pytest.mark.parametrize("weight", ["0.5", None, float("nan"), float("inf")])
def test_weights_are_finite_numbers(stored, weight):
    model = loaded(stored, "plain")
    with pytest.raises(PeftlabError, match=f"a finite number, not {weight!r}"):
        peftlab.add_weighted_adapter(model, ["plain", "plain"], [0.5, weight], "sum")
    assert peftlab.loaded_adapters(model) == ["plain"]


def _one(model: nn.Module, name: str) -> nn.Module:
    """Return a copy of ``model`` with that adapter alone."""
    alone = copy.deepcopy(model)
    for other in peftlab.loaded_adapters(alone):
        if other != name:
            peftlab.delete_adapter(alone, other)
    return alone


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["plain", "dora"], "DoRA adapters cannot be combined"),
        (["plain", "houlsby"], "only LoRA adapters can be combined, not houlsby"),
        (["plain", "rank"], "trained whole in several adapters and differs"),
        (["plain", "nothing"], "no adapter 'nothing'"),
    ],
)
def test_what_has_no_weighted_sum_is_refused(names, message, stored):
    model = loaded(stored, "plain", "dora", "houlsby", "rank")
    before = traces(model)
    with pytest.raises(PeftlabError, match=message):
        peftlab.add_weighted_adapter(model, names, [0.5, 0.5], "sum")
    assert traces(model) == before


def resnet() -> nn.Module:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    config = transformers.ResNetConfig(**sizes, num_labels=3)
    return transformers.ResNetForImageClassification(config).eval()


def test_running_statistics_are_the_adapters_that_trains_their_norms(tmp_path):
    generator = torch.Generator().manual_seed(1)
    inputs = {"pixel_values": torch.randn(4, 3, 32, 32, generator=generator), "labels": torch.tensor([0, 1, 2, 0])}
    model, expected = resnet(), {}
    for name in ("one", "two"):
        peftlab.inject(model, FullConfig(), name=name)
        train(model, inputs, steps=2 if name == "one" else 4)
        expected[name] = logits(model, inputs)
        peftlab.save_adapter(model, tmp_path / name)
    mean = "resnet.embedder.embedder.normalization.running_mean"
    assert not torch.equal(model.get_buffer(mean), resnet().get_buffer(mean))
    for name in ("one", "two"):
        alone = peftlab.load_adapter(resnet(), tmp_path / name)
        assert torch.equal(logits(alone, inputs), expected[name])
        with peftlab.disabled(alone):
            assert torch.equal(logits(alone, inputs), logits(resnet(), inputs))
        peftlab.set_adapter(model, name)
        assert torch.equal(logits(model, inputs), expected[name])
    with peftlab.adapter_names(model, ["two", "one", "__base__", "two"]):
        mixed = logits(model, inputs)
    rows = torch.stack([expected["two"][0], expected["one"][1], logits(resnet(), inputs)[2], expected["two"][3]])
    torch.testing.assert_close(mixed, rows, rtol=1e-5, atol=1e-5)
    plain, base_state = peftlab.remove(model).state_dict(), resnet().state_dict()
    assert plain.keys() == base_state.keys() and all(torch.equal(plain[key], base_state[key]) for key in plain)
