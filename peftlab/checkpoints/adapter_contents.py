"""What an adapter's files contain and what they would touch in a base model, from names and shapes alone.

``read_contents`` reads headers of any format that peftlab reads; ``fit_to_base`` compares them with the base's model
on the meta device. No weights are read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from peftlab.checkpoints.adapter import (
    CONFIG_FILE,
    PICKLE_FILE,
    WEIGHTS_FILE,
    Adapter,
    adapter_directory,
    is_adapterhub,
    read_adapterhub,
    read_config,
    read_metadata,
    text_or_none,
)
from peftlab.checkpoints.merge_plan import MergeOptions, closest_model, plain_task_model
from peftlab.checkpoints.peft_format import PREFIX
from peftlab.checkpoints.tensors import open_shards, read_header, read_pickle
from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import Json
from peftlab.methods.base import has_suffix, layer_index
from peftlab.methods.config import ALL_LINEAR, LoraConfig
from peftlab.methods.lora.layers import stored_transposed
from peftlab.methods.lora.plan import leaf_kind
from peftlab.models.architectures import PlainModel, conv1d
from peftlab.models.config import base_directory
from peftlab.models.load import empty_model, load_config
from peftlab.patterns import matching

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Shape = tuple[int, ...]

_FACTOR = re.compile(
    r"(?P<module>.+?)(?P<wrappers>(?:\.base_layer)*)\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector)(?:\.(?P<last>weight|bias))?"
)
_FACTOR_OF_PARAMETER = re.compile(r"(?P<module>.+)\.(?P<parameter>\w+)_(?P<kind>lora_A|lora_B)")
_BOTTLENECK = re.compile(r"(?P<module>.+?)\.(?:adapter_down|adapter_up|token_adapter)\..+")


# What ``settings`` leaves out: keys that do not matter for what is computed, and the values of options that are off.
_NOT_SHOWN = (
    "auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_core", "peft_version", "qalora_group_size",
    "revision",
)  # fmt: skip
_OFF: tuple[object, ...] = (None, False, {}, [], 0.0)
_OFF_BY_KEY: dict[str, tuple[object, ...]] = {"bias": (None, "none"), "init_lora_weights": (None, True)}
# The settings that a plain LoRA of peft's may have.
_PLAIN = frozenset(("lora_alpha", "lora_dropout", "peft_type", "r", "target_modules", "task_type", "use_rslora"))


@dataclass(frozen=True)
class AdapterTensor:
    """One tensor of an adapter.

    Attributes:
        key: its key in the file. shape: its shape.
        module: the base's module that it belongs to.
        kind: ``lora_A``, ``lora_B``, ``lora_embedding_A``, ``lora_embedding_B``, ``lora_magnitude_vector``,
            ``lora_bias``, ``base`` (a value of the base below an adapted module), ``whole`` (a parameter of the base,
            trained), or ``other`` (added to a module in another way).
        parameter: for ``whole`` and ``base`` the parameter's name in the module; for factors of one parameter of a
            module, that parameter's where the key contains it.
        depth: how many wrappers below the outermost; only experts modules have several.
    """

    key: str
    shape: Shape
    module: str
    kind: str
    parameter: str = ""
    depth: int = 0

    @property
    def target(self) -> str:
        """The base's name for what the tensor belongs to: a module, or a parameter that is trained whole."""
        return f"{self.module}.{self.parameter}".lstrip(".") if self.kind in ("whole", "base") else self.module


@dataclass(frozen=True)
class FactorPair:
    """The factors A and B of one module, or of one parameter of an experts module.

    Attributes:
        module: the module. depth: as in ``AdapterTensor``. a, b: the factors' shapes, (r, in) and (out, r).
    """

    module: str
    depth: int
    a: Shape
    b: Shape

    @property
    def last(self) -> str:
        """The last component of the module's name."""
        return self.module.rpartition(".")[2]


@dataclass(frozen=True)
class AdapterContents:
    """The files of an adapter.

    Attributes:
        path: the directory, or loralib's file. format: ``peft``, ``peftlab``, ``adapterhub`` or ``loralib``.
        raw: ``adapter_config.json``; empty for loralib. files: names of the directory's files.
        tensors: its tensors. base: the base model as peftlab described it, or an empty object.
    """

    path: Path
    format: str
    raw: Mapping[str, Json]
    files: frozenset[str]
    tensors: tuple[AdapterTensor, ...]
    base: Mapping[str, Json]

    @cached_property
    def pairs(self) -> list[FactorPair]:
        """The modules with both factors, in the file's order."""
        found: dict[tuple[str, int, str], dict[str, AdapterTensor]] = {}
        for tensor in self.tensors:
            if tensor.kind.endswith(("_A", "_B")):
                found.setdefault((tensor.module, tensor.depth, tensor.parameter), {})[tensor.kind[-1]] = tensor
        return [
            FactorPair(module, depth, sides["A"].shape, sides["B"].shape)
            for (module, depth, _), sides in found.items()
            if len(sides) == 2
        ]

    @property
    def settings(self) -> dict[str, object]:
        """What the configuration contains, without what is off or of no use here."""
        if self.format == "loralib":
            return {"r": self.pairs[0].a[0]} if self.pairs and self.pairs[0].a else {}
        raw = self.raw.get("method") if self.format == "peftlab" else self.raw.get("config", self.raw)
        items = raw.items() if isinstance(raw, Mapping) else ()
        return {key: value for key, value in items if key not in _NOT_SHOWN and value not in _OFF_BY_KEY.get(key, _OFF)}

    @property
    def other_tensors(self) -> list[AdapterTensor]:
        """The tensors that are neither factors of a low-rank update nor weights of the base."""
        kinds = ("whole", "other", "lora_bias", "lora_magnitude_vector")
        others = [tensor for tensor in self.tensors if tensor.kind in kinds]
        return others + [tensor for tensor in self.tensors if tensor.kind == "base" and tensor.parameter != "weight"]

    @property
    def r(self) -> int:
        """The rank of the modules that no pattern names; 8, as in peft, where the configuration has none."""
        return int(_number(self.raw.get("r", 8)))

    @property
    def lora_alpha(self) -> float:
        """The alpha of the modules that no pattern names; 8, as in peft, where the configuration has none."""
        return _number(self.raw.get("lora_alpha", 8))

    def pattern(self, key: str) -> dict[str, float]:
        """Return ``rank_pattern`` or ``alpha_pattern``."""
        value = self.raw.get(key)
        return {name: _number(each) for name, each in value.items()} if isinstance(value, dict) else {}

    def names(self, key: str) -> list[str]:
        """Return the names in a list of the configuration; none where it has no such list."""
        value = self.raw.get(key)
        return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []

    def rank(self, pair: FactorPair) -> int:
        """Return the rank that peft's configuration gives to a module."""
        return int(self._by_pattern("rank_pattern", pair, self.r))

    def scale(self, pair: FactorPair) -> float:
        """Return the factor of B·A that peft applies at a module: alpha / r, or alpha / √r for rsLoRA."""
        rank, alpha = self.rank(pair), float(self._by_pattern("alpha_pattern", pair, self.lora_alpha))
        return alpha / (math.sqrt(rank) if self.raw.get("use_rslora") else rank)

    def _by_pattern(self, key: str, pair: FactorPair, default: float) -> float:
        parameter = self._parameter(pair)
        name = f"{pair.module}.{parameter}" if parameter else pair.module
        for pattern, value in self.pattern(key).items():
            if matching(rf"(.*\.)?({pattern})", [name], what=f"{self.path / CONFIG_FILE}: {key}"):
                return value
        return default

    def _parameter(self, pair: FactorPair) -> str:
        """Return the parameter that factors of a module with several belong to; empty for other modules.

        peft wraps a module's parameters in the order they have in it, and in every experts module the one called
        "down" comes last, so that its factors are outermost.
        """
        split = [name.rpartition(".") for name in self.names("target_parameters")]
        targeted = {last for parent, _, last in split if not parent or has_suffix(pair.module, parent)}
        wrapped = sorted(targeted, key=lambda last: "down" in last)
        return wrapped[len(wrapped) - 1 - pair.depth] if pair.depth < len(wrapped) else ""


def read_contents(source: str | Path) -> AdapterContents:
    """Return what an adapter's files contain; no weights are read.

    Raises:
        PeftlabError: there is no adapter, a file is damaged, or it is of no known format.
    """
    path = Path(source)
    if path.is_file():
        state = read_pickle(path, mapped=True)
        if not any(key.endswith(".lora_A") for key in state):
            raise PeftlabError(f"{path}: no key ends in .lora_A; this is not a loralib adapter")
        return AdapterContents(path, "loralib", {}, frozenset({path.name}), _tensors(_shapes(state)), {})
    path = adapter_directory(path)
    raw = read_config(path / CONFIG_FILE)
    _check_types(raw, path / CONFIG_FILE)
    files = frozenset(file.name for file in path.iterdir())
    if is_adapterhub(raw):
        return AdapterContents(path, "adapterhub", raw, files, _tensors(_shapes(read_adapterhub(path, raw)[1])), {})
    if "peft_type" not in raw and not isinstance(raw.get("method"), dict):
        raise PeftlabError(
            f"{path / CONFIG_FILE}: neither a peft adapter (no peft_type) nor one of peftlab (no known method)"
        )
    metadata: Mapping[str, str] = {}
    if WEIGHTS_FILE not in files and PICKLE_FILE in files:
        shapes = _shapes(read_pickle(path / PICKLE_FILE, mapped=True))
    else:
        entries, metadata = read_header(path / WEIGHTS_FILE)
        shapes = {key: entry.shape for key, entry in entries.items()}
    name = "peft" if "peft_type" in raw else "peftlab"
    return AdapterContents(path, name, raw, files, _tensors(shapes), read_metadata(metadata, path / WEIGHTS_FILE)[1])


def _check_types(raw: Mapping[str, Json], path: Path) -> None:
    """Refuse values that no reader of peft's format expects."""
    numbers, names = (int, float), (list, str, NoneType)
    types = {
        "r": (int,), "lora_alpha": numbers, "rank_pattern": (dict, NoneType), "alpha_pattern": (dict, NoneType),
        "target_modules": names, "exclude_modules": names, "modules_to_save": (list, NoneType),
        "target_parameters": (list, NoneType),
    }  # fmt: skip
    for key, allowed in types.items():
        value = raw.get(key)
        items = value if isinstance(value, list) else []
        if key in raw and (not isinstance(value, allowed) or not all(isinstance(item, str) for item in items)):
            raise PeftlabError(f"{path}: {key}: {value!r} is not what peft writes there")
        number = int if key == "rank_pattern" else numbers
        if isinstance(value, dict) and not all(isinstance(each, number) and each > 0 for each in value.values()):
            raise PeftlabError(f"{path}: {key}: {value!r} must have numbers above 0")
    r = raw.get("r")
    if "peft_type" in raw and isinstance(r, int) and r < 1:
        raise PeftlabError(f"{path}: r: {r} is below 1")


def _number(value: Json) -> float:
    assert isinstance(value, int | float)  # by _check_types
    return value


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    return {key: tuple(tensor.shape) for key, tensor in tensors.items()}


def _tensors(shapes: Mapping[str, Shape]) -> tuple[AdapterTensor, ...]:
    return tuple(_tensor(key, shape) for key, shape in shapes.items() if ".original_module." not in key)


def _tensor(key: str, shape: Shape) -> AdapterTensor:
    name = key.removeprefix(PREFIX)
    if found := _FACTOR.fullmatch(name):
        kind = "lora_bias" if found["last"] == "bias" else found["kind"]
        # peft nests the linear maps inside a module such as MultiheadAttention below its wrapper.
        module = found["module"].replace(".base_layer.", ".")
        return AdapterTensor(key, shape, module, kind, depth=found["wrappers"].count(".base_layer"))
    if found := _FACTOR_OF_PARAMETER.fullmatch(name):
        return AdapterTensor(key, shape, found["module"], found["kind"], found["parameter"])
    if found := _BOTTLENECK.fullmatch(name):
        return AdapterTensor(key, shape, found["module"], "other")
    kind = "base" if ".base_layer." in name else "whole"
    module, _, parameter = name.replace(".modules_to_save.", ".").replace(".base_layer.", ".").rpartition(".")
    return AdapterTensor(key, shape, module, kind, parameter)


# Single experts: a model of today has all experts' weights in two tensors, (experts, 2·width, in) and (experts, in,
# width), and peft one pair of factors for each. Engines whose converters know the older checkpoints want one pair for
# each expert's gate, up and down matrix.

_QWEN = ("mlp.experts", "mlp.experts", ("gate_proj", "up_proj", "down_proj"))
SINGLE_EXPERTS: dict[str, tuple[str, str, tuple[str, str, str]]] = {
    "Qwen2MoeForCausalLM": _QWEN,
    "Qwen3MoeForCausalLM": _QWEN,
    "OlmoeForCausalLM": _QWEN,
    "MixtralForCausalLM": ("block_sparse_moe.experts", "mlp.experts", ("w1", "w3", "w2")),
}
"""By model class: the module of the experts in older checkpoints and in transformers; gate, up, down in the older."""


@dataclass(frozen=True)
class SingleExpert:
    """One matrix of one expert, as an older checkpoint names it.

    Attributes:
        container: the module with all experts' weights, as transformers calls it.
        expert: the expert's number. matrix: 0 gate, 1 up, 2 down.
    """

    container: str
    expert: int
    matrix: int


def single_expert(architecture: str, module: str) -> SingleExpert | None:
    """Return the expert and matrix that a module name of an older checkpoint means; None for any other name.

    Args:
        architecture: the model's class. module: a module's name in the adapter.
    """
    found = re.fullmatch(r"(?P<container>.+)\.(?P<expert>\d+)\.(?P<matrix>\w+)", module)
    if found is None or architecture not in SINGLE_EXPERTS:
        return None
    theirs, ours, matrices = SINGLE_EXPERTS[architecture]
    container = found["container"]
    if not container.endswith(f".{theirs}") or found["matrix"] not in matrices:
        return None
    return SingleExpert(container.removesuffix(theirs) + ours, int(found["expert"]), matrices.index(found["matrix"]))


def split_experts(architecture: str, name: str, a: Tensor, b: Tensor, experts: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the factors of one parameter of all experts as factors of each expert's matrices, by module name.

    Args:
        architecture: the model's class, a key of ``SINGLE_EXPERTS``.
        name: name of the parameter.
        a: (experts·r, in).
        b: (out, r·experts), in peft's order.
        experts: how many.
    """
    theirs, ours, (gate, up, down) = SINGLE_EXPERTS[architecture]
    module, _, parameter = name.rpartition(".")
    prefix = module.removesuffix(ours) + theirs
    a = a.reshape(experts, -1, a.shape[1])  # (experts, r, in)
    b = b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)  # (experts, out, r)
    half = b.shape[1] // 2  # the rows of gate come before those of up
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for expert in range(experts):
        if parameter == "down_proj":
            found[f"{prefix}.{expert}.{down}"] = a[expert], b[expert]
        else:
            found[f"{prefix}.{expert}.{gate}"] = a[expert], b[expert, :half]
            found[f"{prefix}.{expert}.{up}"] = a[expert], b[expert, half:]
    return found


_MAX_HINTS = 8  # tensors whose nearest names are looked for; comparing a name with all of a large model's takes a while
_InOut = list[tuple[Shape, int]]  # input shape and output size of weights


@dataclass(frozen=True)
class AdapterFit:
    """An adapter compared with its base.

    Attributes:
        contents: the adapter. model: the model it was trained in, on the meta device.
        base: the base's directory.
    """

    contents: AdapterContents
    model: PreTrainedModel
    base: Path

    @property
    def architecture(self) -> str:
        """The model's class."""
        return type(self.model).__name__

    def fresh_model(self) -> PreTrainedModel:
        """Return another model like ``model``, of transformers' class, to be changed."""
        config = load_config(str(self.base)) if isinstance(self.model, PlainModel) else self.model.config
        return empty_model(self.architecture, config, self.base)

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """The model's modules by name."""
        return dict(self.model.named_modules(remove_duplicate=False))

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """The shapes of the model's parameters and buffers by name."""
        return _shapes(dict((*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers())))

    @cached_property
    def unmatched(self) -> dict[str, str]:
        """The names that the file contains and the base does not, each with the reason."""
        found: dict[str, str] = {}
        for tensor in self.contents.tensors:
            if tensor.target not in found and (why := self._why_unmatched(tensor, hint=len(found) < _MAX_HINTS)):
                found[tensor.target] = why
        return found

    @cached_property
    def matched(self) -> list[str]:
        """The base's modules that the file would change."""

        def module(tensor: AdapterTensor) -> str:
            one = single_expert(self.architecture, tensor.module)
            return one.container if one else tensor.module or tensor.parameter

        names = {module(tensor) for tensor in self.contents.tensors if tensor.kind != "base"}
        return sorted(names - {module(tensor) for tensor in self.contents.tensors if tensor.target in self.unmatched})

    @cached_property
    def missing(self) -> list[str]:
        """The base's modules that the configuration targets and the file has no factors for."""
        raw, whole = self.contents.raw, self.contents.names("modules_to_save")

        def chosen(names: Iterable[str], key: str) -> list[str]:
            value = raw.get(key)
            if isinstance(value, str):
                return matching(value, names, what=key)
            targets = self.contents.names(key)
            return [name for name in names if any(has_suffix(name, target) for target in targets)]

        if raw.get("target_modules") == ALL_LINEAR or self.contents.format != "peft":
            return []
        leaves = [name for name, module in self.modules.items() if leaf_kind(module) is not None]
        leaves = [name for name in leaves if not any(part in whole for part in name.split("."))]
        targeted = chosen(leaves, "target_modules") if raw.get("target_modules") else []
        excluded = set(chosen(targeted, "exclude_modules")) if raw.get("exclude_modules") else set()
        layers = raw.get("layers_to_transform")
        if isinstance(layers, list | int):
            layers = [layers] if isinstance(layers, int) else layers
            targeted = [name for name in targeted if layer_index(name) in layers]
        adapted = {pair.module for pair in self.contents.pairs}
        shared = {id(self.modules[name]) for name in adapted if name in self.modules}
        return [
            name
            for name in targeted
            if name not in excluded and name not in adapted and id(self.modules[name]) not in shared
        ]

    @cached_property
    def unmatched_targets(self) -> list[str]:
        """The names in ``target_modules`` that match no module of the base."""
        targets = self.contents.names("target_modules") if self.contents.format == "peft" else []
        return [target for target in targets if not any(has_suffix(name, target) for name in self.modules)]

    @cached_property
    def plain(self) -> bool:
        """Whether the file is LoRA in peft's format with nothing beside rank, alpha and a list of targets, each linear
        map of a plain model that they name has both factors under peft's keys, and no other module has."""
        contents, raw = self.contents, self.contents.raw
        targets, rank = contents.names("target_modules"), raw.get("r")
        if contents.format != "peft" or not isinstance(self.model, PlainModel) or type(rank) is not int:
            return False
        if raw.get("peft_type") != "LORA" or raw.get("task_type") not in (None, "CAUSAL_LM"):
            return False
        if contents.settings.keys() - _PLAIN or targets != raw.get("target_modules") or self.unmatched or self.missing:
            return False
        keys = {tensor.key for tensor in contents.tensors}
        expected = {f"{PREFIX}{pair.module}.{kind}.weight" for pair in contents.pairs for kind in ("lora_A", "lora_B")}
        return keys == expected and all(
            type(self.modules[pair.module]) is nn.Linear
            and any(has_suffix(pair.module, target) for target in targets)
            and pair.a[0] == pair.b[-1] == rank
            for pair in contents.pairs
        )

    def all_experts(self, pair: FactorPair) -> bool:
        """Return whether the factors are those of one 3-D parameter of an experts module."""
        module = self.modules.get(pair.module)
        parameters = [] if module is None else [each for each in module._parameters.values() if each is not None]
        return any(parameter.ndim == 3 for parameter in parameters) and not isinstance(module, nn.Conv1d)

    def incomplete_experts(self) -> str:
        """Return an experts module of which not all matrices of all experts have factors, or an empty text."""
        found: dict[str, set[tuple[int, int]]] = {}
        for pair in self.contents.pairs:
            if one := single_expert(self.architecture, pair.module):
                found.setdefault(one.container, set()).add((one.expert, one.matrix))
        incomplete = (name for name, each in found.items() if len(each) < 3 * self.shapes[f"{name}.down_proj"][0])
        return next(incomplete, "")

    def _why_unmatched(self, tensor: AdapterTensor, *, hint: bool) -> str:
        """Return why a tensor of the file has no place in the model, or an empty text.

        Args:
            tensor: the tensor.
            hint: whether to look for names that are spelled alike.
        """
        if tensor.kind in ("whole", "base"):
            shape = self.shapes.get(tensor.target)
            if shape is None:
                near = did_you_mean(tensor.target, self.shapes) if hint else ""
                return f"{self.architecture} has no {tensor.target}{near}"
            return "" if shape == tensor.shape else f"{tensor.key} has shape {tensor.shape}, the model's has {shape}"
        one = single_expert(self.architecture, tensor.module)
        module = self.modules.get(one.container if one else tensor.module)
        if module is None:
            near = did_you_mean(tensor.module, self.modules) if hint else ""
            return f"{self.architecture} has no {tensor.module}{near}"
        if not tensor.kind.endswith(("_A", "_B")):
            return ""
        sizes = _sizes(module, tensor) if one is None else _single_sizes(module, one)
        if not sizes:
            return f"{tensor.module} is a {type(module).__name__}, which has no weight that LoRA acts on"
        inputs, outputs = {inner for inner, _ in sizes}, {(outer,) for _, outer in sizes}
        is_a = tensor.kind.endswith("_A")
        given = tensor.shape[1:] if is_a else tensor.shape[:1]
        if given in (inputs if is_a else outputs):
            return ""
        why = "; A and B are swapped" if given in (outputs if is_a else inputs) else ""
        return f"{tensor.key} has shape {tensor.shape}, which does not fit {tensor.module}{why}"


def _sizes(module: nn.Module, tensor: AdapterTensor) -> _InOut:
    """Return input and output sizes of each weight of a module that factors could belong to."""
    found: _InOut = []
    for name, parameter in module._parameters.items():
        if parameter is None or parameter.ndim < 2 or (tensor.parameter and name != tensor.parameter):
            continue
        shape = tuple(parameter.shape)
        if isinstance(module, (nn.Embedding, *conv1d())):
            found.append(((shape[0],), math.prod(shape[1:])))
        elif parameter.ndim == 3 and not isinstance(module, nn.Conv1d):
            inner, outer = (shape[1], shape[2]) if stored_transposed(module, parameter) else (shape[2], shape[1])
            found.append(((inner,), outer))
        else:
            found.append((shape[1:], shape[0]))
    return found


def _single_sizes(module: nn.Module, one: SingleExpert) -> _InOut:
    """Return input and output size of one expert's matrix; nothing if there is no such expert."""
    weight = getattr(module, "down_proj" if one.matrix == 2 else "gate_up_proj", None)
    if weight is None or one.expert >= weight.shape[0]:
        return []
    _, d_out, d_in = weight.shape
    return [((d_in,), d_out if one.matrix == 2 else d_out // 2)]


def fit_to_base(contents: AdapterContents, base: str) -> AdapterFit:
    """Return an adapter compared with the model of ``base`` that has most of its modules.

    Args:
        contents: the adapter.
        base: reference of the base model; of one on the hub that the adapter names, in the revision that it names.

    Raises:
        PeftlabError: no such base, or no model can be made of its configuration.
    """
    file = contents.path / CONFIG_FILE
    named_base = text_or_none(contents.raw, "base_model_name_or_path", file)
    directory = base_directory(
        base, revision=text_or_none(contents.raw, "revision", file) if base == named_base else None
    )
    task = text_or_none(contents.raw, "task_type", file) if contents.format == "peft" else None

    def of_shapes(names: Mapping[str, AdapterTensor]) -> Adapter:
        shapes = {name: torch.empty(tensor.shape, device="meta") for name, tensor in names.items()}
        return Adapter(LoraConfig(), shapes, contents.base, task_type=task)

    source, named = str(contents.path), {tensor.target: tensor for tensor in contents.tensors}
    with suppress(PeftlabError):  # a base whose weights cannot be read is told by the readers that read them
        shards, factors = open_shards(directory), {f"{each.target}.{each.kind}": each for each in contents.tensors}
        plain = plain_task_model(of_shapes(factors), directory, shards, MergeOptions())
        if plain is not None and named.keys() <= dict(plain.named_modules()).keys():
            return AdapterFit(contents, plain, directory)
    return AdapterFit(contents, closest_model(of_shapes(named), directory, source=source)[0], directory)
