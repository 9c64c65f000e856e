"""A table recipe from start to end: missing cells are run, results gathered, the table written and printed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from peftlab.errors import PeftlabError
from peftlab.files import read_object, write_text
from peftlab.hardware import resolve_device
from peftlab.locks import locked
from peftlab.outputs import Claim, claimed, read_mark
from peftlab.pipelines.directory import TABLE, recipe_inputs
from peftlab.pipelines.tables.cell_processes import RESULTS, gpu_slots, let_end, missing_cells, run_cells
from peftlab.pipelines.tables.table_parts import Shard
from peftlab.recipe.loading import dump_recipe
from peftlab.recipe.schema import TableRecipe
from peftlab.recipe.table_cells import Cell, table_cells
from peftlab.reporting.facts import duration, required
from peftlab.reporting.tables.cost_lines import Controls
from peftlab.reporting.tables.score_scale import shown
from peftlab.reporting.tables.score_summary import Table, summarise
from peftlab.reporting.tables.table_page import table_page
from peftlab.reporting.tables.table_text import print_table, table_csv, table_latex
from peftlab.tasks.table import find_task


@dataclass(frozen=True)
class TableResults:
    """A table and the number of the cells that were to be run: all, or those of a part."""

    cells: int
    table: Table


class CellsFailed(PeftlabError):
    """Some cells of a table failed; the others are in it."""

    status = 1


def run_table(
    recipe: TableRecipe,
    *,
    overwrite: bool = False,
    resume: bool = False,
    device: str = "auto",
    slots: Sequence[str] | None = None,
    shard: Shard | None = None,
) -> TableResults:
    """Run the cells of ``recipe`` that have no result, write the table, and return it.

    Written into ``output_dir``: ``recipe.yaml``, ``table.csv``, ``table.tex``, ``table.html``, and each cell's run
    directory and output under ``cells/``. Running again, or resuming, runs what is missing.

    Args:
        overwrite: rerun cells whose recipe has changed; others are kept.
        device: where the cells run (``hardware.resolve_device``).
        slots: CUDA_VISIBLE_DEVICES for each cell that runs at the same time; default: one for each GPU.
        shard: run only this part of the cells, while other processes run the others; the table has what results there
            are when the part has ended. None: all cells, by this process alone.

    Raises:
        PeftlabError: a cell was run by another recipe, the directory contains something else, or another process
            runs the table or this part of it.
        CellsFailed: cells failed; the table without them is written.
        Stopped: SIGINT or SIGTERM.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise PeftlabError("a table starts its own processes, one for each GPU: run it without accelerate launch")
    directory = Path(recipe.output_dir)
    mark = read_mark(directory)
    begun = mark is not None and mark.kind == TABLE.kind
    slots = gpu_slots(resolve_device(device)) if slots is None else slots
    hold = partial(claimed, directory, TABLE, inputs=recipe_inputs(recipe), shared=shard is not None)
    cells = table_cells(recipe)
    own = cells if shard is None else shard.part(cells)
    with ExitStack() as held:
        missing = _begin(recipe, held.enter_context(hold(resume=begun)), own, overwrite)
        if shard is not None:
            held.close()
            held.enter_context(locked(directory / shard.lock, f"{directory}, shard {shard}"))
        part = "" if shard is None else f" in part {shard}"
        counts = f"{len(own)} cells{part}, {len(own) - len(missing)} with results"
        print(f"{counts}; {len(slots)} at a time", flush=True)
        again = nullcontext if shard is None else partial(hold, resume=True)
        try:
            failed = _run(missing, directory, slots, device)
        except PeftlabError:
            with again():
                _write(recipe, cells, [])
            raise
        lines = [f"{cell.directory.name}: {reason}" for cell, reason in failed.items()]
        with again():
            table = _write(recipe, cells, lines)
    print_table(table, controls=_controls(recipe))
    print(f"table: {directory / 'table.html'}, table.csv, table.tex")
    if lines:
        counts = f"{len(lines)} of {len(own)} cells failed; running the table again tries them again"
        raise CellsFailed("\n".join([counts, *lines]))
    return TableResults(len(own), table)


def _controls(recipe: TableRecipe) -> Controls | None:
    return None if recipe.costs is None else Controls(recipe.costs.of, recipe.costs.controls)


def _begin(recipe: TableRecipe, claim: Claim, cells: Sequence[Cell], overwrite: bool) -> list[Cell]:
    """Write the table's recipe and return those of ``cells`` that have no result."""
    let_end(cells)
    missing = missing_cells(cells, overwrite=overwrite)
    claim.begin()
    write_text(claim.path / "recipe.yaml", dump_recipe(recipe))
    return missing


def _run(missing: Sequence[Cell], directory: Path, slots: Sequence[str], device: str) -> dict[Cell, str]:
    """Run cells, print each one's outcome, and return why some failed."""
    finished = 0

    def done(cell: Cell, reason: str) -> None:
        nonlocal finished
        finished += 1
        outcome = _outcome(cell) if not reason else f"failed: {reason.splitlines()[0]}"
        print(f"[{finished}/{len(missing)}] {cell.directory.name}: {outcome}", flush=True)

    return run_cells(missing, directory, slots, done, device)


def _outcome(cell: Cell) -> str:
    results = read_object(cell.directory / RESULTS)
    score, seconds = required(results, "score"), required(results, "train_seconds")
    metric = str(results["metric"])
    return f"{metric} {shown(metric, score)}, {duration(seconds)}"


def _write(recipe: TableRecipe, cells: Sequence[Cell], failed: list[str]) -> Table:
    """Gather the results there are, and write the table's files."""
    directory = Path(recipe.output_dir)
    results = [
        (cell.task, cell.row, read_object(cell.directory / RESULTS))
        for cell in cells
        if (cell.directory / RESULTS).exists()
    ]
    titles = {task: find_task(task).folder or task.rpartition("/")[2] for task in recipe.tasks}
    models = {row: str(keys.get("model", recipe.model)) for row, keys in recipe.rows.items()}
    table, controls = summarise(models, len(recipe.seeds), titles, results), _controls(recipe)
    write_text(directory / "table.csv", table_csv(table, controls))
    write_text(directory / "table.tex", table_latex(table))
    try:
        write_text(directory / "table.html", table_page(table, failed, controls))
    except PeftlabError as error:
        print(f"no table.html: {error}")
    return table
