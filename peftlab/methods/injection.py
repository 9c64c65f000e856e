"""Injecting a method into a model, disabling it for a while, and removing it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.methods import table
from peftlab.methods.adapter_set import (
    DEFAULT,
    Injection,
    attach,
    injection_of,
    on_cpu,
    rearranged,
    refuse_patched,
    remove_active,
    room_for_adapter,
    swap,
)
from peftlab.methods.adapter_set import is_injected as is_injected  # asked for beside ``inject``
from peftlab.methods.config import MethodConfig
from peftlab.methods.leaf import Adapted, base_leaf, exchange
from peftlab.methods.table import config_class, own_config
from peftlab.models.quantised import elements, keep_layout

ModelT = TypeVar("ModelT", bound=nn.Module)


class PeftConfig(Protocol):
    """A configuration object of peft's, such as its ``LoraConfig``."""

    @property
    def peft_type(self) -> object: ...


def inject(model: ModelT, config: MethodConfig | PeftConfig, *, name: str = DEFAULT) -> ModelT:
    """Put ``config``'s method into ``model`` in place and return it; only the adapter requires a gradient.

    The model keeps its class, its forward and the names of its parameters. The instance has one new attribute, until
    ``merge`` or ``remove``: its ``save_pretrained`` writes the adapter directory (``SavePretrained``). Injection is
    all or nothing: on an error the model is as it was. A model on the meta device is planned and counted like any
    other.

    Args:
        config: of a method; or peft's ``LoraConfig``, whose task type says whether the task head trains.
        name: the adapter's. A model can have several; this one becomes the active one.

    Raises:
        PeftlabError: the model has an adapter of that name, a pattern matches nothing, nothing would train, or
            what would train in place is stored in 4 or 8 bits.
    """
    with room_for_adapter(model, name):
        _inject(model, own_config(config), name)
    return model


def _inject(model: nn.Module, config: MethodConfig, adapter: str) -> None:
    keep_layout(model)
    plan = table.plan(model, config)
    if not plan.replace and not plan.train:
        raise PeftlabError(f"method {config.name} would train no parameter of {type(model).__name__}")
    refuse_patched({name: model.get_submodule(name) for name in plan.replace})
    parameters = dict(model.named_parameters())
    _refuse_codes(config, {name: parameters[name] for name in plan.train})
    adapted = {name: make(model.get_submodule(name)) for name, make in plan.replace.items()}
    originals = {name: on_cpu(parameters[name]) for name in plan.train}
    was_trainable = [name for name, parameter in parameters.items() if parameter.requires_grad]
    # Nothing above has touched the model; nothing below can fail.
    model.requires_grad_(False)
    for name in plan.train:
        parameters[name].requires_grad_(True)
    exchange(model, adapted)
    attach(model, Injection(config, list(adapted), originals, was_trainable, name=adapter))


def reconfigure(model: nn.Module, config: MethodConfig) -> None:
    """Give an injected model another configuration, in place; its trained parameters remain the same objects.

    An adapter that was trained with another α or dropout then computes, and is saved, with its own configuration.

    Raises:
        PeftlabError: the configuration trains other parameters than the model's; the model is as it was.
    """
    if config != injection_of(model).config:
        with rearranged(model):
            _reconfigure(model, config)


def _reconfigure(model: nn.Module, config: MethodConfig) -> None:
    injection = injection_of(model)
    before = {name: model.get_submodule(name) for name in injection.replaced}
    with base_leaves(model):
        plan = table.plan(model, config)
        after = {name: make(model.get_submodule(name)) for name, make in plan.replace.items()}
        _same_parameters(before, after, set(injection.originals) - set(injection.carried), set(plan.train))
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
    """Give frozen parameters the values that the adapter contains, in place of those of an earlier call.

    As long as the adapter is in the model: ``remove`` and ``disabled`` restore the base's.
    """
    injection = injection_of(model)
    swap(model, {name: injection.originals.pop(name) for name in injection.carried})
    injection.originals |= swap(model, values)
    injection.carried = tuple(values)
    for name in injection.replaced:
        leaf = model.get_submodule(name)
        if isinstance(leaf, Adapted) and any(f"{name}.{key}" in values for key, _ in leaf.named_parameters()):
            leaf.update_start()


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
        target_modules: name suffixes, one full-match regular expression, or ``"all-linear"``; None for the
            architecture's query and value projections.
        options: the other fields of ``peftlab.LoraConfig``.

    Raises:
        PeftlabError: a value out of range, a target that matches nothing, or a model injected already.
    """
    return inject(
        model,
        make_config(
            "lora",
            r=r,
            lora_alpha=lora_alpha,
            lora_dropout=lora_dropout,
            target_modules=target_modules,
            **options,
        ),
    )


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
    try:
        return kind(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        hint = did_you_mean(key, kind.model_fields) if first["type"] == "extra_forbidden" else ""
        unknown = first["type"] == "extra_forbidden"
        reason = "unknown field" if unknown else first["msg"].removeprefix("Value error, ")
        raise PeftlabError(": ".join(filter(None, (method, key, reason))) + hint) from None


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the adapter: exactly the parameters that require a gradient, by name, in the model's order."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return (trainable, all) parameter counts; shared parameters count once, 4-bit ones by their weights."""
    sizes = [(elements(parameter), parameter.requires_grad) for parameter in model.parameters()]
    return sum(n for n, trains in sizes if trains), sum(n for n, _ in sizes)


def print_trainable_parameters(model: nn.Module) -> None:
    """Print trainable and total parameter counts and their ratio on one line."""
    trainable, total = count_parameters(model)
    print(f"trainable params: {trainable:,} || all params: {total:,} || trainable%: {100 * trainable / total:.4f}")


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Within the block ``model`` is the base model: parameters trained in place have their old values too."""
    injection = injection_of(model)
    leaves = [module for module in model.modules() if isinstance(module, Adapted)]
    trained = swap(model, injection.originals)
    for leaf in leaves:
        leaf.enabled = False
    try:
        yield
    finally:
        for leaf in leaves:
            vars(leaf).pop("enabled", None)
        swap(model, trained)


def remove(model: ModelT) -> ModelT:
    """Remove every adapter in place and return the base model, bit for bit; the adapters are lost."""
    injection_of(model)
    with rearranged(model) as others:
        others.clear()
        return remove_active(model)


def _same_parameters(
    before: dict[str, nn.Module], after: dict[str, nn.Module], trained: set[str], train: set[str]
) -> None:
    shapes = [
        {f"{name}.{key}": p.shape for name, leaf in leaves.items() for key, p in leaf.named_parameters()}
        | dict.fromkeys(in_place, torch.Size())
        for leaves, in_place in ((before, trained), (after, train))
    ]
    differ = sorted(key for key in shapes[0].keys() | shapes[1].keys() if shapes[0].get(key) != shapes[1].get(key))
    if differ:
        raise PeftlabError(
            f"another configuration for this model would change what it trains, {differ[0]} for one; "
            "peftlab.remove(model) takes the injection out first"
        )


def _refuse_codes(config: MethodConfig, trained: dict[str, nn.Parameter]) -> None:
    for name, parameter in trained.items():
        if not parameter.is_floating_point():
            raise PeftlabError(
                f"method {config.name} would train {name} in place, which is stored in 4 or 8 bits: codes have no "
                "gradient. Load the base, or this module (llm_int8_skip_modules), in 16 or 32 bits, or choose lora"
            )
