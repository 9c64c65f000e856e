"""What an adapter's files would touch in a base model, from names and shapes alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from peftlab.checkpoints.adapter import CONFIG_FILE, Adapter, text_or_none
from peftlab.checkpoints.consumers.contents import Contents, Pair, Piece
from peftlab.checkpoints.consumers.single_experts import OneExpert, one_expert
from peftlab.checkpoints.merge.base import base_directory
from peftlab.checkpoints.merge.task_model import closest_model
from peftlab.errors import did_you_mean
from peftlab.methods.lora.config import LoraConfig
from peftlab.methods.lora.experts import stored_transposed
from peftlab.methods.lora.kinds import leaf_kind
from peftlab.methods.targets import ALL_LINEAR, has_suffix, layer_index
from peftlab.models.skeleton import empty_model
from peftlab.patterns import matching

_HINTS = 8  # misfits whose nearest names are looked for; comparing a name with all of a large model's takes a while
Sides = list[tuple[tuple[int, ...], int]]
"""Input shape and output size of weights."""


@dataclass(frozen=True)
class Fit:
    """An adapter beside its base.

    Attributes:
        contents: the adapter. model: the model it was trained in, on the meta device.
        base: the base's directory.
    """

    contents: Contents
    model: PreTrainedModel
    base: Path

    @property
    def architecture(self) -> str:
        """The model's class."""
        return type(self.model).__name__

    def fresh_model(self) -> PreTrainedModel:
        """Return another model like ``model``, to be changed."""
        return empty_model(self.architecture, self.model.config, self.base)

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        """The model's modules by name."""
        return dict(self.model.named_modules(remove_duplicate=False))

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the model's parameters and buffers by name."""
        named = self.model.named_parameters(remove_duplicate=False)
        return {name: tuple(tensor.shape) for name, tensor in (*named, *self.model.named_buffers())}

    @cached_property
    def misfits(self) -> dict[str, str]:
        """What the file has and the base does not, with the reason."""
        found: dict[str, str] = {}
        for piece in self.contents.pieces:
            if piece.target not in found and (said := self._misfit(piece, hint=len(found) < _HINTS)):
                found[piece.target] = said
        return found

    @cached_property
    def matched(self) -> list[str]:
        """The base's modules that the file would change."""
        names = {self._owner(piece) for piece in self.contents.pieces if piece.kind != "base"}
        bad = {self._owner(piece) for piece in self.contents.pieces if piece.target in self.misfits}
        return sorted(names - bad)

    def _owner(self, piece: Piece) -> str:
        one = one_expert(self.architecture, piece.module)
        return one.container if one else piece.module or piece.parameter

    @cached_property
    def missing(self) -> list[str]:
        """The base's modules that the configuration targets and the file has no factors for."""
        targets, whole = self.contents.targets("target_modules"), self.contents.names("modules_to_save")
        if not targets or targets == ALL_LINEAR or self.contents.format != "peft":
            return []
        leaves = [name for name, module in self.modules.items() if leaf_kind(module) is not None]
        leaves = [name for name in leaves if not any(part in whole for part in name.split("."))]
        chosen = self._chosen(leaves, targets, "target_modules")
        if excluded := self.contents.targets("exclude_modules"):
            chosen = [name for name in chosen if name not in self._chosen(chosen, excluded, "exclude_modules")]
        layers = self.contents.raw.get("layers_to_transform")
        if isinstance(layers, list | int):
            chosen = [name for name in chosen if layer_index(name) in ([layers] if isinstance(layers, int) else layers)]
        adapted = {pair.module for pair in self.contents.pairs}
        shared = {id(self.modules[name]) for name in adapted if name in self.modules}
        return [name for name in chosen if name not in adapted and id(self.modules[name]) not in shared]

    @cached_property
    def idle_targets(self) -> list[str]:
        """The names in ``target_modules`` that match no module of the base."""
        targets = self.contents.names("target_modules") if self.contents.format == "peft" else []
        return [target for target in targets if not any(has_suffix(name, target) for name in self.modules)]

    def _chosen(self, names: Iterable[str], targets: list[str] | str, what: str) -> list[str]:
        if isinstance(targets, str):
            return matching(targets, names, what=what)
        return [name for name in names if any(has_suffix(name, target) for target in targets)]

    def experts(self, pair: Pair) -> bool:
        """Whether the factors are those of one 3-D parameter of an experts module."""
        module = self.modules.get(pair.module)
        parameters = [] if module is None else [each for each in module._parameters.values() if each is not None]
        return any(parameter.ndim == 3 for parameter in parameters) and not isinstance(module, nn.Conv1d)

    def single(self, pair: Pair) -> OneExpert | None:
        """Return what the factors are of if they are those of one expert's matrix, as older checkpoints name it."""
        return one_expert(self.architecture, pair.module)

    def _misfit(self, piece: Piece, *, hint: bool) -> str:
        """Return why a tensor of the file has no place in the model, or an empty text.

        Args:
            hint: whether to look for names that are spelled alike.
        """
        if piece.kind in ("whole", "base"):
            return self._whole_misfit(piece, hint)
        one = one_expert(self.architecture, piece.module)
        module = self.modules.get(one.container if one else piece.module)
        if module is None:
            near = did_you_mean(piece.module, self.modules) if hint else ""
            return f"{self.architecture} has no {piece.module}{near}"
        sides = self._sides(module, piece) if one is None else _of_one(module, one)
        if piece.kind.endswith("_A"):
            wanted = {inner for inner, _ in sides}
            given: tuple[int, ...] = piece.shape[1:]
        elif piece.kind.endswith("_B"):
            wanted = {(outer,) for _, outer in sides}
            given = piece.shape[:1]
        else:
            return ""
        if not wanted:
            return f"{piece.module} is a {type(module).__name__}, which has no weight that LoRA acts on"
        if given in wanted:
            return ""
        turned = {(outer,) if piece.kind.endswith("_A") else inner for inner, outer in sides}
        why = "; A and B are swapped" if given in turned else ""
        return f"{piece.key} has shape {piece.shape}, which does not fit {piece.module}{why}"

    def _sides(self, module: nn.Module, piece: Piece) -> Sides:
        """Return input and output sizes of each weight of a module that factors could belong to."""
        found: Sides = []
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.ndim < 2 or (piece.parameter and name != piece.parameter):
                continue
            shape = tuple(parameter.shape)
            if isinstance(module, nn.Embedding | Conv1D):
                found.append(((shape[0],), math.prod(shape[1:])))
            elif parameter.ndim == 3 and not isinstance(module, nn.Conv1d):
                inner, outer = (shape[1], shape[2]) if stored_transposed(module, parameter) else (shape[2], shape[1])
                found.append(((inner,), outer))
            else:
                found.append((shape[1:], shape[0]))
        return found

    def _whole_misfit(self, piece: Piece, hint: bool) -> str:
        shape = self.shapes.get(piece.target)
        if shape is None:
            near = did_you_mean(piece.target, self.shapes) if hint else ""
            return f"{self.architecture} has no {piece.target}{near}"
        if shape != piece.shape:
            return f"{piece.key} has shape {piece.shape}, the model's has {shape}"
        return ""


def _of_one(module: nn.Module, one: OneExpert) -> Sides:
    """Return input and output size of one expert's matrix; nothing if there is no such expert."""
    weight = getattr(module, one.parameter, None)
    if weight is None or one.expert >= weight.shape[0]:
        return []
    _, d_out, d_in = weight.shape
    return [((d_in,), d_out if one.matrix == 2 else d_out // 2)]


def fit(contents: Contents, base: str) -> Fit:
    """Return an adapter beside the model of ``base`` that has most of its modules.

    Raises:
        PeftlabError: no such base, or no model can be made of its configuration.
    """
    place = base_directory(base)
    names = {piece.target: torch.empty(piece.shape, device="meta") for piece in contents.pieces}
    task = text_or_none(contents.raw, "task_type", contents.path / CONFIG_FILE) if contents.format == "peft" else None
    like = Adapter(LoraConfig(), names, contents.base, task_type=task)
    return Fit(contents, closest_model(like, place, source=str(contents.path))[0], place)
