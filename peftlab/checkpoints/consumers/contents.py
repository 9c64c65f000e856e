"""What the files of an adapter say, read from headers alone: any format that peftlab reads, and what it refuses."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import NoneType

from peftlab.checkpoints.adapter import (
    CONFIG_FILE,
    PICKLE_FILE,
    WEIGHTS_FILE,
    adapter_directory,
    base_of,
    read_config,
)
from peftlab.checkpoints.formats.adapterhub import is_adapterhub, read_adapterhub
from peftlab.checkpoints.formats.peft import PREFIX
from peftlab.checkpoints.io.pickles import read_pickle
from peftlab.checkpoints.io.tensorfiles import read_header
from peftlab.errors import PeftlabError
from peftlab.files import Json
from peftlab.methods.targets import has_suffix
from peftlab.patterns import matching

_FACTOR = re.compile(
    r"(?P<module>.+?)(?P<below>(?:\.base_layer)*)\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector)(?:\.(?P<last>weight|bias))?"
)
_OF_PARAMETER = re.compile(r"(?P<module>.+)\.(?P<parameter>\w+)_(?P<kind>lora_A|lora_B)")
_BESIDE = re.compile(r"(?P<module>.+?)\.(?:adapter_down|adapter_up|token_adapter)\..+")


@dataclass(frozen=True)
class Piece:
    """One tensor of an adapter.

    Attributes:
        key: its key in the file. shape: of it.
        module: the base's module that it belongs to.
        kind: ``lora_A``, ``lora_B``, ``lora_embedding_A``, ``lora_embedding_B``, ``lora_magnitude_vector``,
            ``lora_bias``, ``base`` (a value of the base below an adapted module), ``whole`` (a parameter of the base,
            trained), or ``other`` (added beside a module in another way).
        parameter: the parameter's name in the module, for ``whole`` and ``base``; of the factors of one parameter of
            a module, that parameter's where the key says it.
        depth: how many wrappers below the outermost; only experts modules have several.
    """

    key: str
    shape: tuple[int, ...]
    module: str
    kind: str
    parameter: str = ""
    depth: int = 0

    @property
    def target(self) -> str:
        """The base's name for what the tensor belongs to: a module, or a parameter that is trained whole."""
        return f"{self.module}.{self.parameter}".lstrip(".") if self.kind in ("whole", "base") else self.module


@dataclass(frozen=True)
class Pair:
    """The factors of one module, or of one parameter of an experts module.

    Attributes:
        module: the module. depth: as in ``Piece``. a, b: the factors' shapes. embedding: whether the module is one.
    """

    module: str
    depth: int
    a: tuple[int, ...]
    b: tuple[int, ...]
    embedding: bool

    @property
    def last(self) -> str:
        """The last component of the module's name."""
        return self.module.rpartition(".")[2]


@dataclass(frozen=True)
class Contents:
    """The files of an adapter.

    Attributes:
        path: the directory, or loralib's file. format: ``peft``, ``peftlab``, ``adapterhub`` or ``loralib``.
        raw: ``adapter_config.json``; empty for loralib. files: names of the directory's files.
        pieces: its tensors. base: the base model as peftlab described it, or an empty object.
    """

    path: Path
    format: str
    raw: Mapping[str, Json]
    files: frozenset[str]
    pieces: tuple[Piece, ...]
    base: Mapping[str, Json]

    @cached_property
    def pairs(self) -> list[Pair]:
        """The modules with both factors, in the file's order."""
        found: dict[tuple[str, int, str], dict[str, Piece]] = {}
        for piece in self.pieces:
            if piece.kind.endswith(("_A", "_B")):
                found.setdefault((piece.module, piece.depth, piece.parameter), {})[piece.kind[-1]] = piece
        return [
            Pair(module, depth, sides["A"].shape, sides["B"].shape, "embedding" in sides["A"].kind)
            for (module, depth, _), sides in found.items()
            if len(sides) == 2
        ]

    def of_kind(self, *kinds: str) -> list[Piece]:
        """Return the tensors of these kinds."""
        return [piece for piece in self.pieces if piece.kind in kinds]

    @property
    def beside_factors(self) -> list[Piece]:
        """The tensors that are no factors of a low-rank update, and no weights of the base."""
        others = self.of_kind("whole", "other", "lora_bias", "lora_magnitude_vector")
        return others + [piece for piece in self.of_kind("base") if piece.parameter != "weight"]

    @property
    def r(self) -> int:
        """The rank of the modules that no pattern names; 8, as in peft, where the configuration has none."""
        return int(_number(self.raw.get("r", 8)))

    @property
    def lora_alpha(self) -> float:
        """The alpha of the modules that no pattern names; 8, as in peft, where the configuration has none."""
        return _number(self.raw.get("lora_alpha", 8))

    def patterns(self, key: str) -> dict[str, float]:
        """Return ``rank_pattern`` or ``alpha_pattern``."""
        value = self.raw.get(key)
        return {name: _number(each) for name, each in value.items()} if isinstance(value, dict) else {}

    def names(self, key: str) -> list[str]:
        """Return the names in a list of the configuration; none where it has no such list."""
        value = self.raw.get(key)
        return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []

    def targets(self, key: str) -> list[str] | str:
        """Return the names or the regular expression at a key of the configuration; empty where it has neither."""
        value = self.raw.get(key)
        return value if isinstance(value, str) else self.names(key)

    def parameter_of(self, pair: Pair) -> str:
        """Return the parameter that factors of a module with several belong to; empty for other modules.

        peft wraps a module's parameters in the order they have in it, and in every experts module the one called
        "down" comes last, so that its factors are outermost.
        """
        named = [name.rpartition(".") for name in self.names("target_parameters")]
        mine = sorted(
            {last for parent, _, last in named if not parent or has_suffix(pair.module, parent)},
            key=lambda last: "down" in last,
        )
        return mine[len(mine) - 1 - pair.depth] if pair.depth < len(mine) else ""

    def rank(self, pair: Pair) -> int:
        """Return the rank that peft's configuration gives to a module."""
        return int(self._by_pattern("rank_pattern", pair, self.r))

    def scale(self, pair: Pair) -> float:
        """Return the factor of B·A that peft applies at a module."""
        rank, alpha = self.rank(pair), float(self._by_pattern("alpha_pattern", pair, self.lora_alpha))
        return alpha / (math.sqrt(rank) if self.raw.get("use_rslora") else rank)

    def _by_pattern(self, key: str, pair: Pair, default: float) -> float:
        parameter = self.parameter_of(pair)
        name = f"{pair.module}.{parameter}" if parameter else pair.module
        for pattern, value in self.patterns(key).items():
            if matching(rf"(.*\.)?({pattern})", [name], what=f"{self.path / CONFIG_FILE}: {key}"):
                return value
        return default


def read_contents(source: str | Path) -> Contents:
    """Return what an adapter's files say; no weights are read.

    Raises:
        PeftlabError: there is no adapter, a file is damaged, or it is of no known format.
    """
    path = Path(source)
    if path.is_file():
        shapes = {key: tuple(tensor.shape) for key, tensor in read_pickle(path, mapped=True).items()}
        if not any(key.endswith(".lora_A") for key in shapes):
            raise PeftlabError(f"{path}: no key ends in .lora_A; this is not a loralib adapter")
        return Contents(path, "loralib", {}, frozenset({path.name}), _pieces(shapes), {})
    path = adapter_directory(path)
    raw = read_config(path / CONFIG_FILE)
    _check_types(raw, path / CONFIG_FILE)
    files = frozenset(file.name for file in path.iterdir())
    if is_adapterhub(raw):
        tensors = read_adapterhub(path, raw)[1]
        return Contents(path, "adapterhub", raw, files, _pieces({k: tuple(t.shape) for k, t in tensors.items()}), {})
    if "peft_type" not in raw and not isinstance(raw.get("method"), dict):
        raise PeftlabError(
            f"{path / CONFIG_FILE}: neither a peft adapter (no peft_type) nor one of peftlab (no known method)"
        )
    shapes, metadata = _shapes(path)
    kind = "peft" if "peft_type" in raw else "peftlab"
    return Contents(path, kind, raw, files, _pieces(shapes), base_of(metadata, path / WEIGHTS_FILE))


def _check_types(raw: Mapping[str, Json], path: Path) -> None:
    """Refuse values that no reader of peft's format expects."""
    numbers, names = (int, float), (list, str, NoneType)
    kinds = {
        "r": (int,), "lora_alpha": numbers, "rank_pattern": (dict, NoneType), "alpha_pattern": (dict, NoneType),
        "target_modules": names, "exclude_modules": names, "modules_to_save": (list, NoneType),
        "target_parameters": (list, NoneType),
    }  # fmt: skip
    for key, kind in kinds.items():
        value = raw.get(key)
        inner = value if isinstance(value, list) else []
        if key in raw and (not isinstance(value, kind) or not all(isinstance(each, str) for each in inner)):
            raise PeftlabError(f"{path}: {key}: {value!r} is not what peft writes there")
        of = int if key == "rank_pattern" else numbers
        if isinstance(value, dict) and not all(isinstance(each, of) and each > 0 for each in value.values()):
            raise PeftlabError(f"{path}: {key}: {value!r} must have numbers above 0")
    r = raw.get("r")
    if "peft_type" in raw and isinstance(r, int) and r < 1:
        raise PeftlabError(f"{path}: r: {r} is below 1")


def _number(value: Json) -> float:
    assert isinstance(value, int | float)  # by _check_types
    return value


def _shapes(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    if not (path / WEIGHTS_FILE).exists() and (path / PICKLE_FILE).exists():
        return {key: tuple(tensor.shape) for key, tensor in read_pickle(path / PICKLE_FILE, mapped=True).items()}, {}
    entries, metadata = read_header(path / WEIGHTS_FILE)
    return {key: entry.shape for key, entry in entries.items()}, metadata


def _pieces(shapes: Mapping[str, tuple[int, ...]]) -> tuple[Piece, ...]:
    return tuple(_piece(key, shape) for key, shape in shapes.items() if ".original_module." not in key)


def _piece(key: str, shape: tuple[int, ...]) -> Piece:
    name = key.removeprefix(PREFIX)
    if found := _FACTOR.fullmatch(name):
        kind = "lora_bias" if found["last"] == "bias" else found["kind"]
        # Of a module with linear maps inside, as MultiheadAttention, peft nests these below its wrapper.
        module = found["module"].replace(".base_layer.", ".")
        return Piece(key, shape, module, kind, depth=found["below"].count(".base_layer"))
    if found := _OF_PARAMETER.fullmatch(name):
        return Piece(key, shape, found["module"], found["kind"], found["parameter"])
    if found := _BESIDE.fullmatch(name):
        return Piece(key, shape, found["module"], "other")
    kind = "base" if ".base_layer." in name else "whole"
    module, _, parameter = name.replace(".modules_to_save.", ".").replace(".base_layer.", ".").rpartition(".")
    return Piece(key, shape, module, kind, parameter)
