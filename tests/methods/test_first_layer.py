"""Only the layers from one on train, whatever the method, and backward ends there."""

from __future__ import annotations

import pytest
import torch
from tiny_models import COMBINATIONS, base, batch, config_of, logits, train

import peftlab
from peftlab import PeftlabError
from peftlab.methods.base import layer_index
from peftlab.methods.inject import trainable_parameters
from peftlab.models.architectures import inside, task_head

STACKED = ("albert", "t5", "bart")  # one shared layer; two stacks, of which the decoder reads the encoder's end
every = pytest.mark.parametrize(
    ("method", "architecture"), [(m, a) for m, a in COMBINATIONS if a not in STACKED and m != "head"]
)


def upper(method, architecture, first=1, **fields):
    torch.manual_seed(2)
    config = config_of(method).model_copy(update={"first_layer": first, **fields})
    return peftlab.inject(base(architecture), config)


@every
def test_the_adapter_is_the_part_of_the_methods_in_these_layers(method, architecture):
    whole = peftlab.inject(base(architecture), config_of(method))
    head = task_head(whole)
    expected = {n for n in trainable_parameters(whole) if inside(n, head) or (layer_index(n) or 0) >= 1}
    assert set(trainable_parameters(upper(method, architecture))) == expected
    assert any(not inside(name, head) for name in expected)


@every
def test_nothing_below_the_layer_is_part_of_the_backward_pass(method, architecture):
    model = upper(method, architecture)
    head, graph = task_head(model), {}

    def note(name):
        def hook(module, inputs, output):
            if isinstance(output, torch.Tensor):
                graph[name] = output.requires_grad

        return hook

    for name, module in model.named_modules():
        if name and not list(module.children()):
            module.register_forward_hook(note(name))
    model.train()
    model(**batch(architecture)).loss.backward()
    lower = {name: in_graph for name, in_graph in graph.items() if layer_index(name) == 0 and not inside(name, head)}
    upper_ = {name: in_graph for name, in_graph in graph.items() if layer_index(name) == 1 and not inside(name, head)}
    assert lower and not any(lower.values())
    assert any(upper_.values())
    assert all(p.grad is not None for p in trainable_parameters(model).values())


@pytest.mark.parametrize("method", ["lora", "houlsby", "bitfit", "full"])
def test_saved_and_loaded_again(method, tmp_path):
    model, inputs = upper(method, "bert"), batch("bert")
    train(model, inputs)
    peftlab.save_adapter(model, tmp_path)
    again = peftlab.load_adapter(base("bert"), tmp_path)
    assert set(trainable_parameters(again)) == set(trainable_parameters(model))
    assert torch.equal(logits(again, inputs), logits(model, inputs))


def test_a_named_module_trains_wherever_it_is():
    names = set(trainable_parameters(upper("full", "bert", modules_to_save=["pooler"])))
    assert "bert.pooler.dense.weight" in names and "bert.embeddings.word_embeddings.weight" not in names


@pytest.mark.parametrize(
    ("method", "architecture", "first", "said"),
    [
        ("lora", "bert", 2, r"no layer 2; there are 0 to 1"),
        ("full", "albert", 1, r"no layer 1; there are 0 to 0"),
        ("head", "bert", 1, r"trains nothing in layers 1 to 1"),
    ],
)
def test_refused(method, architecture, first, said):
    with pytest.raises(PeftlabError, match=said):
        upper(method, architecture, first)


def test_what_lora_trains_outside_the_layers():
    for fields in ({"bias": "all"}, {"trainable_token_indices": [3]}):
        with pytest.raises(PeftlabError, match="trains outside the layers from 1 on"):
            peftlab.inject_lora(base("bert"), first_layer=1, **fields)
