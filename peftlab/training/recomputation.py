"""Computes a layer's activations again in backward (``train.gradient_checkpointing``): all, or those that cost little.

``selective`` keeps the results of a layer's products with weights and of its attention. Norms, activations, casts and
rotations are computed again from them: much of what a step keeps, and little of what it computes. The result of the
last product is not kept: a layer adds it to its input, and backward needs neither; where it does, it is computed again.

torch's ``create_selective_checkpoint_contexts`` either refuses a kept result that changes in place, as that of
``LowRankLinear`` does, or lets any change be repeated on it; here a change is a known one or an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from peftlab.errors import PeftlabError
from peftlab.untyped import Attributes, Operator

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def recompute_activations(model: PreTrainedModel, *, selective: bool) -> None:
    """Let each layer of ``model`` compute its activations again in backward, with the same random numbers.

    Args:
        model: whose class supports it.
        selective: a layer keeps the results of its products with weights and of its attention beside its input.
    """
    options: Attributes = {"use_reentrant": False}
    if selective:
        options["context_fn"] = _contexts
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


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

    def __exit__(self, *error: object) -> None:
        last = self._results[-1][1] if self._results else None
        for place in reversed(range(len(self._results))):
            func, out = self._results[place]
            if not isinstance(out, Tensor) or not _shares(out, last):  # the product, and what was added to it
                break
            self._results[place] = func, torch.empty_like(out, device="meta")
        super().__exit__(*error)


class _TakeResults(TorchDispatchMode):
    """Within the block costly operators return what ``_KeepResults`` has kept; without it they are computed again.

    A last product, of which the shape alone is kept, is computed once an operator reads it.
    """

    def __init__(self, results: deque[tuple[Operator, object]]) -> None:
        super().__init__()
        self._results = results
        self._storages: set[int] = set()
        self._last: Tensor | None = None
        self._missing: list[Callable[[], object]] = []

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        options = kwargs or {}
        if not self._results or not _costly(func, args, options, self._storages):
            if self._missing and any(_shares(value, self._last) for value in tree_leaves((args, options))):
                missing, self._missing = self._missing, []
                for compute in missing:
                    compute()
            return func(*args, **options)
        kept, out = self._results.popleft()
        if kept is not func:
            raise PeftlabError(
                f"train.gradient_checkpointing: a layer computes something else in backward ({func} for {kept}); "
                "set it to true or false"
            )
        if isinstance(out, Tensor) and out.is_meta:
            if self._last is None:
                device = next(value.device for value in args if isinstance(value, Tensor))
                self._last = last = torch.empty_like(out, device=device)
                self._missing.append(lambda: last.copy_(func(*args, **options)))
            else:
                self._missing.append(lambda: func(*args, **options))
            out = self._last
        _add_storages(out, self._storages)
        return out

    def __exit__(self, *error: object) -> None:
        self._missing.clear()
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


def _shares(value: object, other: object) -> bool:
    """Return whether two values are tensors in the same memory."""
    return isinstance(value, Tensor) and isinstance(other, Tensor) and _storage(value) == _storage(other)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
