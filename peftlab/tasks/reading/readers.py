"""Reading tables of examples, the text unchanged.

Every value keeps its spelling: a sentence ``NA``, ``null`` or ``1.0`` in a text file stays that string.

=========  ============================================================================================
``.csv``   comma separated, standard quoting (``"`` quotes, doubled inside), strict about stray quotes; separated by
           semicolons or tabs where the header is, as spreadsheets of many countries write it
``.tsv``   tab separated, unquoted: a quotation mark is part of the text, a row is a line
``.jsonl``  one JSON object per line
``.json``  one JSON list of objects
``.parquet``  any Parquet file
=========  ============================================================================================

The text formats are UTF-8 (a byte order mark is skipped), may end in ``.gz``, and their empty lines are not
rows.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import parse_json
from peftlab.tasks.reading.bad_rows import Fault, listed, quoted, refuse_rows
from peftlab.tasks.reading.content import read_text, text_lines
from peftlab.tasks.reading.parquet import ParquetColumns


@dataclass(frozen=True)
class Table:
    """Columns of equal length, and the position of each row in its file.

    Attributes:
        path: the file.
        columns: column name to values, in file order.
        positions: line number (text formats) or row number of each row, counted from 1.
        unit: what ``positions`` counts, ``line`` or ``row``.
    """

    path: Path
    columns: Mapping[str, list[object]]
    positions: Sequence[int]
    unit: str = "line"

    def __len__(self) -> int:
        return len(self.positions)

    def column(self, name: str, key: str) -> list[object]:
        """Return a column; a missing one raises ``PeftlabError`` that names ``key`` and the nearest
        column."""
        if name not in self.columns:
            hint = did_you_mean(name, self.columns)
            columns = listed(self.columns, 50)
            raise PeftlabError(f"{self.path}: no column {name!r} ({key}){hint}; columns: {columns}")
        return self.columns[name]

    def where(self, row: int) -> str:
        """Return ``file:line``, or ``file row N`` where the format has no lines."""
        place = self.positions[row]
        return f"{self.path}:{place}" if self.unit == "line" else f"{self.path} row {place}"

    def fault(self, column: str, problem: str, rows: Sequence[int]) -> list[Fault]:
        """Return a list with one fault about ``rows`` of a column; an empty list for no rows."""
        places = [self.positions[row] for row in rows]
        return [Fault(self.path, column, problem, places, self.unit, len(self))] if rows else []

    def take(self, names: Sequence[str], rows: Sequence[int]) -> Table:
        """Return the named columns at ``rows``, in that order."""
        columns = {name: [values[row] for row in rows] for name in names for values in [self.columns[name]]}
        return Table(self.path, columns, [self.positions[row] for row in rows], self.unit)


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
    rows = [(number, line.split("\t")) for number, line in text_lines(path)]
    return _tabular(path, rows, header, ragged)


def _read_csv(path: Path) -> Table:
    text = read_text(path)
    limit = csv.field_size_limit(2**31 - 1)
    rows: list[tuple[int, list[str]]] = []
    line = 1
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=_separator(text), strict=True)
        for row in reader:
            if row:
                rows.append((line, row))
            line = reader.line_num + 1
    except csv.Error as error:
        raise PeftlabError(f"{path}:{line}: not a CSV row ({error})") from None
    finally:
        csv.field_size_limit(limit)
    return _tabular(path, rows)


def _separator(text: str) -> str:
    """Return the first of ``,``, ``;`` and tab that separates the header of a csv file; comma if none does."""
    for separator in ",;\t":
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
        if len(next(filter(None, rows), [])) > 1:
            return separator
    return ","


def _read_jsonl(path: Path) -> Table:
    return _objects(path, text_lines(path))


def read_lines(lines: Iterable[str], name: str) -> Table:
    """Read a stream: JSON objects, one a line, where the first begins with a brace, else texts in a column ``text``.

    Args:
        lines: blank ones are left out. name: of the stream, for messages.

    Raises:
        PeftlabError: a line that is no JSON object among lines that are.
    """
    numbered = [(number, line.rstrip("\r\n")) for number, line in enumerate(lines, start=1) if line.strip()]
    path = Path(name)
    if numbered and numbered[0][1].lstrip().startswith("{"):
        return _objects(path, numbered)
    texts: list[object] = [line for _, line in numbered]
    return Table(path, {"text": texts}, [number for number, _ in numbered])


def _objects(path: Path, lines: Iterable[tuple[int, str]]) -> Table:
    rows: list[tuple[int, object]] = []
    problems: list[tuple[int, str]] = []
    for number, line in lines:
        try:
            rows.append((number, parse_json(line)))
        except ValueError as error:
            problems.append((number, f"not a JSON object ({error})"))
    return _from_objects(path, rows, "line", problems)


def _read_json(path: Path) -> Table:
    try:
        rows = parse_json(read_text(path))
    except ValueError as error:
        raise PeftlabError(f"{path}: not valid JSON ({error}); a file of one object a line is named .jsonl") from None
    if not isinstance(rows, list):
        raise PeftlabError(f"{path}: must be a list of objects, not {type(rows).__name__}")
    return _from_objects(path, list(enumerate(rows, start=1)), "row", [])


def _read_parquet(path: Path) -> Table:
    columns = ParquetColumns(path)
    return Table(path, columns, range(1, columns.rows + 1), "row")


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
    doubled = [name for name, count in Counter(header).items() if count > 1]
    if doubled:
        raise PeftlabError(f"{path}: column {quoted(doubled[0])} appears more than once in the header")
    kept, wrong = [], []
    for number, fields in rows:
        if len(fields) == len(header):
            kept.append((number, fields))
        else:
            wrong.append((number, f"{len(fields)} columns where {len(header)} are expected"))
    if ragged is None:
        refuse_rows(path, "line", wrong)
    else:
        ragged += [number for number, _ in wrong]
    columns: dict[str, list[object]] = {
        name: [fields[place] for _, fields in kept] for place, name in enumerate(header)
    }
    return Table(path, columns, [number for number, _ in kept])


class _ObjectColumns(Mapping[str, list[object]]):
    """Key to its value in every object, None where an object lacks it.

    A column is built on access: as a full table, objects that share no keys would need rows times keys cells.
    """

    def __init__(self, rows: Sequence[dict[str, object]]) -> None:
        self._rows = rows
        self._names = dict.fromkeys(name for row in rows for name in row)

    def __getitem__(self, name: str) -> list[object]:
        if name not in self._names:
            raise KeyError(name)
        return [row.get(name) for row in self._rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _from_objects(
    path: Path, rows: Sequence[tuple[int, object]], unit: str, problems: Sequence[tuple[int, str]]
) -> Table:
    objects = [(place, row) for place, row in rows if isinstance(row, dict)]
    wrong = [(place, f"not a JSON object but {quoted(row)}") for place, row in rows if not isinstance(row, dict)]
    refuse_rows(path, unit, sorted([*problems, *wrong]))
    return Table(path, _ObjectColumns([row for _, row in objects]), [place for place, _ in objects], unit)
