"""A table recipe from start to end: missing cells are run, results gathered, the table written and printed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from peftlab.errors import PeftlabError
from peftlab.files import Claim, claimed, locked, read_mark, read_object, write_text
from peftlab.pipelines.directory import TABLE, recipe_inputs
from peftlab.pipelines.tables.engines import LOCAL, Engine, open_engine
from peftlab.pipelines.tables.missing_cells import RESULTS, let_end, missing_cells
from peftlab.pipelines.tables.schedule import run_cells
from peftlab.pipelines.tables.table_files import TableFiles, controls_of
from peftlab.pipelines.tables.table_parts import Shard
from peftlab.recipe.loading import dump_recipe
from peftlab.recipe.table_cells import Cell, table_cells
from peftlab.recipe.table_schema import AnyTable
from peftlab.reporting.facts import duration, required
from peftlab.reporting.table_scores import Table, shown
from peftlab.reporting.table_views import print_table


@dataclass(frozen=True)
class TableResults:
    """A table and the number of the cells that were to be run: all, or those of a part."""

    cells: int
    table: Table


class CellsFailed(PeftlabError):
    """Some cells of a table failed; the others are in it."""

    status = 1


def run_table(
    recipe: AnyTable,
    *,
    overwrite: bool = False,
    resume: bool = False,
    device: str = "auto",
    on: str = LOCAL,
    cpus: int | None = None,
    shard: Shard | None = None,
) -> TableResults:
    """Run the cells of ``recipe`` that have no result, write the table, and return it.

    Written into ``output_dir``: ``recipe.yaml``, ``table.csv``, ``table.tex``, ``table.html``, and each cell's run
    directory and output under ``cells/``. The table's files are also written while it fills. Running again, or
    resuming, runs what is missing.

    Args:
        overwrite: rerun cells whose recipe has changed; others are kept.
        device, on, cpus: where the cells run, as in ``engines.open_engine``.
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
    hold = partial(claimed, directory, TABLE, inputs=recipe_inputs(recipe), shared=shard is not None)
    cells = table_cells(recipe)
    own = cells if shard is None else shard.part(cells)
    with open_engine(on, device, cpus) as engine, ExitStack() as held:
        missing = _begin(recipe, held.enter_context(hold(resume=begun)), own, overwrite)
        if shard is not None:
            held.close()
            held.enter_context(locked(directory / shard.lock, f"{directory}, shard {shard}"))
        part = "" if shard is None else f" in part {shard}"
        counts = f"{len(own)} cells{part}, {len(own) - len(missing)} with results"
        print(f"{counts}; {engine.size}", flush=True)
        files = TableFiles(recipe, cells, nullcontext if shard is None else partial(hold, resume=True))
        try:
            failed = _run(missing, directory, engine, files)
        finally:
            table = files.write_all()
    print_table(table, controls=controls_of(recipe))
    print(f"table: {directory / 'table.html'}, table.csv, table.tex")
    if failed:
        counts = f"{len(failed)} of {len(own)} cells failed; running the table again tries them again"
        raise CellsFailed("\n".join([counts, *files.failed]))
    return TableResults(len(own), table)


def _begin(recipe: AnyTable, claim: Claim, cells: Sequence[Cell], overwrite: bool) -> list[Cell]:
    """Write the table's recipe and return those of ``cells`` that have no result."""
    let_end(cells)
    missing = missing_cells(cells, overwrite=overwrite)
    claim.begin()
    write_text(claim.path / "recipe.yaml", dump_recipe(recipe))
    return missing


def _run(missing: Sequence[Cell], directory: Path, engine: Engine, files: TableFiles) -> dict[Cell, str]:
    """Run cells, print each one's outcome, keep the table's files up to date, and return why some cells failed."""
    finished = 0

    def done(cell: Cell, reason: str) -> None:
        nonlocal finished
        finished += 1
        outcome = _outcome(cell) if not reason else f"failed: {reason.splitlines()[0]}"
        print(f"[{finished}/{len(missing)}] {cell.directory.name}: {outcome}", flush=True)
        if reason:
            files.failed.append(f"{cell.directory.name}: {reason}")
        if finished < len(missing):
            files.update()

    return run_cells(missing, directory, engine, done)


def _outcome(cell: Cell) -> str:
    results = read_object(cell.directory / RESULTS)
    score, seconds = required(results, "score"), required(results, "train_seconds")
    metric = str(results["metric"])
    return f"{metric} {shown(metric, score)}, {duration(seconds)}"
