"""Columns of a Parquet file, each read on access."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from peftlab.errors import PeftlabError
from peftlab.tasks.reading.bad_rows import quoted
from peftlab.tasks.reading.content import expansion_limit, regular_size

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

_ROWS = 4096  # rows decoded at once; the bound on memory is checked after each batch


class ParquetColumns(Mapping[str, list[object]]):
    """Column name to values; other columns, which may be large or of odd types, are never decoded.

    Args:
        path: the file.

    Raises:
        PeftlabError: the file is damaged, two columns have one name, or (on access) a column expands beyond
            ``expansion_limit`` or contains values that Python cannot represent.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._limit = expansion_limit(regular_size(path))
        with self._open() as file:
            self._names = list(file.schema_arrow.names)
            self.rows = int(file.metadata.num_rows)
        doubled = sorted({name for name in self._names if self._names.count(name) > 1})
        if doubled:
            raise PeftlabError(f"{path}: column {quoted(doubled[0])} appears more than once")
        if self.rows > self._limit:
            raise PeftlabError(f"{path}: claims to contain {self.rows:,} rows, more than a file of its size can")

    def __getitem__(self, name: str) -> list[object]:
        if name not in self._names:
            raise KeyError(name)
        values: list[object] = []
        size = 0
        with self._open() as file:
            for batch in file.iter_batches(batch_size=_ROWS, columns=[name]):
                size += batch.nbytes
                if size > self._limit:
                    raise PeftlabError(f"{self.path}: column {quoted(name)} expands to more than {self._limit:,} bytes")
                values += batch.column(name).to_pylist()
        if len(values) != self.rows:
            raise PeftlabError(
                f"{self.path}: column {quoted(name)} contains {len(values):,} values, and the file claims {self.rows:,}"
            )
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @contextmanager
    def _open(self) -> Iterator[ParquetFile]:
        from pyarrow import ArrowException, parquet

        try:
            with parquet.ParquetFile(str(self.path)) as file:
                yield file
        except (ArrowException, OSError, ValueError, OverflowError, KeyError) as error:
            raise PeftlabError(f"{self.path}: not a readable Parquet file ({error})") from None
