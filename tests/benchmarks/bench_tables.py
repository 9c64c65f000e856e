"""Tables of small cells: on one machine as they run by default, with a core for each cell, and on two nodes of Ray.

    python -m tests.benchmarks.bench_tables [--seeds N] [--steps N] [--dir DIR]

The cells are the quickstart, shortened: four learning rates and N seeds. Each table is a command of its own, from its start
to its end; the Ray cluster is running already, with two nodes of one CPU each. The scheduling overhead of a cell is the time
from one result to the next on one node, less what the same run takes in a process that has imported everything.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from peftlab.pipelines import run_recipe
from peftlab.recipe.loading import load_recipe
from peftlab.recipe.schema import TableRecipe
from peftlab.recipe.table_cells import table_cells

ROOT = Path(__file__).parents[2]
RATES = [1e-4, 3e-4, 1e-3, 3e-3]


def table(directory: Path, seeds: int, steps: int) -> list[str]:
    """Return the recipe and overrides of a table in ``directory``, as its sweep writes it."""
    short = [f"train.max_steps={steps}", f"train.eval_every={steps}", "data.validation=100", "merge.latency=false"]
    sweep = [f"sweep.lr={RATES}", f"sweep.seed={list(range(seeds))}"]
    return ["quickstart", *short, *sweep, f"output_dir={directory}"]


def timed(arguments: list[str], threads: int | None) -> float:
    """Return the seconds that ``peftlab run`` takes with them."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    started = time.perf_counter()
    command = [sys.executable, "-m", "peftlab", "run", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    seconds = time.perf_counter() - started
    print(f"{seconds:.1f} s: peftlab run {' '.join(arguments)}", flush=True)
    return seconds


@contextmanager
def cluster(nodes: int) -> Iterator[None]:
    """Let ``--on ray`` be a cluster on this machine, of so many nodes with one CPU each."""
    from ray.cluster_utils import Cluster

    os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)})
    started = Cluster(True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(nodes - 1):
        started.add_node(num_cpus=1)
    os.environ["RAY_ADDRESS"] = started.address
    try:
        yield
    finally:
        del os.environ["RAY_ADDRESS"]
        started.shutdown()


def intervals(directory: Path) -> list[float]:
    """Return the seconds from each cell's result to the next one's."""
    times = sorted(path.stat().st_mtime for path in directory.glob("cells/*/results.json"))
    return [after - before for before, after in itertools.pairwise(times)]


def alone(work: Path, steps: int) -> float:
    """Return the median seconds of the same runs in this process, with one thread, after one that imports."""
    torch.set_num_threads(1)
    name, *overrides = table(work / "alone", 1, steps)
    recipe = load_recipe(name, overrides)
    assert isinstance(recipe, TableRecipe)
    seconds = []
    for cell in table_cells(recipe):
        started = time.perf_counter()
        run_recipe(cell.recipe)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def main() -> None:
    """Measure everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=5, help="four cells each (default: 5, 20 cells)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dir", type=Path, help="where to work (default: a temporary directory)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        work = Path(directory)
        sizes = {"local, two threads": ([], 2), "local, --cpus 1": (["--cpus", "1"], None)}
        found = {}
        for name, (options, threads) in sizes.items():
            found[name] = timed([*table(work / name.replace(" ", "-"), args.seeds, args.steps), *options], threads)
        with cluster(2):
            found["ray, two nodes"] = timed([*table(work / "two", args.seeds, args.steps), "--on", "ray"], None)
        with cluster(1):
            timed([*table(work / "one", 2, args.steps), "--on", "ray"], None)
        run, between = alone(work, args.steps), intervals(work / "one-sweep")
    print(f"\n{4 * args.seeds} cells of {args.steps} steps{'':10} seconds  of the default")
    for name, seconds in found.items():
        ratio = found["local, two threads"] / seconds
        print(f"{name:28} {seconds:10.1f} {ratio:9.2f} times as fast{'   (wanted: 1.2)' if 'ray' in name else ''}")
    overhead = statistics.median(between) - run
    print(f"a cell on Ray: {statistics.median(between):.2f} s from result to result; the run itself {run:.2f} s")
    print(f"  scheduling overhead of a cell {overhead:.2f} s   (wanted: at most 1)")


if __name__ == "__main__":
    main()
