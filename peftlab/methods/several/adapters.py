"""The adapters of a model: one is active, the others are stored as named tensors beside their layers.

The active adapter is what was injected last or chosen by ``set_adapter``: its leaves are in the model, and exactly its
parameters require a gradient. Every other one is out of the model: of the parameter that is called ``q_proj.lora_A``
while its adapter is active, the values of adapter NAME are called ``q_proj.lora_A.NAME`` while it is not. They are part
of the state dict and move with the model; what has no values of its own there computes as the base model does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.methods.config import MethodConfig
from peftlab.methods.leaf import Adapted, added_parameters, base_leaf, exchange, like_adapted
from peftlab.methods.saving import save_adapters, save_models

ModelT = TypeVar("ModelT", bound=nn.Module)
DEFAULT = "default"  # the name of an adapter that was given none, as in peft
BASE = "__base__"  # the base model among the adapters of a batch's rows, as in peft
_ACTIVE = "peftlab_injection"
_OTHERS = "peftlab_others"
_CHANGING = "peftlab_changing"


@dataclass
class Injection:
    """What was done to a model; an attribute of the model, so that it is copied and pickled along.

    Attributes:
        config: the method's configuration.
        replaced: names of the leaves that were replaced.
        originals: the base's values of parameters that the adapter changes in place, on the CPU.
        was_trainable: names of the parameters that required a gradient before.
        carried: names of those in ``originals`` that do not train: the adapter contains other values than the base.
        name: the adapter's name.
    """

    config: MethodConfig
    replaced: list[str]
    originals: dict[str, Tensor]
    was_trainable: list[str]
    carried: tuple[str, ...] = ()
    name: str = DEFAULT


@dataclass
class Stored:
    """An adapter that is not active.

    Attributes:
        injection: what is injected when it is active.
        leaves: its adapted leaves by name. Only what they add to the base's is used.
        values: its values of the model's own parameters that it changes, by name.
        trains: names of the parameters that require a gradient when it is active.
    """

    injection: Injection
    leaves: dict[str, nn.Module]
    values: dict[str, nn.Parameter | None]
    trains: set[str]

    def tensors(self) -> Iterator[tuple[str, dict[str, nn.Parameter | None], str]]:
        """Yield for each of its tensors the parameter's name when active, the dict that holds it and its key there."""
        for name, leaf in self.leaves.items():
            for key in added_parameters(leaf):
                owner, _, last = key.rpartition(".")
                yield f"{name}.{key}", leaf.get_submodule(owner)._parameters, last
        for name in self.values:
            yield name, self.values, name


class StoredTensors(nn.Module):
    """Tensors of the adapters that are not active, by adapter name.

    It is a child of the layer, under the name that the parameter has there when its adapter is active.
    """


def is_injected(model: nn.Module) -> bool:
    """Whether an adapter is active in ``model``."""
    return hasattr(model, _ACTIVE)


def injection_of(model: nn.Module) -> Injection:
    """Return what was injected into ``model``; raises ``PeftlabError`` if nothing was."""
    if not is_injected(model):
        name = type(model).__name__
        raise PeftlabError(f"this {name} has no injected method; call peftlab.inject(model, config) first")
    return getattr(model, _ACTIVE)


def loaded_adapters(model: nn.Module) -> list[str]:
    """Return the names of the adapters in ``model``, the active one first, then the latest that was active."""
    active = [injection_of(model).name] if is_injected(model) else []
    return active + list(reversed(_others(model)))


def set_adapter(model: nn.Module, name: str) -> None:
    """Make the adapter ``name`` the active one, in place: what computes, trains, and is saved, merged or disabled.

    Raises:
        PeftlabError: no adapter of that name, or within ``disabled`` or ``adapter_names``.
    """
    _check_loaded(model, name)
    if is_injected(model) and injection_of(model).name == name:
        return
    with rearranged(model) as others:
        put_aside(model, others)
        bring_back(model, others.pop(name))


def delete_adapter(model: nn.Module, name: str) -> None:
    """Take the adapter ``name`` out of the model, in place; its values are lost.

    If it is the active one, the one that was active before it becomes active; if it is the only one, ``model`` is
    the base model afterwards, as after ``remove``.

    Raises:
        PeftlabError: no adapter of that name, or within ``disabled`` or ``adapter_names``.
    """
    _check_loaded(model, name)
    with rearranged(model) as others:
        if name in others:
            del others[name]
            return
        take_out(model)
        if others:
            bring_back(model, others.popitem()[1])


@contextmanager
def only(model: ModelT, name: str | None = None) -> Iterator[ModelT]:
    """Within the block the adapter ``name`` (default: the active one) is active, and the model has no other tensors."""
    before = injection_of(model).name
    name = before if name is None else name
    _check_loaded(model, name)
    with rearranged(model) as others:
        if name != before:
            put_aside(model, others)
            bring_back(model, others[name])
        try:
            yield model
        finally:
            if name != before:
                put_aside(model, {})
                bring_back(model, others.pop(before))


@contextmanager
def beside(model: nn.Module, name: str) -> Iterator[None]:
    """Within the block an adapter called ``name`` can be injected: the others are put aside, and back after an error.

    Raises:
        PeftlabError: not a name, or one that is taken.
    """
    _check_name(name)
    if name in loaded_adapters(model):
        here = next(i for i in _injections(model) if i.name == name)
        raise PeftlabError(
            f"the model holds a {here.config.name} injection already (adapter {name}); "
            "name another, or peftlab.remove(model) takes it out, peftlab.merge(model) folds it in"
        )
    with rearranged(model) as others:
        before = injection_of(model).name if is_injected(model) else None
        put_aside(model, others)
        try:
            yield
        except BaseException:
            if before is not None:
                bring_back(model, others.pop(before))
            raise


@contextmanager
def aside(model: nn.Module) -> Iterator[dict[str, Stored]]:
    """Within the block ``model`` is the base model; yields its adapters by name, the active one included."""
    with rearranged(model) as others:
        active = injection_of(model).name if is_injected(model) else None
        put_aside(model, others)
        try:
            yield others
        finally:
            if active is not None:
                bring_back(model, others.pop(active))


@contextmanager
def rearranged(model: nn.Module) -> Iterator[dict[str, Stored]]:
    """Within the block the stored adapters are those yielded, to be changed, and have no tensors in the model."""
    others = _others(model)
    leaves = {name: model.get_submodule(name) for injection in _injections(model) for name in injection.replaced}
    if hasattr(model, _CHANGING) or any(isinstance(leaf, Adapted) and not leaf.enabled for leaf in leaves.values()):
        raise PeftlabError("adapters cannot be changed or saved within peftlab.disabled or peftlab.adapter_names")
    refuse_patched(leaves)
    _hide(model, others)
    setattr(model, _CHANGING, True)
    try:
        yield others
    finally:
        delattr(model, _CHANGING)
        vars(model).pop(_OTHERS, None)
        if others:
            setattr(model, _OTHERS, others)
        _show(model, others)


def put_aside(model: nn.Module, others: dict[str, Stored]) -> None:
    """Store the active adapter, if there is one, in ``others``: ``model`` is the base model afterwards."""
    if not is_injected(model):
        return
    injection = injection_of(model)
    leaves = {name: model.get_submodule(name) for name in injection.replaced}
    values: dict[str, nn.Parameter | None] = {
        name: nn.Parameter(model.get_parameter(name).detach().clone(), requires_grad=False)
        for name in injection.originals
    }
    trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for leaf in leaves.values():
        for parameter in added_parameters(leaf).values():
            parameter.requires_grad_(False)
    take_out(model)
    others[injection.name] = Stored(injection, leaves, values, trains)


def bring_back(model: nn.Module, stored: Stored) -> None:
    """Make a stored adapter the active one of ``model``, which has none."""
    exchange(model, {name: like_adapted(leaf, model.get_submodule(name)) for name, leaf in stored.leaves.items()})
    with torch.no_grad():
        for name, value in stored.values.items():
            assert value is not None
            model.get_parameter(name).copy_(value)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in stored.trains)
    attach(model, stored.injection)


def take_out(model: ModelT) -> ModelT:
    """Take the active adapter out: ``model`` is the base model afterwards, bit for bit."""
    injection = injection_of(model)
    swap(model, injection.originals)
    exchange(model, {name: base_leaf(model.get_submodule(name)) for name in injection.replaced})
    return detach(model, injection)


def swap(model: nn.Module, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Set parameters to ``values`` and return what they were, on the CPU."""
    before = {}
    with torch.no_grad():
        for name, value in values.items():
            parameter = model.get_parameter(name)
            before[name] = on_cpu(parameter)
            parameter.copy_(value)
    return before


def on_cpu(parameter: nn.Parameter) -> Tensor:
    """Return a copy of a parameter's values, on the CPU; of a parameter on the meta device, there."""
    held = parameter.detach()
    return held.clone() if held.is_meta else held.to("cpu", copy=True)


def attach(model: nn.Module, injection: Injection) -> None:
    """Record ``injection`` on the model, whose ``save_pretrained`` writes the adapter from now on."""
    setattr(model, _ACTIVE, injection)
    save_adapters(model)


def detach(model: ModelT, injection: Injection) -> ModelT:
    """Undo ``attach``: the parameters that required a gradient before the injection do so again."""
    trainable = set(injection.was_trainable)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trainable)
    delattr(model, _ACTIVE)
    save_models(model)
    return model


def refuse_patched(leaves: Mapping[str, nn.Module]) -> None:
    """Raise ``PeftlabError`` if one of the leaves, by name, has a forward that would go on computing what it did."""
    patched = next((name for name, leaf in leaves.items() if "forward" in vars(leaf)), None)
    if patched is not None:
        raise PeftlabError(
            f"{patched} has a forward of its own (accelerate's dispatch sets one), which would hide the adapter; "
            "inject, switch and remove adapters before the model is dispatched"
        )


def refuse_others(model: nn.Module, what: str) -> None:
    """Raise ``PeftlabError`` if the model has adapters beside the active one, whose base ``what`` would change."""
    others = list(_others(model))
    if others:
        raise PeftlabError(
            f"{what}: the adapters {', '.join(others)} are in the model too, and belong to its present weights; "
            "peftlab.delete_adapter takes them out, peftlab.add_weighted_adapter makes one adapter of several"
        )


def _others(model: nn.Module) -> dict[str, Stored]:
    return getattr(model, _OTHERS, {})


def _injections(model: nn.Module) -> list[Injection]:
    active = [injection_of(model)] if is_injected(model) else []
    return active + [stored.injection for stored in _others(model).values()]


def _check_loaded(model: nn.Module, name: str) -> None:
    names = loaded_adapters(model)
    if name not in names:
        here = f"it has {', '.join(names)}" if names else "it has none"
        raise PeftlabError(f"this {type(model).__name__} has no adapter {name!r}: {here}{did_you_mean(name, names)}")


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name or "." in name or name == BASE:
        raise PeftlabError(f"an adapter cannot be called {name!r}: a name has no dot, is not empty and not {BASE}")


def _show(model: nn.Module, others: dict[str, Stored]) -> None:
    """Put the tensors of stored adapters into the model, each under the parameter's name and the adapter's."""
    for adapter, stored in others.items():
        for name, owner, key in stored.tensors():
            place = model
            for part in name.split("."):
                # By registry: an attribute of this name may be the active adapter's parameter.
                inner = place._modules.get(part)
                if inner is None:
                    inner = place._modules[part] = StoredTensors()
                place = inner
            place._parameters[adapter] = owner[key]


def _hide(model: nn.Module, others: dict[str, Stored]) -> None:
    """Undo ``_show``; where the model's tensors have been exchanged since (``to_empty``), keep the new ones."""
    found: dict[tuple[str, str], nn.Parameter | None] = {}
    for prefix, module in list(model.named_modules()) if others else []:
        if isinstance(module, StoredTensors):
            found |= {(prefix, adapter): parameter for adapter, parameter in module._parameters.items()}
        for key in [key for key, child in module._modules.items() if isinstance(child, StoredTensors)]:
            del module._modules[key]
    for adapter, stored in others.items():
        for name, owner, key in stored.tensors():
            owner[key] = found.get((name, adapter), owner[key])
