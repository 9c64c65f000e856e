"""From batches of indices to tensors, one step ahead of a device that would otherwise wait."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from accelerate import Accelerator
from torch import Tensor

from peftlab.tasks.batches import split_batch
from peftlab.training.spec import TrainingSpec

T = TypeVar("T")


@dataclass
class Fed:
    """One step's global batch and this process's part of it.

    Attributes:
        batch: example indices, over all processes.
        shares: a pair for each backward pass: the weight (0 for a share that only keeps processes in step)
            and the inputs, on the CPU.
        tokens, padded_tokens: of the global batch, without and with padding.
    """

    batch: list[int]
    shares: list[tuple[int, dict[str, Tensor]]]
    tokens: int
    padded_tokens: int


def feed(spec: TrainingSpec, batches: Iterable[list[int]], parts: int, accelerator: Accelerator) -> Iterator[Fed]:
    """Yield each batch, dealt into ``parts`` over accumulation steps and processes, as tensors.

    On a device with memory of its own a thread makes each batch during the step before, in pinned memory.
    """
    pinned = accelerator.device.type == "cuda"
    lengths = list(spec.train["length"])

    def collated(share: list[int]) -> dict[str, Tensor]:
        inputs = spec.collate(spec.train.__getitems__(share))
        return {key: value.pin_memory() for key, value in inputs.items()} if pinned else inputs

    def fed(batch: list[int]) -> Fed:
        shares = split_batch(batch, parts)
        own = shares[accelerator.process_index :: accelerator.num_processes]
        # Every process makes as many backward passes: an empty share repeats an example at no weight.
        return Fed(
            batch,
            [(int(bool(share)), collated(share or batch[:1])) for share in own],
            sum(lengths[i] for i in batch),
            sum(len(share) * max(lengths[i] for i in share) for share in shares if share),
        )

    return map(fed, batches) if accelerator.device.type == "cpu" else ahead(map(fed, batches))


def ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield ``items``, each made by a thread while the one before is in use."""
    end = object()
    with ThreadPoolExecutor(1) as thread:
        coming = thread.submit(next, items, end)
        while (item := coming.result()) is not end:
            coming = thread.submit(next, items, end)
            yield item  # type: ignore[misc]
