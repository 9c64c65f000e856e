"""Many inputs, each made from the seed and its number alone."""

from __future__ import annotations

import os
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz import world as worlds
from tests.fuzz.cases import CLASSES_OF_INPUT, Case
from tests.fuzz.running import Outcome, as_process, in_process

_MEMORY = 6 * 2**30  # bytes that all inputs together may allocate in this process


@dataclass
class Summary:
    """What a campaign came to.

    Attributes:
        counts: (class of input, "accepted" or "refused") to number. faults: a text for each input at fault.
        slowest: seconds and number of the input that took longest.
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest: tuple[float, int] = (0.0, -1)

    def __str__(self) -> str:
        lines = [f"{'class':<16}{'inputs':>8}{'accepted':>10}{'refused':>9}"]
        for name in CLASSES_OF_INPUT:
            accepted, refused = self.counts[name, "accepted"], self.counts[name, "refused"]
            lines.append(f"{name:<16}{accepted + refused:>8}{accepted:>10}{refused:>9}")
        lines.append(f"{len(self.faults)} faults; the slowest input, {self.slowest[1]}, took {self.slowest[0]:.1f} s")
        return "\n".join(lines)


def run(seed: int, numbers: Iterable[int], *, processes: frozenset[int] = frozenset(), keep: bool = False) -> Summary:
    """Run the inputs of these numbers and return what they came to.

    Args:
        seed: with its number it determines an input.
        processes: the numbers of those that run as processes of their own.
        keep: leave the files of inputs at fault where they are.
    """
    root = Path(tempfile.mkdtemp(prefix="peftlab-fuzz-"))
    os.environ["HF_DATASETS_CACHE"] = str(root / "cache")
    summary = Summary()
    with _bounded_memory():
        try:
            world = worlds.build(root / "world")
            for number in numbers:
                _one(world, root / f"input-{number}", seed, number, number in processes, summary, keep)
        finally:
            if not (keep and summary.faults):
                shutil.rmtree(root, ignore_errors=True)
    return summary


def _one(
    world: worlds.World, folder: Path, seed: int, number: int, process: bool, summary: Summary, keep: bool
) -> None:
    for _ in range(2):
        began = time.perf_counter()
        name, case, outcome, fault = _tried(world, folder, seed, number, process)
        seconds = time.perf_counter() - began
        if not outcome.hung:
            break  # else once more: on a busy machine time alone is no proof, and what hangs does so again
    summary.counts[name, "refused" if outcome.status else "accepted"] += 1
    summary.slowest = max(summary.slowest, (seconds, number))
    if fault:
        shown = " ".join(argument if len(argument) < 200 else f"{argument[:200]}..." for argument in case.arguments)
        again = f"python -m tests.fuzz --seed {seed} --case {number} --keep"
        text = f"--- input {number} ({name}): peftlab {shown}\n{fault.strip()}\nagain: {again}\n"
        summary.faults.append(text)
        print(text, file=sys.stderr, flush=True)
    if not (fault and keep):
        shutil.rmtree(folder, ignore_errors=True)


def _tried(world: worlds.World, folder: Path, seed: int, number: int, process: bool) -> tuple[str, Case, Outcome, str]:
    """Make an input and run it; return its class, itself, its outcome and what is wrong about that."""
    rng = random.Random(f"{seed}-{number}")
    names = list(CLASSES_OF_INPUT)
    name = rng.choices(names, [share for _, share in CLASSES_OF_INPUT.values()])[0]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    case = CLASSES_OF_INPUT[name][0](world, folder, rng)
    before = {path.name for path in folder.iterdir()}
    outcome = (as_process if process else in_process)(case.arguments, folder)
    fault = outcome.fault
    if not fault and outcome.status == 0:
        try:
            fault = case.check(outcome)
        except Exception as error:
            fault = f"accepted, and the independent reading fails: {type(error).__name__}: {error}"
    elif not fault:
        left = {path.name for path in folder.iterdir()} - before
        fault = f"refused, and {sorted(left)} are left behind" if left else ""
    lost = [str(path.relative_to(folder)) for path in case.kept if not path.exists()]
    fault = fault or (f"{lost} were removed" if lost else "")
    return name, case, outcome, fault


class _bounded_memory:
    """Makes an allocation that would take the machine's memory fail instead."""

    def __enter__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, self._before[1]))

    def __exit__(self, *error: object) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self._before)
