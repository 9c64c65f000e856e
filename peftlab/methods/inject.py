"""Injecting a method into a model, disabling and removing it, and switching between several adapters of one model.

One adapter is active, the others are stored as named tensors beside their layers. The active one is what was injected
last or chosen by ``set_adapter``: its leaves are in the model, and exactly its parameters require a gradient. The
leaves of every other one are out of the model. The parameter that is called ``q_proj.lora_A`` while its adapter NAME is
active is called ``q_proj.lora_A.NAME`` while it is not: part of the state dict, and moved with the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from typing import Protocol, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from peftlab.errors import PeftlabError, did_you_mean, suggest
from peftlab.methods.base import (
    Adapted,
    Plan,
    added_parameters,
    base_leaf,
    exchange,
    from_layer,
    fully_trained,
    like_adapted,
)
from peftlab.methods.config import METHODS, PEFT_IGNORED, MethodConfig, config_class, own_config
from peftlab.models.architectures import embeddings_of
from peftlab.models.quantised import elements, is_coded, keep_layout
from peftlab.registry import resolve
from peftlab.untyped import Attributes, Function

ModelT = TypeVar("ModelT", bound=nn.Module)
DEFAULT = "default"  # the name of an adapter that was given none, as in peft
BASE = "__base__"  # the base model among the adapters of a batch's rows, as in peft
# Attributes of a model: its active injection, its stored adapters by name, and whether they are being exchanged.
_ACTIVE = "peftlab_injection"
_OTHERS = "peftlab_others"
_CHANGING = "peftlab_changing"


class PeftConfig(Protocol):
    """A configuration object of peft's, such as its ``LoraConfig``."""

    @property
    def peft_type(self) -> object: ...


def inject(model: ModelT, config: MethodConfig | PeftConfig, *, name: str = DEFAULT) -> ModelT:
    """Put ``config``'s method into ``model`` in place and return it; only the adapter requires a gradient.

    The model keeps its class, its forward and the names of its parameters. The instance has two new attributes, until
    ``merge`` or ``remove``: its ``save_pretrained`` writes the adapter directory (``SavePretrained``), and its
    ``resize_token_embeddings`` refuses to lose an adapter (``ResizeTokenEmbeddings``). Injection is all or nothing: on
    an error the model is as it was. A model on the meta device is planned and counted like any other.

    Args:
        config: of a method; or peft's ``LoraConfig``, whose task type says whether the task head trains.
        name: the adapter's. A model can have several; this one becomes the active one.

    Raises:
        PeftlabError: the model has an adapter of that name, a pattern matches nothing, nothing would train, or
            what would train in place is stored in 4 or 8 bits.
    """
    if not isinstance(model, nn.Module):
        raise PeftlabError(
            f"a method is injected into a model in memory, not {model!r}: load it first, for instance by "
            "transformers' AutoModelForCausalLM.from_pretrained"
        )
    config = own_config(config)
    refuse_compiled(model)
    refuse_wrapped(model)
    with room_for_adapter(model, name):
        keep_layout(model)
        plan = plan_injection(model, config)
        if not plan.replace and not plan.train:
            raise PeftlabError(f"method {config.name} would train no parameter of {type(model).__name__}")
        modules = dict(model.named_modules(remove_duplicate=False))
        refuse_patched({leaf: modules[leaf] for leaf in plan.replace})
        parameters = dict(model.named_parameters())
        for trained in plan.train:
            if not parameters[trained].is_floating_point() or is_coded(parameters[trained]):
                raise PeftlabError(
                    f"method {config.name} would train {trained} in place, which is stored in 4 or 8 bits: codes have "
                    "no gradient. Load the base, or this module (llm_int8_skip_modules), in 16 or 32 bits, or choose "
                    "lora"
                )
        if "" in plan.replace:
            raise PeftlabError(
                f"the model is itself the {type(model).__name__} to adapt, and no module holds it; put it into one"
            )
        adapted = {leaf: make(modules[leaf]) for leaf, make in plan.replace.items()}
        originals = {trained: on_cpu(parameters[trained]) for trained in plan.train}
        originals |= {name: on_cpu(buffer) for name, buffer in buffers_of_trained(model, plan.train).items()}
        every = model.named_parameters(remove_duplicate=False)  # after a merge a shared weight may have several names
        was_trainable = [key for key, parameter in every if parameter.requires_grad]
        # Nothing above has touched the model; nothing below can fail.
        model.requires_grad_(False)
        for trained in plan.train:
            parameters[trained].requires_grad_(True)
        exchange(model, adapted)
        attach(model, Injection(config, list(adapted), originals, was_trainable, name=name))
    return model


def plan_injection(model: nn.Module, config: MethodConfig) -> Plan:
    """Return what ``config``'s method would change in ``model``, in the layers that it names; changes nothing.

    Args:
        model: without adapter. config: of any method.
    """
    plan: Plan = resolve(METHODS.find(config.name).plan)(model, config)
    if config.first_layer is None:
        return plan
    return from_layer(model, plan, config.first_layer, fully_trained(model, config.modules_to_save))


def inject_lora(
    model: ModelT,
    r: int = 8,
    lora_alpha: float = 16,
    lora_dropout: float = 0.0,
    target_modules: list[str] | str | None = None,
    **options: object,
) -> ModelT:
    """Put LoRA (arXiv 2106.09685) into ``model`` in place and return it: h = W0·x + (α/r)·B·A·x.

    Only A, B and the task head (where the model has one) require a gradient afterwards.

    Args:
        r: rank. lora_alpha: α. lora_dropout: dropout on the low-rank branch.
        target_modules: name suffixes, one full-match regular expression, ``"all-linear"`` or ``"query-value"``; None
            for all linear maps of a language model (but its head), and another model's query and value projections.
        options: the other fields of ``peftlab.LoraConfig``.

    Raises:
        PeftlabError: a value out of range, a target that matches nothing, or a model injected already.
    """
    named: Attributes = {"r": r, "lora_alpha": lora_alpha, "lora_dropout": lora_dropout}
    return inject(model, make_config("lora", **named, target_modules=target_modules, **options))


def inject_houlsby(model: ModelT, bottleneck: int | None = None, **options: object) -> ModelT:
    """Put bottleneck adapters (arXiv 1902.00751) into ``model`` in place and return it.

    y = h + W_up·f(W_down·h + b_down) + b_up after each attention and feed-forward sub-layer, before the
    residual. The adapters, all LayerNorms and the task head (where the model has one) train afterwards.

    Args:
        bottleneck: width m; default 64, or by ``reduction_factor``.
        options: the other fields of ``peftlab.HoulsbyConfig``.

    Raises:
        PeftlabError: a value out of range, an architecture that is not known, or a model injected already.
    """
    return inject(model, make_config("houlsby", bottleneck=bottleneck, **options))


def inject_bitfit(model: ModelT, biases: list[str] | str = "all", **options: object) -> ModelT:
    """Train the biases of ``model`` (arXiv 2106.10199) and its task head, in place, and return it.

    Args:
        biases: ``"all"``; ``"sparse"`` for the query's and the FFN's first bias; or name suffixes of the
            modules whose biases train.
        options: the other fields of ``peftlab.BitFitConfig``.

    Raises:
        PeftlabError: the model has no biases, or not those asked for, or it is injected already.
    """
    return inject(model, make_config("bitfit", biases=biases, **options))


def make_config(method: str, /, **fields: object) -> MethodConfig:
    """Return the configuration of a method by name; a wrong field raises ``PeftlabError``."""
    kind = config_class(method)
    for key, value in fields.items():
        if isinstance(value, MethodConfig) or hasattr(value, "peft_type"):
            raise PeftlabError(f"{method}: {key} is a {type(value).__name__}; use peftlab.inject(model, config)")
    try:
        return kind(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        key, unknown = ".".join(map(str, first["loc"])), first["type"] == "extra_forbidden"
        hint = suggest(key, kind.model_fields) if unknown else ""
        if unknown and key in PEFT_IGNORED:
            hint = ", which is not needed; peftlab.inject takes peft's LoraConfig with all its fields"
        reason = "unknown field" if unknown else first["msg"].removeprefix("Value error, ")
        raise PeftlabError(": ".join(filter(None, (method, key, reason))) + hint) from None


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the adapter: exactly the parameters that require a gradient, by name, in the model's order."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """Return what a file of the active adapter contains, by name, in the model's order.

    That is every parameter that was injected, also one that was frozen since, any other that requires a gradient, and
    the buffers of what trains whole (``buffers_of_trained``).

    Args:
        model: injected.
    """
    injection = injection_of(model)
    injected = {id(p) for name in injection.replaced for p in added_parameters(model.get_submodule(name)).values()}
    injected |= {id(tensor_of(model, name)) for name in injection.originals.keys() - set(injection.frozen)}
    # Tensors of other adapters are children of the leaves.
    injected -= {id(p) for held in model.modules() if isinstance(held, StoredTensors) for p in held.parameters()}
    tensors: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor for name, tensor in tensors if tensor.requires_grad or id(tensor) in injected}


def tensor_of(model: nn.Module, name: str) -> Tensor:
    """Return a parameter or a buffer of ``model`` by its name."""
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    tensor = module._parameters.get(last, module._buffers.get(last))
    assert tensor is not None, name
    return tensor


def buffers_of_trained(model: nn.Module, train: Iterable[str]) -> dict[str, Tensor]:
    """Return the buffers in the state dict that belong to modules whose parameters all train in place, by name.

    A BatchNorm's running statistics change with its weights. A module without parameters belongs to the next one around
    it that has some.

    Args:
        model: before injection. train: names of the parameters that train in place.
    """
    trained = {id(model.get_parameter(name)) for name in train}
    found = {}
    for name, buffer in model.named_buffers() if trained else []:
        owner, _, last = name.rpartition(".")
        if last in model.get_submodule(owner)._non_persistent_buffers_set:
            continue
        while owner and next(model.get_submodule(owner).parameters(), None) is None:
            owner = owner.rpartition(".")[0]
        below = {id(parameter) for parameter in model.get_submodule(owner).parameters()}
        if below and below <= trained:
            found[name] = buffer
    return found


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return (trainable, all) parameter counts; shared parameters count once, 4-bit ones by their weights."""
    sizes = [(elements(parameter), parameter.requires_grad) for parameter in model.parameters()]
    return sum(n for n, trains in sizes if trains), sum(n for n, _ in sizes)


def adapted_line(model: nn.Module) -> str:
    """Return which modules the active adapter is in: ``lora in 12 modules: query, value``; empty where in none."""
    if not is_injected(model):
        return ""
    injection, count = injection_of(model), len(injection_of(model).replaced)
    lasts = {name: name.rpartition(".")[2] for name in injection.replaced}
    names = sorted({name if last.isdigit() else last for name, last in lasts.items()})  # a number alone tells nothing
    return f"{injection.config.name} in {count:,} module{'s' * (count != 1)}: {', '.join(names)}" if names else ""


def print_trainable_parameters(model: nn.Module) -> None:
    """Print trainable and total parameter counts and their ratio on one line, and on another what an adapter is in."""
    trainable, total = count_parameters(model)
    print(f"trainable params: {trainable:,} || all params: {total:,} || trainable%: {100 * trainable / total:.4f}")
    if line := adapted_line(model):
        print(line)


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Within the block ``model`` is the base model: parameters trained in place have their old values too."""
    injection = injection_of(model)
    leaves = [module for module in model.modules() if isinstance(module, Adapted) and module.enabled]
    # The values come back bit for bit, so that the backward pass of what was computed before may follow.
    trained = swap(model, injection.originals, noted=False)
    for leaf in leaves:
        leaf.enabled = False
    try:
        yield
    finally:
        for leaf in leaves:
            vars(leaf).pop("enabled", None)
        swap(model, trained, noted=False)


def remove(model: ModelT) -> ModelT:
    """Remove every adapter in place and return the base model, bit for bit; the adapters are lost."""
    injection_of(model)
    with rearranged(model) as others:
        others.clear()
        return remove_active(model)


def reconfigure(model: nn.Module, config: MethodConfig) -> None:
    """Give an injected model another configuration, in place; its trained parameters remain the same objects.

    An adapter that was trained with another α or dropout then computes, and is saved, with its own configuration.

    Args:
        model: injected, with any adapter active. config: of the method that it was injected with.

    Raises:
        PeftlabError: the configuration trains other parameters than the model's; the model is as it was.
    """
    injection = injection_of(model)
    if config == injection.config:
        return
    with rearranged(model):
        before = {name: model.get_submodule(name) for name in injection.replaced}
        with base_leaves(model):
            plan = plan_injection(model, config)
            after = {name: make(model.get_submodule(name)) for name, make in plan.replace.items()}
            buffers = buffers_of_trained(model, plan.train)
        old, new = (
            {f"{name}.{key}": p.shape for name, leaf in leaves.items() for key, p in leaf.named_parameters()}
            | dict.fromkeys(in_place, torch.Size())
            for leaves, in_place in (
                (before, injection.originals.keys() - set(injection.frozen)),
                (after, {*plan.train, *buffers}),
            )
        )
        differ = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
        if differ:
            raise PeftlabError(
                f"another configuration for this model would change what it trains, {differ[0]} for one; "
                "peftlab.remove(model) takes the injection out first"
            )
        for name, leaf in after.items():
            for key, parameter in before[name].named_parameters():
                owner, _, last = key.rpartition(".")
                leaf.get_submodule(owner)._parameters[last] = parameter
        exchange(model, after)
        attach(model, replace(injection, config=config, replaced=list(after)))


@contextmanager
def base_leaves(model: nn.Module) -> Iterator[None]:
    """Within the block the leaves of ``model`` are those of its base, with the values that they have now."""
    before = {name: model.get_submodule(name) for name in injection_of(model).replaced} if is_injected(model) else {}
    exchange(model, {name: base_leaf(leaf) for name, leaf in before.items()})
    try:
        yield
    finally:
        exchange(model, before)


def set_frozen_values(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Give frozen parameters of ``model`` the values that its adapter contains, in place of those of an earlier call.

    ``remove`` and ``disabled`` restore the base's.

    Args:
        model: injected.
        values: by the parameters' names.
    """
    injection = injection_of(model)
    swap(model, {name: injection.originals.pop(name) for name in injection.frozen})
    injection.originals |= swap(model, values)
    injection.frozen = tuple(values)
    for name in injection.replaced:
        leaf = model.get_submodule(name)
        if isinstance(leaf, Adapted) and any(f"{name}.{key}" in values for key, _ in leaf.named_parameters()):
            leaf.update_start()


@dataclass
class Injection:
    """What was done to a model; an attribute of the model, so that it is copied and pickled along.

    Attributes:
        config: the method's configuration.
        replaced: names of the leaves that were replaced.
        originals: the base's values of parameters and buffers that the adapter changes in place, on the CPU.
        was_trainable: names of the parameters that required a gradient before.
        frozen: names of those in ``originals`` that do not train: the adapter contains other values than the base.
        name: the adapter's name.
    """

    config: MethodConfig
    replaced: list[str]
    originals: dict[str, Tensor]
    was_trainable: list[str]
    frozen: tuple[str, ...] = ()
    name: str = DEFAULT


@dataclass
class Stored:
    """An adapter that is not active.

    Attributes:
        injection: what is injected when it is active.
        leaves: its adapted leaves by name. Only what they add to the base's is used.
        values: its values of the model's own parameters and buffers that it changes, by name.
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
        if hasattr(model, _CHANGING):
            raise PeftlabError(f"this {name} is within peftlab.adapter_names, which computes with several adapters")
        raise PeftlabError(f"this {name} has no injected method; call peftlab.inject(model, config) first")
    return getattr(model, _ACTIVE)


def loaded_adapters(model: nn.Module) -> list[str]:
    """Return the names of the adapters in ``model``, the active one first, then the latest that was active."""
    active = [injection_of(model).name] if is_injected(model) else []
    return active + list(reversed(_others(model)))


def attach(model: nn.Module, injection: Injection) -> None:
    """Record ``injection`` on the model, whose ``save_pretrained`` writes the adapter from now on."""
    setattr(model, _ACTIVE, injection)
    for method, kind in _METHODS.items():
        if hasattr(type(model), method):
            setattr(model, method, kind(model))


def detach(model: ModelT, injection: Injection) -> ModelT:
    """Undo ``attach``: the parameters that required a gradient before the injection do so again."""
    trainable = set(injection.was_trainable)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trainable)
    delattr(model, _ACTIVE)
    for method in _METHODS:
        vars(model).pop(method, None)
    return model


def refuse_compiled(model: nn.Module) -> None:
    """Raise ``PeftlabError`` for what ``torch.compile`` returned: the model is within it, under other names."""
    if hasattr(model, "_orig_mod"):
        raise PeftlabError("this is what torch.compile returned; give the model that it was given (model._orig_mod)")


_WRAPPERS = {
    ("peft.peft_model", "PeftModel"),
    ("peft.tuners.tuners_utils", "BaseTunerLayer"),
    ("peft.utils.other", "AuxiliaryTrainingWrapper"),
}
"""What peft puts into a model or around it, by module and name, as peft may be absent."""


def refuse_wrapped(model: nn.Module) -> None:
    """Raise ``PeftlabError`` if peft has put adapters into the model: another would act on them."""
    kinds = {(kind.__module__, kind.__name__) for module in model.modules() for kind in type(module).__mro__}
    if kinds & _WRAPPERS:
        raise PeftlabError(
            "this model is wrapped by peft already: give the base model (of a PeftModel, model.unload()), or load the "
            "adapter that peft saved by peftlab.load_adapter"
        )


def refuse_patched(leaves: Mapping[str, nn.Module]) -> None:
    """Raise ``PeftlabError`` if one of the leaves, by name, has a forward that would go on computing what it did."""
    patched = next((name for name, leaf in leaves.items() if "forward" in vars(leaf)), None)
    if patched is not None:
        raise PeftlabError(
            f"{patched} has a forward of its own (accelerate's dispatch sets one), which would hide the adapter; "
            "inject, switch and remove adapters before the model is dispatched"
        )


def refuse_others(model: nn.Module, what: str) -> None:
    """Raise ``PeftlabError`` if the model has adapters beside the active one, whose base ``what`` would change.

    Args:
        model: with an active adapter. what: the operation, for the message.
    """
    others = list(_others(model))
    if others:
        raise PeftlabError(
            f"{what}: the adapters {', '.join(others)} are in the model too, and belong to its present weights; "
            "peftlab.delete_adapter takes them out, peftlab.add_weighted_adapter makes one adapter of several"
        )


def swap(model: nn.Module, values: dict[str, Tensor], *, noted: bool = True) -> dict[str, Tensor]:
    """Set parameters and buffers to ``values`` and return what they were, on the CPU.

    Args:
        model: changed in place. values: by the parameters' and buffers' names.
        noted: whether autograd refuses the backward pass of what was computed with the values before.
    """
    before = {}
    with torch.no_grad():
        for name, value in values.items():
            tensor = tensor_of(model, name)
            before[name] = on_cpu(tensor)
            (tensor if noted else tensor.data).copy_(value)
    return before


def on_cpu(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor's values, on the CPU; of a tensor on the meta device, there."""
    held = tensor.detach()
    return held.clone() if held.is_meta else held.to("cpu", copy=True)


def set_adapter(model: nn.Module, name: str) -> None:
    """Make the adapter ``name`` the active one, in place: what computes, trains, and is saved, merged or disabled.

    Args:
        model: with one adapter or more. name: of one of them (``loaded_adapters``).

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

    Args:
        model: with one adapter or more. name: of one of them (``loaded_adapters``).

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
    """Within the block the adapter ``name`` (default: the active one) is active, and the model has no other tensors.

    Args:
        model: with an active adapter. name: of a loaded adapter.
    """
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

    Args:
        model: with any number of adapters. name: of the one to come.

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
    refuse_compiled(model)
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
        name: nn.Parameter(tensor_of(model, name).detach().clone(), requires_grad=False) for name in injection.originals
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
            tensor_of(model, name).copy_(value)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in stored.trains)
    attach(model, stored.injection)


def remove_active(model: ModelT) -> ModelT:
    """Take the active adapter out: ``model`` is the base model afterwards, bit for bit."""
    injection = injection_of(model)
    swap(model, injection.originals)
    exchange(model, {name: base_leaf(model.get_submodule(name)) for name in injection.replaced})
    return detach(model, injection)


def _others(model: nn.Module) -> dict[str, Stored]:
    return getattr(model, _OTHERS, {})


def _injections(model: nn.Module) -> list[Injection]:
    active = [injection_of(model)] if is_injected(model) else []
    return active + [stored.injection for stored in _others(model).values()]


def _check_loaded(model: nn.Module, name: str) -> None:
    names = loaded_adapters(model)
    if not isinstance(name, str):
        several = isinstance(name, (list, tuple, set))
        hint = "; one is active at a time, and peftlab.add_weighted_adapter makes one of several" if several else ""
        raise PeftlabError(f"the name of an adapter is a string ({', '.join(names) or 'none'}), not {name!r}{hint}")
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


# A name, resolved at the call: checkpoints/ imports methods/. This is the one place that names a package above its own.
_WRITER = "peftlab.checkpoints.adapter:save_adapter"
# Options of transformers' that make no difference for an adapter's one small file.
_HARMLESS = {
    "max_shard_size", "safe_serialization", "save_function", "save_original_format", "save_peft_format", "token",
}  # fmt: skip


class _InstanceMethod:
    """A method of one injected model, an attribute of the instance; a copy or a pickle of the model has its own."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __reduce__(self) -> tuple[type[_InstanceMethod], tuple[nn.Module]]:
        return type(self), (self.model,)


class SavePretrained(_InstanceMethod):
    """``save_pretrained`` of an injected model.

    The method of the model's class would write W0 beside the adapter's parameters, and ``from_pretrained`` would load
    the base model from that without a warning.
    """

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
            options: transformers' other options; those that would change what is written are refused. As there,
                ``save_function`` is not called: safetensors writes the file.

        Raises:
            PeftlabError: as ``save_adapter``; or an option that an adapter directory cannot honour.
        """
        refused = next((key for key, value in options.items() if value and key not in _HARMLESS), None)
        if refused:
            raise PeftlabError(
                f"save_pretrained: this model contains an adapter, which is written without {refused}; "
                "peftlab.merge(model) makes it a plain model first"
            )
        if is_main_process:
            resolve(_WRITER)(self.model, save_directory, state_dict=state_dict)


class ResizeTokenEmbeddings(_InstanceMethod):
    """``resize_token_embeddings`` of an injected model.

    The method of the model's class puts plain layers in place of the embeddings and of the output layer.
    """

    def __call__(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *args: object, **options: object
    ) -> nn.Module:
        """Resize as the model's class does, and return the input embeddings.

        Args:
            new_num_tokens: None or the present number changes nothing. pad_to_multiple_of: as in transformers.

        Raises:
            PeftlabError: an adapter is in a layer that would be replaced.
        """
        resize: Function[nn.Module] = getattr(type(self.model), "resize_token_embeddings")  # noqa: B009
        layers = [layer for layer in embeddings_of(self.model) if layer is not None]
        found = next(_changed_layers(self.model, layers), None)
        if found is None:
            return resize(self.model, new_num_tokens, pad_to_multiple_of, *args, **options)
        present = [layer.get_parameter("weight").shape[0] for layer in layers]
        wanted = present[0] if new_num_tokens is None else new_num_tokens
        wanted += -wanted % (pad_to_multiple_of or 1)
        if present != [wanted] * len(present):
            raise PeftlabError(
                f"resize_token_embeddings({wanted}): the adapter {found[0]} changes {found[1]}, which has {present[0]} "
                "tokens and would be replaced by a plain layer; resize before the injection, or after peftlab.merge "
                "or peftlab.remove"
            )
        return layers[0]


def _changed_layers(model: nn.Module, layers: Iterable[nn.Module]) -> Iterator[tuple[str, str]]:
    """Yield the name of each adapter that changes one of ``layers``, or a layer tied to it, and what it changes."""
    held = {id(parameter) for layer in layers for parameter in layer.parameters()}
    for injection in _injections(model):
        for name in injection.replaced:
            if any(id(parameter) in held for parameter in model.get_submodule(name).parameters()):
                yield injection.name, name
        for name in injection.originals:
            if id(tensor_of(model, name)) in held:
                yield injection.name, name


_METHODS = {"save_pretrained": SavePretrained, "resize_token_embeddings": ResizeTokenEmbeddings}
