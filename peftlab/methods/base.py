"""What methods are written with: the plan they return, finding modules by name, and the leaves that replace modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from peftlab.errors import PeftlabError, nearest
from peftlab.models.architectures import SITES, Sites, inside, model_type, prefixes, task_head
from peftlab.patterns import matching
from peftlab.untyped import Parameters

ModuleT = TypeVar("ModuleT", bound=nn.Module)
LeafT = TypeVar("LeafT", bound="AnyLeaf")


@dataclass
class Plan:
    """What a method would change in a model, decided before anything is touched.

    Attributes:
        replace: name of a leaf module to the function that makes its replacement, which shares the leaf's parameters;
            the function must not change the leaf.
        train: names of the model's own parameters that are to be trained in place.
    """

    replace: dict[str, Callable[[nn.Module], nn.Module]] = field(default_factory=dict)
    train: list[str] = field(default_factory=list)


def from_layer(model: nn.Module, plan: Plan, first: int, whole: Iterable[str]) -> Plan:
    """Return the part of ``plan`` in the layers from number ``first`` on, and in the modules ``whole``.

    What belongs to no numbered layer (embeddings, pooler, final norm) stays as it is, so that backward ends at the
    input of layer ``first``.

    Args:
        whole: the modules that train in any case: the task head, and what ``modules_to_save`` names.

    Raises:
        PeftlabError: there is no such layer, or the method trains nothing in these layers.
    """
    whole = list(whole)
    names = [name for name, _ in model.named_parameters() if not inside(name, whole)]
    present = sorted({number for name in names if (number := layer_index(name)) is not None})
    if first not in present:
        numbers = f"there are {present[0]} to {present[-1]}" if present else "the model has no numbered layers"
        raise PeftlabError(f"train.layers.from (first_layer): no layer {first}; {numbers}")

    def trains(name: str) -> bool:
        number = layer_index(name)
        return inside(name, whole) or (number is not None and number >= first)

    part = Plan({n: make for n, make in plan.replace.items() if trains(n)}, [n for n in plan.train if trains(n)])
    if all(inside(name, whole) for name in (*part.replace, *part.train)):
        raise PeftlabError(
            f"train.layers.from (first_layer): the method trains nothing in layers {first} to {present[-1]}"
        )
    return part


def has_suffix(name: str, suffix: str) -> bool:
    """Whether ``name`` is ``suffix`` or ends in it after a dot."""
    return name == suffix or name.endswith("." + suffix)


def match(names: Iterable[str], targets: list[str] | str, *, what: str = "target_modules") -> list[str]:
    """Return those of ``names`` that ``targets`` matches, in order: a list of suffixes, or one full-match regex.

    Args:
        names: of modules or parameters, in the model's order.
        targets: name suffixes, or a regular expression that matches in full.
        what: the recipe's key, for the message.

    Raises:
        PeftlabError: the regex, or any one suffix of the list, matches nothing (the nearest names are in the
            message), or matching takes too long.
    """
    names = list(names)
    if isinstance(targets, str):
        picked = matching(targets, names, what=what)
        if not picked:
            pieces = re.split(r"[\s,]+", targets.strip())
            listed = all(any(has_suffix(name, piece) for name in names) for piece in pieces)
            hint = f" (did you mean [{', '.join(pieces)}]?)" if listed else nearest_modules(targets, names)
            raise PeftlabError(f"{what}: the regular expression {targets!r} matches no module{hint}")
        return picked
    for target in targets:
        if not any(has_suffix(name, target) for name in names):
            raise PeftlabError(f"{what}: {target!r} matches no module{nearest_modules(target, names)}")
    return [name for name in names if any(has_suffix(name, target) for target in targets)]


def nearest_modules(target: str, names: list[str]) -> str:
    """Return ``"; nearest: query, key"`` for the end of a message: the names most like one that matches nothing.

    Args:
        target: what was asked for.
        names: of the modules that there are.
    """
    # Compare with the last component, with the last two, and with whole names: the user may have meant any of them.
    tails = dict.fromkeys(".".join(name.split(".")[-k:]) for name in names for k in (1, 2))
    close = nearest(target, tails) or list(tails)[:6]
    return f"; nearest: {', '.join(close)}" if close else "; the model has no module of a similar name"


def layer_index(name: str, patterns: Sequence[str] = ()) -> int | None:
    """Return the number of the layer that a module belongs to, or None.

    It is the first component of its name that is a number; with ``patterns``, the first that follows a list that one of
    these regular expressions matches.

    Args:
        name: of a module or a parameter.
        patterns: regular expressions of the list's name (``layers_pattern``).
    """
    parts = name.split(".")
    lists = {".".join(parts[:i]): int(part) for i, part in enumerate(parts) if part.isdigit()}
    if not patterns:
        return next(iter(lists.values()), None)
    found = [m for pattern in patterns for m in matching(rf"(.*\.)?({pattern})", lists, what="layers_pattern")]
    return lists[found[0]] if found else None


def sites_of(model: nn.Module) -> Sites:
    """Return the sub-layer ends of a model: its own row of ``SITES``, else the first row that fits.

    A row fits if the layers with an attention end are exactly those with a feed-forward end and those with a
    feed-forward input, one of each per layer.

    Raises:
        PeftlabError: no row fits.
    """
    names = [name for name, _ in model.named_modules()]
    kind = model_type(model)
    rows = [SITES[kind]] if kind in SITES else []
    rows += [sites for sites in SITES.values() if not sites.listed_only]
    for sites in dict.fromkeys(rows):
        ends, starts = find(names, sites.ffn), find(names, sites.ffn_input)
        layers = set(find(names, sites.attention).values())
        if layers and layers == set(ends.values()) == set(starts.values()) and len(ends) == len(layers) == len(starts):
            return sites
    raise PeftlabError(
        f"method houlsby does not know where the sub-layers of {kind} ({type(model).__name__}) end, and no "
        "known architecture is built like it; method lora adapts any linear map, or add a row to "
        "peftlab.models.architectures.SITES"
    )


def find(names: Iterable[str], patterns: Iterable[str]) -> dict[str, str]:
    """Return those of ``names`` that end in one of ``patterns``, each with the name of its layer.

    Args:
        names: of a model's modules.
        patterns: ends of names with ``*`` for a number, the first of which is the layer's (``Sites``).
    """
    expression = "|".join(_expression(pattern) for pattern in patterns)
    found = {}
    for name in names:
        match = re.fullmatch(rf"(?:.*\.)?(?:{expression})", name)
        if match and match.lastindex:
            found[name] = name[: match.end(match.lastindex)]
    return found


def _expression(pattern: str) -> str:
    layer, _, tail = re.escape(pattern).partition(r"\*")
    return rf"{layer}(\d+){tail}".replace(r"\*", r"\d+")


def fully_trained(model: nn.Module, modules_to_save: list[str] | None, *, head: bool = True) -> list[str]:
    """Return the names of modules or parameters that train whole: the task head (if ``head``) and ``modules_to_save``.

    Args:
        model: before injection.
        modules_to_save: name suffixes; None: no further modules.
        head: whether the task head trains.
    """
    names = task_head(model) if head else []
    if modules_to_save:
        every = [name for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
        names += [n for n in match(every, modules_to_save, what="modules_to_save") if n not in names]
    return names


def parameters_under(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return the names of all parameters that are, or are below, one of ``names``, in the model's order.

    Args:
        model: whose parameters are named.
        names: of modules or of parameters.

    Raises:
        PeftlabError: a module has no parameter but those that it shares with others, which are not named.
    """
    wanted = set(names)
    parameters = dict(model.named_parameters())
    found = {name: wanted.intersection(prefixes(name)) for name in parameters}
    for name in wanted.difference(*found.values()):
        own = list(model.get_submodule(name).parameters())
        shared = next((other for other, p in parameters.items() if any(p is q for q in own)), None)
        if shared is not None and not found[shared]:
            raise PeftlabError(
                f"modules_to_save: all weights of {name} are those of {shared.rpartition('.')[0]} (tied); "
                f"name {shared.rpartition('.')[0]}, which trains both"
            )
    return [name for name, under in found.items() if under]


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


if TYPE_CHECKING:
    _Leaf = nn.Module  # what every adapted leaf is, by the base class that its own class has besides
else:
    _Leaf = object


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
        """Return ``leaf`` so that it computes all ``variants`` at once, each for its rows; None if it cannot.

        Args:
            leaf: the base's leaf. name: its name in the model.
            variants: the leaf in each form that occurs, with the numbers of the adapters that have it so.
            rows: which adapter each row uses.
        """
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
    """Return the subclass of leaf class ``base`` that behaves as ``kind``; ``kind`` itself if it is one.

    Args:
        kind: of adapted leaf. base: the class of the leaf that is adapted.
    """
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

    The two have separate registries of parameters, buffers and modules. The hooks are in the same registries, so that
    the handle of one removes it from both.
    """
    new = cls.__new__(cls)
    state = {k: v.copy() if isinstance(v, (dict, set)) and "_hooks" not in k else v for k, v in vars(module).items()}
    vars(new).update(state)
    return new


def with_weight(leaf: Adapted, weight: Tensor) -> nn.Module:
    """Return the base leaf of an adapted one with another weight, for one call of its forward.

    Args:
        leaf: whose other parameters and attributes are used.
        weight: of the shape that the forward reads.
    """
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
    """Return the plain ``leaf`` adapted as ``adapted`` is, whose additions it shares.

    Args:
        adapted: the leaf as an adapter has it. leaf: the base's leaf at its place.
    """
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
    """Replace the module of each name by the one given, under every name that the replaced module has.

    Args:
        model: changed in place.
        modules: the new modules by the names of those that they replace.
    """
    old = dict(model.named_modules(remove_duplicate=False))
    new = {id(old[name]): module for name, module in modules.items()}
    for parent in [*model.modules(), *modules.values()]:  # one that is put in can be below another
        for child_name, child in parent._modules.items():
            if id(child) in new:
                parent._modules[child_name] = new[id(child)]


def trainable_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype of what trains beside ``weight``: fp32 for half-precision or quantised weights.

    Small steps would be lost in the rounding of a half-precision parameter.
    """
    return weight.dtype if weight.dtype in (torch.float32, torch.float64) else torch.float32


def refuse_unfoldable(leaves: Mapping[str, Adapted]) -> None:
    """Raise an error that names the first leaf whose addition cannot be folded, and says why."""
    for name, leaf in leaves.items():
        if reason := leaf.unfoldable():
            raise PeftlabError(f"{name} cannot be merged: {reason}; keep the adapter and load it")


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

        Args:
            x: the tensor, of any shape. leaf: the module's name, for the message.

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
        """Return the positions, of ``length``, of these adapters' rows: a slice, if they are one.

        Args:
            length: the first size of the tensor to index.
            numbers: of the adapters whose rows are wanted.
            device: where the tensor is.
        """
        key = (length, numbers, device)
        if key not in self._known:
            times = length // len(self.numbers)
            positions = [row * times + i for row, n in enumerate(self.numbers) if n in numbers for i in range(times)]
            adjacent = positions[-1] - positions[0] + 1 == len(positions)
            self._known[key] = (
                slice(positions[0], positions[-1] + 1) if adjacent else torch.tensor(positions, device=device)
            )
        return self._known[key]


Variant = tuple[nn.Module, tuple[int, ...]]
"""A leaf in a batch of several adapters: as one or more of them have it, and their numbers (``BatchRows``)."""
