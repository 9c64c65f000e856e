"""From batches of indices to tensors; on a GPU each batch is made during the step before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from accelerate import Accelerator
from torch import Tensor

from peftlab.tasks.batches import padded_tokens, split_rows
from peftlab.training.spec import TrainingSpec

T = TypeVar("T")


@dataclass
class GlobalBatch:
    """One step's global batch and this process's part of it.

    Attributes:
        indices: of the examples, over all processes.
        parts: for each backward pass of this process a weight, 1 or 0 (0 for a part without examples, which only
            keeps the processes in step), and the inputs, on the CPU.
        tokens, padded_tokens: of the global batch, without and with padding.
    """

    indices: list[int]
    parts: list[tuple[int, dict[str, Tensor]]]
    tokens: int
    padded_tokens: int


def load_batches(
    spec: TrainingSpec, batches: Iterable[list[int]], parts: int, accelerator: Accelerator
) -> Iterator[GlobalBatch]:
    """Yield each batch, split into ``parts`` over accumulation steps and processes, as tensors.

    On a device with its own memory a thread makes each batch during the step before, in pinned memory.
    """
    pinned = accelerator.device.type == "cuda"
    lengths = list(spec.train["length"])

    def collated(indices: list[int]) -> dict[str, Tensor]:
        inputs = spec.collate(spec.train.__getitems__(indices))
        return {key: value.pin_memory() for key, value in inputs.items()} if pinned else inputs

    def load(indices: list[int]) -> GlobalBatch:
        split = split_rows(indices, parts, lengths, spec.row_tokens)
        mine = split[accelerator.process_index :: accelerator.num_processes]
        # Every process makes the same number of backward passes: an empty part repeats an example with weight 0.
        return GlobalBatch(
            indices,
            [(int(bool(part)), collated(part or indices[:1])) for part in mine],
            sum(lengths[i] for i in indices),
            sum(padded_tokens([lengths[i] for i in part], spec.row_tokens) for part in split),
        )

    loaded = map(load, batches)
    return loaded if accelerator.device.type == "cpu" else prefetch(loaded)


def prefetch(items: Iterator[T]) -> Iterator[T]:
    """Yield ``items``, each made by a thread while the one before is in use."""
    end = object()
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(next, items, end)
        while (item := following.result()) is not end:
            following = thread.submit(next, items, end)
            yield item  # type: ignore[misc]
