"""What a training step costs: FLOPs of its products, bytes kept for backward, bytes of gradients and optimiser."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from peftlab.errors import PeftlabError, reason
from peftlab.untyped import Function, Operator

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Cost:
    """The cost of a training step, or the sum over a run's steps; a multiplication and an addition are 2 FLOPs.

    Attributes:
        forward_flops, backward_flops: of matrix products, attention and convolutions, and of what backward computes
            again.
        kept_bytes: what forward keeps for backward, parameters apart, each storage once; of a run's largest step.
        optimizer_bytes: gradients and AdamW's averages of what trains.
        kv_bytes_per_token: of one token's keys and values in all layers; None for a model without such a cache.
    """

    forward_flops: int
    backward_flops: int
    kept_bytes: int
    optimizer_bytes: int
    kv_bytes_per_token: int | None


class CountFlops(TorchDispatchMode):
    """Within the block ``flops`` grows by what torch's own formulas say of each product, and ours where it has none."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self._formulas = _formulas()

    def __enter__(self) -> CountFlops:
        _counters.append(self)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        _counters.remove(self)
        super().__exit__(*error)

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        options = kwargs or {}
        out = func(*args, **options)
        formula = self._formulas.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **options, out_val=out)
        return out


_counters: list[CountFlops] = []


def add_flops(count: int) -> None:
    """Let every counter count what is computed outside torch's operators."""
    for counter in _counters:
        counter.flops += count


def _formulas() -> dict[object, Function[int]]:
    """Return the FLOPs of operators by their arguments: torch's table, and what it lacks or counts otherwise."""
    from torch.utils.flop_counter import flop_registry

    aten = torch.ops.aten

    def addmm_(into: Tensor, left: Tensor, right: Tensor, **options: object) -> int:
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]

    def attention(query: Tensor, key: Tensor, value: Tensor, *rest: object, **options: object) -> int:
        """Of query [b, h, n, d], and key and value [b, any, m, d] whose heads several of the query's may share."""
        return 2 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])

    def attention_backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: object, **options: object
    ) -> int:
        return 2 * query[..., 0].numel() * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])

    def grouped(left: Tensor, right: Tensor, *rest: object, **options: object) -> int:
        """Of experts' products: each row of ``left`` meets the matrix of its group alone."""
        groups = left.shape[0] if left.ndim == right.ndim == 3 else 1
        return 2 * groups * left.shape[-2] * left.shape[-1] * right.shape[-1]

    return {
        **flop_registry,
        aten.addmm_: addmm_,
        aten._grouped_mm: grouped,
        **{getattr(aten, name): attention for name in _ATTENTION},
        **{getattr(aten, f"{name}_backward"): attention_backward for name in _ATTENTION},
    }


_ATTENTION = [
    f"_scaled_dot_product_{kernel}_attention{device}"
    for kernel, device in (("flash", "_for_cpu"), ("flash", ""), ("efficient", ""), ("cudnn", ""))
]


class KeptBytes:
    """The bytes that autograd saves within ``counting`` and keeps, each storage once, without those of some tensors.

    Args:
        excluded: the tensors that exist in any case: parameters and buffers.
    """

    def __init__(self, excluded: Iterable[Tensor]) -> None:
        self._excluded = {tensor.untyped_storage()._cdata for tensor in excluded}
        self._kept: dict[int, tuple[StorageWeakRef, int]] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Within the block what is saved counts."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._excluded:
            # A weak reference: no other storage takes its address, and what backward has used is freed.
            self._kept[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return tensor

    def total(self) -> int:
        """Return the number of bytes, and forget the storages."""
        count = sum(nbytes for storage, nbytes in self._kept.values() if not storage.expired())
        self._kept.clear()
        return count


class Meter:
    """Counts each kind of step the first time it occurs.

    Counting slows a step down, and in a short run nearly every batch has a length of its own.
    From 64 tokens on a length between two known ones near it therefore costs what lies between theirs: FLOPs and
    bytes are linear in it but for attention's scores, by which they are off by a thousandth at most at usual widths.

    Args:
        known: what is known already.
        active: False where steps cannot be counted; then nothing is.
        fp32_averages: whether AdamW's averages are in fp32 whatever the parameter; else they are as it is.

    Attributes:
        known: of each kind of step, which begins with its batch's shape, ``8x128``: FLOPs of forward and backward,
            bytes kept, bytes of gradients and optimiser.
    """

    def __init__(
        self,
        model: nn.Module,
        known: dict[str, tuple[int, int, int, int]],
        *,
        active: bool = True,
        fp32_averages: bool = False,
    ) -> None:
        self._model, self._active, self.known = model, active, known
        self._fp32_averages = fp32_averages
        self._forward = (0, 0)

    @contextmanager
    def forward(self, kind: str) -> Iterator[None]:
        """Around the forward pass of a step of this kind, loss included."""
        if not self._active or self._is_known(kind):
            yield
            return
        kept = KeptBytes([*self._model.parameters(), *self._model.buffers()])
        with kept.counting(), CountFlops() as counter:
            yield
        self._forward = (counter.flops, kept.total())

    @contextmanager
    def backward(self, kind: str) -> Iterator[None]:
        """Around the backward pass that follows."""
        if not self._active or kind in self.known:
            yield
            return
        with CountFlops() as counter:
            yield
        flops, kept = self._forward
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        sizes = ((g.numel(), g.element_size(), 4 if self._fp32_averages else g.element_size()) for g in gradients)
        trained = sum(count * (own + 2 * average) for count, own, average in sizes)
        self.known[kind] = (flops, counter.flops, kept, trained)

    def _is_known(self, kind: str) -> bool:
        """Return whether a kind of step is known; one whose length is between two near ones becomes it."""
        shape = None if kind in self.known else _SHAPE.fullmatch(kind)
        if shape is None:
            return kind in self.known
        rows, length, rest = shape[1], int(shape[2]), shape[3]
        shorter = range(length - 1, max(length - _NEAR, _LONG) - 1, -1)
        lower, upper = (
            next((n for n in lengths if f"{rows}{n}{rest}" in self.known), None)
            for lengths in (shorter, range(length + 1, length + _NEAR + 1))
        )
        if lower is None or upper is None:
            return False
        less, more = (self.known[f"{rows}{n}{rest}"] for n in (lower, upper))
        forward, backward, kept, trained = (
            (a * (upper - length) + b * (length - lower)) // (upper - lower) for a, b in zip(less, more, strict=True)
        )
        self.known[kind] = forward, backward, kept, trained
        return True

    @contextmanager
    def scoring(self) -> Iterator[CountFlops]:
        """Yield a counter for forward passes without backward; afterwards its ``flops`` are theirs."""
        with CountFlops() if self._active else nullcontext(CountFlops()) as counter:
            yield counter


_SHAPE = re.compile(r"((?:\d+x)+)(\d+)(.*)")
_LONG, _NEAR = 64, 16  # tokens


def kv_bytes_per_token(model: nn.Module, width: int | None = None) -> int | None:
    """Return the bytes by which one more token makes the cache of keys and values grow, all layers together.

    They are those of the cache that the model's own class fills, on tensors without memory.

    Args:
        width: bytes of a value; None: as the model's weights have.

    Returns:
        None for a model that does not generate, that has no such cache, or whose class does not run on shapes alone.
    """
    if not getattr(model, "can_generate", lambda: False)():
        return None
    known = cast("PreTrainedModel", model)
    try:
        # The products of experts have shapes in bf16 alone, and eager attention looks into no mask.
        with torch.device("meta"), torch.no_grad():
            bare: PreTrainedModel = type(known)._from_config(
                deepcopy(known.config), dtype=torch.bfloat16, attn_implementation="eager"
            )
            one, two = (_cached_values(bare.eval(), length) for length in (1, 2))
    except Exception:  # any model's own code: a figure of the report must not end a run
        return None
    return (two - one) * (width or known.dtype.itemsize) or None


def _cached_values(model: PreTrainedModel, length: int) -> int:
    """Return the number of keys and values that the model keeps of ``length`` tokens, a decoder's of its own ones."""
    ids = torch.zeros(1, length, dtype=torch.long)
    given = (
        {"input_ids": ids[:, :1], "decoder_input_ids": ids} if model.config.is_encoder_decoder else {"input_ids": ids}
    )
    cache = model(**given, use_cache=True).past_key_values
    layers = getattr(cache, "self_attention_cache", cache).layers
    kept = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    return sum(tensor.numel() for tensor in kept if tensor is not None)


def count_step(model: PreTrainedModel, batch_size: int, length: int) -> Cost:
    """Return the cost of one training step in fp32 on a CPU, from shapes alone: the model can be on the meta device.

    The step is forward and backward in training mode, dropout included, over rows without padding; the loss, which
    belongs to a task, is left out.

    Args:
        model: injected; the parameters that require a gradient train.
        batch_size: rows. length: tokens of a row.

    Raises:
        PeftlabError: the model does not compute from token embeddings alone.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    embedding = model.get_input_embeddings()
    place = next((name for name, module in model.named_modules() if module is embedding), None)
    if place is None or not isinstance(embedding, nn.Embedding):
        raise PeftlabError(f"costs: {type(model).__name__} does not compute from embeddings of tokens")
    step, was_training = _Step(model), model.training
    with FakeTensorMode(), torch.random.fork_rng(devices=[]):
        tensors = _fakes({**dict(step.named_parameters()), **dict(step.named_buffers())})
        ids = torch.zeros(batch_size, length, dtype=torch.long)
        try:
            model.train()
            found: tuple[int, int, int, int] = torch.func.functional_call(
                step, tensors, (ids, tensors[f"model.{place}.weight"])
            )
        except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
            name = type(model).__name__
            raise PeftlabError(f"costs: {name} cannot be run on embeddings of tokens alone: {reason(error)}") from error
        finally:
            model.train(was_training)
    return Cost(*found, kv_bytes_per_token(model, 4))


class _Step(nn.Module):
    """Forward and backward in one call, within which other tensors stand for the model's: checkpoints compute again."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, embeddings: Tensor) -> tuple[int, int, int, int]:
        meter = Meter(self.model, {})
        with meter.forward("step"):
            out = self.model(inputs_embeds=nn.functional.embedding(ids, embeddings))[0]
        with meter.backward("step"):
            out.sum().backward()
        return meter.known["step"]


def _fakes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a tensor without memory, on the CPU, for each of ``tensors``; floating-point ones are fp32."""
    return {
        name: torch.zeros(
            tensor.shape,
            dtype=torch.float32 if tensor.is_floating_point() else tensor.dtype,
            requires_grad=tensor.requires_grad,
        )
        for name, tensor in tensors.items()
    }
