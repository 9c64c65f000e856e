"""A draft from some of the target's own layers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeVar

from torch import nn
from transformers import PreTrainedModel

from peftlab.errors import PeftlabError

M = TypeVar("M", bound=PreTrainedModel)


def truncate(model: M, layers: Sequence[int], *, share: bool = False) -> M:
    """Return a model of the same class with only these layers, and the embeddings, norm and head of ``model``.

    Args:
        model: a language model with one stack of layers.
        layers: which of its layers to keep, by number from 0, in rising order.
        share: use the parameters of ``model`` themselves instead of copies (self-speculation).

    Raises:
        PeftlabError: no layer at all, a layer that is not there, one named twice or out of order, or a model
            without one stack of layers.
    """
    stack = layer_stack(model)
    count = len(stack)
    if not layers:
        raise PeftlabError("layers: none named; a draft needs at least one")
    missing = [i for i in layers if not 0 <= i < count]
    if missing:
        raise PeftlabError(f"layers: no layer {missing[0]}; {type(model).__name__} has 0 to {count - 1}")
    if list(layers) != sorted(set(layers)):
        raise PeftlabError(f"layers: {list(layers)} is not a rising list of distinct layers")
    memo: dict[int, object] = {id(p): p for p in model.parameters()} if share else {}
    # The copy finds the stack made already, so that the layers left out are never copied.
    memo[id(stack)] = nn.ModuleList(copy.deepcopy(stack[i], memo) for i in layers)
    draft = copy.deepcopy(model, memo)
    _renumber(draft, layers)
    return draft


def layer_stack(model: PreTrainedModel) -> nn.ModuleList:
    """Return the one list of layers of a language model.

    Raises:
        PeftlabError: there is none with as many layers as the configuration says, or more than one.
    """
    if model.config.is_encoder_decoder:
        raise PeftlabError(f"{type(model).__name__} is an encoder-decoder model: it is not cut to some of its layers")
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(stacks) != 1:
        raise PeftlabError(f"{type(model).__name__}: found {len(stacks)} stacks of {count} layers instead of one")
    return stacks[0]


def _renumber(draft: PreTrainedModel, layers: Sequence[int]) -> None:
    config = draft.config.get_text_config(decoder=True)
    config.num_hidden_layers = len(layers)
    for name, value in list(vars(config).items()):
        if name.endswith("layer_types") and isinstance(value, list):
            setattr(config, name, [value[i] for i in layers])
    for number, layer in enumerate(layer_stack(draft)):
        for module in layer.modules():
            if "layer_idx" in vars(module):
                vars(module)["layer_idx"] = number
