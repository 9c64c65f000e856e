"""Reading a table of examples without changing a character of its text.

Every value keeps its own spelling: a sentence ``NA``, ``null`` or ``1.0`` in a text file stays that string.

=========  ============================================================================================
``.csv``   comma separated, standard quoting (``"`` quotes, doubled inside), strict about stray quotes
``.tsv``   tab separated, unquoted: a quotation mark is part of the text, a row is a line
``.jsonl``  one JSON object a line
``.json``  one JSON list of objects
``.parquet``  any Parquet file
=========  ============================================================================================

The text formats are UTF-8 (a byte order mark is skipped), may end in ``.gz``, and their empty lines are not
rows.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from peftlab.errors import PeftlabError, did_you_mean


@dataclass(frozen=True)
class Table:
    """Columns of equal length, and where each row stands in its file.

    Attributes:
        path: the file.
        columns: column name to values, in file order.
        positions: line number (text formats) or row number of each row, counted from 1.
        unit: what ``positions`` counts, ``line`` or ``row``.
    """

    path: Path
    columns: dict[str, list[object]]
    positions: Sequence[int]
    unit: str = "line"

    def __len__(self) -> int:
        return len(self.positions)

    def column(self, name: str, key: str) -> list[object]:
        """Return a column; a missing one raises ``PeftlabError`` that names ``key`` and the nearest
        column."""
        if name not in self.columns:
            hint = did_you_mean(name, self.columns)
            raise PeftlabError(
                f"{self.path}: no column {name!r} ({key}){hint}; columns: {', '.join(self.columns) or 'none'}"
            )
        return self.columns[name]

    def where(self, row: int) -> str:
        """Return ``file:line``, or ``file row N`` where the format has no lines."""
        place = self.positions[row]
        return f"{self.path}:{place}" if self.unit == "line" else f"{self.path} row {place}"

    def refuse(self, column: str, problem: str, rows: Sequence[int]) -> None:
        """Raise ``PeftlabError`` naming the file, the column, the problem, its count and the first rows, if
        any."""
        if not rows:
            return
        first = ", ".join(str(self.positions[row]) for row in rows[:5])
        more = ", ..." if len(rows) > 5 else ""
        raise PeftlabError(
            f"{self.path}: column {column!r} {problem} in {len(rows)} of {len(self)} rows ({self.unit} {first}{more})"
        )


def read_table(path: Path) -> Table:
    """Read a file by its suffix (see the module's table of formats).

    Raises:
        PeftlabError: an unknown suffix, or a malformed file (named with its line).
    """
    suffix = table_suffix(path)
    if suffix is None:
        raise PeftlabError(f"{path}: cannot tell the format; the name must end in one of {', '.join(_READERS)}")
    return _READERS[suffix](path)


def table_suffix(path: Path) -> str | None:
    """Return the readable suffix of a file name (``.csv``, ``.csv.gz``, ...), or None."""
    name = path.name.lower()
    return next((suffix for suffix in _READERS if name.endswith(suffix)), None)


def read_tsv(path: Path, header: Sequence[str] | None = None, ragged: list[int] | None = None) -> Table:
    """Read tab-separated lines, unquoted.

    Args:
        path: the file.
        header: column names of a file that has no header line.
        ragged: receives the numbers of lines with a wrong number of fields, which are left out; if None such
            a line is an error.

    Raises:
        PeftlabError: a line with a wrong number of fields (``file:line``), or an unreadable file.
    """
    rows = [(number, line.split("\t")) for number, line in _lines(path)]
    return _tabular(path, rows, header, ragged)


def _read_csv(path: Path) -> Table:
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    limit = csv.field_size_limit(2**31 - 1)
    rows: list[tuple[int, list[str]]] = []
    line = 1
    try:
        for row in reader:
            if row:
                rows.append((line, row))
            line = reader.line_num + 1
    except csv.Error as error:
        raise PeftlabError(f"{path}:{line}: not a CSV row ({error})") from None
    finally:
        csv.field_size_limit(limit)
    return _tabular(path, rows)


def _read_jsonl(path: Path) -> Table:
    positions, rows = [], []
    for number, line in _lines(path):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise PeftlabError(f"{path}:{number}: not a JSON object ({error})") from None
        positions.append(number)
    return _from_objects(path, rows, positions, "line")


def _read_json(path: Path) -> Table:
    try:
        rows = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise PeftlabError(f"{path}: not valid JSON ({error}); a file of one object a line is named .jsonl") from None
    if not isinstance(rows, list):
        raise PeftlabError(f"{path}: must be a list of objects, not {type(rows).__name__}")
    return _from_objects(path, rows, range(1, len(rows) + 1), "row")


def _read_parquet(path: Path) -> Table:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(str(path))
    except (pyarrow.ArrowException, OSError) as error:
        raise PeftlabError(f"{path}: not a readable Parquet file ({error})") from None
    return Table(path, table.to_pydict(), range(1, table.num_rows + 1), "row")


_READERS: dict[str, Callable[[Path], Table]] = {
    ".csv": _read_csv,
    ".tsv": read_tsv,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv.gz": _read_csv,
    ".tsv.gz": read_tsv,
    ".jsonl.gz": _read_jsonl,
    ".json.gz": _read_json,
}


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        if path.name.lower().endswith(".gz"):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise PeftlabError(f"{path}: cannot be read ({error})") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise PeftlabError(f"{path}:{line}: not UTF-8 ({error.reason})") from None


def _lines(path: Path) -> Iterable[tuple[int, str]]:
    # str.splitlines would also break at U+2028 and the like, which are text.
    for number, line in enumerate(_text(path).split("\n"), start=1):
        line = line.removesuffix("\r")
        if line:
            yield number, line


def _tabular(
    path: Path,
    rows: list[tuple[int, list[str]]],
    header: Sequence[str] | None = None,
    ragged: list[int] | None = None,
) -> Table:
    if header is None:
        if not rows:
            raise PeftlabError(f"{path}: is empty")
        (_, header), *rows = rows
    doubled = sorted({name for name in header if header.count(name) > 1})
    if doubled:
        raise PeftlabError(f"{path}: column {doubled[0]!r} appears more than once in the header")
    kept = []
    for number, fields in rows:
        if len(fields) == len(header):
            kept.append((number, fields))
        elif ragged is None:
            raise PeftlabError(f"{path}:{number}: {len(fields)} columns where {len(header)} are expected")
        else:
            ragged.append(number)
    columns: dict[str, list[object]] = {
        name: [fields[place] for _, fields in kept] for place, name in enumerate(header)
    }
    return Table(path, columns, [number for number, _ in kept])


def _from_objects(path: Path, rows: list[object], positions: Sequence[int], unit: str) -> Table:
    names: dict[str, None] = {}
    objects: list[dict[str, object]] = []
    for position, row in zip(positions, rows, strict=True):
        if not isinstance(row, dict):
            raise PeftlabError(f"{path} {unit} {position}: must be an object, not {type(row).__name__}")
        names.update(dict.fromkeys(row))
        objects.append(row)
    return Table(path, {name: [row.get(name) for row in objects] for name in names}, positions, unit)
