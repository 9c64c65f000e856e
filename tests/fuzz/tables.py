"""Rows of data files, read without the csv module and without peftlab's readers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any


def rows(path: Path) -> list[dict[str, Any]]:
    """Return a file's rows as mappings of column to value."""
    if path.suffix == ".parquet":
        from pyarrow import parquet

        return parquet.read_table(str(path)).to_pylist()
    content = path.read_bytes()
    name = path.name
    if name.endswith(".gz"):
        content, name = gzip.decompress(content), name[:-3]
    text = content.decode("utf-8").removeprefix("\ufeff")
    if name.endswith(".json"):
        return json.loads(text)
    if name.endswith(".jsonl"):
        return [json.loads(line) for line in text.split("\n") if line.strip("\r")]
    if name.endswith(".tsv"):
        table = [line.removesuffix("\r").split("\t") for line in text.split("\n") if line.removesuffix("\r")]
    else:
        table = _csv(text)
    header, *body = table
    return [dict(zip(header, fields, strict=True)) for fields in body]


def _csv(text: str) -> list[list[str]]:
    """RFC 4180, character by character; a line without any character is no row."""
    table: list[list[str]] = []
    row: list[str] = []
    field, quoted, was_quoted, at = "", False, False, 0
    while at < len(text):
        character = text[at]
        if quoted:
            if character == '"' and text[at + 1 : at + 2] == '"':
                field, at = field + '"', at + 1
            elif character == '"':
                quoted = False
            else:
                field += character
        elif character == '"' and not field and not was_quoted:
            quoted = was_quoted = True
        elif character == ",":
            row, field, was_quoted = [*row, field], "", False
        elif character in "\r\n":
            if row or field or was_quoted:
                table.append([*row, field])
            row, field, was_quoted = [], "", False
        else:
            field += character
        at += 1
    if row or field or was_quoted:
        table.append([*row, field])
    return table
