"""A method's plan for a model, and the part of it above a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import nn

from peftlab.errors import PeftlabError
from peftlab.methods.targets import inside, layer_index


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


def from_layer(model: nn.Module, plan: Plan, first: int, whole: Iterable[str]) -> Plan:
    """Return the part of ``plan`` in the layers from number ``first`` on, and in the modules ``whole``.

    What belongs to no numbered layer (embeddings, pooler, final norm) stays as it is, so that backward ends at the
    input of layer ``first``.

    Args:
        whole: the modules that train in any case: the task head, and what ``modules_to_save`` names.

    Raises:
        PeftlabError: there is no such layer, or the method trains nothing in these layers.
    """
    whole = list(whole)
    names = [name for name, _ in model.named_parameters() if not inside(name, whole)]
    there = sorted({number for name in names if (number := layer_index(name)) is not None})
    if first not in there:
        numbers = f"there are {there[0]} to {there[-1]}" if there else "the model has no numbered layers"
        raise PeftlabError(f"train.layers.from (first_layer): no layer {first}; {numbers}")

    def trains(name: str) -> bool:
        number = layer_index(name)
        return inside(name, whole) or (number is not None and number >= first)

    part = Plan({n: make for n, make in plan.replace.items() if trains(n)}, [n for n in plan.train if trains(n)])
    if all(inside(name, whole) for name in (*part.replace, *part.train)):
        raise PeftlabError(
            f"train.layers.from (first_layer): the method trains nothing in layers {first} to {there[-1]}"
        )
    return part
