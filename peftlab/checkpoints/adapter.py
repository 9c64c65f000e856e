"""Adapter directories: the trained part of a model, saved, read, and loaded into a model.

A directory contains ``adapter_config.json`` and ``adapter_model.safetensors``. LoRA is written in peft's format, so
that peft and its consumers read it; the other methods use the model's parameter names. The header of the safetensors
file has, under ``peftlab``, the method and a description of the base model. ``load_model`` loads any reference as one
plain model, adapters folded into their base.
"""

from __future__ import annotations

import json
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from peftlab.checkpoints.peft_format import (
    FACTORS,
    adapter_tensors,
    changed_embeddings,
    read_peft,
    resolve_names,
    split_embeddings,
    tied_aliases,
    to_peft_config,
)
from peftlab.checkpoints.tensors import read_pickle, read_tensors, write_tensors
from peftlab.errors import PeftlabError, did_you_mean, nearest, prefix_errors
from peftlab.files import Json, parse_json, read_object, replacing, typed_value, write_json
from peftlab.methods.base import has_suffix
from peftlab.methods.config import METHODS, LoraConfig, MethodConfig
from peftlab.methods.inject import (
    DEFAULT,
    active_only,
    adapter_state,
    delete_adapter,
    inject,
    injection_of,
    is_injected,
    loaded_adapters,
    make_config,
    reconfigure,
    set_adapter,
    set_frozen_values,
    without_adapters,
)
from peftlab.methods.lora.functional import one_thread
from peftlab.methods.lora.layers import OwnCopy
from peftlab.methods.merging import merge
from peftlab.models.architectures import SITES, embeddings_of
from peftlab.models.config import CONFIG_FILE as CONFIG_FILE
from peftlab.models.config import BaseConfig, find_model
from peftlab.models.load import describe, load_base, loaded_from, stored_vocabulary, vocabulary
from peftlab.untyped import Parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer
else:
    Trainer = object  # the methods come from the Trainer that ``AdapterCheckpoints`` is mixed into

WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"  # as peft wrote it before safetensors, and still does on request
_TRAINED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_COUNTED = (torch.int64, torch.int32, torch.bool)
_TRAINS = re.compile(r"lora_|adapter_|(^|[._])(weight|bias|rows)$")  # names of parameters, which are no buffers

ModelT = TypeVar("ModelT", bound=nn.Module)


@dataclass(frozen=True)
class Adapter:
    """An adapter as read from disk.

    Attributes:
        config: the method's configuration.
        tensors: the trained tensors, named as the injected model's parameters.
        base: what identifies the base model (``describe``); empty for a foreign adapter.
        base_reference: the base model's reference, if the adapter names one. revision: its git revision on the hub.
        task_type: peft's name of the task, if the adapter has one.
        notes: what its user should know.
    """

    config: MethodConfig
    tensors: dict[str, Tensor]
    base: Mapping[str, Json] = field(default_factory=dict)
    base_reference: str | None = None
    task_type: str | None = None
    notes: tuple[str, ...] = ()
    revision: str | None = None


def save_adapter(
    model: nn.Module,
    directory: str | PathLike[str],
    *,
    base: str | None = None,
    revision: str | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    name: str | None = None,
) -> Path:
    """Write one adapter of an injected model to ``directory`` and return it; whole, if it has been frozen since, too.

    Args:
        name: which of the model's adapters; default: the active one.
        base: reference of the base model to record; default: where the model was loaded from.
        revision: git revision of a base on the hub, to record.
        state_dict: values to write, by the model's parameter names, in place of the model's own (gathered from
            many processes); it may contain more.

    Raises:
        PeftlabError: nothing is injected, or nothing of that name, the model is on the meta device, or ``state_dict``
            lacks a parameter.
    """
    with active_only(model, name), _with_values(model, state_dict):
        config, tensors, header = _files_of(model, base, revision, state_dict or {})
        with replacing(Path(directory) / WEIGHTS_FILE) as temporary:
            write_tensors(temporary, tensors, {"peftlab": header})
        write_json(Path(directory) / CONFIG_FILE, config)
    return Path(directory)


def adapter_of(model: nn.Module, *, base: str | None = None) -> Adapter:
    """Return the active adapter of an injected model as ``read_adapter`` reads what ``save_adapter`` writes.

    Args:
        base: reference of the base model; default: where the model was loaded from.
    """
    config, tensors, header = _files_of(model, base, None, {})
    return _adapter_from(config, tensors, {"peftlab": header}, Path(CONFIG_FILE), Path(WEIGHTS_FILE))


def _files_of(
    model: nn.Module, base: str | None, revision: str | None, values: Mapping[str, Tensor]
) -> tuple[dict[str, Json], dict[str, Tensor], str]:
    """Return the active adapter's ``adapter_config.json``, its tensors by key, and the header of their file."""
    injection = injection_of(model)
    reference = base or loaded_from(model)
    resized = {name: values.get(name, parameter) for name, parameter in _resized(model, reference).items()}
    tensors = {name: _gathered(parameter) for name, parameter in (adapter_state(model) | resized).items()}
    on_meta = next((name for name, tensor in tensors.items() if tensor.is_meta), None)
    if on_meta:
        raise PeftlabError(f"{on_meta} is on the meta device and has no values to save")
    header = {
        "method": injection.config.model_dump(),
        "base": describe(model),
        "base_model_name_or_path": reference,
    }
    if isinstance(injection.config, LoraConfig):
        config = to_peft_config(model, injection, reference)
        tensors = {key: _gathered(tensor) for key, tensor in adapter_tensors(model, injection, resized).items()}
    else:
        config = {"library": "peftlab", **header}
    if revision is not None:
        config["revision"] = revision
    return json.loads(json.dumps(config, default=str)), tensors, json.dumps(header, default=str)


def _resized(model: nn.Module, reference: str | None) -> dict[str, Tensor]:
    """Return the embeddings that do not train, by parameter name, if the vocabulary is not that of ``reference``.

    New rows are in no file of the base model. As peft does, input and output embeddings are saved whole; a tied
    parameter is there under each of its names.
    """
    tokens, stored = vocabulary(model), stored_vocabulary(model, reference)
    if stored is None or tokens == stored:
        return {}
    trained = {id(parameter) for parameter in adapter_state(model).values()}
    embeddings = [layer for layer in embeddings_of(model) if layer is not None]
    found = {
        f"{name}.{key}": parameter.detach()
        for name, layer in model.named_modules(remove_duplicate=False)
        if any(layer is embedding for embedding in embeddings)
        for key, parameter in layer.named_parameters(recurse=False)
        if id(parameter) not in trained and not isinstance(layer, OwnCopy)
    }
    if found:
        warnings.warn(
            f"the vocabulary has {tokens} tokens, that of {reference} has {stored}: {', '.join(found)} "
            f"{'is' if len(found) == 1 else 'are'} saved with the adapter",
            stacklevel=4,
        )
    return found


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
    path = Path(source)
    if path.is_file():
        adapter = Adapter(*read_loralib(path, lora_alpha))
    else:
        path = adapter_directory(path)
        raw = read_config(path / CONFIG_FILE)
        if is_adapterhub(raw):
            base = text_or_none(raw, "model_name", path / CONFIG_FILE)
            adapter = Adapter(*read_adapterhub(path, raw), base_reference=base)
        else:
            weights = path / WEIGHTS_FILE
            if not weights.exists() and (path / PICKLE_FILE).exists():
                weights = path / PICKLE_FILE
            tensors, header = (read_pickle(weights), {}) if weights.suffix == ".bin" else read_tensors(weights)
            adapter = _adapter_from(raw, tensors, header, path / CONFIG_FILE, weights)
    with one_thread():
        for name, tensor in adapter.tensors.items():
            # A buffer of what trains whole (BatchNorm's num_batches_tracked) may contain integers.
            if tensor.dtype not in _TRAINED and (tensor.dtype not in _COUNTED or _TRAINS.search(name)):
                kind = str(tensor.dtype).removeprefix("torch.")
                raise PeftlabError(f"{source}: {name} has {kind} values; trained weights are floating-point")
            # A finite sum has finite terms, and is computed faster than isfinite().all().
            if not allow_nonfinite and not tensor.sum().isfinite() and not tensor.isfinite().all():
                raise PeftlabError(f"{source}: {name} contains NaN or infinity")
    return adapter


def adapter_directory(path: Path) -> Path:
    """Return the directory of an adapter's files: ``path``, or else its ``adapter/``, as of a run.

    Raises:
        PeftlabError: there is none.
    """
    path = next((place for place in (path, path / "adapter") if (place / CONFIG_FILE).exists()), path)
    if not (path / CONFIG_FILE).exists():
        raise PeftlabError(f"{path}: not an adapter (it has no {CONFIG_FILE})")
    return path


def _adapter_from(
    raw: dict[str, Json], tensors: dict[str, Tensor], header: Mapping[str, str], file: Path, weights: Path
) -> Adapter:
    """Return the adapter whose ``adapter_config.json`` ``file`` contains ``raw``, and ``weights`` the rest."""
    entry, base = read_metadata(header, weights)
    config: MethodConfig
    notes: tuple[str, ...] = ()
    if "peft_type" in raw:
        written, tensors, notes = read_peft(raw, tensors, file, weights)
        config = _as_injected(written, entry, weights)
    else:
        method = raw.get("method")
        if not isinstance(method, dict) or method.get("name") not in list(METHODS):
            raise PeftlabError(f"{file}: neither a peft adapter (no peft_type) nor one of peftlab (no known method)")
        with prefix_errors(file):
            config = make_config(typed_value(method, "name", str, "method"), **method)
    if problem := config.mismatch({name: tensor.shape for name, tensor in tensors.items()}):
        raise PeftlabError(f"{file} does not fit {weights.name}: {problem}")
    keys = ("base_model_name_or_path", "task_type", "revision")
    reference, task, revision = (text_or_none(raw, key, file) for key in keys)
    return Adapter(config, tensors, base, reference, task, notes, revision)


def read_config(path: Path) -> dict[str, Json]:
    """Return an ``adapter_config.json``: an object whose base model and task type are strings."""
    raw = read_object(path)
    for key in ("base_model_name_or_path", "task_type"):
        text_or_none(raw, key, path)
    return raw


def text_or_none(raw: Mapping[str, Json], key: str, path: Path) -> str | None:
    """Return the value of a key of the file at ``path``, which is a string, null or absent.

    Args:
        raw: the file's object. key: in it. path: for messages.
    """
    value = raw.get(key)
    if not isinstance(value, str | None):
        raise PeftlabError(f"{path}: {key}: {value!r} is not a string")
    return value


def read_metadata(metadata: Mapping[str, str], path: Path) -> tuple[dict[str, Json], dict[str, Json]]:
    """Return what peftlab wrote into the header of a safetensors file, and therein the description of the base model.

    Both are empty for an adapter that peftlab did not write.

    Args:
        metadata: the header's texts. path: the file, for messages.
    """
    try:
        entry = parse_json(metadata.get("peftlab", "{}"))
    except ValueError as error:
        raise PeftlabError(f"{path}: peftlab in the header is not valid JSON ({error})") from None
    base = entry.get("base", {}) if isinstance(entry, dict) else None
    described = isinstance(base, dict) and (
        not base or (isinstance(base.get("architecture"), str) and isinstance(base.get("config"), dict))
    )
    if not isinstance(entry, dict) or not isinstance(base, dict) or not described:
        raise PeftlabError(f"{path}: peftlab in the header does not describe a base model")
    return entry, base


def _as_injected(config: LoraConfig, entry: Mapping[str, Json], path: Path) -> LoraConfig:
    """Return the configuration with what trains whole as it was injected, for an adapter that peftlab wrote.

    ``adapter_config.json`` says it by the ends of names, as peft reads them, and has no word for some of it.
    """
    method = entry.get("method")
    if not isinstance(method, dict):
        return config
    fields = ("modules_to_save", "train_head", "ensure_weight_tying")
    try:
        return LoraConfig.model_validate(
            {**config.model_dump(), **{key: method[key] for key in fields if key in method}}
        )
    except ValidationError as error:
        raise PeftlabError(f"{path}: peftlab in the header: {error.errors()[0]['msg']}") from None


_HEAD_FILES = ("model_head.safetensors", "pytorch_model_head.bin")

# The settings with which AdapterHub's bottleneck adapter is y = h + up(f(down(h))) on a sub-layer's output h, before
# residual and LayerNorm. Any other value is another architecture.
_BOTTLENECK_SETTINGS = {
    "original_ln_before": False, "original_ln_after": True, "residual_before_ln": True, "ln_before": False,
    "ln_after": False, "adapter_residual_before_ln": False, "use_gating": False, "is_parallel": False,
    "scaling": 1.0, "phm_layer": False, "inv_adapter": None, "cross_adapter": False, "dropout": 0.0,
    "output_adapter": True, "stochastic_depth": 0.0,
}  # fmt: skip
_LORA_SETTINGS = {
    "selfattn_lora": True, "intermediate_lora": False, "output_lora": False, "use_gating": False,
    "composition_mode": "add", "use_dora": False, "leave_out": [], "vera_d": None, "vera_b": None,
}  # fmt: skip
_ATTENTION: dict[object, str] = {"q": "query", "k": "key", "v": "value"}


def is_adapterhub(raw: Mapping[str, Json]) -> bool:
    """Return whether an ``adapter_config.json`` was written by AdapterHub's library (peft's has a ``peft_type``)."""
    return "peft_type" not in raw and isinstance(raw.get("config"), dict) and "model_type" in raw


def read_adapterhub(directory: Path, raw: Mapping[str, Json]) -> tuple[MethodConfig, dict[str, Tensor]]:
    """Return method and tensors, by our names, of an AdapterHub bottleneck or LoRA adapter.

    Args:
        raw: its ``adapter_config.json``.

    Raises:
        PeftlabError: an architecture variant that is not supported, named by its key.
    """
    path = directory / "adapter_config.json"
    tensors = _state_dict(directory, "adapter.safetensors", "pytorch_adapter.bin")
    head = next((directory / name for name in _HEAD_FILES if (directory / name).exists()), None)
    if head is not None:
        tensors |= _state_dict(directory, head.name)
    settings = typed_value(raw, "config", dict, path)
    with prefix_errors(path):
        if settings.get("architecture") == "lora":
            return _lora(settings), {re.sub(r"\.loras\.[^.]+\.", ".", key): tensor for key, tensor in tensors.items()}
        model_type = typed_value(raw, "model_type", str, "the base model")
        config = _bottleneck(settings, tensors, train_head=head is not None)
        return config, {_bottleneck_name(key, model_type): tensor for key, tensor in tensors.items()}


def _lora(settings: Mapping[str, Json]) -> MethodConfig:
    _require(settings, _LORA_SETTINGS)
    matrices = settings.get("attn_matrices", ["q", "v"])
    if not isinstance(matrices, list) or not all(matrix in list(_ATTENTION) for matrix in matrices):
        raise PeftlabError(f"attn_matrices={matrices!r} is not supported; q, k and v are")
    return make_config(
        "lora",
        r=typed_value(settings, "r", int, "config"),
        lora_alpha=settings.get("alpha"),
        target_modules=[_ATTENTION[matrix] for matrix in matrices],
        lora_dropout=settings.get("dropout", 0.0),
    )


def _bottleneck(settings: Mapping[str, Json], tensors: Mapping[str, Tensor], train_head: bool) -> MethodConfig:
    _require(settings, _BOTTLENECK_SETTINGS)
    downs = [t for key, t in tensors.items() if key.endswith("adapter_down.0.weight") and t.ndim == 2]
    if not downs:
        raise PeftlabError("the adapter's file has no matrix adapter_down.0.weight")
    return make_config(
        "houlsby",
        bottleneck=downs[0].shape[0],
        non_linearity=typed_value(settings, "non_linearity", str, "config").lower(),
        placement="houlsby" if typed_value(settings, "mh_adapter", bool, "config") else "pfeiffer",
        skip_layers=settings.get("leave_out") or None,
        train_layer_norms=False,
        train_head=train_head,
    )


def _require(settings: Mapping[str, Json], wanted: Mapping[str, object]) -> None:
    for key, value in wanted.items():
        if settings.get(key, value) != value:
            raise PeftlabError(f"{key}={settings[key]!r} is not supported; {value!r} is")


def _bottleneck_name(key: str, model_type: str) -> str:
    """Return our name of a parameter: AdapterHub's bottleneck is on a block, ours on the sub-layer's last leaf."""
    match = re.fullmatch(r"(.+)\.adapters\.[^.]+\.adapter_(?:(down)\.0|(up))\.(weight|bias)", key)
    if match is None:
        if ".adapters." in key:
            raise PeftlabError(f"key {key!r} is of an unknown form")
        return key
    if model_type not in SITES:
        raise PeftlabError(f"model_type {model_type!r} is not known{did_you_mean(model_type, SITES)}")
    block, down, up, last = match[1], match[2], match[3], match[4]
    ends = (*SITES[model_type].attention, *SITES[model_type].ffn)
    numbered = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", block)
    for end in sorted(ends, key=len, reverse=True):
        parent, _, leaf = end.rpartition(".")
        if numbered.endswith(parent):
            return f"{block}.{leaf}.adapter_{down or up}.{last}"
    raise PeftlabError(f"{block} is not a sub-layer of {model_type} that peftlab knows")


def _state_dict(directory: Path, *names: str) -> dict[str, Tensor]:
    """Read the first of the files that exists, or the last."""
    path = next((directory / name for name in names if (directory / name).exists()), directory / names[-1])
    return read_tensors(path)[0] if path.suffix == ".safetensors" else read_pickle(path)


def read_loralib(path: Path, lora_alpha: float | None) -> tuple[MethodConfig, dict[str, Tensor]]:
    """Return method and tensors of a loralib state dict, whose α is not in the file.

    Args:
        path: the file. lora_alpha: α, as the reader knows it.

    Raises:
        PeftlabError: ``lora_alpha`` is None, or the file contains no ``lora_A``.
    """
    tensors = read_pickle(path)
    modules = sorted({key.removesuffix(".lora_A") for key in tensors if key.endswith(".lora_A")})
    if not modules:
        raise PeftlabError(f"{path}: no key ends in .lora_A; this is not a loralib adapter")
    if lora_alpha is None:
        raise PeftlabError(f"{path}: a loralib file does not contain its alpha; pass lora_alpha (--lora-alpha)")
    first = tensors[f"{modules[0]}.lora_A"]
    if first.ndim < 2:
        raise PeftlabError(f"{path}: {modules[0]}.lora_A has shape {tuple(first.shape)} and is not a matrix")
    with prefix_errors(path):
        config = make_config("lora", r=first.shape[0], lora_alpha=lora_alpha, target_modules=modules)
    return config, tensors


def load_adapter(
    model: ModelT, source: str | Path | Adapter, *, name: str | None = None, lora_alpha: float | None = None
) -> ModelT:
    """Load the adapter at ``source`` into ``model`` in place, make it the active one, and return the model.

    Each tensor of the file is used exactly once and each adapter parameter is filled exactly once. An adapter of the
    same name is replaced; if both have the same shapes, its parameter objects remain and get the file's values and
    configuration. Adapters of other names remain in the model (``set_adapter``).

    Args:
        source, lora_alpha: as for ``read_adapter``; or an adapter that was read or combined before.
        name: the adapter's name in the model; default: ``"default"``, with a warning if that replaces an adapter.

    Raises:
        PeftlabError: keys or shapes do not fit (both lists are given), or the base model is another one; the
            model is as it was.
    """
    adapter, label = _read_for(model, source, lora_alpha)
    before = loaded_adapters(model)
    wanted = DEFAULT if name is None else name
    if wanted not in before:
        notes = _add(model, adapter, wanted, label)
    else:
        set_adapter(model, wanted)
        try:
            notes = _replace(model, adapter, wanted, label)
        except BaseException:
            set_adapter(model, before[0])
            raise
        if name is None:
            notes += (f"{label} replaces the adapter that was in the model; load_adapter(..., name=NAME) keeps both",)
    for note in (*adapter.notes, *notes):
        warnings.warn(note, stacklevel=2)
    return model


def _read_for(model: nn.Module, source: str | Path | Adapter, lora_alpha: float | None) -> tuple[Adapter, str]:
    """Return the adapter at ``source`` as it is in ``model``, and what messages call it."""
    adapter = source if isinstance(source, Adapter) else read_adapter(source, lora_alpha=lora_alpha)
    label = "the adapter" if isinstance(source, Adapter) else str(source)
    if adapter.base:
        _refuse_another_base(model, adapter.base, label)
    with without_adapters(model):
        return resolve_adapter(model, adapter), label


def resolve_adapter(model: nn.Module, adapter: Adapter) -> Adapter:
    """Return ``adapter`` with the configuration that it has in ``model``, a base model; see ``resolve_names``.

    Args:
        model: a base model, without an adapter. adapter: as it was read.
    """
    if not isinstance(adapter.config, LoraConfig):
        return adapter
    if not adapter.base:
        _refuse_partly_adapted(model, adapter)
    config, tensors, notes = resolve_names(model, adapter.config, adapter.tensors)
    return replace(adapter, config=config, tensors=tensors, notes=(*adapter.notes, *notes))


def _refuse_partly_adapted(model: nn.Module, adapter: Adapter) -> None:
    """Refuse an adapter of peft on a module that the model has under several names, of which peft adapts one.

    transformers makes such modules where it resizes the vocabulary of an encoder and a decoder that share embeddings.
    """
    assert isinstance(adapter.config, LoraConfig)
    whole = adapter.config.modules_to_save or []
    rows = [name for name in adapter.tensors if has_suffix(name, "token_rows")]
    names: dict[int, list[str]] = defaultdict(list)
    for name, module in model.named_modules(remove_duplicate=False):
        if module._parameters:
            names[id(module)].append(name)
    for several in (several for several in names.values() if len(several) > 1):
        trained = [n for n in adapter.tensors if n.rpartition(".")[0] in several]
        named = [n for n in several if any(has_suffix(n, end) for end in whole)]
        factors = any(n.rpartition(".")[2] in FACTORS for n in trained)
        if factors or (named and len(named) < len(several)) or (len(rows) == 1 and rows[0] in trained):
            raise PeftlabError(
                f"peft adapts {several[0]} and not {', '.join(several[1:])}, which are one module in this "
                f"{type(model).__name__}: no adapter of it computes the same"
            )


def _fill_from(model: nn.Module, adapter: Adapter, source: str) -> tuple[str, ...]:
    """Give the active adapter another one's values and configuration; return notes."""
    tensors, embeddings = split_embeddings(
        model, by_parameter_name(model, adapter.tensors, source=source), source=source
    )
    check_fit(model, tensors, source=source)
    reconfigure(model, adapter.config)
    fill(model, tensors, source=source)
    changed, notes = changed_embeddings(model, embeddings)
    set_frozen_values(model, changed)
    return notes


def _add(model: nn.Module, adapter: Adapter, name: str, source: str) -> tuple[str, ...]:
    inject(model, adapter.config, name=name)
    try:
        return _fill_from(model, adapter, source)
    except BaseException:
        delete_adapter(model, name)
        raise


def _replace(model: nn.Module, adapter: Adapter, name: str, source: str) -> tuple[str, ...]:
    """Put ``adapter`` in the place of the active one, which is called ``name``; return notes."""
    tensors, _ = split_embeddings(model, by_parameter_name(model, adapter.tensors, source=source), source=source)
    parameters = adapter_state(model)
    if {key: tensor.shape for key, tensor in tensors.items()} == {key: p.shape for key, p in parameters.items()}:
        return _fill_from(model, adapter, source)
    old = injection_of(model)
    old.name = ""  # which no other adapter can have
    try:
        notes = _add(model, adapter, name, source)
    except BaseException:
        old.name = name
        raise
    delete_adapter(model, "")
    return notes


@contextmanager
def _with_values(model: nn.Module, values: Mapping[str, Tensor] | None) -> Iterator[None]:
    """Replace the adapter's parameters by ``values``, if there are any, for the block."""
    if values is None:
        yield
        return
    own = adapter_state(model)
    missing = next((name for name in own if name not in values), None)
    if missing:
        raise PeftlabError(f"state_dict has no {missing}")
    given = {
        name: nn.Parameter(values[name].detach()) if isinstance(tensor, nn.Parameter) else values[name]
        for name, tensor in own.items()
    }
    twins = tied_aliases(model)
    _set_tensors(model, given | {twin: given[name] for twin, name in twins.items()})
    try:
        yield
    finally:
        _set_tensors(model, own | {twin: own[name] for twin, name in twins.items()})


def _set_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        owner, _, last = name.rpartition(".")
        module = model.get_submodule(owner)
        registry: Parameters = module._parameters if last in module._parameters else module._buffers
        registry[last] = tensor


def _gathered(parameter: Tensor) -> Tensor:
    tensor = parameter.detach()
    if hasattr(tensor, "full_tensor"):  # sharded: a DTensor
        tensor = tensor.full_tensor()
    return tensor.cpu().contiguous() if not tensor.is_meta else tensor


def _refuse_another_base(model: nn.Module, base: Mapping[str, Json], source: str | Path) -> None:
    description = describe(model)
    differ = [key for key in ("architecture", "model_type", "vocab_size") if base.get(key) != description[key]]
    if differ:
        lines = "\n".join(f"  {key}: adapter {base.get(key)}, model {description[key]}" for key in differ)
        raise PeftlabError(f"{source} belongs to another base model:\n{lines}")


def by_parameter_name(model: nn.Module, tensors: Mapping[str, Tensor], *, source: str) -> dict[str, Tensor]:
    """Return an adapter's tensors by the parameter names of the injected ``model``.

    A module trained whole may train its own copy of tied weights, and a file may contain a tied tensor under both
    names.

    Args:
        model: with the adapter injected. tensors: by the names in the file. source: the adapter's path, for messages.
    """
    trained, twins = adapter_state(model), tied_aliases(model)
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
    """Copy ``tensors`` into the adapter parameters of ``model``: a bijection, or an error and no change.

    Args:
        model: with the adapter injected. tensors: by its parameter names. source: the adapter's path, for messages.
    """
    check_fit(model, tensors, source=source)
    parameters = adapter_state(model)
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)


def check_fit(model: nn.Module, tensors: Mapping[str, Tensor], *, source: str) -> None:
    """Raise ``PeftlabError`` unless ``tensors`` are those of the adapter parameters of ``model``, name by name.

    Args:
        model: with the adapter injected. tensors: by its parameter names. source: the adapter's path, for messages.
    """
    parameters = adapter_state(model)
    unused = sorted(set(tensors) - set(parameters))
    unfilled = sorted(set(parameters) - set(tensors))
    if unused or unfilled:
        raise PeftlabError(
            f"{source} does not fit this model.\n"
            f"  in the file, not in the model ({len(unused)}): {_listed(unused, unfilled)}\n"
            f"  in the model, not in the file ({len(unfilled)}): {_listed(unfilled, unused)}"
        )
    for name, tensor in tensors.items():
        if tensor.shape != parameters[name].shape:
            raise PeftlabError(
                f"{source}: {name} has shape {tuple(tensor.shape)}, the model's has {tuple(parameters[name].shape)}"
            )
        if tensor.is_floating_point() != parameters[name].is_floating_point():
            raise PeftlabError(f"{source}: {name} has {tensor.dtype} values, the model's {parameters[name].dtype}")


def _listed(names: list[str], others: list[str], n: int = 5) -> str:
    if not names:
        return "none"
    shown = []
    for name in names[:n]:
        close = nearest(name, others, n=1)
        shown.append(f"{name} (nearest: {close[0]})" if close else name)
    return ", ".join(shown) + (f", and {len(names) - n} more" if len(names) > n else "")


def load_model(
    reference: str,
    auto_class: str = "AutoModelForSequenceClassification",
    *,
    dtype: torch.dtype = torch.float32,
    quantised: BaseConfig | None = None,
    revision: str | None = None,
    **options: object,
) -> tuple[PreTrainedModel, list[str]]:
    """Load a pretrained or finetuned model and list the parameters that neither checkpoint nor adapter contains.

    Adapters are folded into the weights in memory (W0 + (α/r)·B·A, rounded once to ``dtype``), so that the model is a
    plain one.

    Args:
        reference: as ``models.config.find_model`` takes it. The others are those of ``load_base``.

    Raises:
        PeftlabError: the model cannot be loaded, or an adapter does not fit it or has no linear fold.
    """
    parts = find_model(reference, revision=revision)
    adapters = [(place, read_adapter(place)) for place in parts.adapters]
    for place, adapter in adapters:
        if not METHODS[adapter.config.name].folds:
            raise PeftlabError(
                f"{reference}: method {adapter.config.name} has no linear fold, so {place} is no model by itself"
            )
    if adapters and quantised is not None:
        raise PeftlabError(
            f"base.dtype: {quantised.dtype} needs a stored model, and {reference} is an adapter, folded in memory; "
            f"write the model first: peftlab merge {parts.adapters[-1]} -o DIR"
        )
    model, fresh = load_base(
        parts.base, auto_class, dtype=dtype, quantised=quantised, revision=parts.revision, **options
    )
    for place, adapter in adapters:
        # Injection draws values that the adapter's then replace: what the caller draws must not depend on that.
        with prefix_errors(place), torch.random.fork_rng(devices=[]):
            merge(load_adapter(model, adapter))
        fresh = [name for name in fresh if name not in adapter.tensors]
    model.config._name_or_path = reference
    return model, fresh


class AdapterCheckpoints(Trainer):
    """A mixin for ``transformers.Trainer`` that loads the checkpoints of an injected model.

    A Trainer writes them by ``model.save_pretrained``, which writes an adapter directory, but loads only whole models
    and peft's wrappers. With this class first among the bases, ``resume_from_checkpoint`` and
    ``load_best_model_at_end`` work too. Other models and checkpoints are loaded as by the Trainer itself.
    """

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self._load_adapter(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is None or not self._load_adapter(best):
            super()._load_best_model()

    def _load_adapter(self, checkpoint: str) -> bool:
        """Give the active adapter the values in ``checkpoint``, in the same parameters; whether there is an adapter."""
        model = self.model
        if model is None or not is_injected(model) or not (Path(checkpoint) / CONFIG_FILE).exists():
            return False
        _fill_from(model, *_read_for(model, checkpoint, None))
        return True
