"""Parts of a table that run at the same time, on machines that share its directory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from peftlab.errors import PeftlabError
from peftlab.files import LOCK
from peftlab.recipe.table_cells import Cell


@dataclass(frozen=True)
class Shard:
    """Every ``count``-th cell, from number ``index`` on (from 0)."""

    index: int
    count: int

    @classmethod
    def read(cls, text: str) -> Shard:
        """Return the shard that ``I/N`` names.

        Raises:
            PeftlabError: it is none of 0/N to N-1/N.
        """
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if found is None or not int(found[1]) < int(found[2]):
            raise PeftlabError(f"shard {text}: write I/N, part I of N, with I from 0 to N-1: 0/4, 1/4, 2/4 and 3/4")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def lock(self) -> str:
        """Name of the file that the process of this part locks."""
        return f"{LOCK}-{self.index}-of-{self.count}"

    def part(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells of this part, in order; a cell that starts from another one's result is where that one is.

        Args:
            cells: of the whole table, in the order they run.
        """
        numbers: dict[str, int] = {}
        independent = 0
        for cell in cells:
            start = numbers.get(cell.init_from or "")
            if start is None:
                start, independent = independent, independent + 1
            numbers[cell.recipe.output_dir] = start
        return [cell for cell in cells if numbers[cell.recipe.output_dir] % self.count == self.index]
