"""Training a module whole whose weights others share, without changing the others: a copy of its own is trained."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torch import Tensor, nn

from peftlab.methods.leaf import FOLDING, AnyLeaf, Folding, adapted_class, recast
from peftlab.methods.targets import inside


class OwnCopy(AnyLeaf):
    """A leaf that computes with ``own_<name>``, its trained copy of each parameter ``<name>`` that others share.

    Attributes:
        shared: names of those parameters; they stay W0, which the other modules use.
    """

    shared: tuple[str, ...]

    @property
    def added(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of what the adapted form has beside the base's."""
        return (*(f"own_{name}" for name in self.shared), "shared")

    def forward(self, *args: object, **kwargs: object) -> object:
        forward = super().forward
        if not self.enabled:
            return forward(*args, **kwargs)
        all_of_it = self._parameters
        self._parameters = {**all_of_it, **{name: all_of_it[f"own_{name}"] for name in self.shared}}
        try:
            return forward(*args, **kwargs)
        finally:
            self._parameters = all_of_it

    def fold(self, how: Folding = FOLDING) -> dict[str, Tensor]:
        return {name: getattr(self, f"own_{name}").detach().clone() for name in self.shared}


def shared_outside(model: nn.Module, modules: Iterable[str]) -> dict[str, list[str]]:
    """Return the leaves below ``modules`` that hold parameters of modules elsewhere, with the names of those."""
    here = dict(model.named_modules())
    users: dict[int, list[str]] = defaultdict(list)
    for name, module in here.items():
        for parameter in module._parameters.values():
            if parameter is not None:
                users[id(parameter)].append(name)
    found: dict[str, list[str]] = {}
    for container in modules:
        if container not in here:  # a parameter of a head, not a module
            continue
        for name, leaf in here[container].named_modules(prefix=container):
            keys = [
                key
                for key, parameter in leaf._parameters.items()
                if parameter is not None and not all(inside(user, [container]) for user in users[id(parameter)])
            ]
            if keys:
                found[name] = keys
    return found


def with_own_copy(leaf: nn.Module, shared: list[str]) -> nn.Module:
    """Return ``leaf`` with a copy of its own of the parameters named ``shared``."""
    new = recast(adapted_class(OwnCopy, type(leaf)), leaf)
    new.shared = tuple(shared)
    for name in shared:
        new.register_parameter(f"own_{name}", nn.Parameter(getattr(leaf, name).detach().clone()))
    return new
