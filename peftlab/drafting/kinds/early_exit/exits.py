"""Early exits: what the LM head predicts after some of a model's layers, for any architecture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from peftlab.drafting.hidden_states import forward_hidden, head_weight
from peftlab.drafting.truncation import layer_stack, truncate
from peftlab.errors import PeftlabError
from peftlab.methods.modes import eval_mode


@dataclass(frozen=True)
class Exit:
    """What a model predicts after its first layers: LM head of ``states``.

    Attributes:
        layers: how many of the first layers run.
        final: names of the modules that take the last layer's output to the LM head: a norm, in some models
            also a projection.
    """

    layers: int
    final: tuple[str, ...]

    def states(self, model: nn.Module, hidden: Sequence[Tensor], places: Tensor) -> Tensor:
        """Return the LM head's inputs [T, H] at ``places`` [b, n] of ``hidden``, the states of every layer."""
        exited = hidden[self.layers][places]
        for name in self.final:
            exited = model.get_submodule(name)(exited)
        return exited


@torch.no_grad()
def find_exit(model: PreTrainedModel, layers: int, tolerance: float = 1e-4) -> Exit:
    """Return the exit after the first ``layers`` layers, which computes what the model cut to those layers does.

    Args:
        model: a causal language model. tolerance: allowed difference, relative to the largest logit.

    Raises:
        PeftlabError: all layers are named, or the exit computes other logits than the cut model.
    """
    name, count = type(model).__name__, len(layer_stack(model))
    if layers >= count:
        raise PeftlabError(f"draft.exits: the exit runs all {count} layers of {name}; leave out at least the last one")
    weight = head_weight(model)
    ids = torch.arange(min(16, len(weight)), device=weight.device)[None]
    with eval_mode(model):
        exit_ = Exit(layers, _final_modules(model, ids))
        hidden = forward_hidden(model, ids, torch.ones_like(ids))
        own = nn.functional.linear(exit_.states(model, hidden, ids >= 0), weight).float()
        cut = truncate(model, range(layers), share=True)(input_ids=ids, use_cache=False).logits[0].float()
    gap = float((own - cut).abs().max() / cut.abs().max().clamp_min(1e-6))
    if not gap <= tolerance:
        raise PeftlabError(
            f"draft.exits: {name} cut to {layers} layers computes other logits than its hidden state after them, "
            f"through {', '.join(exit_.final) or 'nothing'} and the LM head (off by {gap:.1e} of the largest); early "
            "exits of such models cannot be trained"
        )
    return exit_


def _final_modules(model: PreTrainedModel, ids: Tensor) -> tuple[str, ...]:
    """Return which modules a forward pass over ``ids`` calls, one on the other's output, from last layer to LM head."""
    last, head = layer_stack(model)[-1], model.get_output_embeddings()
    assert head is not None
    names: list[str] = []
    state: object = None
    running: nn.Module | None = None
    reached: object = None

    def enter(name: str, module: nn.Module, inputs: tuple[object, ...]) -> None:
        nonlocal running, reached
        if module is head:
            reached = inputs[0]
        elif running is None and inputs and _same(state, inputs[0]):
            running = module
            names.append(name)

    def leave(module: nn.Module, output: object) -> None:
        nonlocal running, state
        if module is last or module is running:
            state, running = output[0] if isinstance(output, tuple) else output, None

    inside = set(last.modules()) - {last}
    hooks = []
    for name, module in model.named_modules():
        if module in inside:
            continue
        if module is not last:
            hooks.append(module.register_forward_pre_hook(lambda m, x, name=name: enter(name, m, x)))
        hooks.append(module.register_forward_hook(lambda m, x, output: leave(m, output)))
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    if not _same(state, reached):
        raise PeftlabError(
            f"draft.exits: between the last layer and the LM head {type(model).__name__} computes something outside "
            "its modules; early exits of such models cannot be trained"
        )
    return tuple(names)


def _same(one: object, other: object) -> bool:
    """Whether both are tensors of the same numbers; models reshape on the way."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    if one.numel() != other.numel() or not one.is_floating_point():
        return False
    return torch.equal(one.flatten(), other.flatten())
