"""Computes a layer's activations again in backward (``train.gradient_checkpointing``): all, or those that cost little.

``selective`` keeps the results of a layer's products with weights and of its attention. Norms, activations, casts and
rotations are computed again from them: much of what a step keeps, and little of what it computes.

torch's ``create_selective_checkpoint_contexts`` either refuses a kept result that changes in place, as that of
``LowRankLinear`` does, or lets any change be repeated on it; here a change is a known one or an error.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from peftlab.errors import PeftlabError
from peftlab.untyped import Attributes, Operator

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def recompute_activations(model: PreTrainedModel, *, selective: bool) -> None:
    """Let each layer of ``model`` compute its activations again in backward, with the same random numbers.

    From then on glibc gives memory of 4 MiB and more back to the system as soon as it is freed, which costs a tenth of
    a CPU's step. By itself it raises that bound to 32 MiB: what a layer keeps then lies between what it has freed, and
    a quarter of the memory of a CPU's training is holes.

    Args:
        model: whose class supports it.
        selective: a layer keeps the results of its products with weights and of its attention beside its input.
    """
    options: Attributes = {"use_reentrant": False}
    if selective:
        options["context_fn"] = _contexts
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 4 << 20)


_M_MMAP_THRESHOLD = -3  # of malloc.h


def _contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the contexts of a layer's forward pass and of its repetition, as ``checkpoint`` takes them."""
    results: deque[tuple[Operator, object]] = deque()
    return _KeepResults(results), _TakeResults(results)


class _KeepResults(TorchDispatchMode):
    """Within the block results of costly operators are kept in ``results``, in order."""

    def __init__(self, results: deque[tuple[Operator, object]]) -> None:
        super().__init__()
        self._results = results
        self._storages: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        options = kwargs or {}
        out = func(*args, **options)
        if _costly(func, args, options, self._storages):
            # Detached: autograd will make the tensors themselves part of a graph, which would then hold itself.
            self._results.append((func, tree_map_only(Tensor, Tensor.detach, out)))
            _add_storages(out, self._storages)
        elif func._schema.is_mutable and isinstance(args[0], Tensor) and _storage(args[0]) in self._storages:
            raise PeftlabError(
                f"train.gradient_checkpointing: a layer changes the result of a product in place ({func}), "
                "which selective cannot repeat; set it to true or false"
            )
        return out


class _TakeResults(TorchDispatchMode):
    """Within the block costly operators return what ``_KeepResults`` has kept; without it they are computed again."""

    def __init__(self, results: deque[tuple[Operator, object]]) -> None:
        super().__init__()
        self._results = results
        self._storages: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        options = kwargs or {}
        if not self._results or not _costly(func, args, options, self._storages):
            return func(*args, **options)
        kept, out = self._results.popleft()
        if kept is not func:
            raise PeftlabError(
                f"train.gradient_checkpointing: a layer computes something else in backward ({func} for {kept}); "
                "set it to true or false"
            )
        _add_storages(out, self._storages)
        return out

    def __exit__(self, *error: object) -> None:
        self._results.clear()  # the repetition ends once all is there that backward needs
        super().__exit__(*error)


def _costly(operator: Operator, args: Sequence[object], options: Mapping[str, object], kept: set[int]) -> bool:
    """Return whether the result of a call is worth its bytes.

    Args:
        operator: the one called. args, options: its arguments. kept: the storages of the layer's results so far.
    """
    costly = _operators()
    if operator not in costly:
        return False
    if operator is torch.ops.aten.addmm_.default:  # which adds to a product: the same bytes as before
        return isinstance(args[0], Tensor) and _storage(args[0]) in kept
    place = costly[operator]
    # Attention that drops draws random numbers: were it left out in backward, those drawn after it would be others.
    return place is None or not (args[place] if place < len(args) else options.get("dropout_p"))


@cache
def _operators() -> dict[Operator, int | None]:
    """Return the costly operators, each with the place of its argument ``dropout_p``.

    Products of activations with one another (``bmm``) are none: scores of attention have length² values a head.
    """
    aten = torch.ops.aten
    operators = [
        aten.mm.default, aten.addmm.default, aten.addmm_.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default,
    ]  # fmt: skip
    names = {operator: [argument.name for argument in operator._schema.arguments] for operator in operators}
    return {operator: known.index("dropout_p") if "dropout_p" in known else None for operator, known in names.items()}


def _add_storages(out: object, storages: set[int]) -> None:
    tree_map_only(Tensor, lambda tensor: storages.add(_storage(tensor)), out)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
