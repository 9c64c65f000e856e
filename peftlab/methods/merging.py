"""Folding an injection into the model's own weights in memory, and undoing that."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor, nn

from peftlab.errors import PeftlabError
from peftlab.methods.base import Adapted, addition, base_leaf, exchange, refuse_unfoldable
from peftlab.methods.config import METHODS
from peftlab.methods.inject import (
    Injection,
    attach,
    detach,
    injection_of,
    is_injected,
    refuse_compiled,
    refuse_others,
)
from peftlab.models.quantised import is_coded

ModelT = TypeVar("ModelT", bound=nn.Module)
_ATTRIBUTE = "peftlab_merged"  # of a model that was merged with keep=True


@dataclass
class _Merged:
    """What ``unmerge`` needs; an attribute of the model, so that it is copied and pickled along.

    Attributes:
        injection: what was injected.
        adapted: the adapted leaves by name, which contain W0 and the adapter.
        tied: the configuration's ``tie_word_embeddings`` before the merge; None where it has none.
        shared: the parameters that were untied, by name, as they were.
    """

    injection: Injection
    adapted: dict[str, nn.Module]
    tied: bool | None
    shared: dict[str, nn.Parameter]


def merge(model: ModelT, *, keep: bool = False) -> ModelT:
    """Fold the injection into the model's own weights, in place.

    W0 becomes W0 + (α/r)·B·A, product and sum in fp32 and rounded once to W0's dtype; parameters trained in
    place keep their trained values. The model is a plain one afterwards and runs at the base model's speed.

    Args:
        keep: keep W0 and the adapter beside the merged weights, for ``unmerge``; otherwise merging is final.

    Raises:
        PeftlabError: the method or one of its leaves has no linear fold, a weight to fold into is quantised, or the
            model has other adapters too.
    """
    refuse_compiled(model)
    injection = injection_of(model)
    refuse_others(model, "merge")
    if keep and hasattr(model, _ATTRIBUTE):
        raise PeftlabError("an adapter is merged with keep=True already; peftlab.unmerge(model) first")
    if not METHODS[injection.config.name].folds:
        raise PeftlabError(
            f"method {injection.config.name} has no linear fold; keep the adapter and load it with peftlab.load_adapter"
        )
    for name in injection.replaced:
        for key, weight in model.get_submodule(name).named_parameters(recurse=False):
            if type(weight.data) is not Tensor or not weight.is_floating_point() or is_coded(weight):
                kind = type(weight.data if type(weight.data) is not Tensor else weight).__name__
                raise PeftlabError(
                    f"{name}.{key} is quantised ({kind}): a sum would be rounded to its few levels. Save the adapter; "
                    "`peftlab merge ADAPTER --base REF` folds it into full weights on disk"
                )
    leaves = {name: module for name in injection.replaced if isinstance(module := model.get_submodule(name), Adapted)}
    refuse_unfoldable(leaves)
    plain: dict[str, nn.Module] = {}
    untied = False
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    alike = Counter(addition(leaf) for leaf in leaves.values())
    made: dict[tuple[tuple[int, ...], str], nn.Parameter] = {}  # leaves that fold alike stay tied
    for name, leaf in leaves.items():
        plain[name] = base_leaf(leaf)
        group = addition(leaf)
        for key, folded in leaf.fold().items():
            before = leaf.get_parameter(key)
            tied = uses[id(before)] > alike[group]  # to another module, which must keep its value
            if tied or keep:
                new = nn.Parameter(folded, requires_grad=before.requires_grad)
                setattr(plain[name], key, made.setdefault((group, key), new))
            else:
                before.data.copy_(folded)
            untied |= tied
    tied_before = getattr(getattr(model, "config", None), "tie_word_embeddings", None)
    adapted = {name: model.get_submodule(name) for name in plain}
    exchange(model, plain)
    shared: dict[str, nn.Parameter] = {}
    if untied:
        _set_tied(model, False)
        shared = _untie(model)
    vars(model).pop(_ATTRIBUTE, None)  # what an earlier merge kept does not lead back any more
    if keep:
        setattr(model, _ATTRIBUTE, _Merged(injection, adapted, tied_before, shared))
    return detach(model, injection)


def unmerge(model: ModelT) -> ModelT:
    """Undo ``merge(model, keep=True)`` in place: W0 bit for bit, and the adapter beside it again.

    Raises:
        PeftlabError: nothing was merged with ``keep``, or something else was injected since.
    """
    if not hasattr(model, _ATTRIBUTE):
        raise PeftlabError(f"nothing to unmerge: this {type(model).__name__} was not merged with keep=True")
    if is_injected(model):
        raise PeftlabError("something was injected after the merge; call peftlab.remove(model) first")
    merged: _Merged = getattr(model, _ATTRIBUTE)
    for name, leaf in merged.adapted.items():  # it was not moved with the model
        like, kept = (next(module.parameters()) for module in (model.get_submodule(name), leaf))
        if like.dtype != kept.dtype:
            leaf.to(like.dtype)
        leaf.to(like.device)
    for name, parameter in merged.shared.items():
        like = model.get_parameter(name)
        parameter.data = parameter.data.to(like.device, like.dtype)
        _put(model, name, parameter)
    exchange(model, merged.adapted)
    if merged.tied is not None:
        _set_tied(model, merged.tied)
    train = set(merged.injection.originals) - set(merged.injection.frozen)
    for name, parameter in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        own = isinstance(module, Adapted) and name.rpartition(".")[2] in module.added
        parameter.requires_grad_(own or name in train)
    attach(model, merged.injection)
    delattr(model, _ATTRIBUTE)
    return model


def _set_tied(model: nn.Module, tied: bool) -> None:
    config = getattr(model, "config", None)
    if getattr(config, "tie_word_embeddings", tied) != tied:
        config.tie_word_embeddings = tied  # type: ignore[union-attr]


def _untie(model: nn.Module) -> dict[str, nn.Parameter]:
    """Give each tied parameter values of its own, and return the shared parameters by the names they had.

    transformers ties all pairs of a model or none, and saves a parameter that two modules share under one name.
    """
    pairs = (getattr(model, "all_tied_weights_keys", None) or {}).items()
    shared = {alias: model.get_parameter(alias) for alias, _ in pairs}
    shared = {alias: shared[alias] for alias, name in pairs if shared[alias] is model.get_parameter(name)}
    for alias, parameter in shared.items():
        _put(model, alias, nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad))
    return shared


def _put(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, last = name.rpartition(".")
    model.get_submodule(owner)._parameters[last] = parameter
