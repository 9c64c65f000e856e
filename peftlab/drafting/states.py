"""What draft training reads of a language model: hidden states, the LM head, and some of its layers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from peftlab.errors import PeftlabError
from peftlab.models.pretrained import eval_mode
from peftlab.untyped import Unwrapped


def forward_hidden(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | dict[str, Tensor | None] | None,
    positions: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return the hidden states [b, n, H] of every layer; the last one is after the final norm.

    The LM head runs on one position a row only. ``checks.check_head`` verifies that the last state times the
    LM head is what the model computes.

    Args:
        model: a causal language model, wrapped by accelerate or not.
        input_ids: [b, n], padded on the right. attention_mask: [b, n], or any form that the model takes.
        positions: [b, n]; None: in order.
    """
    output = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        logits_to_keep=1,
        output_hidden_states=True,
        use_cache=False,
        **({} if positions is None else {"position_ids": positions}),
    )
    return output.hidden_states


def last_hidden(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return the states [b, n, H] that the LM head reads, after the final norm; see ``forward_hidden``.

    Args:
        model, input_ids, attention_mask: as for ``forward_hidden``; both tensors [b, n].
    """
    return forward_hidden(model, input_ids, attention_mask)[-1]


def unwrapped(model: nn.Module) -> Unwrapped:
    """Return the module inside the one that accelerate wraps it in, or ``model`` itself."""
    return getattr(model, "module", model)


def logits_of(states: Tensor, head: Tensor) -> Tensor:
    """Return the product of states [..., H] and a head [V, H] in the head's dtype: [..., V].

    In mixed precision accelerate gives the states of a 16-bit model in fp32, and blocks that train in fp32 on such a
    model may share its LM head.

    Args:
        states: [..., H]. head: [V, H].
    """
    return F.linear(states.to(head.dtype), head)


def head_weight(model: nn.Module) -> Tensor:
    """Return the LM head's weight [V, H].

    Raises:
        PeftlabError: the head has a bias, or there is none.
    """
    bare = unwrapped(model)
    head = bare.get_output_embeddings()
    name = type(bare).__name__
    if head is None:
        raise PeftlabError(f"{name} has no LM head; load a causal language model")
    if getattr(head, "bias", None) is not None:
        raise PeftlabError(f"{name}: its LM head has a bias, which draft training does not support")
    return head.weight


def input_embedding(model: PreTrainedModel) -> Tensor:
    """Return the embeddings of a model's tokens, [V, D]."""
    module = model.get_input_embeddings()
    assert isinstance(module, nn.Module)
    return module.get_parameter("weight")


@torch.no_grad()
def frozen_hidden(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return ``last_hidden`` [b, n, H] without a graph, in eval mode; the model's mode is restored afterwards.

    Args:
        model, input_ids, attention_mask: as for ``forward_hidden``; both tensors [b, n].
    """
    with eval_mode(model):
        return last_hidden(model, input_ids, attention_mask)


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
