"""Whatever a data file holds: a table or one error that names the file, in bounded memory and time."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import tracemalloc

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from peftlab.errors import PeftlabError
from peftlab.tasks.data import read_table

FUZZ = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
SUFFIXES = st.sampled_from(["csv", "tsv", "jsonl", "json", "parquet", "csv.gz", "tsv.gz", "jsonl.gz", "json.gz"])
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
CELLS = TEXT.filter(lambda text: "\r" not in text and "\n" not in text and "\t" not in text)


def refused(path):
    with pytest.raises(PeftlabError) as caught:
        read_table(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def read_whole(path):
    """Read every column; a refusal names the file."""
    try:
        table = read_table(path)
        columns = {name: table.columns[name] for name in table.columns}
    except PeftlabError as error:
        assert str(path) in str(error)
        return None
    assert all(len(values) == len(table) for values in columns.values())
    return columns


@FUZZ
@given(st.binary(max_size=200), SUFFIXES, st.booleans())
def test_any_bytes_are_a_table_or_an_error(tmp_path, content, suffix, pack):
    path = tmp_path / f"r.{suffix}"
    path.write_bytes(gzip.compress(content) if pack and suffix.endswith("gz") else content)
    read_whole(path)


@FUZZ
@given(st.data(), SUFFIXES)
def test_a_damaged_file_is_a_table_or_an_error(tmp_path, data, suffix):
    rows = [{"text": f"row {i}", "label": "ab"[i % 2]} for i in range(6)]
    content = written(rows, suffix)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content)))
        stop = data.draw(st.integers(place, min(len(content), place + 4)))
        content = content[:place] + data.draw(st.binary(max_size=4)) + content[stop:]
    path = tmp_path / f"r.{suffix}"
    path.write_bytes(content)
    read_whole(path)


def written(rows, suffix):
    """The rows in a format, by that format's own library."""
    kind, packed = suffix.removesuffix(".gz"), suffix.endswith(".gz")
    buffer = io.StringIO(newline="")
    if kind == "parquet":
        sink = io.BytesIO()
        parquet.write_table(pa.Table.from_pylist(rows), sink)
        return sink.getvalue()
    if kind == "csv":
        writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    elif kind == "tsv":
        buffer.write("\n".join("\t".join(map(str, row)) for row in [list(rows[0]), *(row.values() for row in rows)]))
    else:
        buffer.write(json.dumps(rows) if kind == "json" else "\n".join(map(json.dumps, rows)))
    content = buffer.getvalue().encode()
    return gzip.compress(content) if packed else content


@FUZZ
@given(st.lists(st.fixed_dictionaries({"text": CELLS, "label": CELLS}), min_size=1, max_size=6), SUFFIXES)
def test_every_character_comes_back(tmp_path, rows, suffix):
    if suffix.startswith("tsv"):  # a line without a character is no row there
        rows = [{"text": f"x{row['text']}", "label": row["label"]} for row in rows]
    path = tmp_path / f"r.{suffix}"
    path.write_bytes(written(rows, suffix))
    assert read_whole(path) == {key: [row[key] for row in rows] for key in ("text", "label")}


def test_a_gzip_bomb_is_refused_in_bounded_memory(tmp_path):
    member = gzip.compress(b"some words,label\n" * 2**16)
    path = tmp_path / "r.csv.gz"
    path.write_bytes(member * 1024)  # a GiB of text, member after member
    tracemalloc.start()
    try:
        message = refused(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "expand to more than" in message and "decompress the file yourself" in message
    assert peak < 2**29


def test_a_parquet_bomb_is_refused(tmp_path):
    path = tmp_path / "r.parquet"
    text = pa.DictionaryArray.from_arrays(pa.array([0] * 200, pa.int32()), pa.array(["x" * 2**20]))
    parquet.write_table(
        pa.table({"text": text, "label": ["a", "b"] * 100}), path, compression="zstd", store_schema=False
    )
    table = read_table(path)
    assert table.columns["label"] == ["a", "b"] * 100
    with pytest.raises(PeftlabError, match=r"r\.parquet: column 'text' expands to more than"):
        table.column("text", "data.text")


def test_objects_that_share_no_key_take_no_table_of_cells(tmp_path):
    n = 20_000  # 400 million cells
    path = tmp_path / "r.jsonl"
    path.write_text("".join(f'{{"k{i}": {i}}}\n' for i in range(n)))
    table = read_table(path)
    assert len(table) == len(table.columns) == n
    assert table.columns["k7"][6:9] == [None, 7, None]


@pytest.mark.parametrize("name", ["r.csv", "r.jsonl.gz", "r.parquet"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    assert "not a regular file" in refused(tmp_path / name)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / name).mkdir()
    assert "not a regular file" in refused(tmp_path / "d" / name)


def test_what_cannot_be_opened_is_named(tmp_path):
    (tmp_path / "loop.csv").symlink_to(tmp_path / "loop.csv")
    assert "cannot be read" in refused(tmp_path / "loop.csv")
    assert "no such file" in refused(tmp_path / "absent.csv")
    assert "cannot be read" in refused(tmp_path / f"{'n' * 300}.csv")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_named(tmp_path):
    (tmp_path / "r.csv").write_text("text,label\n")
    (tmp_path / "r.csv").chmod(0)
    assert "cannot be read" in refused(tmp_path / "r.csv")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("r.csv", "text,label\ncafé,a\n".encode("utf-16"), "is UTF-16, not UTF-8"),
        ("r.csv", "text,label\nx,a\ncafé,a\n".encode("latin-1"), "r.csv:3: not UTF-8"),
        ("r.csv", b"text,label\nx,a\ny\0,b\n", "r.csv:3: a NUL byte"),
        ("r.csv", b"text,label\nx,a\ny\nz,b\nq,b,b\n", "r.csv:3: 1 columns where 2 are expected; and 1 more bad rows (line 5)"),
        ("r.jsonl", b'{"a": 1}\nx\n[1]\n{"a"\n', "r.jsonl:2: not a JSON object"),
        ("r.jsonl", b'{"a": 1}\nx\n[1]\n{"a"\n', "and 2 more bad rows (line 3, 4)"),
        ("r.jsonl", b'{"a": %s}' % (b"9" * 4301), "r.jsonl:1: not a JSON object (an integer of more than 4,300 digits)"),
        ("r.json", b'[{"a": %s}]' % (b"9" * 4301), "an integer of more than 4,300 digits"),
        ("r.jsonl", b'{"a": 1}\n' + b"[" * 100_000, "r.jsonl:2: not a JSON object (nested too deeply)"),
        ("r.json", b'[{"a":' * 100_000, "nested too deeply"),
        ("r.json", b'[{"a": 1}, 2, null]', "r.json row 2: not a JSON object but 2; and 1 more bad rows (row 3)"),
        ("r.parquet", b"PAR1" + b"\xff" * 60 + b"PAR1", "not a readable Parquet file"),
    ],
)  # fmt: skip
def test_bad_content_is_told_with_its_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert message in refused(tmp_path / name)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_csv_is_separated_as_its_header_is(tmp_path, separator):
    """Spreadsheets of countries with a decimal comma write semicolons; commas and semicolons of texts stay theirs."""
    rows = [{"a text": 'he said "no", then\nleft; alas', "label": "x"}, {"a text": "a\tb", "label": "y, z"}]
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL):
        with (tmp_path / "r.csv").open("w", encoding="utf-8-sig", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter=separator, quoting=quoting)
            writer.writeheader()
            writer.writerows(rows)
        assert read_whole(tmp_path / "r.csv") == {name: [row[name] for row in rows] for name in rows[0]}


def test_a_header_with_a_comma_is_separated_by_commas(tmp_path):
    (tmp_path / "r.csv").write_text('a;b,"c;d"\n1;2,3\n', encoding="utf-8")
    assert read_whole(tmp_path / "r.csv") == {"a;b": ["1;2"], "c;d": ["3"]}
    (tmp_path / "r.csv").write_text("text\na; b\n", encoding="utf-8")
    assert read_whole(tmp_path / "r.csv") == {"text": ["a; b"]}
