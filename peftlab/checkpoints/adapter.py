"""Adapter directories: the trained part of a model.

A directory contains ``adapter_config.json`` and ``adapter_model.safetensors``. LoRA is written in peft's format, so
that peft and its consumers read it; the other methods use the model's parameter names. The header of the safetensors
file has, under ``peftlab``, the method and a description of the base model.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from peftlab.checkpoints.formats.adapterhub import is_adapterhub, read_adapterhub
from peftlab.checkpoints.formats.loralib import read_loralib
from peftlab.checkpoints.formats.peft import adapter_tensors, tied_twins, to_peft_config
from peftlab.checkpoints.formats.peft_reading import read_peft
from peftlab.checkpoints.formats.peft_settling import changed_embeddings, divided, settled
from peftlab.checkpoints.io.pickles import read_pickle
from peftlab.checkpoints.io.tensorfiles import read_tensors, write_tensors
from peftlab.errors import PeftlabError, about, nearest
from peftlab.files import parse_json, read_object, replacing, write_json
from peftlab.methods.config import MethodConfig
from peftlab.methods.injection import (
    as_base,
    carry,
    inject,
    injection_of,
    is_injected,
    make_config,
    reconfigure,
    remove,
    trainable_parameters,
)
from peftlab.methods.lora.config import LoraConfig
from peftlab.methods.lora.fold import one_thread
from peftlab.methods.table import METHODS
from peftlab.models.pretrained import describe

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"  # as peft wrote it before safetensors, and still does on request
_TRAINED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

ModelT = TypeVar("ModelT", bound=nn.Module)


@dataclass(frozen=True)
class Adapter:
    """An adapter as read from disk.

    Attributes:
        config: the method's configuration.
        tensors: the trained tensors, named as the injected model's parameters.
        base: what identifies the base model (``describe``); empty for a foreign adapter.
        base_reference: the base model's reference, if the adapter names one.
        task_type: peft's name of the task, if the adapter has one.
        notes: what its user should know.
    """

    config: MethodConfig
    tensors: dict[str, Tensor]
    base: dict[str, Any] = field(default_factory=dict)
    base_reference: str | None = None
    task_type: str | None = None
    notes: tuple[str, ...] = ()


def save_adapter(
    model: nn.Module,
    directory: str | PathLike[str],
    *,
    base: str | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write the adapter of an injected model to ``directory`` and return it.

    Args:
        base: reference of the base model to record; default: where the model was loaded from.
        state_dict: values to write, by the model's parameter names, in place of the model's own (gathered from
            many processes); it may contain more.

    Raises:
        PeftlabError: nothing is injected, the model is on the meta device, or ``state_dict`` lacks a parameter.
    """
    if state_dict is not None:
        with _with_values(model, state_dict):
            return save_adapter(model, directory, base=base)
    directory = Path(directory)
    injection = injection_of(model)
    tensors = {name: _whole(parameter) for name, parameter in trainable_parameters(model).items()}
    on_meta = next((name for name, tensor in tensors.items() if tensor.is_meta), None)
    if on_meta:
        raise PeftlabError(f"{on_meta} is on the meta device and has no values to save")
    reference = base or getattr(getattr(model, "config", None), "_name_or_path", None) or None
    header = {
        "method": injection.config.model_dump(),
        "base": describe(model),
        "base_model_name_or_path": reference,
    }
    if isinstance(injection.config, LoraConfig):
        config = to_peft_config(model, injection, reference)
        tensors = {key: _whole(tensor) for key, tensor in adapter_tensors(model, injection).items()}
    else:
        config = {"library": "peftlab", **header}
    with replacing(directory / WEIGHTS_FILE) as temporary:
        write_tensors(temporary, tensors, {"peftlab": json.dumps(header, default=str)})
    write_json(directory / CONFIG_FILE, json.loads(json.dumps(config, default=str)))
    return directory


def read_adapter(source: str | Path, *, lora_alpha: float | None = None, allow_nonfinite: bool = False) -> Adapter:
    """Read an adapter: a directory that peftlab, peft or AdapterHub wrote, or a loralib state dict.

    Args:
        source: the directory, a run directory, or loralib's file.
        lora_alpha: α of a loralib file, which does not contain it.
        allow_nonfinite: accept NaN and infinity.

    Raises:
        PeftlabError: a file is missing or damaged, a key is unknown, a value has a wrong type, or a tensor is
            not floating-point or not finite.
    """
    adapter = _read(Path(source), lora_alpha)
    for name, tensor in adapter.tensors.items():
        if tensor.dtype not in _TRAINED:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise PeftlabError(f"{source}: {name} has {kind} values; trained weights are floating-point")
    if not allow_nonfinite:
        _refuse_nonfinite(adapter.tensors, Path(source))
    return adapter


def _read(path: Path, lora_alpha: float | None) -> Adapter:
    if path.is_file():
        config, tensors = read_loralib(path, lora_alpha)
        return Adapter(config, tensors)
    if (path / "adapter" / CONFIG_FILE).exists():
        path = path / "adapter"
    if not (path / CONFIG_FILE).exists():
        raise PeftlabError(f"{path}: not an adapter (it has no {CONFIG_FILE})")
    raw = read_config(path / CONFIG_FILE)
    if is_adapterhub(raw):
        config, tensors = read_adapterhub(path, raw)
        return Adapter(config, tensors)
    weights = path / WEIGHTS_FILE
    if not weights.exists() and (path / PICKLE_FILE).exists():
        weights = path / PICKLE_FILE
    tensors, header = (read_pickle(weights), {}) if weights.suffix == ".bin" else read_tensors(weights)
    base = base_of(header, weights)
    notes: tuple[str, ...] = ()
    if "peft_type" in raw:
        theirs = read_peft(raw, tensors, path / CONFIG_FILE, weights)
        config, tensors, notes = theirs.config, theirs.tensors, theirs.notes
    else:
        config = _our_config(raw, path / CONFIG_FILE)
    if said := config.mismatch({name: tensor.shape for name, tensor in tensors.items()}):
        raise PeftlabError(f"{path / CONFIG_FILE} does not fit {weights.name}: {said}")
    return Adapter(config, tensors, base, raw.get("base_model_name_or_path"), raw.get("task_type"), notes)


def read_config(path: Path) -> dict[str, Any]:
    """Return an ``adapter_config.json``: an object whose base model and task type are strings."""
    raw = read_object(path)
    for key in ("base_model_name_or_path", "task_type"):
        if not isinstance(raw.get(key), str | None):
            raise PeftlabError(f"{path}: {key}: {raw[key]!r} is not a string")
    return raw


def base_of(header: Mapping[str, str], path: Path) -> dict[str, Any]:
    """Return the header's description of the base model; empty for an adapter that peftlab did not write."""
    try:
        entry = parse_json(header.get("peftlab", "{}"))
    except ValueError as error:
        raise PeftlabError(f"{path}: peftlab in the header is not valid JSON ({error})") from None
    base: Any = entry.get("base", {}) if isinstance(entry, dict) else None
    described = isinstance(base, dict) and (
        not base or (isinstance(base.get("architecture"), str) and isinstance(base.get("config"), dict))
    )
    if not described:
        raise PeftlabError(f"{path}: peftlab in the header does not describe a base model")
    return base


def load_adapter(model: ModelT, source: str | Path | Adapter, *, lora_alpha: float | None = None) -> ModelT:
    """Inject the adapter at ``source`` into a base model, or load it into a model with an adapter of the same shape.

    Each tensor of the file is used exactly once and each adapter parameter is filled exactly once. A model with an
    adapter keeps its parameter objects and gets the file's values and configuration.

    Args:
        source, lora_alpha: as for ``read_adapter``; or an adapter that was read or combined before.

    Raises:
        PeftlabError: keys or shapes do not fit (both lists are given), or the base model is another one; the
            model is as it was.
    """
    adapter = source if isinstance(source, Adapter) else read_adapter(source, lora_alpha=lora_alpha)
    name = "the adapter" if isinstance(source, Adapter) else str(source)
    if adapter.base:
        _same_base(model, adapter.base, name)
    with as_base(model):
        adapter = in_model(model, adapter)
    if is_injected(model):
        notes = _refill(model, adapter, source=name)
    else:
        inject(model, adapter.config)
        try:
            notes = _refill(model, adapter, source=name)
        except PeftlabError:
            remove(model)
            raise
    for note in (*adapter.notes, *notes):
        warnings.warn(note, stacklevel=2)
    return model


def in_model(model: nn.Module, adapter: Adapter) -> Adapter:
    """Return ``adapter`` with the configuration that it has in ``model``, a base model; see ``settled``."""
    if not isinstance(adapter.config, LoraConfig):
        return adapter
    config, tensors, notes = settled(model, adapter.config, adapter.tensors)
    return replace(adapter, config=config, tensors=tensors, notes=(*adapter.notes, *notes))


def _refill(model: nn.Module, adapter: Adapter, *, source: str) -> tuple[str, ...]:
    """Give an injected model the adapter's values and configuration; return notes."""
    tensors, embeddings = divided(model, fitted(model, adapter.tensors, source=source), source=source)
    _check_fit(model, tensors, source=source)
    reconfigure(model, adapter.config)
    fill(model, tensors, source=source)
    changed, notes = changed_embeddings(model, embeddings)
    carry(model, changed)
    return notes


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
        if not torch.equal(tensors[first], tensor):
            raise PeftlabError(f"{source}: {first} and {key} are one tied parameter, and their values differ")
    return {name: tensors[key] for name, key in keys.items()}


def fill(model: nn.Module, tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Copy ``tensors`` into the adapter parameters of ``model``: a bijection, or an error and no change."""
    _check_fit(model, tensors, source=source)
    parameters = trainable_parameters(model)
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)


def _check_fit(model: nn.Module, tensors: Mapping[str, Tensor], *, source: str) -> None:
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


@contextmanager
def _with_values(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace the adapter's parameters by ``values`` for the block."""
    own = trainable_parameters(model)
    missing = next((name for name in own if name not in values), None)
    if missing:
        raise PeftlabError(f"state_dict has no {missing}")
    given = {name: nn.Parameter(values[name].detach()) for name in own}
    twins = tied_twins(model)
    _put(model, given | {twin: given[name] for twin, name in twins.items()})
    try:
        yield
    finally:
        _put(model, own | {twin: own[name] for twin, name in twins.items()})


def _put(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner)._parameters[last] = parameter


def _some(names: list[str], others: list[str], n: int = 5) -> str:
    if not names:
        return "none"
    shown = []
    for name in names[:n]:
        close = nearest(name, others, n=1)
        shown.append(f"{name} (nearest: {close[0]})" if close else name)
    return ", ".join(shown) + (f", and {len(names) - n} more" if len(names) > n else "")


def _whole(parameter: Tensor) -> Tensor:
    tensor = parameter.detach()
    if hasattr(tensor, "full_tensor"):  # sharded: a DTensor
        tensor = tensor.full_tensor()
    return tensor.cpu().contiguous() if not tensor.is_meta else tensor


def _refuse_nonfinite(tensors: Mapping[str, Tensor], source: Path) -> None:
    with one_thread():
        for name, tensor in tensors.items():
            # A finite sum has finite terms, and is computed faster than isfinite().all().
            if tensor.is_floating_point() and not tensor.sum().isfinite() and not tensor.isfinite().all():
                raise PeftlabError(f"{source}: {name} contains NaN or infinity")


def _our_config(raw: dict[str, Any], path: Path) -> MethodConfig:
    method = raw.get("method")
    if not isinstance(method, dict) or method.get("name") not in list(METHODS):
        raise PeftlabError(f"{path}: neither a peft adapter (no peft_type) nor one of peftlab (no known method)")
    with about(path):
        return make_config(method["name"], **method)


def _same_base(model: nn.Module, base: dict[str, Any], source: str | Path) -> None:
    here = describe(model)
    differ = [key for key in ("architecture", "model_type", "vocab_size") if base.get(key) != here[key]]
    if differ:
        lines = "\n".join(f"  {key}: adapter {base.get(key)}, model {here[key]}" for key in differ)
        raise PeftlabError(f"{source} belongs to another base model:\n{lines}")
