"""The task head of a model: what its task class adds to the pretrained base model."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from peftlab.errors import PeftlabError
from peftlab.methods.leaf import Adapted
from peftlab.methods.targets import inside, match
from peftlab.models.plain import PlainModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def task_head(model: nn.Module) -> list[str]:
    """Return the task head: the modules, and single parameters, that the task class adds to its base model.

    A parameter counts as added if the base class (``AutoModel``'s for the configuration) does not have it. Where there
    is no base class, or the task class is listed as its own (``ParakeetForCTC``), it is each parameter outside the
    pretrained models within the model: the body, an encoder, a backbone.

    A model with output embeddings (a language model) has no task head: its LM head belongs to the body. Nor has a
    class of transformers that is not called ``<Model>For<Task>``.
    """
    if getattr(model, "get_output_embeddings", lambda: None)() is not None:
        return []
    of_a_method = {
        f"{name}.{added}" for name, leaf in model.named_modules() if isinstance(leaf, Adapted) for added in leaf.added
    }
    names = [name for name, _ in model.named_parameters() if of_a_method.isdisjoint(_prefixes(name))]
    body = _pretrained(model, names)
    mixed = {prefix for name in body for prefix in _prefixes(name)}
    heads = (next(prefix for prefix in _prefixes(name) if prefix not in mixed) for name in names if name not in body)
    return list(dict.fromkeys(heads))


def trained_whole(model: nn.Module, modules_to_save: list[str] | None, *, head: bool = True) -> list[str]:
    """Return the names of what is trained whole: the task head (if ``head``) and ``modules_to_save``."""
    names = task_head(model) if head else []
    if modules_to_save:
        every = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
        names += [n for n in match(every, modules_to_save, what="modules_to_save") if n not in names]
    return names


def parameters_under(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return the names of all parameters that are, or are below, one of ``names``, in the model's order.

    Raises:
        PeftlabError: a module has no parameter but those that it shares with others, which are not named.
    """
    wanted = set(names)
    parameters = dict(model.named_parameters())
    found = {name: wanted.intersection(_prefixes(name)) for name in parameters}
    for name in wanted.difference(*found.values()):
        own = list(model.get_submodule(name).parameters())
        shared = next((other for other, p in parameters.items() if any(p is q for q in own)), None)
        if shared is not None and not found[shared]:
            raise PeftlabError(
                f"modules_to_save: all weights of {name} are those of {shared.rpartition('.')[0]} (tied); "
                f"name {shared.rpartition('.')[0]}, which trains both"
            )
    return [name for name, under in found.items() if under]


def _pretrained(model: nn.Module, names: list[str]) -> set[str]:
    """Return those of the parameters ``names`` that belong to the pretrained base model."""
    kind, prefix = type(model), getattr(model, "base_model_prefix", "")
    bare = not re.search("For[A-Z]", kind.__name__)
    if issubclass(kind, PlainModel):
        return set(names) if bare else {name for name in names if inside(name, [prefix])}
    from transformers import PreTrainedModel

    base = _base_class(model)
    if bare and (kind is base or kind.__module__.startswith("transformers.")):
        return set(names)
    prefix = prefix if isinstance(model._modules.get(prefix), nn.Module) else ""
    nested = [name for name, module in model.named_modules() if name and isinstance(module, PreTrainedModel)]
    known = _parameters_of(base, model) if base is not None and kind is not base else set()
    if not known:
        bodies = [prefix] if prefix else nested
        return {name for name in names if inside(name, bodies)} if bodies else set(names)
    body = next((name for name, module in model.named_modules() if base and isinstance(module, base)), prefix)
    others = [name for name in nested if not (body and (inside(name, [body]) or inside(body, [name])))]
    start = f"{body}." if body else ""
    return {
        name for name in names if (name.startswith(start) and name.removeprefix(start) in known) or inside(name, others)
    }


def _base_class(model: nn.Module) -> type[PreTrainedModel] | None:
    from transformers import MODEL_MAPPING

    kind: type = type(getattr(model, "config", None))
    found = MODEL_MAPPING.get(kind, None)  # a tuple where a configuration has several
    return found[0] if isinstance(found, tuple) else found


def _parameters_of(base: type[PreTrainedModel], model: nn.Module) -> set[str]:
    """Return the names of all parameters of the model's base class; none where it cannot be made."""
    from transformers.initialization import no_init_weights

    try:
        with torch.device("meta"), no_init_weights():
            plain = base(copy.deepcopy(getattr(model, "config")))  # noqa: B009
    except (AttributeError, ImportError, KeyError, RuntimeError, TypeError, ValueError):
        return set()
    return {name for name, _ in plain.named_parameters(remove_duplicate=False)}


def _prefixes(name: str) -> Iterator[str]:
    """Yield ``a``, ``a.b`` and ``a.b.c`` of ``a.b.c``."""
    yield from (name[: dot.start()] for dot in re.finditer(r"\.", name))
    yield name
