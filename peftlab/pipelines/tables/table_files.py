"""The files of a table: gathered from the cells that have results, as they end and at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from peftlab.errors import PeftlabError
from peftlab.files import read_object, write_text
from peftlab.pipelines.tables.missing_cells import RESULTS, ended
from peftlab.recipe.table_cells import DRAFT, Cell
from peftlab.recipe.table_schema import AnyTable, TableRecipe
from peftlab.reporting.table_scores import Controls, Table, summarise
from peftlab.reporting.table_views import table_csv, table_latex, table_page
from peftlab.tasks.table import find_task

_SHARE = 0.05  # of the time that a table runs, for writing it meanwhile


class TableFiles:
    """Writes ``table.csv``, ``table.tex`` and ``table.html``.

    Args:
        cells: all cells of the table.
        hold: holds the table's directory while they are written.

    Attributes:
        failed: a line for each cell that failed, for the page.
    """

    def __init__(
        self, recipe: AnyTable, cells: Sequence[Cell], hold: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._recipe, self._cells, self._hold = recipe, cells, hold
        self.failed: list[str] = []
        self._next = 0.0

    def update(self) -> None:
        """Write them with the results there are, if that takes little of the time."""
        began = time.monotonic()
        if began >= self._next:
            try:
                with self._hold():
                    self._write()
            except PeftlabError:
                pass  # ``write_all`` says so, at the end
            now = time.monotonic()
            self._next = now + (now - began) / _SHARE

    def write_all(self) -> Table:
        """Write them with the results there are, print why there is no page, and return the table."""
        with self._hold():
            table, without_page = self._write()
        if without_page:
            print(f"no table.html: {without_page}")
        return table

    def _write(self) -> tuple[Table, str]:
        """Write them and return the table and why there is no page, or an empty text."""
        recipe = self._recipe
        directory = Path(recipe.output_dir)
        results = [(cell.task, cell.row, read_object(cell.directory / RESULTS)) for cell in self._cells if ended(cell)]
        table = summarise(_models(recipe), len(recipe.seeds), _titles(recipe), results)
        controls = controls_of(recipe)
        write_text(directory / "table.csv", table_csv(table, controls))
        write_text(directory / "table.tex", table_latex(table))
        try:
            write_text(directory / "table.html", table_page(table, self.failed, controls))
        except PeftlabError as error:
            return table, str(error)
        return table, ""


def _titles(recipe: AnyTable) -> dict[str, str]:
    """Return the names of a table's columns, by task."""
    if not isinstance(recipe, TableRecipe):
        return {DRAFT: "acceptance"}
    return {task: find_task(task).folder or task.rpartition("/")[2] for task in recipe.tasks}


def _models(recipe: AnyTable) -> dict[str, str]:
    """Return the reference of the model of each row; of drafts, that of the target."""
    key, usual = ("model", recipe.model) if isinstance(recipe, TableRecipe) else ("target", recipe.target)
    return {row: str(keys.get(key, usual)) for row, keys in recipe.rows.items()}


def controls_of(recipe: AnyTable) -> Controls | None:
    """Return which row costs are relative to, and which rows are compared at equal cost."""
    if not isinstance(recipe, TableRecipe) or recipe.costs is None:
        return None
    return Controls(recipe.costs.of, recipe.costs.controls)
