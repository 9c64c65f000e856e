"""A check of each trainable parameter's first two steps: every one must learn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from functools import partial

import torch
from torch import Tensor, nn

from peftlab.errors import PeftlabError
from peftlab.methods.injection import trainable_parameters
from peftlab.training.distributed import whole

STEPS = 2  # LoRA's A has no gradient in the first step, while B is zero
LEAST_LR = 1e-6  # below this, a step of AdamW may be rounded away in a weight near 1


class FirstStepsCheck:
    """Watches each parameter's first two optimiser steps whose learning rate is above ``LEAST_LR``.

    After its second one a trainable parameter must have had a gradient, all its gradients must have been finite, and
    in each module group (the parameters of one parent module) at least one parameter must have changed. Where layers
    rest in some steps, theirs do not count, and the check ends when every layer has had its two.

    Args:
        gradients_kept: False where gradients are gone after the step (ZeRO): then each is checked in a hook.
        moves: False where a small step moves a weight only sometimes (stochastic rounding): gradients alone count.
    """

    def __init__(self, model: nn.Module, *, gradients_kept: bool = True, moves: bool = True) -> None:
        self._moves = moves
        self._waiting = trainable_parameters(model)
        self._start = {name: whole(parameter).clone() for name, parameter in self._waiting.items()}
        self._reached: set[str] = set()
        self._broken: set[str] = set()
        self._steps: Counter[str] = Counter()
        self._hooks = [
            parameter.register_hook(partial(self._record_gradient, name))
            for name, parameter in self._waiting.items()
            if not gradients_kept
        ]

    def record_step(self, lr: float, resting: Collection[str] = ()) -> None:
        """Record a step just taken with learning rate ``lr``; call it before the gradients are cleared.

        Args:
            resting: names of the parameters that did not train in this step.
        """
        if lr < LEAST_LR:
            return
        for name, parameter in self._waiting.items():
            self._steps[name] += name not in resting
            if parameter.grad is not None:
                self._record_gradient(name, parameter.grad)

    def _record_gradient(self, name: str, gradient: Tensor) -> None:
        self._reached.add(name)
        if not torch.isfinite(whole(gradient)).all():
            self._broken.add(name)

    def done(self) -> bool:
        """Return whether all have had both steps; raise ``PeftlabError`` naming the parameters that do not learn."""
        due = {name: parameter for name, parameter in self._waiting.items() if self._steps[name] >= STEPS}
        unreached = [name for name in due if name not in self._reached]
        moved = {_group(n) for n, p in due.items() if not torch.equal(whole(p), self._start[n])}
        stuck = sorted({_group(name) for name in due} - moved) if self._moves else []
        for what, names in (
            ("have no gradient", unreached),
            ("have gradients that are not finite", sorted(self._broken & due.keys())),
            ("have not changed", stuck),
        ):
            if names:
                more = f" and {len(names) - 5} more" if len(names) > 5 else ""
                raise PeftlabError(f"after {STEPS} steps, trainable parameters {what}: {', '.join(names[:5])}{more}")
        for name in due:
            del self._waiting[name], self._start[name]
        if not self._waiting:
            for hook in self._hooks:
                hook.remove()
        return not self._waiting


def _group(name: str) -> str:
    return name.rpartition(".")[0]
