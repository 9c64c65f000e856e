"""A look at the first two steps: does every trainable parameter learn?"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from peftlab.errors import PeftlabError
from peftlab.methods.injection import trainable_parameters
from peftlab.training.sharded import whole

STEPS = 2  # LoRA's A has no gradient in the first step, while B is zero
LEAST_LR = 1e-6  # with less, a step of AdamW may be rounded away in a weight near 1


class Canary:
    """Watches the first two optimiser steps whose learning rate is above ``LEAST_LR``.

    After the second one every trainable parameter has had a gradient, all gradients were finite, and in each
    module group (the parameters of one parent module) at least one parameter has moved.

    Args:
        gradients_stay: False where the step takes the gradients away (ZeRO): each is looked at as it comes.
    """

    def __init__(self, model: nn.Module, *, gradients_stay: bool = True) -> None:
        self._parameters = trainable_parameters(model)
        self._start = {name: whole(parameter).clone() for name, parameter in self._parameters.items()}
        self._reached: set[str] = set()
        self._broken: set[str] = set()
        self._steps = 0
        self._hooks = [
            parameter.register_hook(partial(self._saw_gradient, name))
            for name, parameter in self._parameters.items()
            if not gradients_stay
        ]

    def saw_step(self, lr: float) -> None:
        """Take note of a step of learning rate ``lr`` just taken, before the gradients are cleared."""
        if lr < LEAST_LR:
            return
        self._steps += 1
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self._saw_gradient(name, parameter.grad)

    def _saw_gradient(self, name: str, gradient: Tensor) -> None:
        self._reached.add(name)
        if not torch.isfinite(whole(gradient)).all():
            self._broken.add(name)

    def done(self) -> bool:
        """Return whether the watch is over; raise ``PeftlabError`` naming what does not learn."""
        if self._steps < STEPS:
            return False
        for hook in self._hooks:
            hook.remove()
        unreached = [name for name in self._parameters if name not in self._reached]
        moved = {_group(n) for n, p in self._parameters.items() if not torch.equal(whole(p), self._start[n])}
        stuck = sorted({_group(name) for name in self._parameters} - moved)
        for what, names in (
            ("have no gradient", unreached),
            ("have gradients that are not finite", sorted(self._broken)),
            ("have not moved", stuck),
        ):
            if names:
                more = f" and {len(names) - 5} more" if len(names) > 5 else ""
                raise PeftlabError(f"after {STEPS} steps, trainable parameters {what}: {', '.join(names[:5])}{more}")
        return True


def _group(name: str) -> str:
    return name.rpartition(".")[0]
