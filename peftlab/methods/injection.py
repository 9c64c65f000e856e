"""Injecting a method into a model, and taking it out again: switched off, removed, or folded in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.methods import table
from peftlab.methods.config import MethodConfig
from peftlab.methods.leaf import Adapted, base_leaf
from peftlab.methods.saving import save_adapters, save_models
from peftlab.methods.table import METHODS, config_class

ModelT = TypeVar("ModelT", bound=nn.Module)
_ATTRIBUTE = "peftlab_injection"
_KEPT = "peftlab_kept"  # what unmerge needs


@dataclass
class Injection:
    """What was done to a model; kept on it, so that it is copied and pickled along.

    Attributes:
        config: the method's configuration.
        replaced: names of the leaves that were exchanged.
        originals: the starting values of parameters that are trained in place, on the CPU.
        was_trainable: names of all parameters that required a gradient before.
    """

    config: MethodConfig
    replaced: list[str]
    originals: dict[str, Tensor]
    was_trainable: list[str]


def inject(model: ModelT, config: MethodConfig) -> ModelT:
    """Put ``config``'s method into ``model`` in place and return it; only the adapter requires a gradient.

    The model keeps its class, its forward and the names of its parameters. The instance has one new attribute, until
    ``merge`` or ``remove``: its ``save_pretrained`` writes the adapter directory (``SavePretrained``). Injection is
    all or nothing: on an error the model is as it was. A model on the meta device is planned and counted like any
    other.

    Raises:
        PeftlabError: the model holds an injection already, a pattern matches nothing, nothing would train, or
            the model's weights are quantised by bitsandbytes.
    """
    if is_injected(model):
        raise PeftlabError(
            f"the model holds a {injection_of(model).config.name} injection already; "
            "peftlab.remove(model) takes it out, peftlab.merge(model) folds it in"
        )
    _refuse_bitsandbytes(model)
    plan = table.plan(model, config)
    if not plan.replace and not plan.train:
        raise PeftlabError(f"method {config.name} would train no parameter of {type(model).__name__}")
    patched = [name for name in plan.replace if "forward" in vars(model.get_submodule(name))]
    if patched:
        raise PeftlabError(
            f"{patched[0]} has a forward of its own (accelerate's dispatch sets one), which would hide the "
            "adapter; inject before the model is dispatched"
        )
    parameters = dict(model.named_parameters())
    adapted = {name: make(model.get_submodule(name)) for name, make in plan.replace.items()}
    originals = {name: _copied(parameters[name]) for name in plan.train}
    was_trainable = [name for name, parameter in parameters.items() if parameter.requires_grad]
    # Nothing above has touched the model; nothing below can fail.
    model.requires_grad_(False)
    for name in plan.train:
        parameters[name].requires_grad_(True)
    _exchange(model, adapted)
    _hold(model, Injection(config, list(adapted), originals, was_trainable))
    return model


def reconfigure(model: nn.Module, config: MethodConfig) -> None:
    """Give an injected model another configuration, in place; its trained parameters stay the objects they are.

    So an adapter trained with another α or dropout computes, and is saved, as its own configuration says.

    Raises:
        PeftlabError: the configuration trains other parameters than the model's; the model is as it was.
    """
    held = injection_of(model)
    if config == held.config:
        return
    before = {name: model.get_submodule(name) for name in held.replaced}
    _exchange(model, {name: base_leaf(leaf) for name, leaf in before.items()})
    try:
        plan = table.plan(model, config)
        after = {name: make(model.get_submodule(name)) for name, make in plan.replace.items()}
        _same_parameters(before, after, set(held.originals), set(plan.train))
    except PeftlabError:
        _exchange(model, before)
        raise
    for name, leaf in after.items():
        for key, parameter in before[name].named_parameters():
            owner, _, last = key.rpartition(".")
            leaf.get_submodule(owner)._parameters[last] = parameter
    _exchange(model, after)
    _hold(model, replace(held, config=config, replaced=list(after)))


def inject_lora(
    model: ModelT,
    r: int = 8,
    lora_alpha: float = 16,
    lora_dropout: float = 0.0,
    target_modules: list[str] | str | None = None,
    **options: Any,
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


def inject_houlsby(model: ModelT, bottleneck: int | None = None, **options: Any) -> ModelT:
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


def inject_bitfit(model: ModelT, biases: list[str] | str = "all", **options: Any) -> ModelT:
    """Train the biases of ``model`` (arXiv 2106.10199) and its task head, in place, and return it.

    Args:
        biases: ``"all"``; ``"sparse"`` for the query's and the FFN's first bias; or name suffixes of the
            modules whose biases train.
        options: the other fields of ``peftlab.BitFitConfig``.

    Raises:
        PeftlabError: the model has no biases, or not those asked for, or it is injected already.
    """
    return inject(model, make_config("bitfit", biases=biases, **options))


def make_config(method: str, /, **fields: Any) -> MethodConfig:
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


def is_injected(model: nn.Module) -> bool:
    """Whether ``model`` holds an injection."""
    return hasattr(model, _ATTRIBUTE)


def injection_of(model: nn.Module) -> Injection:
    """Return what was injected into ``model``; raises ``PeftlabError`` if nothing was."""
    if not is_injected(model):
        raise PeftlabError(f"this {type(model).__name__} holds no injection; call peftlab.inject(model, config) first")
    return getattr(model, _ATTRIBUTE)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the adapter: exactly the parameters that require a gradient, by name, in the model's order."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return (trainable, all) parameter counts; shared parameters count once."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(n for n, trains in sizes if trains), sum(n for n, _ in sizes)


def print_trainable_parameters(model: nn.Module) -> None:
    """Print trainable and total parameter counts and their ratio on one line."""
    trainable, total = count_parameters(model)
    print(f"trainable params: {trainable:,} || all params: {total:,} || trainable%: {100 * trainable / total:.4f}")


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Within the block ``model`` computes what the base model does; parameters trained in place too."""
    held = injection_of(model)
    leaves = [module for module in model.modules() if isinstance(module, Adapted)]
    trained = _swap(model, held.originals)
    for leaf in leaves:
        leaf.enabled = False
    try:
        yield
    finally:
        for leaf in leaves:
            leaf.enabled = True
        _swap(model, trained)


def remove(model: ModelT) -> ModelT:
    """Take the injection out in place and for good: the base model again, bit for bit."""
    held = injection_of(model)
    _swap(model, held.originals)
    _exchange(model, {name: base_leaf(model.get_submodule(name)) for name in held.replaced})
    return _forget(model, held)


def merge(model: ModelT, *, keep: bool = False) -> ModelT:
    """Fold the injection into the model's own weights, in place.

    W0 becomes W0 + (α/r)·B·A, product and sum in fp32 and rounded once to W0's dtype; parameters trained in
    place stay as trained. The model is a plain one afterwards, at the base model's speed.

    Args:
        keep: keep W0 and the adapter beside the merged weights, for ``unmerge``; else this is for good.

    Raises:
        PeftlabError: the method has no linear fold, or a weight to fold into is quantised.
    """
    held = injection_of(model)
    if not METHODS[held.config.name].folds:
        raise PeftlabError(
            f"method {held.config.name} has no linear fold; keep the adapter and load it with peftlab.load_adapter"
        )
    for name in held.replaced:
        for key, weight in model.get_submodule(name).named_parameters(recurse=False):
            if type(weight.data) is not Tensor:
                raise PeftlabError(
                    f"{name}.{key} is quantised ({type(weight.data).__name__}): dequantise the base first"
                )
    plain: dict[str, nn.Module] = {}
    untied = False
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    for name in held.replaced:
        leaf = model.get_submodule(name)
        assert isinstance(leaf, Adapted)
        plain[name] = base_leaf(leaf)
        for key, folded in leaf.fold().items():
            before = leaf.get_parameter(key)
            tied = uses[id(before)] > 1  # to another module, which keeps the value it has
            if tied or keep:
                setattr(plain[name], key, nn.Parameter(folded, requires_grad=before.requires_grad))
            else:
                before.data.copy_(folded)
            untied |= tied
    tie = getattr(getattr(model, "config", None), "tie_word_embeddings", None)
    adapted = {name: model.get_submodule(name) for name in plain}
    _exchange(model, plain)
    twins: dict[str, nn.Parameter] = {}
    if untied:
        _tie(model, False)
        twins = _part(model)
    if keep:
        setattr(model, _KEPT, (held, adapted, tie, twins))
    return _forget(model, held)


def unmerge(model: ModelT) -> ModelT:
    """Undo ``merge(model, keep=True)`` in place: W0 bit for bit, and the adapter beside it as before.

    Raises:
        PeftlabError: nothing was merged with ``keep``, or something else was injected since.
    """
    if not hasattr(model, _KEPT):
        raise PeftlabError(f"nothing to unmerge: this {type(model).__name__} was not merged with keep=True")
    if is_injected(model):
        raise PeftlabError("something was injected after the merge; peftlab.remove(model) takes it out first")
    held, adapted, tied, twins = getattr(model, _KEPT)
    for name, parameter in twins.items():
        _put(model, name, parameter)
    _exchange(model, adapted)
    if tied is not None:
        _tie(model, tied)
    train = set(held.originals)
    for name, parameter in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        own = isinstance(module, Adapted) and name.rpartition(".")[2] in module.added
        parameter.requires_grad_(own or name in train)
    _hold(model, held)
    delattr(model, _KEPT)
    return model


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


def _refuse_bitsandbytes(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if any(kind.__module__.partition(".")[0] == "bitsandbytes" for kind in type(module).__mro__):
            raise PeftlabError(
                f"{name} is a {type(module).__name__} of bitsandbytes, whose 4- and 8-bit weights are not supported; "
                "load the model without quantization_config, or quantise it with torchao (int8)"
            )


def _swap(model: nn.Module, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Set parameters to ``values`` and return what they were, on the CPU."""
    before = {}
    with torch.no_grad():
        for name, value in values.items():
            parameter = model.get_parameter(name)
            before[name] = _copied(parameter)
            parameter.copy_(value)
    return before


def _copied(parameter: nn.Parameter) -> Tensor:
    held = parameter.detach()
    return held.clone() if held.is_meta else held.to("cpu", copy=True)


def _exchange(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    """Put each module in place of the one of that name, under every name that one has."""
    new = {id(model.get_submodule(name)): module for name, module in modules.items()}
    for parent in list(model.modules()):
        for child_name, child in parent._modules.items():
            if id(child) in new:
                parent._modules[child_name] = new[id(child)]


def _tie(model: nn.Module, tied: bool) -> None:
    config = getattr(model, "config", None)
    if getattr(config, "tie_word_embeddings", tied) != tied:
        config.tie_word_embeddings = tied  # type: ignore[union-attr]


def _hold(model: nn.Module, held: Injection) -> None:
    setattr(model, _ATTRIBUTE, held)
    save_adapters(model)


def _part(model: nn.Module) -> dict[str, nn.Parameter]:
    """Give each tied parameter values of its own, and return what it shared, by name.

    transformers ties all pairs of a model or none, and saves a parameter that two modules share under one name.
    """
    pairs = (getattr(model, "all_tied_weights_keys", None) or {}).items()
    twins = {twin: model.get_parameter(twin) for twin, name in pairs}
    twins = {twin: twins[twin] for twin, name in pairs if twins[twin] is model.get_parameter(name)}
    for name, parameter in twins.items():
        _put(model, name, nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad))
    return twins


def _put(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, last = name.rpartition(".")
    model.get_submodule(owner)._parameters[last] = parameter


def _forget(model: ModelT, held: Injection) -> ModelT:
    trainable = set(held.was_trainable)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trainable)
    delattr(model, _ATTRIBUTE)
    save_models(model)
    return model
