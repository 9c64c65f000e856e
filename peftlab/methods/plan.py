"""A method's plan for a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn


@dataclass
class Plan:
    """What a method would change in a model, decided before anything is touched.

    Attributes:
        replace: name of a leaf module to the function that makes its replacement, which shares the leaf's parameters;
            the function must not change the leaf.
        train: names of the model's own parameters that are to be trained in place.
    """

    replace: dict[str, Callable[[nn.Module], nn.Module]] = field(default_factory=dict)
    train: list[str] = field(default_factory=list)
