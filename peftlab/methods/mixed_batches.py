"""Batches whose rows use different adapters of one model.

Within ``adapter_names`` each leaf that any of the adapters changes is exchanged for one that computes every row as that
row's adapter does; the rest of the model, and all blocks, see one batch.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.methods.base import (
    Adapted,
    AnyLeaf,
    BatchRows,
    Variant,
    adapted_class,
    exchange,
    like_adapted,
    recast,
)
from peftlab.methods.inject import BASE, Stored, loaded_adapters, tensor_of, without_adapters
from peftlab.untyped import Attributes, Function, Parameters

_GENERATE = "generate"


@contextmanager
def adapter_names(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Within the block row i of a batch is computed with the adapter ``names[i]``, in ``forward`` and ``generate``.

    The output of a row is what the model gives with that adapter alone. A linear map with LoRA takes one product with
    W0 for all rows; rows of one adapter that are next to each other are not copied. Where ``generate`` repeats each row
    (beams, ``num_return_sequences``), the copies use the row's adapter. For inference: the model must be in eval mode.

    Args:
        names: one name per row, ``"__base__"`` for the base model.

    Raises:
        PeftlabError: a name that is not loaded; on entry, if two adapters cannot be mixed in a module, which is
            named; in ``forward``, if the batch has another number of rows, or a module's input is not made of them.
    """
    known = loaded_adapters(model)
    names = [names] if isinstance(names, str) else list(names)
    unknown = next((name for name in names if name not in known and name != BASE), None)
    if unknown is not None or not names:
        here = ", ".join([*known, BASE])
        what = "names no row" if unknown is None else f"no adapter {unknown!r}{did_you_mean(unknown, known)}"
        raise PeftlabError(f"adapter_names: {what}; the model has {here}")
    rows = BatchRows(names)
    with without_adapters(model) as adapters:
        mixed = _mixed(model, {name: adapters[name] for name in rows.adapters if name != BASE}, rows)
        plain = {name: model.get_submodule(name) for name in mixed}
        hook = model.register_forward_pre_hook(rows.called, with_kwargs=True)
        exchange(model, mixed)
        try:
            with _generating(model, rows):
                yield
        finally:
            exchange(model, plain)
            hook.remove()


@contextmanager
def _generating(model: nn.Module, rows: BatchRows) -> Iterator[None]:
    """Within the block ``model.generate`` tells ``rows`` how often it repeats each row."""
    if not hasattr(type(model), _GENERATE):
        yield
        return
    before = vars(model).get(_GENERATE)
    generate: Function[object] = getattr(model, _GENERATE)

    def repeating(*args: object, **kwargs: object) -> object:
        options: Attributes = kwargs
        config = options.get("generation_config") or model.generation_config
        counts = (options.get(key, getattr(config, key, None)) for key in ("num_beams", "num_return_sequences"))
        rows.repeats = max(count or 1 for count in counts)
        try:
            return generate(*args, **kwargs)
        finally:
            rows.repeats = 1

    setattr(model, _GENERATE, functools.wraps(generate)(repeating))
    try:
        yield
    finally:
        delattr(model, _GENERATE)
        if before is not None:
            setattr(model, _GENERATE, before)


def _mixed(model: nn.Module, adapters: Mapping[str, Stored], rows: BatchRows) -> dict[str, nn.Module]:
    """Return the leaves to put into the base ``model``, by name."""
    trained = {name: _trained_in_place(model, stored) for name, stored in adapters.items()}
    leaves = dict.fromkeys(name for a, stored in adapters.items() for name in (*stored.leaves, *trained[a]))
    mixed = {}
    for name in leaves:
        leaf = model.get_submodule(name)
        _check(model, name, leaves)
        numbers: dict[str, list[int]] = defaultdict(list)
        for number, adapter in enumerate(rows.adapters):
            differs = adapter in adapters and (name in adapters[adapter].leaves or name in trained[adapter])
            numbers[adapter if differs else BASE].append(number)
        variants: list[Variant] = []
        for adapter, mine in numbers.items():
            variant = recast(type(leaf), leaf)
            if adapter != BASE:
                if name in adapters[adapter].leaves:
                    variant = like_adapted(adapters[adapter].leaves[name], leaf)
                for key, value in trained[adapter].get(name, {}).items():
                    registry: Parameters = variant._parameters if key in variant._parameters else variant._buffers
                    registry[key] = value
            variants.append((variant, tuple(mine)))
        mixed[name] = _mixed_leaf(leaf, name, variants, rows)
    return mixed


def _mixed_leaf(leaf: nn.Module, name: str, variants: list[Variant], rows: BatchRows) -> nn.Module:
    if len(variants) == 1:
        return variants[0][0]
    kind = next((type(variant) for variant, _ in variants if isinstance(variant, Adapted)), Adapted)
    made = kind.batched_variant(leaf, name, variants, rows)
    if made is not None:
        return made
    new = recast(adapted_class(MixedLeaf, type(leaf)), leaf)
    new.variants, new.rows, new.name = variants, rows, name
    return new


def _trained_in_place(model: nn.Module, stored: Stored) -> dict[str, dict[str, nn.Parameter | None]]:
    """Return an adapter's values of the model's own tensors, by module (every one that has it) and by name there."""
    values = {id(tensor_of(model, name)): value for name, value in stored.values.items()}
    found: dict[str, dict[str, nn.Parameter | None]] = {}
    for name, module in model.named_modules() if values else []:
        tensors = {**module._parameters, **module._buffers}
        own = {key: values[id(tensor)] for key, tensor in tensors.items() if id(tensor) in values}
        if own:
            found[name] = own
    return found


def _check(model: nn.Module, name: str, leaves: Mapping[str, None]) -> None:
    inner = next((other for other in leaves if other.startswith(f"{name}.")), None)
    if inner is not None:
        raise PeftlabError(f"adapter_names: adapters change {name} and {inner} in it; such rows cannot share a batch")
    if re.search(r"(^|\.)experts\.\d+(\.|$)", name):
        raise PeftlabError(f"adapter_names: {name} is one expert, which receives tokens of several rows in one list")
    if not getattr(model.get_submodule(name), "batch_first", True):
        raise PeftlabError(f"adapter_names: the input of {name} is not batch first")


class MixedLeaf(AnyLeaf):
    """A leaf that computes each row of its input by the variant that the row's adapter has.

    Attributes:
        variants: the leaf in each form that occurs, the base's own included, with the numbers of its adapters.
        rows: which adapter each row uses.
        name: the leaf's name in the model.
    """

    added = ("variants", "rows", "name")
    variants: list[Variant]
    rows: BatchRows
    name: str

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        first = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        if isinstance(self, nn.Embedding) and first.shape[0] == 1:  # the positions, which all rows share
            first = first.expand(self.rows.batch, *first.shape[1:])
            args, kwargs = (first,), {}
        length = self.rows.length(first, self.name)
        result: Tensor | None = None
        for leaf, numbers in self.variants:
            index = self.rows.index(length, numbers, first.device)
            chosen = functools.partial(_chosen, index=index, length=length)
            part = leaf.forward(*map(chosen, args), **{key: chosen(value) for key, value in kwargs.items()})
            if not isinstance(part, Tensor) or part.shape[0] != first[index].shape[0]:
                raise PeftlabError(
                    f"adapter_names: {self.name} ({type(leaf).__name__}) does not return one tensor with a row for "
                    "each row it was given"
                )
            if result is None:
                result = part.new_empty(length, *part.shape[1:])
            result[index] = part
        assert result is not None
        return result


def _chosen(value: object, index: Tensor | slice[int, int, int], length: int) -> object:
    return value[index] if isinstance(value, Tensor) and value.ndim and value.shape[0] == length else value
