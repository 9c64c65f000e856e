"""Which cells of a table are to be run: those that have not ended, and on request those of a changed recipe."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from peftlab.errors import PeftlabError
from peftlab.files import Json, is_locked, remove
from peftlab.pipelines.directory import RUN, recipe_inputs
from peftlab.recipe.loading import load_recipe
from peftlab.recipe.schema import Recipe
from peftlab.recipe.table_cells import Cell
from peftlab.reporting.facts import flatten

RESULTS = "results.json"
_MODEL_ID = "data.endpoint_model"


def has_checkpoint(directory: Path) -> bool:
    """Return whether a run can be resumed."""
    return any(directory.glob("checkpoints/step-*.pt"))


def ended(cell: Cell) -> bool:
    """Return whether a cell has all its results: a run writes some before it measures; checkpoints are removed last."""
    return (cell.directory / RESULTS).exists() and not has_checkpoint(cell.directory)


def missing_cells(cells: Sequence[Cell], *, overwrite: bool) -> list[Cell]:
    """Return the cells that have no result yet, in order; with ``overwrite``, those that must be run anew as well.

    A cell must be run anew when it was run by another recipe or starts from such a cell; its directory is removed.

    Raises:
        PeftlabError: without ``overwrite``, there are such cells; they are named with what differs. With it, one
            of them contains something that we did not write.
    """
    changed = {cell.directory: reason for cell in cells if (reason := _difference(cell))}
    if changed and not overwrite:
        lines = [f"{directory} was run by another recipe: {reason}" for directory, reason in changed.items()]
        more = f"\nand {len(lines) - 5} more cells" if len(lines) > 5 else ""
        advice = "pass --overwrite to run the changed cells anew, or choose another output_dir"
        raise PeftlabError("\n".join(lines[:5]) + f"{more}\n{advice}")
    anew = {*changed, *(cell.directory for cell in cells if Path(cell.init_from or "") in changed)}
    for cell in cells:
        if cell.directory in anew:
            remove(cell.directory, RUN.kind, recipe_inputs(cell.recipe))
    return [cell for cell in cells if not ended(cell)]


def _difference(cell: Cell) -> str:
    """Return the keys that differ from the recipe that a cell was run by; empty if none does or it was not run."""
    file = cell.directory / "recipe.yaml"
    if not file.exists():
        return ""
    try:
        before = load_recipe(file)
    except PeftlabError as error:
        return str(error).splitlines()[0]
    here, there = (dict(flatten(_settings(recipe))) for recipe in (cell.recipe, before))
    if here.get(_MODEL_ID) is None:  # the id that the endpoint gave is in the run's recipe, not in the table's
        here[_MODEL_ID] = there.get(_MODEL_ID)
    differ = [key for key in {**there, **here} if here.get(key) != there.get(key)]
    return ", ".join(f"{key} {there.get(key)}, now {here.get(key)}" for key in differ)


def _settings(recipe: Recipe) -> dict[str, Json]:
    """Return a recipe's values without its place on disk: a table may be moved."""
    values = recipe.model_dump(mode="json")
    values.pop("output_dir")
    if values.get("init_from"):
        values["init_from"] = Path(values["init_from"]).name
    return values


def let_end(cells: Sequence[Cell], seconds: float = 60.0) -> None:
    """Wait for cells of a table that was killed: they notice within a step, write a checkpoint and end."""
    until = time.monotonic() + seconds
    while any(is_locked(cell.directory) for cell in cells) and time.monotonic() < until:
        time.sleep(0.05)
