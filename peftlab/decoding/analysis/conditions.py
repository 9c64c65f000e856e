"""The state of the machine during a measurement, and why a measurement on a busy machine is called uncertain."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from peftlab.files import Json, to_json

_LOAD = 1.25  # of the cores: this process's own threads reach 1
_RUNNING = 0.9
_SPREAD = 0.15


@dataclass(frozen=True)
class Conditions:
    """What the machine was like during a measurement.

    Attributes:
        load: 1-minute load average, this process included; None where the system has none.
        cores: that this process may use.
        running: share of the time in which the timing thread ran on a core; None where it waits for a device.
        spread: interquartile range of repeats of the same work, relative to their median; None without repeats.
    """

    load: float | None
    cores: int
    running: float | None
    spread: float | None

    def doubts(self) -> list[str]:
        """Return the reasons why figures measured under these conditions may be wrong; none on an idle machine."""
        doubts = []
        if self.load is not None and self.load > _LOAD * self.cores:
            doubts.append(f"load average {self.load:.1f} on {self.cores} cores")
        if self.running is not None and self.running < _RUNNING:
            doubts.append(f"waiting for a core {100 * (1 - self.running):.0f} % of the time")
        if self.spread is not None and self.spread > _SPREAD:
            doubts.append(f"repeats of the same work differ by {100 * self.spread:.0f} %")
        return doubts

    def as_json(self) -> dict[str, Json]:
        """Return the attributes and the doubts."""
        return to_json(vars(self)) | {"doubts": to_json(self.doubts())}


class Watch:
    """A context manager that observes the machine while its block is timed."""

    def __init__(self, device: torch.device):
        self._waits_for_device = device.type != "cpu"

    def __enter__(self) -> Watch:
        self._load = _load_average()
        self._began, self._ran = time.perf_counter(), time.thread_time()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._wall, self._ran = time.perf_counter() - self._began, time.thread_time() - self._ran
        self._load = max((load for load in (self._load, _load_average()) if load is not None), default=None)

    def conditions(self, repeats: Sequence[Sequence[float]]) -> Conditions:
        """Return what was seen.

        Args:
            repeats: for each piece of work the seconds of its repeats.
        """
        running = None if self._waits_for_device else min(1.0, self._ran / self._wall)
        return Conditions(self._load, _cores(), running, spread(repeats))


def spread(repeats: Sequence[Sequence[float]]) -> float | None:
    """Return the median over all work of (third quartile - first quartile) / median of its repeats."""
    each = [_relative_range(sorted(times)) for times in repeats if len(times) > 1]
    return statistics.median(each) if each else None


def uncertain(doubts: Sequence[str], statement: str) -> str:
    """Return ``statement`` as it is, or with the reasons why it may be wrong before it."""
    return f"uncertain, the machine was busy ({'; '.join(doubts)}): by these times {statement}" if doubts else statement


def _relative_range(times: list[float]) -> float:
    first, middle, third = statistics.quantiles(times, n=4, method="inclusive")
    return (third - first) / middle


def _load_average() -> float | None:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
