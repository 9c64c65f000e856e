"""The adapters of a model: one is active, the others are stored as named tensors beside their layers.

The active adapter is what was injected last or chosen by ``set_adapter``: its leaves are in the model, and exactly its
parameters require a gradient. Every other one is out of the model: of the parameter that is called ``q_proj.lora_A``
while its adapter is active, the values of adapter NAME are called ``q_proj.lora_A.NAME`` while it is not. They are part
of the state dict and move with the model; what has no values of its own there computes as the base model does.

A batch can use a different adapter in each row (``adapter_names``): within that block each leaf that any of the
adapters changes is exchanged for one that computes every row as that row's adapter does; the rest of the model, and all
blocks, see one batch.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import TypeVar

import torch
from torch import Tensor, nn

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.methods.config import MethodConfig
from peftlab.methods.leaf import (
    Adapted,
    AnyLeaf,
    BatchRows,
    Variant,
    adapted_class,
    added_parameters,
    base_leaf,
    exchange,
    like_adapted,
    recast,
)
from peftlab.registry import resolve
from peftlab.untyped import Attributes, Function

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
        store_active(model, others)
        activate_stored(model, others.pop(name))


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
        remove_active(model)
        if others:
            activate_stored(model, others.popitem()[1])


@contextmanager
def active_only(model: ModelT, name: str | None = None) -> Iterator[ModelT]:
    """Within the block the adapter ``name`` (default: the active one) is active, and the model has no other tensors."""
    before = injection_of(model).name
    name = before if name is None else name
    _check_loaded(model, name)
    with rearranged(model) as others:
        if name != before:
            store_active(model, others)
            activate_stored(model, others[name])
        try:
            yield model
        finally:
            if name != before:
                store_active(model, {})
                activate_stored(model, others.pop(before))


@contextmanager
def room_for_adapter(model: nn.Module, name: str) -> Iterator[None]:
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
        store_active(model, others)
        try:
            yield
        except BaseException:
            if before is not None:
                activate_stored(model, others.pop(before))
            raise


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[dict[str, Stored]]:
    """Within the block ``model`` is the base model; yields its adapters by name, the active one included."""
    with rearranged(model) as others:
        active = injection_of(model).name if is_injected(model) else None
        store_active(model, others)
        try:
            yield others
        finally:
            if active is not None:
                activate_stored(model, others.pop(active))


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


def store_active(model: nn.Module, others: dict[str, Stored]) -> None:
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
    remove_active(model)
    others[injection.name] = Stored(injection, leaves, values, trains)


def activate_stored(model: nn.Module, stored: Stored) -> None:
    """Make a stored adapter the active one of ``model``, which has none."""
    exchange(model, {name: like_adapted(leaf, model.get_submodule(name)) for name, leaf in stored.leaves.items()})
    with torch.no_grad():
        for name, value in stored.values.items():
            assert value is not None
            model.get_parameter(name).copy_(value)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in stored.trains)
    attach(model, stored.injection)


def remove_active(model: ModelT) -> ModelT:
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


_GENERATE = "generate"


class MixedLeaf(AnyLeaf):
    """A leaf that computes each row of its input by the variant that the row's adapter has.

    Attributes:
        variants: the leaf in each form that occurs, the base's own included, with the numbers of its adapters.
        rows: which adapter each row uses.
        name: the leaf's name in the model.
    """

    added = ("variants", "rows", "name")
    variants: list[Variant]
    rows: BatchRows
    name: str

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        if not self.enabled:
            return super().forward(*args, **kwargs)
        first = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        if isinstance(self, nn.Embedding) and first.shape[0] == 1:  # the positions, which all rows share
            first = first.expand(self.rows.batch, *first.shape[1:])
            args, kwargs = (first,), {}
        length = self.rows.length(first, self.name)
        result: Tensor | None = None
        for leaf, numbers in self.variants:
            index = self.rows.index(length, numbers, first.device)
            chosen = functools.partial(_chosen, index=index, length=length)
            part = leaf.forward(*map(chosen, args), **{key: chosen(value) for key, value in kwargs.items()})
            if not isinstance(part, Tensor) or part.shape[0] != first[index].shape[0]:
                raise PeftlabError(
                    f"adapter_names: {self.name} ({type(leaf).__name__}) does not return one tensor with a row for "
                    "each row it was given"
                )
            if result is None:
                result = part.new_empty(length, *part.shape[1:])
            result[index] = part
        assert result is not None
        return result


def _chosen(value: object, index: Tensor | slice[int, int, int], length: int) -> object:
    return value[index] if isinstance(value, Tensor) and value.ndim and value.shape[0] == length else value


@contextmanager
def adapter_names(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Within the block row i of a batch is computed with the adapter ``names[i]``, in ``forward`` and ``generate``.

    The output of a row is what the model gives with that adapter alone. A linear map with LoRA takes one product with
    W0 for all rows; rows of one adapter that are next to each other are not copied. Where ``generate`` repeats each row
    (beams, ``num_return_sequences``), the copies use the row's adapter. For inference: the model must be in eval mode.

    Args:
        names: one name per row, ``"__base__"`` for the base model.

    Raises:
        PeftlabError: a name that is not loaded; on entry, if two adapters cannot be mixed in a module, which is
            named; in ``forward``, if the batch has another number of rows, or a module's input is not made of them.
    """
    known = loaded_adapters(model)
    names = [names] if isinstance(names, str) else list(names)
    unknown = next((name for name in names if name not in known and name != BASE), None)
    if unknown is not None or not names:
        here = ", ".join([*known, BASE])
        what = "names no row" if unknown is None else f"no adapter {unknown!r}{did_you_mean(unknown, known)}"
        raise PeftlabError(f"adapter_names: {what}; the model has {here}")
    rows = BatchRows(names)
    with without_adapters(model) as adapters:
        mixed = _mixed(model, {name: adapters[name] for name in rows.adapters if name != BASE}, rows)
        plain = {name: model.get_submodule(name) for name in mixed}
        hook = model.register_forward_pre_hook(rows.called, with_kwargs=True)
        exchange(model, mixed)
        try:
            with _generating(model, rows):
                yield
        finally:
            exchange(model, plain)
            hook.remove()


@contextmanager
def _generating(model: nn.Module, rows: BatchRows) -> Iterator[None]:
    """Within the block ``model.generate`` tells ``rows`` how often it repeats each row."""
    if not hasattr(type(model), _GENERATE):
        yield
        return
    before = vars(model).get(_GENERATE)
    generate: Function[object] = getattr(model, _GENERATE)

    def repeating(*args: object, **kwargs: object) -> object:
        options: Attributes = kwargs
        config = options.get("generation_config") or model.generation_config
        counts = (options.get(key, getattr(config, key, None)) for key in ("num_beams", "num_return_sequences"))
        rows.repeats = max(count or 1 for count in counts)
        try:
            return generate(*args, **kwargs)
        finally:
            rows.repeats = 1

    setattr(model, _GENERATE, functools.wraps(generate)(repeating))
    try:
        yield
    finally:
        delattr(model, _GENERATE)
        if before is not None:
            setattr(model, _GENERATE, before)


def _mixed(model: nn.Module, adapters: Mapping[str, Stored], rows: BatchRows) -> dict[str, nn.Module]:
    """Return the leaves to put into the base ``model``, by name."""
    trained = {name: _trained_in_place(model, stored) for name, stored in adapters.items()}
    leaves = dict.fromkeys(name for a, stored in adapters.items() for name in (*stored.leaves, *trained[a]))
    mixed = {}
    for name in leaves:
        leaf = model.get_submodule(name)
        _check(model, name, leaves)
        numbers: dict[str, list[int]] = defaultdict(list)
        for number, adapter in enumerate(rows.adapters):
            differs = adapter in adapters and (name in adapters[adapter].leaves or name in trained[adapter])
            numbers[adapter if differs else BASE].append(number)
        variants: list[Variant] = []
        for adapter, mine in numbers.items():
            variant = recast(type(leaf), leaf)
            if adapter != BASE:
                if name in adapters[adapter].leaves:
                    variant = like_adapted(adapters[adapter].leaves[name], leaf)
                variant._parameters.update(trained[adapter].get(name, {}))
            variants.append((variant, tuple(mine)))
        mixed[name] = _together(leaf, name, variants, rows)
    return mixed


def _together(leaf: nn.Module, name: str, variants: list[Variant], rows: BatchRows) -> nn.Module:
    if len(variants) == 1:
        return variants[0][0]
    kind = next((type(variant) for variant, _ in variants if isinstance(variant, Adapted)), Adapted)
    made = kind.batched_variant(leaf, name, variants, rows)
    if made is not None:
        return made
    new = recast(adapted_class(MixedLeaf, type(leaf)), leaf)
    new.variants, new.rows, new.name = variants, rows, name
    return new


def _trained_in_place(model: nn.Module, stored: Stored) -> dict[str, dict[str, nn.Parameter | None]]:
    """Return an adapter's values of the model's own parameters, by module (every one that has it) and by name there."""
    values = {id(model.get_parameter(name)): value for name, value in stored.values.items()}
    found: dict[str, dict[str, nn.Parameter | None]] = {}
    for name, module in model.named_modules() if values else []:
        own = {key: values[id(p)] for key, p in module._parameters.items() if id(p) in values}
        if own:
            found[name] = own
    return found


def _check(model: nn.Module, name: str, leaves: Mapping[str, None]) -> None:
    inner = next((other for other in leaves if other.startswith(f"{name}.")), None)
    if inner is not None:
        raise PeftlabError(f"adapter_names: adapters change {name} and {inner} in it; such rows cannot share a batch")
    if re.search(r"(^|\.)experts\.\d+(\.|$)", name):
        raise PeftlabError(f"adapter_names: {name} is one expert, which receives tokens of several rows in one list")
    if not getattr(model.get_submodule(name), "batch_first", True):
        raise PeftlabError(f"adapter_names: the input of {name} is not batch first")


# A name, resolved at the call: checkpoints/ imports methods/. This is the one place that names a package above its own.
_WRITER = "peftlab.checkpoints.adapter:save_adapter"
_NAME = "save_pretrained"
# Options of transformers' that make no difference for an adapter's one small file.
_IGNORED = {"max_shard_size", "safe_serialization", "save_original_format", "save_peft_format", "token"}


class SavePretrained:
    """``save_pretrained`` of one injected model, an attribute of the instance.

    The method of the model's class would write W0 beside the adapter's parameters, and ``from_pretrained`` would load
    the base model from that without a warning. A copy or a pickle of the model has its own ``SavePretrained``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(
        self,
        save_directory: str | PathLike[str],
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        **options: object,
    ) -> None:
        """Write the adapter directory, as ``peftlab.save_adapter`` does.

        Args:
            is_main_process: False writes nothing.
            state_dict: values to write in place of the model's own, as a Trainer gathers them from many processes.
            options: transformers' other options; those that would change what is written are refused.

        Raises:
            PeftlabError: as ``save_adapter``; or an option that an adapter directory cannot honour.
        """
        refused = next((key for key, value in options.items() if value and key not in _IGNORED), None)
        if refused:
            raise PeftlabError(
                f"save_pretrained: this model contains an adapter, which is written without {refused}; "
                "peftlab.merge(model) makes it a plain model first"
            )
        if is_main_process:
            resolve(_WRITER)(self.model, save_directory, state_dict=state_dict)

    def __reduce__(self) -> tuple[type[SavePretrained], tuple[nn.Module]]:
        return SavePretrained, (self.model,)


def save_adapters(model: nn.Module) -> None:
    """Let ``model.save_pretrained`` write the adapter, where the model has such a method."""
    if hasattr(type(model), _NAME):
        setattr(model, _NAME, SavePretrained(model))


def save_models(model: nn.Module) -> None:
    """Let ``model.save_pretrained`` write the whole model, as its class does."""
    vars(model).pop(_NAME, None)
