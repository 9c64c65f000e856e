"""Batches of an evaluation, shared out among the processes of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor

from peftlab.tasks.tokens import Row

T = TypeVar("T")


@torch.no_grad()
def over_processes(
    data: Dataset,
    batches: Sequence[list[int]],
    collate: Callable[[Sequence[Row]], dict[str, Tensor]],
    score: Callable[[dict[str, Tensor]], T],
) -> list[T]:
    """Return ``score`` of each batch of ``data``'s rows, in the order of ``batches`` and in every process.

    Each process takes every n-th batch, on its own device. No batch counts twice however unevenly they divide: where
    some processes have a batch less, they repeat the first one, as the processes of a wrapped model forward together.
    """
    state = PartialState()
    found: list[tuple[int, T]] = []
    for turn in range(0, len(batches), state.num_processes):
        place = turn + state.process_index
        mine = batches[place if place < len(batches) else 0]
        inputs = {key: value.to(state.device) for key, value in collate(data.__getitems__(mine)).items()}
        found.append((place, score(inputs)))
    values: dict[int, T] = dict(gather_object(found))
    return [values[place] for place in range(len(batches))]
