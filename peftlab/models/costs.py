"""What a training step costs: FLOPs of its products, bytes kept for backward, bytes of gradients and optimiser."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from peftlab.errors import PeftlabError
from peftlab.files import reason
from peftlab.untyped import Function, Operator

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAMW_BYTES = 3  # times a trained parameter's own: gradient and two averages


@dataclass(frozen=True)
class Cost:
    """The cost of a training step, or the sum over a run's steps; a multiplication and an addition are 2 FLOPs.

    Attributes:
        forward_flops, backward_flops: of matrix products, attention and convolutions, and of what backward computes
            again.
        kept_bytes: what forward keeps for backward, parameters apart, each storage once; of a run's largest step.
        optimizer_bytes: gradients and AdamW's averages of what trains.
        kv_bytes_per_token: keys and values of one token in all layers; None for a model that does not generate.
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


def _formulas() -> dict[object, Function[int]]:
    """Return the FLOPs of operators by their arguments: torch's table, and what it lacks (2.13) for CPUs."""
    from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

    aten = torch.ops.aten

    def addmm_(into: Tensor, left: Tensor, right: Tensor, **options: object) -> int:
        return 2 * left.shape[0] * left.shape[1] * right.shape[1]

    def attention(query: Tensor, key: Tensor, value: Tensor, *rest: object, **options: object) -> int:
        return sdpa_flop_count(query.shape, key.shape, value.shape)

    def attention_backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: object, **options: object
    ) -> int:
        return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)

    return {
        **flop_registry,
        aten.addmm_: addmm_,
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
    }


class KeptBytes:
    """The bytes that autograd saves within ``counting``, each storage once, without those of some tensors.

    Args:
        apart: the tensors that exist in any case: parameters and buffers.
    """

    def __init__(self, apart: Iterable[Tensor]) -> None:
        self._apart = {tensor.untyped_storage()._cdata for tensor in apart}
        self._kept: dict[int, torch.UntypedStorage] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Within the block what is saved counts."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._apart:
            self._kept[storage._cdata] = storage  # held, so that no other storage takes its address
        return tensor

    def total(self) -> int:
        """Return the number of bytes, and let go of the storages."""
        count = sum(storage.nbytes() for storage in self._kept.values())
        self._kept.clear()
        return count


def optimizer_bytes(parameters: Iterable[Tensor]) -> int:
    """Return the bytes of gradients and AdamW's averages of trained parameters."""
    return ADAMW_BYTES * sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def kv_bytes_per_token(model: nn.Module, width: int = 4) -> int | None:
    """Return the bytes of one token's keys and values in all layers; None for a model that does not generate.

    Args:
        width: bytes of a value.
    """
    if not getattr(model, "can_generate", lambda: False)():
        return None
    config = getattr(model, "config").get_text_config()  # noqa: B009
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * int(config.num_hidden_layers) * int(heads) * int(size) * width


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
            torch.func.functional_call(step, tensors, (ids, f"model.{place}.weight", tensors))
        except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
            name = type(model).__name__
            raise PeftlabError(f"costs: {name} cannot be run on embeddings of tokens alone: {reason(error)}") from error
        finally:
            model.train(was_training)
    trained = [tensor for tensor in tensors.values() if tensor.requires_grad]
    return Cost(*step.counts, optimizer_bytes(trained), kv_bytes_per_token(model))


class _Step(nn.Module):
    """Forward and backward in one call, within which other tensors stand for the model's: checkpoints compute again.

    Attributes:
        counts: FLOPs of forward, of backward, and bytes kept in between, of the last call.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.counts = (0, 0, 0)

    def forward(self, ids: Tensor, embedding: str, tensors: Mapping[str, Tensor]) -> None:
        kept = KeptBytes(tensors.values())
        with kept.counting(), CountFlops() as forward:
            out = self.model(inputs_embeds=nn.functional.embedding(ids, tensors[embedding]))[0]
        with CountFlops() as backward:
            out.sum().backward()
        self.counts = (forward.flops, backward.flops, kept.total())


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
