"""Seconds and memory of work on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from peftlab.environment import wait_for


@dataclass(frozen=True)
class Taken:
    """What a repeated piece of work took.

    Attributes:
        seconds: median. spread: half the distance between the quartiles. peak_mb: largest memory of the device in
            MiB, weights included; None on a CPU.
    """

    seconds: float
    spread: float
    peak_mb: float | None


def taken(work: Callable[[], object], device: torch.device, *, warm: int, repeats: int) -> Taken:
    """Time ``work``, each time until the device has finished it, after ``warm`` runs that do not count."""
    for _ in range(warm):
        work()
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(repeats):
        wait_for(device)
        started = time.perf_counter()
        work()
        wait_for(device)
        seconds.append(time.perf_counter() - started)
    low, _, high = statistics.quantiles(seconds, n=4) if repeats > 1 else (seconds[0],) * 3
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else None
    return Taken(statistics.median(seconds), (high - low) / 2, peak)


def ceiling(device: torch.device, dtype: torch.dtype = torch.bfloat16, size: int = 8192) -> float:
    """Return the operations per second of a square matrix product of random values, two for each multiplication."""
    one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / taken(lambda: one @ other, device, warm=3, repeats=10).seconds
