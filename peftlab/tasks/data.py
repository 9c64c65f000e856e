"""Reading the user's files: tables of columns, the files of the splits, and the values of label columns.

Every value keeps its spelling: a sentence ``NA``, ``null`` or ``1.0`` in a text file stays that string. Reading is
bounded in memory, and every bad row is named.

=========  ============================================================================================
``.csv``   comma separated, standard quoting (``"`` quotes, doubled inside), strict about stray quotes; separated by
           semicolons or tabs where the header is, as spreadsheets of many countries write it
``.tsv``   tab separated, unquoted: a quotation mark is part of the text, a row is a line
``.jsonl``  one JSON object per line
``.json``  one JSON list of objects
``.parquet``  any Parquet file
=========  ============================================================================================

The text formats are UTF-8 (a byte order mark is skipped), may end in ``.gz``, and their empty lines are not
rows. A directory of images is a table of their paths, and of the folders that they are in.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import os
import re
import reprlib
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from peftlab.errors import PeftlabError, did_you_mean
from peftlab.files import open_regular, parse_json
from peftlab.references import locate, similar_path
from peftlab.registry import resolve
from peftlab.tasks.table import DataConfig, Task

if TYPE_CHECKING:
    from _typeshed import SupportsRead
    from pyarrow.parquet import ParquetFile


# --- Bad rows: all kinds of faults in one message, with the first few line or row numbers of each.
_LISTED = 10  # places or names that a message lists at most
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60


@dataclass(frozen=True)
class Fault:
    """A problem that some rows of a column have.

    Attributes:
        path: the file.
        column: the column's name.
        problem: what is wrong, as the end of a sentence: ``is missing``.
        places: line or row numbers, at least one.
        unit: what ``places`` counts, ``line`` or ``row``.
        total: rows of the file.
    """

    path: Path
    column: str
    problem: str
    places: Sequence[int]
    unit: str
    total: int

    def __str__(self) -> str:
        where = f"{self.unit} {listed(map(str, self.places))}"
        return (
            f"{self.path}: column {quoted(self.column)} {self.problem} in {len(self.places)} of {self.total} rows "
            f"({where})"
        )


def refuse(faults: Sequence[Fault], hint: str = "") -> None:
    """Raise ``PeftlabError`` with a line for each fault and the hint after them, if there is any fault.

    Args:
        faults: what is wrong, in the order of the message.
        hint: a line on what the user can do; empty for none.
    """
    if faults:
        raise PeftlabError("\n".join(filter(None, (*map(str, faults), hint))))


def refuse_unreadable_rows(path: Path, unit: str, problems: Sequence[tuple[int, str]]) -> None:
    """Raise ``PeftlabError`` where rows could not be read: the first with its problem, the others' places.

    Args:
        path: the file.
        unit: what the numbers count, ``line`` or ``row``.
        problems: line or row number of each such row and what is wrong with it.
    """
    if not problems:
        return
    (first, problem), *others = problems
    where = f"{path}:{first}" if unit == "line" else f"{path} row {first}"
    more = f"; and {len(others)} more bad rows ({unit} {listed(str(place) for place, _ in others)})" if others else ""
    raise PeftlabError(f"{where}: {problem}{more}")


def listed(items: Iterable[str], most: int = _LISTED) -> str:
    """Return the first items, comma separated and shortened where they are long, and ``...`` where there are more.

    Args:
        items: texts to list.
        most: how many of them are named.
    """
    items = list(items)
    shown = [item if len(item) <= 80 else f"{item[:77]}..." for item in items[:most]]
    return ", ".join(shown + ["..."] * (len(items) > most)) or "none"


def quoted(value: object) -> str:
    """Return ``repr(value)``, shortened where it is long."""
    return _REPR.repr(value)


# --- The text of a file: bounded in size and UTF-8, or an error that names the file.
_CHUNK = 2**20
_ALWAYS_FITS = 64 * 2**20
_PARQUET_ROWS = 4096  # rows decoded at once; the bound on memory is checked after each batch
_EXPANSION = 100  # text compresses 3- to 30-fold, a decompression bomb a thousandfold


def read_text(path: Path) -> str:
    """Return a file's text, decompressed if its name ends in ``.gz``, without a byte order mark.

    Raises:
        PeftlabError: not a regular file, not readable, not UTF-8, a NUL byte, or a compressed file that expands
            beyond ``expansion_limit``; the line is named where there is one.
    """
    size = regular_size(path)
    packed = path.name.lower().endswith(".gz")
    try:
        with gzip.open(path, "rb") if packed else path.open("rb") as file:
            return decode(file, path, size if packed else None)
    except (OSError, EOFError, zlib.error) as error:
        raise PeftlabError(f"{path}: cannot be read ({error})") from None


def decode(file: SupportsRead[bytes], path: Path, packed: int | None = None) -> str:
    """Return the text of an open file or stream, without a byte order mark; errors as in ``read_text``.

    Args:
        file: open for reading bytes.
        path: what errors call it.
        packed: bytes of the compressed file that it is read from; None: it is not compressed.
    """
    content = bytearray()
    while chunk := file.read(_CHUNK):
        if not content and chunk.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise PeftlabError(f"{path}: is UTF-16, not UTF-8; save the file as UTF-8")
        if (place := chunk.find(0)) >= 0:
            line = content.count(b"\n") + chunk.count(b"\n", 0, place) + 1
            raise PeftlabError(f"{path}:{line}: a NUL byte; the file is damaged, or not UTF-8 text")
        content += chunk
        if packed is not None and len(content) > expansion_limit(packed):
            raise PeftlabError(
                f"{path}: {packed:,} bytes expand to more than {expansion_limit(packed):,}; if that is "
                "intended, decompress the file yourself"
            )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise PeftlabError(f"{path}:{line}: not UTF-8 ({error.reason}); save the file as UTF-8") from None


def regular_size(path: Path) -> int:
    """Return a file's size in bytes; errors as in ``open_regular``."""
    with open_regular(path) as file:
        return os.fstat(file.fileno()).st_size


def expansion_limit(size: int) -> int:
    """Return how many bytes a compressed file of ``size`` bytes may expand to."""
    return max(_ALWAYS_FITS, _EXPANSION * size)


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of every line that is not empty; errors as ``read_text``."""
    return _lines(read_text(path))


def _lines(text: str) -> Iterator[tuple[int, str]]:
    # str.splitlines would also break at U+2028 and the like, which are text.
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        if line:
            yield number, line


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can encode ``text``; an unpaired surrogate, which JSON can escape, cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# --- Tables.
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
        """Return a column; a missing one raises ``PeftlabError`` that names ``key`` and the nearest column.

        Args:
            name: the column.
            key: the recipe's key that names it, for the message.
        """
        if name not in self.columns:
            hint = did_you_mean(name, self.columns)
            columns = _column_names(self.columns)
            raise PeftlabError(f"{self.path}: no column {name!r} ({key}){hint}; columns: {columns}")
        return self.columns[name]

    def where(self, row: int) -> str:
        """Return ``file:line``, or ``file row N`` where the format has no lines."""
        place = self.positions[row]
        return f"{self.path}:{place}" if self.unit == "line" else f"{self.path} row {place}"

    def fault(self, column: str, problem: str, rows: Sequence[int]) -> list[Fault]:
        """Return a list with one fault about ``rows`` of a column; an empty list for no rows.

        Args:
            column: the column's name.
            problem: what is wrong, as the end of a sentence.
            rows: indices of the rows, from 0.
        """
        places = [self.positions[row] for row in rows]
        return [Fault(self.path, column, problem, places, self.unit, len(self))] if rows else []

    def take(self, names: Sequence[str], rows: Sequence[int]) -> Table:
        """Return the named columns at ``rows``, in that order.

        Args:
            names: of the columns.
            rows: indices of the rows, from 0.
        """
        columns = {name: [values[row] for row in rows] for name in names for values in [self.columns[name]]}
        return Table(self.path, columns, [self.positions[row] for row in rows], self.unit)


def _column_names(names: Iterable[str]) -> str:
    """Return column names for a message, in quotes where blanks around them would not be seen."""
    return listed((name if name == name.strip() else repr(name) for name in names), 50)


class LazyColumns(Mapping[str, list[object]]):
    """Columns that are read on access: as a full table, objects that share no keys would need rows times keys cells.

    Args:
        names: of the columns, in file order.
        read: a column's name to its values.
    """

    def __init__(self, names: Iterable[str], read: Callable[[str], list[object]]) -> None:
        self._names, self._read = dict.fromkeys(names), read

    def __getitem__(self, name: str) -> list[object]:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def read_table(path: Path) -> Table:
    """Read a file by its suffix (see the module's table of formats), or the names of a directory of images.

    Raises:
        PeftlabError: an unknown suffix, or a malformed file (named with its line).
    """
    suffix = table_suffix(path)
    if suffix is None and path.is_dir():
        return _read_image_folder(path)
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
    return _table_of_fields(path, rows, header, ragged)


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
    return _table_of_fields(path, rows)


def _separator(text: str) -> str:
    """Return the first of ``,``, ``;`` and tab that separates the header of a csv file; comma if none does."""
    for separator in ",;\t":
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
        if len(next(filter(None, rows), [])) > 1:
            return separator
    return ","


def _read_jsonl(path: Path) -> Table:
    return _table_of_lines(path, text_lines(path))


def read_lines(stream: SupportsRead[bytes], name: str) -> Table:
    """Read a stream: JSON objects, one a line, where the first begins with a brace, else texts in a column ``text``.

    Args:
        stream: UTF-8 text; blank lines are left out.
        name: what messages call the stream.

    Raises:
        PeftlabError: text that is not UTF-8, or a line that is no JSON object among lines that are.
    """
    path = Path(name)
    numbered = [(number, line) for number, line in _lines(decode(stream, path)) if line.strip()]
    if numbered and numbered[0][1].lstrip().startswith("{"):
        return _table_of_lines(path, numbered)
    texts: list[object] = [line for _, line in numbered]
    return Table(path, {"text": texts}, [number for number, _ in numbered])


def _table_of_lines(path: Path, lines: Iterable[tuple[int, str]]) -> Table:
    rows: list[tuple[int, object]] = []
    problems: list[tuple[int, str]] = []
    for number, line in lines:
        try:
            rows.append((number, parse_json(line)))
        except ValueError as error:
            problems.append((number, f"not a JSON object ({error})"))
    return _table_of_objects(path, rows, "line", problems)


def _read_json(path: Path) -> Table:
    try:
        rows = parse_json(read_text(path))
    except ValueError as error:
        raise PeftlabError(f"{path}: not valid JSON ({error}); a file of one object a line is named .jsonl") from None
    if not isinstance(rows, list):
        raise PeftlabError(f"{path}: must be a list of objects, not {type(rows).__name__}")
    return _table_of_objects(path, list(enumerate(rows, start=1)), "row", [])


def _read_parquet(path: Path) -> Table:
    """Return a file's columns, each decoded on access: others may be large or of odd types.

    Raises:
        PeftlabError: the file is damaged, two columns have one name, or (on access) a column expands beyond
            ``expansion_limit`` or contains values that Python cannot represent.
    """
    limit = expansion_limit(regular_size(path))

    @contextmanager
    def opened() -> Iterator[ParquetFile]:
        from pyarrow import ArrowException, parquet

        try:
            with parquet.ParquetFile(str(path)) as file:
                yield file
        except (ArrowException, OSError, ValueError, OverflowError, KeyError) as error:
            raise PeftlabError(f"{path}: not a readable Parquet file ({error})") from None

    def read(name: str) -> list[object]:
        values: list[object] = []
        size = 0
        with opened() as file:
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=[name]):
                size += batch.nbytes
                if size > limit:
                    raise PeftlabError(f"{path}: column {quoted(name)} expands to more than {limit:,} bytes")
                values += batch.column(name).to_pylist()
        if len(values) != rows:
            raise PeftlabError(
                f"{path}: column {quoted(name)} contains {len(values):,} values, and the file claims {rows:,}"
            )
        return values

    with opened() as file:
        names, rows = list(file.schema_arrow.names), int(file.metadata.num_rows)
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise PeftlabError(f"{path}: column {quoted(repeated[0])} appears more than once")
    if rows > limit:
        raise PeftlabError(f"{path}: claims to contain {rows:,} rows, more than a file of its size can")
    return Table(path, LazyColumns(names, read), range(1, rows + 1), "row")


IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
FOLDER_COLUMNS = ("image", "label")  # of the table that a directory of images is


def _read_image_folder(directory: Path) -> Table:
    """Return the images below a directory, in the order of their names, and the folder in it that each is in.

    Without folders there is no column of labels. Names that begin with a dot are left out, as a shell does.

    Raises:
        PeftlabError: a file that is no image by its name, or images both in folders and beside them.
    """
    found: list[tuple[str, str | None]] = []
    for folder, below, files in os.walk(directory, onerror=_refuse_directory):
        below[:] = sorted(name for name in below if not name.startswith("."))
        inner = Path(folder).relative_to(directory).parts
        for name in sorted(name for name in files if not name.startswith(".")):
            if not name.lower().endswith(IMAGE_SUFFIXES):
                place = Path(folder, name)
                raise PeftlabError(f"{place}: no image by its name, which ends in one of {', '.join(IMAGE_SUFFIXES)}")
            found.append((str(Path(*inner, name)), inner[0] if inner else None))
    paths, labels = [path for path, _ in found], [label for _, label in found]
    if None in labels and len(set(labels)) > 1:
        raise PeftlabError(f"{directory}: {paths[labels.index(None)]} is in no folder, and other images are in one")
    image, label = FOLDER_COLUMNS
    columns: dict[str, list[object]] = {image: [*paths], **({} if None in labels else {label: [*labels]})}
    return Table(directory, columns, range(1, len(found) + 1), "image")


def _refuse_directory(error: OSError) -> None:
    raise PeftlabError(f"{error.filename}: cannot be read ({error})")


_TEXT_READERS: dict[str, Callable[[Path], Table]] = {
    ".csv": _read_csv, ".tsv": read_tsv, ".jsonl": _read_jsonl, ".json": _read_json,
}  # fmt: skip
_READERS = {**_TEXT_READERS, ".parquet": _read_parquet, **{f"{end}.gz": read for end, read in _TEXT_READERS.items()}}


def _table_of_fields(
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
        refuse_unreadable_rows(path, "line", wrong)
    else:
        ragged += [number for number, _ in wrong]
    columns: dict[str, list[object]] = {
        name: [fields[place] for _, fields in kept] for place, name in enumerate(header)
    }
    return Table(path, columns, [number for number, _ in kept])


def _table_of_objects(
    path: Path, rows: Sequence[tuple[int, object]], unit: str, problems: Sequence[tuple[int, str]]
) -> Table:
    objects = [(place, row) for place, row in rows if isinstance(row, dict)]
    wrong = [(place, f"not a JSON object but {quoted(row)}") for place, row in rows if not isinstance(row, dict)]
    refuse_unreadable_rows(path, unit, sorted([*problems, *wrong]))
    names = dict.fromkeys(name for _, row in objects for name in row)
    columns = LazyColumns(names, lambda name: [row.get(name) for _, row in objects])
    return Table(path, columns, [place for place, _ in objects], unit)


# --- The files of a task's splits, and their tables.
_SPLIT_STEMS = {
    "train": "train", **dict.fromkeys(("validation", "valid", "val", "dev", "eval"), "validation"), "test": "test",
}  # fmt: skip


def split_files(reference: str, more: tuple[str, ...] = (), *, images: bool = False) -> dict[str, Path]:
    """Return the file of each split, or its directory of images; a single one is the training split.

    Args:
        reference: a file, or a directory with one file for each split.
        more: suffixes to read beside those of tables.
        images: whether a directory without a table may contain the images, in folders of the splits or of the classes.
    """
    path = Path(os.path.expanduser(reference))
    if reference.startswith("package:"):
        path = Path(locate(reference, "data.path"))
    elif not os.path.exists(path):  # Path.exists raises for names that are too long or unreadable
        raise PeftlabError(f"data.path {reference!r}: no such file or directory{_where_it_may_be(reference)}")
    if not path.is_dir():
        return {"train": path}
    files: dict[str, Path] = {}
    entries = _directory_entries(path)
    folders = images and not any(table_suffix(entry) for entry in entries)
    for file in entries:
        suffix = table_suffix(file) or next((s for s in more if file.name.endswith(s)), None)
        split = _SPLIT_STEMS.get(file.name[: -len(suffix)].lower()) if suffix else None
        if folders and file.is_dir():
            split = _SPLIT_STEMS.get(file.name.lower())
        if split is None:
            continue
        if split in files:
            raise PeftlabError(f"{path}: both {files[split].name} and {file.name} could be the {split} split")
        files[split] = file
    if folders and not files:
        return {"train": path}
    other = [entry.name for entry in entries if entry not in files.values() and not entry.name.startswith(".")]
    if folders and other:
        raise PeftlabError(f"{path}: {listed(other)} beside {listed(each.name for each in files.values())}: no split")
    if "train" not in files:
        there = listed(entry.name for entry in entries) if entries else "nothing"
        raise PeftlabError(f"{path}: no train.* file (csv, tsv, jsonl, json, parquet) in it, but {there}")
    return files


def _where_it_may_be(reference: str) -> str:
    """Return what helps with a path that does not exist, for the end of a message."""
    path = Path(os.path.expanduser(reference))
    looked = "" if path.is_absolute() else f" (looked for in {Path.cwd()})"
    on_hub = not path.suffix and len(path.parts) <= 2 and not reference.startswith((".", "/", "~"))
    load = f"datasets.load_dataset({reference!r}, split='train').to_json('{path.name}.jsonl')"
    hub = f"; data sets of the hub are not read: write one to a file first, {load}" if on_hub else ""
    return similar_path(reference) + looked + hub


def _directory_entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError as error:
        raise PeftlabError(f"{directory}: cannot be read ({error})") from None


def split_tables(
    files: Mapping[str, Path], validation: float | str | None, all_files: Mapping[str, Path]
) -> dict[str, Table]:
    """Read the split files; validation comes from one of ``all_files`` or from ``data.validation``, not from both.

    Args:
        files: split to its file, of the splits to read.
        validation: ``data.validation``: how much of the training split is held out; None where the recipe has none.
        all_files: split to its file, of all splits that the data has.
    """
    if "validation" in all_files and validation is not None:
        raise PeftlabError(f"data.validation is set, but {all_files['validation']} is the validation split already")
    if "validation" not in all_files and validation is None:
        raise PeftlabError(
            f"{all_files['train']}: no validation file. Give data.path a directory with train.* and validation.* "
            "(val.*, dev.*), or set data.validation to a number of rows (200) or a share (0.1); all is for peftlab eval"
        )
    tables = {split: read_table(file) for split, file in files.items()}
    for table in tables.values():
        if len(table) == 0:
            raise PeftlabError(f"{table.path}: no examples")
    return tables


# --- The columns that a task reads, and the recipe's keys that name them.
_BEFORE_CHOICES = ("context", "prompt")
# Looked for in this order where the recipe names none; the last three are the two texts of a pair.
_TEXT_NAMES = (
    *((name,) for name in ("text", "sentence", "content", "review", "document", "body", "message", "tweet")),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
)
_LABEL_NAMES = tuple((name,) for name in ("label", "labels", "class", "category", "target", "sentiment", "score"))


@dataclass(frozen=True)
class Columns:
    """Names the columns that a row is read from; a test split may lack the labels.

    Attributes:
        inputs, labels: column name to the recipe's key that names it, in the order in which they are read.
        found: the keys ``text`` and ``label`` that the recipe does not give, with the columns that stand for them.
    """

    inputs: Mapping[str, str]
    labels: Mapping[str, str]
    found: Mapping[str, list[str] | str] = field(default_factory=dict)

    def needed(self, split: str, table: Table) -> dict[str, str]:
        """Return the columns that a split's table must have, each with its key.

        Args:
            split: name of the split.
            table: its table, for the columns that it has.
        """
        unlabelled = split == "test" and not any(name in table.columns for name in self.labels)
        return {**self.inputs, **({} if unlabelled else self.labels)}


def text_columns(data: DataConfig, there: Collection[str]) -> Columns:
    """Return the columns of the text, or of the two texts of a pair, and of the label; those that are not named, found.

    Args:
        data: the recipe's data section.
        there: the file's columns.
    """
    return multilabel_columns(data.model_copy(update={"labels": None}), there)


def image_columns(data: DataConfig, there: Collection[str]) -> Columns:
    """Return the column of the images' paths, ``image`` by default, and that of their classes, ``label``.

    Args:
        data: the recipe's data section.
        there: the file's columns.
    """
    image, label = FOLDER_COLUMNS
    return _columns({data.image or image: "data.image"}, {data.label or label: "data.label"})


def multilabel_columns(data: DataConfig, there: Collection[str]) -> Columns:
    """Return the columns of the text or pair, and the column of label sets or a column of 0 and 1 for each label.

    Args:
        data: the recipe's data section.
        there: the file's columns.
    """
    text = data.text or _of_usual_names(there, _TEXT_NAMES, "text")
    labels = data.labels or [
        data.label or _of_usual_names([n for n in there if n not in text], _LABEL_NAMES, "label")[0]
    ]
    found: dict[str, list[str] | str] = {} if data.text else {"text": text}
    found |= {} if data.label or data.labels else {"label": labels[0]}
    sets = dict.fromkeys(labels, "data.labels" if data.labels else "data.label")
    return replace(_columns(dict.fromkeys(text, "data.text"), sets), found=found)


def _of_usual_names(there: Collection[str], usual: Sequence[Sequence[str]], key: str) -> list[str]:
    """Return the first of the ``usual`` columns that a file has; ``key`` of the ``data`` section names others.

    Exact names come first, then those in capitals or with blanks around them.
    """
    for spelt in ({name: name for name in there}, {name.strip().casefold(): name for name in there}):
        for names in usual:
            if all(name in spelt for name in names):
                return [spelt[name] for name in names]
    known = ", ".join(" and ".join(names) for names in usual)
    columns = _column_names(there)
    raise PeftlabError(f"data.{key}: missing, and no column has a usual name ({known}); columns: {columns}")


def word_columns(data: DataConfig, there: Collection[str]) -> Columns:
    """Return the column of words, ``tokens`` by default, and that of their tags, ``tags``.

    Args:
        data: the recipe's data section.
        there: the file's columns.
    """
    return _columns({(data.text or ["tokens"])[0]: "data.text"}, {data.label or "tags": "data.label"})


def choice_columns(data: DataConfig, there: Collection[str]) -> Columns:
    """Return the columns of the text before the choices, of the choices and of the label.

    Args:
        data: the recipe's data section.
        there: the file's columns: without ``data.text`` those of ``context`` and ``prompt`` that it has are the text.
    """
    before = data.text or [name for name in _BEFORE_CHOICES if name in there]
    inputs = dict.fromkeys(before, "data.text") | dict.fromkeys(data.choices or ["choices"], "data.choices")
    return _columns(inputs, {data.label or "label": "data.label"})


def chat_columns(data: DataConfig, there: Collection[str]) -> Columns:
    """Return the columns that the recipe names; others are recognised row by row.

    Args:
        data: the recipe's data section.
        there: the file's columns.
    """
    named = {"messages": data.messages, "prompt": data.prompt, "completion": data.completion}
    return _columns({name: f"data.{key}" for key, name in named.items() if name is not None}, {})


def completion_columns(data: DataConfig, there: Collection[str]) -> Columns:
    """Return the columns ``prompt`` and ``completion``, or what the recipe calls them.

    Args:
        data: the recipe's data section.
        there: the file's columns.
    """
    return _columns({data.prompt or "prompt": "data.prompt", data.completion or "completion": "data.completion"}, {})


def plain_columns(data: DataConfig, there: Collection[str]) -> Columns:
    """Return the column of texts, ``text`` by default.

    Args:
        data: the recipe's data section.
        there: the file's columns.
    """
    return _columns({(data.text or ["text"])[0]: "data.text"}, {})


def preference_columns(data: DataConfig, there: Collection[str]) -> Columns:
    """Return the columns of both answers, and of the prompt where the recipe names it.

    Args:
        data: the recipe's data section.
        there: the file's columns.
    """
    answers = dict.fromkeys(("chosen", "rejected"), "task text/preference")
    return _columns(({data.prompt: "data.prompt"} if data.prompt else {}) | answers, {})


def _columns(inputs: dict[str, str], labels: dict[str, str]) -> Columns:
    for name in labels:
        if name in inputs:
            raise PeftlabError(f"{labels[name]} {name!r} is also in {inputs[name]}; a model would read the answer")
    return Columns(inputs, labels)


# --- The values of a label column as class names, bins or numbers.
def numbers(table: Table, column: str, faults: list[Fault]) -> list[float]:
    """Return a column as numbers, NaN where a label is missing; other values are added to ``faults``.

    Args:
        table: the file.
        column: the label column.
        faults: receives what is wrong.
    """
    values = table.column(column, "data.label")
    found = [_number(value) for value in values]
    bad = [row for row, value in enumerate(values) if not (math.isfinite(found[row]) or is_missing(value))]
    if bad:
        first = values[bad[0]]
        comma = isinstance(first, str) and "," in first and math.isfinite(_number(first.replace(",", ".", 1)))
        advice = "; write a decimal point, no comma" if comma else ""
        faults += table.fault(column, f"is not a finite number ({quoted(first)}{advice})", bad)
    return found


def names(table: Table, column: str, faults: list[Fault]) -> list[str]:
    """Return a column as class names, empty where a label is missing; other values are added to ``faults``.

    A class is a string (blanks around it removed), an integer or a truth value.

    Args:
        table: the file.
        column: the label column.
        faults: receives what is wrong.
    """
    values = table.column(column, "data.label")
    found = [_name(value) for value in values]
    bad = [row for row, value in enumerate(values) if found[row] is None and not is_missing(value)]
    problem = "" if not bad else f"is no class but {quoted(values[bad[0]])}"
    faults += table.fault(column, f"{problem} (make classes with data.bins, or use text/regression)", bad)
    return [name or "" for name in found]


def bin_classes(values: Sequence[float], bins: Mapping[str, tuple[float | None, float | None]]) -> list[int | None]:
    """Return the position in ``bins`` of each value's bin, None where no bin contains it.

    Args:
        values: finite numbers.
        bins: class name to ``(lowest, highest)``, both inclusive, None for open; no two share a value.
    """
    edges = [(-math.inf if lo is None else lo, math.inf if hi is None else hi) for lo, hi in bins.values()]
    return [next((place for place, (low, high) in enumerate(edges) if low <= value <= high), None) for value in values]


def class_names_in_data(classes: Sequence[str], labels: Iterable[str]) -> tuple[str, ...]:
    """Return a model's classes as the data names them: LABEL_0, LABEL_1, ... are 0, 1, ... unless it has those.

    Args:
        classes: a model's class names in label order.
        labels: the labels that the data has.
    """
    unnamed = [f"LABEL_{place}" for place in range(len(classes))] == list(classes)
    if unnamed and not set(classes) & set(labels):
        return tuple(str(place) for place in range(len(classes)))
    return tuple(classes)


_ZEROS = re.compile(r"(?<=\d)\.0*$")


def label_indices(
    tables: Mapping[str, Table],
    column: str,
    labels: Mapping[str, Sequence[Sequence[str]]],
    known: Sequence[str] | None,
) -> tuple[dict[str, list[list[int]]], Sequence[str]]:
    """Return the labels of each table's rows as indices of the classes, and the classes' names.

    Where all labels are numbers, the text ``1.0`` is the class ``1``, as the number 1.0 is.

    Args:
        tables: the labelled tables by split.
        column: the label column.
        labels: labels by split, of each row.
        known: a trained model's classes; None: those of the training table, sorted, by value if all are numbers.

    Raises:
        PeftlabError: there is a single class, or labels are not in ``known``; both sets are listed.
    """
    every = {split: list(chain.from_iterable(found)) for split, found in labels.items()}
    if all(math.isfinite(_number(name)) for names in every.values() for name in names):
        whole = {name: name if name in (known or ()) else _ZEROS.sub("", name) for name in chain(*every.values())}
        labels = {split: [[whole[name] for name in names] for names in found] for split, found in labels.items()}
        every = {split: [whole[name] for name in names] for split, names in every.items()}
    if known is not None:
        classes, owner = class_names_in_data(known, chain.from_iterable(every.values())), "the model"
    else:
        there, owner = set(every["train"]), "the training data"
        if len(there) < 2:
            raise PeftlabError(
                f"{tables['train'].path}: column {column!r} contains a single class, {quoted(there.pop())}"
            )
        numeric = all(math.isfinite(_number(name)) for name in there)
        classes = tuple(sorted(there, key=(lambda name: (_number(name), name)) if numeric else None))

    def listing(names: Collection[str]) -> str:
        return f"{listed(map(quoted, sorted(names)), 50)} ({len(names)})"

    index = {name: place for place, name in enumerate(classes)}
    problems = []
    for split, found in labels.items():
        unknown = sorted(set(every[split]) - index.keys())
        if unknown:
            rows = [row for row, names in enumerate(found) if not index.keys() >= set(names)]
            hint = "" if math.isfinite(_number(unknown[0])) else did_you_mean(unknown[0], classes)
            problem = f"has labels that are not classes of {owner}, {quoted(unknown[0])}{hint},"
            faults = tables[split].fault(column, problem, rows)
            problems += [*map(str, faults), f"  this file's: {listing(set(every[split]))}"]
    if problems:
        raise PeftlabError("\n".join([*problems, f"  those of {owner}: {listing(classes)}"]))
    return {split: [[index[name] for name in names] for names in found] for split, found in labels.items()}, classes


def items(value: object, separator: str | None = None) -> list[str] | None:
    """Return the texts of a list: a list, its JSON text, or a text whose parts ``separator`` separates.

    Args:
        value: a cell of a table.
        separator: between the parts of a text, blanks around them removed; None: parts are separated by blanks.

    Returns:
        None where the value is nothing of that kind, or an item is empty or not valid text; or a list as Python
        writes it, in single quotes.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError):
            value = parse_json(value)
        if isinstance(value, str) and re.fullmatch(r"\s*\[\s*'.*'\s*\]\s*", value, re.DOTALL):
            return None
    if isinstance(value, str):
        value = value.split() if separator is None else [part.strip() for part in value.split(separator)]
    if not isinstance(value, list | tuple):
        return None
    texts = [item if isinstance(item, str) else _name(item) for item in value]
    good = [text for text in texts if text is not None and text.strip() and is_unicode(text)]
    return good if len(good) == len(texts) else None


def _name(value: object) -> str | None:
    """Return a label's class name, or None for a fraction or a value that cannot name a class."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else None
    if not isinstance(value, int | str) or not is_unicode(str(value)):
        return None
    number = _number(value)
    return str(value).strip() if not math.isfinite(number) or number.is_integer() else None


def is_missing(value: object) -> bool:
    """Return whether a text or label is absent: null, NaN or blank."""
    blank = isinstance(value, str) and not value.strip()
    return value is None or blank or (isinstance(value, float) and math.isnan(value))


def _number(value: object) -> float:
    """Return a label as a number, NaN if it is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def tables_read(task: Task, data: DataConfig) -> dict[str, tuple[Table, dict[str, str]]]:
    """Return the table of each split of the user's files, and the columns that it must have, each with its key.

    A document, whose paragraphs or lines are rows, has none.

    Args:
        task: the row of the table of tasks, not one of GLUE's.
        data: the recipe's ``data`` section, whose ``path`` is set.
    """
    files = split_files(str(data.path), () if task.labelled else (".txt",), images=task.image)
    with_columns = {split: file for split, file in files.items() if file.suffix != ".txt"}
    tables = split_tables(with_columns, data.validation, files)
    of: Callable[[DataConfig, Collection[str]], Columns] = resolve(task.columns)
    return {split: (table, of(data, table.columns).needed(split, table)) for split, table in tables.items()}
