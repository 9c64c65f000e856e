"""A simulator of what runs a table's cells: when each cell ends, given its duration, the workers and their failures.

Cells are started in their order, each by the first worker that is free (list scheduling): what ``run_cells`` does with
its slots. A part of ``--shard I/N`` is such a queue of one worker. Times are seconds from the start.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Job:
    """A cell: how long its run takes by itself, and the number of the earlier cell whose result it starts from."""

    seconds: float
    after: int | None = None


@dataclass(frozen=True)
class Failure:
    """A worker's node is lost at a time; ``back`` seconds later there is another one (infinite: never)."""

    worker: int
    at: float
    back: float = math.inf


@dataclass(frozen=True)
class Costs:
    """What scheduling adds.

    Attributes:
        start: until a new worker has imported the libraries. cell: for each run of a cell, beside the run itself.
        save_every: seconds of a run between its checkpoints, from the newest of which a lost cell continues.
    """

    start: float = 0.0
    cell: float = 0.0
    save_every: float = math.inf


_ENDS, _FAILS, _READY = range(3)  # the order of what happens at the same time


@dataclass
class _Queue:
    jobs: Sequence[Job]
    costs: Costs
    left: list[float]
    ready: list[float]  # when each worker has started, or starts anew
    ends: dict[int, float] = field(default_factory=dict)
    running: dict[int, tuple[int, float]] = field(default_factory=dict)  # worker -> cell, when it was started
    idle: set[int] = field(default_factory=set)
    events: list[tuple[float, int, int, float]] = field(default_factory=list)

    def start_cells(self, now: float, waiting: list[int]) -> None:
        """Let idle workers start the first cells that wait for no other one."""
        while self.idle:
            cell = next((i for i in waiting if self.jobs[i].after is None or self.jobs[i].after in self.ends), None)
            if cell is None:
                return
            worker = min(self.idle)
            self.idle.remove(worker)
            waiting.remove(cell)
            self.running[worker] = (cell, now)
            heapq.heappush(self.events, (now + self.costs.cell + self.left[cell], _ENDS, worker, now))

    def fail(self, now: float, worker: int, back: float) -> int | None:
        """Lose a worker; return the cell that it ran, which keeps what its newest checkpoint has."""
        self.idle.discard(worker)
        self.ready[worker] = max(self.ready[worker], now + back + self.costs.start)
        if math.isfinite(self.ready[worker]):
            heapq.heappush(self.events, (self.ready[worker], _READY, worker, now))
        if worker not in self.running:
            return None
        cell, started = self.running.pop(worker)
        ran, step = max(0.0, now - started - self.costs.cell), self.costs.save_every
        done = self.jobs[cell].seconds - self.left[cell] + ran
        kept = math.floor(done / step) * step if math.isfinite(step) else 0.0
        self.left[cell] = min(self.left[cell], self.jobs[cell].seconds - kept)
        return cell


def queue(jobs: Sequence[Job], workers: int, costs: Costs = Costs(), failures: Sequence[Failure] = ()) -> list[float]:
    """Return when each cell ends if ``workers`` take them from one queue.

    A cell that is lost with its worker comes first of those that wait.

    Raises:
        ValueError: there is work left and no worker will come back.
    """
    state = _Queue(jobs, costs, [job.seconds for job in jobs], [costs.start] * workers)
    state.events = [(costs.start, _READY, worker, 0.0) for worker in range(workers)]
    state.events += [(failure.at, _FAILS, failure.worker, failure.back) for failure in failures]
    heapq.heapify(state.events)
    waiting = list(range(len(jobs)))
    while len(state.ends) < len(jobs):
        if not state.events:
            raise ValueError(f"no worker is left for {len(jobs) - len(state.ends)} cells")
        now = state.events[0][0]
        while state.events and state.events[0][0] == now:
            _, kind, worker, value = heapq.heappop(state.events)
            if kind == _FAILS:
                lost = state.fail(now, worker, value)
                if lost is not None:
                    waiting.insert(0, lost)
            elif kind == _READY and state.ready[worker] == now and worker not in state.running:
                state.idle.add(worker)
            elif kind == _ENDS and worker in state.running and state.running[worker][1] == value:
                state.ends[state.running.pop(worker)[0]] = now
                state.idle.add(worker)
        state.start_cells(now, waiting)
    return [state.ends[i] for i in range(len(jobs))]


def makespan(ends: Sequence[float]) -> float:
    """Return when the last cell ends."""
    return max(ends, default=0.0)


def longest_chain(jobs: Sequence[Job]) -> float:
    """Return the seconds of the longest sequence of cells each of which starts from the one before."""
    chains: list[float] = []
    for job in jobs:
        chains.append(job.seconds + (0.0 if job.after is None else chains[job.after]))
    return max(chains, default=0.0)
