"""The safetensors format, read and written tensor by tensor: 8 bytes of header length, a JSON header, the data.

The reader checks everything in a header against the file before any data is used; each mistake is an error that
names file and key.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import torch

from peftlab.errors import PeftlabError, reason
from peftlab.files import Json, open_regular, parse_json, read_object

MAX_HEADER = 100_000_000  # bytes; the format's own limit

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn, "U16": torch.uint16, "I16": torch.int16, "F16": torch.float16,
    "BF16": torch.bfloat16, "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32, "C64": torch.complex64,
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64,
}  # fmt: skip
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}
# The order in which safetensors' own writer lays tensors out: widest first, then by name.
_ORDER = (
    "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64",
    "U64",
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its dtype's name, its shape and the offset of its first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return a safetensors file's entries by key, in file order, and its metadata.

    Raises:
        PeftlabError: the file is missing, truncated or longer than its tensors; the header is longer than the
            file or not JSON; a key occurs twice; a dtype is unknown; offsets overlap, leave holes, are outside the
            file or do not fit dtype and shape.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8:
                raise PeftlabError(f"{path}: truncated; {size} bytes are too few for a safetensors header")
            if length > MAX_HEADER or 8 + length > size:
                raise PeftlabError(f"{path}: header of {length} bytes is longer than the file ({size} bytes)")
            text = file.read(length)
    except OSError as error:
        raise PeftlabError(f"{path}: {reason(error)}") from None
    raw = _parse(path, text)
    metadata = raw.pop("__metadata__", {})
    if not _texts(metadata):
        raise PeftlabError(f"{path}: __metadata__ is not a map of strings")
    return _entries(path, raw, 8 + length, size), metadata


def _parse(path: Path, text: bytes) -> dict[str, Json]:
    def unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        found: dict[str, Json] = {}
        for key, value in pairs:
            if key in found:
                raise PeftlabError(f"{path}: duplicate key {key!r} in the header")
            found[key] = value
        return found

    try:
        raw = parse_json(text.decode("utf-8"), unique)
        json.dumps(raw, ensure_ascii=False).encode("utf-8")  # a key may contain half a surrogate pair
    except ValueError as error:
        raise PeftlabError(f"{path}: the header is not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise PeftlabError(f"{path}: the header is not a JSON object")
    return raw


def _entries(path: Path, raw: Mapping[str, Json], data: int, size: int) -> dict[str, Entry]:
    spans: list[tuple[int, int, str, Entry]] = []
    for key, value in raw.items():
        where = f"{path}: {key!r}"
        if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
            raise PeftlabError(f"{where}: an entry must have exactly dtype, shape and data_offsets")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise PeftlabError(f"{where}: unknown dtype {dtype!r}")
        if not _naturals(shape):
            raise PeftlabError(f"{where}: shape {shape!r} is not a list of sizes")
        if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise PeftlabError(f"{where}: data_offsets {offsets!r} are not a begin and an end")
        begin, end = offsets
        if data + end > size:
            raise PeftlabError(f"{where}: ends at byte {data + end}, the file has {size}: truncated or out of range")
        entry = Entry(dtype, tuple(shape), data + begin)
        if entry.nbytes != end - begin:
            raise PeftlabError(f"{where}: {dtype} {shape} takes {entry.nbytes} bytes, data_offsets span {end - begin}")
        spans.append((begin, end, key, entry))
    spans.sort(key=lambda span: span[:3])
    position = 0
    for begin, end, key, _ in spans:
        if begin != position:
            kind = "overlaps the tensor before it" if begin < position else "leaves a hole before it"
            raise PeftlabError(f"{path}: {key!r}: begins at {begin}, {kind} (expected {position})")
        position = end
    if data + position != size:
        raise PeftlabError(f"{path}: {size - data - position} extra bytes after the last tensor")
    return {key: entry for _, _, key, entry in spans}


def _texts(value: object) -> TypeGuard[dict[str, str]]:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def layout(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, Entry]]:
    """Return the head of a new file (length and JSON header) and where each tensor goes in it.

    Args:
        tensors: dtype name and shape by key.
        metadata: texts to put into the header beside ``format: pt``.

    Order, spacing and metadata are those of safetensors' own writer for transformers, so that equal tensors
    make equal files.
    """
    order = sorted(tensors, key=lambda key: (-_ORDER.index(tensors[key][0]), key.encode()))
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    begins: dict[str, int] = {}
    position = 0
    for key in order:
        dtype, shape = tensors[key]
        end = position + Entry(dtype, shape, 0).nbytes
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        begins[key], position = position, end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {key: Entry(*tensors[key], len(head) + begin) for key, begin in begins.items()}


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a whole file: the same tensors and metadata give the same bytes.

    (The safetensors package writes its metadata in an order that differs from run to run.)
    """
    plain = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    head, entries = layout({key: (NAMES[t.dtype], tuple(t.shape)) for key, t in plain.items()}, metadata)
    with open(path, "wb") as file:
        file.write(head)
        for key in entries:
            file.write(plain[key].flatten().view(torch.uint8).numpy().data)


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return a whole file's tensors by key, and its metadata; errors as in ``read_header``."""
    entries, metadata = read_header(path)
    with open_regular(path) as file:
        tensors = {}
        for key, entry in entries.items():
            file.seek(entry.offset)
            raw = torch.empty(entry.nbytes, dtype=torch.uint8)
            if file.readinto(raw.numpy()) != entry.nbytes:  # type: ignore[attr-defined]
                raise PeftlabError(f"{path}: {key!r}: the file ended while it was read")
            tensors[key] = raw.view(DTYPES[entry.dtype]).view(entry.shape)
    return tensors, metadata


def map_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return a whole file's tensors by key, each read from the disk where it is used; errors as in ``read_header``.

    What is written to them stays in memory: the file does not change.
    """
    entries, _ = read_header(path)
    with open_regular(path) as file:
        whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return {
        key: torch.frombuffer(whole, dtype=DTYPES[e.dtype], count=e.numel, offset=e.offset).view(e.shape)
        for key, e in entries.items()
    }


def shard_names(directory: Path, index_name: str) -> list[str]:
    """Return the names of the shards that an index file lists, sorted.

    Raises:
        PeftlabError: the index is malformed, points outside ``directory``, or names a missing shard.
    """
    path = directory / index_name
    weight_map = _weight_map(path)
    if not weight_map:
        raise PeftlabError(f"{path}: has no weight_map")
    names = set()
    for key, name in weight_map.items():
        if not isinstance(name, str) or name != os.path.basename(name) or name in ("", ".", "..") or "\\" in name:
            raise PeftlabError(f"{path}: {key!r} points to {name!r}, which is not a file name inside the directory")
        if not (directory / name).is_file():
            raise PeftlabError(f"{path}: {key!r} is in {name}, which is missing")
        names.add(name)
    return sorted(names)


def check_index(directory: Path, index_name: str, found: Mapping[str, Iterable[str]]) -> None:
    """Check that each key of an index is in the shard it names (``found``: keys by shard)."""
    path = directory / index_name
    keys = {name: set(names) for name, names in found.items()}
    for key, name in _weight_map(path).items():
        if key not in keys[str(name)]:
            raise PeftlabError(f"{path}: {key!r} is not in {name}")


def _weight_map(path: Path) -> dict[str, Json]:
    weight_map = read_object(path).get("weight_map")
    return weight_map if isinstance(weight_map, dict) else {}
