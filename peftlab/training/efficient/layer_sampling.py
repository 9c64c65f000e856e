"""Layer-wise importance sampling (LISA, arXiv 2403.17919): in each period a few layers train, drawn at random."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from peftlab.errors import PeftlabError
from peftlab.methods.injection import trainable_parameters
from peftlab.methods.targets import inside, layer_index
from peftlab.methods.task_head import task_head
from peftlab.tasks.batches import seeded_order
from peftlab.training.config import TrainConfig

_KEY = 3  # sets these draws apart from those of the examples' order


class LayerSampling:
    """Which of an adapter's layers rest, as a pure function of seed and step.

    Attributes:
        layers: the parameters of each layer, by number and name. What belongs to no layer (the task head, embeddings)
            never rests.
    """

    def __init__(self, model: nn.Module, active: int, every: int, seed: int) -> None:
        head = task_head(model)
        self._active, self._every, self._seed = active, every, seed
        self.layers: dict[int, dict[str, nn.Parameter]] = {}
        for name, parameter in trainable_parameters(model).items():
            number = None if inside(name, head) else layer_index(name)
            if number is not None:
                self.layers.setdefault(number, {})[name] = parameter
        if active > len(self.layers):
            raise PeftlabError(f"train.layers.active: {active}, and only {len(self.layers)} layers train")

    def drawn(self, step: int) -> list[int]:
        """Return the numbers of the layers that train in ``step`` (from 0), in order."""
        order = seeded_order(len(self.layers), self._seed, step // self._every, _KEY)
        return sorted(sorted(self.layers)[i] for i in order[: self._active])

    def resting(self, step: int) -> dict[str, nn.Parameter]:
        """Return the parameters that do not train in ``step``, by name."""
        drawn = self.drawn(step)
        return {name: p for number, those in self.layers.items() if number not in drawn for name, p in those.items()}


def make_layer_sampling(model: nn.Module, settings: TrainConfig) -> LayerSampling | None:
    """Return the sampling that ``settings`` ask for; None if all layers train in every step.

    Raises:
        PeftlabError: fewer layers train than are to be active.
    """
    layers = settings.layers
    if layers is None or layers.active is None:
        return None
    return LayerSampling(model, layers.active, layers.period, settings.seed)


@contextmanager
def frozen(parameters: dict[str, nn.Parameter]) -> Iterator[None]:
    """Within the block the parameters require no gradient; outside it, what requires one is the adapter."""
    for parameter in parameters.values():
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters.values():
            parameter.requires_grad_(True)


def forget(optimiser: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> None:
    """Delete what the optimiser keeps for the parameters: a layer starts its next period with fresh averages.

    So the optimiser holds state for the active layers alone.
    """
    for parameter in parameters.values():
        optimiser.state.pop(parameter, None)
