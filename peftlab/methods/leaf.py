"""Adapted leaf modules: subclasses of a model's own leaves that share their parameters and add to what they compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from peftlab.errors import PeftlabError
from peftlab.untyped import Parameters

# Where a model's call has its batch, after the input that the model itself names.
_INPUTS = ("inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")


class BatchRows:
    """The adapters of a batch's rows, for tensors with one entry per row, or several next to each other.

    Attributes:
        adapters: the names that occur, each once; an adapter's number is its position.
        numbers: the number of each row's adapter.
        repeats: how often ``generate`` repeats each row.
        batch: the number of rows of the present call. lengths: the first sizes that a tensor of this batch can have.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.adapters = list(dict.fromkeys(names))
        self.numbers = [self.adapters.index(name) for name in names]
        self.repeats = 1
        self.batch = len(names)
        self.lengths = {self.batch}
        self._known: dict[tuple[int, tuple[int, ...], torch.device], Tensor | slice[int, int, int]] = {}

    def called(self, model: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Take the sizes of a call of the model: a forward pre-hook.

        Raises:
            PeftlabError: the batch has another number of rows, or the model is in training mode.
        """
        if model.training:
            raise PeftlabError("adapter_names is for inference; call model.eval() first")
        named = [kwargs.get(key) for key in (getattr(model, "main_input_name", "input_ids"), *_INPUTS)]
        tensors = [value for value in (*args, *named) if isinstance(value, Tensor)]
        if not tensors:
            return
        rows, self.batch = len(self.numbers), tensors[0].shape[0]
        if self.batch not in (rows, rows * self.repeats):
            raise PeftlabError(f"adapter_names has {rows} names, and the batch {self.batch} rows")
        every = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim > 1]
        tokens = {value.shape[0] * value.shape[1] for value in every if value.shape[0] == self.batch}
        # Some models flatten rows and tokens into one dimension before a linear map.
        self.lengths = {rows, self.batch} | {n for n in tokens if n % rows == 0}

    def length(self, x: Tensor, leaf: str) -> int:
        """Return the first size of ``x``, the input of the module ``leaf``.

        Raises:
            PeftlabError: the size is not one that a tensor of this batch has.
        """
        if x.ndim and x.shape[0] in self.lengths:
            return x.shape[0]
        raise PeftlabError(
            f"adapter_names: {leaf} receives a tensor of shape {tuple(x.shape)}, which does not begin with the "
            f"{self.batch} rows of the batch; run the rows of each adapter by themselves (peftlab.set_adapter)"
        )

    def index(self, length: int, numbers: tuple[int, ...], device: torch.device) -> Tensor | slice[int, int, int]:
        """Return the positions, of ``length``, of these adapters' rows: a slice, if they are one."""
        key = (length, numbers, device)
        if key not in self._known:
            times = length // len(self.numbers)
            mine = [row * times + i for row, n in enumerate(self.numbers) if n in numbers for i in range(times)]
            one = mine[-1] - mine[0] + 1 == len(mine)
            self._known[key] = slice(mine[0], mine[-1] + 1) if one else torch.tensor(mine, device=device)
        return self._known[key]


ModuleT = TypeVar("ModuleT", bound=nn.Module)
LeafT = TypeVar("LeafT", bound="AnyLeaf")

if TYPE_CHECKING:
    _Leaf = nn.Module  # what every adapted leaf is, by the base class that its own class has besides
else:
    _Leaf = object


@dataclass(frozen=True)
class Folding:
    """How a fold is computed and stored.

    Attributes:
        precision: dtype of product and sum; an fp64 weight is folded in fp64 in any case.
        stored: dtype that the sum is rounded to, once; None for the weight's own.
        watch: called for each block with W0, ΔW and W0 + ΔW in ``precision``, and the rounded sum as stored.
        in_place: write the result into the weight's own memory (only without ``stored``).
        only: name of the one parameter of the leaf to fold, when the others may be on the meta device; None for all.
    """

    precision: torch.dtype = torch.float32
    stored: torch.dtype | None = None
    watch: Callable[[Tensor, Tensor, Tensor, Tensor], None] | None = None
    in_place: bool = False
    only: str | None = None


FOLDING = Folding()
Variant = tuple[nn.Module, tuple[int, ...]]
"""A leaf in a batch of several adapters: as one or more of them have it, and their numbers (``BatchRows``)."""


class Adapted(_Leaf):
    """Base of all adapted leaves: each subclasses ``base_class`` too, computes what that does and adds to it.

    Parameters keep the names they had in the base leaf, so that state-dict keys, optimiser groups and weight tying
    stay valid.

    Attributes:
        base_class: the class of the leaf that was replaced.
        added: names of the parameters, buffers, modules and attributes that the base leaf does not have.
        enabled: whether the addition is computed; ``peftlab.disabled`` sets it to False.
    """

    base_class: type[nn.Module]
    added: tuple[str, ...] = ()
    enabled: bool = True

    def fold(self, how: Folding = FOLDING) -> dict[str, Tensor]:
        """Return the base leaf's parameters with the addition folded in, by name; see ``Folding`` and ``merge``.

        The names do not depend on values: the parameters may be on the meta device.
        """
        raise NotImplementedError

    def unfoldable(self) -> str:
        """Return why the addition cannot be folded into the base leaf's parameters; "" where it can."""
        return ""

    def update_start(self) -> None:
        """Compute again what the addition derives from the base's weight, once that weight has been loaded."""

    @classmethod
    def batched_variant(
        cls, leaf: nn.Module, name: str, variants: Sequence[Variant], rows: BatchRows
    ) -> nn.Module | None:
        """Return ``leaf`` so that it computes all ``variants`` at once, each for its rows; None if it cannot."""
        return None


class AnyLeaf(Adapted):
    """An adapted leaf whose base can be any class: ``adapted_class`` makes one subclass for each base, and caches it.

    These classes are not attributes of a module, so pickle stores the pair they are made of instead.
    """

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        kind = next(c for c in type(self).__mro__ if issubclass(c, AnyLeaf) and c.__dict__.get("made") is None)
        return _blank, (kind, self.base_class), self.__getstate__()


_CLASSES: dict[tuple[type[AnyLeaf], type[nn.Module]], type] = {}


def adapted_class(kind: type[LeafT], base: type[nn.Module]) -> type[LeafT]:
    """Return the subclass of leaf class ``base`` that behaves as ``kind``; ``kind`` itself if it is one."""
    if kind.__dict__.get("base_class") is base:
        return kind
    if (kind, base) not in _CLASSES:
        members = {"base_class": base, "made": True, "__module__": kind.__module__}
        _CLASSES[kind, base] = type(f"{kind.__name__}{base.__name__}", (kind, base), members)
    return _CLASSES[kind, base]


def _blank(kind: type[AnyLeaf], base: type[nn.Module]) -> nn.Module:
    made = adapted_class(kind, base)
    return made.__new__(made)


def recast(cls: type[ModuleT], module: nn.Module) -> ModuleT:
    """Return a ``cls`` that shares ``module``'s parameters, buffers, hooks and attributes.

    The two have separate registries: what is registered on one later is not registered on the other.
    """
    new = cls.__new__(cls)
    state = {k: v.copy() if isinstance(v, (dict, set)) else v for k, v in vars(module).items()}
    vars(new).update(state)
    return new


def with_weight(leaf: Adapted, weight: Tensor) -> nn.Module:
    """Return the base leaf of an adapted one with another weight, for one call of its forward."""
    plain = recast(leaf.base_class, leaf)
    parameters: Parameters = plain._parameters
    parameters["weight"] = weight
    return plain


def base_leaf(module: nn.Module) -> nn.Module:
    """Return the plain base leaf of an adapted one: the same parameters, without those the method added."""
    assert isinstance(module, Adapted)
    plain = recast(module.base_class, module)
    for name in module.added:
        for registry in (plain._parameters, plain._buffers, plain._modules):
            registry.pop(name, None)
        plain._non_persistent_buffers_set.discard(name)
        vars(plain).pop(name, None)
    vars(plain).pop("enabled", None)
    return plain


def addition(leaf: Adapted) -> tuple[int, ...]:
    """Return what identifies the parameters that a leaf's fold reads: two leaves that share all of them fold alike."""
    parameters = leaf._parameters
    return tuple(id(parameters[name]) for name in ("weight", *leaf.added) if parameters.get(name) is not None)


def like_adapted(adapted: nn.Module, leaf: nn.Module) -> nn.Module:
    """Return the plain ``leaf`` adapted as ``adapted`` is, whose additions it shares."""
    assert isinstance(adapted, Adapted)
    new = recast(type(adapted), leaf)
    added = set(adapted.added)
    for registry in ("_parameters", "_buffers", "_modules"):
        vars(new)[registry].update({key: value for key, value in vars(adapted)[registry].items() if key in added})
    vars(new).update({key: value for key, value in vars(adapted).items() if key in added})
    new._non_persistent_buffers_set |= adapted._non_persistent_buffers_set & added
    for name, buffer in new._buffers.items():
        if name in added and buffer is not None:
            new._buffers[name] = buffer.to(next(leaf.parameters()).device)  # it does not move with the model
    return new


def added_parameters(adapted: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that an adapted leaf has beside its base's, by their names below the leaf."""
    assert isinstance(adapted, Adapted)
    found = {}
    for name in adapted.added:
        if (parameter := adapted._parameters.get(name)) is not None:
            found[name] = parameter
        elif (module := adapted._modules.get(name)) is not None:
            found |= {f"{name}.{key}": parameter for key, parameter in module.named_parameters()}
    return found


def exchange(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    """Replace the module of each name by the one given, under every name that the replaced module has."""
    new = {id(model.get_submodule(name)): module for name, module in modules.items()}
    for parent in [*model.modules(), *modules.values()]:  # one that is put in can be below another
        for child_name, child in parent._modules.items():
            if id(child) in new:
                parent._modules[child_name] = new[id(child)]


def trainable_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of what trains beside ``weight``: fp32 for half-precision or quantised weights.

    Small steps would be lost in the rounding of a half-precision parameter.
    """
    return weight.dtype if weight.dtype in (torch.float32, torch.float64) else torch.float32
