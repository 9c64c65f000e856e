"""Training mode and eval mode, module by module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def eval_mode(*models: nn.Module) -> Iterator[None]:
    """Within the block ``models`` are in eval mode; afterwards each of their modules is in the mode it was in.

    ``model.train(was_training)`` would not do: it puts modules into training mode that were kept in eval mode.
    """
    training = [module for model in models for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
