"""Cells in processes of this machine: one for each GPU at a time, or as many as its CPU cores hold."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from peftlab.errors import PeftlabError
from peftlab.hardware import cores, resolve_device
from peftlab.pipelines.tables.cell_process import CellProcess
from peftlab.pipelines.tables.engines import LOCAL, POLL, Engine
from peftlab.recipe.table_cells import Cell

if TYPE_CHECKING:
    import torch


class LocalEngine:
    """Runs one cell for each slot at a time.

    Args:
        slots: CUDA_VISIBLE_DEVICES of each.
        device: where the cells run, as ``run_recipe`` takes it.
        threads: that PyTorch computes with in each; None: as many as it chooses.
    """

    on = LOCAL

    def __init__(self, slots: Sequence[str], device: str, threads: int | None) -> None:
        self.size = f"{len(slots)} at a time"
        self._free, self._device, self._threads = list(slots), device, threads
        self._running: dict[int, tuple[CellProcess, str]] = {}

    def running(self) -> list[Cell]:
        return [process.cell for process, _ in self._running.values()]

    def free(self) -> bool:
        return bool(self._free)

    def start(self, cell: Cell) -> None:
        slot = self._free.pop(0)
        process = CellProcess(cell, slot, self._device, self._threads)
        self._running[process.ended] = (process, slot)

    def ended(self) -> list[tuple[Cell, str]]:
        found = []
        for ready in wait(list(self._running), POLL):
            process, slot = self._running.pop(ready)  # type: ignore[arg-type]
            self._free.append(slot)
            found.append((process.cell, process.reason()))
        return found

    def stop(self, number: int) -> None:
        for process, _ in self._running.values():
            process.stop(number)


@contextmanager
def local_engine(on: str, device: str, cpus: int | None) -> Iterator[Engine]:
    """Yield an engine of this machine's processes; arguments and errors as in ``engines.open_engine``."""
    if cpus is not None and cpus > cores():
        raise PeftlabError(f"--cpus {cpus}: this machine has {cores()} CPU cores")
    yield LocalEngine(_slots(resolve_device(device), cpus), device, cpus)


def _slots(device: torch.device, cpus: int | None) -> list[str]:
    """Return what CUDA_VISIBLE_DEVICES is for each cell that runs at the same time: a GPU each, or some cores."""
    import torch

    if device.type != "cuda":
        return [""] * (cores() // cpus if cpus and device.type == "cpu" else 1)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    return named[: torch.cuda.device_count()]
