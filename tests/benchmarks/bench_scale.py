"""What many runs cost beside the runs themselves, and how long a table takes on 10, 100 and 1,000 workers.

    python -m tests.benchmarks.bench_scale [--recipe NAME] [--seeds N]
    python -m tests.benchmarks.bench_scale --costs START CELL [--rate EXAMPLES] [--failures PER_HOUR]

A table of four rows of runs of different lengths, on all cores at once, one after the other, in two parts and on Ray, each a
command of its own: a worker's start and the scheduling of a cell, here and on a node of Ray, and each time beside that of the
simulator (``tests.benchmarks.scheduling``). Then what a cell and a worker ask of shared storage, how long the table's lock is
held, and, by the simulator, five methods, eight tasks and five seeds of ``glue/table``; with ``--costs`` that alone.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path

import torch

from peftlab.environment import cores
from peftlab.pipelines.cells import PRELOADED
from peftlab.pipelines.finetune import run_finetune
from peftlab.pipelines.table import RESULTS, Shard, TableFiles, missing_cells
from peftlab.recipe.load import Cell, dump_recipe, load_recipe, table_cells
from peftlab.recipe.schema import TableRecipe
from tests.benchmarks.scheduling import Costs, Failure, Job, longest_chain, makespan, queue
from tests.training.tiny import recipe, save_model, save_rows, write_recipe

STEPS = {"a": 10, "b": 20, "c": 40, "d": 160}  # of the measured rows
# Training examples of the GLUE tasks.
EXAMPLES = {
    "cola": 8551, "sst2": 67349, "mrpc": 3668, "stsb": 5749, "qqp": 363846, "mnli": 392702, "qnli": 104743, "rte": 2490,
}  # fmt: skip
ROWS = ("base-full", "base-bitfit", "base-adapterdrop9", "base-adapterdrop3", "base-lora")
WORKERS = (10, 100, 1000)
ROOT = Path(__file__).parents[2]
DRAWS = 20
_OPENED = """
import os, sys
opened = {}
sys.addaudithook(lambda event, args: event == 'open' and isinstance(args[0], str) and opened.setdefault(args[0]))
import importlib
for name in sys.argv[1:]: importlib.import_module(name)
sizes = [os.path.getsize(name) for name in opened if os.path.isfile(name)]
print(len(sizes), sum(sizes))
"""


def shape(values: dict[str, object], seeds: int) -> TableRecipe:
    """Return a table of the runs of a recipe, made of different lengths: four rows, so many seeds."""
    train = {**values.pop("train"), "eval_every": 1000}  # type: ignore[dict-item]
    for key in ("epochs", "seed"):
        train.pop(key)
    rows = {name: {"method": values["method"], "train": {"max_steps": steps}} for name, steps in STEPS.items()}
    shared = {key: values[key] for key in ("model", "data", "merge", "output_dir")}
    return TableRecipe.model_validate(
        {
            **shared,
            "kind": "table",
            "tasks": [values["task"]],
            "rows": rows,
            "seeds": list(range(seeds)),
            "train": train,
        }
    )


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


def command(file: Path, output: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "peftlab", "run", str(file), f"output_dir={output}", *options]


def run_at_once(commands: Sequence[Sequence[str]]) -> float:
    """Run commands at the same time and return the seconds until the last one ends."""
    started = time.perf_counter()
    running = [subprocess.Popen(each, stdout=subprocess.DEVNULL) for each in commands]
    codes = [process.wait() for process in running]
    if any(codes):
        raise SystemExit("a run failed")
    return time.perf_counter() - started


def alone(table: TableRecipe) -> list[float]:
    """Return the seconds of each cell's run by itself: the row's median in this process, which has imported everything."""
    taken: dict[str, list[float]] = {row: [] for row in STEPS}
    for turn in range(4):  # the first one is not counted
        for cell in table_cells(table)[: len(STEPS)]:
            started = time.perf_counter()
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                run_finetune(cell.recipe, overwrite=True, device="cpu")
            taken[cell.row] += [time.perf_counter() - started] * (turn > 0)
    return [statistics.median(taken[cell.row]) for cell in table_cells(table)]


def parts(cells: Sequence[Cell], jobs: Sequence[Job], count: int, costs: Costs) -> float:
    """Return when the last of ``count`` parts of a table ends, each on a worker that runs its cells one by one."""
    numbers = {cell: i for i, cell in enumerate(cells)}
    own = [[jobs[numbers[cell]] for cell in Shard(i, count).part(cells)] for i in range(count)]
    return max(makespan(queue([Job(job.seconds) for job in part], 1, costs)) for part in own)


def compare(file: Path, table: TableRecipe, work: Path) -> Costs:
    """Print what scheduling costs, here and on Ray, and the time of each way to run the table beside the simulator's."""
    seconds = alone(table)
    jobs = [Job(each) for each in seconds]
    one = ["seeds=[0]", *(f"~rows.{row}" for row in list(STEPS)[1:])]  # the first cell

    def costs(name: str, *options: str) -> tuple[Costs, float]:
        first = run_at_once([command(file, work / f"{name}-first", *options, *one)])
        whole = run_at_once([command(file, work / name, *options)])
        cell = (whole - first - sum(seconds[1:])) / (len(seconds) - 1)
        return Costs(first - seconds[0] - cell, cell), whole

    here, whole = costs("here")
    os.environ["OMP_NUM_THREADS"] = "2"
    default = run_at_once([command(file, work / "default")])
    os.environ["OMP_NUM_THREADS"] = "1"
    with cluster(1):
        ray, _ = costs("ray", "--on", "ray")
    print(f"{len(jobs)} cells; a run by itself takes {statistics.mean(seconds):.2f} s (median of a row, mean of rows)")
    for name, of in {"this machine": here, "a node of Ray": ray}.items():
        print(
            f"{name:18} a worker's start {of.start:.1f} s, the scheduling of a cell {of.cell:.2f} s (wanted: at most 1)"
        )
    print(f"{'two threads':18} {default:6.1f} s, one cell at a time, as by default")
    beside("one thread", whole, makespan(queue(jobs, 1, here)), default)
    many = run_at_once([command(file, work / "many", "--cpus", "1")])
    beside(f"{cores()} at a time", many, makespan(queue(jobs, cores(), here)), default)
    halves = run_at_once([command(file, work / "parts", "--shard", f"{i}/2") for i in range(2)])
    beside("two parts at once", halves, parts(table_cells(table), jobs, 2, here), default)
    with cluster(2):
        nodes = run_at_once([command(file, work / "nodes", "--on", "ray")])
    beside("two nodes of Ray", nodes, makespan(queue(jobs, 2, ray)), default)
    return here


def beside(name: str, real: float, simulated: float, default: float) -> None:
    line = f"{name:18} {real:6.1f} s, {default / real:.2f} times as fast as the default"
    print(f"{line}; simulated {simulated:6.1f} s, {simulated / real:.2f} of it", flush=True)


def storage(work: Path) -> None:
    """Print what a cell writes, what a worker reads, and how long processes that share a table wait for each other."""
    (cell, *_) = sorted((work / "here" / "cells").glob("*/results.json"))
    files = [path for path in cell.parent.rglob("*") if path.is_file()]
    print(f"a finished cell: {len(files)} files, {sum(path.stat().st_size for path in files) / 1e3:.0f} kB")
    names = [name for name in PRELOADED["finetune"] if name != "peftlab.pipelines.cells"]
    done = subprocess.run([sys.executable, "-c", _OPENED, *names], capture_output=True, text=True, check=True)
    count, size = map(int, done.stdout.split()[-2:])
    print(f"a worker's imports: {count} files, {size / 1e6:.0f} MB")
    table = glue(work / "glue")
    cells = table_cells(table)
    for each in cells:
        each.directory.mkdir(parents=True)
        (each.directory / "recipe.yaml").write_text(dump_recipe(each.recipe))
        shutil.copy(cell, each.directory / RESULTS)
    started = time.perf_counter()
    assert not missing_cells(cells, overwrite=False)
    read = time.perf_counter() - started
    written = []
    for _ in range(4):
        started = time.perf_counter()
        TableFiles(table, cells, nullcontext).write_all()
        written.append(time.perf_counter() - started)
    print(f"{len(cells)} cells: comparing their recipes {read:.1f} s; writing the table {min(written):.2f} s, ", end="")
    print(f"the first time of a process {written[0]:.2f} s")


def glue(output: Path) -> TableRecipe:
    """Return the table of ``glue/table``'s five methods on RoBERTa-base, eight tasks, five seeds."""
    table = load_recipe("glue/table", [f"output_dir={output}"])
    assert isinstance(table, TableRecipe)
    return table.model_copy(update={"rows": {row: table.rows[row] for row in ROWS}})


def glue_jobs(cells: Sequence[Cell], rate: float) -> list[Job]:
    """Return the cells' jobs at ``rate`` examples per second, evaluation left out."""
    numbers = {cell.recipe.output_dir: i for i, cell in enumerate(cells)}
    seconds = [EXAMPLES[cell.task.removeprefix("glue/")] * cell.recipe.train.epochs / rate for cell in cells]
    starts = [cell.recipe.init_from for cell in cells]
    return [Job(time, None if start is None else numbers[start]) for time, start in zip(seconds, starts, strict=True)]


def failing(jobs: Sequence[Job], workers: int, costs: Costs, per_hour: float) -> float:
    """Return the mean time over draws in which each worker is lost so often, and replaced ten minutes later."""
    taken = []
    for seed in range(DRAWS):
        draw, lost = random.Random(seed), []
        horizon = 3 * makespan(queue(jobs, workers, costs))
        for worker in range(workers):
            at = 0.0
            while per_hour and (at := at + draw.expovariate(per_hour / 3600)) < horizon:
                lost.append(Failure(worker, at, back=600.0))
        taken.append(makespan(queue(jobs, workers, costs, lost)))
    return statistics.mean(taken)


def tables(costs: Costs, rate: float, per_hour: float) -> None:
    """Print how long the GLUE table takes."""
    table = glue(Path("runs/table"))
    cells = table_cells(table)
    largest = sorted(table.tasks, key=lambda task: -EXAMPLES[task.removeprefix("glue/")])
    jobs = glue_jobs(cells, rate)
    sorted_jobs = glue_jobs(table_cells(table.model_copy(update={"tasks": largest})), rate)
    total, longest = sum(job.seconds for job in jobs), longest_chain(jobs)
    print(
        f"\n{len(cells)} cells, {total / 3600:.0f} hours of work, {longest / 3600:.1f} hours in the longest chain; hours:\n"
    )
    print(
        "| workers | work / workers | one queue | with failures | large tasks first | parts | overheads, of the work |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for workers in WORKERS:
        times = (
            total / workers,
            makespan(queue(jobs, workers, costs)),
            failing(jobs, workers, costs, per_hour),
            makespan(queue(sorted_jobs, workers, costs)),
            parts(cells, jobs, workers, costs),
        )
        share = (costs.cell * len(jobs) + costs.start * min(workers, len(jobs))) / total
        shown = " | ".join(f"{seconds / 3600:.1f}" for seconds in times)
        print(f"| {workers:,} | {shown} | {100 * share:.2f} % |")


def measured(name: str | None, seeds: int) -> Costs:
    """Measure, and compare with the simulator; arguments as on the command line."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        os.environ["HF_DATASETS_CACHE"] = str(work / "cache")
        if name is None:
            values = recipe(save_model(work / "model"), save_rows(work / "rows.csv"), work / "alone")
        else:
            quick = ["data.validation=100", "merge.latency=false", f"output_dir={work / 'alone'}"]
            values = load_recipe(name, quick).model_dump(mode="json", by_alias=True)
        table = shape(values, seeds)
        costs = compare(write_recipe(table.model_dump(mode="json"), work / "table.yaml"), table, work)
        storage(work)
    return costs


def main() -> None:
    """Measure, compare, simulate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--recipe", help="of the runs, with a csv or data of the hub (default: a tiny BERT's)")
    parser.add_argument("--seeds", type=int, default=5, help="four cells each (default: 5)")
    parser.add_argument("--rate", type=float, default=400.0, help="examples per second that a worker trains on")
    parser.add_argument("--failures", type=float, default=0.01, help="of each worker per hour")
    parser.add_argument("--costs", type=float, nargs=2, help="seconds of a worker's start and of a cell's scheduling")
    args = parser.parse_args()
    costs = Costs(*args.costs) if args.costs else measured(args.recipe, args.seeds)
    tables(Costs(costs.start, max(0.0, costs.cell), save_every=600.0), args.rate, args.failures)


if __name__ == "__main__":
    main()
