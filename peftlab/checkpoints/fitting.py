"""An adapter's tensors and the parameters of an injected model: which is which, and that they fit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from peftlab.checkpoints.formats.peft import tied_twins
from peftlab.errors import PeftlabError, nearest
from peftlab.methods.injection import trainable_parameters


def fitted(model: nn.Module, tensors: Mapping[str, Tensor], *, source: str) -> dict[str, Tensor]:
    """Return an adapter's tensors by the parameter names of the injected ``model``.

    A module trained whole may train its own copy of tied weights, and a file may contain a tied tensor under both
    names.
    """
    trained, twins = trainable_parameters(model), tied_twins(model)
    keys: dict[str, str] = {}
    for key, tensor in tensors.items():
        module, _, last = key.rpartition(".")
        own = f"{module}.own_{last}"
        name = own if own in trained else twins.get(key, key)
        first = keys.setdefault(name, key)
        if first != key and not torch.equal(tensors[first], tensor):
            raise PeftlabError(f"{source}: {first} and {key} are one tied parameter, and their values differ")
    return {name: tensors[key] for name, key in keys.items()}


def fill(model: nn.Module, tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Copy ``tensors`` into the adapter parameters of ``model``: a bijection, or an error and no change."""
    check_fit(model, tensors, source=source)
    parameters = trainable_parameters(model)
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)


def check_fit(model: nn.Module, tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Raise ``PeftlabError`` unless ``tensors`` are those of the adapter parameters of ``model``, name by name."""
    parameters = trainable_parameters(model)
    unused = sorted(set(tensors) - set(parameters))
    unfilled = sorted(set(parameters) - set(tensors))
    if unused or unfilled:
        raise PeftlabError(
            f"{source} does not fit this model.\n"
            f"  in the file, not in the model ({len(unused)}): {_some(unused, unfilled)}\n"
            f"  in the model, not in the file ({len(unfilled)}): {_some(unfilled, unused)}"
        )
    for name, tensor in tensors.items():
        if tensor.shape != parameters[name].shape:
            raise PeftlabError(
                f"{source}: {name} has shape {tuple(tensor.shape)}, the model's has {tuple(parameters[name].shape)}"
            )


def _some(names: list[str], others: list[str], n: int = 5) -> str:
    if not names:
        return "none"
    shown = []
    for name in names[:n]:
        close = nearest(name, others, n=1)
        shown.append(f"{name} (nearest: {close[0]})" if close else name)
    return ", ".join(shown) + (f", and {len(names) - n} more" if len(names) > n else "")
