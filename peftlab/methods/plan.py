"""A method's plan for a model, and how a leaf module is exchanged for its adapted form and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn


@dataclass
class Plan:
    """What a method would change in a model, decided before anything is touched.

    Attributes:
        replace: name of a leaf module to the function that makes its replacement. The function shares the
            leaf's parameters and must not change the leaf.
        train: names of parameters the model has already that are to be trained.
    """

    replace: dict[str, Callable[[nn.Module], nn.Module]] = field(default_factory=dict)
    train: list[str] = field(default_factory=list)
